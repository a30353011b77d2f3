"""Semantic contrast: does a penalty know that a near synonym is a smaller change than an unrelated word?

Notation for shapes: ``N`` positions of the model's continuations, ``P`` positions of a trial, ``V`` vocabulary.

At positions where the reference model is fairly sure (top token above 0.3), half of the top token's mass is moved (a)
to its nearest neighbour in the embedding, (b) to a random token of the support. Both targets are first given the same
reference probability, so that no f-divergence can tell the two policies apart. The figure is the mean penalty gap
(target minus origin) of (a) over that of (b):

    contrast = mean_a[ penalty(target) - penalty(origin) ] / mean_b[ penalty(target) - penalty(origin) ]

1 means blind to meaning, 0 means that moving to a neighbour is free.

    reference = continuations(model, plain_prompts(tokenizer, ["Once upon a time, a dog"]))
    trial = make_trial(reference, geometry, positions=256)
    value, low, high = contrast(*gaps(regularizer, trial))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.context import AnalysisContext, Found, noted
from wpr.analysis.statistics import RESAMPLES, bootstrap, interval
from wpr.errors import UnavailableError
from wpr.findings import Cell, Figure, Finding, Mark, Series
from wpr.model_geometry import measure_vocabulary
from wpr.regularizers import Regularizer
from wpr.regularizers.spec import SIDE_BY_SIDE
from wpr.transport.geometry import TokenGeometry, input_embeddings

SURE = 0.3
"""The reference is fairly sure of a token above this probability."""

K2 = 128
"""The random token is one of the reference's most likely, this many: the support of a Wasserstein regularizer."""


@dataclass(frozen=True)
class Trial:
    """Two policies per position, equally far from the reference in every f-divergence.

    reference, near, far: ``(P, V)`` log-probabilities; origin, near_token, far_token: ``(P,)``.
    """

    reference: Tensor
    near: Tensor
    far: Tensor
    origin: Tensor
    near_token: Tensor
    far_token: Tensor


def analyze(context: AnalysisContext, regularizers: Sequence[str] | None = None, count: int = 256) -> Found:
    """Semantic contrast of regularizers, and of what each policy was trained under, on the reference model."""
    prompts = context.texts()
    if not prompts:
        raise UnavailableError(f"{context.run.path} has no held-out responses, whose prompts are continued")
    made = context.regularizers.make_all(regularizers or SIDE_BY_SIDE)
    for policy in context.run.finished if context.policies is None else context.chosen:
        made[f"policy {policy}"] = context.regularizers.make(context.run.regularizer(policy), f"policy {policy}")
    context.say(f"continuations of {len(prompts)} prompts")
    logs = continuations(context.reference, prompts, 32)
    geometry = next((one.geometry for one in made.values() if hasattr(one, "geometry")), None)
    if geometry is None:
        geometry = measure_vocabulary(input_embeddings(context.reference))
    try:
        trial = make_trial(logs, geometry, count)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    finding, data = contrast_finding(made, trial, "the SFT model", context.settings())
    return noted(finding, *context.regularizers.notes(made)), data


def plain_prompts(tokenizer: Any, texts: Iterable[str]) -> list[Tensor]:
    """Token ids ``(T,)`` of each text as it stands, for a model that continues texts."""
    return [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]


def chat_prompts(tokenizer: Any, questions: Iterable[str]) -> list[Tensor]:
    """Token ids ``(T,)`` of each question as a user's turn, for a model with a chat template."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"][0]
        for question in questions
    ]


@torch.no_grad()
def continuations(model: Any, prompts: Iterable[Tensor], max_new_tokens: int = 48) -> Tensor:
    """Log-probabilities ``(N, V)`` of the model at every token of its most likely continuations of prompts ``(T,)``."""
    rows: list[Tensor] = []
    for prompt in prompts:
        ids = prompt.to(model.device).unsqueeze(0)
        # A batch of one needs no padding; generate would warn where a model names no token for it.
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        rows.append(model(answer[:, :-1]).logits[0, ids.shape[1] - 1 :].float().log_softmax(-1))
    return torch.cat(rows)


def make_trial(reference: Tensor, geometry: TokenGeometry, positions: int, seed: int = 0) -> Trial:
    """The trial of at most ``positions`` positions of ``reference`` ``(N, V)`` log-probabilities, drawn from those
    where the model is sure.
    """
    generator = torch.Generator().manual_seed(seed)
    reference, origin = _sure_positions(reference, geometry, positions, generator)
    near_token = torch.stack([geometry.nearest_tokens(int(token), 1)[0][0] for token in origin])
    far_token = _random_tokens(reference, origin, near_token, generator)
    probability = reference.double().exp()
    row = torch.arange(len(origin), device=origin.device)
    shared = (probability[row, near_token] + probability[row, far_token]) / 2
    probability[row, near_token] = shared
    probability[row, far_token] = shared

    def moved(target: Tensor) -> Tensor:
        policy = probability.clone()
        half = policy[row, origin] / 2
        policy[row, origin] -= half
        policy[row, target] += half
        return policy.log().float()

    return Trial(probability.log().float(), moved(near_token), moved(far_token), origin, near_token, far_token)


def _sure_positions(
    reference: Tensor, geometry: TokenGeometry, positions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(P, V)`` and top token ``(P,)`` of a sample of the positions where the model is sure."""
    if reference.shape[-1] != geometry.vocabulary:
        raise ValueError(
            f"log-probabilities over {reference.shape[-1]} tokens, but a geometry of {geometry.vocabulary}; build the "
            f"geometry from the model that made them"
        )
    if positions < 1:
        raise ValueError(f"positions={positions}; a trial needs at least 1")
    origin = reference.argmax(-1)
    # A token that training never touched has no meaning, hence no neighbours in meaning.
    usable = (reference.amax(-1).exp() > SURE) & geometry.alive[origin]
    keep = usable.nonzero().squeeze(-1)
    if not len(keep):
        raise ValueError(
            f"the model gives no token a probability above {SURE} at any of {len(reference)} positions; let it "
            f"continue more prompts, or prompts of the kind it was trained on"
        )
    drawn = torch.randperm(len(keep), generator=generator)[:positions].to(keep.device)
    keep = keep[drawn].sort().values
    return reference[keep], origin[keep]


def _random_tokens(reference: Tensor, origin: Tensor, near_token: Tensor, generator: torch.Generator) -> Tensor:
    """For each position one of the reference's most likely tokens ``(P,)``, neither the origin nor its neighbour."""
    top = reference.topk(min(K2, reference.shape[-1])).indices
    eligible = (top != origin.unsqueeze(-1)) & (top != near_token.unsqueeze(-1))
    pick = torch.multinomial(eligible.float().cpu(), 1, generator=generator).to(top.device)
    return top.gather(-1, pick).squeeze(-1)


def gaps(regularizer: Regularizer, trial: Trial) -> tuple[Tensor, Tensor]:
    """Penalty of the target minus penalty of the origin, for the near and for the far target: two ``(P,)``."""

    def gap(policy: Tensor, target: Tensor) -> Tensor:
        at_target = regularizer(policy, trial.reference, target).penalty
        return at_target - regularizer(policy, trial.reference, trial.origin).penalty

    return gap(trial.near, trial.near_token), gap(trial.far, trial.far_token)


def contrast(near: Tensor, far: Tensor, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float, float]:
    """The ratio of means of two ``(P,)`` gaps, and its 95% bootstrap interval over positions.

    Positions count as independent, which those of one continuation are not: the interval may be too narrow.
    """
    near, far = near.cpu(), far.cpu()
    ratios = bootstrap(lambda rows: near[rows].mean(-1) / far[rows].mean(-1), len(near), resamples, seed)
    return float(near.mean() / far.mean()), *interval(ratios)


def contrast_finding(
    regularizers: Mapping[str, Regularizer], trial: Trial, model: str, settings: Mapping[str, Any] | None = None
) -> tuple[Finding, list[dict[str, Any]]]:
    """The finding, and the gaps of every position behind it."""
    found, data = {}, []
    for name, regularizer in regularizers.items():
        near, far = gaps(regularizer, trial)
        found[name] = contrast(near, far)
        data += [
            {"regularizer": name, "position": position, "near": one, "far": other}
            for position, (one, other) in enumerate(zip(near.tolist(), far.tolist(), strict=True))
        ]
    rows: list[list[Cell]] = [[name, *values, len(trial.origin)] for name, values in found.items()]
    values, low, high = (list(column) for column in zip(*found.values(), strict=True))
    listed = "; ".join(f"{name} {value:.3f} ({a:.3f} to {b:.3f})" for name, (value, a, b) in found.items())
    text = [
        f"At {len(trial.origin)} positions where {model} is fairly sure of the next token, half of that token's "
        "probability is moved to its nearest neighbour in the embedding, and alternatively to an unrelated token of "
        "the same probability. The contrast is the penalty of the first over that of the second: 1 is blind to "
        "meaning, as every f-divergence is by construction, 0 lets neighbours change places for free.",
        f"With 95% intervals over positions: {listed}.",
    ]
    figure = Figure(
        "bars", "Semantic contrast", "regularizer", "contrast", [Series("contrast", list(found), values, low, high)],
        marks=[Mark(1.0, "blind to meaning")], name="contrast",
    )  # fmt: skip
    finding = Finding(
        name="contrast",
        title="Semantic contrast",
        text=text,
        columns=["regularizer", "contrast", "low", "high", "positions"],
        rows=rows,
        figures=[figure],
        settings={"model": model, **(settings or {})},
    )
    return finding, data
