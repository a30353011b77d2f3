"""Scores of responses that nothing is trained on: meaning, words kept, copies, fluency.

Notation for shapes: ``B`` responses.

    meaning       cosine of the encoder's vectors of response and source; 0 for an empty response
    words-kept    share of the source's words that the response has, each counted as often as both have it
    copies        1 where response and source are the same text, else 0
    fluency       mean over the response's tokens of log p(token | tokens before it), of a language model

The source is what the response should say in other words: a column of the data, or the prompt. The encoder and the
language model should be other models than the policy; a monitor that the policy could learn from would measure nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wpr.config.functions import import_function
from wpr.config.monitors import PROMPT, MonitorSettings
from wpr.evaluation.diversity import words
from wpr.evaluation.encoders import TextEncoder, load_encoder
from wpr.language_models import hidden_states, logits_of, pad
from wpr.rewards import Completions, FunctionReward, Reward, RewardError

REMEMBERED = 50_000
"""Vectors of sources that are kept; the same sources come again in every evaluation and epoch."""

BATCH = 64


def make_monitor(settings: MonitorSettings, setting: str, device: torch.device | str = "cpu") -> Reward:
    """The score that settings name; ``setting``: their place in the recipe, for errors."""
    monitor = _make(settings, setting, device)
    monitor.in_training = settings.in_training  # type: ignore[attr-defined]  # what a reward may also have
    return monitor


def _make(settings: MonitorSettings, setting: str, device: torch.device | str) -> Reward:
    if settings.kind == "function":
        assert settings.function is not None
        return FunctionReward(import_function(settings.function, setting))
    if settings.kind == "fluency":
        assert settings.model is not None
        return Fluency(*_language_model(settings.model, device))
    assert settings.source is not None
    if settings.kind == "meaning":
        assert settings.encoder is not None
        return Meaning(load_encoder(settings.encoder, device), settings.source)
    return PairScore({"words-kept": words_kept, "copies": is_copy}[settings.kind], settings.kind, settings.source)


class Meaning:
    """Similarity of responses and their sources, by an encoder."""

    name = "meaning"

    def __init__(self, encoder: TextEncoder, source: str) -> None:
        self.encoder, self.source = encoder, source
        self._known: dict[str, Tensor] = {}

    def __call__(self, completions: Completions) -> Tensor:
        """Cosines ``(B,)``."""
        ours, theirs = list(completions.responses), sources_of(completions, self.source)
        own, other = self.encoder(ours), self._remembered(theirs)
        found = (own * other).sum(-1)
        found[[not text.strip() for text in ours]] = 0.0
        return found.float().to(completions.input_ids.device)

    def _remembered(self, texts: Sequence[str]) -> Tensor:
        """Vectors ``(B, H)`` of sources, each encoded once while it is remembered."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if len(self._known) + len(new) > REMEMBERED:
            self._known.clear()
            new = list(dict.fromkeys(texts))
        if new:
            self._known |= dict(zip(new, self.encoder(new), strict=True))
        return torch.stack([self._known[text] for text in texts])


class PairScore:
    """A function of source and response, pair by pair."""

    may_skip = True

    def __init__(self, function: Callable[[str, str], float], name: str, source: str) -> None:
        self.function, self.name, self.source = function, name, source

    def __call__(self, completions: Completions) -> Tensor:
        """Scores ``(B,)``; NaN where there is none."""
        pairs = zip(sources_of(completions, self.source), completions.responses, strict=True)
        return torch.tensor([self.function(*pair) for pair in pairs], device=completions.input_ids.device)


class Fluency:
    """Mean log-probability of a response's tokens under a language model, of the text by itself."""

    name, may_skip = "fluency", True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

    @torch.no_grad()
    def __call__(self, completions: Completions) -> Tensor:
        """Means ``(B,)``; NaN for a response without tokens."""
        texts = [text.strip() for text in completions.responses]
        rows = [[self.opening, *ids] for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        order = sorted((row for row in range(len(rows)) if len(rows[row]) > 1), key=lambda row: len(rows[row]))
        found = torch.full((len(rows),), torch.nan)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            ids, mask = pad([rows[row] for row in part], device=self.model.device)
            real = mask[:, 1:].bool()
            logits = logits_of(self.model, hidden_states(self.model, ids, mask)[:, :-1][real]).float()
            logs = torch.zeros(real.shape, device=logits.device)
            logs[real] = logits.log_softmax(-1).gather(-1, ids[:, 1:][real].unsqueeze(-1)).squeeze(-1)
            found[part] = (logs.sum(-1) / real.sum(-1)).cpu()
        return found.to(completions.input_ids.device)


def words_kept(source: str, response: str) -> float:
    """Share of the source's words that the response has; NaN for a source without words."""
    ours, theirs = (Counter(word for word in words(text) if word[0].isalnum()) for text in (response, source))
    return (ours & theirs).total() / theirs.total() if theirs else float("nan")


def is_copy(source: str, response: str) -> float:
    """Whether both are the same text, but for white space."""
    return float(source.split() == response.split())


def sources_of(completions: Completions, column: str) -> list[str]:
    """The texts that responses are compared with: a column, or the prompts."""
    if column == PROMPT:
        return [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in completions.prompts]
    if column not in completions.columns:
        there = ", ".join(completions.columns) or "none"
        raise RewardError(
            f"the data has no column {column!r} (kept are {there}); keep it with data.columns: {{{column}: "
            "THEIR_NAME}, or compare with the prompt (of: prompt)"
        )
    return [str(text) for text in completions.columns[column]]


def _language_model(name: str, device: torch.device | str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wpr import pico

    folder = str(pico.path()) if name == "pico" else name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)
