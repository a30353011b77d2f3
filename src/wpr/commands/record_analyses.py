"""Analysis of what a run recorded: costs."""

from __future__ import annotations

from wpr.analysis.context import AnalysisContext, Found
from wpr.errors import UnavailableError


def costs(context: AnalysisContext) -> Found:
    """Time and memory of the stages and of PPO's parts."""
    from wpr.analysis.costs import cost_finding
    from wpr.report.costs import seconds_per_step
    from wpr.report.runs import read_runs
    from wpr.runs.tolerant import Problems

    problems = Problems()
    (run,) = read_runs([context.run.path], problems)
    for problem in problems.of("metrics.jsonl"):
        context.say(f"Note: {problem}")
    stages = [
        (name, str(record["status"]), record.get("seconds"), record.get("peak_memory_gb"))
        for name, record in context.run.manifest["stages"].items()
    ]
    steps = {policy.own_name: found for policy in run.policies if (found := seconds_per_step(policy))}
    try:
        finding = cost_finding(stages, steps, {"run": context.run.path.resolve().name})
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    data = [{"stage": stage[0], "seconds": stage[2], "peak_memory_gb": stage[3]} for stage in stages]
    return finding, [*data, *({"policy": policy} | found for policy, found in steps.items())]
