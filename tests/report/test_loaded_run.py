"""Runs for Python: tables, responses, problems, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import wpr
from tests.report.some_findings import figures
from wpr.errors import OptionError, RunFolderError
from wpr.findings import Finding, save
from wpr.report.tables import as_frame


@pytest.fixture(scope="module")
def run(whole: Path) -> wpr.LoadedRun:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return wpr.load_run(str(whole))


def test_tables(run: wpr.LoadedRun, whole: Path) -> None:
    assert list(run.policies) == ["rkl", "semantic", "hellinger"]
    assert run.stages["ppo/rkl"] == "done"
    assert run.recipe["name"] == "stories"
    results = run.results.set_index("policy")
    recorded = json.loads((whole / "manifest.json").read_text())["stages"]["ppo/semantic"]["results"]
    for name, row in (("after", "semantic"), ("before", "SFT")):
        assert results.loc[row, "gold"] == recorded[name]["gold"]
    metrics = run.metrics("rkl")
    lines = [json.loads(line) for line in (whole / "ppo/rkl/metrics.jsonl").read_text().splitlines()]
    assert metrics["score"].tolist() == [line["score"] for line in lines if "loss" in line]
    assert set(run.metrics()["policy"]) == set(run.policies)
    wins = run.win_rates
    assert len(wins) == 12
    assert {"policy", "against", "judged by", "win rate", "low", "high"} <= set(wins.columns)


def test_responses_are_the_one_record(run: wpr.LoadedRun) -> None:
    first = run.responses("semantic")[0]
    assert first.prompt_text == run.responses()[0].prompt_text == run.responses("sft")[0].prompt_text
    assert first is run.policies["semantic"].responses[0]
    with pytest.raises(OptionError, match=r"'semantics' is no policy of .*; did you mean semantic\?"):
        run.responses("semantics")


def test_without_pandas_tables_are_lists_of_dicts(run: wpr.LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert as_frame(["a", "b"], [[1, None]]) == [{"a": 1, "b": None}]
    assert [row["policy"] for row in run.results] == ["rkl", "semantic", "hellinger", "SFT"]


def test_findings(owned: Path) -> None:
    judged = Finding("judge", "Judged", ["Words."], ["model", "rate"], [["rkl", 0.6]], figures()[:1])
    save(judged, owned / "evaluations" / "judge")
    save(Finding("costs", "Costs", [], ["stage"], [["sft"]]), owned / "analyses" / "costs")
    (owned / "analyses" / "broken").mkdir()
    (owned / "analyses" / "broken" / "finding.json").write_text("{")
    with pytest.warns(UserWarning, match="broken"):
        run = wpr.load_run(owned)
    assert (list(run.evaluations), list(run.analyses)) == (["judge"], ["costs"])
    assert run.evaluations["judge"] == judged
    assert run.table("judge").to_dict("records") == [{"model": "rkl", "rate": 0.6}]
    assert run.plot.finding("judge").svg
    with pytest.raises(OptionError, match="did you mean costs"):
        run.table("cost")


def test_what_a_notebook_shows(run: wpr.LoadedRun, whole: Path, tmp_path: Path) -> None:
    assert repr(run) == f"<run stories in {whole}: policies rkl, semantic, hellinger>"
    assert "hellinger" in run._repr_html_()
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_damaged_and_unfinished_runs(owned: Path, tmp_path: Path) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    manifest["stages"]["ppo/rkl"]["status"] = "interrupted"
    (owned / "manifest.json").write_text(json.dumps(manifest))
    with (owned / "ppo" / "semantic" / "responses.jsonl").open("a") as file:
        file.write('{"cut')
    before = {path: path.read_bytes() for path in owned.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match=r"lines could not be used .*; 1 more is in run.problems"):
        run = wpr.load_run(owned)
    assert "rkl (interrupted)" in repr(run)
    assert len(run.responses("semantic")) == 24
    assert len(run.metrics("rkl")) == 60
    assert any("was interrupted" in str(problem) for problem in run.problems)
    assert run.plot.frontier().svg
    assert {path: path.read_bytes() for path in owned.rglob("*") if path.is_file()} == before, "nothing is written"
    for path, message in ((tmp_path / "none", "does not exist; give the folder"), (tmp_path, "holds neither")):
        with pytest.raises(RunFolderError, match=message):
            wpr.load_run(path)


def test_reading_a_run_needs_no_trainer() -> None:
    code = (
        "import sys, wpr; wpr.load_run; "
        "print([m for m in ('pandas', 'resvg_py', 'trl', 'datasets', 'wpr.pipeline') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
