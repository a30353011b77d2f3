"""What `wpr analyze` does: each analysis with a run's models and responses, to a finding and the data behind it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wpr.errors import OptionError, RunFolderError
from wpr.findings import Finding
from wpr.model_geometry import RegularizerFactory, measure_vocabulary
from wpr.regularizers.spec import SIDE_BY_SIDE
from wpr.runs.drawn_responses import DrawnResponses
from wpr.runs.finished_run import AFTER, BEFORE, REFERENCE, FinishedRun, retokenized

if TYPE_CHECKING:
    from wpr.analysis.answers import TokenPenalties

Found = tuple[Finding, Iterable[Mapping[str, Any]]]
"""A finding, and the single measurements behind it, one a line of its data file."""


class UnavailableError(RunFolderError):
    """The run does not have what an analysis needs."""


@dataclass
class AnalysisContext:
    """A run to be looked into.

    policies: that are asked for; None: all that are finished. limit: responses of a policy at most.
    batch_size: sequences a forward pass. say: told what is being done.
    temperature: of the responses that `wpr generate` drew, which are looked at; None looks at those that the run drew
    when it measured its policies.
    """

    run: FinishedRun
    policies: Sequence[str] | None = None
    limit: int | None = None
    batch_size: int = 8
    say: Callable[[str], None] = field(default=lambda text: None)
    temperature: float | None = None
    _measured: dict[str, tuple[list[Any], TokenPenalties]] = field(default_factory=dict)
    _responses: dict[tuple[str, str], list[Any]] = field(default_factory=dict)

    @property
    def chosen(self) -> list[str]:
        """Policies by name."""
        if not self.run.finished:
            raise UnavailableError(f"{self.run.path} has no finished policy; let `wpr run` finish one first")
        return self.run.choose(self.policies)

    def responses(self, policy: str, file: str = AFTER) -> list[Any]:
        """A policy's responses to held-out prompts (``file`` `BEFORE`: the reference's), empty ones too. They are read
        once; those that `wpr generate` drew from the reference serve all policies.
        """
        drawn = self.temperature is not None
        of = REFERENCE if drawn and file == BEFORE else policy
        if (of, file) not in self._responses:
            self._responses[of, file] = self._drawn_from(of) if drawn else self._measured_by(policy, file)
        return self._responses[of, file]

    def _drawn_from(self, model: str) -> list[Any]:
        try:
            return self.drawn.answers(model)
        except RunFolderError as error:
            raise UnavailableError(str(error)) from None

    def _measured_by(self, policy: str, file: str) -> list[Any]:
        if not (self.run.path / "ppo" / policy / file).is_file():
            raise UnavailableError(
                f"ppo/{policy}/{file} is missing: the run measured no held-out responses (evaluation.prompts)"
            )
        return self.run.answers(policy, file)

    def answers(self, policy: str, file: str = AFTER) -> list[Any]:
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

    def measured(self, names: Sequence[str]) -> dict[str, tuple[list[Any], TokenPenalties]]:
        """Each policy's responses, and the penalties of their tokens by regularizers of these names. What was measured
        before is not measured again.
        """
        from wpr.analysis.answers import token_penalties

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
        import torch

        seen: dict[tuple[int, ...], None] = {}
        for policy in self.run.finished:
            if (self.run.path / "ppo" / policy / AFTER).is_file():
                for answer in self.run.answers(policy):
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
    told = [f"The responses are those of generations/*-t{at}.jsonl, which `wpr generate` draws at temperature {at}."]
    ways = {name: json.dumps(way, sort_keys=True) for name, way in drawn.sampling().items() if way is not None}
    if len(set(ways.values())) > 1:
        listed = "; ".join(f"{name} {way}" for name, way in ways.items())
        told.append(f"They were not all drawn alike ({listed}): differences may be those of sampling.")
    silent = [name for name in drawn.sampling() if name not in ways]
    if silent:
        told.append(f"How they were drawn is not told by the files of {', '.join(silent)}.")
    return replace(noted(finding, *told), name=f"{finding.name}-t{at}", title=f"{finding.title}, temperature {at}")


def noted(finding: Finding, *notes: str) -> Finding:
    """The finding with more to say."""
    return replace(finding, text=[*finding.text, *notes])


def penalties(context: AnalysisContext, first: str, second: str, betas: tuple[float, float] = (1.0, 1.0)) -> Found:
    """One penalty against another, token by token."""
    from wpr.analysis.penalties import compare_penalties

    if first == second:
        raise OptionError(f"both regularizers are {first}; name two different ones")
    found = context.measured([first, second])
    everything = [answer for answers, _ in found.values() for answer in answers]
    measured = {policy: each for policy, (_, each) in found.items()}
    prompts = {policy: [answer.number for answer in answers] for policy, (answers, _) in found.items()}
    finding = compare_penalties(measured, first, second, prompts, betas, context.settings())
    return noted(finding, *context.regularizers.notes([first, second]), retokenized(everything)), _by_answer(found)


def _by_answer(found: Mapping[str, tuple[list[Any], Any]]) -> Iterable[dict[str, Any]]:
    """Penalties of each response's tokens, a line a response."""
    for policy, (answers, measured) in found.items():
        for index, answer in enumerate(answers):
            of = measured.answer == index
            values = {name: [_short(value) for value in each[of].tolist()] for name, each in measured.penalty.items()}
            yield {"policy": policy, "number": answer.number, "tokens": answer.response_ids, "penalties": values}


def similarity(
    context: AnalysisContext, encoder: str | None = None, layer: int = -1, regularizers: Sequence[str] = SIDE_BY_SIDE
) -> Found:
    """Negative penalties against BERTScore between reference and policy responses."""
    from wpr.analysis.bert_score import ContextualEncoder, bert_score
    from wpr.analysis.similarity import Pair, similarity_finding

    policies = context.chosen
    for policy in policies:
        context.answers(policy, BEFORE)  # an error now rather than after all penalties
    before = {policy: {one.number: one for one in context.responses(policy, BEFORE)} for policy in policies}
    try:
        reader = ContextualEncoder.from_pretrained(encoder or context.run.sft_model, layer, context.run.device)
    except ValueError as error:
        raise OptionError(str(error)) from None
    measured = context.measured(regularizers)
    cut = 0
    alike: dict[str, list[Any]] = {}
    missing, alone = 0, 0
    for policy, (answers, found) in measured.items():
        context.say(f"similarity of {policy}'s responses")
        kept = [(index, answer) for index, answer in enumerate(answers) if answer.number in before[policy]]
        alone += len(answers) - len(kept)
        ours, cut_ours = reader.embed([answer.response for _, answer in kept])
        theirs, cut_theirs = reader.embed([before[policy][answer.number].response for _, answer in kept])
        cut += cut_ours + cut_theirs
        means = {
            kind: {name: found.means(values, len(answers)) for name, values in getattr(found, kind).items()}
            for kind in ("penalty", "divergence")
        }
        alike[policy] = []
        for (index, answer), one, other in zip(kept, ours, theirs, strict=True):
            score = bert_score(one, other)
            if score is None:
                missing += 1
                continue
            each = ({name: float(values[index]) for name, values in means[kind].items()} for kind in means)
            alike[policy].append(Pair(answer.number, score, len(answer.response_ids), *each))
    notes = [
        *context.regularizers.notes(regularizers),
        retokenized([answer for answers, _ in measured.values() for answer in answers]),
    ]
    if encoder is None:
        notes.append(
            "The embeddings are hidden states of the run's own SFT model, which is close to the policies: name an "
            "independent encoder with --encoder FOLDER before drawing conclusions."
        )
    if alone:
        notes.append(f"{alone} responses are to prompts that the reference did not answer, and are left out.")
    if missing:
        notes.append(f"{missing} pairs have an empty response, hence no similarity, and are left out.")
    if cut:
        notes.append(f"{cut} responses are longer than the encoder reads; what is beyond is not compared.")
    name = "the run's SFT model" if encoder is None else "/".join(Path(encoder).parts[-2:])
    settings = context.settings(encoder_path=encoder or "sft", layer=layer)
    try:
        finding = similarity_finding(alike, list(dict.fromkeys(regularizers)), name, notes, settings)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    return finding, ({"policy": policy} | pair.as_dict() for policy, pairs in alike.items() for pair in pairs)


def coherence(context: AnalysisContext, top: int = 10, metric: str = "euclidean") -> Found:
    """Distances between the likeliest candidates of each model."""
    import torch

    from wpr.analysis.answers import positions
    from wpr.analysis.coherence import Candidates, candidate_distances, coherence_finding
    from wpr.transport.distances import METRICS
    from wpr.transport.geometry import input_embeddings

    policies = context.chosen
    start = context.answers(policies[0], BEFORE)
    if metric not in METRICS:
        raise OptionError(f"--metric {metric} must be {' or '.join(METRICS)}")
    reference = context.reference
    embeddings, distance = input_embeddings(reference), METRICS[metric]
    if top > len(embeddings):
        raise OptionError(f"--top {top} exceeds the vocabulary ({len(embeddings)} tokens)")

    def measure(model: Any, answers: list[Any]) -> Candidates:
        parts = []
        numbers = torch.tensor([answer.number for answer in answers], device=context.run.device)
        for part in positions(model, model, answers, batch_size=context.batch_size):
            parts.append((numbers[part.answer], *candidate_distances(part.policy, embeddings, distance, top)))
        return Candidates(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))

    context.say(f"candidates of {REFERENCE}")
    own = {REFERENCE: measure(reference, start)}
    shared = dict(own)
    for policy in policies:
        context.say(f"candidates of {policy}")
        model = context.run.load(policy)
        own[policy], shared[policy] = measure(model, context.answers(policy)), measure(model, start)
    finding = coherence_finding(own, shared, metric, top, context.settings())
    data = (
        {"model": name, "text": text, "number": number, "distance": _short(plain), "weighted": _short(weighted)}
        for text, group in (("own", own), ("reference", shared))
        for name, found in group.items()
        for number, plain, weighted in zip(
            found.prompt.tolist(), found.distance.tolist(), found.weighted.tolist(), strict=True
        )
    )
    return finding, data


def convergence(
    context: AnalysisContext, regularizers: Sequence[str] = ("paper", "semantic"), count: int = 32
) -> Found:
    """Errors of the solver by iteration, at positions drawn evenly from the policies' responses."""
    import torch

    from wpr.analysis.answers import positions
    from wpr.analysis.convergence import convergence_curve, convergence_finding
    from wpr.regularizers import Wasserstein

    policies = context.chosen
    solvers = context.regularizers.make_all(regularizers)
    for name, one in solvers.items():
        if not isinstance(one, Wasserstein):
            raise OptionError(
                f"{name} has no solver to iterate; name Wasserstein settings, as paper or semantic:lam=10"
            )
    sampled = []
    each = max(1, count // len(policies))
    for policy in policies:
        answers = context.answers(policy)
        total = sum(len(answer.response_ids) for answer in answers)
        wanted = set(torch.linspace(0, total - 1, min(each, total)).long().tolist())
        model, seen = context.run.load(policy), 0
        for part in positions(model, context.reference, answers, context.run.temperature(policy), context.batch_size):
            rows = torch.tensor(sorted(place - seen for place in wanted if 0 <= place - seen < len(part.tokens)))
            seen += len(part.tokens)
            if len(rows):
                rows = rows.to(part.tokens.device)
                sampled.append((part.policy[rows].double(), part.reference[rows].double(), part.tokens[rows]))
    logits = [torch.cat(column) for column in zip(*sampled, strict=True)]
    curves = {}
    for name, solver in solvers.items():
        context.say(f"{name} at {len(logits[2])} positions")
        curves[name] = convergence_curve(solver, solver.support(*logits))
    finding = convergence_finding(curves, context.settings(positions=len(logits[2])))
    data = (
        {"setting": name, "iterations": step, "position": position, "marginal_error": error, "change": change,
         "penalty_error": off}
        for name, curve in curves.items()
        for row, step in enumerate(curve.steps)
        for position, (error, change, off) in enumerate(
            zip(curve.marginal_error[row].tolist(), curve.change[row].tolist(), curve.penalty_error[row].tolist(),
                strict=True)
        )
    )  # fmt: skip
    return noted(finding, *context.regularizers.notes(regularizers)), data


def contrast(context: AnalysisContext, regularizers: Sequence[str] = SIDE_BY_SIDE, count: int = 256) -> Found:
    """Semantic contrast of regularizers, and of what each policy was trained under, on the reference model."""
    from wpr.analysis.contrast import contrast_finding
    from wpr.analysis.semantic_contrast import continuations, make_trial
    from wpr.transport.geometry import input_embeddings

    prompts = context.texts()
    if not prompts:
        raise UnavailableError(f"{context.run.path} has no held-out responses, whose prompts are continued")
    made = context.regularizers.make_all(regularizers)
    for policy in context.run.finished if context.policies is None else context.chosen:
        made[f"policy {policy}"] = context.regularizers.make(context.run.regularizer(policy), f"policy {policy}")
    context.say(f"continuations of {len(prompts)} prompts")
    logs = continuations(context.reference, prompts, 32)
    geometry = next((one.geometry for one in made.values() if hasattr(one, "geometry")), None)
    if geometry is None:
        geometry = measure_vocabulary(input_embeddings(context.reference))
    try:
        trial = make_trial(logs, geometry, count)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    finding, data = contrast_finding(made, trial, "the SFT model", context.settings())
    return noted(finding, *context.regularizers.notes(made)), data


def case_study(
    context: AnalysisContext, prompt: str | None = None, regularizer: str = "semantic", tokens: int = 64
) -> Found:
    """The likeliest response of each policy to one prompt, token by token."""
    import torch

    from wpr.analysis.case_study import study_response
    from wpr.analysis.case_table import case_finding
    from wpr.regularizers import ReverseKL, Wasserstein

    policies = context.chosen
    if prompt is None:
        first = context.answers(policies[0])[0]
        ids, shown = first.prompt_ids, context.run.tokenizer.decode(first.prompt_ids, skip_special_tokens=True)
    else:
        ids, shown = context.run.prompt_ids(prompt), prompt
    if not ids:
        raise OptionError("the prompt has no tokens; write one with --prompt TEXT")
    wasserstein = context.regularizers.make_all([regularizer])[regularizer]
    if not isinstance(wasserstein, Wasserstein):
        raise OptionError(f"{regularizer} moves no mass; name a Wasserstein setting, as semantic or paper")
    studies = {}
    for policy in policies:
        context.say(f"{policy} answers")
        model = context.run.load(policy)
        given = torch.tensor([ids], device=context.run.device)
        stops = sorted({context.run.encoder.end_id, context.run.tokenizer.eos_token_id})
        drawn = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
            eos_token_id=stops, pad_token_id=context.run.tokenizer.pad_token_id,
        )[0, len(ids) :].tolist()  # fmt: skip
        studies[policy] = study_response(
            model, context.reference, context.run.tokenizer, ids, drawn, ReverseKL(), wasserstein,
            temperature=context.run.temperature(policy),
        )  # fmt: skip
    finding = case_finding(studies, shown.strip(), regularizer, context.settings(tokens=tokens))
    return noted(finding, *context.regularizers.notes([regularizer])), (
        {"policy": policy} | study for policy, study in studies.items()
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")
