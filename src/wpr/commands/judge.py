"""`wpr judge`: two files of responses before a judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wpr.commands import judge_options
from wpr.commands.output import save_and_print, say

if TYPE_CHECKING:
    from wpr.evaluation.judging.comparison_plan import ComparisonPlan
    from wpr.evaluation.judging.pairwise import Judged
    from wpr.evaluation.judging.questions import Judge
    from wpr.evaluation.judging.rubric import Rubric
    from wpr.evaluation.judging.win_rate_statistics import Agreement

comparison_option = partial(typer.Option, rich_help_panel="Comparisons")

Ours = Annotated[Path, typer.Argument(metavar="OURS", help="A file of responses, as `wpr generate` writes them.")]
Theirs = Annotated[Path, typer.Argument(metavar="THEIRS", help="Another one, to the same prompts.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write to.", show_default="in the run of OURS")
]
AgreeWith = Annotated[list[Path] | None, typer.Option(help="Folder of another judge's result, to compare the two.")]
RewardModel = Annotated[str | None, judge_options.judge_option(help="Folder of a reward model that judge_options.")]
Function = Annotated[
    str | None,
    judge_options.judge_option(
        help="package.module:function that judges: (prompt, response_a, response_b) -> A, B, E."
    ),
]
RubricName = Annotated[
    str, judge_options.judge_option(help="What a server's model is told: summary, helpfulness, or a file of your own.")
]
Settings = Annotated[
    list[str] | None, judge_options.judge_option("--set", metavar="NAME=VALUE", help=judge_options.SETTINGS_HELP)
]
Attempts = Annotated[int, judge_options.request_option(help="How often a request is sent before it has failed.")]
ProtocolName = Annotated[
    str,
    comparison_option(
        help="Which prompts: [bold]paper[/bold], some drawn several times; [bold]all[/bold], every prompt once."
    ),
]
Every = Annotated[bool, comparison_option("--all", help="The same as --protocol all.")]
Prompts = Annotated[int, comparison_option(help="Prompts per draw.")]
Draws = Annotated[int, comparison_option(help="Number of draws.")]
BothOrders = Annotated[bool, comparison_option("--both-orders", help="Ask each comparison both ways round.")]
Seed = Annotated[int, comparison_option(help="Seed of draws and orders.")]


def judge(
    ours: Ours,
    theirs: Theirs,
    output: Output = None,
    agree_with: AgreeWith = None,
    judge: judge_options.JudgeModel = None,
    base_url: judge_options.BaseUrl = None,
    reward_model: RewardModel = None,
    function: Function = None,
    rubric: RubricName = "helpfulness",
    key_variable: judge_options.KeyVariable = "OPENAI_API_KEY",
    settings: Settings = None,
    protocol: ProtocolName = "paper",
    every: Every = False,
    prompts: Prompts = 50,
    draws: Draws = 5,
    both_orders: BothOrders = False,
    seed: Seed = 0,
    concurrency: judge_options.Concurrency = 16,
    requests_per_minute: judge_options.RequestsPerMinute = None,
    tokens_per_minute: judge_options.TokensPerMinute = None,
    timeout: judge_options.Timeout = 120.0,
    attempts: Attempts = 6,
    price_in: judge_options.PriceIn = None,
    price_out: judge_options.PriceOut = None,
    yes: judge_options.Yes = False,
    dry_run: judge_options.DryRun = False,
) -> None:
    """Compare two models' responses to the same prompts, by a model, a reward model, or a function as the judge.

    Prints the win rate with its interval, ties, position bias and what could not be read. Every answer is kept as it
    comes: the same command, run again, asks only for what is missing. Keys come from the environment only.

    [bold]Examples[/bold]

        wpr judge semantic-t0.5.jsonl rkl-t0.5.jsonl --judge gpt-4o --rubric summary --price-in 2.5 --price-out 10

        wpr judge a.jsonl b.jsonl --judge local --base-url http://localhost:8000/v1 --all --both-orders -o results

        wpr judge a.jsonl b.jsonl --reward-model runs/tiny/reward/model --all

        wpr judge a.jsonl b.jsonl --function my_judges:longer -o results
    """
    from wpr.errors import OptionError
    from wpr.evaluation.judging.comparison_plan import ComparisonPlan
    from wpr.evaluation.judging.questions import LocalJudge, RequestLimits
    from wpr.evaluation.judging.rubric import load_rubric

    if protocol not in ("paper", "all"):
        raise OptionError(f"--protocol {protocol} must be paper or all")
    limits = RequestLimits(concurrency, requests_per_minute, tokens_per_minute, timeout, attempts)
    asking = judge_options.AskingOptions(limits, price_in, price_out, yes, dry_run)
    whole = every or protocol == "all"
    chosen = ComparisonPlan(None if whole else prompts, 1 if whole else draws, both_orders, seed)
    asked_by = _judge(judge, base_url, reward_model, function, key_variable, settings or [])
    instructions = None if isinstance(asked_by, LocalJudge) else load_rubric(rubric)
    _compare(ours, theirs, asked_by, instructions, chosen, asking, output, agree_with or [])


def _compare(
    ours: Path,
    theirs: Path,
    judge: Judge,
    rubric: Rubric | None,
    protocol: ComparisonPlan,
    asking: judge_options.AskingOptions,
    output: Path | None,
    agree_with: Sequence[Path],
) -> None:
    """Have responses compared; save and print who wins."""
    from wpr.evaluation.judging.pairwise import pair_up, questions_for, verdicts
    from wpr.evaluation.judging.result import make_finding
    from wpr.findings import slug
    from wpr.runs.responses import read_responses

    files = [read_responses(path) for path in (ours, theirs)]
    pairing = pair_up(*files)
    names = (files[0].name, files[1].name) if files[0].name != files[1].name else (str(ours), str(theirs))
    others = {str(path): _verdicts_in(path) for path in agree_with}
    questions = questions_for(pairing, protocol, rubric)
    name = slug(f"judge-{judge.name}-{files[0].name}-vs-{files[1].name}")
    folder = output or _run_of(ours) / "evaluations" / name
    left_out = pairing.left_out
    notes = [f"{left_out} prompts that only one of the files answers were left out."] if left_out else []
    what = f"{len(questions)} comparisons"
    results = asking.ask(judge, list(questions.values()), folder / "answers.jsonl", what, "judging")
    if results is None:
        return
    judged = verdicts(pairing, questions, results)
    finding = make_finding(
        name,
        f"{names[0]} against {names[1]}, judged by {judge.name}",
        names,
        judged,
        protocol,
        results.accounts,
        {
            "ours": str(ours), "theirs": str(theirs), "judge": dict(judge.identity), "protocol": vars(protocol),
            "rubric": None if rubric is None else vars(rubric), "requests": results.accounts.requests,
            "headers": [dict(file.header) for file in files],
        },
        {other: _agreement(judged, found) for other, found in others.items()},
        [*notes, *results.accounts.notes],
    )  # fmt: skip
    save_and_print(finding, folder, (one.as_dict() for one in judged))
    _refuse_incomplete(judged)


def _refuse_incomplete(judged: Sequence[Judged]) -> None:
    """End with an exit code where comparisons have no answer."""
    lost = sum(one.answer.status in ("failed", "unasked") for one in judged)
    if lost:
        first = next(one.answer.reason for one in judged if one.answer.status == "failed")
        say(
            f"Incomplete: {lost} of {len(judged)} comparisons have no answer ({first}). The same command asks for "
            "these only."
        )
        raise typer.Exit(judge_options.INCOMPLETE)


def _judge(
    model: str | None,
    base_url: str | None,
    reward_model: str | None,
    function: str | None,
    key_variable: str,
    settings: Sequence[str],
) -> Judge:
    from wpr.errors import OptionError

    named = {"--judge": model, "--reward-model": reward_model, "--function": function}
    given = [option for option, value in named.items() if value]
    if len(given) != 1:
        found = "none is given" if not given else f"{' and '.join(given)} are given"
        raise OptionError(f"a judge is one of --judge, --reward-model and --function; {found}")
    if model is not None:
        return judge_options.server_judge(model, base_url, key_variable, settings)
    if base_url is not None or settings:
        raise OptionError(f"--base-url and --set are of servers, and {given[0]} is none; leave them out")
    if function is not None:
        return judge_options.function_judge(function)
    from wpr.evaluation.judging.local import RewardModelJudge

    return RewardModelJudge(str(reward_model))


def _run_of(file: Path) -> Path:
    """The run that a file lies in."""
    from wpr.errors import OptionError

    found = next((folder for folder in file.resolve().parents if (folder / "manifest.json").is_file()), None)
    if found is None:
        raise OptionError(f"{file} lies in no run's folder; name a folder for the result with -o")
    return found


def _verdicts_in(folder: Path) -> dict[str, str]:
    from wpr.errors import OptionError
    from wpr.evaluation.judging.pairwise import by_pair

    path = folder / "data.jsonl" if folder.is_dir() else folder
    remedy = "name the folder of an earlier `wpr judge` of these responses"
    try:
        return by_pair([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    except OSError as error:
        raise OptionError(f"--agree-with {folder}: {path} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise OptionError(
            f"--agree-with {folder}: {path} was not written by wpr judge, or is damaged; {remedy}"
        ) from None


def _agreement(judged: Sequence[Judged], other: dict[str, str]) -> Agreement:
    from wpr.evaluation.judging.pairwise import by_pair
    from wpr.evaluation.judging.win_rate_statistics import agreement

    return agreement(by_pair([one.as_dict() for one in judged]), other)
