"""A Python function as a reward, in this package's convention or in TRL's."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wpr.language_models import pad
from wpr.rewards.base import Completions, RewardError, TokenReward

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

    Both may be ``async``. In the place of a score both may give a list, one number per token of the response (TRL's
    ``completion_ids`` has the tokens): its sum is the score, and the tokens get it.
    """

    def __init__(self, function: ScoringFunction, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or _name(function)
        self.by_keyword = self.may_skip = _is_by_keyword(function, self.name)

    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`. A wrong number of scores, or something that is no number, is refused."""
        return self.by_token(completions)[0]

    def by_token(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """See `TokenReward.by_token`."""
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
        rows = [self._row(score, row, completions) for row, score in enumerate(scores)]
        placed = completions.placed([row or [] for row in rows])
        numbers = [
            self._number(score, row) if tokens is None else math.fsum(tokens)
            for row, (score, tokens) in enumerate(zip(scores, rows, strict=True))
        ]
        return torch.tensor(numbers, dtype=torch.float32, device=placed.device), placed

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

    def _row(self, score: Any, row: int, completions: Completions) -> list[float] | None:
        """Numbers of a response's tokens, where the function gave such; None for a score."""
        if not isinstance(score, list | tuple):
            return None
        tokens = None if completions.response_ids is None else len(completions.response_ids[row])
        if tokens is None or len(score) != tokens:
            raise RewardError(
                f"reward function {self.name!r} returned {len(score)} numbers for response {row}, which has "
                f"{'unknown' if tokens is None else tokens} tokens; return one number per token (TRL's keyword "
                "completion_ids has them, the end-of-sequence token too), or one for the response"
            )
        return [self._number(number, row, per_token=True) for number in score]

    def _number(self, score: Any, row: int, per_token: bool = False) -> float:
        """A score as a number; NaN for a response that the function skips."""
        if score is None and self.may_skip and not per_token:
            return math.nan
        wanted = "a finite number, or None for no score" if self.may_skip else "a number"
        wanted = "a finite number for every token" if per_token else wanted
        try:
            number = float(score)
            if math.isfinite(number) or not (self.may_skip or per_token):
                return number
        except (TypeError, ValueError):
            pass
        raise RewardError(f"reward function {self.name!r} returned {score!r} for response {row}; return {wanted}")


class TRLFunction:
    """A reward function as TRL's trainers call it, which take one number per completion: the sum, where it gives one
    per token. What tokens earned ``(B, T)`` in the last call is kept in ``placed``, None if nothing is known of tokens.

    tokenizer: what decoded the completions.
    """

    def __init__(self, function: ScoringFunction, tokenizer: Any) -> None:
        self.function, self.tokenizer = function, tokenizer
        self.placed: Tensor | None = None

    def __call__(self, **given: Any) -> Any:
        """Scores of completions, by the keywords `KEYWORDS` and the dataset's columns."""
        self.placed = None
        if isinstance(self.function, TokenReward):
            return self._split(self.function, given, list(map(self._prompt_ids, given["prompts"])))
        scores = self.function(**given)
        if not any(isinstance(score, list | tuple) for score in scores):
            return scores
        return self._split(
            FunctionReward(lambda completions, **_: scores, _name(self.function)), given, [[]] * len(scores)
        )

    def _split(
        self, reward: TokenReward, given: Mapping[str, Any], before: Sequence[Sequence[int]]
    ) -> list[float | None]:
        """Sums, for TRL; tokens' numbers are kept. before: tokens of the prompts."""
        tokens = given["completion_ids"]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ids, mask = pad([[*prompt, *row] for prompt, row in zip(before, tokens, strict=True)])
        scores, self.placed = reward.by_token(
            Completions(
                given["prompts"], texts, ids, mask, mask.sum(-1) - 1,
                columns={name: column for name, column in given.items() if name not in KEYWORDS},
                response_ids=tokens,
                trainer={name: given[name] for name in KEYWORDS[3:] if name in given},
                tokenizer=self.tokenizer,
            )
        )  # fmt: skip
        return [None if math.isnan(score) else score for score in scores.tolist()]

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Tokens of a prompt as TRL's trainers make them: of text, or of chat messages by the template."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        made = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(made["input_ids"])


def for_trl(functions: Sequence[Any], tokenizer: Any) -> list[Any]:
    """TRL's reward functions, so that those that give a number per token are understood; models and ``async`` functions
    stay as they are. Refused is a `TokenReward` that cannot work with the tokenizer.
    """
    found = []
    for function in functions:
        plain = _inner(function)
        waits = any(map(inspect.iscoroutinefunction, (plain, type(plain).__call__)))
        if hasattr(function, "check_tokenizer"):
            function.check_tokenizer(tokenizer)
        found.append(function if waits or isinstance(function, nn.Module) else TRLFunction(function, tokenizer))
    return found


def sum_placed(functions: Sequence[Any], weights: Sequence[float], mask: Tensor) -> Tensor:
    """What tokens earned by TRL's reward functions in their last calls, weighted, as ``mask`` ``(B, T)`` is."""
    total = torch.zeros(mask.shape, device=mask.device)
    for function, weight in zip(functions, weights, strict=True):
        if isinstance(function, TRLFunction) and function.placed is not None:
            total[:, : function.placed.shape[1]] += weight * function.placed.to(mask.device)
    return total


def _inner(function: ScoringFunction) -> ScoringFunction:
    """A function without the arguments that were bound to it."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: ScoringFunction) -> str:
    """What a function is called in logs and errors."""
    plain = _inner(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


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
