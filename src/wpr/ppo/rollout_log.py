"""What a rollout adds to the log: its metrics, and a few of its responses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wpr.ppo.collect import Experience
from wpr.ppo.metrics import Metrics, number_or_none, scored


def note_rollout(metrics: Metrics, result: Experience, rewards: Tensor, beta: float, explained_variance: float) -> None:
    """Add a rollout's numbers. rewards: ``(B, L)`` as the advantages see them."""
    add, measures = metrics.add, result.measures
    lengths = result.mask.sum(-1)
    unscored = result.scores.isnan()
    note_scores(metrics, result, slice(None))
    add("reward", rewards.sum(-1)[~unscored])
    add("unscored_responses", unscored.float())
    for name in ("penalty", "divergence", "kl", "entropy"):
        add(name, getattr(measures, name))
    add("kl_sequence", result.scatter_to_mask(measures.kl).sum(-1))
    add("response_length", lengths)
    add("eos_fraction", result.finished.float())
    add("empty_responses", (lengths == 0).float())
    add("value", result.values[result.mask])
    add("beta", beta)
    add("explained_variance", explained_variance)
    for name, values in measures.diagnostics.items():
        add(f"solver_{name}", values)
    if result.mismatch is not None and len(result.mismatch):
        add("generation_mismatch", result.mismatch.abs())
        add("generation_mismatch_max", float(result.mismatch.abs().max()))
        add("generation_mismatch_ratio", result.mismatch.neg().exp())


def note_scores(metrics: Metrics, result: Experience, rows: Tensor | slice) -> None:
    """Add what some of the responses were given: by the reward, its parts and the monitors, and what functions log."""
    means = {"score": result.scores, **result.watched}
    means |= {f"rewards/{name}/mean": part for name, part in result.parts.items()}
    for name, scores in means.items():
        metrics.add(name, scored(scores[rows]))
    for name, value in result.logged.metrics:
        metrics.add(name, value)


def completion_rows(result: Experience, advantages: Tensor, count: int, step: int) -> list[dict[str, Any]]:
    """The first ``count`` responses, with what they scored and cost.

    advantages: ``(B, L)`` as the loss sees them; a response shows the mean over its tokens.
    """
    mean = (advantages * result.mask).sum(-1) / result.mask.sum(-1).clamp_min(1)
    penalty, kl = (result.scatter_to_mask(values).sum(-1) for values in (result.measures.penalty, result.measures.kl))
    return [
        {
            "step": step,
            "prompt": result.completions.prompts[row],
            "response": result.completions.responses[row],
            "score": number_or_none(result.scores[row]),
            "penalty": penalty[row].item(),
            "kl": kl[row].item(),
            "advantage": mean[row].item(),
            **{name: number_or_none(values[row]) for name, values in result.watched.items()},
            **{name: values[row] for name, values in result.logged.columns.items()},
            "finished": bool(result.finished[row]),
        }
        for row in range(min(count, len(result.scores)))
    ]
