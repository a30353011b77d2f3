"""What a run stands on: versions, machine, command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys

import pytest
import torch

from wpr import __version__
from wpr.pipeline.environment import PACKAGES, command_line, machine, versions


def test_versions_of_what_is_installed() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["wpr"] == __version__
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert set(found) <= {"python", *PACKAGES}
    assert {"transformers", "trl", "accelerate", "datasets"} <= set(found)


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wpr.pipeline.environment.PACKAGES", ("torch", "a-package-that-nobody-made"))
    assert set(versions()) == {"python", "torch"}


def test_the_machine_is_this_one() -> None:
    found = machine()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert 0 < found.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert platform.machine() in found.system


def test_the_machine_goes_into_a_manifest() -> None:
    found = machine().as_dict()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"system", "cores", "memory", "gpus"}


@pytest.mark.parametrize(
    "arguments", [["run", "tiny"], ["run", "my recipe.yaml", "ppo.beta=0.1", "data.source=*.jsonl"]]
)
def test_the_command_can_be_typed_again(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/wpr", *arguments])
    assert shlex.split(command_line()) == ["wpr", *arguments]
