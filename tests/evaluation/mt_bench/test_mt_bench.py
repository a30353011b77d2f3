"""MT-Bench: its format, what judges are asked, how ratings are read and scores are made."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.judging.asked import outcome
from tests.evaluation.judging.nasty import ANSWERS, LIMIT, seconds
from tests.evaluation.mt_bench.eighty import questions, write
from tests.ppo.tiny import tokenizer
from wpr.data import DataSettings, Encoder
from wpr.data.rows import DataError
from wpr.evaluation.judging.asking import JudgeResults
from wpr.evaluation.judging.questions import Accounts, Answer, JudgingSettingsError, Reply, UnreadableError
from wpr.evaluation.mt_bench.conversations import first_turn, second_turn
from wpr.evaluation.mt_bench.grading import grades_of, to_be_graded
from wpr.evaluation.mt_bench.grading_rubric import grading_prompt, load_grading_rubric, read_number, read_rating
from wpr.evaluation.mt_bench.question_file import BenchQuestion, read_questions, temperatures
from wpr.evaluation.mt_bench.scores import COLUMNS, Grade, mt_bench_finding, score_rows
from wpr.runs.responses import Response, ResponseFile

ROW = {"question_id": 81, "category": "math", "turns": ["w3", "w4"], "reference": ["w5", "w6"]}


def file(folder: Path, rows: list[Any], name: str = "question.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_public_format(tmp_path: Path) -> None:
    found = read_questions(write(tmp_path / "q.jsonl"))
    assert len(found) == 80
    assert [sum(one.category == name for one in found) for name in ("writing", "math")] == [10, 10]
    assert found[0] == BenchQuestion("81", "writing", tuple(questions()[0]["turns"]))
    assert next(one for one in found if one.category == "math").references == ("14", "19")
    assert temperatures(found, {"math": 0.3}) == {
        "writing": 0.7, "roleplay": 0.7, "reasoning": 0.0, "math": 0.3, "coding": 0.0, "extraction": 0.0, "stem": 0.1,
        "humanities": 0.1,
    }  # fmt: skip
    with pytest.raises(DataError, match="category 'poetry', which no question has"):
        temperatures(found, {"poetry": 1.0})
    with pytest.raises(DataError, match="must be 0 or more"):
        temperatures(found, {"math": -1.0})
    assert len(read_questions(tmp_path / "q.jsonl", limit=3)) == 3


def test_references_of_a_file_of_their_own(tmp_path: Path) -> None:
    path = file(tmp_path, [ROW, ROW | {"question_id": "x", "reference": None}, ROW | {"question_id": 3}])
    answers = [
        {"question_id": 81, "choices": [{"index": 0, "turns": ["right", "again"]}]},
        {"question_id": "x", "choices": [{"turns": ["one"]}]},
    ]
    found = read_questions(path, file(tmp_path, answers, "reference.jsonl"))
    assert [one.references for one in found] == [("right", "again"), ("one", None), ("w5", "w6")]
    with pytest.raises(DataError, match="choices"):
        read_questions(path, file(tmp_path, [{"question_id": 1, "choices": []}], "reference.jsonl"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"turns": ["one"]}, "two texts"),
        (ROW | {"turns": ["one", " "]}, "turn 2 of 'turns' is empty"),
        (ROW | {"turns": ["one", "two", "three"]}, "two texts"),
        (ROW | {"turns": "one"}, "two texts"),
        (ROW | {"category": ""}, "'category' is empty"),
        (ROW | {"question_id": None}, "question_id"),
        (ROW | {"reference": [1, 2]}, "'reference' is 1"),
        ({"question_id": 1, "turns": ["a", "b"]}, "'category' is None"),
    ],
)
def test_faults_are_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(file(tmp_path, [row]))


def test_two_of_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="question_id 81 again"):
        read_questions(file(tmp_path, [ROW, ROW]))


def test_the_second_turn_has_the_first_in_front() -> None:
    question = BenchQuestion("81", "math", ("w3", "w4"))
    encoder = Encoder(tokenizer(), DataSettings("prompts"))
    (first,) = first_turn([question], encoder, {"math": 0.0})
    assert (first.input_ids, first.temperature) == ([3], 0.0)
    answers = ResponseFile(Path("x"), {}, (Response("81", "w3", "w9 w8"),))
    (second,) = second_turn([question], answers, encoder, {"math": 0.0})
    assert second.input_ids == [3, 9, 8, 4]
    assert [turn["role"] for turn in second.prompt] == ["user", "assistant", "user"]  # type: ignore[index]


def test_what_a_judge_sees() -> None:
    with_reference = BenchQuestion("1", "math", ("first?", "second?"), ("ref one", "ref two"))
    without = BenchQuestion("2", "writing", ("first?", "second?"))
    one, two = (grading_prompt(with_reference, ("answer one", "answer two"), turn) for turn in (1, 2))
    assert "first?" in one
    assert "ref one" in one
    assert "answer one" in one
    assert not any(text in one for text in ("second?", "ref two", "answer two"))
    assert all(text in two for text in ("first?", "ref one", "answer one", "second?", "ref two", "answer two"))
    assert "eference" not in grading_prompt(without, ("a", "b"), 2)
    assert "(empty)" in grading_prompt(without, ("", "b"), 1)


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Fine. Rating: [[7]]", 7),
        ("[[10]]", 10),
        ("[[ 8.5 ]]", 8.5),
        ("Rating: [[3]]. So [[3]].", 3),
        ("<think>[[3]]? No, [[8]].</think> Rating: [[7]]", 7),
    ],
)
def test_ratings(text: str, rating: float) -> None:
    assert read_rating(text) == rating


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Rating: 7", "no rating in the form"),
        ("Rating: [7]", "no rating in the form"),
        ("", "no rating in the form"),
        ("[[0]]", "not between 1 and 10"),
        ("[[11]]", "not between 1 and 10"),
        ("[[-3]]", "no number"),
        ("[[seven]]", "no number"),
        ("[[nan]]", "no number"),
        ("[[7/10]]", "no number"),
        ("first [[3]], second [[8]]", "2 different ratings"),
    ],
)
def test_ratings_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        read_rating(text)


def rating_by_expression(text: str) -> float:
    """As it was read before, slowly where there is much white space."""
    found = dict.fromkeys(re.findall(r"\[\[\s*([^\[\]]*?)\s*\]\]", text))
    if not found:
        raise UnreadableError("it has no rating in the form [[n]]")
    if len(found) > 1:
        raise UnreadableError(f"it has {len(found)} different ratings ({', '.join(list(found)[:5])[:80]})")
    (given,) = found
    if not re.fullmatch(r"\d{1,2}(\.\d+)?", given):
        raise UnreadableError(f"the rating [[{given[:20]}]] is no number")
    if not 1 <= float(given) <= 10:
        raise UnreadableError(f"the rating {given} is not between 1 and 10")
    return float(given)


@given(
    st.lists(st.sampled_from(["[", "]", "[[", "]]", " ", "\n", "\u2003", "7", "8.5", "x"]), max_size=14).map("".join)
)
def test_ratings_are_read_as_by_an_expression(text: str) -> None:
    assert outcome(read_rating, text) == outcome(rating_by_expression, text)


@pytest.mark.parametrize("read", [read_rating, read_number])
@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_no_answer_of_a_megabyte_takes_long(read: Callable[[str], Any], text: str) -> None:
    assert seconds(read, text, UnreadableError) < LIMIT


def test_functions_may_return_numbers() -> None:
    assert read_number("7") == read_number(" 7.0\n") == read_number("so: [[7]]") == 7
    with pytest.raises(UnreadableError):
        read_number("seven")


def test_every_answer_is_accounted_for() -> None:
    asked = [BenchQuestion(str(i), "math", ("a", "b")) for i in range(2)]
    files = [ResponseFile(Path("x"), {}, tuple(Response(str(i), "", f"answer {i}") for i in range(2)))] * 2
    sent = to_be_graded("m", asked, files)
    assert len({one.id for one in sent}) == 4
    assert sent[3].fields == {
        "questions": ["a", "b"], "answers": ["answer 1", "answer 1"], "reference": None, "category": "math", "turn": 2,
    }  # fmt: skip
    answers = [
        Answer("read", 7.0, "", (Reply("[[7]]"),)),
        Answer("unreadable", None, "no rating", (Reply("good"), Reply("very good"))),
        Answer("failed", reason="HTTP 500"),
        Answer("unasked", reason="others failed"),
    ]
    grades = grades_of(
        "m", asked, JudgeResults({one.id: got for one, got in zip(sent, answers, strict=True)}, Accounts())
    )
    assert [(one.rating, one.status) for one in grades] == [
        (7.0, "graded"), (None, "unparsable"), (None, "failed"), (None, "failed"),
    ]  # fmt: skip
    assert grades[1].words == ["good", "very good"]


def test_scores_by_category_and_turn() -> None:
    asked = [
        BenchQuestion("1", "math", ("a", "b")),
        BenchQuestion("2", "math", ("a", "b")),
        BenchQuestion("3", "stem", ("a", "b")),
    ]
    ratings = {"1": (10.0, 6.0), "2": (4.0, 4.0), "3": (9.0, None)}
    grades = [
        Grade(name, turn, rating, "graded" if rating is not None else "unparsable")
        for name, own in ratings.items()
        for turn, rating in enumerate(own, 1)
    ]
    rows = {str(row[1]): dict(zip(COLUMNS, row, strict=True)) for row in score_rows("m", asked, grades)}
    assert rows["math"]["score"] == 6.0
    assert (rows["math"]["turn_1"], rows["math"]["turn_2"]) == (7.0, 5.0)
    # Two questions with means 8 and 4: standard deviation sqrt(8), over sqrt(2) questions.
    assert rows["math"]["standard_error"] == pytest.approx(math.sqrt(8) / math.sqrt(2))
    assert (rows["stem"]["score"], rows["stem"]["turn_2"], rows["stem"]["standard_error"]) == (9.0, None, None)
    assert (rows["stem"]["graded"], rows["stem"]["unparsable"], rows["stem"]["failed"]) == (1, 1, 0)
    assert rows["all"]["score"] == pytest.approx(33 / 5)
    finding = mt_bench_finding("mt-bench-j", "j", asked, {"m": grades}, {})
    assert any("1 of 6 answers of m have no rating" in text and "5.67 and 7.17" in text for text in finding.text)
    assert finding.figures[0].kind == "radar"
    assert finding.figures[0].series[0].x == ["math", "stem"]


PAGE = (Path(__file__).parents[3] / "docs" / "generation.md").read_text(encoding="utf-8")


def rubric_file(folder: Path, text: str | None = None) -> Path:
    """That of the docs, or another."""
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = folder / "mine.yaml"
    path.write_text(example if text is None else text)
    return path


def test_a_rubric_of_ones_own(tmp_path: Path) -> None:
    rubric = load_grading_rubric(rubric_file(tmp_path))
    assert (rubric.name, rubric.title) == ("mine", "what counts here")
    with_reference = BenchQuestion("1", "math", ("first?", "{answer_2}"), ("ref one", "ref two"))
    answers = ("{question}", "answer two")
    system, user = rubric.messages(BenchQuestion("2", "writing", ("first?", "second?")), answers, 1)
    assert system == {"role": "system", "content": "You are a fair grader."}
    assert user["content"].endswith("Question: first?\nAnswer: {question}\n")
    (shown,) = rubric.messages(with_reference, answers, 1)
    assert "first? The right answer: ref one The answer: {question}" in shown["content"]
    (shown,) = rubric.messages(with_reference, answers, 2)
    assert shown["content"].endswith("first? ref one {question} {answer_2} ref two answer two\n")
    # A reference that the template shows and the question lacks: the one without references.
    (shown,) = rubric.messages(replace(with_reference, references=(None, "ref two")), answers, 2)
    assert "ref two" not in shown["content"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: what counts here", "titel: x", "has the key 'titel', which is none of title, first, second"),
        ("second:", "third:", "has the key 'third'"),
        ("{question}\n    Answer", "x\n    Answer", "(first) does not show the judge {question}; put it into user"),
        ("Answer: {answer}", "Answer: {anwser}", "(first) has the field {anwser}; there are {question} and {answer}"),
        ("Answer: {answer}", "{answer} {ref_answer_1}", "(first) has the field {ref_answer_1}"),
        ("The right answer: {ref_answer_1}", "", "(first_with_reference) does not show the judge {ref_answer_1}"),
        ("Rate the second answer from 1 to 10, in this form: Rating: [[5]]", "", "(second) does not ask for a rating"),
        ("  system: You are a fair grader.", "  system: 3", "(first): system must be a text"),
        (
            "  system: You are a fair grader.",
            "  sytem: x",
            "(first) has the key 'sytem', which is none of user, system",
        ),
    ],
)
def test_rubrics_that_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    good = rubric_file(tmp_path).read_text()
    assert good.count(old) == 1
    with pytest.raises(JudgingSettingsError) as caught:
        load_grading_rubric(rubric_file(tmp_path, good.replace(old, new)))
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_rubric_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JudgingSettingsError, match=r"none\.yaml is no file; name a YAML file"):
        load_grading_rubric(tmp_path / "none.yaml")
    for text, message in (("words", "has no keys"), ("title: x", "has no first"), ("first: x\nsecond: x", "no user")):
        with pytest.raises(JudgingSettingsError, match=message):
            load_grading_rubric(rubric_file(tmp_path, text))
