"""Which path runs, and that it is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from wpr.transport import kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(kernels, "_said", set())
    kernels._chosen.cache_clear()
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    caplog.set_level(logging.INFO, "wpr")
    yield
    kernels._chosen.cache_clear()


def test_torch_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert not kernels.chosen(CPU)
    assert not kernels.chosen(CPU)
    assert len(caplog.messages) == 1  # said once
    assert "torch functions" in caplog.messages[0]


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert not kernels.chosen(CPU)
    assert "because WPR_KERNELS=0" in caplog.messages[0]


def test_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(kernels.VARIABLE, "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.chosen(CPU)
    assert "Triton kernels" in caplog.messages[0]


def test_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="WPR_KERNELS=1 asks for the Triton kernels, but"):
        kernels.chosen(CPU)


def test_a_triton_that_is_too_old(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.__version__", "3.3.1")
    assert not kernels.chosen(CPU)
    assert "because Triton 3.3 cannot compile them; 3.4 or newer is needed" in caplog.messages[0]


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not kernels.chosen(CPU)
    assert "because Triton is not installed" in caplog.messages[0]


def test_a_wish_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "yes")
    with pytest.raises(ValueError, match="WPR_KERNELS='yes' is unknown; use 1"):
        kernels.chosen(CPU)
