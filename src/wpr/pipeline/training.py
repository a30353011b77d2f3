"""What every training stage needs: checkpoints to go on from, metrics in a file, the progress that users see."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import RewardTrainer, SFTTrainer

from wpr.atomic_io import unused_path, write_atomically
from wpr.language_models import cudnn_attention_disabled
from wpr.pipeline.stage import Stage, is_main_process, wait_for_everyone
from wpr.ppo.checkpoints import LOGS_STATE, checkpoints_in, damage, is_finished, last_complete_checkpoint
from wpr.ppo.console import ConsoleCallback
from wpr.ppo.distributed import EndsInTime
from wpr.ppo.vllm_generation import VLLMGeneration
from wpr.runs.tolerant import Problems, read_lines

logger = logging.getLogger(__name__)

TIMES = ("runtime", "per_second", "preparation_time", "seconds_", "peak_memory", "total_flos")
"""Parts of the names of metrics that tell of the machine, not of the model."""


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Every log as a line of ``metrics.jsonl``. A resumed run's file begins with what its checkpoint had logged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the file, or cut it back to the checkpoint."""
        if state.is_world_process_zero:
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in state.log_history))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add a line."""
        if state.is_world_process_zero and logs and self.path.exists():
            row = {**logs, "step": state.global_step}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


class WarmupCheck(TrainerCallback):  # type: ignore[misc]
    """Warns of a warm-up that does not end within training. Both are counted in optimizer steps."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once the number of steps is known."""
        warmup = args.get_warmup_steps(state.max_steps)
        if warmup >= state.max_steps and state.is_world_process_zero:
            logger.warning(
                "%s: its warm-up of %d optimizer steps does not end within its %d, so that the learning rate never "
                "reaches %g; lower warmup_steps, or make it a share of all steps, such as 0.05",
                self.stage, warmup, state.max_steps, args.learning_rate,
            )  # fmt: skip


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; what a kill cut off is left out."""
    return read_lines(path, Problems(), lambda row: None, "") if path.exists() else []


def forget_final_evaluation(path: Path, history: list[dict[str, Any]]) -> None:
    """Take out of a metrics file what an earlier process measured at the end, before it was killed: it is measured
    again. ``history``: the log of the state that it is measured in, which has all evaluations within training.
    """
    if is_main_process():
        rest = [row for row in read_metrics(path)[len(history) :] if not any(key.startswith("eval_") for key in row)]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in [*history, *rest]))


class Resumable(EndsInTime):
    """For TRL's trainers: what they and the Trainer have gathered since the last log goes into checkpoints too.

    Without it, the first log after resuming would be a mean over fewer steps than in a run that was not interrupted.
    """

    _from: Path | None = None

    def resume(self, checkpoints: Path) -> None:
        """Train, from the newest whole checkpoint if there is one; if that has all steps, only load it."""
        self._from = usable_checkpoint(checkpoints)
        if self._from is None:
            self.train()
            return
        logger.info("going on from %s", self._from)
        state = TrainerState.load_from_json(str(self._from / "trainer_state.json"))
        if state.global_step < state.max_steps:
            self.train(resume_from_checkpoint=str(self._from))
            return
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            self.train(resume_from_checkpoint=str(self._from))
        else:
            self._load_from_checkpoint(str(self._from))
        self.state = state
        if (gathered := self._gathered()) is not None:
            self._total_train_tokens = gathered["tokens"]
            self._restore(gathered)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = {
            "metrics": {mode: dict(lists) for mode, lists in self._metrics.items()},
            "tokens": self._total_train_tokens,
            "loss": self._tr_loss.cpu(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            **self._own_state(),
        }
        torch.save(state, Path(output_dir) / LOGS_STATE.format(self.args.process_index))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (state := self._gathered()) is not None:
            for mode, lists in state["metrics"].items():
                self._metrics[mode].update(lists)
            self._total_train_tokens = state["tokens"]
            self._tr_loss += state["loss"].to(self.args.device)
            self._total_loss_scalar, self._initial_global_step = state["total_loss"], 0
            self._globalstep_last_logged: int = state["last_logged"]
            self._restore(state)
        with cudnn_attention_disabled():
            return super().training_step(*args, **kwargs)

    def _own_state(self) -> dict[str, Any]:
        """What a trainer keeps beside its log: tensors, numbers and text."""
        return {}

    def _restore(self, state: dict[str, Any]) -> None:
        """Put back what `_own_state` gave."""

    def _gathered(self) -> dict[str, Any] | None:
        """What the checkpoint had gathered, when it is asked for the first time."""
        if self._from is None:
            return None
        path, self._from = self._from / LOGS_STATE.format(self.args.process_index), None
        if not path.exists():
            return None
        device = self.args.device
        place = "cpu" if device.type == "cpu" else device  # of several processes it is cpu:0, which torch.load refuses
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=place)
        return state


class ResumableSFTTrainer(Resumable, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, resumable to the same logs."""


class ResumableRewardTrainer(Resumable, RewardTrainer):  # type: ignore[misc]
    """TRL's trainer, resumable to the same logs."""


def usable_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that training can go on from.

    Those that a killed process was still writing are removed. Newer ones that are damaged get another name: the Trainer
    would count them among those it keeps, and write over them in the end.
    """
    if is_main_process():
        whole = False
        for path in checkpoints_in(folder):
            if not is_finished(path):
                logger.warning("%s was not complete when its process ended; it is removed", path)
                shutil.rmtree(path)
            elif not whole and (found := damage(path)) is not None:
                moved = path.rename(unused_path(path.with_name(f"damaged-{path.name}")))
                logger.warning("%s; it is kept in %s, and the stage goes on from before it", found, moved)
            else:
                whole = True
    wait_for_everyone()
    return last_complete_checkpoint(folder)


def show_progress(trainer: Any, title: str) -> ConsoleCallback:
    """One progress bar for all stages, in place of the Trainer's own."""
    console = ConsoleCallback(bar=not trainer.args.disable_tqdm, title=title)
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # that of notebooks is another one
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(console)
    return console


def train_with_logs(trainer: Any, stage: Stage) -> None:
    """Train one of TRL's trainers, from its last checkpoint if there is one, with the progress and metrics of a run."""
    console = next((one for one in trainer.callback_handler.callbacks if isinstance(one, ConsoleCallback)), None)
    console = console or show_progress(trainer, stage.name)
    trainer.add_callback(MetricsFile(stage.folder / "metrics.jsonl"))
    trainer.add_callback(WarmupCheck(stage.name))
    try:
        trainer.resume(stage.checkpoints)
    finally:
        console.close()
    forget_final_evaluation(stage.folder / "metrics.jsonl", trainer.state.log_history)


def last_training_log(history: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of the last training log, without those that tell of the machine."""
    logs = [row for row in history if "loss" in row]
    return {} if not logs else model_metrics(logs[-1])


def model_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics that tell of the model: those of time, memory and position are left out."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and name not in ("epoch", "step") and not any(part in name for part in TIMES)
    }


def release(*objects: Any) -> None:
    """Give the memory of a stage's trainer back before the next one starts."""
    for trainer in objects:
        generation: Any = getattr(getattr(trainer, "collector", None), "generation", None)
        if isinstance(generation, VLLMGeneration):
            generation.close()
        accelerator = getattr(trainer, "accelerator", None)
        if accelerator is not None:
            accelerator.free_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
