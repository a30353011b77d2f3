"""The `wpr` command in two processes of this machine's CPU, with the environment that `accelerate launch` gives them:
plain data parallelism, ZeRO or FSDP 2. As a program, one of these processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pipeline.command import environment

ROOT = Path(__file__).parents[2]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # configs/accelerate/fsdp2.yaml


class Launch:
    """Two processes of a command. how: ``ddp``, ``zero2``, ``zero3`` or ``fsdp2``. folder: for settings and output."""

    def __init__(self, how: str, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            **variables(how, folder),
        }
        self.outputs = [folder / f"process-{rank}.txt" for rank in range(2)]
        command = [sys.executable, "-m", "tests.pipeline.processes", *arguments]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            own = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
            with output.open("w") as file:
                self.processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=file))

    @property
    def output(self) -> str:
        """What the first process printed."""
        return self.outputs[0].read_text()

    def wait(self, timeout: float = 300) -> list[int]:
        """Exit codes. Where one process fails, the other is ended, as launchers do."""
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() not in (None, 0) for process in self.processes) or time.monotonic() > end:
                time.sleep(1)  # for the message
                self.kill()
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def succeeds(self) -> None:
        """Until the end, which must be a good one."""
        assert self.wait() == [0, 0], "".join(path.read_text()[-6000:] for path in self.outputs)

    def kill(self) -> None:
        """kill -9."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def kill_once(self, there: Callable[[], bool]) -> None:
        """kill -9 as soon as something is there; the run must not have ended."""
        while not there():
            assert all(process.poll() is None for process in self.processes), self.output[-6000:]
            time.sleep(0.02)
        self.kill()
        assert [process.returncode for process in self.processes] == [-signal.SIGKILL] * 2


def variables(how: str, folder: Path) -> dict[str, str]:
    """What `accelerate launch` puts into the environment."""
    if how == "ddp":
        return {}
    if how == "fsdp2":
        return FSDP
    settings: dict[str, Any] = {
        "zero_optimization": {"stage": int(how[-1]), "stage3_gather_16bit_weights_on_model_save": True},
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
    }
    if how == "zero3":  # without it, so small a model is whole on every process
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = folder / f"{how}.json"
    path.write_text(json.dumps(settings))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(how == "zero3").lower(),
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
        "DS_ACCELERATOR": "cpu",
    }


def shard_on_a_cpu() -> None:
    """Have accelerate use FSDP 2 on a CPU, where it leaves it out without a word; torch itself has it there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    make = AcceleratorState.__init__

    def make_with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type != DistributedType.FSDP:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = make_with_plugin


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        from tests.ppo.run import communicate_without_compiling

        communicate_without_compiling()
    if "ACCELERATE_USE_FSDP" in os.environ:
        shard_on_a_cpu()
    from wpr.cli import main

    main()
