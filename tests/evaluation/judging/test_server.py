"""A server that gives the key away; keys that are missing; settings of requests."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.judging.asked import AWKWARD, QUICK, questions
from tests.evaluation.judging.leaks import FORMS, reveals
from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, completion, error, plain, raw, reply
from tests.evaluation.judging.nasty import ANSWERS, LIMIT, seconds
from wpr.evaluation.judging.asking import ask_all
from wpr.evaluation.judging.questions import JudgingError, JudgingSettingsError, Question, RequestLimits, TransientError
from wpr.evaluation.judging.redaction import REMOVED, Secret
from wpr.evaluation.judging.server import ServerJudge, read_reply
from wpr.evaluation.judging.verdicts import read_letter, read_object
from wpr.evaluation.mt_bench.grading_rubric import read_rating


def choices(text: str, **more: Any) -> Behaviour:
    return reply(None, choices=[{"message": {"content": text}, **more}])


def escaped(text: str) -> bytes:
    """A text as JSON, every letter escaped."""
    return b'"' + "".join(f"\\u{ord(letter):04x}" for letter in text).encode() + b'"'


def head(line: str, *headers: str) -> Behaviour:
    """An answer with this status line and headers, and a body that is fine."""
    body = completion("A")
    lines = [f"HTTP/1.1 {line}", f"content-length: {len(body)}", *headers, "", ""]
    return plain("\r\n".join(lines).encode() + body)


ECHOES: dict[str, Callable[[str], Behaviour]] = {
    "in an error that stops": lambda message: error(401, message),
    "in an error that passes": lambda message: error(500, message),
    "in an error's code": lambda message: error(500, "", code=message),
    "in a refusal": lambda message: error(400, message),
    "in a page": lambda message: raw(message.encode(), 500, {"content-type": "text/html"}),
    "in an answer": lambda message: reply(message),
    "in an answer, escaped": lambda message: raw(completion("HERE").replace(b'"HERE"', escaped(message))),
    "in a refusal to answer": lambda message: reply(None, choices=[{"message": {"content": None, "refusal": message}}]),
    "in the choice": lambda message: reply(json.dumps({"comparison": "", "choice": message})),
    "in the choice, escaped": lambda message: reply(f'{{"comparison": "", "choice": {escaped(message).decode()}}}'),
    "in a choice as it is": lambda message: reply(f'{{"comparison": "", "choice": "{message}"}}'),
    "in a choice of another kind": lambda message: reply(json.dumps({"comparison": "", "choice": {"a": [message]}})),
    "in a key": lambda message: reply(f"{{{json.dumps(message)}: 1, {escaped(message).decode()}: 2}}"),
    "in a fence": lambda message: reply(f"```json\n{message}\n```"),
    "in a rating": lambda message: reply(f"[[{message}]]"),
    "in why it ended": lambda message: choices("A", finish_reason=message),
    "in why it ended, behind spaces": lambda message: choices("A", finish_reason=" " * 30 + message),
    "in broken JSON": lambda message: raw(b"{" + message.encode()),
    "in no completion": lambda message: raw(json.dumps({"a": message}).encode()),
    "in no completion, escaped": lambda message: raw(b'{"a": %s}' % escaped(message)),
    "in another form": lambda message: raw(json.dumps({"detail": [{"msg": message}]}).encode(), 500),
    "in another charset": lambda message: raw(message.encode("utf-16"), headers={"content-type": "text/plain"}),
    "in a redirect": lambda message: head("307 moved", f"location: http://127.0.0.1:9/{message}"),
    "in a status line": lambda message: head(f"200 {message}"),
    "in a status line of an error": lambda message: head(f"500 {message}"),
    "in no status line": lambda message: plain(f"{message}\r\n\r\n".encode()),
    "in a header": lambda message: head("200 OK", f"x-request-id: {message}"),
    "in a header that is not ASCII": lambda message: head("200 OK", f"x-request-id: {message} é"),
    "in a header's name": lambda message: head("200 OK", f"{message}: é"),
    "in a cookie": lambda message: head(
        "200 OK", f"set-cookie: {message}={message}; Path=/{message}; Expires={message}"
    ),
    "in the charset": lambda message: head("200 OK", f"content-type: application/json; charset={message}"),
    "in the encoding": lambda message: head("200 OK", f"content-encoding: {message}"),
    "in a wait": lambda message: head("429 no", f"retry-after: {message}"),
    "in the length": lambda message: plain(f"HTTP/1.1 200 OK\r\ncontent-length: {message}\r\n\r\n".encode()),
}


ORDINARY = "sk-proj-4f9C1b7E0d2A8c3F"
PLACES_AND_KEYS = [*((place, AWKWARD) for place in ECHOES), *((place, ORDINARY) for place in list(ECHOES)[::4])]


@pytest.mark.parametrize(("place", "key"), PLACES_AND_KEYS)
def test_a_server_that_gives_the_key_away(
    place: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In every form that it may have there: nothing of it is in a file, a message, a log or on the terminal."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    def behave(request: Request) -> Behaviour:
        return ECHOES[place](FORMS[request.body["messages"][0]["content"].split(" | ")[0]](key))

    asked = [
        Question(name, ({"role": "user", "content": name},), {}, read, "?")
        for form in FORMS
        for read in (read_letter, read_object, read_rating)
        for name in [f"{form} | {read.__name__}"]
    ]
    with ChatServer(behave) as server:
        judge = ServerJudge("test", server.address)

        def ask(some: list[Question]) -> None:
            limits = RequestLimits(attempts=1, give_up_after=1000)
            said.append(repr(ask_all(judge, some, tmp_path / "answers.jsonl", limits, say=said.append)))

        # All at once, and where an answer stops that, one after the other.
        for some in (asked, *([one] for one in asked[::3])):
            try:
                ask(some)
                if some is asked:
                    break
            except JudgingError as caught:
                said += traceback.format_exception(caught)
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {key}"}
    assert len({request.text for request in server.requests}) >= len(FORMS)
    printed = capfd.readouterr()
    stored = (tmp_path / "answers.jsonl").read_text()
    for text in (*said, stored, caplog.text, printed.out, printed.err):
        assert reveals(text, key) == []


def test_what_is_said_beside_the_key_is_kept(tmp_path: Path) -> None:
    with ChatServer(lambda request: error(400, f"the key {request.headers['authorization']} is old")) as server:
        asked = ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", QUICK)
    assert asked.answers["q0"].reason == f"HTTP 400: the key Bearer {REMOVED} is old"


def test_logs_of_the_transport_are_as_loud_afterwards_as_before(tmp_path: Path) -> None:
    loggers = [logging.getLogger(name) for name in ("httpx2", "httpcore2")]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    with ChatServer(lambda request: reply("A")) as server:
        ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", QUICK)
    assert [logger.level for logger in loggers] == [logging.DEBUG] * 2
    for logger in loggers:
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_no_body_of_a_megabyte_takes_long(text: str) -> None:
    """As an answer, and in its place."""
    secret = Secret(AWKWARD)
    for body in (completion(text).decode(), text):
        assert seconds(lambda body: read_reply(body, secret), body, TransientError) < LIMIT


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with ChatServer(lambda request: reply("A")) as other:
        moved = error(307, "moved", headers={"location": other.address + "/chat/completions"})
        with ChatServer(lambda request: moved) as server, pytest.raises(JudgingError, match="HTTP 307: moved"):
            ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", QUICK)
        assert other.requests == []


def test_openai_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(JudgingSettingsError, match="needs a key, and the environment variable OPENAI_API_KEY is not"):
        ServerJudge("gpt-4o")
    monkeypatch.setenv("OTHER", "some-other-key")
    assert ServerJudge("gpt-4o", key_variable="OTHER").identity["server"] == "https://api.openai.com/v1"


def test_other_servers_do_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with ChatServer(lambda request: reply("A")) as server:
        ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", QUICK)
    assert server.requests[0].headers["authorization"] == "Bearer no-key"


def test_the_key_in_the_open_is_warned_of() -> None:
    assert ServerJudge("m", "http://127.0.0.1:8000/v1").warning is None
    assert ServerJudge("m", "https://example.com/v1").warning is None
    warning = ServerJudge("m", "http://example.com/v1").warning
    assert warning is not None
    assert "unencrypted to http://example.com/v1" in warning


def test_settings_of_requests(tmp_path: Path) -> None:
    given = {"temperature": None, "max_tokens": None, "max_completion_tokens": 64, "reasoning_effort": "low"}

    def behave(request: Request) -> Behaviour:
        return reply("A")

    with ChatServer(behave) as server:
        judge = ServerJudge("org/name", server.address, settings=given)
        ask_all(judge, questions(1), tmp_path / "a.jsonl", QUICK)
    sent = server.requests[0].body
    sent.pop("messages")
    assert sent == {"model": "org/name", "max_completion_tokens": 64, "reasoning_effort": "low"}
    assert (judge.name, judge.answer_tokens) == ("name", 64)


@pytest.mark.parametrize("name", ["model", "messages", "stream", "n", "api_key", "api-key", "Authorization"])
def test_settings_that_are_not_free(name: str) -> None:
    with pytest.raises(JudgingSettingsError, match="is not free"):
        ServerJudge("m", "http://localhost", settings={name: "x"})


def test_the_client_that_every_attempt_uses_does_not_repeat_itself(tmp_path: Path) -> None:
    """The openai client would send a request three times by itself."""
    with ChatServer(lambda request: error(500)) as server:
        limits = type(QUICK)(first_wait=0.001, attempts=2)
        asked = ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", limits)
    assert asked.accounts.requests == len(server.requests) == 2


def test_half_a_surrogate_pair_can_be_kept(tmp_path: Path) -> None:
    with ChatServer(lambda request: reply("\ud83d A \x00")) as server:
        asked = ask_all(ServerJudge("test", server.address), questions(1), tmp_path / "a.jsonl", QUICK)
    assert asked.answers["q0"].replies[0].text == "? A \x00"
