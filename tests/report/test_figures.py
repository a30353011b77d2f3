"""Figures of a run as documents: the page's charts, in a file of their own."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.run_folder import write_run
from tests.report.some_findings import figures
from wpr.errors import OptionError, UnavailableError
from wpr.findings import Finding, save
from wpr.report import write_report
from wpr.report.axes import WIDTH
from wpr.report.comparisons import against_sft
from wpr.report.figures import Plots, win_rate_figure
from wpr.report.loaded_run import load_run
from wpr.report.picture import Picture
from wpr.report.plots import draw_figure
from wpr.report.runs import read_one
from wpr.report.section import ReportData
from wpr.runs.tolerant import Problems


@pytest.fixture(scope="module")
def data(whole: Path) -> ReportData:
    problems = Problems()
    run = read_one(whole, problems)
    assert run is not None
    return ReportData([run], problems)


def texts(picture: Picture) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(picture.svg).iter() if one.tag.endswith("}text")]


def test_the_page_and_the_figure_draw_the_same(data: ReportData, whole: Path, tmp_path: Path) -> None:
    """Every path of a curve or a trail stands in both, but for the looks."""
    write_report([whole], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for picture in (Plots(data, {}).curves(), Plots(data, {}).frontier()):
        paths = re.findall(r'<path d="([^"]+)" class="(?:line|raw|trail) [^"]*"', picture.svg)
        drawn = [path for path in paths if path != "M0 0H24"]  # of the legend
        assert len(drawn) >= 6
        assert [path for path in drawn if f'd="{path}"' not in page] == []


def test_chosen_charts_and_their_legend(data: ReportData) -> None:
    plots = Plots(data, {})
    assert {"rkl", "semantic", "hellinger", "gold score of responses", "entropy, per token"} <= set(
        texts(plots.curves())
    )
    two = plots.curves("score", "seconds_penalty")
    assert 'viewBox="0 0 680 ' in two.svg
    assert {"score of responses", "seconds_penalty"} <= set(texts(two))
    one = texts(plots.frontier("kl", "gold"))
    assert {"gold score over KL from the SFT model", "SFT", "rkl"} <= set(one)
    assert "gold score over score" not in one
    assert {"gold score over score", "gold score over semantic divergence"} <= set(texts(plots.frontier()))
    long = texts(plots.frontier(y="score"))
    assert {"reward model's score over KL from the", "SFT model"} <= set(long), "a long title has two lines"


def test_win_rates_are_those_of_the_table(data: ReportData) -> None:
    sft, pairs = win_rate_figure(data, "gold").series
    found = against_sft(data.policies, "gold")
    assert sft.x == ["rkl", "semantic", "hellinger"]
    assert sft.y == [100 * one.result.rate for one in found]
    assert sft.high == [100 * one.result.high for one in found]
    assert pairs.x == ["rkl over semantic", "rkl over hellinger", "semantic over hellinger"]
    plots = Plots(data, {})
    assert plots.win_rates() == plots.win_rates("gold") != plots.win_rates("score")


def test_names_that_are_not_known(data: ReportData) -> None:
    plots = Plots(data, {})
    for ask, message in (
        (lambda: plots.curves("scor"), "'scor' is no metric of the training logs; did you mean score?"),
        (lambda: plots.frontier(x="divergence_semantik"), "did you mean divergence_semantic?"),
        (lambda: plots.frontier(y="zz"), "'zz' is no y of the frontier; there is gold, score"),
        (lambda: plots.win_rates("golf"), "did you mean gold?"),
        (lambda: plots.finding("geometry"), "'geometry' is no evaluation or analysis; there is none"),
    ):
        with pytest.raises(OptionError, match=re.escape(message) if "?" in message else message):
            ask()
    with pytest.raises(UnavailableError, match="no chart of score over score; it has gold over kl"):
        plots.frontier("score", "score")


def test_a_run_that_has_not_come_so_far(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ["rkl"], steps=2, prompts=2)
    for name in ("metrics.jsonl", "responses.jsonl"):
        (folder / "ppo" / "rkl" / name).unlink()
    (folder / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="is missing"):
        plot = load_run(folder).plot
    for ask, message in ((plot.curves, "no training log"), (plot.win_rates, "no two models")):
        with pytest.raises(UnavailableError, match=message):
            ask()
    assert plot.all() == {}


def test_figures_of_findings(data: ReportData) -> None:
    finding = Finding("several", "Several", [], [], [], figures())
    plots = Plots(data, {"several": finding})
    together = plots.finding("several")
    root = ElementTree.fromstring(together.svg)
    placed = [one for one in root.iter() if one.tag.endswith("}svg") and one is not root]
    assert len(placed) == len(finding.figures)
    assert {one.get("x") for one in placed} == {"0", str(WIDTH)}
    assert {figure.title for figure in finding.figures} <= set(texts(together))
    one = replace(finding, figures=finding.figures[:1])
    assert Plots(data, {"one": one}).finding("one") == Picture(draw_figure(one.figures[0]))
    with pytest.raises(UnavailableError, match="has no figure; its table is in"):
        Plots(data, {"none": replace(finding, figures=[])}).finding("none")


def test_the_report_writes_its_figures(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    save(Finding("some", "Some", [], [], [], figures()[:1]), tmp_path / "run" / "analyses" / "some")
    write_report([tmp_path / "run"], tmp_path / "page.html", svg=tmp_path / "svg")
    written = {path.name for path in (tmp_path / "svg").iterdir()}
    assert written == {"curves.svg", "frontier.svg", "win_rates.svg", f"some-{figures()[0].name}.svg"}
