"""What the commands that ask judges have in common: who judges, what that will take, and whether to go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from wpr.evaluation.judging.local import FunctionJudge
    from wpr.evaluation.judging.questions import Judge, Question
    from wpr.evaluation.judging.server import ServerJudge

INCOMPLETE = 1
"""Exit code where questions have no answer: the same command goes on."""

Prices = tuple[float | None, float | None]
"""Of a million tokens, in and out."""


def server_judge(
    model: str, base_url: str | None, key_variable: str, settings: Sequence[str], usual: Mapping[str, Any] | None = None
) -> ServerJudge:
    """A model behind a server. settings: of requests, as NAME=VALUE; usual: what they are unless given."""
    from wpr.evaluation.judging.server import OPENAI, ServerJudge

    # An empty address is a mistake, a shell's variable that is not set for instance: it must not go to OpenAI.
    address = base_url if base_url is not None else os.environ.get("OPENAI_BASE_URL") or OPENAI
    judge = ServerJudge(model, address, key_variable, {**(usual or {}), **dict(_setting(text) for text in settings)})
    if judge.warning is not None:
        note(judge.warning)
    return judge


def function_judge(name: str) -> FunctionJudge:
    """The function that ``package.module:function`` names."""
    from wpr.config.functions import import_function
    from wpr.evaluation.judging.local import FunctionJudge

    return FunctionJudge(import_function(name, "--function"), name)


def check_prices(prices: Prices) -> None:
    """Refuse one price without the other, which would leave the estimate without a price."""
    from wpr.errors import OptionError

    if (prices[0] is None) != (prices[1] is None) or min(price or 0 for price in prices) < 0:
        raise OptionError(
            f"--price-in and --price-out go together, and are 0 or more (given: {prices[0]} and {prices[1]}); "
            "give both, or neither"
        )


def agreed(judge: Judge, missing: Sequence[Question], what: str, prices: Prices, yes: bool, dry_run: bool) -> bool:
    """Say what it will take, and whether to go on. Judges in this process are not asked about.

    what: is to be judged, with its number, as ``250 comparisons``.
    """
    from wpr.errors import OptionError
    from wpr.evaluation.judging.cost_estimate import estimate
    from wpr.evaluation.judging.questions import LocalJudge

    if isinstance(judge, LocalJudge):
        typer.echo(f"{what} by {judge.name}, {len(missing)} of them new", err=True)
        return not dry_run
    expected = estimate(missing, judge.answer_tokens, *prices)
    typer.echo(
        f"{what} by {judge.name}; to be sent: {expected}. Tokens are estimated (3.5 characters each); answers that "
        "have to be repaired take a second request.",
        err=True,
    )
    if dry_run:
        return False
    if not missing or yes:
        return True
    if not sys.stdin.isatty():
        raise OptionError(f"{expected.requests} requests would be sent; add --yes to send them (this is no terminal)")
    if not typer.confirm("Send them?", err=True):
        typer.echo("Nothing was sent.", err=True)
        raise typer.Exit(INCOMPLETE)
    return True


def note(text: str) -> None:
    """A remark beside the results."""
    typer.echo(f"Note: {text}", err=True)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """What a judge said, one object a line."""
    from wpr.atomic_io import write_atomically

    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _setting(text: str) -> tuple[str, Any]:
    from wpr.errors import OptionError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--set {text} must be NAME=VALUE, as temperature=0")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
