"""`wpr mt-bench`: two-turn questions, answered by models and graded from 1 to 10 by a judge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands import generation_options as generation
from wpr.commands import judge_options
from wpr.commands.output import note, save_and_print, say

if TYPE_CHECKING:
    from wpr.evaluation.judging.questions import Judge
    from wpr.evaluation.mt_bench.grading_rubric import GradingRubric
    from wpr.evaluation.mt_bench.question_file import BenchQuestion
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.runs.responses import ResponseFile

Questions = Annotated[
    Path | None, typer.Option("--questions", "-q", help="A file in MT-Bench's format (question.jsonl).")
]
References = Annotated[Path | None, typer.Option(help="MT-Bench's file of reference answers, if there is one.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write to.", show_default="RUN/evaluations")
]
Temperatures = Annotated[
    list[str] | None,
    generation.sampling_option(
        "--temperature",
        "-t",
        help=f"Temperature of a category, as CATEGORY=VALUE, or VALUE for all{generation.MORE}",
        show_default="MT-Bench's own",
    ),
]
Function = Annotated[
    str | None,
    judge_options.judge_option(
        help="package.module:function that judges: (questions, answers, reference, category, turn) -> 1 to 10."
    ),
]
RubricFile = Annotated[
    Path | None,
    judge_options.judge_option(
        "--rubric", help="A file with what a server's model is told.", show_default="MT-Bench's criteria in our words"
    ),
]
Settings = Annotated[
    list[str] | None,
    judge_options.judge_option(
        "--set", metavar="NAME=VALUE", help=judge_options.SETTINGS_HELP, show_default="max_tokens=1024"
    ),
]


def mt_bench(
    run: generation.RunArgument = None,
    policy: generation.Policies = None,
    model: generation.Models = None,
    questions: Questions = None,
    references: References = None,
    limit: generation.Limit = None,
    output: Output = None,
    restart: generation.Restart = False,
    temperature: Temperatures = None,
    top_k: generation.TopK = 0,
    top_p: generation.TopP = 1.0,
    max_new_tokens: generation.MaxNewTokens = 1024,
    seed: generation.Seed = 0,
    batch_size: generation.BatchSize = 16,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    back_end: generation.BackEndOption = "auto",
    vllm_url: generation.VLLMUrl = None,
    judge: judge_options.JudgeModel = None,
    base_url: judge_options.BaseUrl = None,
    function: Function = None,
    rubric: RubricFile = None,
    key_variable: judge_options.KeyVariable = "OPENAI_API_KEY",
    settings: Settings = None,
    concurrency: judge_options.Concurrency = 16,
    requests_per_minute: judge_options.RequestsPerMinute = None,
    tokens_per_minute: judge_options.TokensPerMinute = None,
    timeout: judge_options.Timeout = 120.0,
    price_in: judge_options.PriceIn = None,
    price_out: judge_options.PriceOut = None,
    yes: judge_options.Yes = False,
    dry_run: judge_options.DryRun = False,
) -> None:
    """Let models answer two-turn questions, have the answers graded, and show scores by category.

    Of a RUN: the SFT model and every finished policy; or of any --model. Without a judge, answers are not graded.
    Interrupted, the same command resumes where it stopped: no answer is drawn and no judgement paid for twice.

    [bold]Examples[/bold]

        wpr mt-bench runs/hh-gemma-2b -q question.jsonl --judge gpt-4o-2024-05-13

        wpr mt-bench runs/hh-gemma-2b -q question.jsonl --judge gpt-4o-2024-05-13 --rubric my-prompts.yaml

        wpr mt-bench -m models/smollm2 -q question.jsonl -j my-judge --base-url http://localhost:8000/v1 -o results -y

        wpr mt-bench -m models/smollm2 -q question.jsonl -o results --limit 8
    """  # fmt: skip
    from wpr.evaluation.judging.questions import RequestLimits
    from wpr.evaluation.response_generation import SamplingParams

    generation.one_of_both(run, model)
    asked, heat = _read(questions, references, limit, temperature or [])
    limits = RequestLimits(concurrency, requests_per_minute, tokens_per_minute, timeout)
    asking = judge_options.AskingOptions(limits, price_in, price_out, yes, dry_run)
    grader = _judge(judge, base_url, key_variable, settings or [], function)
    told = _rubric(rubric, judge)
    chosen = generation.choose_models(run, policy, model, batch_size, restart, dtype, device, back_end, vllm_url)
    chosen.folder(output)  # refused now, not after the first answers
    bench = _Bench(asked, heat, SamplingParams(0.0, top_k, top_p, max_new_tokens, seed), chosen, output)
    answers = {name: bench.answer(name, path) for name, path in chosen.paths.items()}
    say(f"answers to {len(asked)} questions are in {bench.answer_folder}")
    if grader is not None:
        bench.grade(grader, told, answers, asking, {"questions": str(questions), "temperatures": heat})


def _read(
    path: Path | None, references: Path | None, limit: int | None, given: list[str]
) -> tuple[list[BenchQuestion], dict[str, float]]:
    """The questions, and the temperature of each category."""
    from wpr.errors import OptionError
    from wpr.evaluation.mt_bench.question_file import read_questions, temperatures

    if path is None:
        raise OptionError("there are no questions; name a file in MT-Bench's format with --questions question.jsonl")
    questions = read_questions(path, references, limit)
    return questions, temperatures(questions, _temperatures(given, {question.category for question in questions}))


@dataclass(frozen=True)
class _Bench:
    """Questions that models answer, and a judge grades.

    temperatures: by category. output: a folder for all that is written; None: the folder of the models' run.
    """

    questions: list[BenchQuestion]
    temperatures: dict[str, float]
    sampling: SamplingParams
    chosen: generation.ChosenModels
    output: Path | None

    @property
    def answer_folder(self) -> Path:
        """Where the models' answers go."""
        own = None if self.output is None else self.output / "answers"
        return self.chosen.folder(own, "generations", "mt-bench")

    def answer(self, name: str, path: str) -> list[ResponseFile]:
        """A model's answers, one file per turn."""
        from wpr.data import DataSettings, Encoder
        from wpr.evaluation.mt_bench.conversations import first_turn, second_turn
        from wpr.model_loading import load_tokenizer

        settings = DataSettings("prompts") if self.chosen.run is None else self.chosen.run.settings
        tokenizer = load_tokenizer(path, setting="--model")
        encoder = Encoder(tokenizer, settings)
        loaded = self.chosen.load(path, settings, tokenizer)
        files: list[ResponseFile] = []
        for turn in (1, 2):
            if turn == 1:
                asked = first_turn(self.questions, encoder, self.temperatures)
            else:
                asked = second_turn(self.questions, files[0], encoder, self.temperatures)
            file = self.answer_folder / f"{name}-turn{turn}.jsonl"
            files.append(self.chosen.answer(file, name, loaded, asked, self.sampling, turn=turn))
        return files

    def grade(
        self,
        judge: Judge,
        rubric: GradingRubric | None,
        answers: dict[str, list[ResponseFile]],
        asking: judge_options.AskingOptions,
        facts: dict[str, Any],
    ) -> None:
        """Have answers graded; save and print the scores. rubric: None for ours. facts: to be saved with them."""
        from wpr.evaluation.judging.questions import LocalJudge
        from wpr.evaluation.mt_bench.grading import grades_of, to_be_graded
        from wpr.evaluation.mt_bench.scores import mt_bench_finding
        from wpr.findings import slug

        name = f"mt-bench-{slug(judge.name)}"
        folder = self.chosen.folder(self.output, "evaluations") / name
        bare = isinstance(judge, LocalJudge)
        asked = [
            one for model, files in answers.items() for one in to_be_graded(model, self.questions, files, bare, rubric)
        ]
        what = f"{len(asked)} answers to be graded"
        replies = asking.ask(judge, asked, folder / "judge-answers.jsonl", what, f"grades of {judge.name}")
        if replies is None:
            return
        for remark in replies.accounts.notes:
            note(remark)
        grades = {model: grades_of(model, self.questions, replies) for model in answers}
        facts = facts | {
            "judge": dict(judge.identity),
            "rubric": "ours" if rubric is None else asdict(rubric),
            "accounts": asdict(replies.accounts),
            "answers": {model: dict(files[0].header) for model, files in answers.items()},
        }
        rows = ({"model": model, **asdict(one)} for model, own in grades.items() for one in own)
        save_and_print(mt_bench_finding(name, judge.name, self.questions, grades, facts), folder, rows)
        failed = [one for own in grades.values() for one in own if one.status == "failed"]
        if failed:
            say(
                f"{len(failed)} of {len(asked)} answers were not graded ({failed[0].reason}); run the same command "
                "again: it asks only for those"
            )
            raise typer.Exit(judge_options.INCOMPLETE)


def _judge(
    model: str | None, base_url: str | None, key_variable: str, settings: list[str], function: str | None
) -> Judge | None:
    """A server's model, a function, or nobody."""
    from wpr.errors import OptionError

    if function is not None:
        if model is not None or base_url is not None or settings:
            raise OptionError("--judge, --base-url and --set are of servers; leave them out with --function")
        return judge_options.function_judge(function)
    if model is None:
        if base_url is not None or settings:
            raise OptionError("--base-url and --set are of a judge, and none is named; name its model with --judge")
        return None
    # An explanation comes before the rating.
    return judge_options.server_judge(model, base_url, key_variable, settings, {"max_tokens": 1024})


def _rubric(path: Path | None, judge: str | None) -> GradingRubric | None:
    from wpr.errors import OptionError
    from wpr.evaluation.mt_bench.grading_rubric import load_grading_rubric

    if path is None:
        return None
    if judge is None:
        raise OptionError(f"--rubric {path} is told to a server's model, and none is named; name it with --judge")
    return load_grading_rubric(path)


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
