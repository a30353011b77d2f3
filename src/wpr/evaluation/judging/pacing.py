"""When the next request may go out: limits by the minute, pauses that a server asked for, waits between attempts."""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import Awaitable, Callable, Mapping


class Pace:
    """Requests one after another, so far apart that no minute has more of them, or of their tokens, than allowed.

    They are spread evenly: 60 a minute go out one a second, and one of many tokens is followed by a longer gap.
    """

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._clock, self._sleep = clock, sleep
        self._next = -math.inf
        self._turns = asyncio.Lock()

    async def turn(self, tokens: int) -> None:
        """Wait until a request of so many tokens may go out."""
        async with self._turns:
            # In a loop: the turn may have been put off while it was waited for.
            while (wait := self._next - self._clock()) > 0:
                await self._sleep(wait)
            self._next = self._clock() + max(self._per_request, tokens * self._per_token)

    def put_off(self, seconds: float) -> None:
        """Let nothing go out for so long."""
        self._next = max(self._next, self._clock() + seconds)


def wait_before(attempt: int, first: float, longest: float, chance: float) -> float:
    """Seconds before the given attempt (2, 3, ...): ``first`` doubled each time, of which at least half.

    chance: from 0 to 1, drawn again each time so that requests which failed together do not come again together.
    """
    return float(min(longest, first * 2.0 ** min(attempt - 2, 60)) * (0.5 + 0.5 * chance))


def asked_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that ``Retry-After`` asks for, which is a number of them or a date; None where it makes no sense.

    now: the time of the date's clock (`time.time`).
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def _number(text: str | None) -> float | None:
    try:
        found = float(text or "")
    except ValueError:
        return None
    return found if 0 <= found < math.inf else None
