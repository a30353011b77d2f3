"""What a semantic regularizer sees that KL does not, on a real model's predictions.

Commands:
    python examples/semantic_contrast.py                    wpr-pico, which comes with the package: seconds
    python examples/semantic_contrast.py models/smollm2     any folder of a transformers causal LM: minutes
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from wpr import Regularizer, ReverseKL, SquaredHellinger, TokenGeometry, Wasserstein, pico
from wpr.analysis.semantic_contrast import continuations, contrast, gaps, make_trial, plain_prompts

PROMPT = "Once upon a time, there was a little"
OPENINGS = [
    "Once upon a time, there was a small boat that wanted to",
    "One day, a boy named Tom found a box in the garden.",
    "The cat was hungry, so she went to the kitchen and",
    "Mom and Anna baked a cake. When it was ready,",
    "There was a storm in the night. The old tree",
    "Sam lost his favorite hat. He looked under the bed and",
    "The bird could not fly because its wing was hurt.",
    "It was cold outside. The children put on their",
    "Two friends wanted the same toy. They started to",
    "The farmer had a big red tractor. Every morning he",
    "A little fish lived in the sea. She was afraid of",
    "Grandpa told a story about a king who",
]
console = Console(width=110)


def load(folder: Path) -> tuple[Any, Any]:
    """Model (float32, evaluation mode) and tokenizer."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def two_policies(model: Any, tokenizer: Any, geometry: TokenGeometry, regularizers: dict[str, Regularizer]) -> Table:
    """Half of a word's probability moved to its neighbour and to an unrelated word, and what each regularizer says."""
    (prompt,) = plain_prompts(tokenizer, [PROMPT])
    reference = model(prompt.unsqueeze(0)).logits[0, -1:].softmax(-1)
    origin = int(reference.argmax())
    near = int(geometry.nearest_tokens(origin, 1)[0][0])
    far = int(reference.topk(60).indices[0, -1])
    shared = (reference[0, near] + reference[0, far]) / 2  # equal reference probability: only meaning differs
    reference[0, [near, far]] = shared
    penalties = (f"penalty, {name}" for name in regularizers)
    table = Table("half of the mass of", "moved to", *penalties, title=f"{PROMPT!r} ...")
    for target in (near, far):
        policy = reference.clone()
        policy[0, target] += policy[0, origin] / 2
        policy[0, origin] /= 2
        words = [repr(tokenizer.decode([token])) for token in (origin, target)]
        token = torch.tensor([target])
        found = [
            float(regularizer(policy.log(), reference.log(), token).penalty) for regularizer in regularizers.values()
        ]
        table.add_row(*words, *(f"{penalty:.3f}" for penalty in found))
    return table


def many_positions(
    model: Any, tokenizer: Any, geometry: TokenGeometry, regularizers: dict[str, Regularizer], positions: int
) -> Table:
    """The same at every position where the model is sure of the next token."""
    reference = continuations(model, plain_prompts(tokenizer, OPENINGS))
    trial = make_trial(reference, geometry, positions)
    table = Table("regularizer", "gap to neighbour", "gap to random", "contrast", "95% interval")
    for name, regularizer in regularizers.items():
        near, far = gaps(regularizer, trial)
        value, low, high = contrast(near, far)
        table.add_row(name, f"{near.mean():.4g}", f"{far.mean():.4g}", f"{value:.3f}", f"{low:.3f} to {high:.3f}")
    table.caption = f"{len(trial.origin)} positions; 1 = blind to meaning, 0 = moving to a neighbour is free"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="folder of a transformers causal LM; wpr-pico if left out")
    parser.add_argument("--positions", type=int, default=64, help="positions to use at most")
    arguments = parser.parse_args()

    console.rule("1. A reference model and the geometry of its tokens")
    model, tokenizer = load(arguments.model or pico.path())
    geometry = TokenGeometry.from_model(model, transform="centre/unit")
    console.print(geometry.describe())
    regularizers: dict[str, Regularizer] = {
        "reverse KL": ReverseKL(),
        "squared Hellinger": SquaredHellinger(),
        "Wasserstein (paper)": Wasserstein.from_model(model, preset="paper"),
        "Wasserstein (semantic)": Wasserstein(geometry, preset="semantic"),
    }

    console.rule("2. Two policies that KL cannot tell apart")
    console.print(two_policies(model, tokenizer, geometry, regularizers))

    console.rule("3. The same over many positions: semantic contrast")
    console.print(many_positions(model, tokenizer, geometry, regularizers, arguments.positions))


if __name__ == "__main__":
    main()
