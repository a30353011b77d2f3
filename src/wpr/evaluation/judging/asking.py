"""Asking a judge many questions: each answer is kept on disk as it comes, and none that came is ever asked for again.

    asked = ask_all(judge, questions, cache=folder / "answers.jsonl", limits=RequestLimits(), advance=bar.advance)
    asked.answers[question.id]     what became of each question: read, unreadable, failed or unasked
    asked.accounts                 requests, repeated attempts, tokens
    pending(judge, questions, cache)       the questions that would have to be asked, for an estimate before

What a question is about is the caller's: this file knows texts, and that `Question.read` accepts them or not. Judges
are `ServerJudge` (an OpenAI-compatible server) and the local ones of `wpr.evaluation.judging.local`, or anything with
the methods of `RemoteJudge` or `LocalJudge`. An answer that cannot be read is asked for once more, with what was wrong
with it; both answers are kept. The call blocks and needs no event loop of the caller's; it works where one is running.

Killed in the middle, the same call goes on with what is missing. Requests whose answers had not arrived are sent
again: whether the server had answered them cannot be known here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wpr.evaluation.judging.answer_cache import AnswerCache, key_of
from wpr.evaluation.judging.blocking import run_to_the_end
from wpr.evaluation.judging.cost_estimate import tokens_of
from wpr.evaluation.judging.pacing import Pace, wait_before
from wpr.evaluation.judging.questions import (
    Accounts,
    Answer,
    Judge,
    JudgingError,
    LocalJudge,
    Message,
    Question,
    RefusedError,
    RemoteJudge,
    Reply,
    RequestLimits,
    TransientError,
    UnreadableError,
)

QUOTED = 2000
"""Characters of an unreadable answer that are sent back with the second request."""
REASONS = 10
"""Different reasons of failure that are told while it goes on; all are in the answers."""


@dataclass(frozen=True)
class JudgeResults:
    """All questions by their id, in their order, and what asking took."""

    answers: dict[str, Answer]
    accounts: Accounts

    def count(self, status: str) -> int:
        """Questions with this status."""
        return sum(answer.status == status for answer in self.answers.values())


class _FailedError(Exception):
    """A request that was given up."""


def ask_all(
    judge: Judge,
    questions: Sequence[Question],
    cache: Path,
    limits: RequestLimits | None = None,
    advance: Callable[[int], None] = lambda count: None,
    say: Callable[[str], None] = lambda text: None,
    others: Sequence[Path] = (),
) -> JudgeResults:
    """Ask every question that the cache has no answer to; see the head of this file.

    advance: told how many questions are done since it was last called.
    say: told why requests have to be sent again, each reason once, so that waiting is not a riddle.
    others: files of answers to other sets of questions; what they have is not asked for, and they are not changed.

    Raises `JudgingError` where going on makes no sense (a wrong key, a model that is not there); what was answered
    until then is in the cache.
    """
    names = {question.id for question in questions}
    if len(names) != len(questions):
        raise ValueError(f"{len(questions)} questions have {len(names)} different ids; give each its own")
    empty = next((one.id for one in questions if not one.messages and not isinstance(judge, LocalJudge)), None)
    if empty is not None:
        raise ValueError(f"question {empty} has no messages, and {judge.name} is sent nothing else; give it a rubric")
    store = AnswerCache(cache, others)
    with store.writing():
        work = _Asking(judge, store, limits or RequestLimits(), advance, say)
        work.accounts.notes += store.notes
        if isinstance(judge, LocalJudge):
            work.ask_here(judge, _alike(judge, questions))
        else:
            run_to_the_end(lambda: work.ask_there(judge, _alike(judge, questions)))
    missing = Answer("unasked", reason="too many other questions had failed")
    return JudgeResults({question.id: work.answers.get(question.id, missing) for question in questions}, work.accounts)


def pending(judge: Judge, questions: Sequence[Question], cache: Path, others: Sequence[Path] = ()) -> list[Question]:
    """The questions without an answer, each of several alike once. Nothing is asked or changed."""
    store = AnswerCache.look(cache, others)
    return [alike[0] for alike in _alike(judge, questions) if store.get(_key(judge, alike[0])) is None]


def _key(judge: Judge, question: Question) -> str:
    asked = dict(question.fields) if isinstance(judge, LocalJudge) else list(question.messages)
    return key_of(judge.identity, asked)


def _alike(judge: Judge, questions: Sequence[Question]) -> list[list[Question]]:
    """Questions in groups that one answer serves."""
    groups: dict[tuple[str, str], list[Question]] = {}
    for question in questions:
        groups.setdefault((_key(judge, question), question.form), []).append(question)
    return list(groups.values())


class _Asking:
    """One call of `ask_all` under way."""

    def __init__(
        self,
        judge: Judge,
        cache: AnswerCache,
        limits: RequestLimits,
        advance: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self.judge, self.cache, self.limits, self.advance, self.say = judge, cache, limits, advance, say
        self._reported: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.accounts = Accounts()
        self.failed_in_a_row = 0
        self.given_up = False

    # In this process, batch by batch.

    def ask_here(self, judge: LocalJudge, groups: list[list[Question]]) -> None:
        """Answers of the cache first, so that what is shown as done moves with what is computed."""
        new = [alike for alike in groups if self.cache.get(_key(judge, alike[0])) is None]
        self.accounts.known = len(groups) - len(new)
        for start in range(0, len(new), judge.batch_size):
            batch = [alike[0] for alike in new[start : start + judge.batch_size]]
            self.accounts.requests += len(batch)
            for question, reply in zip(batch, judge.replies(batch), strict=True):
                self.cache.put(_key(judge, question), reply)
                self._count(reply)
            self.advance(sum(len(alike) for alike in new[start : start + judge.batch_size]))
        asked = {id(alike) for alike in new}
        for alike in groups:
            found = self.cache.get(_key(judge, alike[0]))
            assert found is not None
            self._read_all(alike, [found], known=id(alike) not in asked)
        self.advance(sum(len(alike) for alike in groups if id(alike) not in asked))

    # Over a network, many at once.

    async def ask_there(self, judge: RemoteJudge, groups: list[list[Question]]) -> None:
        """So many workers as requests may be under way, each taking the next question when it is done with one."""
        pace = Pace(self.limits.requests_per_minute, self.limits.tokens_per_minute)
        next_question = iter(groups)
        try:
            async with judge, asyncio.TaskGroup() as workers:
                for _ in range(min(self.limits.concurrency, len(groups))):
                    workers.create_task(self._work(judge, next_question, pace))
        except BaseExceptionGroup as group:
            raise _first(group) from None  # without the server's own words, which may hold what they should not

    async def _work(self, judge: RemoteJudge, next_question: Iterator[list[Question]], pace: Pace) -> None:
        for alike in next_question:
            if self.given_up:
                return
            await self._settle(judge, alike, pace)
            self.advance(len(alike))

    async def _settle(self, judge: RemoteJudge, alike: list[Question], pace: Pace) -> None:
        question = alike[0]
        replies: list[Reply] = []
        sent = self.accounts.requests
        known = True
        messages = question.messages
        try:
            for _ in range(2):
                found = self.cache.get(key_of(judge.identity, list(messages)))
                known = known and found is not None
                self.accounts.known += found is not None
                reply = found or await self._send(judge, messages, pace)
                replies.append(reply)
                try:
                    question.read(reply.text)
                    break
                except UnreadableError as error:
                    messages = repair(question, reply.text, str(error))
        except (_FailedError, RefusedError) as error:
            for one in alike:
                self.answers[one.id] = Answer("failed", reason=str(error), replies=tuple(replies))
            self.failed_in_a_row += 1
            self.given_up = self.failed_in_a_row >= self.limits.give_up_after
            return
        if self.accounts.requests > sent:
            self.failed_in_a_row = 0
        self._read_all(alike, replies, known)

    async def _send(self, judge: RemoteJudge, messages: Sequence[Message], pace: Pace) -> Reply:
        """Send a request until it is answered; the answer is on disk when this returns."""
        size = tokens_of(messages) + judge.answer_tokens
        reason = ""
        for attempt in range(1, self.limits.attempts + 1):
            await pace.turn(size)
            self.accounts.requests += 1
            self.accounts.retried += attempt > 1
            wait = None
            try:
                async with asyncio.timeout(self.limits.timeout):
                    reply = await judge.reply(messages)
                    self.cache.put(key_of(judge.identity, list(messages)), reply)
                self._count(reply)
                return reply
            except TimeoutError:
                reason = f"no answer within {self.limits.timeout:g} seconds"
            except TransientError as error:
                reason, wait = str(error), error.wait
                if wait is not None and wait > self.limits.longest_wait:
                    raise JudgingError(
                        f"the server asks to wait {wait:.0f} seconds ({reason}), which is longer than the "
                        f"{self.limits.longest_wait:g} that are waited at most; run the same command again after that, "
                        "it goes on where this one stopped"
                    ) from None
                if wait is not None and error.everyone:
                    pace.put_off(wait)
            if reason not in self._reported and len(self._reported) < REASONS:
                self._reported.add(reason)
                self.say(
                    f"a request to {judge.name} failed ({reason}); it is tried {self.limits.attempts} times in all"
                )
            if attempt < self.limits.attempts:
                drawn = wait_before(attempt + 1, self.limits.first_wait, self.limits.longest_wait, random.random())
                # What the server asked for, and a little more, so that not all come again at once.
                await asyncio.sleep(drawn if wait is None else wait + min(drawn, 1.0))
        raise _FailedError(f"{reason} (attempt {self.limits.attempts} of {self.limits.attempts})")

    def _count(self, reply: Reply) -> None:
        self.accounts.received += 1
        self.accounts.prompt_tokens += reply.prompt_tokens or 0
        self.accounts.completion_tokens += reply.completion_tokens or 0

    def _read_all(self, alike: list[Question], replies: list[Reply], known: bool) -> None:
        last = replies[-1]
        for question in alike:
            try:
                self.answers[question.id] = Answer("read", question.read(last.text), "", tuple(replies), known)
            except UnreadableError as error:
                cut = "; it was cut at the longest length allowed" if last.ended == "length" else ""
                self.answers[question.id] = Answer("unreadable", None, f"{error}{cut}", tuple(replies), known)


def repair(question: Question, text: str, reason: str) -> tuple[Message, ...]:
    """The second request after an answer that could not be read."""
    quoted = text if len(text) <= QUOTED else text[:QUOTED] + " [...]"
    asked = f"That answer could not be read: {reason}. Answer again, with {question.form} and nothing else."
    return (
        *question.messages,
        {"role": "assistant", "content": quoted.strip() or "(no text)"},
        {"role": "user", "content": asked},
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of workers."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
