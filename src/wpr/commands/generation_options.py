"""What the commands that let models answer have in common: their options, and a file of responses with a bar above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wpr.evaluation.response_generation import EncodedPrompt, LoadedModel, SamplingParams
    from wpr.runs.responses import ResponseFile

RunArgument = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder.")]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", "-p", help="Only this policy of the run (and SFT); again for more.")
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="A model's folder or hub name, or NAME=FOLDER; again for more."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", help="Prompts answered at a time.")]
TopK = Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total probability.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is drawn.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many.", show_default="all")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (bf16 on GPUs that have it), float32, bfloat16, float16.")]
Device = Annotated[str | None, typer.Option("--device", help="As cpu or cuda:1.", show_default="the accelerator")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Make anew what other settings made; the old files get the ending .old.")
]

RESTART = "make it anew with --restart (the old file is kept as .old), or write elsewhere with -o FOLDER"


@dataclass(frozen=True)
class GenerationOptions:
    """Options that do not change what is answered, and what to do with files that other options made."""

    batch_size: int
    restart: bool
    dtype: str = "auto"
    device: str | None = None


def one_of_both(run: Path | None, models: Sequence[str] | None) -> None:
    """Refuse a run together with models, and neither."""
    from wpr.errors import OptionError

    if (run is None) == (not models):
        raise OptionError(
            "name what shall answer: a RUN, or models with --model" + ("; not both" if run is not None else "")
        )


def answer(
    path: Path,
    name: str,
    speaker: LoadedModel,
    asked: Sequence[EncodedPrompt],
    drawing: SamplingParams,
    how: GenerationOptions,
    **facts: Any,
) -> ResponseFile:
    """The file of a model's responses, made now or before."""
    from wpr.commands.output import show_progress
    from wpr.evaluation.response_generation import generate_file, header_of, set_aside, settings_differ
    from wpr.pipeline.environment import versions

    header = header_of(speaker, asked, drawing, name=name, **facts, versions=versions())
    if how.restart and settings_differ(path, header):
        moved = set_aside(path)
        typer.echo(f"{path.name}: made anew" + (f"; the old one is {moved}" if moved else ""), err=True)
    with show_progress(path.name, len(asked)) as advance:
        return generate_file(path, speaker, asked, drawing, header, how.batch_size, RESTART, advance)
