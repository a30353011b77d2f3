"""A server that gives the key away; keys that are missing; settings of requests."""

from __future__ import annotations

import base64
import json
import logging
import traceback
from pathlib import Path

import pytest

from tests.evaluation.judging.asked import KEY, QUICK, questions
from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, error, raw, reply
from wpr.evaluation.judging.asking import ask_all
from wpr.evaluation.judging.questions import JudgingError, JudgingSettingsError
from wpr.evaluation.judging.redaction import REMOVED
from wpr.evaluation.judging.server import ServerJudge


def echo(request: Request) -> str:
    """The Authorization header, in several forms."""
    key = request.headers["authorization"]
    return f"you sent {key}, {json.dumps(key)}, {base64.b64encode(KEY.encode()).decode()}"


ECHOES = {
    "in an error that stops": lambda request: error(401, echo(request)),
    "in an error that passes": lambda request: error(500, echo(request)),
    "in a refusal": lambda request: error(400, echo(request)),
    "in a page": lambda request: raw(echo(request).encode(), 500, {"content-type": "text/html"}),
    "in an answer": lambda request: reply(echo(request)),
    "in broken JSON": lambda request: raw(b"{" + echo(request).encode()),
    "in another form": lambda request: raw(json.dumps({"detail": [{"msg": echo(request)}]}).encode(), 500),
    "in a redirect": lambda request: error(307, echo(request), headers={"location": "http://127.0.0.1:9/" + KEY}),
}


@pytest.mark.parametrize("behave", ECHOES.values(), ids=ECHOES.keys())
def test_a_server_that_echoes_the_key(
    behave: object, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    told = ""
    with ChatServer(behave) as server:  # type: ignore[arg-type]
        try:
            limits = type(QUICK)(first_wait=0.001, attempts=2)
            asked = ask_all(ServerJudge("test", server.address), questions(2), tmp_path / "a.jsonl", limits)
            told = repr(asked)
        except JudgingError as caught:
            told = "".join(traceback.format_exception(caught))
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    printed = capfd.readouterr()
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    everything = told + caplog.text + printed.out + printed.err + written
    for form in (KEY, KEY[8:], base64.b64encode(KEY.encode()).decode().rstrip("=")):
        assert form not in everything
    assert REMOVED in everything


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
