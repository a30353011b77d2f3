"""Keys stay out of what is written and shown; addresses have one form and no secrets."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.judging.asked import AWKWARD, KEY
from tests.evaluation.judging.leaks import FORMS, reveals
from tests.evaluation.judging.nasty import ANSWERS, LIMIT, SIZE, seconds
from wpr.evaluation.judging.questions import JudgingSettingsError
from wpr.evaluation.judging.redaction import REMOVED, Secret, checked_address, is_here, shown


@pytest.mark.parametrize("key", [KEY, AWKWARD])
@pytest.mark.parametrize("write", FORMS.values(), ids=FORMS.keys())
def test_a_key_is_removed_in_every_form(write: Callable[[str], str], key: str) -> None:
    text = f"before {write(key)} after"
    assert reveals(text.replace("\0", ""), key) != []
    left = Secret(key).remove_from(text)
    assert REMOVED in left
    assert reveals(left, key) == []
    assert reveals(shown(text, Secret(key)), key) == []


def test_only_the_key_is_removed_where_it_can_be_seen() -> None:
    for key in (KEY, AWKWARD):
        for form in (key, json.dumps(key)[1:-1], quote(key, safe=""), key.encode().hex()):
            assert Secret(key).remove_from(f"100% {form}, \\alpha") == f"100% {REMOVED}, \\alpha"


def test_a_word_for_a_key_costs_no_more_than_the_word() -> None:
    """Servers at home take any key; texts about them have the word in other letters."""
    answer = '{"comparison": "A explains LM-Studio well", "choice": "A"}'
    assert Secret("lm-studio").remove_from(answer) == answer.replace("LM-Studio", REMOVED)


WAYS = ["{}", "\\u{:04x}", "\\u{:04X}", "\\\\u{:04x}", "%{:02x}", "%25{:02X}", "\\u0025{:02x}"]


@given(st.lists(st.sampled_from(WAYS), min_size=len(KEY), max_size=len(KEY)))
def test_whatever_letters_are_escaped(ways: list[str]) -> None:
    form = "".join(letter if way == "{}" else way.format(ord(letter)) for way, letter in zip(ways, KEY, strict=True))
    assert Secret(KEY).remove_from(f"before {form} after") in (REMOVED, f"before {REMOVED} after")


@given(st.text() | st.text("\\u0073%25x{}[]\"'ab \n"))
def test_texts_without_the_key_stay(text: str) -> None:
    assert Secret(KEY).remove_from(text) == text


def test_escapes_without_end_are_not_kept() -> None:
    hidden = KEY[1:]
    for _ in range(20):
        hidden = quote("%73" + hidden)
    assert Secret(KEY).remove_from(hidden) == REMOVED


@pytest.mark.parametrize("text", [*ANSWERS.values(), (KEY[:-1] * 40_000)[:SIZE]], ids=[*ANSWERS, "the key but its end"])
def test_a_megabyte_does_not_take_long(text: str) -> None:
    secret = Secret(KEY)
    assert seconds(lambda text: shown(text, secret), text) < LIMIT


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret(KEY)
    assert KEY not in repr(secret) + str(secret) + f"{secret}" + repr([secret])
    assert secret.reveal() == KEY


def test_placeholders_are_left_in_texts() -> None:
    assert Secret("EMPTY").remove_from("EMPTY words") == "EMPTY words"


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", f"  {KEY}\n")
    found = Secret.from_environment("MY_KEY")
    assert found is not None
    assert found.reveal() == KEY
    monkeypatch.setenv("MY_KEY", "")
    assert Secret.from_environment("MY_KEY") is None


@pytest.mark.parametrize("value", [f"{KEY}\n{KEY}", f"{KEY} x", KEY + "é", KEY + "\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(JudgingSettingsError, match="MY_KEY holds a key with a space") as caught:
        Secret.from_environment("MY_KEY")
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_what_a_server_says_is_made_fit_for_a_message() -> None:
    assert shown(f"a\x1b[31m\n b {KEY}", Secret(KEY)) == f"a [31m b {REMOVED}"
    assert len(shown("x" * 1000, None)) == 300


@pytest.mark.parametrize(
    ("address", "form"),
    [
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("HTTP://LocalHost:80/v1", "http://localhost/v1"),
        ("https://api.example.com:443", "https://api.example.com"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
    ],
)
def test_addresses_have_one_form(address: str, form: str) -> None:
    assert checked_address(address) == form


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://me:secretpw@example.com/v1", "user name or password"),
        ("https://secretpw@example.com/v1", "user name or password"),
        ("https://example.com/v1?api-key=secretpw", "a query"),
        ("https://example.com/v1#secretpw", "a fragment"),
        ("ftp://example.com", "must start with http"),
        ("localhost:8000", "must start with http"),
        ("http://", "must start with http"),
        ("http://x:99999999/secretpw", "cannot be read"),
    ],
)
def test_addresses_that_are_refused_do_not_show_their_secrets(address: str, message: str) -> None:
    with pytest.raises(JudgingSettingsError, match=message) as caught:
        checked_address(address)
    assert "secretpw" not in str(caught.value)


def test_this_machine() -> None:
    assert is_here("http://localhost:8000")
    assert is_here("http://127.0.0.1/v1")
    assert is_here("http://[::1]:80")
    assert not is_here("http://192.168.0.1")
