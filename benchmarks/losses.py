"""Penalties and losses from hidden states, by the memory that logits may take: milliseconds and peak memory.

    python -m benchmarks.losses [--model models/smollm2] [--positions 8192]

States are random, heads are the model's in float32 under bf16 autocast. A loss counts with its backward pass, in states
and head. Torch's formulas stand beside the kernels for reverse KL.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_inputs import path
from benchmarks.registry_models import load
from wpr import ReverseKL, Wasserstein, from_hidden, loss_from_hidden


def measure(work: Callable[[], Any], repeats: int = 3) -> tuple[float, int]:
    """Milliseconds of a call, and the MiB at its peak beyond what there was before."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats, (torch.cuda.max_memory_allocated() - before) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--positions", type=int, default=8192)
    options = parser.parse_args()
    policy = load(options.model)[0].cuda()
    reference = copy.deepcopy(policy).requires_grad_(False)
    vocabulary, size = policy.get_output_embeddings().weight.shape
    own = 2 * torch.randn(options.positions, size, device="cuda")
    other = own + 0.2 * torch.randn_like(own)
    tokens = torch.randint(vocabulary, (options.positions,), device="cuda")
    semantic = Wasserstein.from_model(reference)
    regularizers = {
        "reverse KL": ReverseKL(),
        "semantic": semantic,
        "reverse KL + 4 semantic": ReverseKL() + 4 * semantic,
    }
    print("| regularizer | path | MB of logits | penalty, ms | MiB | loss, ms | MiB |\n|---|---|---|---|---|---|---|")
    for name, regularizer in regularizers.items():
        for kernels, memory in [*((True, memory) for memory in (64, 128, 256, 512)), (False, 512)]:
            if not kernels and name != "reverse KL":
                continue

            def penalty(regularizer: Any = regularizer, memory: int = memory) -> None:
                from_hidden(regularizer, policy, own, reference, other, tokens, memory_mb=memory)

            def loss(regularizer: Any = regularizer, memory: int = memory) -> None:
                states = own.clone().requires_grad_()
                found = loss_from_hidden(regularizer, policy, states, reference, other, memory_mb=memory)
                found.mean().backward()

            cells = []
            for work in (penalty, loss):
                with path(kernels), torch.autocast("cuda", torch.bfloat16):
                    cells.append("{:.1f} | {}".format(*measure(work)))
                policy.zero_grad(set_to_none=True)
            print(f"| {name} | {'kernels' if kernels else 'torch'} | {memory} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
