"""Options that commands of `wpr analyze` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `wpr run` wrote.")]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", "-p", help="Analyze only this policy; repeat for more.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", min=0.0, help="Analyze the responses that `wpr generate RUN -t T` drew.",
        show_default="those that the run drew",
    ),
]  # fmt: skip
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Maximum number of responses per policy.", show_default="all")
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Responses per forward pass.")]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Device of the models, such as cpu or cuda:1.", show_default="the accelerator"),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Another folder for the results.", show_default="RUN/analyses/NAME"),
]


def _can_draw_png(wanted: bool) -> bool:
    """Refuse before the analysis what could not be drawn after it."""
    if wanted:
        from wpr.report.picture import converter

        converter()
    return wanted


Png = Annotated[
    bool,
    typer.Option(
        "--png", callback=_can_draw_png, help="Write figures as PNG files too; needs pip install 'wpr\\[plots]'."
    ),
]
SHARED: dict[str, tuple[Any, Any]] = {
    "policy": (Policies, None),
    "temperature": (Temperature, None),
    "limit": (Limit, None),
    "batch_size": (BatchSize, 8),
    "device": (Device, None),
}
"""Options that several analyses have: what they are, and their defaults."""

Regularizers = Annotated[
    list[str] | None,
    typer.Option(
        "--regularizer", "-r",
        help="A regularizer, such as reverse-kl, paper or semantic:lam=20,rho=4; repeat for more.",
    ),
]  # fmt: skip
Encoder = Annotated[
    str | None,
    typer.Option("--encoder", "-e", help="A model's folder or hub name.", show_default="the run's SFT model"),
]
Prompt = Annotated[
    str | None, typer.Option(help="The text that policies answer.", show_default="the first held-out prompt")
]

Texts = Annotated[
    Path | None,
    typer.Option(
        "--texts",
        help="Texts whose words are judged: a .txt file of a text a line, or records with a column text, response, "
        "completion or chosen.",
    ),
]
