"""`wpr pass-at-1` as users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.learned import model_that_completes
from tests.evaluation.humaneval_like import PROBLEMS, write
from tests.pipeline.command import Here, content
from tests.rewards.code.programs import isolated
from wpr.findings import load
from wpr.runs.responses import read_responses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned a right answer to the first problem and a wrong one to the second."""
    programs = ["    return sum(numbers)\n", "    return 5 * x\n"]
    prompts = [problem["prompt"] for problem in PROBLEMS]
    return model_that_completes(tmp_path_factory.mktemp("coder"), dict(zip(prompts, programs, strict=True)))


@isolated
def test_from_a_model_to_a_table(here: Here, model: Path, tmp_path: Path) -> None:
    problems = write(tmp_path)
    command = ["pass-at-1", "-m", f"m={model}", "--problems", str(problems), "-o", str(tmp_path / "out")]
    command += ["--max-new-tokens", "40", "--seconds", "20"]
    here.succeeds(*command)
    finding = load(tmp_path / "out")
    row = dict(zip(finding.columns, finding.rows[0], strict=True))
    assert (row["model"], row["difficulty"], row["problems"], row["pass_at_1"]) == ("m", "humaneval", 2, 0.5)
    assert [row[kind] for kind in ("passed", "wrong", "error", "timeout", "syntax")] == [1, 1, 0, 0, 0]
    assert finding.settings["isolated"] is True
    outcomes = [json.loads(line) for line in (tmp_path / "out/outcomes/m-t0.jsonl").read_text().splitlines()][1:]
    assert [one["kind"] for one in outcomes] == ["passed", "wrong"]
    files = content(tmp_path / "out")
    here.succeeds(*command)
    assert content(tmp_path / "out") == files
    finished = here(*command, "--seconds", "19")
    assert finished.code == 2
    assert "limits.wall_seconds: 20.0 -> 19.0" in finished.error
    here.succeeds(*command, "--seconds", "19", "--restart")
    assert content(tmp_path / "out")["responses/m-t0.jsonl"] == files["responses/m-t0.jsonl"]
    assert content(tmp_path / "out")["outcomes/m-t0.jsonl.old"] == files["outcomes/m-t0.jsonl"]


@isolated
def test_programs_without_an_end(here: Here, model: Path, tmp_path: Path) -> None:
    """Cut after a few bytes, the programs are none, and the finding says why."""
    out = tmp_path / "out"
    command = ["pass-at-1", "-m", f"m={model}", "--problems", str(write(tmp_path)), "-o", str(out)]
    finished = here.succeeds(*command, "--max-new-tokens", "8", "--style", "complete", "--limit", "1")
    row = dict(zip(load(out).columns, load(out).rows[0], strict=True))
    assert (row["problems"], row["pass_at_1"], row["error"]) == (1, 0, 1)
    assert "m: 1 of 1 responses were cut at the longest length allowed" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "x"], "--model needs --problems"),
        (["-m", "x", "--problems", "y", "-o", "z", "--style", "frob"], "--style frob"),
        # Whether programs can be isolated is found out before the problems are read.
        pytest.param(["RUN"], "data.format hh, which has no tests to run", marks=isolated),
        pytest.param(
            ["-m", "MODEL", "--problems", "missing.jsonl", "-o", "z"], "missing.jsonl cannot be read", marks=isolated
        ),
        pytest.param(
            ["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--style", "chat"], "no chat template", marks=isolated
        ),
        (["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--workers", "0"], "workers=0"),
        (["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--seconds", "0"], "more than 0 seconds"),
    ],
)
def test_mistakes(here: Here, whole_run: Path, model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {"RUN": whole_run, "MODEL": model, "PROBLEMS": write(tmp_path), "z": tmp_path / "z"}
    finished = here("pass-at-1", *(str(places.get(one, one)) for one in arguments))
    assert finished.code in (1, 2)
    assert message in finished.error
    assert not (tmp_path / "z").exists()


@isolated
def test_of_a_run_on_problems(here: Here, model: Path, tmp_path: Path) -> None:
    """The held-out problems of a run whose data is in APPS's format, asked as PPO would ask."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {
            "question": f"Print {i}.",
            "input_output": {"inputs": [""], "outputs": [str(i)]},
            "difficulty": "interview" if i % 2 else "introductory",
        }
        for i in range(12)
    ]
    (tmp_path / "apps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "data": {"format": "apps", "source": str(tmp_path / "apps.jsonl")},
        "split": {"sft": 0, "reward": 0, "ppo": 1, "held_out": 0.5},
        "model": {"name": str(model)},
        "sft": None,
        "ppo": {},
        "seed": 0,
    }
    (run / "manifest.json").write_text(json.dumps({"format": 1, "stages": {}, "recipe": recipe}))
    here.succeeds("pass-at-1", str(run), "--max-new-tokens", "8")
    finding = load(run / "evaluations" / "pass-at-1-held-out")
    assert [row[1] for row in finding.rows][-1] == "all"
    assert 1 <= int(finding.rows[-1][2] or 0) < 12
    asked = read_responses(run / "evaluations/pass-at-1-held-out/responses/sft-t0.jsonl").rows
    assert all("QUESTION:\nPrint" in str(row.prompt) for row in asked)
