"""`wpr pass-at-1`: how many programming problems a model solves at the first try, by difficulty."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.generate import RESTART, BatchSize, Device, Dtype, Models, Policies, Restart, RunArgument, Seed

if TYPE_CHECKING:
    from wpr.evaluation.code_tasks import CodeTask
    from wpr.evaluation.generation import Speaker


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
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many problems.")] = None,
    batch_size: BatchSize = 16,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Programs run at once.", show_default="cores")
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
    """  # fmt: skip
    from wpr.evaluation.generation import Drawing
    from wpr.pipeline.answering import RunModels, named_models
    from wpr.pipeline.errors import OptionError
    from wpr.rewards.code import Limits, Runner

    if (run is None) == (not model):
        raise OptionError("give a RUN, or models with --model; not both, and not neither")
    if run is None and (problems is None or output is None):
        raise OptionError("--model needs --problems (a file, or humaneval) and a folder for the results (-o)")
    if style not in ("auto", "complete", "chat"):
        raise OptionError(f"--style {style} is not known; choose auto, complete or chat")
    limits = Limits(wall_seconds=seconds, cpu_seconds=seconds)
    runner = Runner(limits, workers, unsafe)  # refuses now, not after hours of generation
    drawing = Drawing(temperature, 0, 1.0, max_new_tokens, seed)
    found = None if run is None else RunModels(run)
    models = named_models(model or []) if found is None else found.choose(policy or [])
    bench = _Bench(drawing, runner, limits, style, batch_size, limit, dtype, device, restart)
    for name, path in models.items():
        bench.load(name, path, problems, found)
        folder = output or _place(run, bench.benchmark)
        bench.work(name, folder)
    bench.show(folder)


def _place(run: Path | None, benchmark: str) -> Path:
    assert run is not None
    return run / "evaluations" / f"pass-at-1-{benchmark}"


class _Bench:
    """One model after the other on the same problems."""

    def __init__(
        self,
        drawing: Any,
        runner: Any,
        limits: Any,
        style: str,
        batch_size: int,
        limit: int | None,
        dtype: str,
        device: str | None,
        restart: bool,
    ) -> None:
        self.drawing, self.runner, self.limits, self.style, self.batch_size = drawing, runner, limits, style, batch_size
        self.limit, self.dtype, self.device, self.restart = limit, dtype, device, restart
        self.benchmark = ""
        self.tried: dict[str, Any] = {}
        self.responses: dict[str, Any] = {}

    def load(self, name: str, path: str, problems: str | None, found: Any) -> None:
        """The model, and the problems as it reads them."""
        from wpr.data import DataSettings, Encoder
        from wpr.evaluation.code_tasks import humaneval_file, read_tasks
        from wpr.evaluation.prompts import as_asked
        from wpr.pipeline.answering import load_speaker
        from wpr.pipeline.models import load_tokenizer

        tokenizer = load_tokenizer(path)
        chat = bool(getattr(tokenizer, "chat_template", None)) if self.style == "auto" else self.style == "chat"
        self.asked_style = "chat" if chat else "complete"
        settings = DataSettings("prompts", template="chat" if chat else "text")
        tasks: list[CodeTask]
        if problems is None:
            self.benchmark, tasks = "held-out", found.code_tasks(self.limit)
            settings = found.settings
        else:
            file = humaneval_file() if problems == "humaneval" else Path(problems)
            self.benchmark, tasks = read_tasks(file, self.asked_style, self.limit)  # type: ignore[arg-type]
        self.tasks = tasks
        self.speaker: Speaker = load_speaker(path, settings, self.dtype, self.device, tokenizer, found is None)
        self.asked = as_asked([(task.task_id, task.row) for task in tasks], Encoder(tokenizer, settings))

    def work(self, name: str, folder: Path) -> None:
        """Generate, then run."""
        from wpr.commands.progress import moving
        from wpr.evaluation.code_scores import run_programs
        from wpr.evaluation.generation import generate_file, header_of, made_otherwise, set_aside
        from wpr.pipeline.environment import versions

        path = folder / "responses" / f"{name}-t{self.drawing.temperature:g}.jsonl"
        outcomes = folder / "outcomes" / path.name
        header = header_of(
            self.speaker, self.asked, self.drawing, name=name, style=self.asked_style, versions=versions()
        )
        if self.restart:
            if made_otherwise(path, header):
                set_aside(path)
            set_aside(outcomes)
        with moving(f"{name}: responses", len(self.asked)) as advance:
            self.responses[name] = generate_file(
                path, self.speaker, self.asked, self.drawing, header, self.batch_size, RESTART, advance
            )
        with moving(f"{name}: programs", len(self.tasks)) as advance:
            self.tried[name] = run_programs(
                outcomes, self.tasks, self.responses[name], self.limits, self.runner, RESTART, advance
            )

    def show(self, folder: Path) -> None:
        """Keep and print the table."""
        from dataclasses import asdict

        from wpr.commands.keeping import keep
        from wpr.evaluation.code_scores import pass_at_1_finding

        settings = {
            "style": self.asked_style,
            "sampling": asdict(self.drawing),
            "limits": asdict(self.limits),
            "isolated": self.runner.bwrap is not None,
            "responses": {name: dict(file.header) for name, file in self.responses.items()},
        }
        keep(pass_at_1_finding(self.benchmark, self.tried, self.responses, settings), folder)
