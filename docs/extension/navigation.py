"""The order of the site's pages, and links that leave docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {"start": "Install and first steps"},
    "Guides": {
        "choosing": "Choosing a regularizer",
        "recipes": "Recipes",
        "data": "Your own data",
        "rewards": "Rewards",
        "rewriting": "Rewriting",
        "code-rewards": "Code rewards",
        "trl": "TRL",
        "verl": "verl",
        "many-gpus": "Many GPUs",
        "generation-back-ends": "Generation back ends",
        "generation": "Responses, pass@1, MT-Bench",
        "judging": "Judging",
        "evaluation": "Win rates, diversity, monitors",
        "analysis": "Analyses",
        "report": "Reports",
        "runs": "Runs in Python",
        "publishing": "Hub and trackers",
    },
    "Concepts": {
        "numerics": "Numerics and geometry",
        "ppo": "PPO",
        "kernels": "Kernels",
        "architecture": "Architecture",
    },
    "Reference": {
        "reference/api": "Python API",
        "reference/settings": "Recipe settings",
        "reference/trainer-settings": "Trainer settings",
        "reference/commands": "Commands",
    },
    "Results": {"results": "Results", "project/benchmark-results": "Benchmarks"},
    "Reproduce": {"reproduce": "The paper's tables", "figures/README": "Figures of these pages"},
    "Project": {
        "project/changelog": "Changelog",
        "project/contributing": "Contributing",
        "project/wpr-pico": "wpr-pico, the model in the package",
        "licences": "Origins and licences",
    },
}
"""Headings of the navigation, and the pages under each with their short titles. A page that is not there is left out,
so that it can be written later; one that is there and not here fails the build.
"""

OUTSIDE = {
    "benchmarks/RESULTS.md": "project/benchmark-results",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "src/wpr/pico/README.md": "project/wpr-pico",
}
"""Files elsewhere in the repository that are pages of the site. It has no README.md: its front page says the same."""

LINK = re.compile(r"(\]\()([^)\s#:]+\.md)((?:#[^)\s]*)?\))")


def pages(root: Path) -> dict[str, str]:
    """The pages of `OUTSIDE`, by the file that each is written to under docs/."""
    return {f"{page}.md": (root / file).read_text(encoding="utf-8") for file, page in OUTSIDE.items()}


def complete(app: Any, name: str, source: list[str]) -> None:
    """Put the navigation on the front page, and lead links to files that are elsewhere to their pages."""
    docs = Path(app.srcdir)
    source[0] = with_links(source[0], name)
    if name == app.config.root_doc:
        source[0] += "\n\n" + toctrees(docs)


def with_links(text: str, name: str) -> str:
    """A page whose links are those of the site; ``name``: its own there."""
    files = {page: file for file, page in OUTSIDE.items()}
    folder = Path(files.get(name, f"docs/{name}.md")).parent

    def lead(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[2])).as_posix()
        page = OUTSIDE.get(
            target, "index" if target == "README.md" else target.removeprefix("docs/").removesuffix(".md")
        )
        return f"{match[1]}{os.path.relpath(f'{page}.md', Path(name).parent)}{match[3]}"

    return LINK.sub(lead, text)


def toctrees(docs: Path) -> str:
    """The navigation, of the pages that are there, as MyST has it."""
    parts = []
    for caption, titles in NAVIGATION.items():
        there = [name for name in titles if any((docs / f"{name}{suffix}").is_file() for suffix in (".md", ".rst"))]
        if there:
            entries = [f"{titles[name]} <{name}>" for name in there]
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]))
    return "\n\n".join(parts)
