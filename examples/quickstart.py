"""A first look: what a semantic leash sees that KL does not, on SmolLM2's predictions (`make quickstart`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for benchmarks/, which is not part of the package

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import smollm2
from benchmarks.semantic_contrast import cached_geometry, compare, make_trial
from wpr import ReverseKL, Wasserstein

PROMPT = "The sun rises in the east and sets in the"
console = Console(width=110)


def main() -> None:
    console.rule("1. A reference model and the geometry of its tokens")
    model, tokenizer = smollm2.load()
    console.print("measuring distances between all pairs of 49,152 tokens (a minute, once; kept in models/smollm2) ...")
    geometry = cached_geometry(model, smollm2.FOLDER)
    console.print(geometry.describe())

    console.rule("2. Two policies that KL cannot tell apart")
    with torch.no_grad():
        reference = model(tokenizer(PROMPT, return_tensors="pt").input_ids).logits[0, -1:].softmax(-1)
    origin = int(reference.argmax())
    near = int(geometry.nearest_tokens(origin, 1)[0][0])
    far = int(reference.topk(60).indices[0, -1])
    shared = (reference[0, near] + reference[0, far]) / 2  # equal reference probability: only meaning differs
    reference[0, [near, far]] = shared
    regularizers = {"reverse KL": ReverseKL(), "Wasserstein (semantic)": Wasserstein(geometry, preset="semantic")}
    table = Table(
        "half of the mass of", "moved to", *(f"penalty, {name}" for name in regularizers), title=f"{PROMPT!r} ..."
    )
    for target in (near, far):
        policy = reference.clone()
        policy[0, target] += policy[0, origin] / 2
        policy[0, origin] /= 2
        out = [
            regularizer(policy.log(), reference.log(), torch.tensor([target])) for regularizer in regularizers.values()
        ]
        words = [repr(tokenizer.decode([token])) for token in (origin, target)]
        table.add_row(*words, *(f"{float(x.penalty):.3f}" for x in out))
    console.print(table)

    console.rule("3. The same over many positions: semantic contrast, 1 = blind to meaning")
    trial = make_trial(model, tokenizer, geometry, positions=64)
    console.print(compare(trial, geometry))
    console.print("The figures of the README come from 256 positions: make bench")


if __name__ == "__main__":
    main()
