"""Finished runs as the manifest tells them: policies, settings, models, and responses as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ppo.tiny import tokenizer
from wpr.errors import OptionError, RunFolderError
from wpr.runs.finished_run import REFERENCE, FinishedRun
from wpr.runs.folder import FORMAT

RECIPE = {
    "sft": None,
    "model": {"name": "{prepare}/model", "precision": "auto"},
    "data": {"format": "prompts", "source": ["{prepare}/a.jsonl"], "template": "text"},
    "scorer": {"kind": "model", "name": "{prepare}/judge"},
}


def stage(status: str = "done", **parts: Any) -> dict[str, Any]:
    return {"inputs": {"ppo": {}}, "status": status, **parts}


def write_run(folder: Path, stages: dict[str, Any], recipe: dict[str, Any] | None = None) -> FinishedRun:
    """A run whose policies have an empty folder as their model."""
    for name, record in stages.items():
        if record["status"] == "done":
            (folder / name / "model").mkdir(parents=True, exist_ok=True)
    manifest = {"format": FORMAT, "stages": stages, "recipe": recipe or RECIPE}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return FinishedRun(folder)


def test_policies_that_are_done_and_have_their_model(tmp_path: Path) -> None:
    stages = {"prepare": stage(), "ppo/a": stage(), "ppo/b": stage("running"), "ppo/c": stage()}
    write_run(tmp_path, stages)
    (tmp_path / "ppo/c/model").rmdir()
    run = FinishedRun(tmp_path)
    assert (run.finished, run.unfinished) == (["a"], ["b", "c"])
    assert run.choose(None) == run.choose(["a", "a"]) == ["a"]
    with pytest.raises(OptionError, match="has no finished policy b; finished are: a"):
        run.choose(["b"])
    with pytest.raises(RunFolderError, match="has no finished policy; let `wpr run` finish one first"):
        write_run(tmp_path / "ppo", {}).choose(None)


def test_what_prepare_made_is_in_the_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"ppo/a": stage()})
    assert run.model(REFERENCE) == f"{tmp_path}/prepare/model"
    assert run.model("a") == f"{tmp_path}/ppo/a/model"
    assert run.data.source == [f"{tmp_path}/prepare/a.jsonl"]
    assert run.scorer()[1] == f"{tmp_path}/prepare/judge"
    assert run.manifest["recipe"] == RECIPE


def test_settings_are_those_that_were_used(tmp_path: Path) -> None:
    """Recorded with the stage; of runs of earlier releases, which recorded none, as the recipe has them."""
    set_by_hand = {"inputs": {"ppo": {"logprob_temperature": 0.6}}}
    stages = {
        "ppo/new": stage(settings={"logprob_temperature": 0.7}),
        "ppo/older": stage() | set_by_hand,
        "ppo/oldest": stage(),
    }
    run = write_run(tmp_path, stages)
    assert [run.temperature(name) for name in run.finished] == [0.7, 0.6, 1.0]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="has no manifest.json; name the folder that `wpr run` wrote"):
        FinishedRun(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "stages": {}}))
    with pytest.raises(RunFolderError, match="has no recipe; let `wpr run` go on"):
        FinishedRun(tmp_path)
    with pytest.raises(RunFolderError, match="has no finished SFT model yet"):
        write_run(tmp_path, {}, RECIPE | {"sft": {}}).model(REFERENCE)


NEW = {"number": 4, "prompt_id": "x", "prompt": "w3", "response": "w5", "response_ids": [9, 9], "length": 2, "score": 1}
OLD = {"number": 5, "prompt": "w4", "response": "w6", "length": 1, "finished": False, "score": 1}


def test_responses_of_this_and_of_earlier_releases(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"ppo/a": stage()})
    run.tokenizer = tokenizer()
    path = tmp_path / "ppo" / "a" / "responses.jsonl"
    with pytest.raises(RunFolderError, match="is missing: the run has no held-out responses"):
        run.responses("a")
    path.write_text("".join(json.dumps(row) + "\n\n" for row in (NEW, OLD)))
    found = run.responses("a")
    assert [(row.number, row.prompt_id, row.drawn, row.measured("score")) for row in found] == [
        (4, "x", True, 1.0), (5, "5", False, 1.0),
    ]  # fmt: skip
    assert [(list(row.prompt_ids), list(row.response_ids)) for row in found] == [([3], [9, 9]), ([4], [6])]
    assert run.responses("a", limit=1) == found[:1]
    for line, message in (
        ("{", ":5 is damaged .*restore it from a copy"),
        ('{"number": 1}', ":5 has no 'prompt'"),
        ('{"prompt": "w3", "response": "w5"}', ":5 has no 'prompt_id' .*restore it from a copy"),
    ):
        path.write_text("".join(json.dumps(row) + "\n\n" for row in (NEW, OLD)) + line)
        with pytest.raises(RunFolderError, match=message):
            run.responses("a")
