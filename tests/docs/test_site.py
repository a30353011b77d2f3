"""The built site in a real browser: `pytest -m slow tests/docs/test_site.py`, after `make docs` has set up Sphinx.

WPR_SCREENSHOTS=FOLDER keeps screenshots.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.extension.checks import inspect_site
from tests.docs.pages import ROOT

WIDTHS = {1280: 900, 390: 844}
LOOKED_AT = (
    "index", "start", "trl", "recipes", "results", "numerics", "many-gpus", "reference/api-regularizers",
    "reference/settings", "reference/trainer-settings", "reference/command-judge", "project/changelog",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        folder / "cache",
        "docs",
        folder / "site",
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "all lead somewhere" in built.stdout
    return folder / "site"


@pytest.mark.slow
@pytest.mark.needs("sphinx", "chromium")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_screen(site: Path, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, offline=True)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(request.url))
    every = sorted(path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html"))
    assert {*LOOKED_AT} <= {*every}
    for name in every:
        page.goto((site / f"{name}.html").as_uri())
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{name} is {over} pixels wider than {width}"
        assert page.locator("a[href$='index.html'], a[href='#']").count() > 0, f"{name}: no way back"
        if (folder := os.environ.get("WPR_SCREENSHOTS")) and name in LOOKED_AT:
            page.screenshot(path=Path(folder) / f"{name.replace('/', '-')}-{width}-{scheme}.png")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark.removeprefix("rgb(").rstrip(")").split(","))) < 200) == (scheme == "dark"), dark
    context.close()
    assert not faults


@pytest.mark.slow
@pytest.mark.needs("sphinx", "chromium")
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("kill", "many-gpus.html"),
        ("TokenGeometry", "reference/api-geometry.html"),
        ("bad_rows", "reference/settings.html"),
        ("both-orders", "reference/command-judge.html"),
    ],
)
def test_search_without_a_network(site: Path, browser: Any, query: str, page: str) -> None:
    context = browser.new_context(offline=True)
    tab = context.new_page()
    faults: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.goto((site / "index.html").as_uri())
    tab.fill("input[name=q]", query)
    tab.press("input[name=q]", "Enter")
    tab.wait_for_selector("#search-results ul.search li a")
    tab.wait_for_function("document.querySelector('.search-summary')?.textContent.includes('finished')")
    found = tab.eval_on_selector_all("#search-results ul.search li a", "all => all.map(a => a.getAttribute('href'))")
    context.close()
    assert not faults
    assert any(one.split("?")[0].split("#")[0] == page for one in found), found


def test_a_broken_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="a.html#there">a</a> <a href="b.html">b</a> <h1 id="top"></h1>')
    (tmp_path / "a.html").write_text('<a href="index.html#top">up</a> <script src="https://x.org/y.js"></script>')
    (tmp_path / "c.html").write_text("<p>lost</p>")
    pages, links, faults = inspect_site(tmp_path)
    assert (pages, links) == (3, 3)
    assert faults == [
        "a.html: loads https://x.org/y.js",
        "c.html: no link to the front page",
        "index.html: a.html has no #there",
        "index.html: there is no b.html",
    ]
