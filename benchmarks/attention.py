"""What training steps cost without cuDNN's attention (`wpr.language_models.cudnn_attention_disabled`).

    python -m benchmarks.attention [--model models/smollm2] [--repeats 10]

Forward and backward pass of 16 sequences under bf16 autocast on a GPU, padded on the left by 0 to 180 tokens, with and
without cuDNN's attention in turns; medians. Torch chooses cuDNN's attention by itself only where it finds it best: on
other GPUs than Hopper both columns may be the same kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from statistics import median
from typing import Any

import torch
import transformers

from wpr.language_models import cudnn_attention_disabled

LENGTHS = (384, 500, 512)
SEQUENCES, WARM_UP = 16, 3


def seconds(model: Any, ids: torch.Tensor, mask: torch.Tensor, guard: Any) -> float:
    """Of one forward and backward pass."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with guard(), torch.autocast("cuda", torch.bfloat16):
        model(input_ids=ids, attention_mask=mask).logits.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: cuDNN's attention runs on GPUs alone")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).cuda().train()
    guards = {"as torch chooses": contextlib.nullcontext, "without cuDNN's": cudnn_attention_disabled}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"| tokens | {' | '.join(f'{name}, ms' for name in guards)} | ratio |\n|---|---|---|---|")
    for length in LENGTHS:
        ids = torch.randint(model.config.vocab_size, (SEQUENCES, length), device="cuda")
        mask = (torch.arange(length, device="cuda") >= 12 * torch.arange(SEQUENCES, device="cuda")[:, None]).long()
        found: dict[str, list[float]] = {name: [] for name in guards}
        for _ in range(WARM_UP + options.repeats):
            for name, guard in guards.items():
                found[name].append(seconds(model, ids, mask, guard))
        first, second = (1e3 * median(times[WARM_UP:]) for times in found.values())
        print(f"| {SEQUENCES} x {length} | {first:.1f} | {second:.1f} | {second / first:.3f} |", flush=True)


if __name__ == "__main__":
    main()
