"""How long a rollout takes: transformers' generate, the same with a compiled static cache, and graphs, side by side.

    python -m benchmarks.generation [--model models/smollm2] [--compiled] [--autocast]

Back ends take turns on the same prompts and seeds; the first call of each, which compiles or captures, is timed by
itself. Responses have a fixed length, as without an end of sequence, so that all do the same work. Printed are seconds
a rollout, the peak of memory above the weights, and the share of responses that are the same as generate's, and of
their tokens before the first one that differs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from wpr.ppo.generation import Sampling, TransformersGeneration
from wpr.ppo.graph_generation import GraphGeneration
from wpr.ppo.rollout import Prompts, Responses

SHAPES = {"64 x 128": (64, 128, (64, 64)), "256 x 256": (256, 256, (64, 64)), "64 x 128, ragged": (64, 128, (8, 384))}
"""Responses, tokens of each, and the shortest and longest prompt."""


def prompts_of(count: int, lengths: tuple[int, int], vocabulary: int, device: str) -> Prompts:
    """Random tokens, padded on the left; the shortest and the longest length are among them."""
    generator = torch.Generator().manual_seed(0)
    low, high = lengths
    sizes = torch.randint(low, high + 1, (count,), generator=generator)
    sizes[0], sizes[-1] = low, high
    ids = torch.randint(3, vocabulary, (count, high), generator=generator)
    mask = torch.arange(high).flip(0) < sizes.unsqueeze(-1)
    return Prompts(ids.masked_fill(~mask, 0).to(device), mask.long().to(device))


class Compiled:
    """`generate` with transformers' static cache, which compiles its steps; it draws with torch's own numbers."""

    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: list[int]) -> Responses:
        tokens = policy.generate(
            input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, do_sample=True, top_k=0,
            max_new_tokens=sampling.max_new_tokens, min_new_tokens=sampling.max_new_tokens, pad_token_id=0,
            cache_implementation="static",
        )[:, prompts.input_ids.shape[1] :]  # fmt: skip
        return Responses(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros(len(tokens), dtype=torch.bool))


def measured(call: Callable[[], Responses], cuda: bool) -> tuple[float, float, Responses]:
    """Seconds, gigabytes at the peak above what was there before, and the responses."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = call()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan"), found


def agreement(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The share of rows ``(B, L)`` that are the same, and of tokens before the first that differs."""
    before = (ours == theirs).long().cumprod(-1)
    return before[:, -1].float().mean().item(), before.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--compiled", action="store_true", help="with transformers' static cache, compiled (minutes)")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under bf16 autocast, as in training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, kind = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    kind = torch.float32 if options.autocast else kind
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=kind).to(device).eval()
    weights = torch.cuda.memory_allocated() / 2**30 if cuda else 0.0
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{options.model}, {kind}{' under autocast' if options.autocast else ''}, {where}")
    heads = ("first, s", "later, s", "generate / it", "peak GB", "rows", "tokens")
    print(f"{'':36s}" + "".join(f"{head:>16s}" for head in heads))
    rows: dict[str, Any] = {}
    for shape in options.shapes:
        count, length, lengths = SHAPES[shape]
        prompts = prompts_of(count, lengths, model.config.vocab_size, device)
        sampling, seeds = Sampling(1.0, 0, 1.0, 0, length, ()), list(range(count))
        back_ends: dict[str, Any] = {"generate": TransformersGeneration()}
        back_ends |= {"static cache, compiled": Compiled()} if options.compiled else {}
        back_ends |= {"graphs": GraphGeneration(say=print)}
        seconds: dict[str, list[float]] = {name: [] for name in back_ends}
        peaks, drawn = dict.fromkeys(back_ends, 0.0), {}
        for _ in range(options.rounds + 1):
            for name, back_end in back_ends.items():
                with torch.autocast(device, torch.bfloat16, enabled=options.autocast), torch.no_grad():
                    taken, peak, found = measured(lambda: back_end.generate(model, prompts, sampling, seeds), cuda)  # noqa: B023
                seconds[name].append(taken)
                peaks[name], drawn[name] = max(peaks[name], peak - weights), found.tokens
        base = median(seconds["generate"][1:])
        for name, (first, *later) in seconds.items():
            same = agreement(drawn[name], drawn["generate"]) if name == "graphs" else (float("nan"),) * 2
            cells = [first, median(later), base / median(later), peaks[name], *same]
            print(f"{shape + ', ' + name:36s}" + "".join(f"{cell:16.3f}" for cell in cells), flush=True)
            rows[f"{shape}, {name}"] = cells
        if options.json:
            options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
