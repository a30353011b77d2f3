"""Two files of responses before a judge: the questions, and the verdicts that come of the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wpr.evaluation.judging.asking import JudgeResults
from wpr.evaluation.judging.comparison_plan import Comparison, ComparisonPlan
from wpr.evaluation.judging.questions import Answer, JudgingSettingsError, Question
from wpr.evaluation.judging.rubric import Rubric
from wpr.evaluation.judging.verdicts import LETTER, read_letter, read_object
from wpr.runs.responses import Response, ResponseFile

Winner = Literal["ours", "theirs", "tie"]
OUTCOMES: Mapping[str, float] = {"ours": 1.0, "tie": 0.5, "theirs": 0.0}


@dataclass(frozen=True)
class Pairing:
    """The prompts that two files both answer, by id. left_out: how many only one of them has."""

    ours: Mapping[str, Response]
    theirs: Mapping[str, Response]
    left_out: int


@dataclass(frozen=True)
class Judged:
    """A comparison and what the judge made of it. pair: names prompt and both responses, whatever their order."""

    comparison: Comparison
    answer: Answer
    pair: str

    @property
    def winner(self) -> Winner | None:
        """Whose response was chosen; None where there is no verdict."""
        choice = self.answer.value
        if choice is None:
            return None
        if choice == "E":
            return "tie"
        return "ours" if (choice == "A") == self.comparison.ours_first else "theirs"

    def as_dict(self) -> dict[str, Any]:
        """A line of ``data.jsonl``."""
        return {
            "draw": self.comparison.draw,
            "prompt_id": self.comparison.prompt_id,
            "first_place": "ours" if self.comparison.ours_first else "theirs",
            "status": self.answer.status,
            "choice": self.answer.value,
            "winner": self.winner,
            "reason": self.answer.reason,
            "texts": [reply.text for reply in self.answer.replies],
            "pair": self.pair,
        }


def pair_up(ours: ResponseFile, theirs: ResponseFile) -> Pairing:
    """Responses of two files to the same prompts. The same id with different prompts is refused."""
    one, other = ours.by_prompt(), theirs.by_prompt()
    both = [name for name in one if name in other]
    if not both:
        raise JudgingSettingsError(
            f"{ours.path} and {theirs.path} have no prompt_id in common; compare responses to the same prompts"
        )
    for name in both:
        if one[name].prompt != other[name].prompt:
            raise JudgingSettingsError(
                f"prompt_id {name!r} is another prompt in {ours.path} than in {theirs.path}; compare responses to the "
                "same prompts"
            )
    left_out = len(one) + len(other) - 2 * len(both)
    return Pairing({name: one[name] for name in both}, {name: other[name] for name in both}, left_out)


def questions_for(pairing: Pairing, protocol: ComparisonPlan, rubric: Rubric | None) -> dict[Comparison, Question]:
    """A question a comparison. Without a rubric they are for local judges, which get the prompt as the file has it."""
    questions = {}
    for comparison in protocol.comparisons(list(pairing.ours)):
        ours, theirs = (side[comparison.prompt_id] for side in (pairing.ours, pairing.theirs))
        first, second = (ours, theirs) if comparison.ours_first else (theirs, ours)
        fields = {"prompt": ours.prompt, "response_a": first.response, "response_b": second.response}
        if rubric is None:
            questions[comparison] = Question(comparison.id, (), fields, _read_either, LETTER)
        else:
            messages = rubric.messages({**fields, "prompt": as_text(ours.prompt)})  # type: ignore[dict-item]
            questions[comparison] = Question(comparison.id, messages, fields, rubric.read, rubric.form)
    return questions


def verdicts(pairing: Pairing, questions: Mapping[Comparison, Question], asked: JudgeResults) -> list[Judged]:
    """Comparisons with what became of them, in their order."""
    return [
        Judged(comparison, asked.answers[question.id], _pair(pairing, comparison.prompt_id))
        for comparison, question in questions.items()
    ]


def by_pair(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The verdict on each pair of responses in lines of ``data.jsonl``; a pair that was judged differently (in other
    places, or at another time) is a tie. Pairs without a verdict are left out.
    """
    found: dict[str, set[str]] = {}
    for row in rows:
        if row["winner"] is not None:
            found.setdefault(row["pair"], set()).add(row["winner"])
    return {pair: next(iter(winners)) if len(winners) == 1 else "tie" for pair, winners in found.items()}


def as_text(prompt: Any) -> str:
    """A prompt as a judge reads it: a text as it is, of a chat each turn under its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in prompt)


def _read_either(text: str) -> str:
    return read_object(text) if text.lstrip().startswith("{") else read_letter(text)


def _pair(pairing: Pairing, prompt_id: str) -> str:
    ours, theirs = pairing.ours[prompt_id], pairing.theirs[prompt_id]
    text = json.dumps([ours.prompt, ours.response, theirs.response])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
