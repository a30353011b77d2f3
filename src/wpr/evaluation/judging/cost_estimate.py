"""What an evaluation will take, before it starts.

Tokens are estimated: 3.5 ASCII characters per token, one token for any other character, and four for each message
around its text. For 24 dialogues of HH-RLHF in the shipped rubrics that is 3% (helpfulness) and 7% (summary) more than
SmolLM2's tokenizer and chat template make of them: a little too much rather than too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wpr.evaluation.judging.questions import Message, Question

PER_MESSAGE = 4
PER_TOKEN = 3.5


@dataclass(frozen=True)
class CostEstimate:
    """Requests and tokens; answer_tokens is the most that they can be. price: None where none was given."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    price: float | None

    def __str__(self) -> str:
        price = "" if self.price is None else f", at most {self.price:.2f} in the currency of the prices given"
        return (
            f"{self.requests:,} requests, about {self.prompt_tokens:,} tokens in and at most {self.answer_tokens:,} "
            f"out{price}"
        )


def tokens_of(messages: Sequence[Message]) -> int:
    """Estimated tokens of a request."""
    return sum(tokens(message["content"]) + PER_MESSAGE for message in messages)


def tokens(text: str) -> int:
    """Estimated tokens of a text."""
    plain = len(text.encode("ascii", "ignore"))
    return math.ceil(plain / PER_TOKEN) + len(text) - plain


def estimate(
    questions: Sequence[Question],
    answer_tokens: int,
    price_in: float | None = None,
    price_out: float | None = None,
) -> CostEstimate:
    """Of questions that are to be sent once each. Prices are those of a million tokens."""
    into = sum(tokens_of(question.messages) for question in questions)
    out = answer_tokens * len(questions)
    price = None if price_in is None or price_out is None else (into * price_in + out * price_out) / 1e6
    return CostEstimate(len(questions), into, out, price)
