"""The world of the stories: openings, continuations that wpr-pico writes, and preferences for those that end well.

An opening is the first two sentences of a story, a continuation the next two. Of two continuations of an opening, the
better one by the gold score of `stories_gold` tends to be preferred: with probability sigmoid(difference /
``temperature``), and a share ``flips`` of the labels is turned round. In a share ``broken`` of the pairs one
continuation is cut off, so that the reward model learns what is wrong with that. Everything is drawn from the seed.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wpr.recipes.stories_gold import ENDING, SENTENCES, gold_scores, load_pico, require_vader, sentences
from wpr.transport.progress import progress_bar

OPENING_SENTENCES, RESPONSE_SENTENCES = 2, SENTENCES
OPENING_TOKENS, RESPONSE_TOKENS = 40, 44
BATCH = 256


def prepare(
    folder: Path,
    seed: int = 0,
    openings: int = 1500,
    broken: float = 0.2,
    flips: float = 0.05,
    temperature: float = 0.2,
) -> dict[str, Any]:
    """Write ``model/``, a copy of wpr-pico, and ``pairs.jsonl`` to ``folder``.

    openings: how many are asked for; a few are lost to stories that are too long or end too soon.
    """
    from wpr import pico

    require_vader()  # now, not after a minute of sampling
    shutil.copytree(pico.path(), folder / "model", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    prompts = _distinct(sample([""] * openings, OPENING_TOKENS, seed, 0, "story openings"), OPENING_SENTENCES)
    sides = [sample(prompts, RESPONSE_TOKENS, seed, number, f"continuations {number} of 2") for number in (1, 2)]
    whole = [
        (prompt, *cut)
        for prompt, *texts in zip(prompts, *sides, strict=True)
        if all(cut := [_cut(text, RESPONSE_SENTENCES) for text in texts]) and cut[0] != cut[1]
    ]
    rng = random.Random(seed)
    rows, labels = _label([_break(pair, rng, broken) for pair in whole], rng, flips, temperature)
    for row, (_, shown, _) in zip(rows, whole, strict=True):
        row["demonstrated"] = shown  # drawn at random, and whole: only the reward tells good from bad
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"openings": len(prompts), "pairs": len(rows), **labels}


def _label(
    whole: Sequence[tuple[str, str, str]], rng: random.Random, flips: float, temperature: float
) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Pairs with their noisy labels; how often the label agrees with the gold score, and that score's mean."""
    prompts = [prompt for prompt, _, _ in whole]
    first = gold_scores(prompts, [text for _, text, _ in whole])
    second = gold_scores(prompts, [text for _, _, text in whole])
    rows, agreed = [], 0
    for (prompt, one, other), ours, theirs in zip(whole, first, second, strict=True):
        difference = max(-30.0, min(30.0, (ours - theirs) / temperature))
        prefers = rng.random() < 1 / (1 + math.exp(-difference))
        prefers ^= rng.random() < flips
        agreed += prefers == (ours > theirs)
        chosen, rejected = (one, other) if prefers else (other, one)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows, {"labels_that_agree": agreed / len(rows), "mean_gold": sum(first + second) / (2 * len(rows))}


def _break(pair: tuple[str, str, str], rng: random.Random, share: float) -> tuple[str, str, str]:
    """Now and then, the second continuation cut off after some of its words, with or without a full stop."""
    prompt, one, other = pair
    words = other.split()
    cut, stop, breaks = rng.randrange(1, max(2, len(words) // 2)), rng.random() < 0.5, rng.random() < share
    return (prompt, one, " ".join(words[:cut]).rstrip(".,!?") + "." * stop) if breaks else pair


def sample(prompts: Sequence[str], tokens: int, seed: int, part: int, title: str) -> list[str]:
    """What pico writes after each prompt, at temperature 1."""
    import torch

    from wpr.ppo.back_ends import BackEnd
    from wpr.ppo.generation import Sampling, response_seeds
    from wpr.ppo.rollout import Prompts

    model, tokenizer = load_pico()
    generation = BackEnd().make(model.device, training=False)
    sampling = Sampling(1.0, 0, 1.0, 0, tokens, (tokenizer.eos_token_id,))
    seeds = response_seeds(seed, part, 0, len(prompts))
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # alike in length: little padding
    texts = [""] * len(prompts)
    with progress_bar(f"prepare: {title}", len(prompts), enabled=True) as bar:
        for start in range(0, len(prompts), BATCH):
            rows = order[start : start + BATCH]
            batch = tokenizer([prompts[row] for row in rows], return_tensors="pt", padding=True, padding_side="left")
            given = Prompts(batch["input_ids"].to(model.device), batch["attention_mask"].bool().to(model.device))
            with torch.no_grad():
                drawn = generation.generate(model, given, sampling, [seeds[row] for row in rows])
            for row, ids, keep in zip(rows, drawn.tokens, drawn.mask, strict=True):
                texts[row] = tokenizer.decode(ids[keep].tolist(), skip_special_tokens=True)
            bar.advance(len(rows))
    return texts


def _distinct(stories: Sequence[str], count: int) -> list[str]:
    """The openings of stories, each once."""
    return list(dict.fromkeys(cut for story in stories if (cut := _cut(story, count))))


def _cut(text: str, count: int) -> str:
    """The first ``count`` sentences; nothing if there are fewer whole ones."""
    parts = sentences(text)
    if len(parts) < count or not re.search(ENDING, parts[count - 1]):
        return ""
    return " ".join(parts[:count])
