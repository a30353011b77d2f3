"""The estimate before an evaluation."""

from __future__ import annotations

import pytest

from tests.evaluation.judging.asked import questions
from wpr.evaluation.judging.cost_estimate import estimate, tokens, tokens_of


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("a", 1), ("x" * 7, 2), ("x" * 8, 3), ("日本語", 3), ("é" + "x" * 7, 3)]
)
def test_tokens(text: str, count: int) -> None:
    assert tokens(text) == count
    assert tokens_of([{"role": "user", "content": text}] * 2) == 2 * (count + 4)


def test_an_estimate() -> None:
    one = tokens_of(questions(1)[0].messages)
    found = estimate(questions(10), answer_tokens=100, price_in=2.0, price_out=8.0)
    assert (found.requests, found.prompt_tokens, found.answer_tokens) == (10, 10 * one, 1000)
    assert found.price == pytest.approx((10 * one * 2 + 1000 * 8) / 1e6)
    message = (
        f"10 requests, about {10 * one} tokens in and at most 1,000 out, at most 0.01 in the currency of the prices"
    )
    assert str(found) == f"{message} given"
    assert estimate(questions(10), 100).price is None
    assert estimate([], 100, 1, 1).price == 0
