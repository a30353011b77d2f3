"""What some tests need of the machine, how to find out whether it is there, and how to get it.

A test says ``@pytest.mark.needs("bubblewrap")``, or "chromium", "gpu", "triton", and so on (`tests/conftest.py` acts on
it). Where that is missing the test is skipped, for one reason whatever the test, and the run's last lines say how many
were skipped for want of what. WPR_REQUIRE=bubblewrap,chromium makes it fail instead, on machines that are known to have
them: a broken sandbox must not look like a machine without one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import torch

REQUIRED = frozenset(filter(None, os.environ.get("WPR_REQUIRE", "").split(",")))

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def bubblewrap() -> str | None:
    from wpr.rewards.code import isolation

    found = isolation()
    return None if found.available else f"{found.reason}; `apt install bubblewrap`, and see docs/code-rewards.md"


def chromium() -> str | None:
    if CHROMIUM is None:
        return "none of chromium, chromium-browser, google-chrome is in PATH; `apt install chromium`"
    return _package("playwright")


def gpu() -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA device; run on a machine with one"


def two_gpus() -> str | None:
    found = torch.cuda.device_count()
    return None if found > 1 else f"torch finds {found} CUDA devices of 2; run on a machine with two"


def triton() -> str | None:
    return _package("triton")


def verl() -> str | None:
    missing = importlib.util.find_spec("verl") is None
    return "the package verl is not installed; `make test-verl` runs with it" if missing else None


def vllm() -> str | None:
    missing = importlib.util.find_spec("vllm") is None
    return "the package vllm is not installed; `make test-vllm` runs with it" if missing else None


def resvg() -> str | None:
    return _package("resvg_py")


def trackio() -> str | None:
    return _package("trackio")


def wandb() -> str | None:
    return _package("wandb")


def compiler() -> str | None:
    """DeepSpeed compiles its communication between processes on a CPU."""
    return None if shutil.which("g++") else "g++ is not in PATH; `apt install g++`"


def sphinx() -> str | None:
    missing = any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo"))
    return "the documentation's packages are not installed; `pip install 'wpr[docs]'`" if missing else None


def _package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"the package {name} is not installed; `pip install {name}`"


NEEDS: dict[str, Callable[[], str | None]] = {
    "bubblewrap": bubblewrap,
    "chromium": chromium,
    "gpu": gpu,
    "two gpus": two_gpus,
    "resvg": resvg,
    "triton": triton,
    "a C++ compiler": compiler,
    "verl": verl,
    "trackio": trackio,
    "wandb": wandb,
    "vllm": vllm,
    "sphinx": sphinx,
}
if not NEEDS.keys() >= REQUIRED:
    raise ValueError(f"WPR_REQUIRE={os.environ['WPR_REQUIRE']}: known are {', '.join(NEEDS)}, with commas between")


@functools.cache
def missing(what: str) -> str | None:
    """Why a test that needs this cannot run here, or None."""
    reason = NEEDS[what]()
    return None if reason is None else f"needs {what}: {reason}"
