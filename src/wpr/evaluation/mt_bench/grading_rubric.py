"""What a judge is asked about one answer, and how its rating is read. The words are ours, the criteria MT-Bench's."""

from __future__ import annotations

import re

from wpr.evaluation.judging.questions import UnreadableError
from wpr.evaluation.judging.verdicts import without_thoughts
from wpr.evaluation.mt_bench.question_file import BenchQuestion

CRITERIA = (
    "You grade an assistant's reply to a user. Consider whether it does what the user asked, whether what it says is "
    "correct and to the point, whether it goes deep enough, whether it shows ideas of its own where they are wanted, "
    "and whether it is as detailed as the question calls for. Length by itself earns nothing. Judge without favour."
)

WITH_REFERENCE = (
    "A reference answer is given, which is right. Compare the reply with it first: find the reply's mistakes and name "
    "them, and let them weigh in the rating."
)

SECOND_TURN = (
    "The conversation has two questions. Grade the reply to the second one only; the first is there so that you know "
    "what came before."
)

FORM = (
    "First explain your judgement in a few sentences. Then, on a line of its own, give a rating from 1 (worst) to 10 "
    "(best) in exactly this form: Rating: [[5]]"
)

ANSWER_FORM = "a short explanation and a rating from 1 to 10 in the form Rating: [[5]]"
"""The form of an answer, for the second request after one that could not be read."""

RATING = re.compile(r"\[\[([^\[\]]*+)\]\]")
"""Spaces are stripped afterwards: an expression that shares them out between three places is slow on many of them."""
LOWEST, HIGHEST = 1.0, 10.0


def grading_prompt(question: BenchQuestion, answers: tuple[str, str], turn: int) -> str:
    """What the judge is asked about the answer to turn 1 or 2."""
    referenced = question.references[turn - 1] is not None
    head = [CRITERIA, WITH_REFERENCE if referenced else "", SECOND_TURN if turn == 2 else "", FORM]
    parts = [" ".join(filter(None, head))]
    for number in range(1, turn + 1):
        name = "" if turn == 1 else f" {number}"
        parts.append(_part(f"QUESTION{name}", question.turns[number - 1]))
        reference = question.references[number - 1]
        if reference is not None:
            parts.append(_part(f"REFERENCE ANSWER{name}", reference))
        parts.append(_part(f"REPLY{name}", answers[number - 1]))
    return "\n\n".join(parts)


def read_rating(text: str) -> float:
    """The rating in ``[[n]]``, behind a reasoning model's thoughts, which weigh several. Raises `UnreadableError` where
    there is none, where it is no number from 1 to 10, and where there are several that differ.
    """
    found = dict.fromkeys(given.strip() for given in RATING.findall(without_thoughts(text)))
    if not found:
        raise UnreadableError("it has no rating in the form [[n]]")
    if len(found) > 1:
        raise UnreadableError(f"it has {len(found)} different ratings ({', '.join(list(found)[:5])[:80]})")
    (given,) = found
    if not re.fullmatch(r"\d{1,2}(\.\d+)?", given):
        raise UnreadableError(f"the rating [[{given[:20]}]] is no number")
    rating = float(given)
    if not LOWEST <= rating <= HIGHEST:
        raise UnreadableError(f"the rating {given[:20]} is not between 1 and 10")
    return rating


def read_number(text: str) -> float:
    """The rating of a function, which may also return the bare number."""
    return read_rating(text if "[[" in text else f"[[{text.strip()}]]")


def _part(title: str, text: str) -> str:
    return f"=== {title} ===\n{text.strip() or '(empty)'}\n=== END OF {title} ==="
