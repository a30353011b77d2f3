"""What the commands that let models answer have in common: their options, the models, and files of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.output import note, say, show_progress

if TYPE_CHECKING:
    from wpr.data import DataSettings
    from wpr.evaluation.response_generation import EncodedPrompt, LoadedModel, SamplingParams
    from wpr.evaluation.run_models import RunModels
    from wpr.ppo.back_ends import BackEnd
    from wpr.ppo.generation import Generation
    from wpr.runs.responses import ResponseFile

sampling_option = partial(typer.Option, rich_help_panel="Sampling")
computing_option = partial(typer.Option, rich_help_panel="Computing")
MORE = "; repeat for more."

RunArgument = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder.")]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", "-p", help=f"Only this policy of the run, and SFT{MORE}")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", "-m", help=f"A model's folder or hub name, or NAME=FOLDER{MORE}")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Answer only the first so many.", show_default="all")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Make again what other settings made; the old files get the ending .old.")
]
TopK = Annotated[int, sampling_option(help="Draw from the k most likely tokens; 0: from all.")]
TopP = Annotated[float, sampling_option(help="Draw from the most likely tokens of this total probability.")]
MaxNewTokens = Annotated[int, sampling_option(help="Longest response, in tokens.")]
Seed = Annotated[int, sampling_option(help="Seed of all that is drawn.")]
BatchSize = Annotated[int, computing_option("--batch-size", "-b", help="Prompts answered at a time.")]
Dtype = Annotated[
    str, computing_option(help="Precision: auto (bf16 on GPUs that have it), float32, bfloat16, float16.")
]
Device = Annotated[str | None, computing_option(help="Device, as cpu or cuda:1.", show_default="the accelerator")]
BackEndOption = Annotated[
    str, computing_option("--generation", help="What draws: transformers, graphs (on a GPU), vllm, or auto.")
]
VLLMUrl = Annotated[
    str | None, computing_option(help="Server of --generation vllm.", show_default="vLLM within this process")
]

RESTART = "make it again with --restart (the old file is kept as .old), or write elsewhere with -o FOLDER"


@dataclass(frozen=True)
class ChosenModels:
    """The models that a command asks, and how they are run.

    run: whose models they are; None: they were named one by one. paths: folders or hub names, by name.
    restart: make files again that other settings made. back_end: what draws their responses.
    """

    run: RunModels | None
    paths: dict[str, str]
    batch_size: int
    restart: bool
    dtype: str
    device: str | None
    back_end: BackEnd

    @cached_property
    def generation(self) -> Generation | None:
        """What draws the responses of all models, one after the other; None: each model's default."""
        from wpr.errors import OptionError
        from wpr.runs.finished_run import device_of

        if self.back_end.generation == "auto":
            return None
        try:
            return self.back_end.make(device_of(self.device), training=False)
        except ValueError as error:
            raise OptionError(str(error)) from None

    def folder(self, output: Path | None, *parts: str) -> Path:
        """``output``, or where none is named one within the run's folder."""
        from wpr.errors import OptionError

        if output is not None:
            return output
        if self.run is None:
            raise OptionError("--model needs a folder for the results; name it with -o")
        return self.run.folder.joinpath(*parts)

    def load(self, path: str, settings: DataSettings, tokenizer: Any) -> LoadedModel:
        """One of them, to answer prompts that become tokens as ``settings`` say."""
        from wpr.evaluation.run_models import load_speaker

        return load_speaker(
            path, settings, self.dtype, self.device, tokenizer, own_stops=self.run is None, back_end=self.generation
        )

    def answer(
        self,
        path: Path,
        name: str,
        model: LoadedModel,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        **facts: Any,
    ) -> ResponseFile:
        """The file of a model's responses, made now or before."""
        from wpr.evaluation.response_generation import generate_file, header_of, set_aside, settings_differ
        from wpr.pipeline.environment import versions

        if self.back_end.generation == "vllm":  # whose draws are others
            facts["generation"] = "vllm"
        header = header_of(model, prompts, sampling, name=name, **facts, versions=versions())
        if self.restart and settings_differ(path, header):
            moved = set_aside(path)
            say(f"{path.name}: made again" + (f"; the old one is {moved}" if moved else ""))
        with show_progress(path.name, len(prompts)) as advance:
            return generate_file(path, model, prompts, sampling, header, self.batch_size, RESTART, advance)


def choose_models(
    run: Path | None,
    policies: Sequence[str] | None,
    models: Sequence[str] | None,
    batch_size: int,
    restart: bool,
    dtype: str,
    device: str | None,
    generation: str,
    vllm_url: str | None,
) -> ChosenModels:
    """A run's models, all or the chosen policies with SFT, or models by name. A run's are run in its own precision."""
    from wpr.errors import OptionError
    from wpr.evaluation.run_models import RunModels, named_models
    from wpr.ppo.back_ends import BackEnd

    try:
        back_end = BackEnd(generation, vllm_url)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if run is None:
        return ChosenModels(None, named_models(models or []), batch_size, restart, dtype, device, back_end)
    found = RunModels(run)
    for text in [] if policies else found.notes():
        note(text)
    precision = found.dtype if dtype == "auto" else dtype
    return ChosenModels(found, found.choose(policies or []), batch_size, restart, precision, device, back_end)


def one_of_both(run: Path | None, models: Sequence[str] | None) -> None:
    """Refuse a run together with models, and neither."""
    from wpr.errors import OptionError

    if (run is None) == (not models):
        raise OptionError(
            "name what shall answer: a RUN, or models with --model" + ("; not both" if run is not None else "")
        )
