"""The report of runs whole and broken: what the page tells, what it leaves out, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.command import Here
from tests.report.run_folder import write_json, write_lines, write_run
from wpr.evaluation.win_rate import win_rate
from wpr.report import ReportError, write_report

SECTIONS = ["summary", "training", "wins", "frontier", "costs", "responses", "tokens", "recipe", "problems"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "stories")


@pytest.fixture
def owned(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(whole, tmp_path / "stories")
    return tmp_path / "stories"


class Page(HTMLParser):
    """The text a reader sees, the ids, and whether every element is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(self.source)
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attributes if name == "id"]
        if tag != "br" and tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def data(self) -> dict[str, Any]:
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source, re.S)
        assert found is not None
        return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def report(*runs: Path, csv: Path | None = None) -> tuple[Page, list[str]]:
    output = runs[0].parent / "report.html"
    problems = write_report(runs, output, csv)
    return Page(output), problems


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


# Broken runs.


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReportError) as raised:
        write_report([tmp_path / "no", tmp_path / "empty", tmp_path / "file"], tmp_path / "report.html")
    for told in ("no: does not exist", "holds neither manifest.json nor ppo/", "is a file, not a run's folder"):
        assert told in str(raised.value)
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


def test_another_format_is_said(owned: Path) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    write_json(owned / "manifest.json", manifest | {"format": 7})
    _, problems = report(owned)
    assert "has format 7, this release knows format 1" in problems[0]


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        ("running", None, "stage ppo/semantic is not finished, or was killed"),
        ("failed", "ValueError: the\nloss is nan.", "stage ppo/semantic failed (ValueError: the loss is nan.)"),
        ("interrupted", None, "stage ppo/semantic was interrupted"),
        ("odd", None, "stage ppo/semantic has status 'odd'"),
    ],
)
def test_an_unfinished_run(owned: Path, status: str, error: str | None, told: str) -> None:
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
    assert told in problems[0]
    assert "`wpr run stories output=stories` goes on from the last checkpoint" in problems[0]
    assert "no stage yet for hellinger" in problems[1]
    assert told.split(" (")[0] in page.text
    assert len([row for row in table(owned / "csv/training.csv") if row["policy"] == "semantic"]) == 20
    assert "rkl seems to lose to the SFT model" in page.text


def test_damaged_lines(owned: Path) -> None:
    path = owned / "ppo/semantic/responses.jsonl"
    lines = path.read_text().splitlines()
    lines[3], lines[5], lines[7] = lines[3][:30], '{"number": "5"}', "[]"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    page, problems = report(owned)
    assert len(problems) == 1
    assert "4 of 25 lines could not be used (line 4: not valid JSON" in problems[0]
    assert "of 21 comparisons" in page.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "responses.jsonl", "responses-before.jsonl"])
def test_a_missing_or_empty_file(owned: Path, name: str) -> None:
    (owned / "ppo/semantic" / name).write_text("")
    (owned / "ppo/rkl" / name).unlink()
    page, problems = report(owned)
    assert [problem.partition(": ")[2].partition(";")[0] for problem in problems] == ["is missing", "is empty"]
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert "hellinger seems to beat the SFT model" in page.text


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("[", "is not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"studies": 3}', "has no list called studies"),
        ('{"studies": [3]}', "1 of 1 studies could not be used (study 1: no list called tokens)"),
        ('{"studies": [{"tokens": [{"kl": 1}]}]}', "token 1 has no text"),
        ('{"studies": [{"tokens": [{"text": "a", "kl": NaN}]}]}', "token 1 has no penalty (kl, wpr)"),
    ],
)
def test_a_token_file_of_another_shape(owned: Path, tokens: str, told: str) -> None:
    (owned / "ppo/semantic/tokens.json").write_text(tokens)
    page, problems = report(owned)
    assert len(problems) == 1
    assert told in problems[0]
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
    manifest["stages"] = {name.replace("semantic", "<b>&semantic"): one for name, one in manifest["stages"].items()}
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
    for told in ("The first [0-9]+ of 80 are shown", "[0-9]+ more responses were left out",
                 "60 of 1600 rows, evenly spaced", r"more characters\)"):  # fmt: skip
        assert re.search(told, page.text), told
    assert {study["policy"] for study in page.data["studies"]} == {f"p{index}" for index in range(4)}
    assert all(study["cut"] > 0 for study in page.data["studies"])
    assert len(table(tmp_path / "csv/training.csv")) == 1600


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
    code = "import sys; import wpr.report; print([m for m in ('transformers', 'wpr.evaluation') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_policies_of_different_sft_models_are_not_compared(owned: Path, tmp_path: Path) -> None:
    """A stage that was started anew leaves policies behind that were made from the old one."""
    manifest = json.loads((owned / "manifest.json").read_text())
    for name, digest in (("rkl", "old"), ("semantic", "new"), ("hellinger", "new")):
        manifest["stages"][f"ppo/{name}"]["inputs"] = {"needs": {"sft": digest}}
    write_json(owned / "manifest.json", manifest)
    write_report([owned], tmp_path / "page.html", tmp_path / "tables")
    with open(tmp_path / "tables" / "win_rates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    compared = {frozenset((row["policy"], row["against"])) for row in rows if row["against"] != "SFT"}
    assert compared == {frozenset(("semantic", "hellinger"))}
