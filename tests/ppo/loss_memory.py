"""Memory of a loss from hidden states, in a process of its own: `python -m tests.ppo.loss_memory sliced|whole`.

Prints what forward and backward pass took at their peak, in bytes, and how much the logits of one model are.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.ppo import tiny
from wpr import ReverseKL, loss_from_hidden

POSITIONS, TOKENS, SLICES = 1024, 20_000, 64


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """How much the process grew at the most while it worked, in bytes, and what came of it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _status("VmRSS")
    result = work()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main(kind: str) -> None:
    policy, reference = (tiny.policy(seed, vocab_size=TOKENS) for seed in (0, 1))
    size = POSITIONS * TOKENS * 4
    memory_mb = 2 * size / 2**20 / (SLICES if kind == "sliced" else 1)
    states = [torch.randn(POSITIONS, 32, requires_grad=True) for _ in range(2)]
    warm = [each[:8] for each in states]
    loss_from_hidden(ReverseKL(), policy, warm[0], reference, warm[1]).sum().backward()  # all that is allocated once
    forward, loss = peak(
        lambda: loss_from_hidden(ReverseKL(), policy, states[0], reference, states[1], memory_mb=memory_mb)
    )
    backward, _ = peak(lambda: loss.sum().backward())
    print(json.dumps({"logits": size, "forward": forward, "backward": backward}))


if __name__ == "__main__":
    main(*sys.argv[1:])
