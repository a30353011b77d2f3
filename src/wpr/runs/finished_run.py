"""A run that is analyzed: its models, its settings, and its responses to held-out prompts as tokens.

All is read from the manifest, which has every setting written out: neither TRL nor the training data is needed, and a
run can be analyzed on another machine than it was made on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from wpr.config.recipe import ModelSettings, ScorerSettings
from wpr.data import DataError, DataSettings, Encoder
from wpr.errors import OptionError, RunFolderError
from wpr.model_loading import load_causal, load_tokenizer
from wpr.regularizers.spec import RegularizerSpec
from wpr.runs.folder import RunFolder, data_source, with_prepared
from wpr.runs.jsonl_log import read_objects
from wpr.runs.responses import AFTER, Response, response_of, with_tokens

REFERENCE = "sft"
"""What the model that all policies start from is called."""


RESTORE = "restore it from a copy"


class FinishedRun:
    """The folder of a run with at least the model that policies start from.

    manifest: as the file has it. recipe: its settings, with ``{prepare}`` replaced by the folder that it stands for.
    finished, unfinished: policies that are done and have their model, and those that are not or have none.
    """

    def __init__(self, path: Path, device: str | None = None) -> None:
        """device: where models are put; None takes the accelerator, if there is one."""
        if not (path / "manifest.json").is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no manifest.json; name the folder that `wpr run` wrote"
            )
        self.path = path
        self.manifest = RunFolder(path, writes=False).manifest
        recipe = dict(self.manifest.get("recipe") or {})
        if not recipe:
            raise RunFolderError(f"{path / 'manifest.json'} has no recipe; let `wpr run` go on with the run first")
        source = data_source(recipe["data"].get("source"), (recipe.get("prepare") or {}).get("data"))
        self.recipe: Mapping[str, Any] = with_prepared(recipe | {"data": recipe["data"] | {"source": source}}, path)
        policies = [name.removeprefix("ppo/") for name in self.manifest["stages"] if name.startswith("ppo/")]
        self.finished = [
            name for name in policies if self._record(name)["status"] == "done" and self._folder(name).is_dir()
        ]
        self.unfinished = [name for name in policies if name not in self.finished]
        self._device = device

    @cached_property
    def device(self) -> Any:
        """Where models are."""
        return device_of(self._device)

    def choose(self, names: Sequence[str] | None) -> list[str]:
        """Those of the finished policies that are named; all where none is."""
        for name in names or []:
            if name not in self.finished:
                known = ", ".join(self.finished) or "none"
                raise OptionError(f"{self.path} has no finished policy {name}; finished are: {known}")
        if not self.finished:
            raise RunFolderError(f"{self.path} has no finished policy; let `wpr run` finish one first")
        return list(dict.fromkeys(names or self.finished))

    @property
    def sft_model(self) -> str:
        """The model that policies start from, and are compared with."""
        if self.recipe.get("sft") is None:
            return str(self.recipe["model"]["name"])
        folder = self.path / "sft" / "model"
        if not folder.is_dir():
            raise RunFolderError(f"{self.path} has no finished SFT model yet; let `wpr run` finish it first")
        return str(folder)

    @cached_property
    def data(self) -> DataSettings:
        """How the run reads and encodes its data."""
        return DataSettings(**self.recipe["data"])

    @cached_property
    def tokenizer(self) -> Any:
        """Of all the run's models."""
        return load_tokenizer(self.sft_model)

    @cached_property
    def encoder(self) -> Encoder:
        """What made tokens of the run's prompts."""
        return Encoder(self.tokenizer, self.data)

    def model(self, name: str) -> str:
        """Where a model is, `REFERENCE` or a policy."""
        return self.sft_model if name == REFERENCE else str(self._folder(name))

    def load(self, name: str) -> Any:
        """A model by name, ready to be asked."""
        folder = self.model(name)
        return load_causal(ModelSettings(folder), folder).to(self.device).eval().requires_grad_(False)

    def regularizer(self, policy: str) -> RegularizerSpec:
        """What the policy was trained under."""
        return RegularizerSpec.from_record(self._record(policy)["inputs"]["regularizer"])

    def temperature(self, policy: str) -> float:
        """Of the distributions that were compared in training."""
        record = self._record(policy)
        if record["inputs"].get("trainer", "ppo") != "ppo":  # TRL compares what it draws from
            return float(record["settings"]["temperature"])
        if "logprob_temperature" in record.get("settings", {}):
            return float(record["settings"]["logprob_temperature"])
        # Releases that recorded no settings had this default; what the recipe set is among the inputs.
        return float(record["inputs"]["ppo"].get("logprob_temperature", 1.0))

    def scorer(self) -> tuple[ScorerSettings, str | None]:
        """What PPO maximised: its settings, and the reward model's folder where it is one."""
        settings = ScorerSettings(**self.recipe["scorer"])
        if settings.kind != "model":
            return settings, None
        return settings, settings.name or str(self.path / "reward" / "model")

    def responses(self, policy: str, file: str = AFTER, limit: int | None = None) -> list[Response]:
        """The policy's responses to held-out prompts (``file`` `BEFORE`: the reference's), in the order of prompts,
        with their tokens.
        """
        path = self.path / "ppo" / policy / file
        if not path.is_file():
            raise RunFolderError(
                f"{path} is missing: the run has no held-out responses (evaluation.prompts, split.held_out)"
            )
        try:
            lines = read_objects(path.read_bytes(), path, RESTORE)
            # Files of older runs have no prompt_id: their numbers name prompts.
            named = [
                (f"{path}:{line}", {"prompt_id": row["number"], **row} if "number" in row else row)
                for line, row in lines
            ]
            rows = [response_of(row, where) for where, row in named]
        except DataError as error:
            said = str(error)
            raise RunFolderError(said if said.endswith(RESTORE) else f"{said}; {RESTORE}") from None
        return [with_tokens(row, self.encoder) for row in rows[:limit]]

    def _record(self, policy: str) -> Mapping[str, Any]:
        return self.manifest["stages"][f"ppo/{policy}"]  # type: ignore[no-any-return]

    def _folder(self, policy: str) -> Path:
        return self.path / "ppo" / policy / "model"


def device_of(name: str | None) -> Any:
    """The device of that name; of None the accelerator, or the CPU where there is none."""
    import torch

    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
