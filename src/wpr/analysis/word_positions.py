"""Positions of real text at which a language model expects a word, and what might stand there instead.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``n`` support entries (the k likeliest tokens and the rest).

A position is taken where the model's likeliest token is the one that stands there, with a probability between `SURE`'s
ends, and is a whole word of four letters or more that is no function word; at most two of a text. Forbidden are all
tokens that are a form of the word: those that begin with its stem, and those of four letters or more that it begins
with. The stem is the word without its last three letters, but four letters at least.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.data.readers import read_records
from wpr.data.rows import DataError
from wpr.errors import OptionError
from wpr.language_models import hidden_states, logits_of
from wpr.transport.support import NO_TOKEN, Support

SURE = (0.3, 0.95)
BEFORE, AFTER, CONTEXT = 24, 8, 80
"""Tokens of a text that are shown before and after a position, and that are read of a text at most."""

FIRST, PER_TEXT, LIKELIEST = 8, 2, 128

TEXT_COLUMNS = ("text", "response", "completion", "chosen")
ANSWER = "\n\nAssistant:"
"""What an answer follows in a transcript of HH-RLHF."""

_FUNCTION_WORDS = """
about after again also always another any because been before being both but can could did does doing done down each
even ever every few for from had has have having her here him his how into its just like made make many may might more
most much must never not now off once one only other our out over own quite same shall she should some such than that
the their them then there these they this those though through too under until upon very was well were what when where
which while who whom whose why will with within without would yet you your
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True)
class WordPosition:
    """One position: which text it is of, all that stands before it, the last tokens of that, the word's token, and what
    follows.
    """

    text: int
    context: str
    before: str
    word: str
    after: str

    def with_word(self, word: str) -> str:
        """The text with another word."""
        return self.before + word + self.after


@dataclass(frozen=True)
class WordPositions:
    """Positions of one model.

    ids: ``(P, n)`` the likeliest tokens in increasing order, then `NO_TOKEN` for the rest of the vocabulary.
    log_reference: ``(P, n)`` float64. original: ``(P,)`` the word's token. forbidden: ``(P, n)``.
    """

    positions: list[WordPosition]
    ids: Tensor
    log_reference: Tensor
    original: Tensor
    forbidden: Tensor
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def allowed(self) -> Tensor:
        """``(P, n)`` tokens that may stand for the word."""
        return ~self.forbidden & (self.ids != NO_TOKEN)

    @cached_property
    def support(self) -> Support:
        """Policy and reference alike, the word being what was drawn."""
        sampled = (self.ids == self.original.unsqueeze(-1)).long().argmax(-1)
        return Support(self.ids, self.log_reference, self.log_reference, sampled)

    def word(self, position: int, entry: int) -> str:
        """The text of one entry."""
        return token_text(self.tokenizer, int(self.ids[position, entry]))

    def replacements(self, log_policy: Tensor) -> Tensor:
        """What stands there if none of the forbidden tokens does: ``(P, n)`` probabilities, 0 for the rest of the
        vocabulary.
        """
        kept = log_policy.double().masked_fill(~self.allowed, -torch.inf)
        return kept.softmax(-1)


def read_texts(path: Path) -> list[str]:
    """Texts of a file: of each record the column ``text``, ``response``, ``completion`` or ``chosen``, of a transcript
    its last answer; of a plain text file its lines.
    """
    try:
        if path.suffix == ".txt":
            return [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        records = list(read_records(path, str(path)))
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise OptionError(f"--texts {path} cannot be read ({error}); give a UTF-8 file of texts") from None
    found = []
    for record in records:
        values = record.values if not record.fault else {}
        text = next((values[key] for key in TEXT_COLUMNS if isinstance(values.get(key), str)), None)
        if text is None:
            raise OptionError(
                f"{record.origin} has no text ({record.fault or f'columns {sorted(values)}'}); name it "
                f"{', '.join(TEXT_COLUMNS)}, or give a .txt file of a text a line"
            )
        found.append(text[text.rfind(ANSWER) + len(ANSWER) :].strip() if ANSWER in text else text)
    return found


@torch.no_grad()
def find_positions(
    model: Any, tokenizer: Any, texts: Sequence[str], count: int = 256, likeliest: int = LIKELIEST
) -> WordPositions:
    """The first ``count`` positions of the texts, with the ``likeliest`` tokens of each."""
    device = next(model.parameters()).device
    opening = opening_of(tokenizer)
    found: list[WordPosition] = []
    rows: list[Tensor] = []
    tokens: list[int] = []
    for number, text in enumerate(texts):
        if len(found) >= count:
            break
        ids = tokenizer(text, add_special_tokens=False, truncation=True, max_length=CONTEXT)["input_ids"]
        if len(ids) < FIRST + AFTER:
            continue
        given = torch.tensor([opening + ids], device=device)
        states = hidden_states(model, given, torch.ones_like(given))[0, len(opening) :]
        logs = logits_of(model, states[FIRST - 1 :]).float().log_softmax(-1).cpu()
        for t in _expected_words(tokenizer, ids, logs)[: min(PER_TEXT, count - len(found))]:
            found.append(_position(tokenizer, number, ids, t))
            rows.append(logs[t - FIRST].double().log_softmax(-1))
            tokens.append(ids[t])
    if not found:
        raise OptionError(
            f"the model expects no word of four letters or more, with a probability of {SURE[0]} to {SURE[1]}, in "
            f"{len(texts)} texts (those of less than {FIRST + AFTER} tokens are left out); give more texts, or "
            "texts of the kind that it was trained on"
        )
    ids, log_reference = _supports(torch.stack(rows), min(likeliest, rows[0].shape[-1] - 1))
    original = torch.tensor(tokens)
    return WordPositions(found, ids, log_reference, original, _forbidden(tokenizer, ids, found), tokenizer)


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token after another one: many tokenizers drop the space at the start of a text."""
    first = tokenizer("a", add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode([*first, token])[len(tokenizer.decode(first)) :])


def _position(tokenizer: Any, text: int, ids: Sequence[int], t: int) -> WordPosition:
    """That of token ``t`` of a text."""
    context, upto = tokenizer.decode(ids[:t]), tokenizer.decode(ids[: t + 1])
    after = tokenizer.decode(ids[: t + 1 + AFTER])[len(upto) :]
    return WordPosition(text, context, tokenizer.decode(ids[max(0, t - BEFORE) : t]), upto[len(context) :], after)


def opening_of(tokenizer: Any) -> list[int]:
    """The token that a text begins with, if the model knows one: tokenizers made from GGUF files do not always put it
    there, and Gemma's models need it.
    """
    first = tokenizer.bos_token_id
    if first is None:
        return []
    return [first] if tokenizer("a")["input_ids"][:1] == [first] or tokenizer.bos_token == "<bos>" else []


def _expected_words(tokenizer: Any, ids: Sequence[int], logs: Tensor) -> list[int]:
    """Indices of tokens that are expected words, `FIRST` or later and followed by four tokens or more; logs: from what
    follows `FIRST` tokens on.
    """
    best, top = logs.max(-1)
    found = []
    for t in range(FIRST, len(ids) - 4):
        sure = SURE[0] < float(best[t - FIRST].exp()) < SURE[1]
        if sure and int(top[t - FIRST]) == ids[t] and _is_content_word(token_text(tokenizer, ids[t])):
            found.append(t)
    return found


def _is_content_word(text: str) -> bool:
    return re.fullmatch(" [a-z]{4,}", text) is not None and text.strip() not in FUNCTION_WORDS


def _supports(logs: Tensor, likeliest: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities ``(P, n)`` of log-probabilities ``(P, V)``."""
    ids = logs.topk(likeliest).indices.sort(-1).values
    rest = logs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    values = torch.cat([logs.gather(-1, ids), rest], -1)
    return torch.nn.functional.pad(ids, (0, 1), value=NO_TOKEN), values.log_softmax(-1)


def _forbidden(tokenizer: Any, ids: Tensor, positions: Sequence[WordPosition]) -> Tensor:
    """Entries that are a form of the position's word, the word itself among them."""
    texts = {token: token_text(tokenizer, token).strip().lower() for token in ids.unique().tolist() if token >= 0}
    texts[NO_TOKEN] = ""
    words = [position.word.strip() for position in positions]
    return torch.tensor(
        [[is_form(texts[token], word) for token in row] for row, word in zip(ids.tolist(), words, strict=True)]
    )


def is_form(text: str, word: str) -> bool:
    """Whether a token's text is taken for a form of the word; both in lower case without spaces."""
    stem = word[: max(4, len(word) - 3)]
    return text.startswith(stem) or (len(text) >= 4 and word.startswith(text))
