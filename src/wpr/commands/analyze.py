"""`wpr analyze`: one command per analysis, and one for all of them.

A function below is one analysis with its own options; `_analysis` adds RUN, the options that it shares with others, and
the folder for what was found.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.analyze_options import (
    SHARED,
    BatchSize,
    Device,
    Encoder,
    Limit,
    Output,
    Png,
    Policies,
    Prompt,
    Regularizers,
    RunArgument,
    Texts,
)

if TYPE_CHECKING:
    from wpr.analysis.context import AnalysisContext, Found

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Analyze a run: penalties, similarity, coherence, convergence, settings, cost.\n\n"
    "Each analysis writes its words, table, figures and the data behind them to RUN/analyses/NAME, where "
    "[bold]wpr report[/bold] finds them. docs/analysis.md has the formulas.",
)

Analysis = Callable[..., "Found"]
ANALYSES: dict[str, Analysis] = {}
"""Analyses of a run by name, in the order in which `wpr analyze all` does them."""


def _analysis(*shared: str) -> Callable[[Analysis], Analysis]:
    """Register a function of an `AnalysisContext` and of its own options as an analysis and as a command of its name.
    shared: names of the options of `SHARED` that it has too.
    """

    def register(analysis: Analysis) -> Analysis:
        name = analysis.__name__.replace("_", "-")
        unknown = {"AnalysisContext": Any, "Found": Any}  # types that the command line need not load
        own = list(inspect.signature(analysis, eval_str=True, locals=unknown).parameters.values())[1:]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        ahead = inspect.Parameter("run", kind, annotation=RunArgument)
        more = [inspect.Parameter(key, kind, default=SHARED[key][1], annotation=SHARED[key][0]) for key in shared]
        last = [
            inspect.Parameter("output", kind, default=None, annotation=Output),
            inspect.Parameter("png", kind, default=False, annotation=Png),
        ]

        def command(run: Path, output: Path | None, png: bool, **given: Any) -> None:
            context = _context(run, **{key: given.pop(key) for key in shared})
            _save(analysis(context, **given), context, output, png)

        command.__signature__ = inspect.Signature([ahead, *own, *more, *last])  # type: ignore[attr-defined]
        command.__doc__ = analysis.__doc__
        app.command(name)(command)
        ANALYSES[name] = analysis
        return analysis

    return register


@_analysis("policy", "device")
def contrast(
    context: AnalysisContext,
    regularizer: Regularizers = None,
    positions: Annotated[int, typer.Option(min=1, help="Maximum number of positions.")] = 256,
) -> Found:
    """Does a penalty know that a near synonym is a smaller change than an unrelated word?

    [bold]Example[/bold]: wpr analyze contrast runs/tiny -r paper -r semantic:lam=20,rho=4
    """
    from wpr.analysis.semantic_contrast import analyze

    return analyze(context, regularizer, positions)


@_analysis(*SHARED)
def penalties(
    context: AnalysisContext,
    first: Annotated[str, typer.Option(help="The regularizer along the lower axis.")] = "reverse-kl",
    second: Annotated[str, typer.Option(help="The regularizer along the upper one.")] = "semantic",
    beta: Annotated[
        tuple[float, float], typer.Option(help="Factors of the two penalties before they are compared.")
    ] = (1.0, 1.0),
) -> Found:
    """One penalty against another, token by token: scatter, Pearson's correlation, slope.

    [bold]Examples[/bold]: wpr analyze penalties runs/tiny   |   wpr analyze penalties runs/tiny --second paper:lam=50
    """
    from wpr.analysis.penalties import analyze

    return analyze(context, first, second, beta)


@_analysis(*SHARED)
def similarity(
    context: AnalysisContext,
    encoder: Encoder = None,
    layer: Annotated[int, typer.Option(help="Layer of its hidden states: 0 the embeddings, -1 the last.")] = -1,
    regularizer: Regularizers = None,
) -> Found:
    """Do penalties fall where meaning is kept? Their correlation with BERTScore between reference and policy responses.

    [bold]Example[/bold]: wpr analyze similarity runs/hh --encoder models/roberta-large --layer 17
    """
    from wpr.analysis.similarity import analyze

    return analyze(context, encoder, layer, regularizer)


@_analysis(*SHARED)
def coherence(
    context: AnalysisContext,
    top: Annotated[int, typer.Option(min=2, help="Most likely candidates per position.")] = 10,
    metric: Annotated[str, typer.Option(help="Distance: euclidean or cosine.")] = "euclidean",
) -> Found:
    """Do the tokens that a model hesitates between mean similar things? Mean distance of the most likely candidates.

    [bold]Example[/bold]: wpr analyze coherence runs/tiny --metric cosine
    """
    from wpr.analysis.coherence import analyze

    return analyze(context, top, metric)


@_analysis(*SHARED)
def convergence(
    context: AnalysisContext,
    regularizer: Regularizers = None,
    positions: Annotated[int, typer.Option(min=1, help="Response tokens that are solved.")] = 32,
) -> Found:
    """How far the solver is from the end after each iteration, and whether there is an end.

    Without a regularizer, of paper and semantic.

    [bold]Example[/bold]: wpr analyze convergence runs/tiny -r paper -r semantic:rho=1
    """
    from wpr.analysis.convergence import analyze

    return analyze(context, regularizer, positions)


@_analysis("policy", "device")
def case_study(
    context: AnalysisContext,
    prompt: Prompt = None,
    regularizer: Annotated[str, typer.Option("--regularizer", "-r", help="The Wasserstein penalty.")] = "semantic",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a response.")] = 64,
) -> Found:
    """The most likely response of each policy to a prompt, token by token under KL and the Wasserstein penalty.

    [bold]Example[/bold]: wpr analyze case-study runs/hh --prompt "What is the largest fair in Massachusetts?"
    """
    from wpr.analysis.case_study import analyze

    return analyze(context, prompt, regularizer, tokens)


@_analysis()
def costs(context: AnalysisContext) -> Found:
    """Time and memory of the stages, and of a PPO step by part.

    [bold]Example[/bold]: wpr analyze costs runs/tiny
    """
    from wpr.analysis.costs import analyze

    return analyze(context)


@_analysis()
def sensitivity(
    context: AnalysisContext,
    more: Annotated[list[Path] | None, typer.Option("--more", help="Another run to take policies from.")] = None,
) -> Found:
    """What policies of a sweep reached against beta, lam, k1, k2, iterations or rho.

    [bold]Example[/bold]: wpr analyze sensitivity runs/tldr --more runs/tldr-k2
    """
    from wpr.analysis.sensitivity import analyze
    from wpr.runs.finished_run import FinishedRun

    return analyze(context, [FinishedRun(one) for one in more or []])


@_analysis("device")
def temperature(
    context: AnalysisContext,
    against: Annotated[str, typer.Option(help="The model that the others are compared with.")] = "sft",
    gold: Annotated[bool, typer.Option("--gold", help="Judge by the run's gold scorer, not its reward.")] = False,
    judged: Annotated[bool, typer.Option("--judged", help="Put together what `wpr judge` found instead.")] = False,
) -> Found:
    """Win rate against sampling temperature, of the responses that `wpr generate RUN -t ...` wrote.

    [bold]Example[/bold]: wpr analyze temperature runs/tiny --against rkl
    """
    from wpr.analysis.temperature import analyze

    return analyze(context, against, gold, judged)


@app.command()
def geometry(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A model's folder or hub name, or a run.")],
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            "-s",
            help="A setting, such as paper, semantic or paper:lam=10; repeat for more.",
            show_default="both",
        ),
    ] = None,
    lam: Annotated[float | None, typer.Option(help="Inverse entropy.", show_default="the setting's")] = None,
    metric: Annotated[str | None, typer.Option(help="Distance: euclidean or cosine.", show_default="euclidean")] = None,
    scaled: Annotated[
        bool | None, typer.Option("--scaled/--unscaled", help="Divide costs by the median nearest-neighbour distance.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text that the model continues; repeat for more.")] = None,
    encoder: Annotated[
        str | None,
        typer.Option("--encoder", "-e", help="A sentence encoder's folder: judge by meaning in context too."),
    ] = None,
    texts: Texts = None,
    device: Device = None,
    output: Output = None,
    png: Png = False,
) -> None:
    """Can a setting see meaning at all on a model? Histogram of lam * cost over its vocabulary, and a plain verdict.

    To be run before training with any Wasserstein penalty. Without a setting, --lam, --metric and --scaled change the
    paper's.

    [bold]Examples[/bold]

        wpr analyze geometry models/smollm2

        wpr analyze geometry models/smollm2 --lam 100 --metric cosine

        wpr analyze geometry runs/tiny -s semantic -s semantic:rho=1

        wpr analyze geometry models/smollm2 --encoder models/minilm --texts hh.jsonl
    """  # fmt: skip
    from wpr.analysis.geometry_diagnostics import analyze, analyze_model, prompts_of
    from wpr.model_geometry import RegularizerFactory
    from wpr.regularizers.wasserstein_settings import PRESETS

    changes = {"lam": lam, "metric": metric, "scaled": scaled}
    settings = setting or (["paper"] if any(value is not None for value in changes.values()) else list(PRESETS))
    judged = _in_context(encoder, texts)
    if (Path(model) / "manifest.json").is_file():
        context = _context(Path(model), device=device)
        in_context = judged(context.reference, context.run.tokenizer)
        _save(analyze(context, settings, changes, text or (), in_context), context, output, png)
        return
    loaded, tokenizer, name = _model(model, device)
    prompts, in_context = prompts_of(tokenizer, text or ()), judged(loaded, tokenizer)
    _save(analyze_model(RegularizerFactory(loaded), prompts, name, settings, changes, in_context), None, output, png)


def _in_context(encoder: str | None, texts: Path | None, positions: int = 128) -> Callable[[Any, Any], Any]:
    """From a model and its tokenizer to what the encoder says of its words in texts; to None without an encoder."""
    from wpr.analysis.screen import InContext
    from wpr.analysis.word_positions import read_texts
    from wpr.errors import OptionError

    if (encoder is None) != (texts is None):
        raise OptionError("--encoder and --texts go together: the encoder judges words of the texts; give both")
    if encoder is None or texts is None:
        return lambda model, tokenizer: None
    given = read_texts(texts)
    return lambda model, tokenizer: InContext.judged_by(encoder, model, tokenizer, given, positions)


@app.command()
def substitution(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A model's folder or hub name, or a run.")],
    encoder: Annotated[str, typer.Option("--encoder", "-e", help="A sentence encoder's folder or hub name.")],
    texts: Texts = None,
    regularizer: Regularizers = None,
    other: Annotated[
        str | None, typer.Option(help="Another language model, which says how likely replacements are.")
    ] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(help="Screen this geometry too, such as transform=centre/unit; repeat for more."),
    ] = None,
    positions: Annotated[int, typer.Option(min=1, help="Maximum number of positions.")] = 256,
    reward: Annotated[float, typer.Option(help="Expected reward at which regularizers are compared.")] = -0.15,
    contextual: Annotated[
        bool, typer.Option("--contextual", help="Screen hidden states and next tokens after a candidate too.")
    ] = False,
    device: Device = None,
    output: Output = None,
    png: Png = False,
) -> None:
    """What stands in a forbidden word's place under each regularizer's best policy, and is it like the original?

    No training: the best policies are computed. The encoder judges the text with the other word; so it should not be
    the model itself. Of a run, texts are its SFT model's responses unless given. Prints the screen of geometries too.

    [bold]Examples[/bold]

        wpr analyze substitution models/smollm2 --texts hh.jsonl -e models/minilm --other models/gemma3-270m

        wpr analyze substitution runs/tiny -e models/minilm -r semantic -r "reverse-kl + 4*semantic:lam=20"
    """  # fmt: skip
    from wpr.analysis.substitution import analyze, analyze_model
    from wpr.analysis.word_positions import read_texts
    from wpr.commands.output import say
    from wpr.errors import OptionError
    from wpr.model_geometry import RegularizerFactory

    if not -1 < reward < 0:
        raise OptionError(f"--reward {reward} must be between -1, all words forbidden, and 0, none; try -0.15")
    options: dict[str, Any] = {
        "other": other, "geometries": geometry or (), "positions": positions, "reward": reward,
        "contextual": contextual,
    }  # fmt: skip
    given = None if texts is None else read_texts(texts)
    if (Path(model) / "manifest.json").is_file():
        context = _context(Path(model), device=device)
        _save(analyze(context, encoder, regularizer, texts=given, **options), context, output, png)
        return
    if given is None:
        raise OptionError(f"{model} is no run with responses of its own; give texts with --texts FILE")
    loaded, tokenizer, name = _model(model, device)
    factory = RegularizerFactory(loaded)
    found = analyze_model(factory, loaded, tokenizer, given, name, encoder, regularizer, say=say, **options)
    _save(found, None, output, png)


def _model(name: str, device: str | None) -> tuple[Any, Any, str]:
    """A model in evaluation mode, its tokenizer, and what it is called."""
    from wpr.config.recipe import ModelSettings
    from wpr.model_loading import load_causal, load_tokenizer
    from wpr.runs.finished_run import device_of

    loaded = load_causal(ModelSettings(name)).to(device_of(device)).eval()
    return loaded, load_tokenizer(name), Path(name).resolve().name if Path(name).exists() else name


@app.command("all")
def all_analyses(
    run: RunArgument,
    encoder: Encoder = None,
    prompt: Prompt = None,
    policy: Policies = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    png: Png = False,
) -> None:
    """Every analysis that the run has what it needs for; the others are named with the reason.

    --encoder is similarity's, --prompt the case study's.

    [bold]Example[/bold]: wpr analyze all runs/tiny && wpr report runs/tiny
    """
    from wpr.analysis import geometry_diagnostics
    from wpr.errors import UnavailableError, UserError

    work: dict[str, Analysis] = {"geometry": geometry_diagnostics.analyze} | ANALYSES
    options = {"similarity": {"encoder": encoder}, "case-study": {"prompt": prompt}}
    context = _context(run, policy, limit, batch_size, device)
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, analysis in work.items():
        typer.echo(f"== {name}")
        try:
            _save(analysis(context, **options.get(name, {})), context, None, png)
        except UnavailableError as error:
            left_out[name] = str(error)
        except (UserError, ValueError) as error:  # the others may still be had
            failed[name] = str(error)
        typer.echo("")
    done = [name for name in work if name not in left_out | failed]
    typer.echo(f"done: {', '.join(done) or 'none'}. `wpr report {run}` shows them.")
    for word, group in (("left out", left_out), ("failed", failed)):
        for name, why in group.items():
            typer.echo(f"{word}: {name}: {why}")
    if failed:
        raise typer.Exit(1)


def _context(
    run: Path,
    policy: list[str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    temperature: float | None = None,
) -> AnalysisContext:
    from wpr.analysis.context import AnalysisContext
    from wpr.commands.output import say
    from wpr.errors import OptionError
    from wpr.runs.finished_run import FinishedRun

    if temperature is not None and not math.isfinite(temperature):
        raise OptionError(f"--temperature {temperature} must be a finite number; `wpr generate RUN -t T` draws at it")
    return AnalysisContext(FinishedRun(run, device), policy, limit, batch_size, say, temperature)


def _save(found: Found, context: AnalysisContext | None, folder: Path | None, png: bool) -> None:
    """Write a finding with the data behind it to ``folder``, or to the run's folder of its name, and print it. Where
    there is neither a run nor a folder, nothing is written.
    """
    from wpr.analysis.context import at_temperature
    from wpr.atomic_io import write_atomically
    from wpr.commands.output import save_and_print
    from wpr.findings import as_text

    finding, data = found
    if context is not None:
        finding = finding if context.temperature is None else at_temperature(finding, context.drawn)
        folder = folder or context.run.path / "analyses" / finding.name
    if folder is None:
        typer.echo(as_text(finding))
        typer.echo("\nnothing is written; -o FOLDER keeps it with its figures")
        return
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in data)
    write_atomically(folder / "data.jsonl", "".join(lines))
    save_and_print(finding, folder, png=png)
