"""What is refused before a stage starts; refusals of single settings are with these."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.pipeline.command import Here
from tests.pipeline.recipes import write
from wpr import pico
from wpr.config.recipe_file import load_recipe
from wpr.data import Row
from wpr.errors import RecipeError, UserError
from wpr.evaluation.encoders import PACKAGES
from wpr.pipeline.checks import check_forbidden_words, check_monitors, check_scorer, check_stage
from wpr.pipeline.recipe_data import RecipeData
from wpr.runs.folder import RunFolder

RECIPE = """name: small
model: {name: m}
data: {format: demonstrations, source: rows.jsonl, columns: {source: sentence}}
scorer: {kind: function, function: a:b}
evaluation:
  monitors:
    NAME: {SETTINGS}
"""


def check(settings: str, name: str = "same") -> None:
    check_monitors(load_recipe(write(RECIPE.replace("NAME", name).replace("SETTINGS", settings))))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_there_is_not_refused() -> None:
    for settings in (
        "kind: copies", "kind: copies, of: prompt", "kind: fluency, model: pico",
        f"kind: meaning, encoder: {pico.path()}", "kind: function, function: 'math:sqrt'",
    ):  # fmt: skip
        check(settings)


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ("kind: copies, of: original", "same", "monitors.same: the data keeps no column 'original' .it keeps source."),
        ("kind: copies", "entropy", "a number called 'entropy'"),
        ("kind: copies", "self_bleu", "a number called 'self_bleu'"),
        ("kind: copies", "words-kept", "or it is no name"),
        ("kind: function, function: 'no.such:thing'", "same", "cannot be imported"),
        ("kind: meaning, encoder: no/such", "same", "monitors.same.encoder: "),
        ("kind: fluency, model: no/such", "same", "monitors.same.model: "),
    ],
)
def test_what_is_not_there(settings: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(settings, name)


def test_an_encoder_s_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "wordllama", ("no_such_wordllama", *PACKAGES["wordllama"][1:]))
    with pytest.raises(RecipeError, match=r"encoder=wordllama: .*`pip install wordllama`.*monitors.same=null"):
        check("kind: meaning, encoder: wordllama")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_missing_is_told_before_the_first_stage(here: Here, tmp_path: Path) -> None:
    refused = here("run", "tiny", "ppo.generation=vllm", f"output={tmp_path / 'run'}")
    assert "ppo.generation='vllm' needs the package vllm in this environment" in refused.error
    assert not (tmp_path / "run" / "prepare").exists()


def test_vllm_takes_no_weights_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tiny", ["ppo.generation=vllm", "ppo.vllm_url=http://x", f"output={tmp_path}"]).policy("rkl")
    check_stage("ppo/rkl", recipe, RunFolder(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RecipeError, match=r"ppo.generation='vllm' serves one process .*which hold parts of them"):
        check_stage("ppo/rkl", recipe, RunFolder(tmp_path))


def test_trl_trains_no_weights_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = load_recipe("tiny", ["trainer=grpo", "ppo.responses_per_prompt=4", f"output={tmp_path}"])
    with pytest.raises(RecipeError, match="trainer: grpo cannot train weights that ZeRO-3 or FSDP hold in parts"):
        check_stage("ppo/rkl", recipe.policy("rkl"), RunFolder(tmp_path))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    check_stage("ppo/rkl", recipe.policy("rkl"), RunFolder(tmp_path))


def test_the_list_of_words_that_is_at_fault_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("cat\n")
    (tmp_path / "bad.txt").write_text("[]\n")
    text = RECIPE.partition("scorer")[0] + "scorer:\n  WORDS\n  PREFERRED\n  placement: end\n"
    for words, preferred, line in (("good", "bad", 6), ("bad", "good", 5)):
        lists = text.replace("WORDS", f"words: {words}.txt").replace("PREFERRED", f"preferred: {preferred}.txt")
        with pytest.raises(RecipeError, match=rf"line {line}: scorer.kind=words: bad.txt:1: '\[\]' has no letter"):
            check_scorer(load_recipe(write(lists)))


def test_words_that_hardly_occur_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [Row("p", chosen="A small dog barked."), Row("q", chosen="It was small.")]
    data = cast(RecipeData, SimpleNamespace(corpus=SimpleNamespace(rows=rows)))
    words = tmp_path / "words.txt"
    for entries, warned in ((["small", "one", "two"], False), (["small", "one", "two", "three", "four", "five"], True)):
        words.write_text("\n".join(entries))
        caplog.clear()
        check_forbidden_words(load_recipe("tiny", ["reward=null", f"reward.words={words}"]), data)
        assert ("5 of 6 entries (one, two, three, four, five) do not occur in 2 completions" in caplog.text) is warned
    words.write_text("one\ntwo\n")
    recipe = load_recipe("tiny", ["reward=null", f"reward.words={words}"])
    with pytest.raises(RecipeError, match=r"words.txt: none of its 2 entries \(one, two\) occurs in 2 completions"):
        check_forbidden_words(recipe, data)
    rows[:] = [Row("p")]  # nothing says what would be written
    check_forbidden_words(recipe, data)
