"""`wpr generate`: responses of models to prompts, to files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands import generation_options as generation
from wpr.commands.output import note, save_and_print, say

if TYPE_CHECKING:
    from wpr.data import DataSettings
    from wpr.evaluation.response_generation import EncodedPrompt
    from wpr.evaluation.run_models import RunModels

Prompts = Annotated[Path | None, typer.Option(help="A file of prompts.", show_default="the run's held-out ones")]
Format = Annotated[str, typer.Option(help="Format of that file, as data.format of a recipe.")]
Template = Annotated[
    str, typer.Option(help="Template of --model's prompts: chat, text, or auto (chat where the tokenizer has one).")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write to.", show_default="RUN/generations")
]
Temperatures = Annotated[
    list[float] | None,
    generation.sampling_option(
        "--temperature", "-t", help=f"Temperature to draw at, 0 for greedy{generation.MORE}", show_default="0.5"
    ),
]
MaxNewTokens = Annotated[
    int | None, generation.sampling_option(help="Longest response, in tokens.", show_default="the run's, or 256")
]


def generate(
    run: generation.RunArgument = None,
    policy: generation.Policies = None,
    model: generation.Models = None,
    prompts: Prompts = None,
    format: Format = "prompts",
    template: Template = "auto",
    limit: generation.Limit = None,
    output: Output = None,
    restart: generation.Restart = False,
    temperature: Temperatures = None,
    top_k: generation.TopK = 0,
    top_p: generation.TopP = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: generation.Seed = 0,
    batch_size: generation.BatchSize = 16,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    back_end: generation.BackEndOption = "auto",
    vllm_url: generation.VLLMUrl = None,
) -> None:
    """Let models answer prompts, and write the responses to files, one per model and temperature.

    Of a RUN: the SFT model and every finished policy, on the prompts that the run held out. Or of any --model, on a
    file of --prompts. Interrupted, the same command resumes where it stopped.

    [bold]Examples[/bold]

        wpr generate runs/tiny

        wpr generate runs/tiny --policy rkl -t 0 -t 0.5 -t 1 --limit 50

        wpr generate -m models/smollm2 -m mine=runs/x/ppo/rkl/model --prompts prompts.jsonl -o answers
    """
    from wpr.data import DataSettings
    from wpr.evaluation.response_generation import SamplingParams
    from wpr.model_loading import load_tokenizer

    generation.one_of_both(run, model)
    _check(run, prompts, template, output)
    chosen = generation.choose_models(run, policy, model, batch_size, restart, dtype, device, back_end, vllm_url)
    found = chosen.run
    longest = max_new_tokens if max_new_tokens is not None else 256 if found is None else found.max_new_tokens
    samplings = [SamplingParams(one, top_k, top_p, longest, seed) for one in dict.fromkeys(temperature or [0.5])]
    settings = DataSettings(format, template=template if found is None else found.settings.template)
    encoded = _encoded_prompts(found, prompts, settings, limit)
    folder = chosen.folder(output, "generations")
    for name, path in chosen.paths.items():
        tokenizer = load_tokenizer(path, setting="--model")
        asked = encoded(tokenizer)
        loaded = chosen.load(path, settings, tokenizer)
        for sampling in samplings:
            made = chosen.answer(folder / f"{name}-t{sampling.temperature:g}.jsonl", name, loaded, asked, sampling)
            say(f"{made.path}: {len(made.rows)} responses")
    _summarise(folder, chosen.folder(output, "evaluations", "generate"))


def _check(run: Path | None, prompts: Path | None, template: str, output: Path | None) -> None:
    """Refuse options that do not go together."""
    from wpr.errors import OptionError

    if run is not None and template != "auto":
        raise OptionError("--template is for --model; the models of a run have the template that they were trained on")
    if output is None and (run is None or prompts is not None):
        raise OptionError("responses to other prompts than a run's own need a folder of their own; name it with -o")
    if run is None and prompts is None:
        raise OptionError("--model needs a file of prompts; name it with --prompts")


def _encoded_prompts(
    run: RunModels | None, prompts: Path | None, settings: DataSettings, limit: int | None
) -> Callable[[Any], list[EncodedPrompt]]:
    """A function from a tokenizer to the prompts: those of the file, read now, or those that the run held out."""
    from wpr.data import Encoder
    from wpr.evaluation.prompt_file import as_asked, read_prompts

    if prompts is None:
        assert run is not None
        return lambda tokenizer: run.asked(tokenizer, limit)
    rows, notes = read_prompts(prompts, settings, limit)
    for text in notes:
        note(text)
    return lambda tokenizer: as_asked(rows, Encoder(tokenizer, settings))


def _summarise(folder: Path, where: Path) -> None:
    """Save and print what the files of a folder have in them. Those of other commands may be damaged, or be others'."""
    from wpr.data import DataError
    from wpr.evaluation.response_summary import summarise
    from wpr.runs.responses import read_responses

    files = []
    for path in sorted(folder.glob("*-t*.jsonl")):
        try:
            files.append(read_responses(path))
        except DataError as error:
            note(f"left out of the table: {error}")
    save_and_print(summarise(files), where)
