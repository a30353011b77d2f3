"""`wpr doctor RECIPE`: what a recipe would need of this machine."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wpr.config.recipe import Recipe
from wpr.errors import RecipeError
from wpr.pipeline.checks import check_regularizers, not_ready
from wpr.pipeline.environment import machine
from wpr.pipeline.estimates import (
    GenerationEstimate,
    ModelSize,
    disk_needed,
    downloads,
    estimate,
    estimate_generation,
    model_size,
)
from wpr.pipeline.machine_view import BACK_ENDS, gigabytes
from wpr.pipeline.run import PlannedStage, plan
from wpr.pipeline.stage import has_bf16
from wpr.ppo.config import PPOConfig
from wpr.ppo.graph_generation import KEPT
from wpr.runs.folder import RunFolder


def generation_note(found: GenerationEstimate, settings: dict[str, Any]) -> str:
    """What draws a policy's responses, and what that costs. settings: of the recipe's `ppo`."""
    if found.back_end == "vllm":
        url, share = settings.get("vllm_url"), settings.get("vllm_memory", PPOConfig.vllm_memory)
        if url is not None:
            return f"the vLLM server at {url}; nothing on this device"
        return f"vLLM within the process; {share:.0%} of the device's memory (vllm_memory), beside the table"
    parts = [f"{gigabytes(found.cache)} of keys and values"] if found.cache else []
    parts += [f"{gigabytes(found.copy)} for a copy of the weights"] if found.copy else []
    share = f"kept between rollouts where that is at most {KEPT:.0%} of the GPU's memory"
    return BACK_ENDS[found.back_end] + (f"; holds {' and '.join(parts)}, {share}" if parts else "")


def examine_recipe(recipe: Recipe, console: Console, stages: list[PlannedStage] | None = None) -> dict[str, Any]:
    """Print what each stage of the recipe needs; the same numbers as a dictionary, in bytes. stages: those of a sweep
    or of some policies, where it is not what the recipe trains.
    """
    size = model_size(recipe.model.name)
    stages = plan(recipe) if stages is None else stages
    here = machine()
    policies = [stage for stage in stages if stage.name.startswith("ppo/")]
    for problem in not_ready(stage.recipe for stage in policies):
        console.print(f"NOT ready: {problem}", soft_wrap=True, markup=False)
    if size is None:
        console.print(f"{recipe.model.name}: {_why_unknown(recipe.model.name)}", soft_wrap=True)
        return {}
    # A machine without a GPU is not the one that will train a large model: bf16, as any such GPU has.
    bf16 = has_bf16() or not here.gpus
    estimates = [estimate(stage, size, bf16) for stage in stages]
    count = max(1, len(here.gpus))
    device = "cuda" if here.gpus else "cpu"
    drawing, on_gpus = (
        {stage.name: estimate_generation(stage, size, bf16, kind) for stage in policies} for kind in (device, "cuda")
    )
    has = min((gpu["memory"] for gpu in here.gpus), default=here.memory)
    table = Table(title=f"{recipe.name}: {size.parameters / 1e9:.3g} billion parameters ({size.source})")
    columns = ("memory, one device", "sharded over 4", "over 8", "over 8, offloaded", "disk, training", "done")
    for name in ("stage", *columns):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for part, stage in zip(estimates, stages, strict=True):
        spread = [peak_memory(stage, size, bf16, "cuda", number, has if here.gpus else None) for number in (4, 8)]
        offloaded = spread[1] - part.host / 8  # what draws responses stays
        numbers = (part.memory, *spread, offloaded, part.disk, part.kept)
        table.add_row(part.stage, *map(gigabytes, numbers))
    console.print(table)
    host = max(part.host for part in estimates)
    console.print(
        f"offloaded: the optimizer in the host's memory, {gigabytes(host)} over all devices "
        "(offload_optimizer_device: cpu in configs/accelerate/zero3.yaml)",
        soft_wrap=True,
    )
    notes: dict[str, list[str]] = {}
    for stage in policies:
        settings, here_drawn = dict(stage.recipe.ppo), drawing[stage.name]
        note = generation_note(here_drawn, settings)
        if not here.gpus and here_drawn.back_end == "graphs":
            note += ". There is no GPU here: steps run one by one, without graphs"
        elif not here.gpus and (on_gpu := on_gpus[stage.name]) != here_drawn:
            note += f". On a GPU: {generation_note(on_gpu, settings)}"
        notes.setdefault(note, []).append(stage.name)
    for note, names in notes.items():
        console.print(f"generation: {', '.join(names)}: {note}", soft_wrap=True)
    fetched = downloads(recipe, size)
    for name, amount in fetched.items():
        console.print(f"download: {name}, about {gigabytes(amount)}", soft_wrap=True)
    disk, sharded_disk = disk_needed(estimates), disk_needed(estimates, sharded=True)
    kept, free = sum(part.kept for part in estimates), free_space(recipe.folder)
    console.print(
        f"disk: {gigabytes(disk)} in {recipe.folder} at the most, {gigabytes(sharded_disk)} with ZeRO or FSDP; "
        f"{gigabytes(kept)} once all is done (finished_checkpoints: {recipe.finished_checkpoints}); "
        f"{gigabytes(free)} free",
        soft_wrap=True,
    )
    fits, sharded = (
        all(peak_memory(stage, size, bf16, device, number, has) <= has for stage in stages) for number in (1, count)
    )
    verdict = (
        "fits on one device of this machine" if fits
        else f"fits on {count} devices of this machine with ZeRO-3 or FSDP (docs/recipes.md)" if sharded
        else f"does not fit here ({gigabytes(has)} a device): more or larger devices, model.lora, or smaller batches"
    )  # fmt: skip
    console.print(f"memory: {verdict}", soft_wrap=True)
    if disk > free:
        console.print(
            "disk: NOT enough space; free some, lower save_total_limit, or set finished_checkpoints=none",
            soft_wrap=True,
        )
    for stage in policies:
        check_regularizers(stage.name, stage.recipe, size.vocabulary)
    return {
        "parameters": size.parameters,
        "memory": {part.stage: part.memory for part in estimates},
        "generation": {name: dataclasses.asdict(one) for name, one in drawing.items()},
        "disk": disk,
        "sharded_disk": sharded_disk,
        "kept": kept,
        "downloads": fetched,
        "fits": fits,
        "enough_disk": disk <= free,
    }


def peak_memory(
    stage: PlannedStage, size: ModelSize, bf16: bool, device_type: str, devices: int, has: float | None
) -> float:
    """Bytes of a stage on each of so many devices that its weights are spread over, with what draws its responses;
    infinite where these or the batches cannot be shared. has: bytes of a device; None: as many as the stage needs.
    """
    drawn = GenerationEstimate("transformers")  # of stages that draw nothing
    try:
        part = estimate(stage, size, bf16, devices)
        if stage.name.startswith("ppo/"):
            drawn = estimate_generation(stage, size, bf16, device_type, devices)
    except RecipeError:
        if devices == 1:
            raise
        return math.inf
    if drawn.back_end == "vllm" and devices > 1:
        return math.inf
    return drawn.peak(part, drawn.peak(part, 0, devices) if has is None else has, devices)


def space_note(recipe: Recipe, stages: list[PlannedStage]) -> str | None:
    """A word of warning where the disk will probably not hold what the stages that are not done yet write."""
    size = model_size(recipe.model.name)
    if size is None:
        return None
    folder = RunFolder(recipe.folder)
    records = {stage.name: folder.record(stage.name) for stage in stages}
    left = [stage for stage in stages if (found := records[stage.name]) is None or found.status != "done"]
    needed, free = disk_needed([estimate(stage, size, True) for stage in left]), free_space(recipe.folder)
    if needed <= free:
        return None
    return (
        f"Note: about {gigabytes(needed)} will be written to {recipe.folder}, where {gigabytes(free)} are free; lower "
        "save_total_limit of the stages, set finished_checkpoints=none, or choose another disk with output=..."
    )


def _why_unknown(name: str) -> str:
    if "{prepare}" in name:
        return "made by the prepare stage; its size is known once that has run"
    return f"no configuration on this machine, so that its size is unknown; `hf download {name} config.json` fetches it"


def free_space(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
