"""`wpr generate`: responses of models to prompts, to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wpr.evaluation.generation import Drawing, Speaker

RunArgument = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder.")]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", "-p", help="Only this policy of the run (and SFT); again for more.")
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="A model's folder or hub name, or NAME=FOLDER; again for more."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", help="Prompts answered at a time.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest response, in tokens.")]
TopK = Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total probability.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is drawn.")]
Template = Annotated[str, typer.Option("--template", help="chat, text, or auto: chat where the tokenizer has one.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (bf16 on GPUs that have it), float32, bfloat16, float16.")]
Device = Annotated[str | None, typer.Option("--device", help="As cpu or cuda:1.", show_default="the accelerator")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Make anew what other settings made; the old files get the ending .old.")
]

RESTART = "make it anew with --restart (the old file is kept as .old), or write elsewhere with -o FOLDER"


def generate(
    run: RunArgument = None,
    policy: Policies = None,
    model: Models = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A file of prompts, for --model.")] = None,
    format: Annotated[str, typer.Option("--format", help="Of that file, as data.format of a recipe.")] = "prompts",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder.", show_default="RUN/generations")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", "-t", help="0 is greedy; again for more.", show_default="0.5")
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many prompts.")] = None,
    batch_size: BatchSize = 16,
    template: Template = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    restart: Restart = False,
) -> None:
    """Let models answer prompts, and write the responses to files, one a model and temperature.

    Of a RUN: the SFT model and every finished policy, on the prompts that the run held out. Or of any --model, on a
    file of --prompts. Interrupted, the same command goes on where it stopped.

    [bold]Examples[/bold]

        wpr generate runs/tiny

        wpr generate runs/tiny --policy rkl -t 0 -t 0.5 -t 1 --limit 50

        wpr generate -m models/smollm2 -m mine=runs/x/ppo/rkl/model --prompts prompts.jsonl -o answers
    """
    from wpr.evaluation.generation import Drawing
    from wpr.pipeline.answering import PRECISIONS, RunModels, load_speaker, named_models
    from wpr.pipeline.errors import OptionError
    from wpr.pipeline.models import load_tokenizer

    drawings = [Drawing(one, top_k, top_p, max_new_tokens, seed) for one in dict.fromkeys(temperature or [0.5])]
    if (run is None) == (not model):
        raise OptionError("give a RUN, or models with --model and a file with --prompts; not both, and not neither")
    if run is not None:
        if prompts is not None or template != "auto":
            raise OptionError("--prompts and --template are for --model; a run brings its prompts and their template")
        found = RunModels(run)
        for name in found.unfinished if not policy else []:
            typer.echo(f"Note: policy {name} is not finished, and left out", err=True)
        chosen = found.choose(policy or [])
        tokenizer = load_tokenizer(chosen["sft"])
        asked = found.asked(tokenizer, limit)
        precision = PRECISIONS[found.recipe.model.precision] if dtype == "auto" else dtype
        folder = output or run / "generations"
        where = run / "evaluations" / "generate" if output is None else output
        for name, path in chosen.items():
            speaker = load_speaker(path, found.settings, precision, device, tokenizer, own_stops=False)
            _answer(name, speaker, asked, drawings, folder, batch_size, restart)
    else:
        if prompts is None or output is None:
            raise OptionError("--model needs a file of prompts (--prompts FILE) and a folder for the responses (-o)")
        folder = where = output
        _models(named_models(model or []), prompts, format, template, limit, drawings, folder, batch_size, restart,
                dtype, device)  # fmt: skip
    _show(folder, where)


def _models(
    models: dict[str, str],
    prompts: Path,
    format: str,
    template: str,
    limit: int | None,
    drawings: list[Drawing],
    folder: Path,
    batch_size: int,
    restart: bool,
    dtype: str,
    device: str | None,
) -> None:
    """Models by name on a file."""
    from wpr.data import DataSettings, Encoder
    from wpr.evaluation.prompts import as_asked, read_prompts
    from wpr.pipeline.answering import load_speaker

    settings = DataSettings(format, template=template)
    rows, notes = read_prompts(prompts, settings, limit)
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    for name, path in models.items():
        speaker = load_speaker(path, settings, dtype, device)
        asked = as_asked(rows, Encoder(speaker.tokenizer, settings))
        _answer(name, speaker, asked, drawings, folder, batch_size, restart)


def _answer(
    name: str,
    speaker: Speaker,
    asked: list[Any],
    drawings: list[Drawing],
    folder: Path,
    batch_size: int,
    restart: bool,
) -> None:
    """One model at all temperatures."""
    from wpr.commands.progress import moving
    from wpr.evaluation.generation import generate_file, header_of, made_otherwise, set_aside
    from wpr.pipeline.environment import versions

    for drawing in drawings:
        path = folder / f"{name}-t{drawing.temperature:g}.jsonl"
        header = header_of(speaker, asked, drawing, name=name, versions=versions())
        if restart and made_otherwise(path, header):
            moved = set_aside(path)
            typer.echo(f"{path.name}: made anew" + (f" (the old one: {moved})" if moved else ""), err=True)
        with moving(path.name, len(asked)) as advance:
            generate_file(path, speaker, asked, drawing, header, batch_size, RESTART, advance)
        typer.echo(f"{path.name}: {len(asked)} responses", err=True)


def _show(folder: Path, where: Path) -> None:
    """What the files of a folder have in them, as a finding."""
    from wpr.commands.keeping import keep
    from wpr.evaluation.response_file import read_responses
    from wpr.evaluation.response_summary import summarise

    keep(summarise([read_responses(path) for path in sorted(folder.glob("*.jsonl"))]), where)
