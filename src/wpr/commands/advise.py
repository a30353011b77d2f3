"""`wpr advise`: is a reward one for wording, does the geometry know the vocabulary, and which regularizer and beta?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands import generation_options as generation
from wpr.commands.output import note, save_and_print, say, show_progress

if TYPE_CHECKING:
    from wpr.config.recipe import ScorerSettings
    from wpr.data import DataSettings, Row
    from wpr.evaluation.run_models import RunModels

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL|RUN", help="The reference: a model's folder or hub name, a run, or pico."),
]
Texts = Annotated[
    Path | None,
    typer.Option(
        help="Prompts: a .txt file of one per line, or records with a column prompt.",
        show_default="the run's held-out ones",
    ),
]
RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help="What is to be maximised: a word list's .txt file, package.module:function, a reward model, or a setting "
        "of a recipe's scorer such as grade=6; repeat for more settings.",
        show_default="the run's",
    ),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        "-e",
        help="Judge of meaning: minilm, wordllama, or an encoder's folder or hub name.",
        show_default="minilm or wordllama, where installed",
    ),
]
Instruction = Annotated[
    str | None, typer.Option(help="Prompt made of a text, which stands for {}.", show_default="the text itself")
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Prompts that are used, the first ones.")]
SamplesOption = Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses per prompt.")]
Target = Annotated[float, typer.Option(help="KL per token that beta is to allow, in nats.")]
Temperature = Annotated[float, generation.sampling_option("--temperature", "-t", help="Temperature to draw at.")]
MaxNewTokens = Annotated[
    int | None, generation.sampling_option(help="Longest response, in tokens.", show_default="the run's, or 64")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write to.", show_default="RUN/analyses/advice")
]


def advise(
    model: Model,
    texts: Texts = None,
    reward: RewardOption = None,
    encoder: Encoder = None,
    instruction: Instruction = None,
    prompts: Prompts = 48,
    samples: SamplesOption = 8,
    target: Target = 0.1,
    temperature: Temperature = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: generation.Seed = 0,
    batch_size: generation.BatchSize = 64,
    device: generation.Device = None,
    output: Output = None,
) -> None:
    """Say which regularizer to train with, and from which beta to start, before anything is trained.

    From some hundred responses of the reference: how much of the reward other words alone can have, whether the model's
    embeddings know which words mean the same, and a first beta. docs/choosing.md says how to read it.

    [bold]Examples[/bold]

        wpr advise models/smollm2 --texts my.txt --reward my-words.txt --encoder minilm -o advice

        wpr advise models/sft --texts prompts.jsonl --reward models/reward

        wpr advise pico --texts my.txt --instruction 'Story: {}' --reward grade=6

        wpr advise runs/rewrite
    """
    from wpr.analysis.advice import analyze
    from wpr.analysis.reference_samples import draw
    from wpr.errors import OptionError
    from wpr.evaluation.response_generation import SamplingParams, refuse_too_long
    from wpr.evaluation.run_models import load_speaker
    from wpr.evaluation.scorers import make_scorer, refuse_other_tokenizer
    from wpr.model_loading import load_tokenizer

    if not 0 < target < float("inf"):
        raise OptionError(f"--target {target} must be above 0: nats of KL per token, such as 0.1")
    run, path, name = _reference(model)
    settings, folder = _scorer(reward, model, run)
    rewarded = make_scorer(settings, folder)
    judge, encoder = _judge(encoder, device)
    tokenizer = load_tokenizer(path, setting="MODEL")
    if settings.kind == "model":
        assert folder is not None
        refuse_other_tokenizer(folder, tokenizer, "--reward")
    if hasattr(rewarded, "check_tokenizer"):
        rewarded.check_tokenizer(tokenizer)
    data, asked = _prompts(run, texts, instruction, prompts, tokenizer)
    loaded = load_speaker(path, data, "float32", device, tokenizer, own_stops=run is None)
    if hasattr(rewarded, "to"):
        rewarded = rewarded.to(loaded.model.device)
    longest = max_new_tokens or (64 if run is None else run.max_new_tokens)
    sampling = SamplingParams(temperature, max_new_tokens=longest, seed=seed)
    refuse_too_long(loaded, asked, sampling)
    with show_progress("responses", len(asked) * samples) as advance:
        drawn = draw(loaded, asked, rewarded, samples, sampling, batch_size, advance)
    facts = {
        "encoder": encoder, "texts": None if texts is None else str(texts), "temperature": temperature, "seed": seed,
        "max_new_tokens": longest, "instruction": instruction,
    }  # fmt: skip
    finding, rows = analyze(loaded, drawn, rewarded, name, judge, target, facts, say)
    if output is None and run is not None:
        output = run.folder / "analyses" / finding.name
    if output is None:
        from wpr.findings import as_text

        typer.echo(as_text(finding))
        typer.echo("\nnothing is written; -o FOLDER keeps it with its figure")
        return
    save_and_print(finding, output, rows)


def _reference(model: str) -> tuple[RunModels | None, str, str]:
    """The run, if it is one; the folder or hub name of the reference; and what it is called."""
    from wpr import pico
    from wpr.evaluation.run_models import RunModels
    from wpr.runs.finished_run import REFERENCE

    if (Path(model) / "manifest.json").is_file():
        run = RunModels(Path(model))
        return run, run.models[REFERENCE], f"{Path(model).resolve().name}'s SFT model"
    if model == "pico" and not Path(model).exists():
        return None, str(pico.path()), "wpr-pico"
    return None, model, Path(model).resolve().name if Path(model).exists() else model


def _scorer(given: Sequence[str] | None, model: str, run: RunModels | None) -> tuple[ScorerSettings, str | None]:
    """The reward's settings, and the reward model's folder where it is one."""
    from wpr.config.recipe import typed_scorer
    from wpr.errors import OptionError
    from wpr.runs.finished_run import FinishedRun

    if given:
        values = dict(_setting(text) for text in given)
        implied = {"kind": "function"} if "function" in values else {}
        settings = typed_scorer(implied | values, lambda key: "--reward")
        folder = settings.name
    elif run is not None:
        settings, folder = FinishedRun(run.folder).scorer()
    else:
        raise OptionError(
            f"{model} is no run with a reward of its own; name one with --reward: a word list's file, "
            "package.module:function, a reward model's folder, grade=6 or spelling=british"
        )
    if settings.kind == "code":
        raise OptionError(
            "programs are judged by their tests, and other words make other programs; train code under reverse KL"
        )
    return settings, folder


def _setting(text: str) -> tuple[str, Any]:
    """A setting of the scorer; one without its name is told by what it looks like."""
    name, equals, value = text.partition("=")
    if equals and name.isidentifier():
        try:
            return name, float(value) if name == "grade" else value
        except ValueError:
            return name, value  # which the settings refuse by its name
    if Path(text).expanduser().is_file():
        return "words", text
    if ":" in text and not Path(text).exists():
        return "function", text
    if text.endswith(".txt"):
        return "words", text  # which is not there: the error is that of a list
    return "name", text


def _judge(name: str | None, device: str | None) -> tuple[Any, str | None]:
    """What judges meaning, and what it is called; None where no encoder is there."""
    from wpr.errors import OptionError
    from wpr.evaluation.encoders import PACKAGES, load_encoder, package_folder
    from wpr.runs.finished_run import device_of

    if name is not None:
        return load_encoder(name, device_of(device)), name
    for known, package in PACKAGES.items():
        try:
            package_folder(*package)
        except OptionError:
            continue
        note(f"meaning is judged by {known}; --encoder names another")
        return load_encoder(known, device_of(device)), known
    note("no encoder is installed: what needs one is left out, and said below")
    return None, None


def _prompts(
    run: RunModels | None, texts: Path | None, instruction: str | None, limit: int, tokenizer: Any
) -> tuple[DataSettings, Any]:
    """How texts become tokens, and the first prompts, each once."""
    from wpr.data import DataSettings, Encoder, Row
    from wpr.errors import OptionError
    from wpr.evaluation.prompt_file import as_asked, read_prompts
    from wpr.runs.responses import prompt_id

    data = DataSettings("prompts", template="auto" if run is None else run.settings.template)
    if instruction is not None and "{}" not in instruction:
        raise OptionError(f"--instruction {instruction!r} has no {{}}; write {{}} where the text goes")
    if texts is None:
        if run is None:
            raise OptionError("there are no texts; name a file with --texts: one prompt per line, as my.txt")
        if instruction is not None:
            raise OptionError("--instruction is for --texts; a run's own prompts have theirs already")
        return data, run.asked(tokenizer, limit)
    if texts.suffix != ".txt":
        rows, notes = read_prompts(texts, data, limit)
        for text in notes:
            note(text)
    else:
        rows = [(prompt_id(line), Row(line)) for line in _lines(texts)[:limit]]
    if instruction is not None:
        rows = [(name, _instructed(row, instruction)) for name, row in rows]
    return data, as_asked(rows, Encoder(tokenizer, data))


def _instructed(row: Row, instruction: str) -> Row:
    from dataclasses import replace

    from wpr.errors import OptionError

    if not isinstance(row.prompt, str):
        raise OptionError("--instruction needs texts; the file has chat messages: put the instruction into them")
    return replace(row, prompt=instruction.replace("\\n", "\n").replace("{}", row.prompt))


def _lines(path: Path) -> list[str]:
    """Lines of a text file, each once."""
    from wpr.analysis.word_positions import read_texts
    from wpr.errors import OptionError

    found = list(dict.fromkeys(line.strip() for line in read_texts(path)))
    if not found:
        raise OptionError(f"--texts {path} has no texts; write one prompt per line")
    return found
