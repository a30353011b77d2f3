"""How long a rollout takes: transformers' generate, the same with a compiled static cache, and graphs, side by side.

    python -m benchmarks.generation [--model models/smollm2] [--compiled] [--autocast]
    python -m benchmarks.generation --agreement       are they generate's tokens? for three architectures, in float32

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

SHAPES = {"64x128": (64, 128, (64, 64)), "256x256": (256, 256, (64, 64)), "64x128-ragged": (64, 128, (8, 384))}
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


SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Gemma3TextConfig": {"sliding_window": 128},
}


def print_agreement(device: str, count: int, length: int) -> None:
    """Small random models in float32, ragged prompts: the share of responses that are the same as generate's, taking
    the most likely token and drawing, before and after a step of an optimizer.
    """
    print(f"{count} prompts of 8 to 384 tokens, {length} new ones, float32: share of the same responses")
    for kind, own in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SMALL, **own)).to(device)
        prompts = prompts_of(count, (8, 384), SMALL["vocab_size"], device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ours, theirs, cells = GraphGeneration(say=print), TransformersGeneration(), []
        for _ in range(2):
            model.eval()
            for top_k in (1, 0):
                sampling = Sampling(1.0, top_k, 1.0, 0, length, (SMALL["eos_token_id"],))
                given = (model, prompts, sampling, range(count))
                one, other = ours.generate(*given), theirs.generate(*given)
                width = min(one.tokens.shape[1], other.tokens.shape[1])
                same = torch.equal(one.mask[:, :width], other.mask[:, :width])
                rows = (one.tokens[:, :width] == other.tokens[:, :width]) | ~one.mask[:, :width]
                cells.append(f"{rows.all(-1).float().mean().item():.4f}{'' if same else ' (other lengths)'}")
            model(input_ids=prompts.input_ids[:8], labels=prompts.input_ids[:8]).loss.backward()
            optimizer.step()
        print(f"{kind:20s} greedy {cells[0]}, drawn {cells[1]}; after a step greedy {cells[2]}, drawn {cells[3]}")


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
    parser.add_argument("--compiled", action="store_true", help="also transformers' static cache and graphs, compiled")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under bf16 autocast, as in training")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--prompts", type=int, default=256, help="of --agreement")
    parser.add_argument("--tokens", type=int, default=64, help="of --agreement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, kind = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    if options.agreement:
        return print_agreement(device, options.prompts, options.tokens)
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
        back_ends |= {"graphs, compiled": GraphGeneration(say=print, compiled=True)} if options.compiled else {}
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
            graphs = isinstance(back_ends[name], GraphGeneration)
            same = agreement(drawn[name], drawn["generate"]) if graphs else (float("nan"),) * 2
            cells = [first, median(later), base / median(later), peaks[name], *same]
            print(f"{shape + ', ' + name:36s}" + "".join(f"{cell:16.3f}" for cell in cells), flush=True)
            rows[f"{shape}, {name}"] = cells
        if options.json:
            options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
