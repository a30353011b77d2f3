"""The report in a real Chromium: no errors, no requests, every section, the token view by mouse and by keyboard.

Needs Debian's `chromium` and the package `playwright` (which then needs no browser of its own).
WPR_SCREENSHOTS=FOLDER keeps screenshots.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.reading import SECTIONS
from tests.report.rewriting_run import write_rewriting
from tests.report.run_folder import write_run
from tests.report.some_findings import figures, write_findings
from tests.report.test_broken_runs import spoil
from wpr.report import write_report

pytestmark = pytest.mark.needs("chromium")
WIDTHS = {1280: 900, 390: 844}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = write_run(folder / "stories", prompts=9)
    write_findings(run)
    write_report([run], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def rewriting_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewriting")
    write_report([write_rewriting(folder / "rewrite")], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a file; at the end there must have been no error, and no request but the one for the file."""
    contexts, faults = [], []

    def open_file(path: Path, width: int = 1280, scheme: str = "light", **more: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        address = path.as_uri()
        page.on("console", lambda message: faults.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                faults.append(f"request: {request.url}") if request.url not in (address, "data:,") else None
            ),
        )
        page.goto(address)
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert faults == []


def test_every_section_is_there_and_filled(visit: Any, page_file: Path) -> None:
    page = visit(page_file)
    for section in SECTIONS:
        box = page.locator(f"section#{section}")
        assert box.is_visible(), section
        assert box.locator("h2").inner_text()
        assert len(box.locator("p.lead").inner_text()) > 40, section
    assert page.locator("#training svg.chart").count() == 7
    assert page.locator("#frontier svg.chart").count() == 5
    assert page.locator("#wins .row:not(.last)").count() == 12
    assert page.locator("#findings svg.plot[role=img]").count() == len(figures()) + 1
    assert page.locator("nav a").count() == len(SECTIONS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("file", ["page_file", "rewriting_page"])
def test_looks(visit: Any, request: pytest.FixtureRequest, file: str, width: int, scheme: str) -> None:
    page = visit(request.getfixturevalue(file), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for details in page.locator("details").all():
        details.evaluate("node => { node.open = true }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "with all tables open"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")
    poor = page.evaluate(POOR_CONTRAST)
    assert poor == [], f"text below 4.5:1 against what is behind it: {poor[:5]}"
    # Text of charts is drawn no smaller than can be read.
    small = page.evaluate(
        """() => [...document.querySelectorAll('svg text')].map((text) => text.getBoundingClientRect().height)
               .filter((height) => height > 0 && height < 9.5)"""
    )
    assert small == []
    if "WPR_SCREENSHOTS" in os.environ:
        folder = Path(os.environ["WPR_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        for details in page.locator("details").all():
            details.evaluate("node => { node.open = false }")
        page.screenshot(path=folder / f"{file}-{width}-{scheme}.png", full_page=True)


POOR_CONTRAST = r"""() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, bottom) => top.slice(0, 3).map((value, i) => value * top[3] + bottom[i] * (1 - top[3]));
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((bottom, layer) => over(layer, bottom), [255, 255, 255]);
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.closest('script, style, :disabled')) continue;
    const style = getComputedStyle(node);
    const back = behind(node);
    const ink = over(rgba(node.closest('svg') ? style.fill : style.color), back);
    const [light, dark] = [luminance(ink), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) found.push(`${walk.currentNode.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


def test_a_click_on_a_token_opens_its_distributions_and_plan(visit: Any, page_file: Path) -> None:
    page = visit(page_file)
    study = json.loads(page.locator("script#data").inner_text())["studies"][0]
    moved = [token["moved"] for token in study["tokens"]]
    number = moved.index(sorted(moved)[-2])  # the one with the most is open from the start
    assert page.locator(".inspector").get_attribute("data-number") == str(moved.index(max(moved)))
    token = page.locator(f".strip[data-penalty=wpr] .token[data-number='{number}']")
    token.click()
    assert token.get_attribute("aria-selected") == "true"
    assert page.locator("[aria-selected=true]").count() == 2, "the same token under both penalties"
    panel = page.locator(".inspector")
    assert panel.get_attribute("data-number") == str(number)
    expected = study["tokens"][number]
    assert expected["text"].strip() in panel.locator("h3").inner_text()
    assert panel.locator(".pairs .word").count() == len(expected["candidates"])
    words = panel.locator(".pairs .word").all_inner_texts()
    assert [word.replace("␣", " ") for word in words] == [text for text, _, _ in expected["candidates"]]
    assert panel.locator(".flow path").count() == len(expected["plan"])
    assert panel.locator(".flow path.moves").count() > 0
    panel.locator(".plan summary").click()
    assert panel.locator(".plan tbody tr").count() == len(expected["plan"])
    assert panel.locator(".nearest tbody tr").count() == len(expected["nearest"])
    widths = panel.locator(".pairs rect.ours").evaluate_all("nodes => nodes.map((node) => node.getBBox().width)")
    probabilities = [ours for _, ours, _ in expected["candidates"]]
    assert widths.index(max(widths)) == probabilities.index(max(probabilities))
    panel.locator("button").click()
    assert page.locator(".inspector").count() == 0
    assert token.evaluate("node => node.getAttribute('aria-selected')") == "true"


def test_the_keyboard_alone_reaches_and_opens_a_token(visit: Any, page_file: Path) -> None:
    page = visit(page_file)

    def focused(expression: str) -> Any:
        return page.evaluate(f"(() => {{ const node = document.activeElement; return {expression}; }})()")

    for _ in range(120):
        page.keyboard.press("Tab")
        if focused("node.classList.contains('token')"):
            break
    else:
        pytest.fail("no token was reached by the Tab key")
    first = focused("Number(node.dataset.number)")
    page.keyboard.press("Escape")
    assert page.locator(".inspector").count() == 0
    assert focused("Number(node.dataset.number)") == first
    page.keyboard.press("Home")
    assert focused("node.dataset.number") == "0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert focused("node.dataset.number") == "1"
    assert page.locator(".inspector").count() == 0, "moving opens nothing"
    page.keyboard.press("Enter")
    assert page.locator(".inspector").get_attribute("data-number") == "1"
    page.keyboard.press("ArrowRight")
    assert page.locator(".inspector").get_attribute("data-number") == "2", "an open panel follows"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    last = page.locator(".strip[data-penalty=kl] .token").count() - 1
    assert focused("Number(node.dataset.number)") == last
    page.keyboard.press("ArrowUp")
    assert focused("Number(node.dataset.number)") < last
    page.keyboard.press("Tab")
    assert focused("node.closest('.strip').dataset.penalty") == "wpr", "one stop a strip"
    page.keyboard.press("Tab")
    assert focused("node.textContent") == "Close"


def test_the_token_view_opens_at_a_replaced_word(visit: Any, tmp_path: Path) -> None:
    sentences = ["She sang all day.", "The big dog ran home."]
    write_report([write_rewriting(tmp_path / "rewrite", sentences=sentences)], tmp_path / "report.html")
    page = visit(tmp_path / "report.html")
    assert page.locator("#token-view select").input_value() == page.locator("#token-view").get_attribute("data-first")
    assert page.locator("#token-view .prompt").inner_text() == sentences[1]


@pytest.mark.parametrize("shown", ["both", "wpr"])
def test_a_replaced_word_opens_its_token(visit: Any, rewriting_page: Path, shown: str) -> None:
    page = visit(rewriting_page)
    page.locator(f"#token-view button[data-penalty={shown}]").click()
    word = page.locator(".rewrite a", has_text="glad")
    study, number = int(word.get_attribute("data-study")), word.get_attribute("data-token")
    at_first = page.locator("#token-view select").input_value()
    assert at_first != str(study)
    word.click()
    tokens = json.loads(page.locator("script#data").inner_text())["studies"][study]["tokens"]
    assert tokens[int(number)]["text"] == " gl"
    assert page.locator("#token-view select").input_value() == str(study)
    assert page.locator(".inspector").get_attribute("data-number") == number
    assert "gl" in page.locator(".inspector h3").inner_text()
    focused = page.evaluate("(({dataset, textContent}) => [dataset.number, textContent])(document.activeElement)")
    assert focused == [number, "gl"], "the keyboard goes on from there"
    page.wait_for_function(
        """() => { const place = document.activeElement.getBoundingClientRect();
                   return place.top > 40 && place.bottom < innerHeight; }"""
    )
    page.go_back()
    page.wait_for_function("() => !location.hash")
    linked = page.locator(".instead a", has_text="large")
    linked.focus()
    page.keyboard.press("Enter")
    assert page.locator(".inspector").get_attribute("data-number") == linked.get_attribute("data-token")


def test_another_response_and_one_penalty_alone(visit: Any, page_file: Path) -> None:
    page = visit(page_file)
    page.locator("#token-view select").select_option("4")
    study = json.loads(page.locator("script#data").inner_text())["studies"][4]
    tokens = page.locator(".strip[data-penalty=kl] .tokens")
    assert tokens.inner_text().split() == "".join(token["text"] for token in study["tokens"]).split()
    page.locator("#token-view button", has_text="WPR").click()
    assert not page.locator(".strip[data-penalty=kl]").is_visible()
    assert page.locator(".strip[data-penalty=wpr]").is_visible()


def test_a_chart_tells_its_values(visit: Any, page_file: Path) -> None:
    page = visit(page_file)
    lines = json.loads(page.locator("script#data").inner_text())["charts"]["curve-kl"]["lines"]
    page.locator("#curve-kl").hover()
    tip = page.locator(".tip")
    assert tip.inner_text().split()[0] == "step"
    page.mouse.move(0, 0)
    assert tip.count() == 0
    page.locator("#curve-kl").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    words = tip.inner_text().replace("\N{MINUS SIGN}", "-").split()
    assert words[:2] == ["step", "2"]
    message = dict(zip(words[2::2], words[3::2], strict=True))
    for line in lines:
        assert float(message[line["name"]]) == pytest.approx(line["points"][1][1], rel=0.01)
    page.keyboard.press("Escape")
    assert tip.count() == 0


def test_responses_are_paged(visit: Any, page_file: Path) -> None:
    page = visit(page_file)
    shown = page.locator(".exchange:visible h3")
    assert shown.all_inner_texts() == ["Prompt 1", "Prompt 2"]
    page.locator("#responses button", has_text="Next").click()
    assert shown.all_inner_texts() == ["Prompt 3", "Prompt 4"]
    page.locator("#responses select").select_option("8")
    assert shown.all_inner_texts() == ["Prompt 9"]
    assert page.locator("#responses button", has_text="Next").is_disabled()
    assert page.locator(".exchange:visible .card h4").all_inner_texts() == ["SFT", "rkl", "semantic", "hellinger"]


def test_markup_in_files_is_harmless(visit: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "stories", prompts=3, steps=3)
    spoil(run, "Once upon| and|story openings|reverse KL")
    (run / "recipe.yaml").write_text("</pre></script><img src=x onerror=alert(2)>")
    write_report([run], tmp_path / "report.html")
    page = visit(tmp_path / "report.html")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert "<img src=x onerror=alert(1)>" in page.locator(".exchange").first.inner_text()
    token = page.locator(".token", has_text="<img").first
    token.click()
    assert "<img src=x" in page.locator(".inspector h3").inner_text()


def test_broken_runs_have_their_box(visit: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "stories", prompts=3, steps=3)
    (run / "manifest.json").write_text('{"format": 1, "sta')
    (run / "ppo/rkl/metrics.jsonl").write_text('{"step": 1, "loss": NaN, "score": Infinity, "kl": NaN}\n')
    (run / "ppo/semantic/tokens.json").write_text("[]")
    write_report([run, tmp_path / "gone"], tmp_path / "report.html")
    page = visit(tmp_path / "report.html", 390)
    box = page.locator("aside.box")
    assert box.locator("li").count() == 3
    for message in ("manifest.json is not valid JSON", "gone does not exist", "tokens.json holds a list"):
        assert message in box.inner_text()
    assert page.locator("#training svg.chart").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_scripts_everything_but_the_token_view_is_there(visit: Any, page_file: Path) -> None:
    page = visit(page_file, java_script_enabled=False)
    assert page.locator(".exchange:visible").count() == 9
    assert page.locator("#training svg.chart").count() == 7
    assert page.locator("text=The token view is drawn by JavaScript").is_visible()


def test_on_paper_it_is_light(visit: Any, page_file: Path) -> None:
    page = visit(page_file, 1280, "dark")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1047})  # A4 within its margins, at 96 dots an inch
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.locator("#training svg.chart").first.is_visible()


def test_only_the_page_s_own_script_may_run(browser: Any, page_file: Path, tmp_path: Path) -> None:
    """The second line of defence: what got past the escaping would be refused by the browser."""
    inserted = "<main><img src=x onerror='document.title = 1'><script>document.title = 2</script>"
    broken = tmp_path / "report.html"
    broken.write_text(page_file.read_text(encoding="utf-8").replace("<main>", inserted), encoding="utf-8")
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(broken.as_uri())
    page.locator("body").evaluate("node => node.setAttribute('onclick', 'document.title = 3')")
    page.locator("h1").click()
    assert page.title().startswith("stories")
    assert len([text for text in refused if "Content Security Policy" in text]) >= 3
    page.close()
