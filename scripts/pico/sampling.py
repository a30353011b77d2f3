"""Stories sampled from the teacher: the text that wpr-pico is trained on."""

from __future__ import annotations

import time
from typing import Any

import teacher
import torch
from torch import Tensor
from transformers import StaticCache

LIKELIEST = 128
"""A token is drawn from at most this many: a full sort of 32,000 for top-p would take most of the time."""

SHORTEST = 80
"""Characters of the shortest story that is kept."""


@torch.no_grad()
def sample_stories(
    model: Any, pieces: list[str], count: int, seconds: float, batch: int, device: str, seed: int, top_p: float
) -> list[str]:
    """``count`` stories that came to an end by themselves, or as many as ``seconds`` allow; duplicates left out.

    batch: stories sampled together. top_p: each token is drawn from the most likely that make up this probability.
    """
    generator = torch.Generator(device).manual_seed(seed)
    stories: dict[str, None] = {}
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    begun = time.time()
    while len(stories) < count and time.time() - begun < seconds:
        for row in _sample_batch(model, batch, device, generator, top_p).tolist():
            story = _finished_story(row, pieces)
            if story is not None:
                stories[story] = None
        print(f"{len(stories)} stories after {time.time() - begun:.0f} s", flush=True)
    return list(stories)[:count]


def _finished_story(row: list[int], pieces: list[str]) -> str | None:
    """The text of a row of the teacher's tokens; None if it was cut off, is very short or holds broken characters."""
    if teacher.BOS not in row[1:]:
        return None
    story = teacher.text(row[: row.index(teacher.BOS, 1)], pieces)
    return story if len(story) > SHORTEST and "<unk>" not in story and "\ufffd" not in story else None


def _sample_batch(model: Any, batch: int, device: str, generator: torch.Generator, top_p: float) -> Tensor:
    """Rows ``(batch, length)`` of the teacher's tokens, as long as its longest text."""
    length = model.config.max_position_embeddings
    cache = StaticCache(model.config, max_cache_len=length)
    tokens = torch.full((batch, length), teacher.BOS, device=device)
    for step in range(length - 1):
        position = torch.tensor([step], device=device)
        out = model(tokens[:, step : step + 1], past_key_values=cache, cache_position=position, use_cache=True)
        tokens[:, step + 1] = _draw(out.logits[:, -1], generator, top_p)
        if step % 32 == 31 and bool((tokens[:, 1 : step + 2] == teacher.BOS).any(-1).all()):
            break
    return tokens


def _draw(logits: Tensor, generator: torch.Generator, top_p: float) -> Tensor:
    """One token a row ``(B,)`` from logits ``(B, V)``."""
    best, index = logits.topk(LIKELIEST, -1)
    ordered = (best.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
    ordered[ordered.cumsum(-1) - ordered > top_p] = 0
    drawn = torch.multinomial(ordered, 1, generator=generator)
    return index.gather(-1, drawn).squeeze(-1)
