"""The Markdown pages: their code blocks, headings and links. `python -m tests.docs.pages` counts the blocks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs/figures/README.md",
]
ELSEWHERE = [ROOT / "CHANGELOG.md", ROOT / "benchmarks/RESULTS.md", ROOT / "src/wpr/pico/README.md"]
COMMANDS = (
    "wpr",
    "pip",
    "make",
    "python",
    "accelerate",
    "hf",
    "export",
    "transformers",
    "vllm",
    "VLLM_SERVER_DEV_MODE=1",
)
"""What a block of a shell begins with, where the fence does not say."""


@dataclass(frozen=True)
class Block:
    """A fenced block. kind: ``python``, ``bash``, ``yaml``, ``json`` or ``text``; line: of its first line of code."""

    page: str
    line: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    found, start, kind, lines = [], 0, "", page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*```(.*)", line)
        if fence is None:
            continue
        if not start:
            start, kind = number + 1, fence[1].strip()
        else:
            code = "\n".join(lines[start - 1 : number - 1]) + "\n"
            first = code.split(maxsplit=1)[0] if code.split() else ""
            found.append(Block(name_of(page), start, kind or ("bash" if first in COMMANDS else "text"), code))
            start = 0
    assert not start, f"{name_of(page)}: the block at line {start} does not end"
    return tuple(found)


def all_blocks(kind: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.kind == kind]


@cache
def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^\s*```.*?^\s*```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings, as code hosts and the site make them."""
    found: Counter[str] = Counter()
    slugs = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        slugs.append(slug if not found[slug] else f"{slug}-{found[slug]}")
        found[slug] += 1
    return frozenset(slugs)


if __name__ == "__main__":
    from tests.docs.test_shell_blocks import NOT_RUN, SHOWN

    for what, count in Counter(block.kind for page in PAGES for block in blocks(page)).items():
        print(f"{what:8} {count} blocks")
    print(f"commands {len(SHOWN)} lines of shell, {len(NOT_RUN)} of them neither run nor parsed")
