"""Win rate against sampling temperature: a policy's responses against another model's, at each temperature.

At every temperature both models answered the same prompts. Whose response has the higher score wins (ties count half);
or a judge said who wins, and what `wpr judge` found is put together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wpr.analysis.context import AnalysisContext, Found
from wpr.config.monitors import GOLD, MonitorSettings
from wpr.config.recipe import WORDING, EvaluationSettings
from wpr.errors import OptionError, UnavailableError
from wpr.evaluation.judging.run_result import judged_pairs
from wpr.evaluation.monitors import make_monitor
from wpr.evaluation.scorers import make_scorer, score_responses
from wpr.evaluation.win_rate import win_rate
from wpr.findings import Cell, Figure, Finding, Mark, Series, found_in, slug
from wpr.runs.finished_run import REFERENCE
from wpr.runs.responses import Response, ResponseFile, drawn_at, read_responses

COLUMNS = ["model", "judged by", "temperature", "win rate", "low", "high", "p", "prompts"]

Scores = Mapping[tuple[str, float], Mapping[str, float]]
"""Scores by model and temperature, and there by prompt."""


@dataclass(frozen=True)
class WinRateAtTemperature:
    """A model against the other one at a temperature, with the 95% interval of its win rate."""

    model: str
    judge: str
    temperature: float
    rate: float
    low: float
    high: float
    p_value: float | None = None
    prompts: int | None = None


def analyze(context: AnalysisContext, against: str = REFERENCE, gold: bool = False, judged: bool = False) -> Found:
    """Win rates at each temperature that `wpr generate` drew responses at, by scores or (``judged``) by judges."""
    if gold and judged:
        raise OptionError("--gold and --judged name two judges; ask for one at a time")
    scores: Scores = {}
    try:
        if judged:
            comparisons = by_judges(found_in(context.run.path), against)
        else:
            scores, judge = _all_scores(context, gold)
            comparisons = by_scores(scores, against, judge)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    data = [
        {"model": model, "temperature": at, "prompt_id": prompt, "score": score}
        for (model, at), found in scores.items()
        for prompt, score in found.items()
    ]
    finding = temperature_finding(comparisons, against, context.settings())
    # Scores, gold scores and judges stand beside each other, and so do the models that others are compared with.
    parts = ["judged" if judged else "gold" if gold else "", "" if against == REFERENCE else f"over-{against}"]
    name = slug("-".join(["temperature", *filter(None, parts)]))
    title = finding.title + (", by judges" if judged else ", by the gold scorer" if gold else "")
    return replace(finding, name=name, title=title), data or [vars(one) for one in comparisons]


def _all_scores(context: AnalysisContext, gold: bool) -> tuple[dict[tuple[str, float], dict[str, float]], str]:
    """Scores of every file of responses, by model and temperature, and what gave them."""
    files = [read_responses(path) for path in sorted((context.run.path / "generations").glob("*.jsonl"))]
    if not files:
        raise UnavailableError(
            f"{context.run.path / 'generations'} has no responses; draw some with `wpr generate RUN -t 0.2 -t 0.5 -t 1`"
        )
    scorer, judge = _scorer(context, gold)
    scores = {}
    for file in files:
        context.say(f"scores of {file.path.name}")
        scores[_model_and_temperature(file)] = _scores(context, scorer, file.with_tokens(context.run.encoder))
    return scores, judge


def _model_and_temperature(file: ResponseFile) -> tuple[str, float]:
    """From the file's header, or from its name, ``MODEL-t0.5.jsonl``."""
    named = re.fullmatch(r"(.+)-t([0-9.e+-]+)", file.name)
    name = file.header.get("name") or (named[1] if named else None)
    drawn = drawn_at(file.header)
    drawn = file.rows[0].temperature if drawn is None else drawn
    if drawn is None and named:
        drawn = float(named[2])
    if name is None or drawn is None:
        raise ValueError(
            f"{file.path} tells neither in its header nor by its name which model drew it at which temperature; call "
            "it MODEL-t0.5.jsonl"
        )
    return str(name), float(drawn)


def _scorer(context: AnalysisContext, gold: bool) -> tuple[Any, str]:
    """What judges, and what it is called."""
    if gold:
        given = (context.run.recipe.get("evaluation") or {}).get("gold")
        if given is None:
            raise UnavailableError(f"{context.run.path} has no gold scorer (evaluation.gold)")
        monitor = EvaluationSettings(gold=MonitorSettings(**given) if isinstance(given, Mapping) else given).watched[
            GOLD
        ]
        return make_monitor(monitor, "evaluation.gold", context.run.device), "the gold scorer"
    settings, folder = context.run.scorer()
    if settings.kind == "function":
        return make_scorer(settings, folder), "the run's reward function"
    if settings.kind in WORDING:
        return make_scorer(settings, folder), f"the run's rule ({settings.kind})"
    if settings.kind != "model" or folder is None:
        raise UnavailableError("responses of code models are judged by their tests; use `wpr pass-at-1`")
    if Path(folder).parent.name == "reward" and not Path(folder).is_dir():
        raise UnavailableError(f"{folder} is missing: the run's reward model is not finished")
    return make_scorer(settings, folder).to(context.run.device), "the run's reward model"


def _scores(context: AnalysisContext, scorer: Any, rows: Sequence[Response]) -> dict[str, float]:
    """Scores by prompt."""
    values = score_responses(scorer, rows, context.run.device)
    return {row.prompt_id: value for row, value in zip(rows, values, strict=True) if not math.isnan(value)}


def by_scores(scores: Scores, against: str, judge: str) -> list[WinRateAtTemperature]:
    """Every model against ``against``, at the temperatures that both answered at, by the scores of their responses."""
    found = []
    for (model, temperature), ours in sorted(scores.items()):
        theirs = scores.get((against, temperature), {})
        shared = [prompt for prompt in ours if prompt in theirs]
        if model != against and shared:
            result = win_rate([ours[one] for one in shared], [theirs[one] for one in shared], groups=shared)
            ends = result.rate, result.low, result.high
            found.append(WinRateAtTemperature(model, judge, temperature, *ends, result.p_value, len(shared)))
    if not found:
        known = ", ".join(f"{model} at {at:g}" for model, at in scores)
        raise ValueError(
            f"no model answered the same prompts as {against} at the same temperature (there are {known}); run `wpr "
            "generate RUN -t 0.2 -t 0.5 -t 0.8 -t 1`"
        )
    return found


def by_judges(findings: Sequence[Finding], against: str) -> list[WinRateAtTemperature]:
    """What judges said of models against ``against``, either way round, at the same temperature of both."""
    either = [(one, one.turned()) for one in judged_pairs(findings)]
    found = [
        WinRateAtTemperature(seen.ours, seen.judge, seen.temperature, seen.win_rate, seen.low, seen.high, seen.p,
                             seen.prompts)
        for sides in either for seen in sides if seen.theirs == against
    ]  # fmt: skip
    if not found:
        raise ValueError(
            f"no finding of a judge compares a model with {against} at one temperature; judge responses that `wpr "
            f"generate` wrote, as in `wpr judge RUN --against {against}`"
        )
    return sorted(found, key=lambda one: (one.model, one.judge, one.temperature))


def temperature_finding(
    comparisons: Sequence[WinRateAtTemperature], against: str, settings: Mapping[str, Any] | None = None
) -> Finding:
    """The finding on models against one other."""
    judges = list(dict.fromkeys(one.judge for one in comparisons))
    lines: dict[str, list[WinRateAtTemperature]] = {}
    for one in comparisons:
        lines.setdefault(one.model if len(judges) == 1 else f"{one.model} ({one.judge})", []).append(one)
    series = [
        Series(
            name, [one.temperature for one in line], [one.rate for one in line], [one.low for one in line],
            [one.high for one in line],
        )
        for name, line in lines.items()
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [one.model, one.judge, one.temperature, one.rate, one.low, one.high, one.p_value, one.prompts]
        for one in comparisons
    ]
    return Finding(
        name="temperature",
        title=f"Win rate over {against} by temperature",
        text=_summary(lines, against, judges),
        columns=COLUMNS,
        rows=rows,
        figures=[
            Figure(
                "lines", f"Win rate over {against} by sampling temperature", "temperature", "win rate", series,
                marks=[Mark(0.5, "no difference")], name="win-rate",
            )
        ],
        settings={"against": against, "judged by": judges, **(settings or {})},
    )  # fmt: skip


def _summary(lines: Mapping[str, Sequence[WinRateAtTemperature]], against: str, judges: Sequence[str]) -> list[str]:
    sentences = [
        f"Responses to the same held-out prompts at the same temperature, judged by {' and '.join(judges)}, against "
        f"{against}."
    ]
    for name, line in lines.items():
        above = [f"{one.temperature:g}" for one in line if one.low > 0.5]
        below = [f"{one.temperature:g}" for one in line if one.high < 0.5]
        said = [f"wins at temperature {', '.join(above)}"] if above else []
        said += [f"loses at {', '.join(below)}"] if below else []
        verdict = " and ".join(said) if said else f"cannot be told apart from {against} at any"
        sentences.append(f"{name} {verdict} (of {', '.join(f'{one.temperature:g}' for one in line)}).")
    if any(judge.startswith("the run's reward") for judge in judges):
        sentences.append(
            "That is the score which training pushed up: a high rate shows that training worked, not more."
        )
    return sentences
