"""What is asked of a judge and what comes back, whatever the question is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``, as chat servers take it."""

Status = Literal["read", "unreadable", "failed", "unasked"]


class JudgingError(RuntimeError):
    """The evaluation cannot go on as it is; the message is one paragraph that says what to do."""

    exit_code = 1


class JudgingSettingsError(JudgingError, ValueError):
    """A setting of a judge that makes no sense."""

    exit_code = 2


class UnreadableError(ValueError):
    """An answer of the wrong form; the message completes the sentence "that answer could not be read: ..."."""


class TransientError(Exception):
    """A request that failed and may succeed when it is sent again.

    wait: seconds that the server asked to wait, where it did. everyone: whether the wait is for all requests.
    """

    def __init__(self, reason: str, wait: float | None = None, everyone: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.everyone = everyone


class RefusedError(Exception):
    """A request that the server will not answer however often it is sent, for instance because it is too long."""


@dataclass(frozen=True)
class Question:
    """One thing to ask.

    id: the caller's name for it, each once.
    messages: what a chat server is sent.
    fields: the same in its parts, by name: what a judge gets that is a function.
    read: makes the value of an answer's text, or raises `UnreadableError`.
    form: the form of an answer, in words that go into the second request where the first answer could not be read.
    """

    id: str
    messages: tuple[Message, ...]
    fields: Mapping[str, Any]
    read: Callable[[str], Any]
    form: str


@dataclass(frozen=True)
class Reply:
    """One answer of a judge as it came.

    prompt_tokens, completion_tokens: as the server counted them. ended: why it stopped, for instance "length".
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ended: str | None = None


@dataclass(frozen=True)
class Answer:
    """What became of a question.

    status: read; unreadable, also when asked a second time; failed, after all attempts to send it; unasked, because
        too many others had failed.
    value: what `Question.read` made of it, None unless it was read.
    reason: why it was not read or not answered.
    replies: the answers that came, the second one after a repair. known: whether all of them came from the cache.
    """

    status: Status
    value: Any = None
    reason: str = ""
    replies: tuple[Reply, ...] = ()
    known: bool = False

    @property
    def repaired(self) -> bool:
        """Whether it was read at the second attempt."""
        return self.status == "read" and len(self.replies) > 1


@runtime_checkable
class RemoteJudge(Protocol):
    """A judge behind a network: asked one question at a time, many at once.

    name: for tables and folders. identity: everything beside the messages that decides an answer, without secrets.
    answer_tokens: the longest answer, for limits and estimates.
    """

    name: str
    identity: Mapping[str, Any]
    answer_tokens: int

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Ask. Raises `TransientError`, `RefusedError`, or `JudgingError` where no further request has a chance."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


@runtime_checkable
class LocalJudge(Protocol):
    """A judge in this process, asked in batches, by the fields of the questions."""

    name: str
    identity: Mapping[str, Any]
    batch_size: int

    def replies(self, questions: Sequence[Question]) -> list[Reply]:
        """One reply a question."""
        ...


Judge = RemoteJudge | LocalJudge


@dataclass(frozen=True)
class RequestLimits:
    """How a server is treated.

    concurrency: requests under way at once. requests_per_minute, tokens_per_minute: None for no limit; tokens are
        estimated by `wpr.evaluation.judging.cost_estimate.tokens`.
    timeout: seconds for a request and its whole answer.
    attempts: how often a request is sent before it counts as failed.
    first_wait, longest_wait: seconds before the second attempt, doubled each time (with chance between half and all of
        it), and the most that is waited for; a server that asks for more than that ends the evaluation.
    give_up_after: so many questions failed one after another end the evaluation; what was answered is kept.
    """

    concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    timeout: float = 120.0
    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 300.0
    give_up_after: int = 20

    def __post_init__(self) -> None:
        for name in ("concurrency", "attempts", "give_up_after"):
            if getattr(self, name) < 1:
                raise JudgingSettingsError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("requests_per_minute", "tokens_per_minute", "timeout", "first_wait", "longest_wait"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise JudgingSettingsError(f"{name}={value} must be a number above 0")


@dataclass
class Accounts:
    """What asking took: requests sent, answers received and those that the cache had, attempts that failed and were
    repeated, tokens that servers reported.
    """

    requests: int = 0
    received: int = 0
    known: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    notes: list[str] = field(default_factory=list)
