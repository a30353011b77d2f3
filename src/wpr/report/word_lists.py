"""Lists of forbidden words that policies were trained on, and what their responses made of these words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy, Problems
from wpr.runs.values import as_text, mapping

if TYPE_CHECKING:
    from wpr.report.replaced_words import Outcome, Rewrite
    from wpr.rewards.words import WordTable

KINDS = {"meaning": "meaning", "words-kept": "words kept", "copies": "copies"}
"""Monitors that compare a response with its source, and what tables call them."""

ENCODERS = {"wordllama": "WordLlama", "minilm": "MiniLM"}
"""Names of encoders as they are written."""

LOST = "its wording is not shown; run the policy's stage again to write the list again"


@dataclass
class ForbiddenWords:
    """A list, and the policies that were trained on it.

    column: of the data, where responses have their source. watched: scores that compare responses with their sources,
    by name: the kind, and a title.
    """

    table: WordTable
    column: str
    watched: Mapping[str, tuple[str, str]]
    policies: list[Policy] = field(default_factory=list)

    @cached_property
    def sources(self) -> list[str]:
        """The held-out sentences, each once, in their order."""
        rows = [row for policy in self.policies for row in (*policy.responses, *policy.before)]
        texts = [self.source(row) for row in sorted(rows, key=lambda row: row.number)]
        return [text for text in dict.fromkeys(texts) if text]

    @property
    def unit(self) -> str:
        """What responses are: rewritten sentences, or texts of their own."""
        return "sentence" if self.sources else "response"

    @cached_property
    def counts(self) -> dict[str, int]:
        """How often each entry stands in the sources, or in what the SFT model wrote where there are none; the most
        frequent first.
        """
        texts = self.sources or [row.response for _, rows in self.starts for row in rows]
        found = Counter({entry.text: 0 for entry in self.table.entries})
        found.update(entry.text for text in texts for entry, _, _ in self.table.find(text))
        return dict(found.most_common())

    @property
    def at_stake(self) -> bool:
        """Whether a policy could do anything about a forbidden word: none may stand in the sentences."""
        return not self.sources or any(self.counts.values())

    @property
    def starts(self) -> list[tuple[str, list[Response]]]:
        """Responses of each run's SFT model, by the run's name."""
        found = {policy.run.name: policy.before for policy in reversed(self.policies) if policy.before}
        return list(reversed(found.items()))

    @property
    def meaning(self) -> str | None:
        """The first score of how much meaning is kept."""
        return next((name for name, (kind, _) in self.watched.items() if kind == "meaning"), None)

    def source(self, row: Response) -> str:
        """The sentence that a response rewrites; nothing where it is not known."""
        if self.column != "prompt":
            return as_text(row.columns.get(self.column)).strip()
        turns = row.prompt if isinstance(row.prompt, list) else []
        return as_text(mapping(turns[-1]).get("content") if turns else row.prompt).strip()

    def per_text(self, texts: Sequence[str]) -> float | None:
        """Forbidden words per text, each as often as it stands there."""
        return sum(len(self.table.find(text)) for text in texts) / len(texts) if texts else None

    def rewrite(self, row: Response) -> Rewrite:
        """A response aligned with its source."""
        from wpr.report.replaced_words import Rewrite  # wpr.rewards needs torch; reading a run does not

        return Rewrite(self.source(row), row.response.strip())

    @cached_property
    def outcomes(self) -> dict[str, list[tuple[Response, Outcome]]]:
        """What became of the sources' forbidden words, by policy."""
        return {
            policy.name: [
                (row, outcome)
                for row in policy.responses
                if self.source(row)
                for outcome in self.rewrite(row).outcomes(self.table)
            ]
            for policy in self.policies
        }


def read_word_lists(policies: Sequence[Policy], problems: Problems) -> list[ForbiddenWords]:
    """The lists that policies have and that can be read; equal ones once, if the same is watched."""
    found: dict[Any, ForbiddenWords] = {}
    for policy in policies:
        path = policy.folder / "words.txt"
        if not has_word_list(policy) or not (path.exists() or policy.responses):
            continue  # a stage that is not begun has no list yet
        if not path.exists():
            problems.add(path, "is missing", LOST)
            continue
        from wpr.rewards.words import WordListError, WordTable, read_entries  # as above

        try:
            table = WordTable(read_entries(path))
        except WordListError as error:
            problems.add(path, f"is not a list of words ({error})", LOST)
            continue
        column, watched = _watched(mapping(policy.run.recipe.get("evaluation")))
        key = (frozenset((entry.text, entry.weight) for entry in table.entries), column, tuple(watched.items()))
        found.setdefault(key, ForbiddenWords(table, column, watched)).policies.append(policy)
    return list(found.values())


def has_word_list(policy: Policy) -> bool:
    """Whether it was trained on a list of forbidden words, as far as its run tells."""
    scorer = mapping(policy.run.recipe.get("scorer"))
    named = scorer.get("kind") == "words" and scorer.get("words") is not None
    return named or (policy.folder / "words.txt").exists()


def _watched(evaluation: Mapping[str, Any]) -> tuple[str, dict[str, tuple[str, str]]]:
    """`ForbiddenWords.column` and `ForbiddenWords.watched`, by the settings of an evaluation."""
    column, found = "", {}
    for name, value in {"gold": evaluation.get("gold"), **mapping(evaluation.get("monitors"))}.items():
        own = mapping(value)
        kind, encoder = as_text(own.get("kind")), as_text(own.get("encoder"))
        if kind in KINDS:
            column = column or as_text(own.get("of"))
            by = f" ({ENCODERS.get(encoder, encoder)})" if encoder else ""
            found[name] = (kind, f"{KINDS[kind]}{by}")
    return column or "source", found
