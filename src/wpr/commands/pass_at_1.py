"""`wpr pass-at-1`: how many programming problems a model solves at the first try, by difficulty."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands import generation_options as generation
from wpr.commands.output import save_and_print, show_progress

if TYPE_CHECKING:
    from wpr.evaluation.code_scores import ProgramResult
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.rewards.code import Runner
    from wpr.runs.responses import ResponseFile

Problems = Annotated[
    str | None,
    typer.Option(help="A file in APPS's or HumanEval's format, or humaneval.", show_default="the run's held-out ones"),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder to write to.", show_default="RUN/evaluations/pass-at-1-..."),
]
Style = Annotated[
    str,
    typer.Option(
        help="How models are asked. complete: the model continues the prompt; chat: it is asked, and answers with a "
        "code block; auto: chat where the tokenizer has a chat template."
    ),
]
Temperature = Annotated[
    float, generation.sampling_option("--temperature", "-t", help="Temperature to draw at; 0 is greedy.")
]
Workers = Annotated[
    int | None,
    generation.computing_option(help="Programs run at once, at most one per core.", show_default="one per core"),
]
Seconds = Annotated[float, generation.computing_option(help="Time of a test, wall clock and processor.")]
Unsafe = Annotated[
    bool, generation.computing_option("--unsafe", help="Run programs even where they cannot be isolated.")
]


def pass_at_1(
    run: generation.RunArgument = None,
    policy: generation.Policies = None,
    model: generation.Models = None,
    problems: Problems = None,
    style: Style = "auto",
    limit: generation.Limit = None,
    output: Output = None,
    restart: generation.Restart = False,
    temperature: Temperature = 0.0,
    max_new_tokens: generation.MaxNewTokens = 512,
    seed: generation.Seed = 0,
    batch_size: generation.BatchSize = 16,
    workers: Workers = None,
    seconds: Seconds = 4.0,
    unsafe: Unsafe = False,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    back_end: generation.BackEndOption = "auto",
    vllm_url: generation.VLLMUrl = None,
) -> None:
    """Let models write programs, run them in a sandbox, and count the problems that are solved at the first try.

    Of a RUN: the SFT model and every finished policy, on the problems that the run held out, or on --problems. Or of
    any --model on --problems. Interrupted, the same command resumes where it stopped.

    [bold]Examples[/bold]

        wpr pass-at-1 runs/apps-codegemma-7b

        wpr pass-at-1 -m models/smollm2 --problems humaneval -o results/humaneval

        wpr pass-at-1 -m models/smollm2 --problems apps-test.jsonl --limit 100 -o results/apps
    """
    from wpr.errors import OptionError
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.rewards.code import Limits, Runner

    generation.one_of_both(run, model)
    if run is None and (problems is None or output is None):
        raise OptionError("--model needs --problems (a file, or humaneval) and a folder for the results (-o)")
    if style not in ("auto", "complete", "chat"):
        raise OptionError(f"--style {style} is not known; choose auto, complete or chat")
    limits = Limits(wall_seconds=seconds, cpu_seconds=seconds)
    runner = Runner(limits, workers, unsafe)  # refuses now, not after hours of generation
    sampling = SamplingParams(temperature, 0, 1.0, max_new_tokens, seed)
    chosen = generation.choose_models(run, policy, model, batch_size, restart, dtype, device, back_end, vllm_url)
    exam = _Exam(chosen, sampling, runner, problems, limit, output)
    for name, path in chosen.paths.items():
        exam.take(name, path, style)
    exam.save()


@dataclass
class _Exam:
    """Models that write programs, one after the other, and what came of it.

    problems: a file, or ``humaneval``; None: those that the run held out. limit: how many of them.
    """

    chosen: generation.ChosenModels
    sampling: SamplingParams
    runner: Runner
    problems: str | None
    limit: int | None
    output: Path | None
    benchmark: str = ""
    styles: dict[str, str] = field(default_factory=dict)
    responses: dict[str, ResponseFile] = field(default_factory=dict)
    results: dict[str, list[ProgramResult]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.chosen.folder(self.output, "evaluations", f"pass-at-1-{self.benchmark}")

    def take(self, name: str, path: str, style: str) -> None:
        """Let one model write programs, and run them."""
        from wpr.data import DataSettings, Encoder
        from wpr.evaluation.code_scores import run_programs
        from wpr.evaluation.code_tasks import humaneval_file, read_tasks
        from wpr.evaluation.prompt_file import as_asked
        from wpr.evaluation.response_generation import set_aside
        from wpr.model_loading import load_tokenizer

        tokenizer = load_tokenizer(path, setting="--model")
        chat = style == "chat" or (style == "auto" and bool(getattr(tokenizer, "chat_template", None)))
        self.styles[name] = "chat" if chat else "complete"
        if self.problems is None:
            assert self.chosen.run is not None
            settings = self.chosen.run.settings  # as PPO asked
            self.benchmark, tasks = "held-out", self.chosen.run.code_tasks(self.limit)
        else:
            settings = DataSettings("prompts", template="chat" if chat else "text")
            file = humaneval_file() if self.problems == "humaneval" else Path(self.problems)
            self.benchmark, tasks = read_tasks(file, "chat" if chat else "complete", self.limit)
        loaded = self.chosen.load(path, settings, tokenizer)
        asked = as_asked([(task.task_id, task.row) for task in tasks], Encoder(tokenizer, settings))
        own = f"{name}-t{self.sampling.temperature:g}.jsonl"
        answers, outcomes = self.folder / "responses" / own, self.folder / "outcomes" / own
        made = self.chosen.answer(answers, name, loaded, asked, self.sampling, style=self.styles[name])
        self.responses[name] = made
        if self.chosen.restart:
            set_aside(outcomes)
        with show_progress(f"{name}: programs", len(tasks)) as advance:
            self.results[name] = run_programs(
                outcomes, tasks, made, self.runner.limits, self.runner, generation.RESTART, advance
            )

    def save(self) -> None:
        """Save and print who solved how many."""
        from wpr.atomic_io import write_atomically
        from wpr.evaluation.code_scores import paper_table, pass_at_1_finding
        from wpr.findings import as_csv

        facts: dict[str, Any] = {
            "sampling": asdict(self.sampling),
            "limits": asdict(self.runner.limits),
            "isolated": self.runner.bwrap is not None,
            "styles": self.styles,
            "responses": {name: dict(file.header) for name, file in self.responses.items()},
        }
        finding = pass_at_1_finding(self.benchmark, self.results, self.responses, facts)
        write_atomically(self.folder / "paper-table.csv", as_csv(*paper_table(finding)))
        save_and_print(finding, self.folder)
