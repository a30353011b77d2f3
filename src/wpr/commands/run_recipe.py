"""`wpr run`, `quickstart`, `sft`, `reward`, `ppo` and `sweep`: stages of a recipe, planned and carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpr.commands.output import err, note, out

if TYPE_CHECKING:
    from wpr.config.recipe import Recipe


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes that begin so, for the shell."""
    from wpr.config.recipe_file import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or a shipped recipe's name.", autocompletion=complete_recipe),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, as ppo.beta=0.1.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan; start nothing.")]
OnChange = Annotated[
    str,
    typer.Option(
        "--on-change",
        help="What to do with a stage in the folder that was made by other settings: [bold]refuse[/bold], "
        "[bold]restart[/bold] it (the old one is moved to old/), or [bold]keep[/bold] it.",
    ),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", "-p", help="A policy of the recipe; repeat for more.")]
Grid = Annotated[list[str] | None, typer.Option(help="Values to try, as KEY=VALUE,VALUE; repeat for more keys.")]
SweepArguments = Annotated[
    list[str] | None, typer.Argument(metavar="SWEEP KEY=VALUE", help="A sweep of the recipe; settings to change.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Make a smoke run: everything, but too briefly to learn.")]
Changes = dict[str, dict[str, Any]]
"""What each policy of a sweep changes, by its name: dotted settings."""


def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    policy: Policies = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Run all stages of a recipe: data, SFT, reward model, PPO (or GRPO, RLOO) for each policy.

    Stages that are done are skipped; one that was interrupted resumes from its last checkpoint.

    [bold]Examples[/bold]

        wpr run tiny

        wpr run hh-gemma-2b model.name=my/model data.source=my.jsonl.gz

        wpr run my-recipe.yaml --policy rkl --policy sum ppo.beta=0.02

        wpr run stories trainer=grpo output=runs/grpo

        accelerate launch -m wpr run tldr-gemma-2b
    """
    _execute(recipe, overrides, dry_run, on_change, policy)


def quickstart(
    overrides: Overrides = None, quick: Quick = False, dry_run: DryRun = False, on_change: OnChange = "refuse"
) -> None:
    """Align a small model under KL and under transport, and write a page that shows it.

    Minutes on a laptop's CPU, nothing to download: sentences are rewritten without some common words, and the page
    says how much of the meaning is left. It is the recipe [bold]quickstart[/bold] (with --quick,
    [bold]quickstart-quick[/bold]) followed by [bold]wpr report[/bold].

    [bold]Examples[/bold]: wpr quickstart   |   wpr quickstart --quick   |   wpr quickstart seed=1 output=runs/seed-1
    """
    folder = _execute("quickstart-quick" if quick else "quickstart", overrides, dry_run, on_change)
    if folder is not None:
        from wpr.report import write_report

        page = folder / "report.html"
        for problem in write_report([folder], page):
            note(problem)
        out.print(f"the report is in {page.resolve()}", soft_wrap=True, highlight=False)


def sft(
    recipe: RecipeArgument, overrides: Overrides = None, dry_run: DryRun = False, on_change: OnChange = "refuse"
) -> None:
    """Fine-tune the model on demonstrations (the recipe's [bold]sft[/bold] section).

    [bold]Example[/bold]: wpr sft hh-gemma-2b sft.learning_rate=2e-5
    """
    _execute(recipe, overrides, dry_run, on_change, only="sft")


def reward(
    recipe: RecipeArgument, overrides: Overrides = None, dry_run: DryRun = False, on_change: OnChange = "refuse"
) -> None:
    """Train the reward model on preference pairs (the recipe's [bold]reward[/bold] section).

    [bold]Example[/bold]: wpr reward hh-gemma-2b
    """
    _execute(recipe, overrides, dry_run, on_change, only="reward")


def ppo(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    policy: Policies = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Train policies with PPO, or the recipe's other trainer, on the run's SFT and reward models.

    [bold]Example[/bold]: wpr ppo hh-gemma-2b --policy semantic ppo.beta=0.02
    """
    _execute(recipe, overrides, dry_run, on_change, policy, only="ppo")


def sweep(
    recipe: RecipeArgument,
    arguments: SweepArguments = None,
    policy: Policies = None,
    grid: Grid = None,
    dry_run: DryRun = False,
    on_change: OnChange = "refuse",
) -> None:
    """Train several policies on one SFT and one reward model, and compare them.

    [bold]Examples[/bold]

        wpr sweep tldr-gemma-2b ablations

        wpr sweep hh-gemma-2b beta --policy rkl --policy paper

        wpr sweep my-recipe.yaml --grid ppo.beta=0.1,0.01 --grid regularizer.lam=5,10
    """
    given = list(arguments or [])
    name = given.pop(0) if given and "=" not in given[0] else None

    def members(loaded: Recipe) -> Changes:
        from wpr.pipeline.sweep import members

        return members(loaded, name, policy or [], grid or [])

    _execute(recipe, given, dry_run, on_change, policy, members=members)


def _execute(
    name: str,
    overrides: list[str] | None,
    dry_run: bool,
    on_change: str,
    policies: list[str] | None = None,
    only: str | None = None,
    members: Callable[[Recipe], Changes] | None = None,
) -> Path | None:
    """Load the recipe, plan it, and print the plan or carry it out; the run's folder on the process that wrote it.

    only: the one stage to carry out. members: of a sweep.
    """
    from wpr.config.recipe_file import find_recipe, load_recipe
    from wpr.errors import RecipeError

    find_recipe(name)  # before packages that may be missing
    from wpr.pipeline.run import plan

    if on_change not in ("refuse", "restart", "keep"):
        raise RecipeError(f"--on-change {on_change} must be refuse, restart or keep")
    recipe = load_recipe(name, overrides or [])
    for policy in policies or []:
        recipe.check_policy(policy)
    if only in ("sft", "reward") and getattr(recipe, only) is None:
        raise RecipeError(f"recipe {recipe.name} has no {only} stage ({only}: null)")
    changes = {} if members is None else members(recipe)
    chosen = list(changes) or policies or None  # none given: those that the recipe trains
    stages = plan(recipe, [] if only in ("sft", "reward") else chosen, changes)
    if only == "sft":
        stages = [stage for stage in stages if stage.name != "reward"]
    if dry_run:
        from wpr.pipeline.plan_view import show_plan

        show_plan(recipe, stages, out)
        return None
    from wpr.pipeline.from_python import carry_out

    return carry_out(recipe, stages, on_change, err.print, out, None if only is None else {only})  # type: ignore[arg-type]
