"""Semantic contrast: does a penalty know that a near synonym is a smaller change than an unrelated word?

At positions where the reference model is fairly sure (top token above 0.3), half of the top token's mass is moved (a)
to its nearest neighbour in the embedding, (b) to a random token of the support. Both targets are first given the same
reference probability, so that no f-divergence can tell the two policies apart. The figure is the mean penalty gap
(target minus origin) of (a) over that of (b):

    contrast = mean_a[ penalty(target) - penalty(origin) ] / mean_b[ penalty(target) - penalty(origin) ]

1 means blind to meaning, 0 means that moving to a neighbour is free. Intervals are 95% bootstrap intervals over
positions.

    python -m benchmarks.semantic_contrast            all regularizers
    python -m benchmarks.semantic_contrast --sweep    lam and rho, with iterations and control
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import smollm2
from wpr import (
    Alpha,
    ChiSquared,
    ForwardKL,
    JensenShannon,
    Regularizer,
    ReverseKL,
    SquaredHellinger,
    TokenGeometry,
    TotalVariation,
    Wasserstein,
)
from wpr.transport.geometry_file import GeometryFileError

QUESTIONS = [
    "Why is the sky blue?",
    "How do I bake a loaf of bread?",
    "Tell me about the history of Rome.",
    "What should I do when I have a cold?",
    "Write a short story about a dog and a cat.",
    "Explain how a bicycle works.",
    "What are good ways to save money?",
    "Describe a walk in a forest in autumn.",
    "How does a computer store a picture?",
    "Which vegetables can I grow on a balcony?",
    "Give me advice for a job interview.",
    "What is the difference between a lake and a sea?",
]
SURE = 0.3
K2 = 128


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


def cached_geometry(model: Any, folder: Path) -> TokenGeometry:
    """The model's geometry, kept beside it: building takes a minute, loading a moment."""
    path = folder / "geometry.safetensors"
    if path.exists():
        try:
            return TokenGeometry.load(path, model)
        except GeometryFileError as error:
            print(f"building the geometry again: {error}")
    geometry = TokenGeometry.from_model(model)
    geometry.save(path)
    return geometry


@torch.no_grad()
def make_trial(model: Any, tokenizer: Any, geometry: TokenGeometry, positions: int, seed: int = 0) -> Trial:
    """Let the model answer the questions, and take positions of its answers where it is sure."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        start = inputs["input_ids"].shape[1]
        answer = model.generate(**inputs, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        rows.append(model(answer[:, :-1]).logits[0, start - 1 :].float().log_softmax(-1))
    reference = torch.cat(rows)
    sure = reference.max(-1).values.exp() > SURE
    origin = reference.argmax(-1)
    # A token that training never touched has no meaning, hence no neighbours in meaning.
    keep = (sure & geometry.alive[origin]).nonzero().squeeze(-1)
    keep = keep[torch.randperm(len(keep), generator=generator)[:positions]].sort().values
    reference, origin = reference[keep], origin[keep]
    near_token = torch.stack([geometry.nearest_tokens(int(token), 1)[0][0] for token in origin])
    top = reference.topk(K2).indices
    eligible = (top != origin.unsqueeze(-1)) & (top != near_token.unsqueeze(-1))
    pick = torch.multinomial(eligible.float(), 1, generator=generator)
    far_token = top.gather(-1, pick).squeeze(-1)
    probability = reference.double().exp()
    row = torch.arange(len(origin))
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


def gaps(regularizer: Regularizer, trial: Trial) -> tuple[Tensor, Tensor]:
    """Penalty of the target minus penalty of the origin, for the near and for the far target: two ``(P,)``."""

    def gap(policy: Tensor, target: Tensor) -> Tensor:
        at_target = regularizer(policy, trial.reference, target).penalty
        return at_target - regularizer(policy, trial.reference, trial.origin).penalty

    return gap(trial.near, trial.near_token), gap(trial.far, trial.far_token)


def contrast(near: Tensor, far: Tensor, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """The ratio of means, and its 95% bootstrap interval over positions."""
    rows = torch.randint(len(near), (resamples, len(near)), generator=torch.Generator().manual_seed(seed))
    ratios = near[rows].mean(-1) / far[rows].mean(-1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975])).tolist()
    return float(near.mean() / far.mean()), low, high


def compare(trial: Trial, geometry: TokenGeometry) -> Table:
    regularizers: dict[str, Regularizer] = {
        "reverse KL": ReverseKL(),
        "forward KL": ForwardKL(),
        "Jensen-Shannon": JensenShannon(),
        "alpha (0.5)": Alpha(0.5),
        "total variation": TotalVariation(),
        "chi-squared": ChiSquared(),
        "squared Hellinger (control)": SquaredHellinger(),
        "Wasserstein, preset paper": Wasserstein(geometry, preset="paper"),
        "Wasserstein, preset semantic": Wasserstein(geometry, preset="semantic"),
    }
    table = Table("regularizer", "gap to neighbour", "gap to random", "contrast", "95% interval")
    for name, regularizer in regularizers.items():
        near, far = gaps(regularizer, trial)
        value, low, high = contrast(near, far)
        table.add_row(name, f"{near.mean():.4g}", f"{far.mean():.4g}", f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def sweep(trial: Trial, geometry: TokenGeometry, lams: Iterable[float], rhos: Iterable[float]) -> Table:
    """Contrast and cost of the semantic form. A factor on the scale is the same as lam / factor and rho * factor, so it
    needs no axis of its own.
    """
    table = Table("lam", "rho", "contrast", "95% interval", "iterations (mean, max)", "converged", "seconds")
    for lam in lams:
        for rho in rhos:
            regularizer = Wasserstein(geometry, preset="semantic", lam=lam, rho=rho, iterations=400)
            start = time.perf_counter()
            out = regularizer(trial.near, trial.reference, trial.near_token).diagnostics
            seconds = time.perf_counter() - start
            value, low, high = contrast(*gaps(regularizer, trial))
            steps = out["iterations"].float()
            table.add_row(
                f"{lam:g}",
                f"{rho:g}",
                f"{value:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{steps.mean():.0f}, {steps.max():.0f}",
                f"{out['converged'].float().mean():.0%}",
                f"{seconds:.1f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=256, help="positions to use at most")
    parser.add_argument("--model", type=Path, default=smollm2.FOLDER, help="folder of a transformers model")
    parser.add_argument("--sweep", action="store_true", help="sweep lam and rho instead")
    parser.add_argument("--lam", type=float, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--rho", type=float, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    console = Console(width=120)
    model, tokenizer = smollm2.load(arguments.model)
    geometry = cached_geometry(model, arguments.model)
    console.print(geometry.describe())
    trial = make_trial(model, tokenizer, geometry, arguments.positions)
    console.print(
        f"{len(trial.origin)} positions; for example, with the reference's top token, its neighbour and the random "
        f"token:"
    )
    for row in range(0, len(trial.origin), max(1, len(trial.origin) // 6)):
        words = [tokenizer.decode([int(ids[row])]) for ids in (trial.origin, trial.near_token, trial.far_token)]
        console.print("  " + "  ".join(repr(word) for word in words))
    console.print(sweep(trial, geometry, arguments.lam, arguments.rho) if arguments.sweep else compare(trial, geometry))


if __name__ == "__main__":
    main()
