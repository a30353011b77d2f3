"""The `wpr` command: commands are registered here, and errors and signals become exit codes."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from typing import Annotated, Any

# Read when torch is loaded. Threads that wait for each other by spinning take the processor from those that they wait
# for as soon as the machine has other work: the semantic penalty then took ten times as long, and three times so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from rich.text import Text

from wpr import __version__
from wpr.commands import analyze, token_geometry
from wpr.commands.advise import advise
from wpr.commands.generate import generate
from wpr.commands.inspect_recipe import doctor, recipes
from wpr.commands.judge import judge
from wpr.commands.mt_bench import mt_bench
from wpr.commands.output import err, out
from wpr.commands.pass_at_1 import pass_at_1
from wpr.commands.push import push
from wpr.commands.report_page import report
from wpr.commands.reproduce import reproduce
from wpr.commands.run_recipe import ppo, quickstart, reward, run, sft, sweep

app = typer.Typer(
    name="wpr",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Align language models with RLHF, close in meaning to a reference model.\n\n"
    "A recipe states an experiment; [bold]wpr run RECIPE[/bold] runs all of it and, run again, resumes where it "
    "stopped.\n\n"
    "New here: [bold]wpr quickstart --quick[/bold] runs everything once, briefly; [bold]wpr doctor[/bold] says what "
    "is installed; [bold]wpr COMMAND --help[/bold] has examples.",
)
PANELS = {
    "Start": (quickstart, recipes, doctor),
    "Train": (run, sft, reward, ppo, sweep),
    "Evaluate": (generate, judge, mt_bench, pass_at_1, report, reproduce),
    "Share": (push,),
}
"""Commands by what they are for, in the order of the help."""
for panel, commands in PANELS.items():
    for command in commands:
        app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
app.command(rich_help_panel="Understand")(advise)
app.add_typer(analyze.app, name="analyze", rich_help_panel="Understand")
app.add_typer(token_geometry.app, name="geometry", rich_help_panel="Understand")


def _unwrap(group: typer.Typer) -> None:
    """Join the lines of each paragraph of the help: it is wrapped at the width of the terminal, not of the code."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(text if text.startswith(" ") else " ".join(text.splitlines()) for text in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)


_unwrap(app)

ENDED = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}
"""Signals that end a run, and how that is called."""


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


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


def main() -> None:
    """Run the command; errors are printed as a paragraph, and with --debug in full."""
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
        err.print(_message(error))
        raise SystemExit(exit_code(error)) from None


def _leave_others(code: object) -> None:
    """End one of several processes at a good end; at a bad one the launcher ends those that may never come."""
    if code in (None, 0) and "torch" in sys.modules:
        from wpr.pipeline.environment import leave_launch

        leave_launch()


def _message(error: Exception) -> Text:
    """An error as one paragraph; those that nobody foresaw with their kind."""
    from wpr.errors import UserError, explain, missing_package

    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    text = None if isinstance(error, UserError) else missing_package(error, command) or explain(error, None)
    if text is None:
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, UserError | ValueError | OSError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
    process = os.environ.get("RANK", "0")
    return Text.assemble(("Error", "bold red"), f" (process {process}): " if process != "0" else ": ", text)
