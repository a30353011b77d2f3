"""`wpr pass-at-1`: how many programming problems a model solves at the first try, by difficulty."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.generation_options import (
    RESTART,
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
    answer,
    one_of_both,
)

if TYPE_CHECKING:
    from wpr.evaluation.code_tasks import CodeTask
    from wpr.evaluation.run_models import RunModels


def pass_at_1(
    run: RunArgument = None,
    policy: Policies = None,
    model: Models = None,
    problems: Annotated[
        str | None,
        typer.Option(
            "--problems",
            help="A file in APPS's or HumanEval's format, or humaneval.",
            show_default="the run's held-out problems",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder.", show_default="RUN/evaluations/pass-at-1-...")
    ] = None,
    style: Annotated[
        str,
        typer.Option(
            "--style",
            help="complete: the model continues the prompt; chat: it is asked, and answers with a code block; auto: "
            "chat where the tokenizer has a chat template.",
        ),
    ] = "auto",
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest response, in tokens.")] = 512,
    seed: Seed = 0,
    limit: Limit = None,
    batch_size: BatchSize = 16,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Programs run at once, at most one per core.", show_default="one per core"),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time of a test, wall clock and processor.")] = 4.0,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Run programs even where they cannot be isolated.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    restart: Restart = False,
) -> None:
    """Let models write programs, run them in a sandbox, and count the problems that are solved at the first try.

    Of a RUN: the SFT model and every finished policy, on the problems that the run held out, or on --problems. Or of
    any --model on --problems. Interrupted, the same command goes on where it stopped.

    [bold]Examples[/bold]

        wpr pass-at-1 runs/apps-codegemma-7b

        wpr pass-at-1 -m models/smollm2 --problems humaneval -o results/humaneval

        wpr pass-at-1 -m models/smollm2 --problems apps-test.jsonl --limit 100 -o results/apps
    """
    from wpr.commands.output import save_and_print, show_progress
    from wpr.data import DataSettings, Encoder
    from wpr.errors import OptionError
    from wpr.evaluation.code_scores import pass_at_1_finding, run_programs
    from wpr.evaluation.prompt_file import as_asked
    from wpr.evaluation.response_generation import SamplingParams, set_aside
    from wpr.evaluation.run_models import RunModels, load_speaker, named_models
    from wpr.model_loading import load_tokenizer
    from wpr.rewards.code import Limits, Runner

    one_of_both(run, model)
    if run is None and (problems is None or output is None):
        raise OptionError("--model needs --problems (a file, or humaneval) and a folder for the results (-o)")
    if style not in ("auto", "complete", "chat"):
        raise OptionError(f"--style {style} is not known; choose auto, complete or chat")
    limits = Limits(wall_seconds=seconds, cpu_seconds=seconds)
    runner = Runner(limits, workers, unsafe)  # refuses now, not after hours of generation
    drawing = SamplingParams(temperature, 0, 1.0, max_new_tokens, seed)
    found = None if run is None else RunModels(run)
    for note in [] if found is None or policy else found.notes():
        typer.echo(f"Note: {note}", err=True)
    models = named_models(model or []) if found is None else found.choose(policy or [])
    how = GenerationOptions(
        batch_size, restart, found.dtype if found is not None and dtype == "auto" else dtype, device
    )
    responses, tried, styles, benchmark = {}, {}, {}, ""
    for name, path in models.items():
        tokenizer = load_tokenizer(path, setting="--model")
        template = _template(style, tokenizer)
        styles[name] = "chat" if template == "chat" else "complete"
        settings = DataSettings("prompts", template=template)
        if problems is None and found is not None:
            settings = found.settings  # as PPO asked
        benchmark, tasks = _tasks(problems, styles[name], limit, found)
        folder = output or found.folder / "evaluations" / f"pass-at-1-{benchmark}"  # type: ignore[union-attr]
        speaker = load_speaker(path, settings, how.dtype, how.device, tokenizer, own_stops=found is None)
        asked = as_asked([(task.task_id, task.row) for task in tasks], Encoder(tokenizer, settings))
        file = f"{name}-t{temperature:g}.jsonl"
        responses[name] = answer(folder / "responses" / file, name, speaker, asked, drawing, how, style=styles[name])
        if restart:
            set_aside(folder / "outcomes" / file)
        with show_progress(f"{name}: programs", len(tasks)) as advance:
            tried[name] = run_programs(
                folder / "outcomes" / file, tasks, responses[name], limits, runner, RESTART, advance
            )
    facts: dict[str, Any] = {
        "sampling": asdict(drawing),
        "limits": asdict(limits),
        "isolated": runner.bwrap is not None,
        "styles": styles,
        "responses": {name: dict(file.header) for name, file in responses.items()},
    }
    save_and_print(pass_at_1_finding(benchmark, tried, responses, facts), folder)


def _template(style: str, tokenizer: Any) -> str:
    """How a prompt becomes tokens: ``chat`` or ``text``."""
    if style == "auto":
        return "chat" if getattr(tokenizer, "chat_template", None) else "text"
    return "chat" if style == "chat" else "text"


def _tasks(problems: str | None, style: str, limit: int | None, found: RunModels | None) -> tuple[str, list[CodeTask]]:
    """The benchmark's name, and its tasks as a model of this style is asked."""
    from wpr.evaluation.code_tasks import humaneval_file, read_tasks

    if problems is None:
        assert found is not None
        return "held-out", found.code_tasks(limit)
    return read_tasks(humaneval_file() if problems == "humaneval" else Path(problems), style, limit)  # type: ignore[arg-type]
