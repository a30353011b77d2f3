"""`wpr generate` as users meet it: of runs, of models, killed, with other settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.pipeline.command import Here, content, start
from tests.ppo.vllm_server import served
from wpr import pico
from wpr.findings import load
from wpr.runs.responses import read_responses


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"Once upon a time there was a {'very ' * (i % 5)}small dog number {i}."} for i in range(24))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_of_a_run(here: Here, own_run: Path) -> None:
    finished = here.succeeds("generate", str(own_run), "-t", "0", "-t", "0.7", "--limit", "5")
    files = sorted(path.name for path in (own_run / "generations").iterdir())
    assert files == ["rkl-t0.7.jsonl", "rkl-t0.jsonl", "sft-t0.7.jsonl", "sft-t0.jsonl"]
    sft, rkl = (read_responses(own_run / "generations" / f"{name}-t0.7.jsonl") for name in ("sft", "rkl"))
    assert [row.prompt_id for row in sft.rows] == [row.prompt_id for row in rkl.rows]
    assert sft.header["fingerprint"]["weights"] != rkl.header["fingerprint"]["weights"]
    assert sft.header["fingerprint"]["tokenizer"] == rkl.header["fingerprint"]["tokenizer"]
    assert sft.header["sampling"] == {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}
    finding = load(own_run / "evaluations" / "generate")
    assert [row[0] for row in finding.rows] == ["rkl-t0.7", "rkl-t0", "sft-t0.7", "sft-t0"]
    assert "Generated responses" in finished.stdout
    # The prompts are those that the policies were measured on.
    measured = read_responses(own_run / "ppo/rkl/responses.jsonl").rows[:5]
    assert [(row.prompt_id, row.prompt) for row in sft.rows] == [(row.prompt_id, row.prompt) for row in measured]
    before = {path.name: path.read_bytes() for path in (own_run / "generations").iterdir()}
    here.succeeds("generate", str(own_run), "-t", "0", "-t", "0.7", "--limit", "5", "--batch-size", "2")
    assert {path.name: path.read_bytes() for path in (own_run / "generations").iterdir()} == before


def test_a_manifest_cannot_lead_out_of_the_run(here: Here, own_run: Path) -> None:
    """A run's folder that came from elsewhere: responses would have been written beside it."""
    manifest = json.loads((own_run / "manifest.json").read_text())
    manifest["stages"]["ppo/../../escaped/x"] = manifest["stages"]["ppo/rkl"]
    (own_run / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(own_run / "ppo" / "rkl", own_run.parent / "escaped" / "x")
    before = content(own_run.parent)
    for command in (["generate"], ["analyze", "coherence"], ["analyze", "costs"]):
        finished = here(*command, str(own_run))
        assert finished.code == 2
        assert f"{own_run / 'manifest.json'} names the stage 'ppo/../../escaped/x', which no run can" in finished.error
    assert content(own_run.parent) == before


def test_a_damaged_file_beside_does_not_spoil_the_table(here: Here, own_run: Path) -> None:
    (own_run / "generations").mkdir(exist_ok=True)
    damaged = own_run / "generations" / "other-t1.jsonl"
    damaged.write_text('{"prompt_id": "1')
    finished = here.succeeds("generate", str(own_run), "--policy", "rkl", "--limit", "2", "-t", "0")
    assert f"left out of the table: {damaged}:1 is not JSON" in finished.stderr
    assert [row[0] for row in load(own_run / "evaluations" / "generate").rows] == ["rkl-t0", "sft-t0"]


def test_a_journal_that_was_changed_by_hand(here: Here, own_run: Path) -> None:
    """A byte order mark is no harm; a line without its prompt is named, and taken out it is made again."""
    command = ("generate", str(own_run), "--policy", "rkl", "--limit", "3", "-t", "0")
    here.succeeds(*command)
    path = own_run / "generations" / "rkl-t0.jsonl"
    expected = path.read_bytes()
    growing = path.rename(path.with_name(path.name + ".partial"))
    header, first, second, _ = expected.splitlines(keepends=True)
    nameless = json.dumps({key: value for key, value in json.loads(second).items() if key != "prompt_id"}).encode()
    growing.write_bytes(BOM_UTF8 + header + first + nameless + b"\n")
    finished = here(*command)
    assert finished.code == 2
    assert f"{growing}:3 has no 'prompt_id'" in finished.error
    assert "delete the line, which is then made again" in finished.error
    growing.write_bytes(BOM_UTF8 + header + first)
    here.succeeds(*command)
    assert path.read_bytes() == expected


def test_other_settings_are_refused(here: Here, own_run: Path) -> None:
    here.succeeds("generate", str(own_run), "--policy", "rkl", "--limit", "3")
    finished = here("generate", str(own_run), "--policy", "rkl", "--limit", "3", "--top-k", "5")
    assert finished.code == 2
    assert "sampling.top_k: 0 -> 5" in finished.error
    here.succeeds("generate", str(own_run), "--policy", "rkl", "--limit", "3", "--top-k", "5", "--restart")
    assert (own_run / "generations" / "sft-t0.5.jsonl.old").exists()
    assert read_responses(own_run / "generations" / "sft-t0.5.jsonl").header["sampling"]["top_k"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what shall answer"),
        (["RUN", "-m", "x"], "not both"),
        (["nowhere"], "nowhere is not a run folder"),
        (["RUN", "--policy", "frob"], "has no model frob; it has sft, rkl"),
        (["-m", "x", "-o", "y"], "--prompts"),
        (["-m", "x", "--prompts", "y"], "-o"),
        (["-m", "a/model", "-m", "b/a", "--prompts", "y", "-o", "z"], "would be called a"),
        (["RUN", "--temperature", "-1"], "temperature is -1.0"),
        (["RUN", "--batch-size", "0"], "batch-size is 0"),
        (["RUN", "--dtype", "int8"], "--dtype int8 is not known"),
        (["RUN", "--device", "frob"], "--device frob"),
        (["RUN", "--generation", "frob"], "generation='frob' must be one of auto, transformers, graphs, vllm"),
        (["RUN", "--vllm-url", "http://x"], "no effect with generation='auto'"),
        (["RUN", "--max-new-tokens", "1000"], "positions"),
        (["-m", "/nonexistent/model", "--prompts", "PROMPTS", "-o", "z"], "--model"),
        (["-m", "PICO", "--prompts", "missing.jsonl", "-o", "z"], "missing.jsonl cannot be read"),
        (["-m", "PICO", "--prompts", "PROMPTS", "--format", "frob", "-o", "z"], "frob"),
        (["-m", "PICO", "--prompts", "PROMPTS", "--template", "chat", "-o", "z"], "chat template"),
    ],
)
def test_mistakes(
    here: Here, whole_run: Path, prompts: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"RUN": str(whole_run), "PICO": str(pico.path()), "PROMPTS": str(prompts), "z": str(tmp_path / "z")}
    finished = here("generate", *(places.get(one, one) for one in arguments))
    assert finished.code in (1, 2)
    assert message in finished.error
    assert not (tmp_path / "z").exists() or not any((tmp_path / "z").iterdir())
    assert not (whole_run / "generations").exists() or not any((whole_run / "generations").glob("*.jsonl"))


def test_drawn_by_a_vllm_server(here: Here, prompts: Path, tmp_path: Path) -> None:
    """Its draws are others, so that its files are not taken for those of other back ends."""
    command = ["generate", "-m", f"story={pico.path()}", "--prompts", str(prompts), "--limit", "3", "-o",
               str(tmp_path / "out"), "--max-new-tokens", "6", "--device", "cpu"]  # fmt: skip
    with served(AutoModelForCausalLM.from_pretrained(pico.path(), dtype="float32"), max_length=256) as server:
        vllm = [*command, "--generation", "vllm", "--vllm-url", server.url]
        here.succeeds(*vllm)
        assert (server.loads, server.completions) == (1, 3)
        made = read_responses(tmp_path / "out" / "story-t0.5.jsonl")
        assert made.header["generation"] == "vllm"
        assert sorted(one["seed"] for one in server.asked) == sorted({one["seed"] for one in server.asked})
        refused = here(*command)
        assert refused.code == 2
        assert "generation" in refused.error
        server.bad.add("short")
        broken = here(*vllm, "-t", "1")
    assert broken.code == 1
    assert "of 6 tokens, without an end token" in broken.error
    assert "run the same command again" in broken.error


def test_killed_and_gone_on(here: Here, prompts: Path, tmp_path: Path) -> None:
    """Killed without warning in the middle, with a line half written: what was answered stays, the rest follows."""
    common = [
        "generate",
        "-m",
        f"story={pico.path()}",
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "40",
        "-t",
        "0.8",
    ]
    process = start(*common, "--batch-size", "2", "-o", "cut", cwd=tmp_path)
    partial = tmp_path / "cut" / "story-t0.8.jsonl.partial"
    deadline = time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 7:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = partial.read_bytes()
    assert not (tmp_path / "cut" / "story-t0.8.jsonl").exists()
    partial.write_bytes(kept + b'{"prompt_id": "hal')
    here.succeeds(*common, "--batch-size", "16", "-o", str(tmp_path / "cut"))
    here.succeeds(*common, "--batch-size", "7", "-o", str(tmp_path / "whole"))
    cut, whole = (read_responses(tmp_path / name / "story-t0.8.jsonl") for name in ("cut", "whole"))
    assert len(whole.rows) == 24
    assert cut.rows == whole.rows
    assert not partial.exists()


def test_a_run_whose_data_is_gone(here: Here, own_run: Path, tmp_path: Path) -> None:
    """It is told what else can be answered, and that works."""
    (own_run / "prepare" / "dialogues.jsonl.gz").unlink()
    finished = here("generate", str(own_run))
    assert finished.code == 2
    kept = own_run / "ppo" / "rkl" / "responses.jsonl"
    assert "--prompts" in finished.error
    here.succeeds("generate", str(own_run), "--prompts", str(kept), "-o", str(tmp_path / "out"), "-p", "rkl")
    measured = [json.loads(line)["prompt"] for line in kept.read_text().splitlines()]
    assert [row.prompt for row in read_responses(tmp_path / "out" / "sft-t0.5.jsonl").rows] == list(
        dict.fromkeys(measured)
    )


def test_an_unfinished_policy_is_left_out(here: Here, own_run: Path) -> None:
    manifest = json.loads((own_run / "manifest.json").read_text())
    manifest["stages"]["ppo/rkl"]["status"] = "interrupted"
    (own_run / "manifest.json").write_text(json.dumps(manifest))
    finished = here.succeeds("generate", str(own_run), "--limit", "2")
    assert "policy rkl is not finished, and left out" in finished.stderr
    assert [path.name for path in (own_run / "generations").iterdir()] == ["sft-t0.5.jsonl"]
    assert "policy rkl of" in here("generate", str(own_run), "--policy", "rkl").error
