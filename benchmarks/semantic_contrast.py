"""Semantic contrast of every regularizer on SmolLM2: `wpr.analysis.semantic_contrast` says what is measured.

Commands:
    python -m benchmarks.semantic_contrast            all regularizers
    python -m benchmarks.semantic_contrast --sweep    lam and rho, with iterations and control
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from benchmarks import registry_models
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
from wpr.analysis import semantic_contrast
from wpr.analysis.semantic_contrast import Trial, chat_prompts, continuations, contrast, gaps
from wpr.regularizers.wasserstein_settings import TRANSFORMS
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


def cached_geometry(model: Any, folder: Path, transform: str = "none") -> TokenGeometry:
    """The model's geometry, kept beside it: building takes a minute, loading a moment."""
    path = folder / ("geometry.safetensors" if transform == "none" else "geometry-transformed.safetensors")
    if path.exists():
        try:
            return TokenGeometry.load(path, model, transform=transform)
        except GeometryFileError as error:
            print(f"building the geometry again: {error}")
    geometry = TokenGeometry.from_model(model, transform=transform)
    geometry.save(path)
    return geometry


def make_trial(model: Any, tokenizer: Any, geometry: TokenGeometry, positions: int, seed: int = 0) -> Trial:
    """Let the model answer the questions, and take positions of its answers where it is sure."""
    reference = continuations(model, chat_prompts(tokenizer, QUESTIONS))
    return semantic_contrast.make_trial(reference, geometry, positions, seed)


def compare(trials: dict[str, tuple[Trial, TokenGeometry]]) -> Table:
    """By transform: neighbours are those of a regularizer's own geometry, raw where it has none."""
    geometry = trials["none"][1]
    regularizers: dict[str, Regularizer] = {
        "reverse KL": ReverseKL(),
        "forward KL": ForwardKL(),
        "Jensen-Shannon": JensenShannon(),
        "alpha (0.5)": Alpha(0.5),
        "total variation": TotalVariation(),
        "chi-squared": ChiSquared(),
        "squared Hellinger (control)": SquaredHellinger(),
        "Wasserstein, preset paper": Wasserstein(geometry, preset="paper"),
        "Wasserstein, preset unbalanced": Wasserstein(geometry, preset="unbalanced"),
        "Wasserstein, preset semantic": Wasserstein(trials[TRANSFORMS["semantic"]][1], preset="semantic"),
    }
    table = Table("regularizer", "gap to neighbour", "gap to random", "contrast", "95% interval")
    for name, regularizer in regularizers.items():
        own = regularizer.geometry if isinstance(regularizer, Wasserstein) else geometry
        near, far = gaps(regularizer, trials[own.transform.text][0])
        value, low, high = contrast(near, far)
        table.add_row(name, f"{near.mean():.4g}", f"{far.mean():.4g}", f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def sweep(trial: Trial, geometry: TokenGeometry, lams: Iterable[float], rhos: Iterable[float]) -> Table:
    """Contrast and cost of the unbalanced form. A factor on the scale is the same as lam / factor and rho * factor, so
    it needs no axis of its own.
    """
    table = Table("lam", "rho", "contrast", "95% interval", "iterations (mean, max)", "converged", "seconds")
    for lam in lams:
        for rho in rhos:
            regularizer = Wasserstein(geometry, preset="unbalanced", lam=lam, rho=rho, iterations=400)
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
    parser.add_argument("--model", type=Path, default=registry_models.FOLDER, help="folder of a transformers model")
    parser.add_argument("--sweep", action="store_true", help="sweep lam and rho instead")
    parser.add_argument("--lam", type=float, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--rho", type=float, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    console = Console(width=120)
    model, tokenizer = registry_models.load(arguments.model)
    trials = {}
    for transform in sorted(set(TRANSFORMS.values()), reverse=True):
        geometry = cached_geometry(model, arguments.model, transform)
        console.print(geometry.describe())
        trials[transform] = make_trial(model, tokenizer, geometry, arguments.positions), geometry
    trial, geometry = trials["none"]
    console.print(
        f"{len(trial.origin)} positions; for example, with the reference's top token, its neighbour and the random "
        f"token:"
    )
    for row in range(0, len(trial.origin), max(1, len(trial.origin) // 6)):
        words = [tokenizer.decode([int(ids[row])]) for ids in (trial.origin, trial.near_token, trial.far_token)]
        console.print("  " + "  ".join(repr(word) for word in words))
    console.print(sweep(trial, geometry, arguments.lam, arguments.rho) if arguments.sweep else compare(trials))


if __name__ == "__main__":
    main()
