"""The core against a server that misbehaves: every question is accounted for, no answer is asked for twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from time import time

import pytest

from tests.evaluation.judging.asked import KEY, QUICK, ask, questions
from tests.evaluation.judging.misbehaving import (
    Behaviour,
    ChatServer,
    Request,
    completion,
    cut_before_answering,
    cut_in_the_middle,
    endless,
    error,
    plain,
    raw,
    reply,
    slow,
)
from tests.evaluation.judging.nasty import ANSWERS, seconds
from wpr.evaluation.judging.asking import JudgeResults, ask_all, pending
from wpr.evaluation.judging.questions import JudgingError, Question, RequestLimits
from wpr.evaluation.judging.server import ServerJudge
from wpr.evaluation.judging.verdicts import read_object
from wpr.evaluation.mt_bench.grading_rubric import read_rating


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_a_question_without_messages_is_sent_to_nobody(cache: Path) -> None:
    """All of them would be one question, and its answer would be everybody's."""
    bare = [replace(question, messages=()) for question in questions(3)]
    with ChatServer(reply("A")) as server:
        with pytest.raises(ValueError, match="question .* has no messages, and .* is sent nothing else; give it a rub"):
            ask_all(ServerJudge("test", server.address), bare, cache, QUICK)
        assert server.requests == []


ONCE_BAD: dict[str, Behaviour] = {
    "429 with seconds": error(429, headers={"retry-after": "0.01"}),
    "429 with milliseconds": error(429, headers={"retry-after-ms": "10"}),
    "429 with a date": error(429, headers={"retry-after": formatdate(time() - 1, usegmt=True)}),
    "429 with nonsense": error(429, headers={"retry-after": "soon"}),
    "429 without": error(429),
    "408": error(408),
    "500": error(500),
    "503 without a body": raw(b"", 503),
    "502 with a page": raw(b"<html>bad gateway</html>", 502, {"content-type": "text/html"}),
    "cut before": cut_before_answering,
    "cut in the middle": cut_in_the_middle,
    "malformed JSON": raw(b'{"choices": [{"mess'),
    "not JSON": raw(b"\xff\xfe\x00 oops", headers={"content-type": "text/plain"}),
    "no choices": raw(json.dumps({"choices": []}).encode()),
    "choices of another kind": raw(json.dumps({"choices": {"message": "A"}}).encode()),
    "content of another kind": reply(None, choices=[{"message": {"content": [1, 2]}}]),
    "a list": raw(b"[1, 2]"),
    "deeply nested": raw(b"[" * 100_000),
    "huge": raw(b'"' + b"x" * 3_000_000 + b'"'),
    "huge error": raw(b"x" * 3_000_000, 500),
    "endless": endless,
    "a header that is not ASCII": raw(completion("A"), headers={"x-place": "Zürich"}),
    "a header's name that is not ASCII": plain(b"HTTP/1.1 200 OK\r\nx-\xff: 1\r\ncontent-length: 0\r\n\r\n"),
    "a content type that is not ASCII": raw(completion("A"), headers={"content-type": "application/jsön"}),
    "a cookie that is not ASCII": raw(completion("A"), headers={"set-cookie": "place=Zürich; Path=/"}),
    "a status line that is not ASCII": plain(b"HTTP/1.1 2\xff0 OK\r\n\r\n"),
    "a wait that is not ASCII": error(503, headers={"retry-after": "é"}),
    "no HTTP": plain(b"\x00\xff\r\n\r\n"),
    "not what it was compressed by": raw(completion("A"), headers={"content-encoding": "gzip"}),
    "compressed time and again": raw(completion("A"), headers={"content-encoding": "gzip, " * 5000}),
    "a location that is none": error(503, headers={"location": "http://[::1/\x00"}),
    "a number that is too long": raw(b'{"choices": ' + b"9" * 100_000 + b"}"),
    "nested too deeply": raw(b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "an error nested too deeply": raw(b'{"error": {"code": ' + b"[" * 5000 + b"]" * 5000 + b"}}", 500),
    "more brackets than are read": raw(b"[" + b"[]," * 500_000 + b"1]"),
    **{
        f"charset {name}": raw(completion("A"), headers={"content-type": f"application/json; charset={name}"})
        for name in ("zlib", "bz2", "hex", "idna", "rot13", "base64", "uu", "quopri", "punycode", "undefined",
                     "nonsense", "unicode_escape", '"zlib"', "a" * 10_000)
    },
}  # fmt: skip


@pytest.mark.parametrize("behaviour", ONCE_BAD.values(), ids=ONCE_BAD.keys())
def test_a_request_that_fails_once_is_sent_again(behaviour: Behaviour, cache: Path) -> None:
    with ChatServer(lambda request: behaviour if request.times == 1 else reply("B")) as server:
        asked = ask(server, 2, cache)
    assert [answer.value for answer in asked.answers.values()] == ["B", "B"]
    assert (asked.accounts.requests, asked.accounts.retried, asked.accounts.received) == (4, 2, 2)


def test_a_slow_answer_is_given_up_and_asked_for_again(cache: Path) -> None:
    def behave(request: Request) -> Behaviour:
        return slow(server.closing, reply("A")) if request.times == 1 else reply("B")

    with ChatServer(behave) as server:
        asked = ask(server, 1, cache, RequestLimits(timeout=0.5, first_wait=0.01))
    assert asked.answers["q0"].value == "B"
    assert asked.accounts.retried == 1


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (error(500, "out of order"), "HTTP 500: out of order (attempt 3 of 3)"),
        (error(429, "slow down"), "HTTP 429: slow down (attempt 3 of 3)"),
        (raw(b"{"), "the answer is not JSON: '{' (attempt 3 of 3)"),
        (cut_before_answering, "RemoteProtocolError: Server disconnected"),
        (endless, "HTTP 200 with a body of more than 2,000,000 bytes, which was not read further (attempt 3 of 3)"),
        (
            ONCE_BAD["a header that is not ASCII"],
            "HTTP 200 with a header that is not ASCII: 'x-place' (attempt 3 of 3)",
        ),
        (ONCE_BAD["charset zlib"], "HTTP 200 in the charset 'zlib', which is none of utf-8, utf8, us-ascii"),
    ],
)
def test_what_fails_always_is_recorded_and_alone_asked_for_again(
    behaviour: Behaviour, reason: str, cache: Path
) -> None:
    limits = RequestLimits(first_wait=0.01, attempts=3)
    with ChatServer(lambda request: behaviour if request.text == "question 1" else reply("A")) as server:
        asked = ask(server, 3, cache, limits)
        assert [answer.status for answer in asked.answers.values()] == ["read", "failed", "read"]
        assert reason in asked.answers["q1"].reason
        assert len(server.requests) == 2 + 3
        server.behave = lambda request: reply("E")
        again = ask(server, 3, cache, limits)
    assert [answer.value for answer in again.answers.values()] == ["A", "E", "A"]
    assert again.accounts.requests == 1
    assert len(server.requests) == 2 + 3 + 1


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 301])
def test_a_refusal_that_no_attempt_can_mend_stops_at_once(status: int, cache: Path) -> None:
    with ChatServer(lambda request: error(status, "not for you")) as server, pytest.raises(JudgingError) as caught:
        ask(server, 500, cache)
    assert f"refused the model 'test' with HTTP {status}: not for you; " in str(caught.value)
    assert len(server.requests) <= QUICK.concurrency


def test_an_account_without_credit_stops_at_once(cache: Path) -> None:
    with ChatServer(lambda request: error(429, "pay", code="insufficient_quota")) as server:
        with pytest.raises(JudgingError, match="nothing left .*HTTP 429: pay.*add credit"):
            ask(server, 100, cache)
        assert len(server.requests) <= QUICK.concurrency


def test_what_was_answered_before_a_stop_is_kept(cache: Path) -> None:
    with ChatServer(lambda request: error(401) if request.text == "question 40" else reply("A")) as server:
        with pytest.raises(JudgingError):
            ask(server, 100, cache)
        before = set(server.times)
        server.behave = lambda request: reply("A")
        asked = ask(server, 100, cache)
    assert asked.count("read") == 100
    repeated = [key for key, times in server.times.items() if times > 1]
    assert len(repeated) <= QUICK.concurrency  # those under way when it stopped
    assert len(before) >= 41 - QUICK.concurrency


def test_reasons_of_failure_are_told_once_while_it_goes_on(cache: Path) -> None:
    message: list[str] = []
    with ChatServer(lambda request: error(500, "busy") if request.times < 3 else reply("A")) as server:
        ask_all(ServerJudge("test", server.address), questions(20), cache, QUICK, say=message.append)
    assert message == ["a request to test failed (HTTP 500: busy); it is tried 6 times in all"]


def test_one_question_that_is_too_long_fails_alone_and_at_once(cache: Path) -> None:
    too_long = error(400, "context length exceeded")
    with ChatServer(lambda request: too_long if request.text == "question 1" else reply("A")) as server:
        asked = ask(server, 3, cache)
    assert asked.answers["q1"].status == "failed"
    assert asked.answers["q1"].reason == "HTTP 400: context length exceeded"
    assert len(server.requests) == 3


def test_it_gives_up_after_many_failures_in_a_row_and_says_what_was_not_asked(cache: Path) -> None:
    limits = RequestLimits(first_wait=0.001, attempts=2, give_up_after=5, concurrency=2)
    with ChatServer(lambda request: error(500)) as server:
        asked = ask(server, 50, cache, limits)
    assert 5 <= asked.count("failed") <= 6
    assert asked.count("unasked") == 50 - asked.count("failed")
    assert len(asked.answers) == 50


def test_a_server_that_is_not_there(cache: Path) -> None:
    with ChatServer(lambda request: reply("A")) as server:
        address = server.address
    judge = ServerJudge("test", address)
    asked = ask_all(judge, questions(1), cache, RequestLimits(first_wait=0.001, attempts=2))
    assert "ConnectError" in asked.answers["q0"].reason


def test_a_wait_that_is_too_long_stops(cache: Path) -> None:
    tomorrow = error(429, "tomorrow", headers={"retry-after": "86400"})
    message = "asks to wait 86400 seconds .*tomorrow.*longer than the 300"
    with ChatServer(lambda request: tomorrow) as server, pytest.raises(JudgingError, match=message):
        ask(server, 3, cache)


def test_a_pause_that_the_server_asks_for_holds_for_everyone(cache: Path) -> None:
    """The first request is refused for a while; no other goes out before that is over."""
    times: list[float] = []

    def behave(request: Request) -> Behaviour:
        times.append(time())
        return error(429, headers={"retry-after": "1"}) if len(times) == 1 else reply("A")

    with ChatServer(behave) as server:
        asked = ask(server, 6, cache, RequestLimits(concurrency=1, first_wait=0.01, requests_per_minute=60_000))
    assert asked.count("read") == 6
    assert times[1] - times[0] >= 0.99


HELD_UP = ["an open fence and line ends", "an open fence and spaces", "many keys", "an open rating and spaces"]


@pytest.mark.parametrize("name", HELD_UP)
@pytest.mark.parametrize("read", [read_object, read_rating])
def test_a_long_answer_does_not_hold_up_the_others(read: Callable[[str], object], name: str, cache: Path) -> None:
    """Neither when it comes nor when it is met again in the cache."""
    asked = [Question(one, ({"role": "user", "content": one},), {}, read, "?") for one in ("bad", "good")]
    good = {"read_object": '{"comparison": "", "choice": "A"}', "read_rating": "[[7]]"}[read.__name__]

    def behave(request: Request) -> Behaviour:
        # Line ends take two bytes in JSON, and no more than two million are read.
        return reply(good if request.body["messages"][0]["content"] == "good" else ANSWERS[name][:900_000])

    with ChatServer(behave) as server:
        judge = ServerJudge("test", server.address)
        found = []
        seconds(lambda text: found.append(ask_all(judge, asked, cache, RequestLimits(attempts=1))), "")
    read_each_time = [[answer.status for answer in one.answers.values()] for one in found]
    assert read_each_time == [["unreadable", "read"]] * 3


# Reading and repairing.


@pytest.mark.parametrize("text", ["Summary A is better.", "C", ""])
def test_an_answer_of_the_wrong_form_is_repaired_once(text: str, cache: Path) -> None:
    def behave(request: Request) -> Behaviour:
        return reply("B" if "could not be read" in request.text else text)

    with ChatServer(behave) as server:
        asked = ask(server, 1, cache)
        answer = asked.answers["q0"]
        assert (answer.status, answer.value, answer.repaired) == ("read", "B", True)
        _, second = server.requests
        assert [message["role"] for message in second.body["messages"]] == ["user", "assistant", "user"]
        assert second.body["messages"][1]["content"] == (text or "(no text)")
        assert "is not one of the letters A, B, E. Answer again, with a single letter" in second.text
        again = ask(server, 1, cache)
    assert again.answers["q0"].value == "B"
    assert again.answers["q0"].known
    assert len(server.requests) == 2


def test_an_answer_that_stays_unreadable_is_counted_with_its_texts(cache: Path) -> None:
    choice = {"message": {"content": "well"}, "finish_reason": "length"}
    with ChatServer(lambda request: reply(None, choices=[choice])) as server:
        answer = ask(server, 1, cache).answers["q0"]
        assert answer.status == "unreadable"
        assert answer.reason == "'well' is not one of the letters A, B, E; it was cut at the longest length allowed"
        assert [one.text for one in answer.replies] == ["well", "well"]
        assert ask(server, 1, cache).answers["q0"].status == "unreadable"
    assert len(server.requests) == 2  # it is not asked for again: the answers are there


def test_a_refusal_to_judge_is_an_answer_that_cannot_be_read(cache: Path) -> None:
    choices = [{"message": {"content": None, "refusal": "I cannot judge that."}, "finish_reason": "stop"}]
    with ChatServer(lambda request: reply(None, choices=choices)) as server:
        answer = ask(server, 1, cache).answers["q0"]
    assert answer.status == "unreadable"
    assert answer.replies[0].text == "I cannot judge that."


def test_the_repair_goes_on_after_an_interruption_without_asking_the_first_question_again(cache: Path) -> None:
    with ChatServer(lambda request: error(401) if "could not" in request.text else reply("??")) as server:
        with pytest.raises(JudgingError):
            ask(server, 1, cache)
        server.behave = lambda request: reply("E")
        answer = ask(server, 1, cache).answers["q0"]
    assert (answer.value, answer.repaired) == ("E", True)
    assert [len(request.body["messages"]) for request in server.requests] == [1, 3, 3]


# Many, once.


def test_a_thousand_sixteen_at_a_time_from_a_server_that_misbehaves(cache: Path) -> None:
    """Every question is accounted for, none is answered twice, and asking again sends nothing."""
    bad = [*ONCE_BAD.values()]

    def behave(request: Request) -> Behaviour:
        number = int(request.body["messages"][0]["content"].split()[1])
        if request.times == 1 and number % 10 == 0:
            return bad[number // 10 % len(bad)]
        if number % 50 == 7:  # never a letter
            return reply("both are fine")
        if number % 50 == 8 and "could not be read" not in request.text:
            return reply("let me think")
        return reply("ABE"[number % 3])

    with ChatServer(behave) as server:
        asked = ask(server, 1000, cache)
        assert (asked.count("read"), asked.count("unreadable"), asked.count("failed")) == (980, 20, 0)
        for name, answer in asked.answers.items():
            number = int(name[1:])
            assert answer.value == (None if number % 50 == 7 else "ABE"[number % 3])
        assert server.most_under_way <= 16
        assert asked.accounts.received == 1000 + 20 + 20  # the two kinds that are asked a second time
        assert asked.accounts.requests == len(server.requests)
        assert asked.accounts.prompt_tokens == 100 * asked.accounts.received
        sent = len(server.requests)
        again = ask(server, 1000, cache)
        assert len(server.requests) == sent
        assert again.answers.keys() == asked.answers.keys()
        assert [one.value for one in again.answers.values()] == [one.value for one in asked.answers.values()]
    assert KEY not in cache.read_text()


def test_questions_that_are_alike_are_asked_once(cache: Path) -> None:
    one = questions(1)[0]
    many = [type(one)(f"copy {i}", one.messages, {}, one.read, one.form) for i in range(30)]
    with ChatServer(lambda request: reply("A")) as server:
        judge = ServerJudge("test", server.address)
        assert len(pending(judge, many, cache)) == 1
        asked = ask_all(judge, many, cache, QUICK)
        assert pending(judge, many, cache) == []
    assert [answer.value for answer in asked.answers.values()] == ["A"] * 30
    assert len(server.requests) == 1


def test_whatever_decides_an_answer_makes_it_another_question(cache: Path) -> None:
    with ChatServer(lambda request: reply("A")) as server:
        for judge in (
            ServerJudge("test", server.address),
            ServerJudge("other", server.address),
            ServerJudge("test", server.address, settings={"temperature": 1}),
            ServerJudge("test", server.address.replace("127.0.0.1", "localhost")),
        ):
            ask_all(judge, questions(1), cache, QUICK)
        ask_all(ServerJudge("test", server.address + "/"), questions(1), cache, QUICK)  # the same server
        assert len(server.requests) == 4
        bodies = [request.body for request in server.requests]
    assert [(body["model"], body["temperature"], body["max_tokens"]) for body in bodies] == [
        ("test", 0, 512), ("other", 0, 512), ("test", 1, 512), ("test", 0, 512),
    ]  # fmt: skip


def test_two_processes_do_not_write_to_one_file(cache: Path) -> None:
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", code, str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    held.stdout.readline()
    with ChatServer(lambda request: reply("A")) as server:
        with pytest.raises(JudgingError, match="another process is asking judges with .*answers.jsonl; wait for it"):
            ask(server, 1, cache)
        assert server.requests == []
        held.communicate("")
        assert ask(server, 1, cache).count("read") == 1


def test_it_works_where_an_event_loop_runs(cache: Path) -> None:
    async def notebook(server: ChatServer) -> JudgeResults:
        return ask(server, 3, cache)

    with ChatServer(lambda request: reply("A")) as server:
        assert asyncio.run(notebook(server)).count("read") == 3


def test_ids_must_differ(cache: Path) -> None:
    with pytest.raises(ValueError, match="2 questions have 1 different ids"):
        ask_all(ServerJudge("test", "http://127.0.0.1:9"), questions(1) * 2, cache)


def test_limits_that_make_no_sense() -> None:
    for setting in ({"concurrency": 0}, {"timeout": 0.0}, {"requests_per_minute": -1.0}, {"attempts": 0}):
        with pytest.raises(ValueError, match="must be"):
            RequestLimits(**setting)  # type: ignore[arg-type]
