"""`wpr reproduce`: what it lists, plans, skips and collects. The slow test runs every command of every table."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pipeline.command import SMALL as TINY
from tests.pipeline.command import Here, run
from wpr.findings import load
from wpr.reproduce import load_mapping
from wpr.reproduce.collect import collect
from wpr.reproduce.mapping import Item
from wpr.reproduce.needs import needs_of
from wpr.reproduce.rehearsal import grade, problems_file, questions_file
from wpr.reproduce.steps import Options, Step, is_reward_model, steps_of

SMALL = (
    "sft.batch_size=8", "reward.batch_size=8", "ppo.batch_size=8", "data.max_prompt_tokens=64",
    "data.max_completion_tokens=16", "ppo.max_prompt_length=64", "ppo.max_new_tokens=16", "model.precision=fp32",
    "data.too_long=truncate",
)  # fmt: skip
"""A rehearsal's settings for a CPU."""


def test_the_list(here: Here) -> None:
    """In a terminal of 80 columns, too: nothing is cut off."""
    text = here.succeeds("reproduce", "--list").stdout
    for label, item in load_mapping().items.items():
        assert label in text
        assert item.title[:30] in text
        assert all(recipe in text for recipe in item.recipes)
    assert "…" not in text


def test_a_dry_run_has_commands_hours_and_disk(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = here.succeeds("reproduce", "qwen", "f_div", "mt_bench", "--dry-run", "--launch", "accelerate launch").stdout
    assert "accelerate launch -m wpr run hh-qwen1.5-1.8b-chat -p rkl -p paper\n" in text
    assert "wpr judge runs/hh-qwen1.5-1.8b-chat --against sft --against rkl" in text
    assert "--judge gpt-4o-2024-05-13" in text
    assert "2 policies to train; " in text
    assert "-q question.jsonl" in text  # which need not be there to be shown
    assert "They are formulas" in text
    rehearsal = ("--model", "no/such-model", "--scale", "0.01", "--data", "x.jsonl.gz")
    text = here.succeeds("reproduce", "apps", "mt_bench", "--dry-run", *rehearsal).stdout
    assert "Not counted: training no/such-model, of unknown size here" in text
    assert "data.source=runs/rehearsal/problems.jsonl" in text
    assert not list(tmp_path.iterdir())


def test_hours_by_hand() -> None:
    """One policy of TL;DR under reverse KL: 145 steps of 256 responses on four A100, SFT and reward model before it."""
    item = Item("x", "x", ("run tldr-gemma-2b -p rkl",))
    found = needs_of(steps_of(item, Options(runs=Path("nowhere"))), Options())
    ppo = 4 * 4.481 * 145 * 256 / 32_000
    sft, reward = 111 * 512, 581 * 64  # three epochs of a fifth, one of two fifths, in whole batches
    assert found.hours == pytest.approx(ppo + 4 * 3.707 / 2 * (sft + 2 * reward) / 32_000, rel=0.01)
    assert (found.policies, found.requests) == (1, 0)
    twice = needs_of(2 * steps_of(item, Options(runs=Path("nowhere"))), Options())
    assert twice == found  # a stage is trained once
    draws = [Item("x", "x", (f"generate {{runs}}/tldr-gemma-{size} -p rkl -t 0.5",)) for size in ("2b", "7b")]
    small, large = (needs_of(steps_of(one, Options(runs=Path("nowhere"))), Options()).hours for one in draws)
    assert small == pytest.approx(4 * 0.769 * 2 * 2000 / 32_000)
    assert large == pytest.approx(small * 8_537_680_896 / 2_506_172_416)  # by the model that draws


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no table or figure is named"),
        (("tab:mian",), "did you mean tab:main?"),
        (("tab:main", "--scale", "0"), "--scale 0.0 must be above 0"),
        (("tab:mt_bench",), "name the file with --questions"),
        (("tab:main", "--rubric", "jokes=x.yaml"), "--rubric jokes must be summary=FILE"),
        (("tab:main", "--judge", "a", "--reward-model", "b"), "name two judges"),
    ],
)
def test_refusals(options: tuple[str, ...], message: str, here: Here, tmp_path: Path) -> None:
    finished = here("reproduce", *options, "--runs", str(tmp_path))
    assert finished.code == 2
    assert message in finished.error


def test_settings_are_collected_beside_the_paper_s(here: Here, tmp_path: Path) -> None:
    text = here.succeeds("reproduce", "tab:ppo-hparams", "--runs", str(tmp_path)).stdout
    found = load(tmp_path / "reproduce" / "tab-ppo-hparams")
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["Clip ratio"] == ["0.2", "0.2"]
    assert rows["Warm-up"] == ["0.05", "200"]
    assert "REHEARSAL" not in text


def test_a_rehearsal_says_that_it_is_one(tmp_path: Path) -> None:
    """Also where nothing was found yet: then it says what is missing, and the paper's numbers stand alone."""
    options = Options(runs=tmp_path, scale=0.01, model="models/x")
    found, cells = collect(load_mapping().items["tab:main"], options)
    assert found.text[0].startswith("REHEARSAL, no result: 0.01 of the paper's steps and prompts; the model models/x")
    assert any(text.startswith("Missing: ") for text in found.text)
    assert found.rows[0][1:3] == ["-", "0.848 ±0.021"]
    assert len(cells) == 28


def test_steps_of_a_run_that_is_there(whole_run: Path, here: Here, tmp_path: Path) -> None:
    """From responses to the table: judged, collected, and skipped the second time; a newer model brings it back."""
    folder = tmp_path / "tiny"
    shutil.copytree(whole_run, folder)
    options = Options(runs=tmp_path, scale=0.01)
    item = Item(
        "tab:own", "own", ("generate {runs}/tiny -p rkl -t 0.5", "judge {runs}/tiny --against sft -p rkl -t 0.5"),
        {"RKL": {"row": "rkl"}}, {"vs. SFT": {"source": "won", "run": "tiny", "against": "sft"}},
        {"RKL": [(0.848, 0.021)]},
    )  # fmt: skip
    steps = steps_of(item, options)
    assert [step.done for step in steps] == [False, False]
    for step in steps:
        here.succeeds(*step.words)
    assert [step.done for step in steps] == [True, True]
    found, cells = collect(item, options)
    assert cells[0]["missing"] == ""
    table = load(folder / "evaluations" / "judge-tab-own")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    wanted = {"value": row["won"], "error": row["won_se_draws"], "low": row["low_95"], "high": row["high_95"]}
    assert {key: cells[0][key] for key in wanted} == wanted
    assert found.rows[0][2] == "0.848 ±0.021"
    # Another judge has not been asked, wherever the finding of the first one lies.
    other = tmp_path / "other"
    shutil.copytree(folder / "reward" / "model", other)
    for judge in (("--judge", "gpt-4o"), ("--reward-model", str(other))):
        assert steps_of(item, replace(options, judge=judge))[1].done == ("--reward-model" in judge)
    (other / "more.json").write_text("{}")
    is_reward_model.cache_clear()
    assert not steps_of(item, replace(options, judge=("--reward-model", str(other))))[1].done
    # A baseline is read, too: one that was drawn again is judged again.
    os.utime(folder / "generations" / "sft-t0.5.jsonl", (time.time() + 5,) * 2)
    assert [step.done for step in steps_of(item, options)] == [True, False]
    later = time.time() + 10
    os.utime(folder / "ppo" / "rkl" / "model" / "model.safetensors", (later, later))
    assert [step.done for step in steps_of(item, options)] == [False, False]


def test_a_training_step_is_done_when_the_manifest_says_so(whole_run: Path) -> None:
    words = ("run", "tiny", "-p", "rkl", *TINY)
    assert Step(words, whole_run, None).done
    assert not Step((*words, "-p", "semantic"), whole_run, None).done


def test_what_other_settings_made_is_not_done_and_named(whole_run: Path, tmp_path: Path) -> None:
    """A rehearsal's models are not taken for the paper's by a command without its options, in the same folder."""
    step = Step(("run", "tiny", "-p", "rkl", *TINY, "sft.max_steps=4"), whole_run, None)
    assert step.changes == ["sft: sft.max_steps: 3 -> 4"]
    assert not step.done
    assert Step(("run", "tiny", *TINY, "data.max_prompt_tokens=17"), whole_run, None).changes
    (tmp_path / "tiny").symlink_to(whole_run)
    item = Item("tab:own", "own", ("run tiny -p rkl",), finding="{runs}/tiny/analyses/none")
    told = collect(item, Options(runs=tmp_path, overrides=(*TINY, "sft.max_steps=4")))[0].text
    assert told[0].startswith("MADE BY OTHER SETTINGS")
    assert "sft.max_steps: 3 -> 4" in told[0]
    assert not any("OTHER SETTINGS" in text for text in collect(item, Options(tmp_path, overrides=TINY))[0].text)


def test_an_example_without_comparisons_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "tldr-gemma-2b" / "evaluations" / "judge-tab-example_tldr"
    folder.mkdir(parents=True)
    for text in ("", "{", '{"prompt_id": "a"}\n'):
        (folder / "data.jsonl").write_text(text)
        cells = collect(load_mapping().items["tab:example_tldr"], Options(runs=tmp_path))[1]
        assert all(cell["missing"] for cell in cells)


def test_a_rehearsal_s_own_files(tmp_path: Path) -> None:
    problems = [json.loads(line) for line in problems_file(tmp_path).read_text().splitlines()]
    assert {row["difficulty"] for row in problems} == {"introductory", "interview", "competition"}
    for row in problems:
        tests = json.loads(row["input_output"])
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            a, b = map(int, given.split())
            sign = json.loads(row["solutions"])[0].split("print(a ")[1][0]
            assert int(wanted) == {"+": a + b, "-": a - b, "*": a * b}[sign]
    questions = [json.loads(line) for line in questions_file(tmp_path).read_text().splitlines()]
    assert all(len(row["turns"]) == 2 for row in questions)
    assert (grade(answers=["", ""]), grade(answers=[" ".join(map(str, range(99)))])) == (1, 10)


@pytest.mark.slow
def test_every_command_of_every_table_runs(tmp_path: Path) -> None:
    """`pytest -m slow tests/commands/test_reproduce.py`: half an hour on one core, with the tiny recipe's dialogues."""
    from wpr.recipes import tiny

    tiny.prepare(tmp_path, pairs=1500)
    options = ["--model", str(Path(tiny.__file__).parents[1] / "pico"), "--data", str(tmp_path / "dialogues.jsonl.gz")]
    for _ in range(2):  # the second time everything is there
        finished = run("reproduce", "all", *options, "--scale", "0.01", *SMALL, cwd=tmp_path, timeout=7200)
        assert finished.code == 0, finished.stderr[-3000:]
    assert "done before" in finished.stderr
    assert "Missing: " not in finished.stdout
