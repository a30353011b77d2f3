"""`wpr.run`: what the command does, from Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import wpr
from tests.pipeline.command import SMALL, content
from wpr.config.recipe_file import load_recipe
from wpr.errors import OptionError, RecipeError, RunFolderError
from wpr.pipeline import from_python
from wpr.pipeline.from_python import _as_yaml, _dotted
from wpr.runs.finished_run import REFERENCE

SETTINGS = {key: value for key, _, value in (text.partition("=") for text in SMALL) if key != "train"}


def test_a_finished_run_is_resumed_and_read(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the settings that the command had, nothing is trained again; the files are those of the command."""
    shutil.copytree(whole_run, tmp_path / "run")
    before = content(tmp_path / "run")
    numbers = {key: int(value) for key, value in SETTINGS.items()}
    run = wpr.run("tiny", numbers, policies="rkl", output=tmp_path / "run", train=["rkl"])
    assert "ppo/rkl: done before" in capsys.readouterr().out
    assert content(tmp_path / "run") == before
    assert list(run.policies) == ["rkl"]
    assert set(run.results["policy"]) == {"rkl", "SFT"}
    assert len(run.responses("rkl")) == 6
    assert run.metrics("rkl")["step"].tolist() == [1, 2]
    model = run.models.load("rkl")
    assert model.config.vocab_size >= len(run.models.tokenizer)
    assert run.models.model(REFERENCE) == str(tmp_path / "run" / "sft" / "model")
    with pytest.raises(RunFolderError, match="ppo.beta"):  # another setting than the stage was made with
        wpr.run("tiny", numbers, output=tmp_path / "run", train=["rkl"], ppo={"beta": 0.7}, quiet=True)


def test_sections_and_dotted_names_are_one() -> None:
    given = {"ppo": {"beta": 1e-5, "optim": "adamw_torch"}, "model": {"lora": None}, "train": ["rkl"], "seed": 3}
    dotted = dict(_dotted(given))
    assert dotted == {
        "ppo.beta": 1e-5, "ppo.optim": "adamw_torch", "model.lora": None, "train": ["rkl"], "seed": 3,
    }  # fmt: skip
    recipe = load_recipe("tiny", [f"{key}={_as_yaml(key, value)}" for key, value in dotted.items()])
    typed = load_recipe("tiny", ["ppo.beta=1e-5", "ppo.optim=adamw_torch", "model.lora=null", "train=[rkl]", "seed=3"])
    assert recipe.as_dict() == typed.as_dict()
    assert _as_yaml("output", Path("a: b")) == '"a: b"'
    assert _as_yaml("train", ("a", "b")) == '["a", "b"]'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ppo": {"betta": 1}}, r"wpr.run \(ppo.betta=1\): unknown setting ppo.betta; did you mean ppo.beta\?"),
        ({"ppo": {"beta": object()}}, r"ppo.beta=<object .* cannot stand in a recipe"),
        ({"ppo": {"beta": float("nan")}}, r"ppo.beta=nan cannot stand in a recipe"),
        ({"policies": ["rlk"]}, "rlk"),
        ({"recipe": "tinny"}, r"tinny.*did you mean tiny\?"),
    ],
)
def test_what_is_refused_before_anything_is_written(
    arguments: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=message):
        wpr.run(**({"recipe": "tiny"} | arguments))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on_change='replace' must be one of refuse, restart, keep"):
        from_python.run("tiny", on_change="replace")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
