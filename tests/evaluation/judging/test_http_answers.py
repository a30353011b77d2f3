"""What a server's answers are in HTTP: charsets, headers, cookies, compression, counts."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.evaluation.judging.asked import ask
from tests.evaluation.judging.misbehaving import ChatServer, completion, error, raw, reply
from wpr.evaluation.judging.questions import JudgingError, RequestLimits


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


@pytest.mark.parametrize(
    "charset",
    ["utf-8", "UTF-8", "utf8", '"utf-8"', "utf-8; x=y", "", "utf-8, application/json; charset=utf-8"],
)
def test_charsets_of_json_are_read(charset: str, cache: Path) -> None:
    named = {"content-type": f"application/json; charset={charset}"}
    body = completion("é", id="ü").replace(b"\\u00e9", "é".encode())
    with ChatServer(lambda request: raw(body, headers=named)) as server:
        asked = ask(server, 1, cache)
    assert asked.answers["q0"].replies[0].text == "é"
    assert asked.accounts.retried == 0


def test_other_charsets_of_text_are_read(cache: Path) -> None:
    named = {"content-type": "application/json; charset=ISO-8859-1"}
    body = completion("é").replace(b"\\u00e9", b"\xe9")
    with ChatServer(lambda request: raw(body, headers=named)) as server:
        assert ask(server, 1, cache).answers["q0"].replies[0].text == "é"


@pytest.mark.parametrize("headers", [{"x-place": "Zürich"}, {"content-type": "text/html; charset=zlib"}])
def test_a_refusal_stays_one_whatever_its_headers_are(headers: dict[str, str], cache: Path) -> None:
    refusal = error(401, "not for you", headers=headers)
    with ChatServer(lambda request: refusal) as server, pytest.raises(JudgingError, match="HTTP 401: not for you"):
        ask(server, 1, cache)


def test_cookies_are_not_taken(cache: Path) -> None:
    given = raw(completion("A"), headers={"set-cookie": "name=value; Path=/"})
    with ChatServer(lambda request: given) as server:
        ask(server, 3, cache, RequestLimits(concurrency=1))
    assert ["cookie" in request.headers for request in server.requests] == [False] * 3


def test_numbers_of_tokens_that_are_none_are_not_counted(cache: Path) -> None:
    """The sum of two that are as long as Python reads would be longer than it writes."""
    usage = {"prompt_tokens": int("9" * 4300), "completion_tokens": -1}
    with ChatServer(lambda request: reply("A", usage=usage)) as server:
        asked = ask(server, 3, cache)
    assert (asked.accounts.prompt_tokens, asked.accounts.completion_tokens) == (0, 0)
    assert "999999" not in cache.read_text()


def test_a_compressed_answer_is_limited_by_what_it_becomes(cache: Path) -> None:
    bomb = raw(gzip.compress(b" " * 50_000_000), headers={"content-encoding": "gzip"})
    fine = raw(gzip.compress(completion("A")), headers={"content-encoding": "gzip"})
    with ChatServer(lambda request: bomb if request.times == 1 else fine) as server:
        asked = ask(server, 1, cache)
    assert asked.answers["q0"].value == "A"
    assert asked.accounts.retried == 1
