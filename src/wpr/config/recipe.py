"""A recipe: everything an experiment consists of, as typed settings.

`recipe_file` reads one from YAML; `docs/recipes.md` describes every section.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wpr.config.monitors import GOLD, MonitorSettings
from wpr.config.trainers import TRL_TRAINERS, config_class, own_settings, trl_section
from wpr.config.typed import Where, build, check_fields, field_types, unknown
from wpr.data import DataSettings, SplitSettings
from wpr.data.rows import shown
from wpr.errors import RecipeError
from wpr.regularizers.spec import RECOMMENDED, RegularizerSpec
from wpr.stage_names import FOLDER_NAME

if TYPE_CHECKING:
    from wpr.config.recipe_file import RecipeSource

STAGES = ("sft", "reward", "ppo")
OWNED = {
    "output_dir": "the run folder holds it; set `output`",
    "seed": "all stages take the recipe's `seed`",
    "resume_from_checkpoint": "running again resumes by itself",
    "do_train": "a stage that is in the recipe is trained",
    "reward_weights": "a recipe has one `scorer`; add several up in a function of your own (scorer.kind: function)",
}
"""Settings of the trainers that the pipeline sets itself."""

WORDING = {
    "words": ("words", "preferred", "placement"),
    "reading-level": ("grade",),
    "spelling": ("spelling", "placement"),
}
"""Rules for wording among the kinds of scorers, and the settings that each has."""

POLICY_KEYS = ("regularizer", "trainer", "ppo", *TRL_TRAINERS)
"""What policies, and grids of sweeps, may change."""

LARGEST_SEED = 2**32 - 1
"""What numpy's generators take; Python's and torch's take more."""


@dataclass
class LoraSettings:
    """Low-rank adapters instead of training all weights. The trained adapter is merged into the model that is saved.

    r: rank. alpha: scale of the adapter, over r. dropout: within the adapter. target_modules: which layers get one.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"


@dataclass
class ModelSettings:
    """The model that SFT starts from.

    name: a folder, or a name on the hub. ``{prepare}`` stands for what the prepare stage made.
    revision: of the hub's repository.
    precision: what matrices are multiplied in; weights and optimizer are float32 in any case. ``auto``: bf16 on GPUs
        that have it, float32 elsewhere.
    attention: transformers' ``attn_implementation``; null: its own choice.
    lora: adapters instead of training all weights, in every stage.
    """

    name: str
    revision: str | None = None
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: str | None = None
    lora: LoraSettings | None = None


@dataclass
class PrepareSettings:
    """A stage before all others that makes files: a model, data.

    function: ``package.module:function``, called with the stage's folder, the seed and ``options``.
    options: passed on by name.
    data: a file that the function makes of `data.source`, which it is then also called with (``source=``); the stages
        read the file in its place.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict)
    data: str | None = None


@dataclass
class ScorerSettings:
    """What policies are trained to maximise.

    kind: ``model``, a reward model; ``code``, programs are run against their tests; ``function``, a Python function;
        ``words``, ``reading-level`` and ``spelling``, rules for wording (`wpr.rewards.wording`). Where it is left out,
        a setting of one of these rules says which it is.
    name: folder or hub name of a reward model; null: the one that the reward stage trains.
    function: ``package.module:function``, see `wpr.rewards.FunctionReward`.
    workers: programs run at a time, at most one per core; null: one per core.
    unsafe: run programs without isolation if there is none.
    limits: of one program's run, see `wpr.rewards.code.Limits`.
    words, preferred: files of words to avoid and to prefer (``words``). Also ``reward.words`` and ``reward.preferred``.
    grade: the US school grade that a response's reading level should not exceed (``reading-level``).
    spelling: which spelling is wanted (``spelling``).
    placement: where a word's reward lands: the ``token`` that completes it, or the ``end`` of the response; null:
        token.
    """

    kind: Literal["model", "code", "function", "words", "reading-level", "spelling"] = "model"
    name: str | None = None
    function: str | None = None
    workers: int | None = None
    unsafe: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    words: str | None = None
    preferred: str | None = None
    grade: float | None = None
    spelling: Literal["british", "american"] | None = None
    placement: Literal["token", "end"] | None = None

    @property
    def wording(self) -> dict[str, Any]:
        """The settings of rules for wording that are set."""
        named = {name for names in WORDING.values() for name in names}
        return {name: getattr(self, name) for name in sorted(named) if getattr(self, name) is not None}


@dataclass
class EvaluationSettings:
    """What policies are measured on, and by.

    prompts: how many held-out prompts policies answer, at most; 0: none.
    rows: how many held-out rows SFT and the reward model are measured on, at most.
    gold: ``package.module:function`` or a monitor's settings, a score that nothing is trained on. It is logged as
        ``gold``, and policies are compared by it: where the score rises and gold falls, the reward is being fooled.
    monitors: more such scores by name, which are logged and stand in tables and in the report.
    eval_regularizers: regularizers by name, whose divergence is measured on the held-out responses of every policy.
    case_studies: so many held-out responses are kept token by token, for the report's token view; it needs a
        Wasserstein regularizer, the policy's own or the first of that kind among the eval_regularizers.
    """

    prompts: int = 64
    rows: int = 2000
    gold: str | MonitorSettings | None = None
    monitors: dict[str, MonitorSettings] = field(default_factory=dict)
    eval_regularizers: dict[str, RegularizerSpec] = field(default_factory=dict)
    case_studies: int = 3

    def __post_init__(self) -> None:
        for name in ("prompts", "rows", "case_studies"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if GOLD in self.monitors:
            raise ValueError("monitors has gold, which is a setting of its own: evaluation.gold")

    @property
    def watched(self) -> dict[str, MonitorSettings]:
        """Gold, where there is one, and all monitors."""
        gold = MonitorSettings("function", function=self.gold) if isinstance(self.gold, str) else self.gold
        return ({} if gold is None else {GOLD: gold}) | self.monitors

    @property
    def watched_settings(self) -> dict[str, dict[str, Any]]:
        """What is watched as plain values, which a policy's results record: scores of one name may differ in them."""
        return {
            name: {
                key: value
                for key, value in dataclasses.asdict(own).items()
                if value is not None and key != "in_training"  # held-out scores are the same
            }
            for name, own in self.watched.items()
        }


@dataclass
class SweepSettings:
    """Several policies trained after each other: those named, or every combination of a grid's values.

    policies: their names. grid: dotted settings to lists of values, of each of the policies.
    """

    policies: list[str] = field(default_factory=list)
    grid: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.policies and not self.grid:
            raise ValueError("a sweep needs policies, a grid, or both")


@dataclass
class Recipe:
    """An experiment. Sections `sft`, `reward` and `ppo` hold the fields of TRL's ``SFTConfig`` and ``RewardConfig`` and
    of `wpr.PPOConfig`, and ``batch_size``, the number of rows of an optimizer step over all devices; `grpo` and `rloo`
    what TRL's ``GRPOConfig`` and ``RLOOConfig`` have beside these.

    name: names the run. description: one line. output: the run's folder, ``{name}`` being the name.
    seed: of everything that is drawn.
    sft, reward: null leaves the stage out.
    critic: ``auto`` starts from the reward model, or from the SFT model where none is trained; or a folder.
    trainer: what trains policies: ``ppo``, or TRL's ``grpo`` or ``rloo``; see `wpr.config.trainers`.
    policies: training runs by name, each with what it changes in `regularizer`, `trainer`, `ppo`, `grpo` and `rloo`. A
        `regularizer` with another `name` or `preset` stands by itself, one without changes the recipe's.
    train: the policies that `wpr run` trains; null: all.
    finished_checkpoints: what stays of a stage's checkpoints once it is done: ``all``, the ``weights`` alone, ``none``.
    """

    name: str
    model: ModelSettings
    data: DataSettings
    description: str = ""
    seed: int = 0
    output: str = "runs/{name}"
    finished_checkpoints: Literal["all", "weights", "none"] = "all"
    prepare: PrepareSettings | None = None
    split: SplitSettings = field(default_factory=SplitSettings)
    sft: dict[str, Any] | None = None
    reward: dict[str, Any] | None = None
    scorer: ScorerSettings = field(default_factory=ScorerSettings)
    critic: str = "auto"
    trainer: Literal["ppo", "grpo", "rloo"] = "ppo"
    ppo: dict[str, Any] = field(default_factory=dict)
    grpo: dict[str, Any] = field(default_factory=dict)
    rloo: dict[str, Any] = field(default_factory=dict)
    regularizer: RegularizerSpec = field(default_factory=lambda: RegularizerSpec.parse(RECOMMENDED))
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: list[str] | None = None
    sweeps: dict[str, SweepSettings] = field(default_factory=dict)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    source: RecipeSource | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output.replace("{name}", self.name)).expanduser()

    @property
    def policy_names(self) -> list[str]:
        """All policies; a recipe that names none has one, called ``policy``."""
        return list(self.policies) or ["policy"]

    @property
    def trained_policies(self) -> list[str]:
        """Those that `wpr run` trains."""
        return self.policy_names if self.train is None else list(self.train)

    def policy(self, name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe of one policy: its changes put in (`POLICY_KEYS`), then ``changes`` (dotted)."""
        self.check_policy(name)
        assert self.source is not None
        return self.source.recipe(name, changes)

    def check_policy(self, name: str, place: str | None = None) -> None:
        """Refuse a policy that the recipe does not have; place: where it is named."""
        if name not in self.policy_names:
            raise unknown(name, self.policy_names, lambda _: place or f"recipe {self.name}", kind="policy")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files and for the reader."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, RegularizerSpec):
        return value.given()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def typed_recipe(values: Mapping[str, Any], where: Where, check_policies: bool) -> Recipe:
    """The recipe that plain values state, every name, type and reference in it checked."""
    known = field_types(Recipe)
    for name in values:
        if name not in known:
            raise unknown(name, [*known, "extends"], where)
    values = dict(values)
    for name in ("name", "model", "data"):
        if values.get(name) is None:
            raise RecipeError(f"{where('')}: {name} is missing; every recipe needs one")
    for section in ("sweeps", "policies"):
        found = values.get(section)
        # What is null was taken out by a recipe that builds on another one.
        kept = {name: own for name, own in found.items() if own is not None} if isinstance(found, Mapping) else found
        values[section] = {} if kept is None else kept
    values["scorer"] = _with_kind(values.get("scorer"))
    for section in STAGES:
        values[section] = _stage(section, values.get(section), where)
    for section in TRL_TRAINERS:
        values[section] = trl_section(section, values.get(section), where)
    recipe: Recipe = build(Recipe, values, "", where)
    _check_names(recipe, where)
    _check_seed(recipe.seed, "seed", where)
    _check_scorer(recipe.scorer, where, trained=recipe.reward is not None)
    if recipe.scorer.kind == "code" and recipe.data.format != "apps":
        raise RecipeError(
            f"{where('scorer.kind')}: scorer.kind=code needs problems with tests, data.format: apps (it is "
            f"{recipe.data.format})"
        )
    if check_policies:
        _check_policies(recipe, where)
    return recipe


def _with_kind(scorer: Any) -> Any:
    """The section `scorer`, with the kind that its other settings imply if it has none."""
    if scorer is None:
        return {}
    if not isinstance(scorer, Mapping) or scorer.get("kind") is not None:
        return scorer
    own = {name: kind for kind, names in WORDING.items() for name in names if name != "placement"}
    implied = [own[name] for name, value in scorer.items() if name in own and value is not None]
    rest = {name: value for name, value in scorer.items() if name != "kind"}
    return {"kind": implied[0], **rest} if implied else rest


def _stage(section: str, values: Any, where: Where) -> dict[str, Any] | None:
    if values is None:
        return None if section != "ppo" else {}
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"{where(section)}: {section}={shown(values, 200)} must be settings, or null to leave the stage out"
        )
    for name, reason in OWNED.items():
        if name in values:
            raise RecipeError(f"{where(f'{section}.{name}')}: {section}.{name} cannot be set: {reason}")
    checked = check_fields(config_class(section), values, section, where, extra={"batch_size": int})
    if "batch_size" in checked and "gradient_accumulation_steps" in checked:
        raise RecipeError(
            f"{where(f'{section}.batch_size')}: {section} sets batch_size and gradient_accumulation_steps; the first, "
            "with per_device_train_batch_size and the number of devices, gives the second: leave one of them out"
        )
    if (size := checked.get("batch_size", 1)) < 1:
        raise RecipeError(f"{where(f'{section}.batch_size')}: {section}.batch_size={size} must be 1 or more")
    if checked.get("data_seed") is not None:
        _check_seed(checked["data_seed"], f"{section}.data_seed", where)
    return checked


def _check_names(recipe: Recipe, where: Where) -> None:
    for kind, names in (("name", [recipe.name]), ("policies", recipe.policies), ("sweeps", recipe.sweeps)):
        for name in names:
            if not re.fullmatch(FOLDER_NAME, name):
                raise RecipeError(
                    f"{where(kind)}: {kind} {name!r} becomes a folder's name; use letters, digits, '.', '-' and '_'"
                )
    if re.search("[{}]", recipe.output.replace("{name}", "")):
        raise RecipeError(f"{where('output')}: output={recipe.output!r} may hold {{name}} and no other braces")
    if not recipe.output.isprintable() or not recipe.output.strip():
        raise RecipeError(f"{where('output')}: output={recipe.output!r} must be a folder's path, as runs/{{name}}")


def _check_seed(seed: int, key: str, where: Where) -> None:
    if not 0 <= seed <= LARGEST_SEED:
        raise RecipeError(
            f"{where(key)}: {key}={shown(seed)} is outside 0 to {LARGEST_SEED}, the seeds that numpy and torch share"
        )


def typed_scorer(values: Mapping[str, Any], where: Where) -> ScorerSettings:
    """The section `scorer` by itself, where no reward model is trained."""
    scorer: ScorerSettings = build(ScorerSettings, _with_kind(values), "scorer", where)
    _check_scorer(scorer, where)
    return scorer


def _check_scorer(scorer: ScorerSettings, where: Where, trained: bool = False) -> None:
    """Refuse settings that name no reward. trained: whether the recipe trains a reward model."""
    if scorer.kind == "model" and scorer.name is None and not trained:
        raise RecipeError(
            f"{where('scorer')}: there is no reward: train one (reward: {{...}}), name one (scorer.name: folder), or "
            "set scorer.kind to code, function, words, reading-level or spelling"
        )
    if scorer.kind == "function" and not scorer.function:
        raise RecipeError(f"{where('scorer')}: scorer.kind=function needs scorer.function: package.module:function")
    for name in scorer.wording:
        if name not in WORDING.get(scorer.kind, ()):
            kinds = " or ".join(kind for kind, names in WORDING.items() if name in names)
            raise RecipeError(
                f"{where(f'scorer.{name}')}: scorer.{name} is set, but scorer.kind is {scorer.kind}; set scorer.kind "
                f"to {kinds}, or drop it"
            )
    needed = " or ".join(f"scorer.{name}" for name in WORDING.get(scorer.kind, ()) if name != "placement")
    if scorer.kind in WORDING and not scorer.wording.keys() - {"placement"}:
        raise RecipeError(f"{where('scorer')}: scorer.kind={scorer.kind} needs {needed}")


def _check_policies(recipe: Recipe, where: Where) -> None:
    for name, own in recipe.policies.items():
        for key in own:
            if key not in POLICY_KEYS:
                raise unknown(f"policies.{name}.{key}", POLICY_KEYS, where, f"policies.{name}")
    for name in recipe.train or []:
        recipe.check_policy(name, f"{where('train')}: train")
    for sweep, settings in recipe.sweeps.items():
        for name in settings.policies:
            recipe.check_policy(name, f"{where('sweeps')}: sweep {sweep}")
        check_grid(settings.grid, f"{where(f'sweeps.{sweep}.grid')}: sweep {sweep}")


def check_grid(grid: Mapping[str, Any], place: str) -> None:
    """Refuse a grid over settings that a policy cannot change, or that nobody knows."""
    for key in grid:
        section, _, setting = key.partition(".")
        if section not in POLICY_KEYS:
            raise RecipeError(
                f"{place}: a grid changes {', '.join(POLICY_KEYS)} and their settings; {key} is none of them"
            )
        if key == "trainer":
            continue
        if section in TRL_TRAINERS:
            known = own_settings(section)
        else:
            known = field_types(RegularizerSpec if section == "regularizer" else config_class("ppo"))
        if setting not in known and key != "ppo.batch_size":
            raise unknown(key, known, lambda _: place, section)
