"""`wpr analyze`: look into a run; one command an analysis, and one for all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wpr.commands.analyses import AnalysisContext, Found

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look into a run: penalties, similarity, coherence, convergence, settings, cost.\n\n"
    "Each analysis writes its words, table, figures and the data behind them to RUN/analyses/NAME, where "
    "[bold]wpr report[/bold] finds them. docs/analysis.md has the formulas.",
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `wpr run` wrote.")]
Policies = Annotated[list[str] | None, typer.Option("--policy", "-p", help="Only this policy; give it again for more.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Responses of a policy at most.", show_default="all")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", min=0.0, help="Look at the responses that `wpr generate RUN -t T` drew.",
        show_default="those that the run drew",
    ),
]  # fmt: skip
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Responses a forward pass.")]
Device = Annotated[str | None, typer.Option("--device", help="As cpu or cuda:1.", show_default="the accelerator")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Another folder for the results.", show_default="RUN/analyses/NAME"),
]
REGULARIZER_HELP = "As reverse-kl, paper, semantic, or with settings: semantic:lam=10,rho=4; again for more."


@app.command()
def penalties(
    run: RunArgument,
    first: Annotated[str, typer.Option(help="The regularizer along the lower axis.")] = "reverse-kl",
    second: Annotated[str, typer.Option(help="The regularizer along the upper one.")] = "semantic",
    beta: Annotated[
        tuple[float, float], typer.Option(help="What the two penalties are multiplied by before they are compared.")
    ] = (1.0, 1.0),
    policy: Policies = None,
    temperature: Temperature = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    output: Output = None,
) -> None:
    """One penalty against another, token by token: scatter, Pearson's correlation, slope.

    [bold]Examples[/bold]: wpr analyze penalties runs/tiny   |   wpr analyze penalties runs/tiny --second paper:lam=50
    """
    from wpr.commands import analyses

    _run(output, _subject(run, policy, limit, batch_size, device, temperature),
         lambda context: analyses.penalties(context, first, second, beta))  # fmt: skip


@app.command()
def similarity(
    run: RunArgument,
    encoder: Annotated[
        str | None,
        typer.Option("--encoder", "-e", help="A model's folder or hub name.", show_default="the run's SFT model"),
    ] = None,
    layer: Annotated[int, typer.Option(help="Of its hidden states: 0 the embeddings, -1 the last.")] = -1,
    regularizer: Annotated[list[str] | None, typer.Option("--regularizer", "-r", help=REGULARIZER_HELP)] = None,
    policy: Policies = None,
    temperature: Temperature = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    output: Output = None,
) -> None:
    """Do penalties fall where meaning is kept? Their correlation with BERTScore between reference and policy responses.

    [bold]Example[/bold]: wpr analyze similarity runs/hh --encoder models/roberta-large --layer 17
    """
    from wpr.commands import analyses
    from wpr.regularizers.spec import SIDE_BY_SIDE

    _run(output, _subject(run, policy, limit, batch_size, device, temperature),
         lambda context: analyses.similarity(context, encoder, layer, regularizer or SIDE_BY_SIDE))  # fmt: skip


@app.command()
def coherence(
    run: RunArgument,
    top: Annotated[int, typer.Option(min=2, help="Likeliest candidates of a position.")] = 10,
    metric: Annotated[str, typer.Option(help="euclidean or cosine.")] = "euclidean",
    policy: Policies = None,
    temperature: Temperature = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    output: Output = None,
) -> None:
    """Do the tokens that a model hesitates between mean similar things? Mean distance of the likeliest candidates.

    [bold]Example[/bold]: wpr analyze coherence runs/tiny --metric cosine
    """
    from wpr.commands import analyses

    _run(output, _subject(run, policy, limit, batch_size, device, temperature),
         lambda context: analyses.coherence(context, top, metric))  # fmt: skip


@app.command()
def convergence(
    run: RunArgument,
    regularizer: Annotated[
        list[str] | None, typer.Option("--regularizer", "-r", help=REGULARIZER_HELP, show_default="paper, semantic")
    ] = None,
    positions: Annotated[int, typer.Option(min=1, help="Response tokens that are solved.")] = 32,
    policy: Policies = None,
    temperature: Temperature = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    output: Output = None,
) -> None:
    """How far the solver is from the end after each iteration, and whether there is an end.

    [bold]Example[/bold]: wpr analyze convergence runs/tiny -r paper -r semantic:rho=2
    """
    from wpr.commands import analyses

    _run(output, _subject(run, policy, limit, batch_size, device, temperature),
         lambda context: analyses.convergence(context, regularizer or ("paper", "semantic"), positions))  # fmt: skip


@app.command()
def sensitivity(
    run: RunArgument,
    more: Annotated[list[Path] | None, typer.Option("--more", help="Another run to take policies from.")] = None,
    output: Output = None,
) -> None:
    """What policies of a sweep reached against beta, lam, k1, k2, iterations or rho.

    [bold]Example[/bold]: wpr analyze sensitivity runs/tldr --more runs/tldr-k2
    """
    from wpr.commands import record_analyses
    from wpr.runs.finished_run import FinishedRun

    _run(output, _subject(run),
         lambda context: record_analyses.sensitivity(context, [FinishedRun(one) for one in more or []]))  # fmt: skip


@app.command()
def temperature(
    run: RunArgument,
    against: Annotated[str, typer.Option(help="The model that the others are compared with.")] = "sft",
    gold: Annotated[bool, typer.Option("--gold", help="Judge by the run's gold scorer, not its reward.")] = False,
    judged: Annotated[bool, typer.Option("--judged", help="Put together what `wpr judge` found instead.")] = False,
    device: Device = None,
    output: Output = None,
) -> None:
    """Win rate against sampling temperature, of the responses that `wpr generate RUN -t ...` wrote.

    [bold]Example[/bold]: wpr analyze temperature runs/tiny --against rkl
    """
    from wpr.commands import record_analyses

    _run(output, _subject(run, device=device),
         lambda context: record_analyses.temperature(context, against, gold, judged))  # fmt: skip


@app.command()
def costs(run: RunArgument, output: Output = None) -> None:
    """Time and memory of the stages, and of a PPO step by part.

    [bold]Example[/bold]: wpr analyze costs runs/tiny
    """
    from wpr.commands import record_analyses

    _run(output, _subject(run), record_analyses.costs)


@app.command("case-study")
def case_study(
    run: RunArgument,
    prompt: Annotated[
        str | None, typer.Option(help="The text that policies answer.", show_default="the first held-out prompt")
    ] = None,
    regularizer: Annotated[str, typer.Option("--regularizer", "-r", help="The Wasserstein penalty.")] = "semantic",
    tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 64,
    policy: Policies = None,
    device: Device = None,
    output: Output = None,
) -> None:
    """The likeliest response of each policy to a prompt, token by token under KL and the Wasserstein penalty.

    [bold]Example[/bold]: wpr analyze case-study runs/hh --prompt "What is the largest fair in Massachusetts?"
    """
    from wpr.commands import analyses

    _run(output, _subject(run, policy, device=device),
         lambda context: analyses.case_study(context, prompt, regularizer, tokens))  # fmt: skip


@app.command()
def contrast(
    run: RunArgument,
    regularizer: Annotated[list[str] | None, typer.Option("--regularizer", "-r", help=REGULARIZER_HELP)] = None,
    positions: Annotated[int, typer.Option(min=1, help="At most, where the model is sure.")] = 256,
    policy: Policies = None,
    device: Device = None,
    output: Output = None,
) -> None:
    """Does a penalty know that a near synonym is a smaller change than an unrelated word?

    [bold]Example[/bold]: wpr analyze contrast runs/tiny -r paper -r semantic:lam=10,rho=4
    """
    from wpr.commands import analyses
    from wpr.regularizers.spec import SIDE_BY_SIDE

    _run(output, _subject(run, policy, device=device),
         lambda context: analyses.contrast(context, regularizer or SIDE_BY_SIDE, positions))  # fmt: skip


@app.command()
def geometry(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A model's folder or hub name, or a run.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", "-s", help="As paper, semantic, paper:lam=10; again for more.", show_default="both"),
    ] = None,
    lam: Annotated[float | None, typer.Option(help="Inverse entropy.", show_default="the setting's")] = None,
    metric: Annotated[str | None, typer.Option(help="euclidean or cosine.", show_default="euclidean")] = None,
    scaled: Annotated[
        bool | None, typer.Option("--scaled/--unscaled", help="Divide costs by the median nearest-neighbour distance.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="What the model continues; again for more.")] = None,
    device: Device = None,
    output: Output = None,
) -> None:
    """Can a setting see meaning at all on a model? Histogram of lam * cost over its vocabulary, and a plain verdict.

    To be run before training with any Wasserstein penalty. Without a setting, --lam, --metric and --scaled change the
    paper's.

    [bold]Examples[/bold]

        wpr analyze geometry models/smollm2

        wpr analyze geometry models/smollm2 --lam 100 --metric cosine

        wpr analyze geometry runs/tiny -s semantic -s semantic:rho=2
    """
    from wpr.commands.geometry_analysis import look_at, prompts_of
    from wpr.config.recipe import ModelSettings
    from wpr.model_loading import load_causal, load_tokenizer

    changes = {"lam": lam, "metric": metric, "scaled": scaled}
    settings = setting or (["paper"] if any(value is not None for value in changes.values()) else ["paper", "semantic"])
    if (Path(model) / "manifest.json").is_file():
        context = _subject(Path(model), device=device)
        loaded, name = context.run.load("sft"), f"{context.run.path.resolve().name}'s SFT model"
        prompts = prompts_of(context.run.tokenizer, text) if text else context.texts()
        prompts = prompts or prompts_of(context.run.tokenizer, [])
        folder: Path | None = output or Path(model) / "analyses" / "geometry"
    else:
        loaded, name = load_causal(ModelSettings(model)), Path(model).resolve().name if Path(model).exists() else model
        loaded = loaded.to(_device(device)).eval()
        prompts, folder = prompts_of(load_tokenizer(model), text or []), output
    found = look_at(loaded, prompts, name, settings, changes, {"settings": settings})
    _keep(found, folder)


@app.command("all")
def all_analyses(
    run: RunArgument,
    encoder: Annotated[
        str | None, typer.Option("--encoder", "-e", help="For similarity.", show_default="the run's SFT model")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="For the case study.", show_default="the first held-out")] = None,
    policy: Policies = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    device: Device = None,
) -> None:
    """Every analysis that the run has what it needs for; the others are named with the reason.

    [bold]Example[/bold]: wpr analyze all runs/tiny && wpr report runs/tiny
    """
    from wpr.commands import analyses, record_analyses
    from wpr.commands.geometry_analysis import look_at, prompts_of
    from wpr.errors import UserError

    def vocabulary(context: AnalysisContext) -> Found:
        prompts = context.texts() or prompts_of(context.run.tokenizer, [])
        name = f"{context.run.path.resolve().name}'s SFT model"
        return look_at(context.run.load("sft"), prompts, name, ["paper", "semantic"], {}, {})

    work: dict[str, Callable[[AnalysisContext], Found]] = {
        "geometry": vocabulary,
        "contrast": analyses.contrast,
        "penalties": lambda context: analyses.penalties(context, "reverse-kl", "semantic"),
        "similarity": lambda context: analyses.similarity(context, encoder),
        "coherence": analyses.coherence,
        "convergence": analyses.convergence,
        "case-study": lambda context: analyses.case_study(context, prompt),
        "costs": record_analyses.costs,
        "sensitivity": record_analyses.sensitivity,
        "temperature": record_analyses.temperature,
    }
    context = _subject(run, policy, limit, batch_size, device)
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, analysis in work.items():
        typer.echo(f"== {name}")
        try:
            _keep(analysis(context), run / "analyses" / name)
        except analyses.UnavailableError as error:
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


def _subject(
    run: Path,
    policies: list[str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    temperature: float | None = None,
) -> AnalysisContext:
    from wpr.commands.analyses import AnalysisContext
    from wpr.errors import OptionError
    from wpr.runs.finished_run import FinishedRun

    if temperature is not None and not math.isfinite(temperature):
        raise OptionError(f"--temperature {temperature} must be a finite number; `wpr generate RUN -t T` draws at it")

    def say(text: str) -> None:
        typer.echo(text, err=True)

    return AnalysisContext(FinishedRun(run, device), policies, limit, batch_size, say, temperature)


def _device(name: str | None) -> Any:
    from wpr.runs.finished_run import device_of

    return device_of(name)


def _run(output: Path | None, context: AnalysisContext, analysis: Callable[[AnalysisContext], Found]) -> None:
    """Carry out one analysis and keep what it found."""
    from wpr.commands.analyses import at_temperature

    finding, data = analysis(context)
    if context.temperature is not None:
        finding = at_temperature(finding, context.drawn)
    _keep((finding, data), output or context.run.path / "analyses" / finding.name)


def _keep(found: Found, folder: Path | None) -> None:
    """Print a finding and write it to its folder, if it has one, with the data behind it."""
    from wpr.atomic_io import write_atomically
    from wpr.findings import as_text, save
    from wpr.report import draw_figure

    finding, data = found
    typer.echo(as_text(finding))
    if folder is None:
        typer.echo("\nnothing is written; -o FOLDER keeps it with its figures")
        return
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in data)
    write_atomically(folder / "data.jsonl", "".join(lines))
    save(finding, folder, draw_figure)
    typer.echo(f"\nall of it is in {folder}")
