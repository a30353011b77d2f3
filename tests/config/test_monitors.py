"""Monitors in recipes: what each kind needs, and what it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.recipes import SMALL, refusal, write
from wpr.config.monitors import MonitorSettings
from wpr.config.recipe_file import load_recipe


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_gold_is_a_function_s_name_or_a_monitor() -> None:
    text = (
        SMALL
        + "evaluation:\n  gold: {kind: meaning, encoder: minilm}\n  monitors: {same: {kind: copies, of: prompt}}\n"
    )
    found = load_recipe(write(text), ["evaluation.gold.encoder=wordllama"]).evaluation.watched
    assert found == {
        "gold": MonitorSettings("meaning", encoder="wordllama"),
        "same": MonitorSettings("copies", of="prompt"),
    }
    assert (found["gold"].source, found["same"].source) == ("source", "prompt")
    # Held-out scores are the same with and without it, so that policies can be compared by them.
    spared = load_recipe(write(text), ["evaluation.gold.encoder=wordllama", "evaluation.gold.in_training=false"])
    assert not spared.evaluation.watched["gold"].in_training
    assert spared.evaluation.watched_settings["gold"] == {"kind": "meaning", "encoder": "wordllama"}
    named = load_recipe(write(SMALL), ["evaluation.gold=a.b:c"]).evaluation.watched
    assert named == {"gold": MonitorSettings("function", function="a.b:c")}
    assert named["gold"].source is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("gold: {kind: meaning}", "kind=meaning needs encoder"),
        ("gold: {kind: fluency, encoder: x}", "kind=fluency needs model"),
        ("gold: {kind: copies, encoder: x}", "encoder=x has no meaning for kind=copies"),
        ("gold: {kind: fluency, model: x, of: prompt}", "of=prompt has no meaning for kind=fluency"),
        ("gold: {kind: meanign, encoder: x}", "must be 'meaning' or 'words-kept'"),
        ("gold: {kind: meaning, encodr: x}", "did you mean evaluation.gold.encoder"),
        ("gold: 3", "must be text or settings"),
        ("monitors: {gold: {kind: copies}}", "monitors has gold, which is a setting of its own"),
    ],
)  # fmt: skip
def test_refusals(settings: str, message: str) -> None:
    assert message in refusal(f"{SMALL}evaluation:\n  {settings}\n")
