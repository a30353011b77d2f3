"""The stories over seeds and betas: what does each regularizer keep at the same reward?

    python -m benchmarks.seeds run OUT --seeds 5      every policy of the recipe's sweeps, on every seed
    python -m benchmarks.seeds table OUT              the tables of docs/results.md

The same with `--recipe benchmarks/grpo_forms.yaml`, where policies differ in how KL gets into GRPO's gradient; and
`--compare exact-reward:k1-reward` for other pairs in the table. `benchmarks/rewriting.py` is the same on another task.

A seed is a world of its own: openings, continuations, labels, SFT and reward model are made again. On each of them
every policy is trained once per beta. A policy's betas give it a curve of gold (or divergence, diversity) over score;
curves of one seed are compared at the same score, linearly interpolated between neighbouring scores, and the
differences averaged over seeds: ± is half of the 95% t interval, and * marks those that leave out 0, each by itself
(with many cells some do so by chance). A policy with one beta, or with one that is named (`semantic+beta=0.5:rkl`), is
compared with the other's curve at its own score, between the SFT model and the other's highest. That curve is bent, a
monotone cubic (PCHIP) through the SFT model and all betas: a straight line between two points of a bent curve would
favour whoever has one point. How far the curve is from the policy between its points is in no interval.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wpr.config.recipe_file import load_recipe

GAIN, WINDOW = 1.0, 5
"""Steps are counted until the mean training score of so many is this far above SFT's."""

COLUMNS = {
    "gain": "score gain",
    "after.gold": "gold",
    "gold_win_rate_before": "gold win rate",
    "after.kl": "KL",
    "after.divergence_semantic": "semantic",
    "after.entropy": "entropy",
    "after.distinct_2": "distinct-2",
    "after.self_bleu": "self-BLEU",
    "after.embedding_spread": "spread",
    "steps": f"steps to +{GAIN:g}",
    "after.response_length": "length",
}
"""Results on held-out prompts, and their titles. The gain is over SFT: each reward model has a zero of its own. A run
that never gets so far counts with one step more than it has.
"""

PLACES = (("low", 0.25), ("middle", 0.5), ("high", 0.75))
ONE_PLACE = (("its score", 0.5),)
"""Where in the range of scores that both reach policies are compared."""

T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95% points of Student's t, by degrees of freedom."""


def matched_names(columns: dict[str, str]) -> list[str]:
    """What is compared at the same score: all but the score itself, and the length, which is no merit."""
    return [name for name in columns if name not in ("gain", "after.score", "after.response_length")]


def run(
    out: Path, recipe: str, seeds: int, policies: list[str], workers: int, settings: list[str], limit: float
) -> None:
    """One process per seed for its world; one per seed and policy after it, each with a copy of the seed's folder."""
    out.mkdir(parents=True, exist_ok=True)
    loaded = load_recipe(recipe, settings)
    sweeps = {policy: name for name, sweep in loaded.sweeps.items() for policy in sweep.policies}
    policies = policies or list(sweeps)
    if missing := [policy for policy in policies if policy not in sweeps]:
        raise SystemExit(f"no sweep of {recipe} has {', '.join(missing)}; there are: {', '.join(sweeps)}")
    ends = time.monotonic() + limit

    def command(log: str, *arguments: str) -> int:
        with open(out / f"{log}.log", "a") as file:
            left = max(1.0, ends - time.monotonic())
            try:
                return subprocess.run(
                    [sys.executable, "-m", "wpr", *arguments], stdout=file, stderr=file, timeout=left,
                    env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return 124

    def world(seed: int) -> int:
        common = (recipe, f"seed={seed}", f"output={out / f'seed-{seed}'}", *settings)
        stages = ("sft",) if loaded.reward is None else ("sft", "reward")
        return next((code for stage in stages if (code := command(f"seed-{seed}", stage, *common))), 0)

    def regularizer(job: tuple[int, str]) -> int:
        seed, policy = job
        folder = out / f"seed-{seed}-{policy}"
        if not folder.exists():
            partial = folder.with_name(f"partial-{folder.name}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(out / f"seed-{seed}", partial, copy_function=_copy)
            partial.rename(folder)
        common = (f"seed={seed}", f"output={folder}", *settings)
        return command(folder.name, "sweep", recipe, sweeps[policy], "--policy", policy, *common)

    with ThreadPoolExecutor(workers) as pool:  # first come, first served: a world is begun before who waits for it
        worlds = [pool.submit(world, seed) for seed in range(seeds)]
        jobs = [(seed, policy) for policy in policies for seed in range(seeds)]
        codes = list(pool.map(lambda job: worlds[job[0]].result() or regularizer(job), jobs))
    failed = [f"seed-{seed}" for seed, ended in enumerate(worlds) if ended.result()]
    failed += [f"seed-{seed}-{policy}" for (seed, policy), code in zip(jobs, codes, strict=True) if code]
    print(f"{len(jobs)} sweeps; not through: {', '.join(failed) or 'none'} (logs in {out})")
    for name in failed:
        log = out / f"{name}.log"
        if log.exists():  # none, where it failed with its world
            *_, last = log.read_text(errors="replace").strip().split("\n")
            print(f"{name}: {last}")
    if failed:
        raise SystemExit(1)


def _copy(source: str, target: str) -> None:
    """Copy a file; weights are linked where the file system can, since they are many and no one changes them."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


Result = tuple[int, str, float, dict[str, float]]
"""Seed, policy, beta, and what was measured, by dotted name."""

Found = dict[tuple[str, float], dict[int, dict[str, float]]]
"""Results by policy and beta, and there by seed."""

Curve = list[tuple[float, dict[str, float]]]
"""Results of one policy and seed by score, in its order."""


def folders(out: Path) -> list[Path]:
    """Of each seed and policy that was begun; logs lie beside them."""
    return [folder for folder in sorted(out.glob("seed-*-*")) if (folder / "manifest.json").exists()]


def results(out: Path) -> Iterator[Result]:
    """Results of every policy that is done."""
    for folder in folders(out):
        manifest = json.loads((folder / "manifest.json").read_text())
        for stage, record in manifest["stages"].items():
            if stage.startswith("ppo/") and record["status"] == "done":
                policy, _, beta = stage.removeprefix("ppo/").partition("+beta=")
                values = _flat(record["results"])
                values["gain"] = values["after.score"] - values["before.score"]
                values |= _steps(folder / stage / "metrics.jsonl", values["before.score"] + GAIN)
                yield int(folder.name.split("-")[1]), policy, float(beta), values


def _steps(log: Path, wanted: float) -> dict[str, float]:
    """How many steps it took to get to a training score, by the log of a policy, if that is there."""
    if not log.exists():
        return {}
    scores = [row["score"] for row in map(json.loads, log.read_text().splitlines()) if "score" in row]
    means = (statistics.fmean(scores[end - WINDOW : end]) for end in range(WINDOW, len(scores) + 1))
    return {"steps": next((WINDOW + number for number, mean in enumerate(means) if mean >= wanted), len(scores) + 1)}


def by_policy(results: Iterable[Result]) -> Found:
    """Results in order; ends the program where there are none."""
    found: Found = {}
    for seed, policy, beta, values in results:
        found.setdefault((policy, beta), {})[seed] = values
    if not found:
        raise SystemExit("no policy is finished there")
    return found


def table(found: Found, pairs: list[tuple[str, str]], columns: dict[str, str] = COLUMNS) -> None:
    """Print means over seeds by policy and beta, and the comparison of pairs of policies at matched score.

    columns: results and their titles; all but the gain and the length are compared.
    """
    names = matched_names(columns)
    console = Console(width=max(200, 16 * (len(columns) + 3)))
    means = Table("policy", "beta", "seeds", *columns.values(), title="means over seeds ± standard error")
    for (policy, beta), by_seed in sorted(found.items(), key=lambda item: (item[0][0], -item[0][1])):
        known = {name: [row[name] for row in by_seed.values() if name in row] for name in columns}
        cells = [_of_seeds(_mean_and_error(values), len(values), len(by_seed)) for values in known.values()]
        means.add_row(policy, f"{beta:g}", str(len(by_seed)), *cells)
    console.print(means)
    matched = Table(
        "compared", "at score", "seeds", *(columns[name] for name in names), title="difference at the same score"
    )
    for ours, theirs in pairs:
        fewest, most = sorted(len(rows_of(found, name)) for name in (ours, theirs))
        if fewest and most > 1:
            for label, quantile in ONE_PLACE if fewest == 1 else PLACES:
                matched.add_row(*_matched_row(found, ours, theirs, label, quantile, names))
        else:
            why = "each has one beta: no curve to compare on" if fewest else "one of them has no results"
            console.print(f"{ours} - {theirs}: not compared, {why}")
    console.print(matched)


def rows_of(found: Found, name: str) -> dict[float, dict[int, dict[str, float]]]:
    """Results of a policy, or of one of its betas (``semantic+beta=0.5``), by beta and seed."""
    wanted, _, beta = name.partition("+beta=")
    return {
        value: rows
        for (policy, value), rows in found.items()
        if policy == wanted and (not beta or value == float(beta))
    }


def _matched_row(found: Found, ours: str, theirs: str, label: str, quantile: float, names: Sequence[str]) -> list[str]:
    """Means of the differences at one score of each seed."""
    by_seed = differences(found, ours, theirs, quantile, names)
    scores = [score for score, _ in by_seed.values()]
    known = {name: [row[name] for _, row in by_seed.values() if not math.isnan(row[name])] for name in names}
    shown = f"{label} ({statistics.mean(scores):.2f})" if scores else label
    cells = (_of_seeds(mean_and_interval(known[name]), len(known[name]), len(scores)) for name in names)
    return [f"{ours} - {theirs}", shown, str(len(scores)), *cells]


def differences(
    found: Found, ours: str, theirs: str, quantile: float, names: Sequence[str]
) -> dict[int, tuple[float, dict[str, float]]]:
    """By seed, a score and the differences there: this far up in the range of scores that both policies reach, which is
    one score where one of them has one.
    """
    by_seed = {}
    pair = [rows_of(found, name) for name in (ours, theirs)]
    one_beta = min(map(len, pair)) == 1
    for seed in sorted({seed for betas in pair for rows in betas.values() for seed in rows}):
        of_seed = [[rows[seed] for rows in betas.values() if seed in rows] for betas in pair]
        curves = [_curve(rows, names) for rows in of_seed]
        fewest, most = sorted(map(len, curves))
        if most < 2 or fewest < (1 if one_beta else 2):
            continue
        if one_beta:
            curves = [curve if len(curve) == 1 else _from_start(of_seed, names, curve) for curve in curves]
        low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        if high < low or (high == low and not one_beta):
            continue
        score = low + quantile * (high - low)
        at = {
            name: [_interpolated([(x, row[name]) for x, row in curve], score, bent=one_beta) for curve in curves]
            for name in names
        }
        by_seed[seed] = score, {name: first - second for name, (first, second) in at.items()}
    return by_seed


def _from_start(of_seed: Iterable[list[dict[str, float]]], names: Sequence[str], curve: Curve) -> Curve:
    """The curve with the SFT model, which a policy of ever larger beta stays at, unless a beta has that very score."""
    known = {key: value for rows in of_seed for row in rows for key, value in row.items() if key.startswith("before.")}
    score = known["before.score"]
    if any(x == score for x, _ in curve):
        return curve
    before = {
        name: known.get(name.replace("after.", "before."), math.nan) if name.startswith("after.") else math.nan
        for name in names
    }
    return sorted([(score, before), *curve], key=lambda point: point[0])


def _curve(rows: list[dict[str, float]], names: Sequence[str]) -> Curve:
    """Results in the order of their scores, those of one score averaged; what a run did not measure is nan."""
    by_score: dict[float, list[dict[str, float]]] = {}
    for row in rows:
        by_score.setdefault(row["after.score"], []).append(row)
    return [
        (score, {name: statistics.fmean(row.get(name, math.nan) for row in same) for name in names})
        for score, same in sorted(by_score.items())
    ]


def _interpolated(points: list[tuple[float, float]], at: float, bent: bool = False) -> float:
    """The value at a score, on lines between points in the order of their scores, or on a monotone cubic (bent)."""
    if not points[0][0] <= at <= points[-1][0]:
        raise ValueError(f"{at} lies outside of {points[0][0]} to {points[-1][0]}")
    if len(points) == 1:
        return points[0][1]
    if bent:
        from scipy.interpolate import PchipInterpolator

        values = [value for _, value in points]
        return (
            float(PchipInterpolator([x for x, _ in points], values)(at))
            if all(map(math.isfinite, values))
            else math.nan
        )
    (left, low), (right, high) = next(pair for pair in itertools.pairwise(points) if at <= pair[1][0])
    return low if right == left else low + (high - low) * (at - left) / (right - left)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def _of_seeds(cell: str, known: int, seeds: int) -> str:
    """A cell that is of fewer seeds than its row says how many."""
    return cell if cell == "-" or known == seeds else f"{cell} ({known})"


def _mean_and_error(values: list[float]) -> str:
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3g}{error}"


def mean_and_interval(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    half = T95[min(len(values) - 1, max(T95))] * statistics.stdev(values) / math.sqrt(len(values))
    mark = "*" if abs(statistics.mean(values)) > half else ""
    return f"{statistics.mean(values):+.3g} ± {half:.2g}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipe", default="stories", help="a name or a file; it must have the stories' task")
    parser.add_argument("--policies", nargs="+", default=[], help="of the recipe's sweeps; all by default")
    parser.add_argument("--compare", nargs="+", default=["sum:rkl", "sum:hellinger", "semantic:rkl", "hellinger:rkl"],
                        help="pairs of policies for the table, OURS:THEIRS")  # fmt: skip
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which what runs is ended")
    parser.add_argument("--set", nargs="*", default=[], dest="settings", help="settings of the recipe, key=value")
    options = parser.parse_args()
    if options.action == "run":
        run(
            options.out, options.recipe, options.seeds, options.policies, options.workers, options.settings,
            options.limit,
        )  # fmt: skip
    else:
        table(by_policy(results(options.out)), [tuple(pair.split(":")) for pair in options.compare])


if __name__ == "__main__":
    main()
