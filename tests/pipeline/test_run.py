"""Planning, and what a second run finds: stages done, changed, gone or broken off. The stages that are run are real."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import command
from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError, RunFolderError
from wpr.pipeline.run import OnChange, PlannedStage, Run, plan, results_of, trainer_of

SMALL = [
    "prepare.options.pairs=60",
    "prepare.options.hidden=16",
    "prepare.options.layers=1",
    "sft.max_steps=1",
    "sft.warmup_steps=0",
    "reward.max_steps=1",
    "reward.warmup_steps=0",
    "sft.report_to=none",
    "reward.report_to=none",
    "evaluation.rows=4",
]


def tiny(output: Path, *changes: str) -> Recipe:
    return load_recipe("tiny", [*SMALL, f"output={output}", *changes])


def execute(recipe: Recipe, only: set[str] | None, on_change: OnChange = "refuse") -> list[str]:
    """Run the stages; what was said."""
    said: list[str] = []
    Run(recipe, on_change, said.append).execute(plan(recipe), only)
    return said


def records(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "manifest.json").read_text())["stages"]
    return found


# Planning.


def names(recipe: Recipe, policies: list[str] | None = None) -> list[str]:
    return [stage.name for stage in plan(recipe, policies)]


def needs(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    return {stage.name: stage.needs for stage in plan(recipe)}


def inputs(*changes: str) -> dict[str, Any]:
    """What decides each stage's outcome."""
    return {stage.name: stage.inputs for stage in plan(load_recipe("tiny", list(changes)))}


def test_stages_in_order_with_what_they_need() -> None:
    assert needs(load_recipe("tiny")) == {
        "prepare": (),
        "sft": ("prepare",),
        "reward": ("sft",),
        "ppo/rkl": ("sft", "reward"),
        "ppo/semantic": ("sft", "reward"),
    }


def test_stages_that_are_left_out() -> None:
    without = load_recipe("tiny", ["sft=null", "prepare=null", "reward=null", "scorer.name=some/model"])
    assert needs(without) == {"ppo/rkl": (), "ppo/semantic": ()}
    assert needs(load_recipe("tiny", ["sft=null"]))["ppo/rkl"] == ("prepare", "reward")
    # APPS: programs are rewarded by their tests.
    assert needs(load_recipe("apps-codegemma-7b")) == {"sft": (), "ppo/paper": ("sft",)}


def test_policies_are_those_of_train_or_those_asked_for() -> None:
    recipe = load_recipe("hh-smollm2-135m")
    assert names(recipe) == ["sft", "reward", "ppo/rkl", "ppo/paper", "ppo/sum"]
    assert names(recipe, ["hellinger"]) == ["sft", "reward", "ppo/hellinger"]
    assert names(recipe, []) == ["sft", "reward"]
    with pytest.raises(RecipeError, match="did you mean hellinger"):
        plan(recipe, ["helinger"])


def test_a_policy_s_recipe_has_its_own_settings() -> None:
    stages = {stage.name: stage for stage in plan(load_recipe("tldr-gemma-2b"), ["rkl", "paper"])}
    assert [stages[f"ppo/{name}"].recipe.ppo["beta"] for name in ("rkl", "paper")] == [0.005, 0.05]
    assert stages["sft"].recipe.name == "tldr-gemma-2b"


def test_members_of_a_sweep_are_policies() -> None:
    changes = {"rkl+beta=0.5": {"ppo.beta": 0.5}, "rkl": {}}
    stages: list[PlannedStage] = plan(load_recipe("tiny"), list(changes), changes)
    found = {stage.name: stage.inputs["ppo"]["beta"] for stage in stages if stage.name.startswith("ppo")}
    assert found == {"ppo/rkl+beta=0.5": 0.5, "ppo/rkl": 0.05}


def test_a_policy_whose_name_has_a_plus(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny\nname: mine\npolicies: {rkl+more: {ppo: {beta: 0.9}}}\n")
    stages = {stage.name: stage for stage in plan(load_recipe(str(path)))}
    assert stages["ppo/rkl+more"].inputs["ppo"]["beta"] == 0.9


STAGES = ("prepare", "sft", "reward", "ppo/rkl", "ppo/semantic")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("seed=1", STAGES),
        ("prepare.options.pairs=3", ("prepare",)),
        ("model.lora.r=4", ("sft", "reward", "ppo/rkl", "ppo/semantic")),
        ("sft.learning_rate=1e-3", ("sft",)),
        ("sft.batch_size=8", ("sft",)),
        ("reward.num_train_epochs=9", ("reward",)),
        ("ppo.beta=0.3", ("ppo/rkl", "ppo/semantic")),
        ("policies.rkl.ppo.beta=0.3", ("ppo/rkl",)),
        ("policies.semantic.regularizer.lam=7", ("ppo/semantic",)),
        ("policies.rkl.regularizer.estimator=paper", ("ppo/rkl",)),
        ("scorer.name=some/model", ("ppo/rkl", "ppo/semantic")),
        ("critic=some/model", ("ppo/rkl", "ppo/semantic")),
        ("policies.rkl.regularizer.gauge=raw", ("ppo/rkl",)),
    ],
)
def test_what_decides_which_stage(change: str, changed: tuple[str, ...]) -> None:
    """By itself: what comes from the stages below is compared through their records."""
    before, after = inputs(), inputs(change)
    assert tuple(name for name in STAGES if before[name] != after[name]) == changed


@pytest.mark.parametrize(
    "change",
    ["output=elsewhere", "description=other", "name=other", "scorer.workers=3", "sft.logging_steps=7",
     "sft.gradient_checkpointing=true", "sft.save_steps=9", "reward.save_total_limit=1", "ppo.report_to=none",
     "ppo.log_completions=1", "ppo.generation_batch_size=7", "train=[semantic, rkl]"],
)  # fmt: skip
def test_what_decides_nothing(change: str) -> None:
    before, after = inputs(), inputs(change)
    assert {name: after[name] for name in STAGES} == before


def test_settings_written_out_are_no_change() -> None:
    """The preset's own numbers, given or left to it."""
    given = ["policies.semantic.regularizer.lam=40", "policies.semantic.regularizer.metric=euclidean"]
    assert inputs(*given) == inputs()


def test_inputs_are_the_same_after_a_manifest() -> None:
    found = inputs("model.lora.r=4", "sft.max_steps=3", "policies.semantic.regularizer.scale=2.5")
    assert json.loads(json.dumps(found)) == found


def test_every_stage_has_a_trainer() -> None:
    assert [trainer_of(kind).__name__ for kind in ("prepare", "sft", "reward", "ppo")] == [
        "prepare", "train_sft", "train_reward", "train_ppo",
    ]  # fmt: skip


# Running.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has its data, its SFT model and its reward model."""
    output = tmp_path_factory.mktemp("trained") / "run"
    execute(tiny(output), {"sft", "reward"})
    return output


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, to do things to."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_writes_down_what_it_did(trained: Path) -> None:
    manifest = json.loads((trained / "manifest.json").read_text())
    assert {name: record["status"] for name, record in manifest["stages"].items()} == {
        "prepare": "done", "sft": "done", "reward": "done",
    }  # fmt: skip
    for name in ("sft", "reward"):
        assert (trained / name / "model" / "config.json").exists()
        assert manifest["stages"][name]["results"]["steps"] == 1
        assert manifest["stages"][name]["seconds"] > 0
        assert manifest["stages"][name]["peak_memory_gb"] > 0
        settings = manifest["stages"][name]["settings"]  # all that the trainer used, of which the recipe sets a few
        assert settings["max_steps"] == 1
        assert settings["adam_beta2"] == 0.999
        assert "adam_beta2" not in manifest["stages"][name]["inputs"][name]
    assert manifest["seed"] == 0
    assert manifest["data"]["rows"] == 60
    assert len(manifest["commands"]) == 1
    assert set(results_of(trained)) == {"prepare", "sft", "reward"}
    assert results_of(trained)["prepare"]["pairs"] == 60
    assert load_recipe(str(trained / "recipe.yaml")) == tiny(trained)


def test_the_log_says_what_was_done(trained: Path) -> None:
    log = (trained / "run.log").read_text()
    assert "sft: 16 rows, 16 kept" in log


def test_held_out_rows_are_as_many_as_the_recipe_says(trained: Path) -> None:
    assert results_of(trained)["reward"]["held_out"]["pairs"] == 4


def test_done_stages_are_skipped(run: Path, trained: Path) -> None:
    before = records(run)
    # The folder was moved: what decides a stage is not where it lies.
    said = execute(tiny(run), {"sft", "reward"})
    assert [line.partition(" (")[0] for line in said] == [
        f"{name}: done before" for name in ("prepare", "sft", "reward")
    ]
    assert records(run) == before
    assert not [handler for handler in logging.getLogger("wpr").handlers if isinstance(handler, logging.FileHandler)]


def test_too_few_prompts_for_a_rollout_are_refused_before_training(tmp_path: Path) -> None:
    message = r"ppo/\w+: split.ppo=\S+ leaves \d+ prompts for it, fewer than the 640 .* lower ppo.batch_size=640"
    with pytest.raises(RecipeError, match=message):
        execute(tiny(tmp_path / "run", "ppo.batch_size=640"), None)
    assert list(records(tmp_path / "run")) == ["prepare"]
    with pytest.raises(RecipeError, match="fewer than the 320 of one rollout"):
        execute(tiny(tmp_path / "run", "ppo.batch_size=640", "ppo.responses_per_prompt=2", "trainer=grpo"), None)


def test_an_option_that_prepare_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"prepare.options.sentences is no option of wpr.recipes.tiny:prepare; it has"
    ):
        execute(tiny(tmp_path / "run", "prepare.options.sentences=3"), None)


def test_a_list_of_words_that_is_gone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("cat\n")
    recipe = tiny(run, "train=[rkl]", "reward=null", f"reward.words={tmp_path / 'w.txt'}")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["stages"]["ppo/rkl"] = manifest["stages"]["sft"] | {"inputs": plan(recipe)[-1].inputs}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "w.txt").unlink()
    with pytest.raises(RunFolderError, match=r"ppo/rkl: scorer.words=\S+w.txt is gone, which it was made with; put it"):
        execute(recipe, {"ppo"})


def test_a_policy_that_is_done_under_another_gold(run: Path) -> None:
    changes = ["train=[rkl]", "evaluation.gold={kind: copies, of: prompt}"]
    own = {"gold": {"kind": "words-kept", "of": "prompt"}}
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["stages"]["ppo/rkl"] = manifest["stages"]["sft"] | {"results": {"watched": own}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "ppo" / "rkl" / "model").mkdir(parents=True)
    said = execute(tiny(run, *changes), {"ppo"}, "keep")
    assert any("its gold was measured by {'kind': 'words-kept', 'of': 'prompt'}, not by" in line for line in said)
    said = execute(tiny(run, changes[0], "evaluation.gold={kind: words-kept, of: prompt}"), {"ppo"}, "keep")
    assert not any("measured by" in line for line in said)


def test_settings_without_effect_change_nothing(run: Path) -> None:
    before = records(run)
    execute(tiny(run, "sft.logging_steps=99", "reward.save_steps=99"), {"sft", "reward"})
    assert records(run) == before


def test_other_settings_are_refused(run: Path) -> None:
    before = records(run)
    with pytest.raises(RunFolderError) as caught:
        execute(tiny(run, "sft.learning_rate=1e-3", "sft.max_steps=2"), {"sft", "reward"})
    message = str(caught.value)
    assert f"sft in {run} was made by other settings" in message
    assert "sft.learning_rate: 0.005 -> 0.001; sft.max_steps: 1 -> 2" in message
    for remedy in ("output=...", "--on-change restart", "--on-change keep"):
        assert remedy in message
    assert records(run) == before


def test_a_long_list_of_changes_is_cut(run: Path) -> None:
    changes = ["learning_rate=1", "max_steps=2", "num_train_epochs=3", "batch_size=4", "warmup_steps=5",
               "weight_decay=6", "adam_beta1=0.5"]  # fmt: skip
    with pytest.raises(RunFolderError, match="and 2 more"):
        execute(tiny(run, *(f"sft.{change}" for change in changes)), {"sft"})


def test_other_settings_may_be_kept(run: Path) -> None:
    before = records(run)
    said = execute(tiny(run, "sft.learning_rate=1e-3"), {"sft", "reward"}, "keep")
    assert "sft: kept, although its settings have changed (sft.learning_rate: 0.005 -> 0.001)" in said
    assert records(run) == before


def test_a_changed_stage_starts_anew_and_so_do_those_above_it(run: Path) -> None:
    said = execute(tiny(run, "sft.learning_rate=1e-3"), {"sft", "reward"}, "restart")
    assert [line.split(",")[0] for line in said if "changed" in line] == [
        "sft: its settings have changed", "reward: its settings have changed",
    ]  # fmt: skip
    after = records(run)
    assert after["sft"]["inputs"]["sft"]["learning_rate"] == 1e-3
    assert {name: record["status"] for name, record in after.items()} == {
        "prepare": "done", "sft": "done", "reward": "done",
    }  # fmt: skip
    for name in ("sft", "reward"):
        (old,) = (run / "old").glob(f"{name}-*")
        weights = [folder / "model" / "model.safetensors" for folder in (old, run / name)]
        assert weights[0].read_bytes() != weights[1].read_bytes()
    execute(tiny(run, "sft.learning_rate=1e-3"), {"sft", "reward"})  # and now it is what is there


def test_other_data_are_refused(run: Path) -> None:
    path = run / "prepare" / "dialogues.jsonl.gz"
    with gzip.open(path) as file:
        lines = file.read().splitlines()
    with gzip.open(path, "wb") as file:
        file.write(b"\n".join(lines[:-1]) + b"\n")
    with pytest.raises(RunFolderError, match=r"sft in .* was made by other settings: data\.fingerprint: "):
        execute(tiny(run), {"sft"})


def test_another_split_is_refused(run: Path) -> None:
    with pytest.raises(RunFolderError, match=r"data\.split\.sft: 0\.3 -> 0\.2"):
        execute(tiny(run, "split.sft=0.2"), {"sft"})


def test_a_model_that_is_gone_is_made_again(run: Path, trained: Path) -> None:
    shutil.rmtree(run / "reward" / "model")
    said = execute(tiny(run), {"reward"})
    assert f"reward: {run / 'reward' / 'model'} is gone, so the stage is done again" in said
    again, before = (folder / "reward" / "model" / "model.safetensors" for folder in (run, trained))
    assert again.read_bytes() == before.read_bytes()


def test_a_stage_whose_needs_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"reward needs sft, which .*run does not have yet; run it first \(`wpr sft"
    ):
        execute(tiny(tmp_path / "run"), {"reward"})


def test_stages_that_nobody_asked_for_are_left_alone(run: Path) -> None:
    recipe = tiny(run)
    found = Run(recipe, say=lambda text: None).execute(plan(recipe), {"sft"})
    assert set(found) == {"prepare", "sft", "reward"}  # done before; PPO is not
    assert not (run / "ppo").exists()


# Breaking off, in a prepare stage of one's own.

MAKER = """
def make(folder, seed, kind="", text=""):
    (folder / "begun").touch()
    if kind:
        raise {"error": RuntimeError, "stop": KeyboardInterrupt, "exit": SystemExit}[kind](text)
    (folder / "made").write_text(str(seed))
    return {"made": 1}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made_by_a_test.py").write_text(MAKER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "run"


def prepared(output: Path, *changes: str) -> list[str]:
    recipe = load_recipe("tiny", [f"output={output}", "prepare.function=made_by_a_test:make", *changes])
    said: list[str] = []
    Run(recipe, "restart", said.append).execute(plan(recipe)[:1])
    return said


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("error", RuntimeError, "failed"),
        ("stop", KeyboardInterrupt, "interrupted"),
        ("exit", SystemExit, "interrupted"),
    ],
)
def test_a_stage_that_breaks_off(kind: str, error: type[BaseException], status: str, own: Path) -> None:
    with pytest.raises(error):
        prepared(own, f"prepare.options={{kind: {kind}, text: out of paper}}")
    record = records(own)["prepare"]
    assert record["status"] == status
    assert record["error"] == ("RuntimeError: out of paper." if status == "failed" else None)
    assert record["seconds"] > 0
    assert not (own / "prepare").exists()
    assert ("broke off" if status == "failed" else "was interrupted") in (own / "run.log").read_text()
    said = prepared(own)
    assert records(own)["prepare"]["status"] == "done"
    assert records(own)["prepare"]["error"] is None
    assert (own / "prepare" / "made").read_text() == "0"
    assert said[-1].startswith("prepare: done in ")
    assert not (own / "prepare.partial").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "cannot be imported"),
        ("made_by_a_test:gone", "cannot be imported"),
        ("made_by_a_test", "must be package.module:function"),
        ("made_by_a_test:__name__", "is no function"),
    ],
)
def test_a_prepare_function_that_is_not_there(name: str, message: str, own: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        prepared(own, f"prepare.function={name}")


# Checkpoints of stages that are done.


def test_checkpoints_of_finished_stages_are_thinned(whole_run: Path, tmp_path: Path) -> None:
    """All of them stay by default; weights alone can be read, and are none that a stage goes on from."""
    from transformers import AutoModelForCausalLM

    from wpr.ppo.checkpoints import last_complete_checkpoint

    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    own = [*command.SMALL, f"output={folder}"]

    def left(keep: str) -> list[str]:
        said = execute(load_recipe("tiny", [*own, f"finished_checkpoints={keep}"]), None)
        assert all("done before" in text for text in said)  # nothing is trained again
        return sorted(path.name for path in (folder / "ppo" / "rkl" / "checkpoints").glob("*"))

    assert left("all") == ["checkpoint-1", "checkpoint-2", "completions"]
    assert left("weights") == ["completions", "weights-1", "weights-2"]
    thinned = folder / "ppo" / "rkl" / "checkpoints" / "weights-2"
    assert not {path.name for path in thinned.iterdir()} & {"critic", "optimizer.pt", "ppo_state_0.pt", "scheduler.pt"}
    whole, final = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (thinned, folder / "ppo" / "rkl" / "model")
    )
    assert all(whole[name].equal(tensor) for name, tensor in final.items())
    assert last_complete_checkpoint(thinned.parent) is None
    assert left("none") == ["completions", "weights-1", "weights-2"]  # they were chosen to stay
    shutil.rmtree(folder)
    shutil.copytree(whole_run, folder)
    assert left("none") == ["completions"]
