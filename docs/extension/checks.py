"""Checks of the finished site, and its size in one line: every link leads somewhere, nothing comes from a network, and
every page has a way back to the front page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class SiteError(Exception):
    """What is wrong with the finished site."""


class Page(HTMLParser):
    """A page's links, anchors, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given or (tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload")):
            self.loaded.append(given.get("src") or given.get("href", ""))


def check(app: Any, error: Exception | None) -> None:
    """Called by Sphinx when all pages are written."""
    if error is not None or app.builder.format != "html":
        return
    pages, links, faults = inspect_site(Path(app.outdir), f"{app.config.root_doc}.html")
    if faults:
        raise SiteError("\n".join(faults))
    print(f"{pages} pages in {os.path.relpath(app.outdir)}; {links} links within the site, all lead somewhere")


def inspect_site(folder: Path, front: str = "index.html") -> tuple[int, int, list[str]]:
    """How many pages and links between them there are, and what is wrong."""
    pages = {
        path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html") if "_static" not in path.parts
    }
    links, faults = 0, []
    for path, page in sorted(pages.items()):
        name = path.relative_to(folder).as_posix()
        targets = set()
        for target, anchor in _within(path, [*page.links, *page.loaded]):
            links += 1
            targets.add(target)
            if not target.is_file():
                faults.append(f"{name}: there is no {os.path.relpath(target, folder)}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                faults.append(f"{name}: {os.path.relpath(target, folder)} has no #{anchor}")
        if name != front and folder / front not in targets:
            faults.append(f"{name}: no link to the front page")
        faults += [f"{name}: loads {one}" for one in page.loaded if urlsplit(one).scheme in ("http", "https")]
    return len(pages), links, faults


def _within(path: Path, links: list[str]) -> Iterator[tuple[Path, str]]:
    """Links to files of the site, with their anchors."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc and link != "#":
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            yield target, unquote(parts.fragment)
