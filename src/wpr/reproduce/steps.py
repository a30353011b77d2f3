"""From the commands of a table to those that are run: with this user's judge, launcher and scale, and what is done.

Nothing is recorded of what was run: a run's manifest and the files that commands write say what is there.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.errors import OptionError
from wpr.evaluation.judging.local import folder_fingerprint
from wpr.evaluation.judging.redaction import checked_address
from wpr.evaluation.judging.rubric import load_rubric
from wpr.findings import Finding, FindingError, load
from wpr.pipeline.estimates import planned_steps
from wpr.pipeline.run import PlannedStage, changes_since, plan
from wpr.pipeline.sweep import members
from wpr.reproduce.mapping import Item, load_mapping
from wpr.reproduce.rehearsal import GRADE, PROBLEMS, QUESTIONS
from wpr.runs.finished_run import REFERENCE
from wpr.runs.folder import RunFolder

TRAINING = ("run", "sft", "sweep")
FEWEST_STEPS, FEWEST_PROMPTS = 2, 8
"""Of a rehearsal: a stage's optimizer steps, and prompts that models answer."""
GRID = 2
"""Values of a sweep's grid in a rehearsal."""


@dataclass(frozen=True)
class Options:
    """How this user runs the commands.

    runs: folder of runs. judge: options of `wpr judge`; empty: the run's own reward model. rubrics: files by the name
    of the shipped rubric that they replace. questions, encoder: for MT-Bench and BERTScore.
    launch: words before ``-m wpr`` of training commands, to start several processes.
    scale: of the number of steps, prompts and rows; 1: the paper's. overrides: settings of all training commands.
    model, data, problems: what a rehearsal takes in place of the paper's.
    """

    runs: Path = Path("runs")
    judge: tuple[str, ...] = ()
    rubrics: dict[str, str] = field(default_factory=dict)
    questions: Path | None = None
    encoder: str | None = None
    launch: tuple[str, ...] = ()
    scale: float = 1.0
    model: str | None = None
    data: Path | None = None
    problems: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def rehearses(self) -> bool:
        """Whether what comes out is something else than the paper's experiment."""
        return self.scale != 1 or self.model is not None or self.data is not None

    @property
    def limit(self) -> int | None:
        """Prompts that models answer; None: all that a run held out."""
        return None if self.scale == 1 else max(FEWEST_PROMPTS, math.ceil(2000 * self.scale))


@dataclass(frozen=True)
class Step:
    """A command of an item. words: after ``wpr``. run: the folder that it works on. result: folder of its finding."""

    words: tuple[str, ...]
    run: Path
    result: Path | None
    launch: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.words[0]

    @property
    def command(self) -> list[str]:
        """As a process."""
        before = list(self.launch) if self.launch and self.kind in TRAINING else [sys.executable]
        return [*before, "-m", "wpr", *self.words]

    def __str__(self) -> str:
        before = f"{shlex.join(self.launch)} -m " if self.launch and self.kind in TRAINING else ""
        return f"{before}wpr {shlex.join(self.words)}"

    @property
    def policies(self) -> list[str]:
        return self._given("-p")

    @cached_property
    def stages(self) -> list[PlannedStage]:
        """Stages of a training command; none of the others."""
        if self.kind not in TRAINING:
            return []
        recipe = self.recipe
        if self.kind == "sft":
            return [stage for stage in plan(recipe, []) if stage.name != "reward"]
        if self.kind == "run":
            return plan(recipe, self.policies or None)
        changes = members(recipe, self.words[2], self.policies, [])
        return plan(recipe, list(changes), changes)

    @property
    def recipe(self) -> Recipe:
        flagged = {at + 1 for at, word in enumerate(self.words) if word == "-p"}
        given = (word for at, word in enumerate(self.words) if at > 1 and at not in flagged and "=" in word)
        return _recipe(self.words[1], tuple(given))

    @property
    def done(self) -> bool:
        """Whether what it makes is there, whole, by these settings and this judge, and no older than what it is made
        of.
        """
        if self.kind in TRAINING:
            folder = RunFolder(self.run, writes=False)
            records = {stage.name: folder.record(stage.name) for stage in self.stages}
            finished = all(found is not None and found.status == "done" for found in records.values())
            return finished and not self.changes
        made = [finding_in(self.result) / "finding.json"] if self.result is not None else self._responses()
        models = [self.run / "sft" / "model", *(self.run / "ppo" / name / "model" for name in self.policies)]
        changed = max((_time(folder / "model.safetensors") for folder in models), default=0.0)
        if self.kind == "judge":
            changed = max([changed, *map(_time, self._responses())])
        elif self.kind == "analyze" and self.result is not None:  # of what the item's judge said, where it has one
            item = self.result.name.removeprefix(f"{self.words[1]}-")
            changed = max(changed, _time(self.run / "evaluations" / f"judge-{item}" / "finding.json"))
        if any(_time(path) == 0 or _time(path) < changed for path in made):
            return False
        return self.result is None or self._is_complete(finding_in(self.result))

    @property
    def changes(self) -> list[str]:
        """Settings in which stages that are done differ from this training command's, in words."""
        folder = RunFolder(self.run, writes=False)
        records = ((stage, folder.record(stage.name)) for stage in self.stages)
        return [
            f"{stage.name}: {'; '.join(found)}"
            for stage, record in records
            if record is not None and record.status == "done" and (found := changes_since(stage, record))
        ]

    def _given(self, option: str) -> list[str]:
        return [value for flag, value in zip(self.words, self.words[1:], strict=False) if flag == option]

    def _responses(self) -> list[Path]:
        """Files that `wpr generate` writes, or `wpr judge` reads, baselines of other runs among them."""
        named = {(self.run, name): None for name in (REFERENCE, *self.policies)}
        for text in self._given("--against"):
            folder, colon, name = text.rpartition(":")
            named[Path(folder) if colon else self.run, name] = None
        return [
            folder / "generations" / f"{name}-t{float(heat):g}.jsonl"
            for folder, name in named
            for heat in self._given("-t")
        ]

    def _is_complete(self, folder: Path) -> bool:
        """Whether a finding is by this command's judge and lacks no answer that it would ask for."""
        try:
            found = load(folder)
        except FindingError:
            return False
        failed = found.columns.index("failed") if "failed" in found.columns else None
        unasked = failed is not None and any(row[failed] for row in found.rows)
        incomplete = unasked or any(text.startswith("Incomplete") for text in found.text)
        return not incomplete and self._is_by_this_judge(found)

    def _is_by_this_judge(self, found: Finding) -> bool:
        judge = found.settings.get("judge")
        if not isinstance(judge, dict):
            return True
        for option, key in (("--judge", "model"), ("--function", "function")):
            if self._given(option) and judge.get(key) != self._given(option)[0]:
                return False
        if self._given("--reward-model"):
            return is_reward_model(self._given("--reward-model")[0], str(judge.get("reward_model")))
        if self._given("--base-url") and judge.get("server") != checked_address(self._given("--base-url")[0]):
            return False
        rubric = self._given("--rubric") if self._given("--judge") and self.kind == "judge" else []
        return not rubric or found.settings.get("rubric") == vars(load_rubric(rubric[0]))


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def finding_in(folder: Path) -> Path:
    """Where a command's finding is: in the folder, or in the newest below it that has one (MT-Bench's, by judge)."""
    below = sorted(folder.glob("*/finding.json"), key=_time)
    return folder if (folder / "finding.json").exists() or not below else below[-1].parent


@cache
def is_reward_model(name: str, known: str) -> bool:
    """Whether a folder, or a model of the hub, is the one that a finding names."""
    return folder_fingerprint(name) == known if Path(name).is_dir() else known.startswith(f"{name}@")


@cache
def _recipe(name: str, overrides: tuple[str, ...]) -> Recipe:
    return load_recipe(name, list(overrides))


def steps_of(item: Item, options: Options) -> list[Step]:
    """The item's commands, to be run in this order."""
    return [_step(item, text, options) for text in item.commands]


def _step(item: Item, text: str, options: Options) -> Step:
    words = _with_groups(shlex.split(text.replace("{runs}", str(options.runs))), options)
    kind = words[0]
    if kind in TRAINING:
        changes = dict(word.split("=", 1) for word in words if "=" in word)
        folder = options.runs / changes.get("name", words[1])
        words += _training(words[1], folder, options, set(changes))
        return Step(tuple(words), folder, None, options.launch)
    run = Path(words[2] if kind == "analyze" else words[1])
    limit = [] if options.limit is None else ["--limit", str(options.limit)]
    if kind == "generate":
        return Step((*words, *limit), run, None)
    made = words[1] if kind == "analyze" else kind
    result = run / ("analyses" if kind == "analyze" else "evaluations") / f"{made}-{item.name}"
    if kind == "judge":
        words = [options.rubrics.get(word, word) for word in words]
        words += [] if options.limit is None else ["--prompts", str(min(50, options.limit // 2))]
        words += options.judge or ["--reward-model", str(run / "reward" / "model")]
    elif kind == "mt-bench":
        words += ["-q", str(_questions(options)), *_grader(options), *limit]
        words += [] if options.scale == 1 else ["--max-new-tokens", "64"]
    elif kind == "pass-at-1":
        words += [*limit, *(["--max-new-tokens", "64"] if options.scale != 1 else [])]
        words += ["--unsafe"] if _recipe(run.name, tuple(options.overrides)).scorer.unsafe else []
    elif made == "similarity":
        if options.encoder is not None:
            words += ["--encoder", options.encoder]
        elif not options.rehearses:
            words += ["--encoder", "roberta-large", "--layer", "17"]  # BERTScore's own choice for English
    words += ["-o", str(result)]
    return Step(tuple(words), run, result)


def _with_groups(words: Sequence[str], options: Options) -> list[str]:
    """``-p {GROUP}`` as one -p each; ``{beta:GROUP}`` stands for the policies of a sweep over beta."""
    groups, found = load_mapping().groups, []
    for word in words:
        if not (word.startswith("{") and word.endswith("}")):
            found.append(word)
            continue
        found.pop()  # the -p before it
        sweep, colon, name = word[1:-1].rpartition(":")
        names = groups.get(name, [name])
        if colon:
            values = _recipe("hh-gemma-2b", tuple(_grids("hh-gemma-2b", options))).sweeps[sweep].grid["ppo.beta"]
            names = [f"{name}+beta={value}" for name in names for value in values]
        for one in names:
            found += ["-p", one]
    return found


def _grids(name: str, options: Options) -> list[str]:
    """Sweeps of a recipe with fewer values of each setting, the first and the last, in a rehearsal."""
    if options.scale == 1:
        return []
    grids = {
        sweep: {key: [values[0], values[-1]] for key, values in settings.grid.items() if len(values) > GRID}
        for sweep, settings in _recipe(name, ()).sweeps.items()
    }
    return [
        f"sweeps.{sweep}={{grid: {{{key}: [{first}, {last}]}}}}"
        for sweep, grid in grids.items()
        for key, (first, last) in grid.items()
    ]


def _training(name: str, folder: Path, options: Options, given: set[str]) -> list[str]:
    """Settings that this user's training commands have beside the item's own; what is prepared keeps its model."""
    words = [] if options.runs == Path("runs") else [f"output={folder}"]
    recipe = _recipe(name, ())
    if options.model is not None and recipe.prepare is None and "model.name" not in given:
        words.append(f"model.name={options.model}")
    if recipe.data.format == "apps" and (options.problems is not None or options.data is not None):
        words.append(f"data.source={options.problems or options.runs / PROBLEMS}")
        words.append("split.held_out=0.3")
    elif options.data is not None and recipe.prepare is None:
        words += ["data.format=hh", f"data.source={options.data}", "split.held_out=0.1"]
    if options.scale != 1:
        for stage in ("sft", "reward", "ppo"):
            if getattr(recipe, stage) is not None and not {stage, f"{stage}.max_steps"} & given:
                steps = max(FEWEST_STEPS, math.ceil(options.scale * planned_steps(recipe, stage)))
                words.append(f"{stage}.max_steps={steps}")
        prompts = max(FEWEST_PROMPTS, math.ceil(options.scale * recipe.evaluation.prompts))
        words += [f"evaluation.prompts={prompts}", f"evaluation.rows={prompts}"]
        words += _grids(name, options)
    # Settings of a stage that the recipe, or the command, leaves out would bring it back.
    absent = {stage for stage in ("sft", "reward") if getattr(recipe, stage) is None or stage in given}
    return words + [text for text in options.overrides if text.partition(".")[0] not in absent]


def _questions(options: Options) -> Path:
    if options.questions is not None:
        return options.questions
    if options.rehearses:
        return options.runs / QUESTIONS
    raise OptionError(
        "tab:mt_bench needs MT-Bench's questions, which you bring: name the file with --questions question.jsonl "
        "(docs/generation.md, section 3)"
    )


def _grader(options: Options) -> Sequence[str]:
    """A server's judge grades, too; of judges in this process none does, and a rule stands in for it."""
    if options.judge and "--judge" in options.judge:
        return options.judge
    return ["--function", GRADE]
