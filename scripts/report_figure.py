"""docs/figures/report.png: parts of a report's page in one picture.

    wpr quickstart
    python scripts/report_figure.py runs/quickstart/report.html docs/figures/report.png

How much of the meaning is left and sentences side by side, and below them the token view as the page opens it. Needs
Chromium and the package `playwright`.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SENTENCES = 2
"""Held-out sentences that are shown, the first of the page."""

LEAVE = """(sentences) => {
  for (const node of document.querySelectorAll('body > :not(main), main > :not(section)')) node.remove();
  for (const node of document.querySelectorAll('section')) if (!['wording', 'tokens'].includes(node.id)) node.remove();
  const headings = [...document.querySelectorAll('#wording h3, #wording h4')];
  const meaning = headings.find((node) => node.textContent.startsWith('How much'));
  while (meaning.previousElementSibling) meaning.previousElementSibling.remove();
  [...document.querySelectorAll('#wording article')].slice(sentences).forEach((node) => node.remove());
  headings.filter((node) => node.textContent.startsWith('What policies')).forEach((node) => node.remove());
  for (const node of document.querySelectorAll('#wording .instead, #wording .note, details')) node.remove();
}"""


def main(page_file, picture, width=1100, height=1480):
    """Make the picture."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(Path(page_file).resolve().as_uri())
        page.wait_for_selector("#tokens .inspector")
        page.evaluate(LEAVE, SENTENCES)
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
