"""Records of each dataset to rows, and what makes a record useless."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import files
from wpr.data import DataSettings, Row
from wpr.data.formats import make_row
from wpr.data.rows import BadRowError
from wpr.data.settings import FORMATS

DIALOGUE = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "How are you?"},
)


def row(format: str, record: dict[str, Any], **settings: Any) -> Row:
    made = make_row(record, "f:1", DataSettings(format, **settings))
    assert made is not None
    return made


def refuse(format: str, record: dict[str, Any], message: str, **settings: Any) -> None:
    with pytest.raises(BadRowError) as caught:
        make_row(record, "f:1", DataSettings(format, **settings))
    assert message in str(caught.value)


@pytest.mark.parametrize(("format", "record"), [("hh", files.HH), ("full-hh", files.FULL_HH)])
def test_both_forms_of_hh_are_the_same(format: str, record: dict[str, Any]) -> None:
    assert row(format, record) == Row(DIALOGUE, "Fine, thanks.", "No.", {}, "f:1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": files.HH["chosen"].rpartition("\n\n")[0]}, "'rejected' ends with a user turn"),
        ({"rejected": "\n\nHuman: Hello\n\nAssistant: Go!"}, "part at turn 2, before the last one (of 4 and 2)"),
        ({"rejected": files.HH["rejected"].replace("Hello", "Hey")}, "part at turn 1, before the last one (of 4"),
        ({"rejected": files.HH["rejected"].replace("No.", " ")}, "'rejected' is empty"),
        ({"chosen": files.HH["chosen"].replace("Hi!", "")} | {"rejected": files.HH["rejected"].replace("Hi!", "")},
         "turn 2 of the prompt (assistant) is empty"),
        ({"chosen": "Hello"}, "not with 'Human:'"),
        ({"chosen": ["Hello"]}, "'chosen' is ['Hello'], of type list; text is needed"),
        ({"chosen": None}, "'chosen' is None"),
        ({"chosen": files.HH["chosen"] + "\ud800"}, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_bad_transcripts(change: dict[str, Any], message: str) -> None:
    refuse("hh", {**files.HH, **change}, message)


def test_a_speaker_who_goes_on_in_the_completion() -> None:
    """The marker in the middle of an answer (9 pairs of helpful-base's test set) is no reason to lose the pair."""
    made = row("hh", {**files.HH, "rejected": files.HH["rejected"] + "\n\nAssistant: Really."})
    assert (made.prompt, made.rejected) == (DIALOGUE, "No.\n\nReally.")


def test_full_hh_must_end_where_the_assistant_begins() -> None:
    refuse("full-hh", {**files.FULL_HH, "prompt": "\n\nHuman: Hello"}, "'prompt' ends with")
    refuse("full-hh", {**files.FULL_HH, "chosen": " Fine.\n\nHuman: Good"}, "'chosen' ends with a user turn")
    refuse("full-hh", {**files.FULL_HH, "chosen": " "}, "'chosen' is empty")


def test_tldr() -> None:
    made = row("tldr", files.TLDR)
    assert made.prompt == "SUBREDDIT: r/tifu\n\nTITLE: The sea\n\nPOST: I went to the sea.\n\nTL;DR:"
    assert (made.chosen, made.rejected, made.demonstrated) == ("cold sea", "went to sea", "went to sea")
    other = row("tldr", {**files.TLDR, "choice": 0, "summaries": [{"text": "a"}, {"text": "b"}]})
    assert (other.chosen, other.rejected, other.demonstrated) == ("a", "b", None)


def test_tldr_as_the_released_code_words_it() -> None:
    made = row("tldr", files.TLDR, fidelity="released")
    info = files.TLDR["info"]
    assert made.prompt == f"POST\nSubreddit: r/{info['subreddit']}\n{info['post'].strip()}\nTL;DR:"
    assert (made.chosen, made.rejected) == (row("tldr", files.TLDR).chosen, row("tldr", files.TLDR).rejected)


def test_all_solutions_of_apps() -> None:
    record = {**files.APPS, "solutions": json.dumps(["print(1)", "print(2)", "", None, "print(3)"])}
    made = row("apps", record, fidelity="released")
    assert (made.chosen, made.more) == ("print(1)", ("print(2)", "print(3)"))
    assert row("apps", record).more == ()
    assert made.digest() != row("apps", record).digest()


def test_news_articles_are_another_task() -> None:
    assert make_row(files.NEWS, "f:1", DataSettings("tldr")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": 2}, "'choice' is 2; 0 or 1"),
        ({"choice": True}, "'choice' is True"),
        ({"choice": None}, "'choice' is None"),
        ({"choice": "1"}, "'choice' is '1'"),
        ({"choice": 0.5}, "'choice' is 0.5"),
        ({"summaries": [{"text": "a"}]}, "two objects with a text"),
        ({"summaries": [{"text": "a"}, {"text": ""}]}, "'summaries[1].text' is empty"),
        ({"summaries": [{"text": "a"}, {"text": None}]}, "'summaries[1].text' is None"),
        ({"info": "x"}, "'info' is 'x'"),
        ({"info": {"title": "a", "subreddit": "b"}}, "no column 'post' (there are 'title', 'subreddit')"),
        ({"info": {"title": "a", "subreddit": "b", "post": " "}}, "'post' is empty"),
    ],
)
def test_bad_comparisons(change: dict[str, Any], message: str) -> None:
    refuse("tldr", {**files.TLDR, **change}, message)


def test_apps() -> None:
    made = row("apps", files.APPS)
    assert made.prompt == "\nQUESTION:\nRead a number and print it.\nUse Standard Input format\n\nANSWER:\n"
    assert (made.chosen, made.rejected) == ("print(input())", None)
    assert made.columns == {
        "input_output": files.APPS["input_output"],
        "difficulty": "interview",
        "problem_id": 7,
        "starter_code": "",
        "fn_name": None,
    }
    tests = json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "double"})
    called = row("apps", {**files.APPS, "input_output": tests, "starter_code": "def double(x):\n    ", "solutions": ""})
    assert called.prompt == (
        "\nQUESTION:\nRead a number and print it.\ndef double(x):\nUse Call-Based format\n\nANSWER:\n"
    )
    assert (called.chosen, called.columns["fn_name"]) == (None, "double")


def test_apps_with_numbers_that_python_refuses_to_convert() -> None:
    tests = '{"inputs": [[1]], "outputs": [' + "9" * 5000 + '], "fn_name": "f"}'
    assert row("apps", {**files.APPS, "input_output": tests}).columns["input_output"] == tests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_output": ""}, "no tests"),
        ({"input_output": '{"inputs": [], "outputs": []}'}, "no tests"),
        ({"input_output": '{"inputs": [1], "outputs": []}'}, "1 inputs but 0 outputs"),
        ({"input_output": '{"inputs": "x", "outputs": [1]}'}, "no list of inputs and outputs, so it has no tests"),
        ({"input_output": '{"inputs": [1'}, "input_output is no JSON"),
        (
            {"input_output": '{"inputs": [1], "outputs": [1], "fn_name": 3}'},
            "fn_name=3, which is no name of a function",
        ),
        ({"input_output": '{"inputs": [[1]], "outputs": [1]}'}, "without fn_name it must be text or a list of lines"),
        ({"solutions": '"print()"'}, "a list of programs is needed"),
        ({"solutions": '[""]'}, "'solutions[0]' is empty"),
        ({"question": ""}, "'question' is empty"),
        ({"starter_code": 3}, "'starter_code' is 3, of type int; text"),
    ],
)
def test_bad_problems(change: dict[str, Any], message: str) -> None:
    refuse("apps", {**files.APPS, **change}, message)


def test_preferences_as_chats_and_as_text() -> None:
    question = ({"role": "user", "content": "Hello"},)
    assert row("preference", files.ULTRA) == Row(question, "Hi!", "Go away.", {}, "f:1")
    answers = {name: files.ULTRA[name][1:] for name in ("chosen", "rejected")}
    assert row("preference", {"prompt": list(question), **answers}) == Row(question, "Hi!", "Go away.", {}, "f:1")
    assert row("preference", {"prompt": "Hello", **answers}).prompt == "Hello"
    plain = {"question": "Hello", "good": "Hi!", "bad": "No.", "level": 3}
    names = {"prompt": "question", "chosen": "good", "rejected": "bad", "difficulty": "level"}
    assert row("preference", plain, columns=names) == Row("Hello", "Hi!", "No.", {"difficulty": 3}, "f:1")
    system = [{"role": "system", "content": "Be kind."}, *files.ULTRA["chosen"]]
    assert len(row("demonstrations", {"completion": system}).prompt) == 2
    shown = row("preference", {**files.ULTRA, "demonstrated": "Good day."})
    assert (shown.chosen, shown.demonstrated) == ("Hi!", "Good day.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": []}, "'chosen' is a dialogue without a turn"),
        ({"chosen": [files.QUESTION]}, "'chosen' ends with a user turn"),
        ({"chosen": [{"role": "human", "content": "x"}]}, "message 1 of 'chosen' is {'role': 'human'"),
        ({"chosen": [{"role": "user", "content": None}]}, "a content of text"),
        ({"chosen": [{"role": "user", "content": "\ud800"}]}, "'chosen' has half of a surrogate pair"),
        ({"chosen": [{"role": [], "content": "x"}]}, "message 1 of 'chosen'"),
        ({"chosen": ["Hi"]}, "message 1 of 'chosen' is 'Hi'"),
        ({"rejected": [{"role": "user", "content": "Hey"}, {"role": "assistant", "content": "a"}]}, "part at turn 1"),
        ({"rejected": "Go away."}, "they must be of one kind"),
        ({"rejected": [files.QUESTION, {"role": "assistant", "content": ""}]}, "'rejected' is empty"),
        ({"chosen": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "a"}]}, "must be the user's"),
    ],
)
def test_bad_preferences(change: dict[str, Any], message: str) -> None:
    refuse("preference", {**files.ULTRA, **change}, message)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", " ", "user", "\ud800", "[1]", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("hh", files.HH),
        ("full-hh", files.FULL_HH),
        ("tldr", files.TLDR),
        ("apps", files.APPS),
        ("preference", files.ULTRA),
    ],
)
@given(data=st.data())
def test_no_value_of_any_column_ends_in_a_traceback(format: str, record: dict[str, Any], data: st.DataObject) -> None:
    """Any JSON in any column makes a row, or is refused in words."""
    for name in FORMATS[format]:
        with contextlib.suppress(BadRowError):
            made = make_row({**record, name: data.draw(anything)}, "f:1", DataSettings(format))
            assert made is not None
            assert len(made.digest()) == 32
            json.dumps([made.prompt, made.chosen, made.rejected], ensure_ascii=False).encode()


def test_a_missing_column_names_those_there() -> None:
    refuse(
        "preference", {"question": "a", "good": "b"}, "no column 'chosen' (there are 'question', 'good'); name it in"
    )
    refuse("prompts", {}, "there are none")
    refuse("prompts", {"text": "a"}, "no column 'body'", columns={"prompt": "body"})
    refuse("prompts", {"prompt": "a"}, "no column 'level'", columns={"difficulty": "level"})


def test_real_hh_pairs() -> None:
    """All 2,354 pairs of helpful-base's test set, where WPR_HH_FILE names the file."""
    import os

    from wpr.data import load_corpus
    from wpr.data.dialogues import parse_transcript, render_transcript

    path = os.environ.get("WPR_HH_FILE")
    if not path or not Path(path).exists():
        pytest.skip("set WPR_HH_FILE to helpful-base's test.jsonl.gz")
    corpus = load_corpus(DataSettings("hh", source=path, bad_rows="skip"))
    assert (len(corpus.rows), len(corpus.skipped)) == (2350, 4)
    faults = Counter(message.partition(": ")[2] for message in corpus.skipped)
    assert faults == {"'rejected' is empty": 3, "turn 4 of the prompt (assistant) is empty": 1}
    for found in corpus.rows:
        assert not isinstance(found.prompt, str)
        assert parse_transcript(render_transcript(found.prompt)) == list(found.prompt)
        assert all(a["role"] != b["role"] for a, b in zip(found.prompt, found.prompt[1:], strict=False))
