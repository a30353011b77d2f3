"""Analyses of what a run recorded, and of responses that `wpr generate` wrote: costs, sensitivity, temperature."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wpr.commands.analyses import AnalysisContext, Found, UnavailableError
from wpr.errors import OptionError
from wpr.findings import found_in, slug
from wpr.runs.finished_run import REFERENCE, FinishedRun


def costs(context: AnalysisContext) -> Found:
    """Time and memory of the stages and of PPO's parts."""
    from wpr.analysis.costs import cost_finding
    from wpr.report.costs import seconds_a_step
    from wpr.report.runs import read_runs
    from wpr.runs.read_problems import Problems

    problems = Problems()
    (run,) = read_runs([context.run.path], problems)
    for problem in problems.of("metrics.jsonl"):
        context.say(f"Note: {problem}")
    stages = [
        (name, str(record["status"]), record.get("seconds"), record.get("peak_memory_gb"))
        for name, record in context.run.manifest["stages"].items()
    ]
    steps = {policy.own_name: found for policy in run.policies if (found := seconds_a_step(policy))}
    try:
        finding = cost_finding(stages, steps, {"run": context.run.path.resolve().name})
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    data = [{"stage": stage[0], "seconds": stage[2], "peak_memory_gb": stage[3]} for stage in stages]
    return finding, [*data, *({"policy": policy} | found for policy, found in steps.items())]


def sensitivity(context: AnalysisContext, others: Sequence[FinishedRun] = ()) -> Found:
    """What policies reached against the setting in which they differ, of this run and of others like it."""
    from wpr.analysis.sensitivity import sensitivity_finding

    runs = [context.run, *others]
    members = [
        _member(run, policy, f"{run.path.resolve().name}: {policy}" if len(runs) > 1 else policy)
        for run in runs
        for policy in run.finished
    ]
    try:
        finding = sensitivity_finding(members, {"runs": [str(run.path.resolve().name) for run in runs]})
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    return finding, (dict(vars(member)) for member in members)


def _member(run: FinishedRun, policy: str, name: str) -> Any:
    from wpr.analysis.sensitivity import METRICS, Member

    record = run.manifest["stages"][f"ppo/{policy}"]
    inputs, results = record["inputs"], record["results"]
    settings = {
        f"{section}.{key}": value for section in ("ppo", "regularizer") for key, value in inputs[section].items()
    }
    settings |= {key: value for key, value in inputs.items() if key not in ("ppo", "regularizer")}
    after = results.get("after") or {}
    known = {metric: after.get(metric) for metric in METRICS}
    known |= {metric: results.get(f"{metric}_before") for metric in ("win_rate", "gold_win_rate")}
    intervals = {}
    for metric in ("win_rate", "gold_win_rate"):
        ends = results.get(f"{metric}_before_interval")
        if ends:
            intervals[metric] = (float(ends["low"]), float(ends["high"]))
    return Member(name, settings, {key: float(value) for key, value in known.items() if value is not None}, intervals)


def temperature(context: AnalysisContext, against: str = REFERENCE, gold: bool = False, judged: bool = False) -> Found:
    """Win rates at each temperature that `wpr generate` drew responses at, by scores or (``judged``) by judges."""
    from wpr.analysis.temperature import by_judges, by_scores, temperature_finding

    if gold and judged:
        raise OptionError("--gold and --judged name two judges; ask for one at a time")
    data: list[dict[str, Any]] = []
    try:
        if judged:
            comparisons = by_judges(found_in(context.run.path), against)
        else:
            scores, judge = _all_scores(context, gold)
            data = [
                {"model": model, "temperature": at, "prompt_id": prompt, "score": score}
                for (model, at), found in scores.items()
                for prompt, score in found.items()
            ]
            comparisons = by_scores(scores, against, judge)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    finding = temperature_finding(comparisons, against, context.settings())
    # Scores, gold scores and judges stand beside each other, and so do the models that others are compared with.
    parts = ["judged" if judged else "gold" if gold else "", "" if against == REFERENCE else f"over-{against}"]
    name = slug("-".join(["temperature", *filter(None, parts)]))
    title = finding.title + (", by judges" if judged else ", by the gold scorer" if gold else "")
    return replace(finding, name=name, title=title), data or [vars(one) for one in comparisons]


def _all_scores(context: AnalysisContext, gold: bool) -> tuple[dict[tuple[str, float], dict[str, float]], str]:
    """Scores of every file of responses, by model and temperature, and what gave them."""
    from wpr.runs.responses import read_responses

    files = [read_responses(path) for path in sorted((context.run.path / "generations").glob("*.jsonl"))]
    if not files:
        raise UnavailableError(
            f"{context.run.path / 'generations'} has no responses; draw some with `wpr generate RUN -t 0.2 -t 0.5 -t 1`"
        )
    scorer, judge = _scorer(context, gold)
    scores = {}
    for file in files:
        context.say(f"scores of {file.path.name}")
        scores[_model_and_temperature(file)] = _scores(context, scorer, file.rows)
    return scores, judge


def _model_and_temperature(file: Any) -> tuple[str, float]:
    """From the file's header, or from its name, ``MODEL-t0.5.jsonl``."""
    from wpr.runs.responses import drawn_at

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
    from wpr.config.functions import import_function
    from wpr.rewards import FunctionReward, RewardModel

    if gold:
        function = (context.run.recipe.get("evaluation") or {}).get("gold")
        if function is None:
            raise UnavailableError(f"{context.run.path} has no gold scorer (evaluation.gold)")
        return FunctionReward(import_function(function, "evaluation.gold")), "the gold scorer"
    settings, folder = context.run.scorer()
    if settings.kind == "function":
        assert settings.function is not None
        return FunctionReward(import_function(settings.function, "scorer.function")), "the run's reward function"
    if settings.kind != "model" or folder is None:
        raise UnavailableError("responses of code models are judged by their tests; use `wpr pass-at-1`")
    if Path(folder).parent.name == "reward" and not Path(folder).is_dir():
        raise UnavailableError(f"{folder} is missing: the run's reward model is not finished")
    return RewardModel.from_pretrained(folder).to(context.run.device), "the run's reward model"


def _scores(context: AnalysisContext, scorer: Any, rows: Sequence[Any], size: int = 32) -> dict[str, float]:
    """Scores by prompt."""
    import torch

    from wpr.rewards import Completions

    found: dict[str, float] = {}
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        answers = [context.run.answer_of(row, index) for index, row in enumerate(part)]
        tokens = [[*answer.prompt_ids, *answer.response_ids] for answer in answers]
        width = max(map(len, tokens))
        ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in tokens], device=context.run.device)
        last = torch.tensor([len(one) - 1 for one in tokens], device=context.run.device)
        mask = (torch.arange(width, device=context.run.device) <= last.unsqueeze(-1)).long()
        prompts, responses = [row.prompt for row in part], [row.response for row in part]
        values = scorer(Completions(prompts, responses, ids, mask, last))
        found |= {row.prompt_id: float(value) for row, value in zip(part, values.tolist(), strict=True)}
    return found
