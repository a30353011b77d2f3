"""What the commands of tables take: GPU hours, disk, requests to a judge.

Hours are the paper's own, scaled. It has 4.48 hours (reverse KL) and 4.59 (its penalty) for 1,000 micro-batches of 32
responses on four A100, with Gemma-2B and 512 + 256 tokens: 0.769 of them to generate and 3.707 to train. We scale by
responses, tokens and parameters; SFT and reward model go by its 3.707 hours for policy and critic. Rows are counted as
long as the recipe allows. Disk is what `wpr doctor` estimates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wpr.config.recipe_file import load_recipe
from wpr.pipeline.estimates import (
    KNOWN,
    ModelSize,
    StageEstimate,
    disk_needed,
    estimate,
    model_size,
    planned_steps,
)
from wpr.pipeline.run import PlannedStage
from wpr.reproduce.mapping import load_mapping
from wpr.reproduce.steps import TRAINING, Options, Step
from wpr.runs.folder import RunFolder

GPUS, RESPONSES, TOKENS = 4, 32_000, 768
GENERATING, TRAINED = 0.769, 3.707
PENALTY = {True: 0.117, False: 0.005}
"""Hours of the paper, by part; of the penalty, whether it is a Wasserstein one."""
PARAMETERS = KNOWN["google/gemma-2b"].parameters
COMPARISONS = 250
"""Of two models, at one temperature: five draws of 50 prompts."""


@dataclass(frozen=True)
class Needs:
    """What is still to be done. hours: of one A100. disk: bytes at the most; sharded: with ZeRO or FSDP. kept: at the
    end. policies: to be trained. requests: to a judge, at the most. unknown: models whose size is not known here, so
    that neither hours nor disk of their training are counted.
    """

    hours: float
    disk: float
    sharded: float
    kept: float
    policies: int
    requests: int
    unknown: tuple[str, ...] = ()


def needs_of(steps: Iterable[Step], options: Options) -> Needs:
    """Of commands that are run in this order; a stage that several of them have is trained once."""
    seen: set[tuple[str, str]] = set()
    parts: list[StageEstimate] = []
    hours, policies, requests = 0.0, 0, 0
    unknown: dict[str, None] = {}
    for step in steps:
        if step.kind in TRAINING:
            folder = RunFolder(step.run, writes=False)
            name = step.recipe.model.name.replace("{prepare}", str(step.run / "prepare"))
            size = model_size(name) or (None if step.recipe.prepare else model_size(options.model or ""))
            for stage in step.stages:
                record = folder.record(stage.name)
                if (str(step.run), stage.name) in seen or (record is not None and record.status == "done"):
                    continue
                seen.add((str(step.run), stage.name))
                policies += stage.name.startswith("ppo/")
                if size is None:
                    unknown[step.recipe.model.name] = None
                else:
                    parts.append(estimate(stage, size, bf16=True))
                    hours += training_hours(stage, size)
        elif not step.done:
            hours += _generation_hours(step, options)
            requests += _requests(step)
    kept = sum(part.kept for part in parts)
    return Needs(hours, disk_needed(parts), disk_needed(parts, sharded=True), kept, policies, requests, tuple(unknown))


def training_hours(stage: PlannedStage, size: ModelSize) -> float:
    """Hours of one A100 for a stage."""
    kind, recipe = stage.name.partition("/")[0], stage.recipe
    if kind == "prepare":
        return 0.0
    rows = planned_steps(recipe, kind) * int((getattr(recipe, kind) or {}).get("batch_size", 8))
    tokens = recipe.data.max_prompt_tokens + recipe.data.max_completion_tokens
    share = rows / RESPONSES * (tokens / TOKENS) * (size.parameters / PARAMETERS)
    if kind == "ppo":
        return GPUS * share * (GENERATING + TRAINED + PENALTY["wasserstein" in str(recipe.regularizer.resolved())])
    return GPUS * share * TRAINED / 2 * (2 if kind == "reward" else 1)


def _generation_hours(step: Step, options: Options) -> float:
    if step.kind not in ("generate", "mt-bench", "pass-at-1"):
        return 0.0
    recipe = step.run.name if step.run.name in load_mapping().hardware else "hh-gemma-2b"
    size = model_size(options.model or load_recipe(recipe).model.name) or KNOWN["google/gemma-2b"]
    prompts = {"generate": options.limit or 2000, "mt-bench": 160, "pass-at-1": options.limit or 5000}[step.kind]
    heats = max(1, step.words.count("-t"))
    responses = prompts * heats * (1 + len(step.policies))
    return GPUS * responses / RESPONSES * GENERATING * (size.parameters / PARAMETERS)


def _requests(step: Step) -> int:
    if step.kind == "mt-bench":
        return 160 * (1 + len(step.policies))
    if step.kind != "judge":
        return 0
    return COMPARISONS * len(step.policies) * step.words.count("--against") * max(1, step.words.count("-t"))
