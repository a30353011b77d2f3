"""A Python function as a reward, in this package's convention or in TRL's."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wpr.rewards.base import Completions, RewardError

ScoringFunction = Callable[..., Any]
KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL's trainers pass to every reward function, by keyword, beside the dataset's columns."""


class FunctionReward:
    """A function in one of two conventions, which its parameters tell apart:

    - ``f(prompts, responses, **columns) -> list[float]``: two lists by position, responses as text, and the dataset's
      other columns by name.
    - TRL's, ``f(completions, **kwargs) -> list[float | None]``, if it has a parameter ``completions`` or
      ``completion_ids``, or cannot be called in the first way: all by keyword (`KEYWORDS`, then the columns). After
      chat messages a completion is a list of one message. None leaves a response unscored.

    Both may be ``async``.
    """

    def __init__(self, function: ScoringFunction, name: str | None = None) -> None:
        plain = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        self.function = function
        self.name: str = name or str(getattr(plain, "__name__", type(plain).__name__))
        self.by_keyword = self.may_skip = _is_by_keyword(function, self.name)

    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`. A wrong number of scores, or something that is no number, is refused."""
        try:
            given: Any = self._call(completions)
            if inspect.iscoroutine(given):
                given = asyncio.run_coroutine_threadsafe(given, _event_loop()).result()
            scores = given.tolist() if isinstance(given, Tensor) else list(given)
        except Exception as error:
            raise RewardError(f"reward function {self.name!r} raised {type(error).__name__}: {error}") from error
        if len(scores) != len(completions):
            raise RewardError(
                f"reward function {self.name!r} returned {len(scores)} scores for {len(completions)} responses; "
                "return one number a response"
            )
        numbers = [self._number(score, row) for row, score in enumerate(scores)]
        return torch.tensor(numbers, device=completions.input_ids.device)

    def _call(self, completions: Completions) -> Any:
        prompts, responses = completions.prompts, completions.responses
        if not self.by_keyword:
            return self.function(prompts, responses, **completions.columns)
        replies = [
            response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        columns = {  # without those that TRL does not pass either
            name: column for name, column in completions.columns.items() if name not in ("completion", "completion_ids")
        }
        return self.function(
            prompts=prompts, completions=replies, completion_ids=completions.response_ids, **columns,
            **completions.trainer,
        )  # fmt: skip

    def _number(self, score: Any, row: int) -> float:
        """A score as a number; NaN for a response that the function skips."""
        if score is None and self.may_skip:
            return math.nan
        wanted = "a finite number, or None for no score" if self.may_skip else "a number"
        try:
            number = float(score)
            if not self.may_skip or math.isfinite(number):
                return number
        except (TypeError, ValueError):
            pass
        raise RewardError(f"reward function {self.name!r} returned {score!r} for response {row}; return {wanted}")


def _is_by_keyword(function: ScoringFunction, name: str) -> bool:
    """Whether the function is of TRL's convention; refused if it is of neither."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: its parameters are not known
        return False
    named = set(signature.parameters)
    wanted = bool(named & {"completions", "completion_ids"})
    by_keyword, by_position = accepts(function, **dict.fromkeys(KEYWORDS)), accepts(function, None, None)
    if wanted and "responses" in named:
        raise TypeError(
            f"reward function {name!r} has the parameters {signature}, where completions are TRL's and responses this "
            "package's; rename the one that is a column of the dataset, and the column"
        )
    if by_keyword and (wanted or not by_position):
        return True
    if by_position and not wanted:
        return False
    if by_position:
        raise TypeError(
            f"reward function {name!r} has the parameters {signature}: completions is TRL's name, whose trainers give "
            "more keywords; add **kwargs, or call it responses"
        )
    raise TypeError(
        f"reward function {name!r} has the parameters {signature}: it can be called neither as f(prompts, responses, "
        f"**columns) nor as TRL does, with the keywords {', '.join(KEYWORDS)}; add **kwargs, or take two lists"
    )


def accepts(function: ScoringFunction, *args: Any, **kwargs: Any) -> bool:
    """Whether a function takes these arguments, perhaps with more."""
    try:
        inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # ValueError: written in C, its parameters are not known
        return False
    return True


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, in a thread of its own: clients stay connected, and notebooks have a loop already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop
