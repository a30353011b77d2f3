"""The learning rate of each optimizer step, as the stages' trainers will set it."""

from __future__ import annotations

from pathlib import Path

from wpr.findings import Figure, Series
from wpr.pipeline.arguments import make_config, trainer_arguments
from wpr.pipeline.estimates import planned_steps
from wpr.pipeline.run import PlannedStage


def learning_rates(stage: PlannedStage, steps: int) -> list[float]:
    """Of steps 1, 2, ...; by the scheduler that transformers' Trainer makes of the stage's settings."""
    import torch
    from transformers import get_scheduler

    kind = stage.name.partition("/")[0]
    arguments = trainer_arguments(stage.recipe, kind, Path("."), 1, bf16=False)
    config = make_config(kind, arguments | {"report_to": "none", "use_cpu": True, "bf16": False, "fp16": False})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, config.get_warmup_steps(steps), steps,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )  # fmt: skip
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def schedule_figure(name: str, stages: list[PlannedStage]) -> Figure | None:
    """The learning rate over its peak, a line per kind of stage; None where no number of steps is known."""
    series = []
    for kind in ("sft", "reward", "ppo"):
        stage = next((one for one in stages if one.name.partition("/")[0] == kind), None)
        if stage is None or not (steps := planned_steps(stage.recipe, kind)):
            continue
        rates = learning_rates(stage, steps)
        peak = max(rates) or 1.0
        critic = stage.recipe.ppo.get("critic_learning_rate") if kind == "ppo" else None
        also = f", critic {critic:g}" if critic is not None and critic != peak else ""
        label = f"{kind}: {steps} steps, at the most {peak:.3g}{also}"
        series.append(Series(label, [float(step) for step in range(1, steps + 1)], [rate / peak for rate in rates]))
    if not series:
        return None
    title = f"Learning rates of {name}"
    return Figure("lines", title, "optimizer step", "learning rate over its maximum", series, name="learning-rates")
