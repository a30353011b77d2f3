"""One penalty against another, token by token: how far do they agree, and which is the more lenient?

    y = intercept + slope * x          x = beta_x * penalty of the first regularizer at a token, y of the second

Pearson's correlation and the slope are over all tokens of a policy's held-out responses, with intervals over
responses; of all policies together with intervals over prompts, because their responses to one prompt are alike. A
shared rescaling of both axes changes neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.answers import TokenPenalties
from wpr.analysis.context import AnalysisContext, Found, noted, six_digits
from wpr.analysis.statistics import LineFit, fit_line
from wpr.errors import OptionError
from wpr.findings import Cell, Figure, Finding, Series
from wpr.runs.responses import Response, whose_tokens

POINTS = 1500
"""Tokens of a policy that are drawn; all are counted."""

COLUMNS = [
    "policy", "responses", "tokens", "Pearson", "low", "high", "slope", "slope low", "slope high", "share below y = x",
]  # fmt: skip


def analyze(context: AnalysisContext, first: str, second: str, betas: tuple[float, float] = (1.0, 1.0)) -> Found:
    """One penalty against another at every token of the policies' responses."""
    if first == second:
        raise OptionError(f"both regularizers are {first}; name two different ones")
    found = context.measured([first, second])
    everything = [answer for answers, _ in found.values() for answer in answers]
    measured = {policy: each for policy, (_, each) in found.items()}
    prompts = {policy: [answer.number for answer in answers] for policy, (answers, _) in found.items()}
    finding = compare_penalties(measured, first, second, prompts, betas, context.settings())
    return noted(finding, *context.regularizers.notes([first, second]), whose_tokens(everything)), _by_answer(found)


def _by_answer(found: Mapping[str, tuple[list[Response], TokenPenalties]]) -> Iterator[dict[str, Any]]:
    """Penalties of each response's tokens, one line per response."""
    for policy, (answers, measured) in found.items():
        for index, answer in enumerate(answers):
            of = measured.answer == index
            values = {name: [six_digits(one) for one in each[of].tolist()] for name, each in measured.penalty.items()}
            yield {"policy": policy, "number": answer.number, "tokens": answer.response_ids, "penalties": values}


def compare_penalties(
    measured: Mapping[str, TokenPenalties],
    first: str,
    second: str,
    prompts: Mapping[str, Sequence[int]],
    betas: tuple[float, float] = (1.0, 1.0),
    settings: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding on two regularizers' penalties of each policy's tokens. prompts: the number of the prompt that each
    of a policy's answers is to.
    """
    rows: list[list[Cell]] = []
    clouds: list[Series] = []
    every: list[tuple[Tensor, Tensor, Tensor]] = []
    responses = 0
    for policy, found in measured.items():
        x, y = betas[0] * found.penalty[first].double(), betas[1] * found.penalty[second].double()
        every.append((x, y, torch.tensor(prompts[policy])[found.answer]))
        responses += (count := len(found.answer.unique()))
        rows.append(_row(policy, count, x, y, fit_line(x, y, found.answer)))
        drawn = torch.linspace(0, len(x) - 1, min(POINTS, len(x))).long()
        clouds.append(Series(policy, x[drawn].tolist(), y[drawn].tolist()))
    x, y, prompt = (torch.cat(parts) for parts in zip(*every, strict=True))
    whole = fit_line(x, y, prompt)
    if len(measured) > 1:
        rows.append(_row("all", responses, x, y, whole))
    ends = [float(x.min()), float(x.max())]
    line = Series(
        f"fit, slope {whole.slope.value:.3g}", ends, [whole.intercept + whole.slope.value * end for end in ends],
        joined=True,
    )  # fmt: skip
    labels = [name if beta == 1 else f"{beta:g} * {name}" for name, beta in zip((first, second), betas, strict=True)]
    return Finding(
        name="penalties",
        title=f"Penalties: {first} against {second}",
        text=_summary(first, second, whole, len(x), len(measured)),
        columns=COLUMNS,
        rows=rows,
        figures=[
            Figure(
                "scatter", f"{second} against {first}, per token", f"{labels[0]}, per token", f"{labels[1]}, per token",
                [*clouds, line], name="scatter", note=_note(len(x), clouds),
            )
        ],
        settings={"first": first, "second": second, "betas": list(betas), **(settings or {})},
    )  # fmt: skip


def _row(name: str, responses: int, x: Tensor, y: Tensor, fit: LineFit) -> list[Cell]:
    return [name, responses, len(x), *fit.pearson.cells, *fit.slope.cells, float((y < x).double().mean())]


def _summary(first: str, second: str, whole: LineFit, tokens: int, policies: int) -> list[str]:
    of = "the policy's" if policies == 1 else f"{policies} policies'"
    sentences = [
        f"Both penalties of the drawn token, at {tokens} tokens of {of} held-out responses after training. Pearson's "
        f"correlation is {whole.pearson}, and the least-squares slope of {second} over {first} is {whole.slope}."
    ]
    if whole.slope.high < 1:
        sentences.append(
            f"A slope below 1 says that {second} charges less for what {first} charges for, in the units that both "
            "have here: multiply each by its beta (--beta) before calling one of them lenient."
        )
    sentences.append(
        "What two penalties share is the log-probability ratio of the token at hand, which makes any two of them "
        "correlate."
    )
    return sentences


def _note(tokens: int, clouds: list[Series]) -> str:
    drawn = sum(len(cloud.x) for cloud in clouds)
    return "" if drawn == tokens else f"{drawn} of {tokens} tokens are drawn, evenly spaced."
