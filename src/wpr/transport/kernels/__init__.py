"""Triton versions of the transport functions: same names, same results, chosen by themselves on a GPU.

Which path runs is decided here, and said once. The environment variable ``WPR_KERNELS`` has the last word:

    unset    the kernels for tensors on a CUDA device if Triton can be imported, else the torch functions
    0        always the torch functions
    1        always the kernels; an error says why if they cannot run

The kernels' files import Triton; this one does not, so that the package can be imported without it. On a CPU the
kernels run under Triton's interpreter (``TRITON_INTERPRET=1``), which is for tests: it is slow.

What depends on the number of positions is listed in each kernel's ``do_not_specialize``, strides and pointers into
shared tensors too: Triton would compile again, for seconds, when a batch has another number of them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch

VARIABLE = "WPR_KERNELS"

OLDEST_TRITON = (3, 4)
"""With which the kernels compile."""

_log = logging.getLogger(__name__)
_said: set[str] = set()


def chosen(device: torch.device) -> bool:
    """Whether tensors on ``device`` go through the kernels; says so once, with the reason."""
    return _chosen(device, os.environ.get(VARIABLE, ""), os.environ.get("TRITON_INTERPRET") == "1")


@cache  # a few microseconds before every call, in which a GPU may have nothing to do
def _chosen(device: torch.device, wish: str, interpreted: bool) -> bool:
    wish = wish.strip()
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={wish!r} is unknown; use 1 (kernels), 0 (torch), or leave it unset")
    obstacle = _obstacle(device, interpreted)
    if wish == "1" and obstacle:
        raise RuntimeError(f"{VARIABLE}=1 asks for the Triton kernels, but {obstacle}; unset {VARIABLE}")
    if wish == "0":
        say_once(f"transport on {device.type}: torch functions, because {VARIABLE}=0")
        return False
    if obstacle:
        say_once(f"transport on {device.type}: torch functions, because {obstacle}")
        return False
    if device.type != "cuda" and wish != "1":
        say_once(f"transport on {device.type}: torch functions; the kernels are for CUDA devices")
        return False
    say_once(f"transport on {device.type}: Triton kernels ({VARIABLE}=0 turns them off)")
    return True


def _obstacle(device: torch.device, interpreted: bool) -> str | None:
    """Why the kernels cannot run on ``device``, if so."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the device has no bf16 tensor cores (compute capability below 8.0)"
    if device.type != "cuda" and not interpreted:
        return f"tensors on {device.type} need Triton's interpreter (TRITON_INTERPRET=1)"
    if (found := _triton_version()) < OLDEST_TRITON:
        wanted, there = (".".join(map(str, version)) for version in (OLDEST_TRITON, found))
        return f"Triton {there} cannot compile them; {wanted} or newer is needed (it comes with torch 2.8)"
    return None


def _triton_version() -> tuple[int, int]:
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def cdiv(number: int, by: int) -> int:
    """A quotient, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number. Triton has both functions, for its own kernels as
    well, and they take ten times as long.
    """
    return 1 << (number - 1).bit_length()


def say_once(message: str) -> None:
    """Log a message, the first time only."""
    if message not in _said:
        _said.add(message)
        _log.info(message)
