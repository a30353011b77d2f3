"""Every link of the pages leads to a file, every anchor to a heading, every section named by number is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ELSEWHERE, PAGES, ROOT, anchors, blocks, name_of, prose

MADE_AT_BUILD = re.compile(r"reference/[\w-]+\.(md|rst)$")
"""Pages that `make docs` makes; tests/docs/test_reference.py holds what is linked against them."""

LINK = re.compile(r"\]\(([^)\s]+)\)")


def faults(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://", target) or MADE_AT_BUILD.match(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            found.append(f"there is no {target}")
        elif anchor and anchor not in anchors(file):
            found.append(f"{file.name} has no #{anchor}; it has {', '.join(sorted(anchors(file)))}")
    for path, sections in re.findall(r"\]\(([\w/.-]+\.md)\),\s+sections? (\d+(?:(?:, | and )\d+)*)", prose(page)):
        headings = re.findall(r"^## (\d+)\.", (page.parent / path).read_text(encoding="utf-8"), re.M)
        found += [f"{path} has no section {one}" for one in re.findall(r"\d+", sections) if one not in headings]
    return found


@pytest.mark.parametrize("page", [*PAGES, *ELSEWHERE], ids=name_of)
def test_links(page: Path) -> None:
    assert not faults(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A\n\n## 1. One & more\n\n[x](b.md) [y](#one) [z](a.md#1-one--more) [a](a.md), section 2\n"
    )
    found = faults(tmp_path / "a.md")
    assert [one.split(";")[0] for one in found] == ["there is no b.md", "a.md has no #one", "a.md has no section 2"]


def test_pages_that_the_code_names() -> None:
    """Errors and docstrings send readers to pages."""
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml"), *PAGES]:
        for name in re.findall(r"\bdocs/([\w-]+\.md)\b", file.read_text(encoding="utf-8")):
            assert (ROOT / "docs" / name).is_file(), f"{file} names docs/{name}"


def test_every_fence_says_what_it_is() -> None:
    for page in PAGES:
        assert not re.search(r"\n\n    (wpr|pip|make|python) ", prose(page)), (
            f"{page}: fence commands, so that they are tested"
        )
        for block in blocks(page):
            assert block.kind in ("python", "bash", "yaml", "json", "text"), f"{block}: ```{block.kind}"


def test_every_figure_is_shown_and_has_its_command() -> None:
    """docs/figures/README.md has a row per figure, with the command that makes it or the word that there is none."""
    folder = ROOT / "docs" / "figures"
    figures = {path.name for path in folder.iterdir() if path.suffix in (".svg", ".png")}
    listed = re.findall(r"^\| `([\w.-]+)` \| .+ \| .+ \|$", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(figures)
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert figures <= set(re.findall(r"figures/([\w.-]+)\)", text))
