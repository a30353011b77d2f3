"""Running a recipe: which stages there are, which are done, which can be gone on with, and what has changed since."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from wpr.atomic_io import write_atomically
from wpr.config.recipe import WORDING, Recipe, ScorerSettings
from wpr.config.trainers import is_shared
from wpr.config.yaml_file import to_yaml
from wpr.data.readers import describe
from wpr.errors import RunFolderError, UserError, explain, first_line
from wpr.pipeline.arguments import outcome_settings
from wpr.pipeline.environment import command_line, machine, versions
from wpr.pipeline.log import log_to
from wpr.pipeline.recipe_data import RecipeData
from wpr.pipeline.stage import Stage, is_main_process, peak_memory, reset_peak_memory, wait_for_everyone
from wpr.runs.fingerprints import differences, digest
from wpr.runs.folder import RunFolder, StageRecord, data_source, now, with_prepared

logger = logging.getLogger(__name__)

OnChange = Literal["refuse", "restart", "keep"]
"""What to do with a stage that was made by other settings: stop; set it aside and start again; take it as it is."""


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage that a run consists of.

    name: ``prepare``, ``sft``, ``reward`` or ``ppo/POLICY``. needs: the stages whose outcome it builds on.
    recipe: for a policy, with its changes. inputs: what decides its outcome, but for what it needs and the data.
    """

    name: str
    needs: tuple[str, ...]
    recipe: Recipe
    inputs: dict[str, Any]


def plan(
    recipe: Recipe, policies: list[str] | None = None, changes: Mapping[str, Mapping[str, Any]] | None = None
) -> list[PlannedStage]:
    """The stages of a recipe, in order. ``policies``: which are trained; None: those that the recipe says.
    ``changes``: dotted changes by policy name, for policies that a sweep adds: ``name+change`` stands for ``name``.
    """
    stages = []
    values = recipe.as_dict()
    first: tuple[str, ...] = ()
    if recipe.prepare is not None:
        inputs: dict[str, Any] = {"prepare": values["prepare"], "seed": recipe.seed}
        if recipe.prepare.data is None:
            del values["prepare"]["data"]  # runs from before there was this are the same
        else:
            inputs["source"] = recipe.data.source
        stages.append(PlannedStage("prepare", (), recipe, inputs))
        first = ("prepare",)
    model = {"model": values["model"], "seed": recipe.seed}
    if recipe.sft is not None:
        stages.append(PlannedStage("sft", first, recipe, model | {"sft": outcome_settings(recipe.sft)}))
        first = ("sft",)
    before_ppo = first
    if recipe.reward is not None:
        stages.append(PlannedStage("reward", first, recipe, model | {"reward": outcome_settings(recipe.reward)}))
        before_ppo = (*first, "reward")
    for name in recipe.trained_policies if policies is None else policies:
        base = name if name in recipe.policy_names else name.partition("+")[0]
        own = recipe.policy(base, (changes or {}).get(name))
        inputs = model | {
            "ppo": outcome_settings(own.ppo),
            "regularizer": own.regularizer.resolved(),
            "scorer": scorer_inputs(own.scorer),
            "critic": own.critic,
        }
        if own.trainer != "ppo":
            del inputs["critic"]
            inputs["ppo"] = {key: value for key, value in inputs["ppo"].items() if is_shared(key)}
            inputs["trainer"] = own.trainer
            if section := outcome_settings(getattr(own, own.trainer)):
                inputs[own.trainer] = section
        stages.append(PlannedStage(f"ppo/{name}", before_ppo, own, inputs))
    return stages


def scorer_inputs(scorer: ScorerSettings) -> dict[str, Any]:
    """What of the scorer decides about its scores. A file of words counts by its content, not by its path; rules for
    wording that are not used do not count: older runs know nothing of them.
    """
    rules = {name for names in WORDING.values() for name in names}
    given = {k: v for k, v in dataclasses.asdict(scorer).items() if k != "workers" and k not in rules}
    for name, value in scorer.wording.items():
        is_file = name in ("words", "preferred") and Path(value).expanduser().is_file()
        given[name] = hashlib.sha256(Path(value).expanduser().read_bytes()).hexdigest() if is_file else value
    return given


def _data_settings(recipe: Recipe) -> dict[str, Any]:
    """What of the settings decides how data are read and shared out; the data themselves have a fingerprint."""
    values = recipe.as_dict()
    content = {k: v for k, v in values["data"].items() if k not in ("source", "validation", "files", "revision")}
    if content["fidelity"] == "own":
        del content["fidelity"]  # runs from before there was a choice go on
    return {"settings": content, "split": values["split"]}


def changes_since(stage: PlannedStage, record: StageRecord) -> list[str]:
    """Settings in which a stage differs from what it was made by, in words. Data are not read: only their settings."""
    wanted, made = dict(stage.inputs), dict(record.inputs)
    if stage.name != "prepare":
        wanted["data"] = _data_settings(stage.recipe)
        made["data"] = {key: value for key, value in made.get("data", {}).items() if key != "fingerprint"}
    return differences({key: value for key, value in made.items() if key in wanted}, wanted)


def trainer_of(kind: str) -> Callable[[Stage], dict[str, Any]]:
    """The function that runs a stage, imported when it is needed: the trainers take seconds to import."""
    if kind == "prepare":
        from wpr.pipeline.prepare import prepare

        return prepare
    if kind == "sft":
        from wpr.pipeline.sft import train_sft

        return train_sft
    if kind == "reward":
        from wpr.pipeline.reward import train_reward

        return train_reward
    from wpr.pipeline.ppo import train_ppo

    return train_ppo


class Run:
    """One run of a recipe, in its folder."""

    def __init__(self, recipe: Recipe, on_change: OnChange = "refuse", say: Callable[[str], None] = print) -> None:
        self.recipe = recipe
        self.folder = RunFolder(recipe.folder, writes=is_main_process())
        wait_for_everyone()
        self.on_change = on_change
        self.say = say if is_main_process() else lambda text: None
        self._data: RecipeData | None = None
        self._facts_are_written = False
        self._checked_scorers: list[ScorerSettings] = []
        self._policies: list[PlannedStage] = []

    def execute(self, stages: list[PlannedStage], only: set[str] | None = None) -> dict[str, dict[str, Any]]:
        """Bring every stage to done, ``only`` these kinds if given; results by stage. Stages that are done are skipped;
        those that are needed, not asked for and not there are refused.
        """
        results = {}
        with self._writing():
            asked = {
                stage.name: only is None or stage.name.partition("/")[0] in only or stage.name == "prepare"
                for stage in stages
            }
            self._policies = [stage for stage in stages if asked[stage.name] and stage.name.startswith("ppo/")]
            with self._explaining():
                self._check([stage for stage in stages if asked[stage.name]])
                for stage in stages:
                    results[stage.name] = self._ensure_done(stage, asked[stage.name])
                    if stage.name == "prepare":  # the model that it made can be looked at now
                        self._check([self._made(later) for later in stages if asked[later.name]])
        return {name: found for name, found in results.items() if found is not None}

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Errors of the machine, such as a full disk, in words, with the folder that they are about."""
        try:
            yield
        except Exception as error:
            message = explain(error, self.folder.path)
            if message is None or isinstance(error, UserError):
                raise
            raise UserError(message) from error

    def _made(self, stage: PlannedStage) -> PlannedStage:
        return dataclasses.replace(stage, recipe=self._real(stage.recipe))

    def _check(self, stages: Iterable[PlannedStage]) -> None:
        """Refuse now what a stage would refuse when its turn comes, as far as that can be known."""
        from wpr.pipeline.checks import check_stage

        for stage in stages:
            record = self.folder.record(stage.name)
            if record is not None and self.on_change == "refuse":
                own = {key: value for key, value in record.inputs.items() if key in stage.inputs}
                if own != stage.inputs:
                    self._refuse_gone(stage)
                    self._changed(stage, record, record.inputs | stage.inputs)
            if record is None or record.status != "done":
                check_stage(stage.name, stage.recipe, self.folder)

    def _refuse_gone(self, stage: PlannedStage) -> None:
        """Say of a policy's list of words that it is gone, instead of that its content is another."""
        scorer = stage.recipe.scorer
        lists = {"words": scorer.words, "preferred": scorer.preferred} if stage.name.startswith("ppo/") else {}
        for name, path in lists.items():
            if path is not None and "{prepare}" not in path and not Path(path).expanduser().is_file():
                raise RunFolderError(
                    f"{stage.name}: scorer.{name}={path} is gone, which it was made with; put it back ("
                    f"{self.folder.stage(stage.name)} may have a copy, {name}.txt), or go on with what is there "
                    "(--on-change keep)"
                )

    def _check_policies(self) -> None:
        """Refuse, before anything is trained, policies that are still to come and have fewer prompts than a rollout, or
        a list of words that never occur.
        """
        from wpr.pipeline.checks import check_forbidden_words, check_prompts

        for stage in self._policies:
            record = self.folder.record(stage.name)
            if record is None or record.status != "done":
                check_prompts(stage.name, stage.recipe, self.folder, self.data)
                if stage.recipe.scorer not in self._checked_scorers:
                    check_forbidden_words(self._real(stage.recipe), self.data)
                    self._checked_scorers.append(stage.recipe.scorer)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The folder locked, the log file open."""
        if not is_main_process():
            with log_to(None, self.say):
                yield
            return
        with self.folder.lock(), log_to(self.folder.path / "run.log", self.say):
            logger.info("%s", command_line())
            yield

    def _write_facts(self) -> None:
        """What this run is, when its first stage starts: a run that is refused leaves the folder as it was."""
        if self._facts_are_written:
            return
        self._facts_are_written = True
        if self._data is not None:
            self.folder.manifest["data"] = self._data.report()
        commands = [*self.folder.manifest.get("commands", []), {"at": now(), "command": command_line()}]
        self.folder.write(
            name=self.recipe.name,
            recipe=self.recipe.as_dict(),
            seed=self.recipe.seed,
            versions=versions(),
            hardware=machine().as_dict(),
            commands=commands,
        )
        if self.folder.writes:
            write_atomically(self.folder.path / "recipe.yaml", to_yaml(self.recipe.as_dict()))

    def _ensure_done(self, stage: PlannedStage, asked: bool) -> dict[str, Any] | None:
        record = self.folder.record(stage.name)
        if not asked and record is None:
            return None  # whoever needs it will say so
        if record is not None and record.status == "done" and not self._output(stage.name).exists():
            self.say(f"{stage.name}: {self._output(stage.name)} is gone, so the stage is done again")
            record = None
        inputs = stage.inputs | self._upstream(stage)
        if record is not None and record.inputs != inputs:
            record = self._changed(stage, record, inputs)
        if record is not None and record.status == "done":
            self.say(f"{stage.name}: done before ({record.seconds:.0f} s)")
            self._thin(stage)
            watched = stage.recipe.evaluation.watched_settings
            for name, own in record.results.get("watched", {}).items():
                if name in watched and watched[name] != own:
                    self.say(
                        f"{stage.name}: its {name} was measured by {own}, not by {watched[name]}; for the other one "
                        "use another folder (output=...)"
                    )
            return record.results
        if not asked:
            return None
        return self._train(stage, record or StageRecord(inputs))

    def _output(self, stage: str) -> Path:
        folder = self.folder.stage(stage)
        return folder if stage == "prepare" else folder / "model"

    def _upstream(self, stage: PlannedStage) -> dict[str, Any]:
        """What comes from the stages below: their fingerprints, and that of the data."""
        needs = {}
        for name in stage.needs:
            record = self.folder.record(name)
            if record is None or record.status != "done":
                command = name.partition("/")[0]
                raise RunFolderError(
                    f"{stage.name} needs {name}, which {self.folder.path} does not have yet; run it first (`wpr "
                    f"{'run' if command == 'prepare' else command} ...`), or everything with `wpr run ...`"
                )
            needs[name] = digest(record.inputs)
        if stage.name == "prepare":
            return self._source_inputs()
        return {"needs": needs, "data": self._data_inputs()}

    def _source_inputs(self) -> dict[str, Any]:
        """What the files are that the prepare stage makes data of, where they are files here."""
        recipe = self.recipe
        if recipe.prepare is None or recipe.prepare.data is None or recipe.data.source is None:
            return {}
        named = [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
        paths = [path for name in named if (path := Path(name).expanduser()).is_file()]
        return {"files": [describe(path, path.name)["sha256"] for path in paths]}

    def _data_inputs(self) -> dict[str, Any]:
        return {"fingerprint": self.data.corpus.fingerprint, **_data_settings(self.recipe)}

    @property
    def data(self) -> RecipeData:
        """Rows of all stages, read when the first stage asks."""
        if self._data is None:
            self._data = RecipeData(self._real(self.recipe))
            if self._facts_are_written:
                self.folder.write(data=self._data.report())
        return self._data

    def _real(self, recipe: Recipe) -> Recipe:
        """The recipe with ``{prepare}`` replaced by the folder that it stands for."""
        made = None if recipe.prepare is None else recipe.prepare.data
        name, source, validation = with_prepared(
            [recipe.model.name, data_source(recipe.data.source, made), recipe.data.validation], self.folder.path
        )
        model = dataclasses.replace(recipe.model, name=name)
        data = dataclasses.replace(recipe.data, source=source, validation=validation)
        words, preferred = with_prepared([recipe.scorer.words, recipe.scorer.preferred], self.folder.path)
        scorer = dataclasses.replace(recipe.scorer, words=words, preferred=preferred)
        found = dataclasses.replace(recipe, model=model, data=data, scorer=scorer)
        found.source = recipe.source
        return found

    def _changed(self, stage: PlannedStage, record: StageRecord, inputs: dict[str, Any]) -> StageRecord | None:
        """A stage that was made by other settings."""
        found = differences(record.inputs, inputs)
        if self.on_change == "keep":
            self.say(f"{stage.name}: kept, although its settings have changed ({'; '.join(found[:3])})")
            return record
        if self.on_change == "restart":
            moved = self.folder.set_aside(stage.name)
            self.say(
                f"{stage.name}: its settings have changed, it starts again" + (f" (old: {moved})" if moved else "")
            )
            return None
        raise RunFolderError(
            f"{stage.name} in {self.folder.path} was made by other settings: {'; '.join(found[:5])}"
            f"{f' and {len(found) - 5} more' if len(found) > 5 else ''}. Use another folder (output=...), start the "
            "changed stages again (--on-change restart; the old ones are moved to old/), or go on with what is there "
            "(--on-change keep)"
        )

    def _train(self, stage: PlannedStage, record: StageRecord) -> dict[str, Any]:
        if stage.name != "prepare":
            self._check_policies()
        again = record.status != "running" or bool(record.started)
        self.say(f"{stage.name}: {'going on' if again else 'starting'}")
        record.status, record.error = "running", None
        record.started = record.started or now()
        begun, before = time.monotonic(), record.seconds
        data = None if stage.name == "prepare" else self.data
        recipe = stage.recipe if stage.name == "prepare" else self._real(stage.recipe)
        run = Stage(stage.name, recipe, self.folder, data, record.settings)
        self._write_facts()
        self.folder.write(stage.name, record)
        reset_peak_memory()
        try:
            results = trainer_of(run.kind)(run)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            message = None if interrupted else explain(error, self.folder.path)
            record.status = "interrupted" if interrupted else "failed"
            record.error = None if interrupted else message or f"{type(error).__name__}: {first_line(error)}"
            record.seconds = before + time.monotonic() - begun
            if interrupted:
                logger.info("%s was interrupted", stage.name)
            else:
                logger.error("%s broke off", stage.name, exc_info=error)
            self._note_failure(stage.name, record)
            raise
        record.status, record.finished, record.results = "done", now(), results
        record.seconds = before + time.monotonic() - begun
        record.peak_memory_gb = peak_memory()
        self.folder.write(stage.name, record)
        wait_for_everyone()
        self._thin(stage)
        self.say(f"{stage.name}: done in {record.seconds:.0f} s")
        return results

    def _thin(self, stage: PlannedStage) -> None:
        """Free what a stage that is done needs no more, as the recipe says."""
        if self.folder.writes and stage.name != "prepare":
            from wpr.ppo.checkpoints import thin

            thin(self.folder.stage(stage.name) / "checkpoints", self.recipe.finished_checkpoints)

    def _note_failure(self, stage: str, record: StageRecord) -> None:
        """In the manifest, if it can still be written: the error that is on its way up matters more."""
        try:
            self.folder.write(stage, record)
        except OSError as error:
            logger.info("the manifest could not be written: %s", error)


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of every stage of a run that is done."""
    stages = RunFolder(folder).manifest["stages"]
    return {name: record["results"] for name, record in stages.items() if record["status"] == "done"}
