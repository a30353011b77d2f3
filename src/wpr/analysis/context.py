"""What every analysis is given: a run's models, its responses, and penalties that were measured on them.

An analysis is a file of this package with a function ``analyze(context, ...)``, which returns a finding and the single
measurements behind it (`Found`); `wpr.commands.analyze` registers it as a command.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from wpr.analysis.answers import TokenPenalties, token_penalties
from wpr.errors import RunFolderError, UnavailableError
from wpr.findings import Finding
from wpr.model_geometry import RegularizerFactory
from wpr.runs.drawn_responses import DrawnResponses
from wpr.runs.finished_run import REFERENCE, FinishedRun
from wpr.runs.responses import AFTER, BEFORE, Response

Found = tuple[Finding, Iterable[Mapping[str, Any]]]
"""A finding, and the single measurements behind it, one per line of its data file."""


@dataclass
class AnalysisContext:
    """A run to be analyzed.

    policies: that are asked for; None: all that are finished. limit: responses per policy at most.
    batch_size: sequences per forward pass. say: is given messages on what is being done.
    temperature: of the responses that `wpr generate` drew; None takes those that the run drew when it measured its
    policies.
    """

    run: FinishedRun
    policies: Sequence[str] | None = None
    limit: int | None = None
    batch_size: int = 8
    say: Callable[[str], None] = field(default=lambda text: None)
    temperature: float | None = None
    _measured: dict[str, tuple[list[Response], TokenPenalties]] = field(default_factory=dict)
    _responses: dict[tuple[str, str], list[Response]] = field(default_factory=dict)

    @property
    def chosen(self) -> list[str]:
        """Policies by name."""
        if not self.run.finished:
            raise UnavailableError(f"{self.run.path} has no finished policy; let `wpr run` finish one first")
        return self.run.choose(self.policies)

    def responses(self, policy: str, file: str = AFTER) -> list[Response]:
        """A policy's responses to held-out prompts (``file`` `BEFORE`: the reference's), empty ones too. They are read
        once; those that `wpr generate` drew from the reference serve all policies.
        """
        drawn = self.temperature is not None
        of = REFERENCE if drawn and file == BEFORE else policy
        if (of, file) not in self._responses:
            self._responses[of, file] = self._drawn_from(of) if drawn else self._measured_by(policy, file)
        return self._responses[of, file]

    def _drawn_from(self, model: str) -> list[Response]:
        try:
            return self.drawn.responses(model)
        except RunFolderError as error:
            raise UnavailableError(str(error)) from None

    def _measured_by(self, policy: str, file: str) -> list[Response]:
        if not (self.run.path / "ppo" / policy / file).is_file():
            raise UnavailableError(
                f"ppo/{policy}/{file} is missing: the run measured no held-out responses (evaluation.prompts)"
            )
        return self.run.responses(policy, file)

    def answers(self, policy: str, file: str = AFTER) -> list[Response]:
        """Those of the first `limit` that have tokens."""
        responses = self.responses(policy, file)[: self.limit]
        found = [answer for answer in responses if answer.response_ids]
        if not found:
            model = REFERENCE if file == BEFORE else policy
            drawn = self.temperature is not None
            where = f"generations/{model}-t{self.temperature:g}.jsonl" if drawn else f"ppo/{policy}/{file}"
            if not responses:
                raise UnavailableError(
                    f"{self.run.path / where} has no lines: all responses were left out for faults (see faults/), or "
                    "the file was cut off; restore it from a copy, or look at another with --policy"
                )
            raise UnavailableError(
                f"all responses in {where} are empty, and there is no token to look at; train {model} so that it does "
                "not end at once (ppo.min_new_tokens), or look at another with --policy"
            )
        return found

    @cached_property
    def drawn(self) -> DrawnResponses:
        """What `wpr generate` drew at the temperature."""
        assert self.temperature is not None
        return DrawnResponses(self.run, self.temperature)

    @cached_property
    def reference(self) -> Any:
        """The model that policies started from."""
        return self.run.load(REFERENCE)

    @cached_property
    def regularizers(self) -> RegularizerFactory:
        """On the reference's embeddings."""
        return RegularizerFactory(self.reference)

    def measured(self, names: Sequence[str]) -> dict[str, tuple[list[Response], TokenPenalties]]:
        """Each policy's responses, and the penalties of their tokens by regularizers of these names. What was measured
        before is not measured again.
        """
        policies = self.chosen  # before anything large is loaded
        made = self.regularizers.make_all(names)
        for policy in policies:
            answers, known = self._measured.get(policy) or (self.answers(policy), None)
            missing = {name: one for name, one in made.items() if known is None or name not in known.penalty}
            if missing:
                self.say(f"penalties of {policy}'s {len(answers)} responses: {', '.join(missing)}")
                model, at = self.run.load(policy), self.run.temperature(policy)
                found = token_penalties(model, self.reference, answers, missing, at, self.batch_size)
                self._measured[policy] = answers, found if known is None else known.joined(found)
        return {policy: self._measured[policy] for policy in policies}

    def texts(self, prompts: int = 24) -> list[Any]:
        """Token ids of the first held-out prompts, each once; none where the run kept no responses."""
        seen: dict[tuple[int, ...], None] = {}
        for policy in self.run.finished:
            if (self.run.path / "ppo" / policy / AFTER).is_file():
                for answer in self.run.responses(policy):
                    seen.setdefault(tuple(answer.prompt_ids))
        return [torch.tensor(ids) for ids in itertools.islice(seen, prompts)]

    def settings(self, **more: Any) -> dict[str, Any]:
        """What a finding is said to be made with."""
        made = {"run": self.run.path.resolve().name, "device": str(self.run.device), "limit": self.limit, **more}
        if self.temperature is None:
            return made
        return made | {"temperature": self.temperature, "drawn": self.drawn.sampling()}


def at_temperature(finding: Finding, drawn: DrawnResponses) -> Finding:
    """The finding as one on responses that `wpr generate` drew, under a name of its own."""
    at = f"{drawn.temperature:g}"
    notes = [f"The responses are those of generations/*-t{at}.jsonl, which `wpr generate` draws at temperature {at}."]
    ways = {name: json.dumps(way, sort_keys=True) for name, way in drawn.sampling().items() if way is not None}
    if len(set(ways.values())) > 1:
        listed = "; ".join(f"{name} {way}" for name, way in ways.items())
        notes.append(f"They were not all drawn alike ({listed}): differences may be those of sampling.")
    silent = [name for name in drawn.sampling() if name not in ways]
    if silent:
        notes.append(f"How they were drawn is not told by the files of {', '.join(silent)}.")
    return replace(noted(finding, *notes), name=f"{finding.name}-t{at}", title=f"{finding.title}, temperature {at}")


def noted(finding: Finding, *notes: str) -> Finding:
    """The finding with more to say."""
    return replace(finding, text=[*finding.text, *notes])


def six_digits(value: float) -> float:
    """A measurement as data files have it."""
    return float(f"{value:.6g}")
