"""What the commands that ask judges have in common: who judges, what that will take, and whether to go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.output import note, say, show_progress

if TYPE_CHECKING:
    from wpr.evaluation.judging.asking import JudgeResults
    from wpr.evaluation.judging.local import FunctionJudge
    from wpr.evaluation.judging.questions import Judge, Question, RequestLimits
    from wpr.evaluation.judging.server import ServerJudge

INCOMPLETE = 1
"""Exit code where questions have no answer: the same command goes on."""

judge_option = partial(typer.Option, rich_help_panel="The judge")
request_option = partial(typer.Option, rich_help_panel="Requests to a server")
SETTINGS_HELP = "Setting of requests, as temperature=0; NAME=null leaves one out."

JudgeModel = Annotated[
    str | None, judge_option("--judge", "-j", help="Model of an OpenAI-compatible server that judges.")
]
BaseUrl = Annotated[str | None, judge_option(help="The server's address.", show_default="OPENAI_BASE_URL, or OpenAI's")]
KeyVariable = Annotated[str, judge_option(help="Environment variable that holds the key.")]
Concurrency = Annotated[int, request_option(help="Requests under way at once.")]
RequestsPerMinute = Annotated[float | None, request_option(help="Most requests per minute.", show_default="no limit")]
TokensPerMinute = Annotated[
    float | None, request_option(help="Most tokens per minute, by estimate.", show_default="no limit")
]
Timeout = Annotated[float, request_option(help="Seconds for one request.")]
PriceIn = Annotated[float | None, request_option(help="Price of a million tokens sent.")]
PriceOut = Annotated[float | None, request_option(help="Price of a million tokens received.")]
Yes = Annotated[bool, request_option("--yes", "-y", help="Send requests without asking you first.")]
DryRun = Annotated[bool, request_option("--dry-run", help="Say what judging would take; ask no judge.")]


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


@dataclass(frozen=True)
class AskingOptions:
    """How a judge is asked.

    limits: of requests. price_in, price_out: of a million tokens. yes: do not ask the user first. dry_run: ask nobody.
    """

    limits: RequestLimits
    price_in: float | None
    price_out: float | None
    yes: bool
    dry_run: bool

    def __post_init__(self) -> None:
        """Refuse one price without the other, which would leave the estimate without a price."""
        from wpr.errors import OptionError

        prices = (self.price_in, self.price_out)
        if (prices[0] is None) != (prices[1] is None) or min(price or 0 for price in prices) < 0:
            raise OptionError(
                f"--price-in and --price-out go together, and are 0 or more (given: {prices[0]} and {prices[1]}); "
                "give both, or neither"
            )

    def ask(
        self,
        judge: Judge,
        questions: Sequence[Question],
        cache: Path,
        what: str,
        title: str,
        others: Sequence[Path] = (),
    ) -> JudgeResults | None:
        """The judge's answers, those of the cache and the others asked for now; None on a dry run.

        what: is to be judged, with its number, as ``250 comparisons``. title: of the progress bar. others: caches of
        other evaluations, whose answers serve too.
        """
        from wpr.evaluation.judging.asking import ask_all, pending

        if not self._agreed(judge, pending(judge, questions, cache, others), what):
            return None
        with show_progress(title, len(questions)) as advance:
            return ask_all(judge, questions, cache, self.limits, advance, note, others)

    def _agreed(self, judge: Judge, missing: Sequence[Question], what: str) -> bool:
        """Say what it will take, and whether to go on. Judges in this process are not asked about."""
        from wpr.errors import OptionError
        from wpr.evaluation.judging.cost_estimate import estimate
        from wpr.evaluation.judging.questions import LocalJudge

        if isinstance(judge, LocalJudge):
            say(f"{what} by {judge.name}, {len(missing)} of them new")
            return not self.dry_run
        expected = estimate(missing, judge.answer_tokens, self.price_in, self.price_out)
        say(
            f"{what} by {judge.name}; to be sent: {expected}. Tokens are estimated (3.5 characters each); answers that "
            "have to be repaired take a second request."
        )
        if self.dry_run:
            return False
        if not missing or self.yes:
            return True
        if not sys.stdin.isatty():
            raise OptionError(
                f"{expected.requests} requests would be sent; add --yes to send them (this is no terminal)"
            )
        if not typer.confirm("Send them?", err=True):
            say("Nothing was sent.")
            raise typer.Exit(INCOMPLETE)
        return True


def _setting(text: str) -> tuple[str, Any]:
    from wpr.errors import OptionError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--set {text} must be NAME=VALUE, as temperature=0")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
