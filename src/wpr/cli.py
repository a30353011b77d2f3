"""The `wpr` command: thin, one function a command. What the commands do is in `wpr.pipeline`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

# Read when torch is loaded. Threads that wait for each other by spinning take the processor from those that they wait
# for as soon as the machine has other work: the semantic penalty then took ten times as long, and three times so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wpr import __version__
from wpr.commands.analyze import app as analyze_app
from wpr.commands.generate import generate
from wpr.commands.judge import judge
from wpr.commands.mt_bench import mt_bench
from wpr.commands.pass_at_1 import pass_at_1

app = typer.Typer(
    name="wpr",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Align language models with RLHF, close in meaning to a reference model.\n\n"
    "A recipe states an experiment; [bold]wpr run RECIPE[/bold] runs all of it and, run again, goes on where it "
    "stopped.",
)
geometry_app = typer.Typer(no_args_is_help=True, help="Token geometries: distances between a model's tokens.")
app.add_typer(geometry_app, name="geometry")
app.add_typer(analyze_app, name="analyze")
# A file has no width: tables are written whole to it.
out = Console(soft_wrap=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def _shipped(incomplete: str) -> list[str]:
    """Completion of recipe names."""
    from wpr.config.recipe_file import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or a shipped recipe's name.", autocompletion=_shipped)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, as ppo.beta=0.1.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan; start nothing.")]
OnChange = Annotated[
    str,
    typer.Option(
        "--on-change",
        help="A stage in the folder was made by other settings: [bold]refuse[/bold], [bold]restart[/bold] it (the old "
        "one is moved to old/), or [bold]keep[/bold] it.",
    ),
]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", "-p", help="A policy of the recipe; give it again for more.")
]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    policy: Policies = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Run all stages of a recipe: data, SFT, reward model, PPO for each policy.

    Stages that are done are skipped; one that was interrupted goes on from its last checkpoint.

    [bold]Examples[/bold]

        wpr run tiny

        wpr run hh-gemma-2b model.name=my/model data.source=my.jsonl.gz

        wpr run my-recipe.yaml --policy rkl --policy semantic ppo.beta=0.02

        accelerate launch -m wpr run tldr-gemma-2b
    """
    _execute(recipe, overrides, policy, None, dry_run, on_change)


@app.command()
def quickstart(
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: everything, but too briefly to learn.")] = False,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Align a small story model under KL and under the semantic regularizer, and write a page that shows it.

    Minutes on a laptop's CPU, nothing to download. It is the recipe [bold]quickstart[/bold] (with --quick,
    [bold]quickstart-quick[/bold]) followed by [bold]wpr report[/bold].

    [bold]Examples[/bold]: wpr quickstart   |   wpr quickstart --quick   |   wpr quickstart seed=1 output=runs/seed-1
    """
    folder = _execute("quickstart-quick" if quick else "quickstart", overrides, None, None, dry_run, on_change)
    if folder is not None:
        from wpr.report import write_report

        page = folder / "report.html"
        for problem in write_report([folder], page):
            err.print(f"Note: {problem}")
        out.print(f"the report is in {page.resolve()}", soft_wrap=True, highlight=False)


@app.command()
def sft(
    recipe: RecipeArgument, overrides: Overrides = None, dry_run: DryRun = False, on_change: OnChange = "refuse"
) -> None:
    """Fine-tune the model on demonstrations (the recipe's [bold]sft[/bold] section).

    [bold]Example[/bold]: wpr sft hh-gemma-2b sft.learning_rate=2e-5
    """
    _execute(recipe, overrides, None, "sft", dry_run, on_change)


@app.command()
def reward(
    recipe: RecipeArgument, overrides: Overrides = None, dry_run: DryRun = False, on_change: OnChange = "refuse"
) -> None:
    """Train the reward model on preference pairs (the recipe's [bold]reward[/bold] section).

    [bold]Example[/bold]: wpr reward hh-gemma-2b
    """
    _execute(recipe, overrides, None, "reward", dry_run, on_change)


@app.command()
def ppo(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    policy: Policies = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Train policies with PPO on the run's SFT and reward models.

    [bold]Example[/bold]: wpr ppo hh-gemma-2b --policy semantic ppo.beta=0.02
    """
    _execute(recipe, overrides, policy, "ppo", dry_run, on_change)


@app.command()
def sweep(
    recipe: RecipeArgument,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SWEEP KEY=VALUE", help="A sweep of the recipe; settings.")
    ] = None,
    policy: Policies = None,
    grid: Annotated[list[str] | None, typer.Option(help="key=value,value,...; give it again for more keys.")] = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Train several policies on one SFT and one reward model, and compare them.

    [bold]Examples[/bold]

        wpr sweep tldr-gemma-2b ablations

        wpr sweep hh-gemma-2b beta --policy rkl --policy paper

        wpr sweep my-recipe.yaml --grid ppo.beta=0.1,0.01 --grid regularizer.lam=5,10
    """
    given = list(arguments or [])
    name = given.pop(0) if given and "=" not in given[0] else None
    _execute(recipe, given, policy, None, dry_run, on_change, sweep_name=name, grid=grid or [], sweeping=True)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one.", autocompletion=_shipped)] = None,
) -> None:
    """List the shipped recipes, or show one with its comments.

    [bold]Examples[/bold]: wpr recipes   |   wpr recipes tldr-gemma-2b > mine.yaml
    """
    from wpr.config.recipe_file import find_recipe, shipped_recipes
    from wpr.config.yaml_file import read_yaml

    if name is not None:
        typer.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)
        return
    table = Table("recipe", "what it is", box=None)
    for found, path in shipped_recipes().items():
        table.add_row(found, str(read_yaml(path).values.get("description", "")))
    out.print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, typer.Option("--csv", help="A folder for the tables, as CSV files.")] = None,
) -> None:
    """Write one page about runs: curves, win rates, cost, responses, and penalties token by token.

    [bold]Example[/bold]: wpr report runs/tiny runs/other -o report.html --csv tables
    """
    from wpr.report import write_report

    for problem in write_report(runs, output, csv):
        err.print(f"note: {problem}")
    typer.echo(f"the page is in {output}")


@app.command()
def doctor(recipe: Annotated[str | None, typer.Argument(help="What would it need?", autocompletion=_shipped)] = None,
           overrides: Overrides = None) -> None:  # fmt: skip
    """Say what is installed, which devices are usable, and what a recipe needs (memory, disk, downloads).

    [bold]Examples[/bold]: wpr doctor   |   wpr doctor tldr-gemma-7b
    """
    from wpr.config.recipe_file import load_recipe
    from wpr.pipeline.doctor import examine, examine_recipe

    loaded = None if recipe is None else load_recipe(recipe, overrides or [])
    examine(out)
    if loaded is not None:
        examine_recipe(loaded, out)


@geometry_app.command("build")
def geometry_build(
    model: Annotated[str, typer.Argument(help="A model's folder or hub name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("geometry.safetensors"),
    metric: Annotated[str, typer.Option(help="euclidean or cosine.")] = "euclidean",
    neighbours: Annotated[
        str | None,
        typer.Option(help="The paper's k1, or all.", show_default="512, or all of a smaller vocabulary"),
    ] = None,
    scale: Annotated[str, typer.Option(help="median-nn, none, or a number.")] = "median-nn",
) -> None:
    """Measure the distances between a model's tokens and keep what the penalty needs of them in a file.

    [bold]Example[/bold]: wpr geometry build runs/tiny/sft/model -o geometry.safetensors
    """
    from wpr.model_geometry import build_geometry

    out.print(build_geometry(model, output, metric, neighbours, scale))


@geometry_app.command("show")
def geometry_show(
    model: Annotated[str, typer.Argument(help="A model's folder or hub name.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file that `build` wrote for it.")] = None,
    words: Annotated[list[str] | None, typer.Option("--word", "-w", help="Show this word's nearest tokens.")] = None,
) -> None:
    """Describe a model's token geometry: scale, tokens left out of it, nearest tokens of words.

    [bold]Example[/bold]: wpr geometry show runs/tiny/sft/model -w house -w good
    """
    from wpr.model_geometry import show_geometry

    out.print(show_geometry(model, file, words or []), highlight=False)


app.command()(generate)
app.command()(judge)
app.command("mt-bench")(mt_bench)
app.command("pass-at-1")(pass_at_1)


def _execute(
    name: str,
    overrides: list[str] | None,
    policies: list[str] | None,
    only: str | None,
    dry_run: bool,
    on_change: str,
    sweep_name: str | None = None,
    grid: list[str] | None = None,
    sweeping: bool = False,
) -> Path | None:
    """Load the recipe, plan it, and print the plan or carry it out; the run's folder on the process that wrote it."""
    from wpr.config.recipe_file import load_recipe
    from wpr.config.typed import unknown
    from wpr.errors import RecipeError
    from wpr.pipeline.run import Run, plan
    from wpr.pipeline.sweep import members

    if on_change not in ("refuse", "restart", "keep"):
        raise RecipeError(f"--on-change {on_change} must be refuse, restart or keep")
    recipe = load_recipe(name, overrides or [])
    for policy in policies or []:
        if policy not in recipe.policy_names:
            raise unknown(policy, recipe.policy_names, lambda _: f"recipe {recipe.name}", kind="policy")
    if only in ("sft", "reward") and getattr(recipe, only) is None:
        raise RecipeError(f"recipe {recipe.name} has no {only} stage ({only}: null)")
    changes = members(recipe, sweep_name, policies or [], grid or []) if sweeping else {}
    chosen = list(changes) or policies or None  # none given: those that the recipe trains
    stages = plan(recipe, [] if only in ("sft", "reward") else chosen, changes)
    if only == "sft":
        stages = [stage for stage in stages if stage.name != "reward"]
    if dry_run:
        from wpr.pipeline.plan_view import show_plan

        show_plan(recipe, stages, out)
        return None
    from wpr.pipeline.doctor import space_note
    from wpr.pipeline.results import show_results

    work = Run(recipe, on_change, say=lambda text: err.print(text))  # type: ignore[arg-type]
    if (note := space_note(recipe, stages)) is not None:
        work.say(note)
    results = work.execute(stages, None if only is None else {only})
    show_results(results, work.folder.path, out)
    return work.folder.path if work.folder.writes else None


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C and a polite kill end a run alike: the manifest says so, and locks are released."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    # One that is ignored, as Ctrl-C is for what a shell runs in the background, stays so.
    before = {number: signal.getsignal(number) for number in ENDED}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


ENDED = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


def main() -> None:
    """Run the command; errors are told in a paragraph, and with --debug in full."""
    from wpr.errors import exit_code
    from wpr.pipeline.log import no_bars_in_files

    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]  # wherever it stands
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    no_bars_in_files()
    sys.path.append(os.getcwd())  # functions that a recipe names may lie where the command is run, as with python -m
    try:
        with _signals():
            app(prog_name="wpr")  # also under `python -m` and launchers
    except SystemExit as error:
        _leave_others(error.code)
        for number, word in ENDED.items():
            if error.code == 128 + number:
                err.print(f"\n{word}. What is complete is kept: the same command goes on from the last checkpoint.")
        raise
    except Exception as error:
        if debug:
            raise
        err.print(_told(error))
        raise SystemExit(exit_code(error)) from None


def _leave_others(code: object) -> None:
    """Leave the group of processes, at a good end; at a bad one the launcher ends those that may never come."""
    if code in (None, 0) and "torch" in sys.modules:
        from wpr.pipeline.stage import destroy_process_group

        destroy_process_group()


def _told(error: Exception) -> Text:
    """An error as one paragraph; those that nobody foresaw with their kind."""
    from wpr.errors import UserError, explain

    told = None if isinstance(error, UserError) else explain(error, None)
    if told is None:
        told = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, UserError | ValueError | OSError | RuntimeError):
            told = f"{type(error).__name__}: {told}"
    process = os.environ.get("RANK", "0")
    return Text.assemble(("Error", "bold red"), f" (process {process}): " if process != "0" else ": ", told)
