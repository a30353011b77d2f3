"""`wpr mt-bench`: two-turn questions, answered by models and graded from 1 to 10 by a judge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.generation_options import (
    BatchSize,
    Device,
    Dtype,
    GenerationOptions,
    Limit,
    Models,
    Policies,
    Restart,
    RunArgument,
    Seed,
    TopK,
    TopP,
    answer,
    one_of_both,
)
from wpr.commands.judges import (
    INCOMPLETE,
    Prices,
    agreed,
    check_prices,
    function_judge,
    note,
    server_judge,
    write_rows,
)

if TYPE_CHECKING:
    from wpr.evaluation.judging.questions import Judge, RequestLimits
    from wpr.evaluation.mt_bench.question_file import BenchQuestion
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.evaluation.run_models import RunModels
    from wpr.runs.responses import ResponseFile

PANEL = "The judge"


def mt_bench(
    run: RunArgument = None,
    policy: Policies = None,
    model: Models = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", "-q", help="A file in MT-Bench's format (question.jsonl).")
    ] = None,
    references: Annotated[
        Path | None, typer.Option("--references", help="MT-Bench's file of reference answers, if there is one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder.", show_default="RUN/evaluations")
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            "--temperature",
            "-t",
            help="CATEGORY=VALUE, or a VALUE for all; again for more.",
            show_default="MT-Bench's own",
        ),
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.")] = 1024,
    seed: Seed = 0,
    limit: Limit = None,
    batch_size: BatchSize = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    restart: Restart = False,
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            "-j",
            rich_help_panel=PANEL,
            help="A model of an OpenAI-compatible server. Without a judge the questions are answered, not graded.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", rich_help_panel=PANEL, help="The server.", show_default="OPENAI_BASE_URL, or OpenAI's"
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--function",
            rich_help_panel=PANEL,
            help="package.module:function is the judge: (questions, answers, reference, category, turn) -> 1 to 10.",
        ),
    ] = None,
    key_variable: Annotated[
        str, typer.Option("--key-variable", rich_help_panel=PANEL, help="The environment variable with the key.")
    ] = "OPENAI_API_KEY",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            rich_help_panel=PANEL,
            help="Of requests, as temperature=0; NAME=null leaves one out.",
            show_default="max_tokens=1024",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", rich_help_panel=PANEL, help="Requests under way at once.")
    ] = 16,
    requests_per_minute: Annotated[
        float | None, typer.Option("--requests-per-minute", rich_help_panel=PANEL, help="At most.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option("--tokens-per-minute", rich_help_panel=PANEL, help="At most, by estimate.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", rich_help_panel=PANEL, help="Seconds for a request.")] = 120.0,
    price_in: Annotated[
        float | None, typer.Option("--price-in", rich_help_panel=PANEL, help="Of a million tokens sent.")
    ] = None,
    price_out: Annotated[
        float | None, typer.Option("--price-out", rich_help_panel=PANEL, help="Of a million tokens received.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", rich_help_panel=PANEL, help="Ask the judge without asking you first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=PANEL, help="Say what grading would take; ask no judge.")
    ] = False,
) -> None:
    """Let models answer two-turn questions, have the answers graded, and show scores by category.

    Of a RUN: the SFT model and every finished policy; or of any --model. Interrupted, the same command goes on where it
    stopped: no answer is drawn and no judgement paid for twice.

    [bold]Examples[/bold]

        wpr mt-bench runs/hh-gemma-2b -q question.jsonl --judge gpt-4o-2024-05-13

        wpr mt-bench -m models/smollm2 -q question.jsonl -j my-judge --base-url http://localhost:8000/v1 -o results -y

        wpr mt-bench -m models/smollm2 -q question.jsonl -o results --limit 8
    """  # fmt: skip
    from wpr.errors import OptionError
    from wpr.evaluation.judging.questions import RequestLimits
    from wpr.evaluation.mt_bench.question_file import read_questions, temperatures
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.evaluation.run_models import RunModels, named_models
    from wpr.findings import slug

    one_of_both(run, model)
    if questions is None:
        raise OptionError("there are no questions; name a file in MT-Bench's format with --questions question.jsonl")
    if run is None and output is None:
        raise OptionError("--model needs a folder for the results; name it with -o")
    check_prices((price_in, price_out))
    limits = RequestLimits(concurrency, requests_per_minute, tokens_per_minute, timeout)
    grader = _judge(judge, base_url, key_variable, settings or [], function)
    found = None if run is None else RunModels(run)
    for remark in [] if found is None or policy else found.notes():
        note(remark)
    asked = read_questions(questions, references, limit)
    heat = temperatures(asked, _temperatures(temperature or [], {question.category for question in asked}))
    talk = _Talk(
        asked,
        heat,
        SamplingParams(0.0, top_k, top_p, max_new_tokens, seed),
        GenerationOptions(batch_size, restart, found.dtype if found is not None and dtype == "auto" else dtype, device),
        output / "answers" if output is not None else found.folder / "generations" / "mt-bench",  # type: ignore[union-attr]
    )
    models = named_models(model or []) if found is None else found.choose(policy or [])
    answers = {name: talk.hold(name, path, found) for name, path in models.items()}
    typer.echo(f"answers to {len(asked)} questions are in {talk.folder}", err=True)
    if grader is not None:
        name = f"mt-bench-{slug(grader.name)}"
        folder = (output or found.folder / "evaluations") / name  # type: ignore[union-attr]
        facts = {"questions": str(questions), "temperatures": heat}
        _grade(grader, name, folder, asked, answers, limits, (price_in, price_out), yes, dry_run, facts)


@dataclass(frozen=True)
class _Talk:
    """Conversations with models, to be held one after the other."""

    questions: list[BenchQuestion]
    temperatures: dict[str, float]
    drawing: SamplingParams
    how: GenerationOptions
    folder: Path

    def hold(self, name: str, path: str, found: RunModels | None) -> list[ResponseFile]:
        """The model's answers, a file a turn."""
        from wpr.data import DataSettings, Encoder
        from wpr.evaluation.mt_bench.conversations import first_turn, second_turn
        from wpr.evaluation.run_models import load_speaker
        from wpr.model_loading import load_tokenizer

        settings = DataSettings("prompts") if found is None else found.settings
        tokenizer = load_tokenizer(path, setting="--model")
        encoder = Encoder(tokenizer, settings)
        speaker = load_speaker(path, settings, self.how.dtype, self.how.device, tokenizer, own_stops=found is None)
        files: list[ResponseFile] = []
        for turn in (1, 2):
            if turn == 1:
                asked = first_turn(self.questions, encoder, self.temperatures)
            else:
                asked = second_turn(self.questions, files[0], encoder, self.temperatures)
            files.append(
                answer(
                    self.folder / f"{name}-turn{turn}.jsonl", name, speaker, asked, self.drawing, self.how, turn=turn
                )
            )
        return files


def _grade(
    judge: Judge,
    name: str,
    folder: Path,
    questions: list[BenchQuestion],
    answers: dict[str, list[ResponseFile]],
    limits: RequestLimits,
    prices: Prices,
    yes: bool,
    dry_run: bool,
    facts: dict[str, Any],
) -> None:
    """Have answers graded, and keep the scores."""
    from wpr.commands.output import save_and_print, show_progress
    from wpr.evaluation.judging.asking import ask_all, pending
    from wpr.evaluation.judging.questions import LocalJudge
    from wpr.evaluation.mt_bench.grading import grades_of, to_be_graded
    from wpr.evaluation.mt_bench.scores import mt_bench_finding

    cache = folder / "judge-answers.jsonl"
    bare = isinstance(judge, LocalJudge)
    asked = [one for model, files in answers.items() for one in to_be_graded(model, questions, files, bare)]
    if not agreed(judge, pending(judge, asked, cache), f"{len(asked)} answers to be graded", prices, yes, dry_run):
        return
    with show_progress(f"grades of {judge.name}", len(asked)) as advance:
        replies = ask_all(judge, asked, cache, limits, advance, note)
    for remark in replies.accounts.notes:
        note(remark)
    grades = {model: grades_of(model, questions, replies) for model in answers}
    write_rows(folder / "data.jsonl", ({"model": model, **asdict(one)} for model, own in grades.items() for one in own))
    facts = facts | {
        "judge": dict(judge.identity),
        "accounts": asdict(replies.accounts),
        "answers": {model: dict(files[0].header) for model, files in answers.items()},
    }
    save_and_print(mt_bench_finding(name, judge.name, questions, grades, facts), folder)
    failed = [one for own in grades.values() for one in own if one.status == "failed"]
    if failed:
        typer.echo(
            f"{len(failed)} of {len(asked)} answers were not graded ({failed[0].reason}); run the same command again: "
            "it asks only for those",
            err=True,
        )
        raise typer.Exit(INCOMPLETE)


def _judge(
    model: str | None, base_url: str | None, key_variable: str, settings: list[str], function: str | None
) -> Judge | None:
    """A server's model, a function, or nobody."""
    from wpr.errors import OptionError

    if function is not None:
        if model is not None or base_url is not None or settings:
            raise OptionError("--judge, --base-url and --set are of servers; leave them out with --function")
        return function_judge(function)
    if model is None:
        if base_url is not None or settings:
            raise OptionError("--base-url and --set are of a judge, and none is named; name its model with --judge")
        return None
    # An explanation comes before the rating.
    return server_judge(model, base_url, key_variable, settings, {"max_tokens": 1024})


def _temperatures(given: list[str], categories: set[str]) -> dict[str, float]:
    from wpr.errors import OptionError

    everywhere: dict[str, float] = {}
    own: dict[str, float] = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise OptionError(f"--temperature {text} is neither a number nor CATEGORY=NUMBER, as writing=0.7") from None
        if equals:
            own[name] = number
        else:
            everywhere = dict.fromkeys(categories, number)
    return everywhere | own  # in whatever order they were given
