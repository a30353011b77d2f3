"""`wpr judge`: two files of responses before a judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wpr.commands.judges import (
    INCOMPLETE,
    agreed,
    check_prices,
    function_judge,
    note,
    server_judge,
    write_rows,
)

if TYPE_CHECKING:
    from wpr.evaluation.judging.pairwise import Judged
    from wpr.evaluation.judging.questions import Judge
    from wpr.evaluation.judging.win_rate_statistics import Agreement


def judge(
    ours: Annotated[Path, typer.Argument(metavar="OURS", help="A file of responses, as `wpr generate` writes them.")],
    theirs: Annotated[Path, typer.Argument(metavar="THEIRS", help="Another one, to the same prompts.")],
    model: Annotated[str | None, typer.Option(help="A model of an OpenAI-compatible server is the judge.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="The server.", show_default="OPENAI_BASE_URL, or OpenAI's")
    ] = None,
    reward_model: Annotated[str | None, typer.Option(help="A reward model's folder is the judge.")] = None,
    function: Annotated[
        str | None,
        typer.Option(help="package.module:function is the judge: (prompt, response_a, response_b) -> A, B, E."),
    ] = None,
    rubric: Annotated[
        str, typer.Option(help="What a server's model is told: summary, helpfulness, or a file of your own.")
    ] = "helpfulness",
    protocol: Annotated[
        str, typer.Option(help="[bold]paper[/bold]: prompts drawn several times; [bold]all[/bold]: every prompt once.")
    ] = "paper",
    every: Annotated[bool, typer.Option("--all", help="The same as --protocol all.")] = False,
    prompts: Annotated[int, typer.Option(help="Prompts of a draw.")] = 50,
    draws: Annotated[int, typer.Option(help="Draws.")] = 5,
    both_orders: Annotated[bool, typer.Option("--both-orders", help="Ask each comparison both ways round.")] = False,
    seed: Annotated[int, typer.Option(help="Of draws and orders.")] = 0,
    agree_with: Annotated[
        list[Path] | None, typer.Option(help="The folder of another judge's result: how far do they agree?")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the result.", show_default="in the run of OURS")
    ] = None,
    key_variable: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "OPENAI_API_KEY",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Of requests, as temperature=0; NAME=null leaves one out."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    requests_per_minute: Annotated[float | None, typer.Option(help="No more than this.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="No more than this, estimated.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 120.0,
    attempts: Annotated[int, typer.Option(help="How often a request is sent before it has failed.")] = 6,
    price_in: Annotated[float | None, typer.Option(help="Price of a million tokens in.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Price of a million tokens out.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before sending requests.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take; send nothing.")] = False,
) -> None:
    """Compare two models' responses to the same prompts, by a model, a reward model, or a function as the judge.

    Prints the win rate with its interval, ties, position bias and what could not be read. Every answer is kept as it
    comes: the same command, run again, asks only for what is missing. Keys come from the environment only.

    [bold]Examples[/bold]

        wpr judge semantic-t0.5.jsonl rkl-t0.5.jsonl --model gpt-4o --rubric summary --price-in 2.5 --price-out 10

        wpr judge a.jsonl b.jsonl --model local --base-url http://localhost:8000/v1 --all --both-orders -o results

        wpr judge a.jsonl b.jsonl --reward-model runs/tiny/reward/model --all

        wpr judge a.jsonl b.jsonl --function my_judges:longer -o results
    """
    from wpr.errors import OptionError
    from wpr.evaluation.judging.asking import ask_all, pending
    from wpr.evaluation.judging.pairwise import pair_up, questions_for, verdicts
    from wpr.evaluation.judging.protocol import Protocol
    from wpr.evaluation.judging.questions import RequestLimits
    from wpr.evaluation.judging.result import make_finding
    from wpr.evaluation.judging.rubric import load_rubric
    from wpr.findings import as_text, save, slug
    from wpr.report import draw_figure
    from wpr.runs.responses import read_responses
    from wpr.transport.progress import progress_bar

    if protocol not in ("paper", "all"):
        raise OptionError(f"--protocol {protocol} must be paper or all")
    check_prices((price_in, price_out))
    whole = every or protocol == "all"
    chosen = Protocol(None if whole else prompts, 1 if whole else draws, both_orders, seed)
    limits = RequestLimits(concurrency, requests_per_minute, tokens_per_minute, timeout, attempts)
    files = [read_responses(path) for path in (ours, theirs)]
    pairing = pair_up(*files)
    names = (files[0].name, files[1].name) if files[0].name != files[1].name else (str(ours), str(theirs))
    others = {str(path): _verdicts_in(path) for path in agree_with or []}
    asked_by = _judge(model, base_url, reward_model, function, key_variable, settings or [])
    told = load_rubric(rubric) if model is not None else None
    questions = questions_for(pairing, chosen, told)
    name = slug(f"judge-{asked_by.name}-{files[0].name}-vs-{files[1].name}")
    folder = output or _run_of(ours) / "evaluations" / name
    cache = folder / "answers.jsonl"
    left_out = pairing.left_out
    notes = [f"{left_out} prompts that only one of the files answers were left out."] if left_out else []
    missing = pending(asked_by, list(questions.values()), cache)
    if not agreed(asked_by, missing, f"{len(questions)} comparisons", (price_in, price_out), yes, dry_run):
        return
    with progress_bar("judging", len(questions), enabled=True) as bar:
        asked = ask_all(asked_by, list(questions.values()), cache, limits, bar.advance, note)
    judged = verdicts(pairing, questions, asked)
    finding = make_finding(
        name,
        f"{names[0]} against {names[1]}, judged by {asked_by.name}",
        names,
        judged,
        chosen,
        asked.accounts,
        {
            "ours": str(ours), "theirs": str(theirs), "judge": dict(asked_by.identity), "protocol": vars(chosen),
            "rubric": None if told is None else vars(told), "requests": asked.accounts.requests,
            "headers": [dict(file.header) for file in files],
        },
        {other: _agreement(judged, found) for other, found in others.items()},
        [*notes, *asked.accounts.notes],
    )  # fmt: skip
    write_rows(folder / "data.jsonl", (one.as_dict() for one in judged))
    save(finding, folder, draw_figure)
    typer.echo(as_text(finding))
    typer.echo(f"\neverything is in {folder}")
    lost = sum(one.answer.status in ("failed", "unasked") for one in judged)
    if lost:
        first = next(one.answer.reason for one in judged if one.answer.status == "failed")
        typer.echo(
            f"Incomplete: {lost} of {len(judged)} comparisons have no answer ({first}). The same command asks for "
            "these only.",
            err=True,
        )
        raise typer.Exit(INCOMPLETE)


def _judge(
    model: str | None,
    base_url: str | None,
    reward_model: str | None,
    function: str | None,
    key_variable: str,
    settings: Sequence[str],
) -> Judge:
    from wpr.errors import OptionError

    given = [option for option, value in
             (("--model", model), ("--reward-model", reward_model), ("--function", function)) if value]  # fmt: skip
    if len(given) != 1:
        told = "none is given" if not given else f"{' and '.join(given)} are given"
        raise OptionError(f"a judge is one of --model, --reward-model and --function; {told}")
    if model is not None:
        return server_judge(model, base_url, key_variable, settings)
    if base_url is not None or settings:
        raise OptionError(f"--base-url and --set are of servers, and {given[0]} is none; leave them out")
    if function is not None:
        return function_judge(function)
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
