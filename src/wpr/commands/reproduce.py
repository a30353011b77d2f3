"""`wpr reproduce`: the commands of a table or figure of the paper, run in order, and its numbers beside the paper's."""

from __future__ import annotations

import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wpr.commands import judge_options
from wpr.commands.output import out, save_and_print, say

if TYPE_CHECKING:
    from wpr.reproduce.mapping import Item
    from wpr.reproduce.needs import Needs
    from wpr.reproduce.steps import Options, Step

PAPER_JUDGE = "gpt-4o-2024-05-13"


def complete_item(incomplete: str) -> list[str]:
    """Labels of tables and figures that begin so, for the shell."""
    from wpr.reproduce import load_mapping

    return [label for label in ["all", *load_mapping().items] if label.startswith(incomplete)]


rehearsal_option = partial(typer.Option, rich_help_panel="A rehearsal")
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TABLE KEY=VALUE",
        help="Tables and figures by their label, as tab:main or main, or all; settings of all training commands.",
        autocompletion=complete_item,
    ),
]
List = Annotated[bool, typer.Option("--list", help="List the tables and figures, with recipes and hardware.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands and what they take; run nothing.")]
Collect = Annotated[bool, typer.Option("--collect", help="Write the tables from what is there; run nothing.")]
Runs = Annotated[Path, typer.Option(help="Folder of the runs, and of the tables, in RUNS/reproduce.")]
Launch = Annotated[
    str, typer.Option(help="Launcher of training commands, as 'accelerate launch --config_file zero3.yaml'.")
]
Questions = Annotated[Path | None, typer.Option(help="MT-Bench's file of questions (question.jsonl).")]
Encoder = Annotated[
    str | None, typer.Option(help="Encoder of BERTScore.", show_default="roberta-large, layer 17; SFT in a rehearsal")
]
Rubrics = Annotated[
    list[str] | None,
    judge_options.judge_option("--rubric", help="File in place of a rubric, as summary=FILE or helpfulness=FILE."),
]
RewardModel = Annotated[str | None, judge_options.judge_option(help="Folder of a reward model that judges.")]
Scale = Annotated[float, rehearsal_option(help="Share of the paper's steps and prompts, above 0 and up to 1.")]
Model = Annotated[str | None, rehearsal_option(help="A model in place of all of the paper's.")]
Data = Annotated[Path | None, rehearsal_option(help="A file in HH-RLHF's format in place of the recipes' dialogues.")]
Problems = Annotated[
    Path | None, rehearsal_option(help="A file in APPS's format.", show_default="sums, with --data; else APPS")
]


def reproduce(
    names: Names = None,
    list_items: List = False,
    dry_run: DryRun = False,
    collect: Collect = False,
    runs: Runs = Path("runs"),
    launch: Launch = "",
    questions: Questions = None,
    encoder: Encoder = None,
    judge: judge_options.JudgeModel = None,
    base_url: judge_options.BaseUrl = None,
    reward_model: RewardModel = None,
    rubric: Rubrics = None,
    price_in: judge_options.PriceIn = None,
    price_out: judge_options.PriceOut = None,
    yes: judge_options.Yes = False,
    model: Model = None,
    scale: Scale = 1.0,
    data: Data = None,
    problems: Problems = None,
) -> None:
    """Run the commands of a table or figure of the paper, and put its numbers beside the paper's.

    What is done is skipped, what was interrupted goes on. The judge is the paper's unless another is named; of a
    rehearsal (a part of the paper's steps, another model, other data) it is the reward model of each run.

    [bold]Examples[/bold]

        wpr reproduce --list

        wpr reproduce tab:main --dry-run

        wpr reproduce tab:main --launch "accelerate launch --config_file configs/accelerate/zero3.yaml" --yes

        wpr reproduce all --model models/smollm2 --scale 0.01 --data helpful-base.jsonl.gz --runs runs/rehearsal
    """
    from wpr.errors import OptionError
    from wpr.reproduce import find_items
    from wpr.reproduce.rehearsal import problems_file, questions_file
    from wpr.reproduce.steps import Options, steps_of

    if list_items:
        _list()
        return
    given = names or []
    items = find_items([name for name in given if "=" not in name])
    if not items:
        raise OptionError(
            "no table or figure is named; `wpr reproduce --list` has them, and `all` stands for every one"
        )
    if not 0 < scale <= 1:
        raise OptionError(f"--scale {scale} must be above 0 and at most 1, the paper's own size")
    if questions is None and (collect or dry_run) and not (scale != 1 or model or data):
        questions = Path("question.jsonl")  # which nothing reads now
    options = Options(
        runs=runs,
        judge=_judge(
            judge, base_url, reward_model, (price_in, price_out), yes, rehearses=bool(scale != 1 or model or data)
        ),
        rubrics=_rubrics(rubric or []),
        questions=questions,
        encoder=encoder,
        launch=tuple(shlex.split(launch)),
        scale=scale,
        model=model,
        data=data,
        problems=problems,
        overrides=tuple(name for name in given if "=" in name),
    )
    steps = {item.id: steps_of(item, options) for item in items}
    if dry_run:
        _show(items, steps, options)
        return
    if options.rehearses and not collect:
        problems_file(runs)
        questions_file(runs)
    failed = {} if collect else _run(items, steps)
    for item in items:
        _write(item, options)
    if failed:
        said = "; ".join(f"{label}: {command}" for label, command in failed.items())
        say(f"{len(failed)} of {len(items)} are incomplete. The same command goes on. Ended with an error: {said}")
        raise typer.Exit(1)


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from wpr.reproduce import load_mapping

    mapping = load_mapping()
    # Two columns fit a narrow terminal; four would cut the titles off.
    table = Table("table or figure", "what it shows, recipes and hardware", box=None)
    for label, item in mapping.items.items():
        hardware = dict.fromkeys(mapping.hardware[name] for name in item.recipes)
        needs = f"{', '.join(item.recipes)}; {'; '.join(hardware)}" if item.recipes else "nothing to train"
        table.add_row(label, Text.assemble(item.title, "\n", (needs, "dim")))
    out.print(table)


def _judge(
    model: str | None,
    base_url: str | None,
    reward_model: str | None,
    prices: tuple[float | None, float | None],
    yes: bool,
    rehearses: bool,
) -> tuple[str, ...]:
    """Options of the commands that judge; none: each run's own reward model."""
    from wpr.errors import OptionError

    if model is not None and reward_model is not None:
        raise OptionError("--judge and --reward-model name two judges; give one of them")
    if reward_model is not None:
        return ("--reward-model", reward_model)
    if model is None and rehearses:
        return ()
    named = {"--judge": model or PAPER_JUDGE, "--base-url": base_url, "--price-in": prices[0], "--price-out": prices[1]}
    given = [word for option, value in named.items() if value is not None for word in (option, str(value))]
    return (*given, *(["--yes"] if yes else []))


def _rubrics(given: list[str]) -> dict[str, str]:
    from wpr.errors import OptionError

    found = dict(text.partition("=")[::2] for text in given)
    for name, file in found.items():
        if name not in ("summary", "helpfulness") or not file:
            raise OptionError(f"--rubric {name} must be summary=FILE or helpfulness=FILE")
    return found


def _show(items: list[Item], steps: dict[str, list[Step]], options: Options) -> None:
    """Print commands and needs."""
    from wpr.reproduce.collect import options_text
    from wpr.reproduce.needs import needs_of

    if options.rehearses:
        say(options_text(options))
    for item in items:
        typer.echo(f"\n{item.id}: {item.title}")
        typer.echo(
            f"    {item.nothing}" if item.nothing else "    nothing to run" if not steps[item.id] else "",
            nl=not steps[item.id],
        )
        for step in steps[item.id]:
            typer.echo(f"    {step}{'    # done' if step.done else ''}")
        if steps[item.id]:
            typer.echo(f"    takes: {_words(needs_of(steps[item.id], options))}")
    if len(items) > 1:
        every = [step for item in items for step in steps[item.id]]
        typer.echo(f"\nall of it, what several share once: {_words(needs_of(every, options))}")
    typer.echo(
        "\nHours are the paper's for Gemma-2B on four A100 (its table of wall-clock time), by responses, tokens and "
        "parameters; rows count as long as recipes allow, and loading, evaluating and saving are left out. Disk as "
        "`wpr doctor` has it. Requests: at the most, 250 a pair; the judge's command says the price before it asks."
    )


def _words(needs: Needs) -> str:
    from wpr.pipeline.machine_view import gigabytes

    size = (
        f"{needs.hours:.3g} hours of an A100; {gigabytes(needs.disk)} of disk at the most "
        f"({gigabytes(needs.sharded)} with ZeRO or FSDP), {gigabytes(needs.kept)} once done"
        if needs.disk or not needs.unknown
        else "hours and disk not known"
    )
    return f"{needs.policies} policies to train; {size}; {needs.requests} requests to a judge" + (
        f". Not counted: training {', '.join(needs.unknown)}, of unknown size here" if needs.unknown else ""
    )


def _run(items: list[Item], steps: dict[str, list[Step]]) -> dict[str, str]:
    """Run what is not done; commands that ended with an error, by item. An item stops there, the others go on."""
    failed: dict[str, str] = {}
    for item in items:
        for number, step in enumerate(steps[item.id], 1):
            place = f"{item.id}, {number} of {len(steps[item.id])}"
            if step.done:
                say(f"{place}: done before: {step}")
                continue
            say(f"{place}: {step}")
            code = subprocess.run(step.command, check=False).returncode
            if code in (130, 143):
                raise SystemExit(code)
            if code:
                failed[item.id] = f"{step} (code {code})"
                break
    return failed


def _write(item: Item, options: Options) -> None:
    from wpr.reproduce.collect import collect

    finding, cells = collect(item, options)
    save_and_print(finding, options.runs / "reproduce" / item.name, cells)
    typer.echo("")
