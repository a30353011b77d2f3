"""What a judge is asked about one answer, and how its rating is read. The words are ours, the criteria MT-Bench's.

A file can have other words, MT-Bench's own for instance, which go in as they are: a template per turn, and one for
questions with reference answers, whose fields have MT-Bench's names.

    first:
      system: You are fair.                     left out if there is none
      user: "... [[rating]] ... {question} ... {answer}"
    second:
      user: "... {question_1} ... {answer_1} ... {question_2} ... {answer_2}"
    first_with_reference:                       left out, reference answers are not shown
      user: "... {question} ... {ref_answer_1} ... {answer}"
    second_with_reference:
      user: "... {question_1} ... {ref_answer_1} ... {answer_1} ... {question_2} ... {ref_answer_2} ... {answer_2}"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wpr.evaluation.judging.questions import JudgingSettingsError, Message, UnreadableError
from wpr.evaluation.judging.rubric import check_fields, check_keys, check_texts, keys_of, messages_of, text_of
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

BY_TURN = {1: ("question", "answer"), 2: ("question_1", "answer_1", "question_2", "answer_2")}
"""Fields that a template of the turn has to show,"""
REFERENCES = {1: ("ref_answer_1",), 2: ("ref_answer_1", "ref_answer_2")}
"""and those of reference answers; a template that is called so shows the last of them."""
WITH = "_with_reference"
TEMPLATES = {"first": 1, "second": 2, f"first{WITH}": 1, f"second{WITH}": 2}


@dataclass(frozen=True)
class Template:
    """One request. references: fields of reference answers that it shows."""

    user: str
    system: str | None = None
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradingRubric:
    """A rubric that was read. templates: by the names of `TEMPLATES`, those without references always."""

    name: str
    title: str
    templates: Mapping[str, Template]

    def messages(self, question: BenchQuestion, answers: tuple[str, str], turn: int) -> tuple[Message, ...]:
        """What is sent about the answer to turn 1 or 2: with reference answers if the question has all that the
        template shows.
        """
        known = dict(zip(REFERENCES[2], question.references, strict=True))
        name = "first" if turn == 1 else "second"
        template = self.templates.get(f"{name}{WITH}")
        if template is None or question.references[turn - 1] is None or None in map(known.get, template.references):
            template = self.templates[name]
        fields = {"question": question.turns[0], "answer": answers[0]}
        fields |= {f"question_{turn}": text for turn, text in enumerate(question.turns, 1)}
        fields |= {f"answer_{turn}": text for turn, text in enumerate(answers, 1)}
        fields |= {field: text for field, text in known.items() if text is not None}
        return messages_of(template.system, template.user, fields)


def load_grading_rubric(path: Path) -> GradingRubric:
    """Read a rubric's file and check it."""
    if not path.is_file():
        raise JudgingSettingsError(f"rubric {path} is no file; name a YAML file as in docs/generation.md")
    where, needs = str(path), "it needs first and second, see docs/generation.md"
    found = keys_of(text_of(path), where, ("title", *TEMPLATES), needs)
    check_texts(found, ["title"], where)
    for name in ("first", "second"):
        if name not in found:
            raise JudgingSettingsError(f"rubric {where} has no {name}; {needs}")
    templates = {name: _template(found[name], name, where) for name in TEMPLATES if name in found}
    return GradingRubric(path.stem, found.get("title") or path.stem, templates)


def _template(found: object, name: str, where: str) -> Template:
    turn, place = TEMPLATES[name], f"{where} ({name})"
    if not isinstance(found, dict) or "user" not in found:
        raise JudgingSettingsError(f"rubric {place} has no user; a template has the keys user and, if you like, system")
    check_keys(found, ("user", "system"), place)
    check_texts(found, ("user", "system"), place)
    text, shown = found["user"] + (found.get("system") or ""), REFERENCES[turn] if name.endswith(WITH) else ()
    used = check_fields(text, (*BY_TURN[turn], *shown), (*BY_TURN[turn], *shown[-1:]), place)
    if "[[" not in text:
        raise JudgingSettingsError(
            f"rubric {place} does not ask for a rating in double brackets, which is what is read; ask for it in the "
            "form Rating: [[5]]"
        )
    return Template(found["user"].strip() + "\n", found.get("system"), tuple(one for one in shown if one in used))


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
