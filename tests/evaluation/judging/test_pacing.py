"""The pace of requests on a clock of the test's own, and waits between attempts."""

from __future__ import annotations

import asyncio
import random
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wpr.evaluation.judging.pacing import Pace, asked_wait, wait_before


class Clock:
    """Time that passes when it is slept."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds


def starts(requests: float | None, tokens: float | None, sizes: list[int], seed: int = 0) -> list[float]:
    """When requests of these sizes go out, asked for by 16 at once, with time passing in between."""
    clock, generator = Clock(), random.Random(seed)

    async def run() -> list[float]:
        pace = Pace(requests, tokens, clock, clock.sleep)
        found: list[float] = []
        waiting = iter(sizes)

        async def work() -> None:
            for size in waiting:
                await pace.turn(size)
                found.append(clock.now)
                clock.now += generator.random() / 50

        await asyncio.gather(*(work() for _ in range(16)))
        return found

    return asyncio.run(run())


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(0, 5))
def test_no_minute_has_more_requests_than_allowed(limit: int, seed: int) -> None:
    found = starts(limit, None, [1] * 300, seed)
    for i, start in enumerate(found):
        assert sum(start <= other < start + 60 - 1e-6 for other in found[i:]) <= limit


@settings(max_examples=30)
@given(st.integers(1000, 20_000), st.integers(0, 5))
def test_no_minute_has_more_tokens_than_allowed(limit: int, seed: int) -> None:
    """But for the last request of it, which is paid for by the gap behind it."""
    generator = random.Random(seed)
    sizes = [generator.randint(1, 900) for _ in range(200)]
    found = starts(None, limit, sizes, seed)
    for i, start in enumerate(found):
        inside = [size for size, other in zip(sizes[i:], found[i:], strict=True) if other < start + 60 - 1e-6]
        assert sum(inside[:-1]) <= limit


def test_the_stricter_limit_holds_and_no_limit_waits_for_nothing() -> None:
    assert starts(60, 60_000, [100] * 10)[-1] - 100 >= 9
    assert starts(6000, 600, [100] * 10)[-1] - 100 >= 90
    assert starts(None, None, [100] * 10)[-1] - 100 < 1


def test_a_pause_holds_for_a_request_that_waits_already() -> None:
    clock = Clock()

    async def run() -> float:
        pace = Pace(60, None, clock, clock.sleep)
        await pace.turn(1)
        waiting = asyncio.create_task(pace.turn(1))
        await asyncio.sleep(0)
        pace.put_off(30)
        await waiting
        return clock.now

    assert asyncio.run(run()) >= 130


@given(st.integers(2, 2000), st.floats(0, 1))
def test_waits_double_up_to_the_longest(attempt: int, chance: float) -> None:
    wait = wait_before(attempt, 1.0, 60.0, chance)
    full = min(60.0, 2.0 ** min(attempt - 2, 10))
    assert full / 2 <= wait <= full


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": formatdate(1_700_000_090, usegmt=True)}, 90),
        ({"retry-after": formatdate(1_600_000_000, usegmt=True)}, 0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_retry_after(headers: dict[str, str], wait: float | None) -> None:
    assert asked_wait(headers, 1_700_000_000.0) == wait
