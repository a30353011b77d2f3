"""`wpr push`: a policy to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wpr.commands.output import note, say

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Policy = Annotated[str, typer.Argument(metavar="POLICY", help="A finished policy of it.")]
Name = Annotated[str, typer.Option("--to", metavar="NAME", help="Name of the repository: OWNER/NAME, or NAME.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository a private one.")]
Update = Annotated[bool, typer.Option("--update", help="Add a commit to a repository that is there already.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write the folder and list it; upload nothing.")]
NoGeometry = Annotated[
    bool, typer.Option("--no-geometry", help="Leave the distances between tokens out, which take a while to measure.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default="RUN/hub/POLICY")]


def push(
    run: RunFolder,
    policy: Policy,
    to: Name,
    private: Private = False,
    update: Update = False,
    dry_run: DryRun = False,
    no_geometry: NoGeometry = False,
    output: Output = None,
) -> None:
    """Upload a policy to the hub: weights, tokenizer, model card, token geometry, and settings.

    With [bold]--dry-run[/bold], what would be uploaded is written to a folder, and listed; a card that you edit there
    is uploaded as you left it.

    [bold]Examples[/bold]: wpr push runs/tiny semantic --to me/tiny-semantic --dry-run   |   wpr push runs/tiny semantic
    --to me/tiny-semantic --private
    """
    from wpr.pipeline.publishing import check_access, check_name, check_policy, upload, write_folder
    from wpr.runs.finished_run import FinishedRun

    found = FinishedRun(run)
    check_policy(found, policy)
    check_name(to)
    if not dry_run:
        check_access(to)
    folder = output or run / "hub" / policy
    write_folder(found, policy, to, folder, note, geometry=not no_geometry)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        say(f"{path.stat().st_size:>13,}  {path.relative_to(folder)}")
    if dry_run:
        typer.echo(f"nothing was uploaded; the folder is {folder}")
        return
    typer.echo(f"uploaded to {upload(folder, to, private=private, update=update)}")
