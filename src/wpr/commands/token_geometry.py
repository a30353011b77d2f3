"""`wpr geometry build` and `show`: distances between a model's tokens, measured, kept in a file, described."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.output import out

if TYPE_CHECKING:
    from wpr.other_embeddings import TokenEmbeddings
    from wpr.transport.geometry import TokenGeometry

app = typer.Typer(no_args_is_help=True, help="Token geometries: distances between a model's tokens.")

Model = Annotated[str, typer.Argument(help="A model's folder or hub name.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Metric = Annotated[str, typer.Option(help="The distance: euclidean or cosine.")]
Neighbours = Annotated[
    str | None,
    typer.Option(
        help="How many nearest tokens keep their cost (the paper's k1), or all.",
        show_default="512, or all of a smaller vocabulary",
    ),
]
Transform = Annotated[
    str,
    typer.Option(
        help="What is done to embeddings first: see docs/numerics.md. The presets paper and unbalanced have none."
    ),
]
Power = Annotated[str, typer.Option(help="Costs are distances to this power, from 0.1 to 4; 2: squared distances.")]
Embeddings = Annotated[
    str | None,
    typer.Option(help="Whose embeddings: output for the model's output embeddings, or another model's folder or name."),
]
Scale = Annotated[str, typer.Option(help="What costs are divided by: median-nn, none, or a number.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="A file that `build` wrote for it.")]
Words = Annotated[list[str] | None, typer.Option("--word", "-w", help="Show this word's nearest tokens.")]


@app.command("build")
def build(
    model: Model,
    output: Output = Path("geometry.safetensors"),
    metric: Metric = "euclidean",
    transform: Transform = "centre/unit",
    power: Power = "1",
    neighbours: Neighbours = None,
    scale: Scale = "median-nn",
    embeddings: Embeddings = None,
) -> None:
    """Measure the distances between a model's tokens and keep what the penalty needs of them in a file.

    [bold]Example[/bold]: wpr geometry build runs/tiny/sft/model -o geometry.safetensors
    """
    out.print(build_geometry(model, output, metric, neighbours, scale, transform, power, embeddings))


@app.command("show")
def show(model: Model, file: File = None, words: Words = None, embeddings: Embeddings = None) -> None:
    """Describe a model's token geometry: scale, tokens left out of it, nearest tokens of words.

    [bold]Example[/bold]: wpr geometry show runs/tiny/sft/model -w house -w good
    """
    out.print(show_geometry(model, file, words or [], embeddings), highlight=False)


def build_geometry(
    model: str,
    path: Path,
    metric: str,
    neighbours: str | None,
    scale: str,
    transform: str = "centre/unit",
    power: str = "1",
    embeddings: str | None = None,
) -> str:
    """Measure a model's vocabulary and write the file; words for what was found.

    neighbours: a number, or ``all``; None: the paper's number, or all others where the vocabulary is smaller.
    embeddings: see `GeometrySpec`.
    """
    from wpr.errors import OptionError, UserError
    from wpr.model_geometry import measure_vocabulary
    from wpr.regularizers.spec import GEOMETRY, RegularizerSpec, from_text

    given = {"metric": metric, "transform": transform, "power": power, "neighbours": neighbours, "scale": scale}
    notes: list[str] = []
    try:
        values = {name: from_text(text, GEOMETRY[name], name) for name, text in given.items() if text is not None}
        spec = RegularizerSpec.from_settings(**values)
        geometry = measure_vocabulary(_embeddings(model, embeddings, notes.append), spec)
    except ValueError as error:
        raise OptionError(f"--{error}") from None
    try:
        geometry.save(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file with --output") from error
    return "\n".join([*notes, geometry.describe(), f"written to {path}"])


def show_geometry(model: str, path: Path | None, words: list[str], embeddings: str | None = None) -> str:
    """Words for a model's geometry, measured now or read from ``path``, with the nearest tokens of ``words``."""
    from wpr.errors import OptionError
    from wpr.model_geometry import measure_vocabulary
    from wpr.model_loading import load_tokenizer
    from wpr.transport.geometry import TokenGeometry

    if path is not None and not path.is_file():
        raise OptionError(f"--file {path}: there is no such file; `wpr geometry build` writes one")
    notes: list[str] = []
    known = _embeddings(model, embeddings, notes.append)
    geometry = measure_vocabulary(known) if path is None else TokenGeometry.load(path, known.weight)
    tokenizer = load_tokenizer(model) if words else None
    return "\n".join([*notes, geometry.describe(), *(_neighbours(geometry, tokenizer, word) for word in words)])


def _embeddings(model: str, embeddings: str | None, say: Callable[[str], None]) -> TokenEmbeddings:
    """A model's embeddings, or those that are named, on a GPU if there is one."""
    import torch

    from wpr.config.recipe import ModelSettings
    from wpr.model_geometry import token_embeddings
    from wpr.model_loading import load_causal

    known = token_embeddings(load_causal(ModelSettings(model)), embeddings, say)
    return known.to("cuda" if torch.cuda.is_available() else "cpu")


def _neighbours(geometry: TokenGeometry, tokenizer: Any, word: str) -> str:
    ids = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    tokens, costs = geometry.nearest_tokens(ids[0])
    shown = ", ".join(
        f"{tokenizer.decode([token])!r} {cost:.2f}" for token, cost in zip(tokens.tolist(), costs.tolist(), strict=True)
    )
    if not geometry.mapped[ids[0]]:
        shown = "has no embedding"
    part = "" if len(ids) == 1 else f" (of {len(ids)} tokens; the first is {tokenizer.decode([ids[0]])!r})"
    return f"{word}{part}: {shown}"
