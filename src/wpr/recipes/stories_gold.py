"""The gold score of the stories: what the made-up people of its world really want. No model is trained on it.

    gold = sentiment + fluency - missing / 2
    sentiment = mean of VADER's compound score of the whole response and of its last sentence, from -1 to 1
    fluency = -min(1, max(0, TYPICAL - l)) - r, where l is the mean log-probability of the response's tokens under
              wpr-pico, and r the share of the response's word triples that occurred in it before
    missing = how many of the two sentences that were asked for are not there, or not whole

So a happy ending counts, in words that a story would have: text that pico finds less likely than almost all of its own
samples (`TYPICAL` is near their 10th percentile) loses a point a nat, at most one. Saying things twice is no use, and
neither is saying nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

SENTENCES = 2
ENDING = r"[.!?][\"']?$"
"""How a whole sentence ends."""

TYPICAL = -1.7
BATCH = 128


def gold(prompts: Sequence[Any], responses: Sequence[str], **columns: Any) -> list[float]:
    """Scores as `wpr.rewards.FunctionReward` wants them."""
    return gold_scores([str(prompt) for prompt in prompts], responses)


def gold_scores(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The gold score of each response."""
    fluencies = fluency(prompts, responses)
    return [sentiment(text) + fluent - 0.5 * missing(text) for text, fluent in zip(responses, fluencies, strict=True)]


def sentiment(text: str) -> float:
    """How well a text feels, its ending in particular; an empty one feels like nothing."""
    parts = sentences(text)
    if not parts:
        return 0.0
    score = require_vader().polarity_scores
    return float(0.5 * score(text)["compound"] + 0.5 * score(parts[-1])["compound"])


def fluency(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """At most 0: what unlikely and repeated words cost."""
    likely = log_likelihoods(prompts, responses)
    return [
        -min(1.0, max(0.0, TYPICAL - value)) - repeated(text) for value, text in zip(likely, responses, strict=True)
    ]


def missing(text: str) -> int:
    """How many whole sentences are lacking."""
    whole = sum(_ends_whole(part) for part in sentences(text))
    return max(0, SENTENCES - whole)


def _ends_whole(sentence: str) -> bool:
    """Whether its last line has a letter and ends as a sentence does."""
    return bool(re.search(ENDING, sentence) and re.search(r"\w", sentence.rpartition("\n")[2]))


def repeated(text: str) -> float:
    """Share of word triples that occurred before in the text."""
    words = re.findall(r"[\w']+", text.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def log_likelihoods(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Mean log-probability a token of each response after its prompt, under pico; of an empty one, that of a space."""
    import torch

    from wpr.language_models import pad

    model, tokenizer = load_pico()
    limit = model.config.max_position_embeddings
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        before = tokenizer(prompt)["input_ids"]
        after = tokenizer(_continued(prompt, response), add_special_tokens=False)["input_ids"]
        rows.append((before[-limit // 2 :], after[: limit // 2]))
    found = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: sum(map(len, rows[row])))  # alike in length: little padding
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        joined = [[*rows[row][0], *rows[row][1]] for row in part]
        ids, mask = pad(joined, value=tokenizer.pad_token_id, device=model.device)
        starts = torch.tensor([[len(rows[row][0])] for row in part], device=model.device)
        counted = mask.bool() & (torch.arange(ids.shape[1], device=model.device) >= starts)
        with torch.no_grad():  # padding stands behind, where causal attention does not see it
            logits = model(ids[:, :-1]).logits.float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        kept = counted[:, 1:]
        for row, value in zip(part, ((losses * kept).sum(-1) / kept.sum(-1)).tolist(), strict=True):
            found[row] = -value
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a story: up to a full stop, question or exclamation mark, and the quote that it closes."""
    return [part.strip() for part in re.findall(r"[^.!?]*[.!?]+[\"']?|[^.!?]+$", text) if part.strip()]


def _continued(prompt: str, response: str) -> str:
    """With the space that the pipeline puts between prompt and completion; responses come without it."""
    return response if response[:1].isspace() or prompt[-1:].isspace() else f" {response}"


@cache
def load_pico() -> tuple[Any, Any]:
    """The shipped model and its tokenizer, once a process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wpr import pico

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(pico.path(), dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(pico.path())


@cache
def require_vader() -> Any:
    """VADER, or an error that says how to get it."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise ImportError("the recipe stories needs VADER; install it with `pip install 'wpr[quickstart]'`") from None
    return SentimentIntensityAnalyzer()
