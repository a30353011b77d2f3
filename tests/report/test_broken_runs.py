"""The report of runs that are missing, unfinished, damaged, odd or very large: it says so and shows the rest."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.report.reading import SECTIONS, Page, report, table
from tests.report.run_folder import write_json, write_lines, write_run
from wpr.pipeline.results import show_results
from wpr.report import ReportError, write_report


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReportError) as raised:
        write_report([tmp_path / "no", tmp_path / "empty", tmp_path / "file"], tmp_path / "report.html")
    for message in ("no: does not exist", "holds neither manifest.json nor ppo/", "is a file, not a run folder"):
        assert message in str(raised.value)
    assert not (tmp_path / "report.html").exists()


def test_a_missing_run_beside_a_whole_one(whole: Path, tmp_path: Path) -> None:
    problems = write_report([tmp_path / "gone", whole], tmp_path / "report.html")
    assert problems == [f"{tmp_path / 'gone'}: does not exist; give the folder that `wpr run` wrote (its `output`)"]
    page = Page(tmp_path / "report.html")
    assert "1 problem was found while reading" in page.text
    assert "semantic beats the SFT model" in page.text


@pytest.mark.parametrize("manifest", ["{", "[1, 2]", "", '{"format": 1}', '{"format": 1, "stages": 3}', "[" * 10**5])
def test_a_damaged_manifest(owned: Path, manifest: str) -> None:
    (owned / "manifest.json").write_text(manifest)
    page, problems = report(owned)
    assert len(problems) == 1
    assert problems[0].startswith(f"{owned / 'manifest.json'}: ")
    assert "semantic beats the SFT model" in page.text, "the responses tell it"
    assert "curve-score" in page.ids


def test_a_missing_manifest_and_recipe(owned: Path) -> None:
    (owned / "manifest.json").unlink()
    (owned / "recipe.yaml").unlink()
    page, problems = report(owned)
    assert [problem.partition(": ")[2].partition(";")[0] for problem in problems] == ["is missing", "is missing"]
    assert "No run has a recipe that can be shown." in page.text


@pytest.mark.parametrize("name", ["ppo/../../elsewhere/x", "ppo/..", "ppo/a/b", "..", "/etc"])
def test_a_stage_that_would_lie_elsewhere_is_left_out(owned: Path, name: str) -> None:
    """Its folder is there, with a policy's files, and nothing of it is shown."""
    report(owned, csv=owned.parent / "before")
    shown = {path.name: len(table(path)) for path in (owned.parent / "before").iterdir()}
    manifest = json.loads((owned / "manifest.json").read_text())
    shutil.copytree(owned / "ppo" / "rkl", owned.parent / "elsewhere" / "x")
    manifest["stages"][name] = manifest["stages"]["ppo/rkl"]
    write_json(owned / "manifest.json", manifest)
    _, problems = report(owned, csv=owned.parent / "csv")
    assert problems == [f"{owned / 'manifest.json'}: names the stage {name!r}, which no run can have; it is left out"]
    for file in ("training.csv", "stages.csv"):
        assert len(table(owned.parent / "csv" / file)) == shown[file]


def test_another_format_is_said(owned: Path) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    write_json(owned / "manifest.json", manifest | {"format": 7})
    _, problems = report(owned)
    assert "has format 7, this release knows format 1" in problems[0]


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        ("running", None, "stage ppo/semantic is not finished, or was killed"),
        ("failed", "ValueError: the\nloss is nan.", "stage ppo/semantic failed (ValueError: the loss is nan.)"),
        ("interrupted", None, "stage ppo/semantic was interrupted"),
        ("odd", None, "stage ppo/semantic has status 'odd'"),
    ],
)
def test_an_unfinished_run(owned: Path, status: str, error: str | None, message: str) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    manifest["stages"]["ppo/semantic"] |= {"status": status, "error": error, "results": {}, "finished": None}
    del manifest["stages"]["ppo/hellinger"]
    write_json(owned / "manifest.json", manifest)
    for name in ("responses.jsonl", "tokens.json"):
        (owned / "ppo/semantic" / name).unlink()
    lines = (owned / "ppo/semantic/metrics.jsonl").read_text().splitlines()
    (owned / "ppo/semantic/metrics.jsonl").write_text("\n".join([*lines[:20], lines[20][:40]]))
    page, problems = report(owned, csv=owned / "csv")
    assert len(problems) == 2, "the files that it has not written yet need no word of their own"
    assert message in problems[0]
    assert "`wpr run stories output=stories` goes on from the last checkpoint" in problems[0]
    assert "no stage yet for hellinger; `wpr run RECIPE --policy hellinger` trains them" in problems[1]
    assert message.split(" (")[0] in page.text
    assert len([row for row in table(owned / "csv/training.csv") if row["policy"] == "semantic"]) == 20
    assert "rkl seems to lose to the SFT model" in page.text


def test_a_file_of_nothing_but_damaged_lines(owned: Path) -> None:
    (owned / "ppo/semantic/metrics.jsonl").write_text("{\n{\n")
    _, problems = report(owned)
    assert "2 of 2 lines could not be used" in problems[0]
    assert problems[0].endswith("; its curves are left out")


def test_damaged_lines(owned: Path) -> None:
    path = owned / "ppo/semantic/responses.jsonl"
    lines = path.read_text().splitlines()
    lines[3], lines[5], lines[7] = lines[3][:30], '{"number": "5"}', "[]"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    page, problems = report(owned)
    assert len(problems) == 1
    assert "4 of 25 lines could not be used (line 4: not valid JSON" in problems[0]
    assert "of 21 comparisons" in page.text


def test_byte_order_marks(owned: Path) -> None:
    for path in [*owned.glob("ppo/semantic/*.json*"), owned / "manifest.json", owned / "recipe.yaml"]:
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    page, problems = report(owned)
    assert problems == []
    assert "of 24 comparisons" in page.text
    assert "\ufeff" not in page.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "responses.jsonl", "responses-before.jsonl"])
def test_a_missing_or_empty_file(owned: Path, name: str) -> None:
    (owned / "ppo/semantic" / name).write_text("")
    (owned / "ppo/rkl" / name).unlink()
    page, problems = report(owned)
    assert [problem.partition(": ")[2].partition(";")[0] for problem in problems] == ["is missing", "is empty"]
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert "hellinger seems to beat the SFT model" in page.text


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("[", "is not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"studies": 3}', "has no list called studies"),
        ('{"studies": [3]}', "1 of 1 studies could not be used (study 1: no list called tokens)"),
        ('{"studies": [{"tokens": [{"kl": 1}]}]}', "token 1 has no text"),
        ('{"studies": [{"tokens": [{"text": "a", "kl": NaN}]}]}', "token 1 has no penalty (kl, wpr)"),
    ],
)
def test_a_token_file_of_another_shape(owned: Path, tokens: str, message: str) -> None:
    (owned / "ppo/semantic/tokens.json").write_text(tokens)
    page, problems = report(owned)
    assert len(problems) == 1
    assert message in problems[0]
    assert {study["policy"] for study in page.data["studies"]} == {"rkl", "hellinger"}


def test_odd_parts_of_tokens_are_left_out(owned: Path) -> None:
    token = {"text": "a", "kl": 1, "wpr": None, "candidates": [3, {"text": "b", "policy": math.nan}], "plan": "x",
             "nearest": [{"text": None}], "policy": "much", "moved": math.inf}  # fmt: skip
    write_json(owned / "ppo/semantic/tokens.json", {"studies": [{"tokens": [token], "prompt": [{"role": "user"}]}]})
    page, problems = report(owned)
    assert problems == []
    (study,) = (study for study in page.data["studies"] if study["policy"] == "semantic")
    assert study["tokens"] == [
        {"text": "a", "kl": 1, "wpr": None, "policy": None, "reference": None, "moved": None,
         "unmatched_policy": None, "unmatched_reference": None, "candidates": [["b", None, None]], "plan": [],
         "nearest": []}
    ]  # fmt: skip
    assert study["prompt"] == "user: "


def test_numbers_that_are_none(owned: Path) -> None:
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, None, "many", True, 10**400, 1.0]
    rows = [{"step": step, "loss": 1, "score": value, "kl": value, "entropy": math.nan, "seconds_reward": value}
            for step, value in enumerate(odd, 1)]  # fmt: skip
    write_lines(owned / "ppo/semantic/metrics.jsonl", rows)
    responses = [json.loads(line) for line in (owned / "ppo/semantic/responses.jsonl").read_text().splitlines()]
    for row, value in zip(responses, odd, strict=False):
        row |= {"score": value, "gold": value, "kl": value, "length": value, "divergences": {"semantic": value}}
    write_lines(owned / "ppo/semantic/responses.jsonl", responses)
    manifest = json.loads((owned / "manifest.json").read_text())
    manifest["stages"]["ppo/semantic"] |= {"seconds": math.nan, "peak_memory_gb": math.inf, "results": {
        "after": {"score": math.nan, "gold": 1e308, "kl": None}, "before": [], }}  # fmt: skip
    write_json(owned / "manifest.json", manifest)
    page, problems = report(owned)
    assert problems == []
    drawn = re.findall(r'(?: d| x| y| x1| x2| y1| y2| cx| cy| width)="([^"]*)"', page.source)
    assert len(drawn) > 100
    assert not [one for one in drawn if re.search(r"nan|inf", one)]
    assert page.data["charts"]["curve-kl"]["lines"][1]["points"][-1] == [11, 1]


def test_steps_taken_twice_count_once(owned: Path) -> None:
    rows = [
        {"step": step, "loss": 1, "score": score} for step, score in ((1, 0.1), (2, 0.2), (3, 9), (2, 0.25), (3, 0.3))
    ]
    write_lines(owned / "ppo/semantic/metrics.jsonl", rows)
    page, _ = report(owned)
    line = next(line for line in page.data["charts"]["curve-score"]["lines"] if line["name"] == "semantic")
    assert line["points"] == [[1, 0.1], [2, 0.25], [3, 0.3]]


JUNK = [None, True, -1, 1e308, math.nan, math.inf, "", "x", [], {}, [1, None], {"a": {"b": [1]}}, 10**400, "\ud800"]


def junk(value: Any, rng: random.Random, share: float) -> Any:
    """The value with some of its parts lost, and some turned into something else."""
    if rng.random() < share:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {name: junk(part, rng, share) for name, part in value.items() if rng.random() > share}
    return [junk(part, rng, share) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_files_hold_there_is_a_page(whole: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.copytree(whole, tmp_path / "run")
    for path in sorted((tmp_path / "run").rglob("*.*")):
        text, fate = path.read_text(), rng.randrange(6)
        if fate == 0:
            path.unlink()
        elif fate == 1:
            path.write_text(text[: rng.randrange(len(text))])
        elif fate == 2:
            path.write_bytes(bytes(rng.randrange(256) if rng.random() < 0.01 else byte for byte in text.encode()))
        elif path.suffix == ".json":
            write_json(path, junk(json.loads(text), rng, rng.choice([0.003, 0.02, 0.1])))
        elif path.suffix == ".jsonl":
            write_lines(path, [junk(json.loads(line), rng, rng.choice([0.01, 0.1])) for line in text.splitlines()])
    page, problems = report(tmp_path / "run", csv=tmp_path / "csv")
    assert problems
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert page.data.keys() == {"charts", "studies"}


ATTACK = "</script><img src=x onerror=alert(1)><!--<script>\"'&\u2028\ud800\x00"


def spoil(run: Path, pattern: str) -> None:
    """Put the attack in the place of what matches, in all files of a run."""
    for path in run.rglob("*.json*"):
        path.write_text(re.sub(pattern, lambda _: json.dumps(ATTACK)[1:-1], path.read_text()))


def test_text_of_files_is_only_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "stories", prompts=2, steps=3)
    spoil(run, "Once upon| and|story openings")
    (run / "recipe.yaml").write_text(ATTACK.encode("utf-8", "replace").decode())
    (run / "ppo/semantic").rename(run / "ppo/<b>&semantic")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["stages"] = {f"<b>&{name}": one for name, one in manifest["stages"].items()}
    write_json(run / "manifest.json", manifest)
    page, _ = report(run, csv=tmp_path / "csv")
    assert "<img" not in page.source
    assert "<b>&semantic" not in page.source
    assert "<b>&semantic cannot be told apart" in page.text
    assert page.source.count("<script") == 2
    assert page.source.count("</script") == 2
    assert any(ATTACK in token["text"] for study in page.data["studies"] for token in study["tokens"])


def test_a_large_run_is_cut_down_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "large", [f"p{index}" for index in range(4)], prompts=80, steps=400)
    for path in run.glob("ppo/*/responses*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [row | {"response": row["response"] * 50} for row in rows])
    for path in run.glob("ppo/*/tokens.json"):
        view = json.loads(path.read_text())
        view["studies"] = [study | {"tokens": study["tokens"] * 25} for study in view["studies"][:1]] * 3
        path.write_text(json.dumps(view))
    page, problems = report(run, csv=tmp_path / "csv")
    assert problems == []
    assert len(page.source.encode()) < 5_000_000
    for message in ("The first [0-9]+ of 80 are shown", "[0-9]+ more responses were left out",
                 "60 of 1600 rows, evenly spaced", r"more characters\)"):  # fmt: skip
        assert re.search(message, page.text), message
    assert {study["policy"] for study in page.data["studies"]} == {f"p{index}" for index in range(4)}
    assert all(study["cut"] > 0 for study in page.data["studies"])
    assert len(table(tmp_path / "csv/training.csv")) == 1600


def test_gold_by_two_settings_is_not_compared(owned: Path) -> None:
    """A run folder whose policies were measured by two encoders under one name."""
    manifest = json.loads((owned / "manifest.json").read_text())
    for policy, encoder in (("rkl", "wordllama"), ("semantic", "minilm"), ("hellinger", "minilm")):
        watched = {"gold": {"kind": "meaning", "encoder": encoder}}
        manifest["stages"][f"ppo/{policy}"]["results"] |= {"watched": watched, "gold_win_rate_before": 0.9}
    write_json(owned / "manifest.json", manifest)
    page, problems = report(owned)
    (problem,) = problems
    assert "gold is not the same score in all policies (rkl by" in problem
    assert "wordllama" in problem
    assert "curve-score" in page.ids
    assert "curve-gold" not in page.ids
    console = Console(record=True, width=200)
    show_results({}, owned, console)
    said = console.export_text()
    assert "gold is not the same score" in said
    assert "by score" in said
    first = (owned / "policies.csv").read_text().splitlines()[0]
    assert "score" in first
    assert "gold" not in first
    assert "gold" not in (owned / "win_rates.csv").read_text()
