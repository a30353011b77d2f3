"""A run's folder: what is in it, what its manifest says, and who may write to it.

    runs/NAME/
        manifest.json           versions, recipe, data, hardware, and each stage's status, duration and results
        recipe.yaml             the resolved recipe
        run.log                 what was done, all runs of the command after each other
        data.json               rows read, left out and dealt to the stages
        prepare/                what a prepare stage made
        sft/  reward/  ppo/POLICY/
            model/              an ordinary transformers folder, with its tokenizer and a model card
            checkpoints/        to go on from after an interruption
            metrics.jsonl       one line per log
            tensorboard/
        old/                    stages that were started again, as they were

A stage is done when the manifest says so; the model is moved to its place before that, in one rename.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wpr.atomic_io import unused_path, write_atomically
from wpr.errors import RunFolderError
from wpr.runs.jsonl_log import LogFile
from wpr.stage_names import is_stage

FORMAT = 1
OUR_OWN = (".lock", "run.log")
"""What a run that ended before its first stage leaves behind."""


@dataclass
class StageRecord:
    """What the manifest says of a stage.

    inputs: everything that decides its outcome, as the recipe has it: a stage whose inputs change is another one.
    settings: of its trainer, all of them as they were used, defaults and what suits this machine too.
    status: running, done, failed or interrupted. seconds: over all runs.
    peak_memory_gb: of the GPU, or of the process where there is none, in the last run.
    """

    inputs: dict[str, Any]
    status: str = "running"
    started: str = ""
    finished: str | None = None
    seconds: float = 0.0
    peak_memory_gb: float | None = None
    results: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class RunFolder:
    """The folder of one run, opened for writing by one process at a time.

    writes: False for the other processes of a launch: they keep the manifest up to date in memory only.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self.manifest_path = path / "manifest.json"
        self.manifest: dict[str, Any] = self._read_manifest()

    def stage(self, name: str) -> Path:
        """The folder of a stage; policies' stages are called ``ppo/NAME``."""
        return self.path / name

    def _read_manifest(self) -> dict[str, Any]:
        if not self.manifest_path.exists():
            if self.path.exists() and not self.path.is_dir():
                raise RunFolderError(f"{self.path} is a file; choose another folder with output=...")
            if self.path.is_dir() and any(entry.name not in OUR_OWN for entry in self.path.iterdir()):
                raise RunFolderError(
                    f"{self.path} holds files but no manifest.json: it is not a run folder; choose another one with "
                    "output=..., or empty it"
                )
            return {"format": FORMAT, "stages": {}}
        try:
            manifest: dict[str, Any] = json.loads(self.manifest_path.read_text(encoding="utf-8-sig"))
            if manifest["format"] != FORMAT:
                raise RunFolderError(
                    f"{self.manifest_path} has format {manifest['format']}, this release writes format {FORMAT}; use "
                    "another folder"
                )
            for stage, record in manifest["stages"].items():
                StageRecord(**record)
                if not is_stage(stage):
                    raise RunFolderError(
                        f"{self.manifest_path} names the stage {stage!r}, which no run can have; restore the file, or "
                        "take the stage out of it"
                    )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunFolderError(
                f"{self.manifest_path} is damaged ({error}); restore it, or move the folder away and start again"
            ) from None
        return manifest

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out while this one writes. The lock goes with the process, however that ends."""
        in_use = f"another process is writing to {self.path}; wait for it, or choose another folder with output=..."
        with LogFile(self.path / ".lock", RunFolderError(in_use)):
            self.manifest = self._read_manifest()
            yield

    def record(self, stage: str) -> StageRecord | None:
        """What is known of a stage."""
        found = self.manifest["stages"].get(stage)
        return None if found is None else StageRecord(**found)

    def write(self, stage: str | None = None, record: StageRecord | None = None, **facts: Any) -> None:
        """Put a stage's record, or facts about the run, into the manifest."""
        if stage is not None and record is not None:
            self.manifest["stages"][stage] = dict(vars(record))
        self.manifest.update(facts)
        if self.writes:
            write_atomically(self.manifest_path, json.dumps(self.manifest, indent=1, ensure_ascii=False) + "\n")

    def set_aside(self, stage: str) -> Path | None:
        """Move a stage's folder to ``old/`` and forget its record; where it went."""
        source = self.stage(stage)
        moved = None
        if self.writes and source.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S")
            moved = unused_path(self.path / "old" / f"{stage.replace('/', '-')}-{stamp}")
            moved.parent.mkdir(parents=True, exist_ok=True)
            source.rename(moved)
        self.manifest["stages"].pop(stage, None)
        self.write()
        return moved


def with_prepared(value: Any, run: Path) -> Any:
    """Settings with ``{prepare}`` replaced by the folder of the run that it stands for."""
    if isinstance(value, str):
        return value.replace("{prepare}", str(run / "prepare"))
    if isinstance(value, dict):
        return {key: with_prepared(part, run) for key, part in value.items()}
    return [with_prepared(part, run) for part in value] if isinstance(value, list) else value


def data_source(source: Any, prepared: str | None) -> Any:
    """What stages read: the recipe's ``data.source``, or the file ``prepared`` (`prepare.data`) that is made of it."""
    return source if prepared is None else f"{{prepare}}/{prepared}"


def now() -> str:
    """The time, as manifests have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
