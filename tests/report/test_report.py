"""The report of whole runs: what the page tells, and the command."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.command import Here
from tests.report.reading import SECTIONS, Page, report, table
from tests.report.run_folder import write_json, write_lines, write_run
from wpr.evaluation.win_rate import win_rate
from wpr.report import write_report

# A whole run.


def test_every_section_has_a_heading_and_nothing_is_wrong(whole: Path) -> None:
    page, problems = report(whole)
    assert problems == []
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert "All files were there and could be read." in page.text
    for fact in ("made by wpr.recipes.stories:prepare", "transformers 5.22.2", "2 CPU cores", "7 min 38 s", "no GPU"):
        assert fact in page.text


def test_the_page_holds_all_it_needs(whole: Path) -> None:
    page, _ = report(whole)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page.source)
    assert "@import" not in page.source
    assert not re.search(r"url\((?!data:)", page.source)
    assert len(page.source) < 1_000_000


def test_numbers_are_those_of_the_files(whole: Path, tmp_path: Path) -> None:
    page, _ = report(whole, csv=tmp_path)
    rows = {name: [json.loads(line) for line in (whole / "ppo/semantic" / f"{name}.jsonl").read_text().splitlines()]
            for name in ("responses", "responses-before", "metrics")}  # fmt: skip
    expected = win_rate(*([row["gold"] for row in rows[name]] for name in ("responses", "responses-before")),
                        groups=[row["prompt"] for row in rows["responses"]])  # fmt: skip
    wins = {(row["policy"], row["against"], row["judged by"]): row for row in table(tmp_path / "win_rates.csv")}
    assert len(wins) == 2 * (3 + 3)
    found = wins["semantic", "SFT", "gold"]
    assert [float(found[name]) for name in ("win rate", "low", "high")] == pytest.approx(
        [expected.rate, expected.low, expected.high]
    )
    assert f"{100 * expected.rate:.1f}%" in page.text
    training = [row for row in table(tmp_path / "training.csv") if row["policy"] == "semantic"]
    assert [float(row["gold"]) for row in training] == [row["gold"] for row in rows["metrics"] if "loss" in row]
    steps = {row["policy"]: row for row in table(tmp_path / "step_seconds.csv")}
    assert float(steps["rkl"]["penalty"]) == pytest.approx(0.3)
    assert float(steps["rkl"]["sum"]) == pytest.approx(1.46)
    ends = {row["policy"]: row for row in table(tmp_path / "frontier.csv")}
    tokens = sum(row["length"] for row in rows["responses"])
    semantic = sum(row["divergences"]["semantic"] for row in rows["responses"]) / tokens
    assert float(ends["semantic"]["divergence_semantic"]) == pytest.approx(semantic)


def test_means_come_from_the_responses_where_the_run_recorded_none(owned: Path, tmp_path: Path) -> None:
    write_report([owned], tmp_path / "a.html", tmp_path / "a")
    manifest = json.loads((owned / "manifest.json").read_text())
    for record in manifest["stages"].values():
        record["results"] = {}
    write_json(owned / "manifest.json", manifest)
    write_report([owned], tmp_path / "b.html", tmp_path / "b")
    recorded, measured = ([row | {"entropy": ""} for row in table(tmp_path / name / "policies.csv")] for name in "ab")
    for one, other in zip(recorded, measured, strict=True):
        for name in ("score", "gold", "KL", "semantic divergence", "tokens"):
            assert float(one[name]) == pytest.approx(float(other[name])), name


def test_what_is_watched_has_columns_curves_and_a_frontier(owned: Path, tmp_path: Path) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    watched = {"gold": {"kind": "meaning", "encoder": "minilm"}, "monitors": {"kept": {"kind": "words-kept"}}}
    manifest["recipe"]["evaluation"] = watched
    for name, record in manifest["stages"].items():
        if name.startswith("ppo/"):
            record["results"]["after"]["kept"] = 0.75
            lines = [
                json.loads(line) | {"kept": 0.5} for line in (owned / name / "metrics.jsonl").read_text().splitlines()
            ]
            (owned / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(owned / "manifest.json", manifest)
    page, _ = report(owned, csv=tmp_path)
    policies = {row["policy"]: row for row in table(tmp_path / "policies.csv")}
    assert float(policies["rkl"]["kept"]) == 0.75
    assert {row["kept"] for row in table(tmp_path / "training.csv")} == {"0.5"}
    assert {row["kept"] for row in table(tmp_path / "frontier.csv")} == {"0.75"}
    for title in ("kept of responses", "kept over score", "gold score over score"):
        assert title in page.text
    assert "Judged by gold, how much of its source's meaning a response has, which no policy saw" in page.text
    assert "paid with meaning: its score rose" in page.text
    assert "over-optimised" not in page.text


def test_the_result_is_told_as_it_is(whole: Path) -> None:
    page, _ = report(whole)
    verdict = page.text[page.text.index("Judged by the gold score") : page.text.index("Policies on held-out prompts")]
    assert "semantic beats the SFT model" in verdict
    assert "rkl seems to lose to the SFT model" in verdict
    assert "these numbers do not say which of both is better" in verdict
    assert "rkl is over-optimised: its score rose from 0.477 to 0.961 while gold fell from" in verdict


def test_a_clear_winner_is_called_one(owned: Path) -> None:
    rows = [json.loads(line) for line in (owned / "ppo/semantic/responses.jsonl").read_text().splitlines()]
    write_lines(owned / "ppo/semantic/responses.jsonl", [row | {"gold": 9.0} for row in rows])
    page, _ = report(owned)
    assert re.search(r"semantic beats the SFT model, winning 100.0% \(95% interval 8\d.\d to 100.0%\) of 24", page.text)
    assert re.search(r"semantic wins 100.0% \(95% interval 8\d.\d to 100.0%\): that is better", page.text)


def test_without_gold_the_score_judges_and_that_is_said(tmp_path: Path) -> None:
    page, problems = report(write_run(tmp_path / "old", gold=False, tokens=False))
    assert problems == []
    assert "Judged by the reward model's score" in page.text
    assert "not that responses are better" in page.text
    assert "These runs have no gold scores" in page.text
    assert "No policy has a token view" in page.text
    assert "curve-gold" not in page.ids


# Several runs.


def test_policies_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ["rkl", only], seed=seed, prompts=6, steps=5) for name, only, seed in
            (("first", "semantic", 0), ("second", "paper", 0), ("third", "js", 1))]  # fmt: skip
    page, problems = report(*runs, csv=tmp_path / "csv")
    assert problems == []
    names = [row["policy"] for row in table(tmp_path / "csv/policies.csv")]
    assert names[:6] == ["first: rkl", "semantic", "second: rkl", "paper", "third: rkl", "js"]
    assert names[6:] == ["first: SFT", "second: SFT", "third: SFT"]
    pairs = {(row["policy"], row["against"]) for row in table(tmp_path / "csv/win_rates.csv")}
    assert ("semantic", "paper") in pairs
    assert ("semantic", "js") not in pairs, "they answered other prompts"
    # The same policy has one colour, and each run its dash.
    looks = {line["name"]: line["looks"] for line in page.data["charts"]["curve-score"]["lines"]}
    assert looks["first: rkl"] == "c0 d0"
    assert looks["second: rkl"] == "c0 d1"
    assert looks["paper"] == "c2 d1"


def test_folders_of_the_same_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", ["rkl"], prompts=4, steps=3) for parent in "ab"]
    page, _ = report(*runs, runs[0])
    assert f"{runs[0]}: rkl" in page.text
    assert f"{runs[1]}: rkl" in page.text
    assert page.text.count("Recipe of") == 2, "a run that is given twice is shown once"


# The command.


def test_the_command(here: Here, whole: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    finished = here.succeeds(
        "report", str(whole), str(tmp_path / "gone"), "-o", str(page), "--csv", str(tmp_path / "csv")
    )
    assert f"the page is in {page}" in finished.stdout
    assert finished.stderr.startswith(f"note: {tmp_path / 'gone'}: does not exist")
    names = {path.stem for path in (tmp_path / "csv").iterdir()}
    assert names == {"policies", "runs", "training", "win_rates", "frontier", "step_seconds", "stages", "problems"}
    Page(page)


def test_the_command_with_nothing_to_show(here: Here, tmp_path: Path) -> None:
    finished = here("report", str(tmp_path / "gone"))
    assert finished.code == 2
    assert finished.error.startswith("Error: nothing to report: ")
    assert finished.error.count("does not exist") == 1


def test_a_page_that_cannot_be_written(here: Here, whole: Path, tmp_path: Path) -> None:
    finished = here("report", str(whole), "-o", str(tmp_path))
    assert finished.code == 2
    assert f"{tmp_path} cannot be written (Is a directory)" in finished.error


def test_reading_needs_no_transformers() -> None:
    heavy = ("torch", "transformers", "wpr.evaluation", "wpr.rewards")
    code = f"import sys; import wpr.report; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_policies_of_different_sft_models_are_not_compared(owned: Path, tmp_path: Path) -> None:
    """A stage that was started again leaves policies behind that were made from the old one."""
    manifest = json.loads((owned / "manifest.json").read_text())
    for name, digest in (("rkl", "old"), ("semantic", "new"), ("hellinger", "new")):
        manifest["stages"][f"ppo/{name}"]["inputs"] = {"needs": {"sft": digest}}
    write_json(owned / "manifest.json", manifest)
    write_report([owned], tmp_path / "page.html", tmp_path / "tables")
    with open(tmp_path / "tables" / "win_rates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    compared = {frozenset((row["policy"], row["against"])) for row in rows if row["against"] != "SFT"}
    assert compared == {frozenset(("semantic", "hellinger"))}
