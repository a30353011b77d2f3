"""What a rollout adds to the log: its metrics, and a few of its responses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wpr.ppo.collect import Experience
from wpr.ppo.metrics import Metrics
from wpr.rewards import Reward, WeightedSum


def note_rollout(
    metrics: Metrics, result: Experience, rewards: Tensor, beta: float, explained_variance: float, reward: Reward
) -> None:
    """Add a rollout's numbers. rewards: ``(B, L)`` as the advantages see them. reward: where the scores came from."""
    add, measures = metrics.add, result.measures
    lengths = result.mask.sum(-1)
    add("score", result.scores)
    add("reward", rewards.sum(-1))
    for name in ("penalty", "divergence", "kl", "entropy"):
        add(name, getattr(measures, name))
    for name, watched in result.watched.items():
        add(name, watched)
    add("kl_sequence", result.scatter_to_mask(measures.kl).sum(-1))
    add("response_length", lengths)
    add("eos_fraction", result.finished.float())
    add("empty_responses", (lengths == 0).float())
    add("value", result.values[result.mask])
    add("beta", beta)
    add("explained_variance", explained_variance)
    for name, values in measures.diagnostics.items():
        add(f"solver_{name}", values)
    if isinstance(reward, WeightedSum):
        for name, part in reward.last_scores.items():
            add(f"score_{name}", part)


def completion_rows(result: Experience, count: int, step: int) -> list[dict[str, Any]]:
    """The first ``count`` responses, with what they scored and cost."""
    penalty, kl = (result.scatter_to_mask(values).sum(-1) for values in (result.measures.penalty, result.measures.kl))
    return [
        {
            "step": step,
            "prompt": result.completions.prompts[row],
            "response": result.completions.responses[row],
            "score": result.scores[row].item(),
            "penalty": penalty[row].item(),
            "kl": kl[row].item(),
            **{name: values[row].item() for name, values in result.watched.items()},
            "finished": bool(result.finished[row]),
        }
        for row in range(min(count, len(result.scores)))
    ]
