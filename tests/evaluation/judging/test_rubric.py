"""Rubrics: those of the package, those of users, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from wpr.evaluation.judging.questions import JudgingSettingsError
from wpr.evaluation.judging.rubric import load_rubric, read_rubric, shipped_rubrics

FIELDS = {"prompt": "the text", "response_a": "one", "response_b": "two"}
MINE = "answer: letter\nuser: '{prompt} {response_a} {response_b}'\n"


def test_the_shipped_ones() -> None:
    assert shipped_rubrics() == ["helpfulness", "summary"]
    for name, form, words in (
        ("summary", "letter", ["Relevance", "Coherence", "Consistency", "Fluency", "A", "B", "E"]),
        ("helpfulness", "json", ["helpful", '"comparison"', '"choice"', '"E"']),
    ):
        rubric = load_rubric(name)
        assert (rubric.name, rubric.answer) == (name, form)
        (message,) = rubric.messages(FIELDS)
        assert message["role"] == "user"
        for word in [*words, "\nthe text\n", "\none\n", "\ntwo\n"]:
            assert word in message["content"]
        assert message["content"].index("\none\n") < message["content"].index("\ntwo\n")


def test_texts_are_put_in_once_and_as_they_are() -> None:
    rubric = read_rubric(MINE, "mine", "mine")
    fields = {"prompt": "{response_a} {{prompt}} \\1 {x}", "response_a": "{response_b}", "response_b": "$b %s {}"}
    (message,) = rubric.messages(fields)
    assert message["content"] == "{response_a} {{prompt}} \\1 {x} {response_b} $b %s {}\n"


def test_a_file_of_ones_own_with_a_system_message(tmp_path: Path) -> None:
    file = tmp_path / "funny.yaml"
    text = 'system: You laugh. {{choice}}\nanswer: json\nuser: |\n  {"a": 1} {prompt} {response_a} {response_b}\n'
    file.write_text(text)
    rubric = load_rubric(str(file))
    assert (rubric.name, rubric.title) == ("funny", "funny")
    system, user = rubric.messages(FIELDS)
    assert system == {"role": "system", "content": "You laugh. {choice}"}
    assert user["content"] == '{"a": 1} the text one two\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("just words", "has no keys"),
        (MINE + "tone: nice", "has the key 'tone', which is none of title, answer, user, system"),
        ("user: x", "answer: None; it must be letter or json"),
        ("answer: number\nuser: x", "answer: 'number'"),
        ("answer: letter\nuser: 3", "user must be a text"),
        ("answer: letter\nuser: '{prompt} {response_a} {respnse_b}'", "has the field {respnse_b}; there are {prompt}"),
        ("answer: letter\nuser: '{prompt} {response_a} {{response_b}}'", "does not show the judge {response_b}"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(JudgingSettingsError) as caught:
        read_rubric(text, "mine", "mine.yaml")
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JudgingSettingsError, match="one of helpfulness, summary; did you mean summary?"):
        load_rubric("sumary")
    (tmp_path / "x.yaml").write_bytes(b"\xff")
    with pytest.raises(JudgingSettingsError, match="cannot be read as UTF-8"):
        load_rubric(str(tmp_path / "x.yaml"))
