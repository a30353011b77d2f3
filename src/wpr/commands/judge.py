"""`wpr judge`: two files of responses before a judge, or all policies of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wpr.commands import judge_options
from wpr.commands.output import note, save_and_print, say

if TYPE_CHECKING:
    from wpr.evaluation.judging.comparison_plan import ComparisonPlan
    from wpr.evaluation.judging.pairwise import Judged
    from wpr.evaluation.judging.questions import Judge
    from wpr.evaluation.judging.rubric import Rubric
    from wpr.evaluation.judging.win_rate_statistics import Agreement

comparison_option = partial(typer.Option, rich_help_panel="Comparisons")

Ours = Annotated[
    Path,
    typer.Argument(metavar="OURS|RUN", help="A file of responses, as `wpr generate` writes them; or a run's folder."),
]
Theirs = Annotated[
    Path | None, typer.Argument(metavar="[THEIRS]", help="Another file, to the same prompts. Not with a run.")
]
run_option = partial(typer.Option, rich_help_panel="Of a run")
Against = Annotated[
    list[str] | None,
    run_option(help="Model that all policies are compared with: sft, a policy, or OTHER_RUN:MODEL; repeat for more."),
]
Policies = Annotated[
    list[str] | None, run_option("--policy", "-p", help="Only this policy; repeat for more.", show_default="all")
]
Temperatures = Annotated[
    list[float] | None,
    run_option("--temperature", "-t", help="Only this temperature; repeat for more.", show_default="all"),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder to write to.", show_default="in the run, or in the run of OURS"),
]
AgreeWith = Annotated[list[Path] | None, typer.Option(help="Folder of another judge's result, to compare the two.")]
RewardModel = Annotated[str | None, judge_options.judge_option(help="Folder of a reward model that judges.")]
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
    theirs: Theirs = None,
    against: Against = None,
    policy: Policies = None,
    temperature: Temperatures = None,
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

    Of a RUN: every policy against each model that --against names, at each temperature that `wpr generate` drew at.

    Prints the win rate with its interval, ties, position bias and what could not be read. Every answer is kept as it
    comes: the same command, run again, asks only for what is missing. Keys come from the environment only.

    [bold]Examples[/bold]

        wpr judge runs/hh --against rkl --against sft --judge gpt-4o --price-in 2.5 --price-out 10

        wpr judge semantic-t0.5.jsonl rkl-t0.5.jsonl --judge gpt-4o --rubric summary --price-in 2.5 --price-out 10

        wpr judge a.jsonl b.jsonl --judge local --base-url http://localhost:8000/v1 --all --both-orders -o results

        wpr judge a.jsonl b.jsonl --reward-model runs/tiny/reward/model --all

        wpr judge a.jsonl b.jsonl --function my_judges:longer -o results
    """
    from wpr.errors import OptionError
    from wpr.evaluation.judging.comparison_plan import ComparisonPlan
    from wpr.evaluation.judging.questions import LocalJudge, RequestLimits
    from wpr.evaluation.judging.rubric import load_rubric

    _check_what(ours, theirs, [against, policy, temperature])
    if protocol not in ("paper", "all"):
        raise OptionError(f"--protocol {protocol} must be paper or all")
    limits = RequestLimits(concurrency, requests_per_minute, tokens_per_minute, timeout, attempts)
    asking = judge_options.AskingOptions(limits, price_in, price_out, yes, dry_run)
    whole = every or protocol == "all"
    chosen = ComparisonPlan(None if whole else prompts, 1 if whole else draws, both_orders, seed)
    asked_by = _judge(judge, base_url, reward_model, function, key_variable, settings or [])
    instructions = None if isinstance(asked_by, LocalJudge) else load_rubric(rubric)
    if theirs is None:
        _compare_run(
            ours, (against or [], policy or [], temperature or []), asked_by, instructions, chosen, asking, output,
            agree_with or [],
        )  # fmt: skip
    else:
        _compare(ours, theirs, asked_by, instructions, chosen, asking, output, agree_with or [])


def _check_what(ours: Path, theirs: Path | None, of_a_run: Sequence[object]) -> None:
    """Refuse a run with a second file, and options of runs with two files."""
    from wpr.errors import OptionError

    if theirs is None and not ours.is_dir():
        raise OptionError(f"{ours} is judged against nothing; name a second file of responses, or a run's folder alone")
    if theirs is not None and ours.is_dir():
        raise OptionError(f"{ours} is a folder; name two files of responses, or a run's folder alone with --against")
    if theirs is not None and any(of_a_run):
        raise OptionError("--against, --policy and --temperature are of a run; leave them out with two files")


def _compare_run(
    run: Path,
    chosen: tuple[Sequence[str], Sequence[str], Sequence[float]],
    judge: Judge,
    rubric: Rubric | None,
    protocol: ComparisonPlan,
    asking: judge_options.AskingOptions,
    output: Path | None,
    agree_with: Sequence[Path],
) -> None:
    """Have all policies of a run compared; save and print one table. chosen: baselines, policies, temperatures."""
    from wpr.evaluation.judging.pairwise import pair_up, questions_for, verdicts
    from wpr.evaluation.judging.questions import JudgingSettingsError
    from wpr.evaluation.judging.run_pairs import pairs_of
    from wpr.evaluation.judging.run_result import BY_JUDGE, run_finding
    from wpr.findings import slug

    pairs, notes = pairs_of(run, *chosen)
    for text in notes:
        note(text)
    against = list(dict.fromkeys(pair.against for pair in pairs))
    name = slug(f"judge-{judge.name}-vs-{'-'.join(against)}")
    folder = output or run / "evaluations" / name
    others = {str(path): _verdicts_in(path) for path in agree_with}
    asked = []
    for pair in pairs:
        try:
            pairing = pair_up(pair.ours, pair.theirs)
            questions = questions_for(pairing, protocol, rubric)
        except JudgingSettingsError as error:
            raise JudgingSettingsError(f"{pair.name}: {error}") from None
        if pairing.left_out:
            notes.append(f"{pairing.left_out} prompts that only one of both answers, of {pair.name}")
        # Other pairs ask about the same prompts.
        named = {one: replace(question, id=f"{pair.name}: {one.id}") for one, question in questions.items()}
        asked.append((pair, pairing, named))
    every = [question for _, _, questions in asked for question in questions.values()]
    models = len({pair.policy for pair in pairs})
    heats = ", ".join(f"{heat:g}" for heat in sorted({pair.temperature for pair in pairs}))
    what = (
        f"{len(every)} comparisons ({models} {'policies' if models > 1 else 'policy'} against {', '.join(against)}; "
        f"temperature {heats})"
    )
    results = asking.ask(judge, every, folder / "answers.jsonl", what, "judging", _answers_in(run))
    if results is None:
        return
    judged = {
        (pair.policy, pair.temperature, pair.against): verdicts(pairing, questions, results)
        for pair, pairing, questions in asked
    }
    compared = [one for found in judged.values() for one in found]
    finding = run_finding(
        name,
        f"Policies of {run.resolve().name} against {', '.join(against)}, {BY_JUDGE}{judge.name}",
        judged,
        protocol,
        {
            "run": str(run), "judge": dict(judge.identity), "protocol": vars(protocol),
            "rubric": None if rubric is None else vars(rubric), "requests": results.accounts.requests,
            "tokens in": results.accounts.prompt_tokens, "tokens out": results.accounts.completion_tokens,
            "weights": {
                str(file.path): (file.header.get("fingerprint") or {}).get("weights")
                for pair in pairs for file in (pair.ours, pair.theirs)
            },
        },
        {other: _agreement(compared, found) for other, found in others.items()},
        [f"Left out: {text}." for text in notes] + results.accounts.notes,
    )  # fmt: skip
    rows = (
        {"policy": key[0], "temperature": key[1], "against": key[2], **one.as_dict()}
        for key, found in judged.items()
        for one in found
    )
    save_and_print(finding, folder, rows)
    _refuse_incomplete(compared)


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
    known = _answers_in(_run_around(ours))
    results = asking.ask(judge, list(questions.values()), folder / "answers.jsonl", what, "judging", known)
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


def _answers_in(run: Path | None) -> list[Path]:
    """Files of answers of a run's evaluations, so that none is paid for twice in other company."""
    return [] if run is None else sorted((run / "evaluations").glob("judge-*/answers.jsonl"))


def _run_around(file: Path) -> Path | None:
    return next((folder for folder in file.resolve().parents if (folder / "manifest.json").is_file()), None)


def _run_of(file: Path) -> Path:
    """The run that a file lies in."""
    from wpr.errors import OptionError

    found = _run_around(file)
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
