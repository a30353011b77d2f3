"""`wpr generate`: responses of models to prompts, to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def generate(
    run: RunArgument = None,
    policy: Policies = None,
    model: Models = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file of prompts.", show_default="the run's held-out ones")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="Of that file, as data.format of a recipe.")] = "prompts",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder.", show_default="RUN/generations")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", "-t", help="0 is greedy; again for more.", show_default="0.5")
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", help="Longest response, in tokens.", show_default="the run's, or 256"),
    ] = None,
    seed: Seed = 0,
    limit: Limit = None,
    batch_size: BatchSize = 16,
    template: Annotated[
        str,
        typer.Option("--template", help="Of --model: chat, text, or auto, which is chat where the tokenizer has one."),
    ] = "auto",
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
    from wpr.data import DataSettings, Encoder
    from wpr.errors import OptionError
    from wpr.evaluation.prompt_file import as_asked, read_prompts
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.evaluation.run_models import RunModels, load_speaker, named_models
    from wpr.model_loading import load_tokenizer

    one_of_both(run, model)
    if run is not None and template != "auto":
        raise OptionError("--template is for --model; the models of a run have the template that they were trained on")
    if output is None and (run is None or prompts is not None):
        raise OptionError("responses to other prompts than a run's own need a folder of their own; name it with -o")
    if run is None and prompts is None:
        raise OptionError("--model needs a file of prompts; name it with --prompts")
    found = None if run is None else RunModels(run)
    longest = max_new_tokens if max_new_tokens is not None else 256 if found is None else found.max_new_tokens
    drawings = [SamplingParams(one, top_k, top_p, longest, seed) for one in dict.fromkeys(temperature or [0.5])]
    models = named_models(model or []) if found is None else found.choose(policy or [])
    how = GenerationOptions(
        batch_size, restart, found.dtype if found is not None and dtype == "auto" else dtype, device
    )
    folder = output or found.folder / "generations"  # type: ignore[union-attr]
    settings = DataSettings(format, template=template if found is None else found.settings.template)
    rows, notes = ([], []) if prompts is None else read_prompts(prompts, settings, limit)
    for note in [*notes, *([] if found is None or policy else found.notes())]:
        typer.echo(f"Note: {note}", err=True)
    for name, path in models.items():
        tokenizer = load_tokenizer(path, setting="--model")
        if found is not None and prompts is None:
            asked = found.asked(tokenizer, limit)
        else:
            asked = as_asked(rows, Encoder(tokenizer, settings))
        speaker = load_speaker(path, settings, how.dtype, how.device, tokenizer, own_stops=found is None)
        for drawing in drawings:
            made = answer(folder / f"{name}-t{drawing.temperature:g}.jsonl", name, speaker, asked, drawing, how)
            typer.echo(f"{made.path}: {len(made.rows)} responses", err=True)
    _show(folder, folder if output is not None else found.folder / "evaluations" / "generate")  # type: ignore[union-attr]


def _show(folder: Path, where: Path) -> None:
    """What the files of a folder have in them, as a finding. Those of other commands may be damaged, or be others'."""
    from wpr.commands.output import save_and_print, say
    from wpr.data import DataError
    from wpr.evaluation.response_summary import summarise
    from wpr.runs.responses import read_responses

    files = []
    for path in sorted(folder.glob("*-t*.jsonl")):
        try:
            files.append(read_responses(path))
        except DataError as error:
            say(f"Note: left out of the table: {error}")
    save_and_print(summarise(files), where)
