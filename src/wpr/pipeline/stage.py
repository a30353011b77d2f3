"""A stage as its trainer sees it: the recipe, its folder, its rows, the devices."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wpr.atomic_io import write_atomically
from wpr.config.recipe import Recipe
from wpr.model_loading import save_model
from wpr.pipeline.arguments import make_config, make_trl_config, regularizer_settings, trainer_arguments
from wpr.pipeline.model_card import model_card
from wpr.pipeline.recipe_data import RecipeData, StageRows
from wpr.runs.folder import RunFolder


@dataclass
class Stage:
    """One stage of a run.

    name: ``sft``, ``reward`` or ``ppo/POLICY``. recipe: with the policy's changes and real paths.
    settings: of its trainer, once it has a config; the manifest has them.
    """

    name: str
    recipe: Recipe
    run: RunFolder
    data: RecipeData | None  # none before the prepare stage, which may make it
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``sft``, ``reward`` or ``ppo``."""
        return self.name.partition("/")[0]

    @property
    def folder(self) -> Path:
        return self.run.stage(self.name)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def rows(self, tokenizer: Any) -> StageRows:
        """The stage's rows as tokens; the length report goes to ``lengths.json``."""
        assert self.data is not None
        rows = self.data.rows(self.kind, tokenizer)
        if is_main_process():
            report = {"train": rows.lengths.as_dict(), "held_out": rows.held_out_lengths.as_dict()}
            write_atomically(self.folder / "lengths.json", json.dumps(report, indent=1) + "\n")
        return rows

    def arguments(self) -> dict[str, Any]:
        """Arguments of the stage's config class, on the processes and devices that there are."""
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(self.folder / "tensorboard")
        own = trainer_arguments(self.recipe, self.kind, self.folder, process_count(), has_bf16())
        return device_arguments() | own

    def config(self, **defaults: Any) -> Any:
        """The config object of the stage's trainer; what of ``defaults`` the recipe leaves open is taken."""
        args = make_config(self.kind, defaults | self.arguments())
        self._note_settings(args)
        return args

    def trl_config(self, shared: Any) -> Any:
        """That of TRL's trainer, where it trains the policy; ``shared``: from `config`."""
        args = make_trl_config(self.recipe, shared, self.arguments())
        self.settings.clear()
        self._note_settings(args, regularizer_beta=shared.beta, **regularizer_settings(self.recipe))
        return args

    def _note_settings(self, args: Any, **others: Any) -> None:
        self.settings.update(json.loads(json.dumps(args.to_dict() | others, default=str)))

    def unwrap(self, trainer: Any) -> Any:
        """The trained model itself."""
        return trainer.accelerator.unwrap_model(trainer.model)

    def save(self, model: Any, tokenizer: Any, results: dict[str, Any]) -> None:
        """Write the trained model; all processes call it, and the first one writes."""
        card = model_card(self.recipe, self.name, results)
        save_model(model, tokenizer, self.folder / "model", card, writes=is_main_process())

    @property
    def sft_model(self) -> str:
        """What comes out of SFT, or the recipe's model where there is no such stage."""
        return self.recipe.model.name if self.recipe.sft is None else str(self.run.stage("sft") / "model")

    @property
    def reward_model(self) -> str | None:
        """The reward model's folder or name; None where there is none."""
        if self.recipe.scorer.name is not None:
            return self.recipe.scorer.name
        return None if self.recipe.reward is None else str(self.run.stage("reward") / "model")


def process_count() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process writes the run's files."""
    return int(os.environ.get("RANK", "0")) == 0


def wait_for_everyone() -> None:
    """Until all processes of the launch are here."""
    if process_count() > 1:
        from accelerate import PartialState

        PartialState(**({"cpu": True} if device_arguments() else {})).wait_for_everyone()


def device_arguments() -> dict[str, Any]:
    """Arguments of a trainer on a machine without an accelerator; unless told, processes there would not find each
    other.
    """
    import torch

    return {} if torch.accelerator.is_available() else {"use_cpu": True}


def has_bf16() -> bool:
    """Whether the GPU multiplies in bf16."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def reset_peak_memory() -> None:
    """Start counting the GPU's peak again."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> float:
    """Gigabytes at the peak: of the GPU since `reset_peak_memory`, or of the process since it began."""
    import torch

    from wpr.ppo.metrics import peak_memory_gb

    return peak_memory_gb(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
