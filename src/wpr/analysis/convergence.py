"""Convergence of the solver by iteration: how far penalties are from where they would end, and whether they end at all.

Notation for shapes: ``P`` positions.

At T iterations and each of a sample of response positions:

    marginal error   L1 distance between a marginal of the transport plan and what it should be (`Solution`)
    change           the largest change of any potential by one more iteration: what the paper stops by
    penalty error    |penalty of the drawn token after T iterations - after very many|

A balanced problem whose support falls into disconnected pieces of unequal mass has no solution: its potentials drift
for ever, and the number of iterations is part of what the penalty means. Where all is connected, but by a kernel next
to nothing, there is a solution that no number of iterations reaches. All is computed in float64, so that what is
seen is the iteration and not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.answers import positions
from wpr.analysis.context import AnalysisContext, Found, noted
from wpr.analysis.statistics import quantiles
from wpr.errors import OptionError
from wpr.findings import Cell, Figure, Finding, Series
from wpr.regularizers import Wasserstein
from wpr.transport.support import Support

STEPS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 100, 200)
LAST = 1000
"""Iterations after which a problem counts as ended, if it ever does."""

ENDED = 1e-6
"""Marginal error below which it does."""

COLUMNS = [
    "setting", "iterations", "marginal error, median", "90%", "change, median", "change 90%",
    "penalty error, median", "error 90%", "error / size",
]  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """What a setting reached after each number of iterations.

    marginal_error, change, penalty_error: ``(len(steps), P)``. final: ``(P,)`` penalties after `LAST` iterations.
    ended: ``(P,)`` whether these are a solution. infeasible: ``(P,)`` whether there can be none.
    own: the setting's own number of iterations.
    """

    steps: tuple[int, ...]
    marginal_error: Tensor
    change: Tensor
    penalty_error: Tensor
    final: Tensor
    ended: Tensor
    infeasible: Tensor
    own: int

    @property
    def size(self) -> float:
        """A typical penalty: its mean distance from the mean penalty."""
        return float((self.final - self.final.mean()).abs().mean())


def analyze(context: AnalysisContext, regularizers: Sequence[str] | None = None, count: int = 32) -> Found:
    """Errors of the solver by iteration, at ``count`` positions of the policies' responses."""
    policies, names = context.chosen, regularizers or ("paper", "semantic")
    solvers = context.regularizers.make_all(names)
    for name, one in solvers.items():
        if not isinstance(one, Wasserstein):
            raise OptionError(
                f"{name} has no solver to iterate; name Wasserstein settings, as paper or semantic:lam=10"
            )
    sampled = [part for policy in policies for part in _sample(context, policy, max(1, count // len(policies)))]
    logits = [torch.cat(column) for column in zip(*sampled, strict=True)]
    curves = {}
    for name, solver in solvers.items():
        context.say(f"{name} at {len(logits[2])} positions")
        curves[name] = convergence_curve(solver, solver.support(*logits))
    finding = convergence_finding(curves, context.settings(positions=len(logits[2])))
    return noted(finding, *context.regularizers.notes(names)), _by_position(curves)


def _sample(context: AnalysisContext, policy: str, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits of both models ``(p, V)`` in float64 and the drawn tokens ``(p,)``, at ``count`` positions in all, evenly
    spaced over the policy's responses.
    """
    answers = context.answers(policy)
    total = sum(len(answer.response_ids) for answer in answers)
    wanted = set(torch.linspace(0, total - 1, min(count, total)).long().tolist())
    model, seen = context.run.load(policy), 0
    for part in positions(model, context.reference, answers, context.run.temperature(policy), context.batch_size):
        rows = torch.tensor(sorted(place - seen for place in wanted if 0 <= place - seen < len(part.tokens)))
        seen += len(part.tokens)
        if len(rows):
            rows = rows.to(part.tokens.device)
            yield part.policy[rows].double(), part.reference[rows].double(), part.tokens[rows]


def _by_position(curves: Mapping[str, Curve]) -> Iterator[dict[str, Any]]:
    measures = ("marginal_error", "change", "penalty_error")
    for name, curve in curves.items():
        for row, step in enumerate(curve.steps):
            columns = (getattr(curve, measure)[row].tolist() for measure in measures)
            for position, values in enumerate(zip(*columns, strict=True)):
                found = dict(zip(measures, values, strict=True))
                yield {"setting": name, "iterations": step, "position": position, **found}


@torch.no_grad()
def convergence_curve(wasserstein: Wasserstein, support: Support, steps: Sequence[int] = STEPS) -> Curve:
    """Solve the positions of a float64 ``support`` with each number of iterations, from the same start."""
    final, error, _ = _solve(wasserstein, support, LAST)
    own = wasserstein.settings.iterations
    counts = tuple(sorted({*steps, own}))
    found = [_solve(wasserstein, support, count) for count in counts]
    return Curve(
        counts,
        torch.stack([one[1] for one in found]),
        torch.stack([one[2] for one in found]),
        torch.stack([(one[0] - final).abs() for one in found]),
        final,
        error <= ENDED,
        infeasible(wasserstein, support).cpu(),
        own,
    )


@torch.no_grad()
def infeasible(wasserstein: Wasserstein, support: Support) -> Tensor:
    """Which positions ``(P,)`` have no balanced solution: a piece of the support that no finite cost connects to the
    rest has more mass under one model than under the other. Unbalanced problems always have one.
    """
    if wasserstein.settings.marginals == "unbalanced":
        return torch.zeros(len(support.ids), dtype=torch.bool, device=support.ids.device)
    cost = wasserstein.geometry.cost(support.ids, scaled=wasserstein.settings.scaled)
    reached = cost.isfinite().float()
    for _ in range(math.ceil(math.log2(reached.shape[-1])) + 1):  # paths twice as long each time
        reached = ((reached @ reached) > 0).float()
    difference = (support.log_policy.exp() - support.log_reference.exp()).to(reached.dtype)
    of_piece = (reached @ difference.unsqueeze(-1)).squeeze(-1)
    return of_piece.abs().amax(-1) > ENDED


def _solve(wasserstein: Wasserstein, support: Support, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Penalties of the drawn tokens, marginal errors, changes: three ``(P,)`` on the CPU."""
    values = asdict(wasserstein.settings) | {"iterations": iterations, "tolerance": 0.0}
    out = Wasserstein(wasserstein.geometry, wasserstein.preset, method=wasserstein.method, **values).finish([support])
    return out.penalty.cpu(), out.diagnostics["marginal_error"].cpu(), out.diagnostics["change"].cpu()


def convergence_finding(curves: Mapping[str, Curve], settings: Mapping[str, Any] | None = None) -> Finding:
    """The finding on settings by name."""
    rows: list[list[Cell]] = []
    for name, curve in curves.items():
        for index, count in enumerate(curve.steps):
            values = (curve.marginal_error[index], curve.change[index], curve.penalty_error[index])
            cells = [cell for each in values for cell in quantiles(each, (0.5, 0.9))]
            rows.append([name, count, *cells, float(curve.penalty_error[index].mean()) / (curve.size or 1.0)])
    figures = [
        _figure(curves, "marginal_error", "Marginal error by iteration", "L1 error of a marginal"),
        _figure(curves, "change", "Change of the potentials by one more iteration", "largest change"),
        _figure(curves, "penalty_error", f"Penalty against its value after {LAST} iterations", "absolute difference"),
    ]
    return Finding(
        name="convergence",
        title="Convergence of the solver",
        text=[sentence for name, curve in curves.items() for sentence in _summary(name, curve)],
        columns=COLUMNS,
        rows=rows,
        figures=figures,
        settings={"last": LAST, "ended": ENDED, **(settings or {})},
    )


def _summary(name: str, curve: Curve) -> list[str]:
    at = curve.steps.index(curve.own)
    error = float(curve.penalty_error[at].mean())
    share = float(curve.ended.double().mean())
    sentences = [
        f"{name}: after its own {curve.own} iterations the marginal error is "
        f"{quantiles(curve.marginal_error[at], (0.5,))[0]:.2g} in the median of {len(curve.final)} positions, and "
        f"penalties are {error:.2g} from those after {LAST} iterations, which is "
        f"{error / (curve.size or 1.0):.1%} of their own spread."
    ]
    if share < 0.99:
        impossible = float(curve.infeasible.double().mean())
        others = "at the others the kernel between tokens is too small to get there. " if impossible < 0.995 else ""
        sentences.append(
            f"{name}: at {1 - share:.0%} of the positions no end was reached: after {LAST} iterations the marginals "
            f"are still off by more than {ENDED:g}. At {impossible:.0%} there is none (pieces of the support that no "
            f"transport connects hold unequal masses){', ' if others else '. '}{others}Potentials drift with every "
            "iteration, and the number of iterations is part of the penalty's definition: a small change of the "
            "potentials certifies nothing."
        )
    return sentences


def _figure(curves: Mapping[str, Curve], what: str, title: str, y_label: str) -> Figure:
    series = []
    for name, curve in curves.items():
        values: Tensor = getattr(curve, what)
        low, middle, high = zip(*(quantiles(row, (0.1, 0.5, 0.9)) for row in values), strict=True)
        steps = [float(count) for count in curve.steps]
        series.append(Series(name, steps, list(middle), list(low), list(high)))
    note = "Medians over positions, with the middle 80%. What is exactly 0 is not drawn."
    return Figure("lines", title, "iterations", y_label, series, log_x=True, log_y=True, name=what, note=note)
