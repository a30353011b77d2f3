"""Kernels are compiled once, whatever the number of positions: a compilation takes seconds, in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein

pytestmark = pytest.mark.needs("gpu")

V = 900
K2 = 29  # that no other test has: their kernels may be compiled already


def _presets() -> list[Callable[[TokenGeometry], Any]]:
    return [
        lambda geometry: Wasserstein(geometry, "unbalanced", k2=K2),
        lambda geometry: Wasserstein(geometry, "paper", k2=K2),
        lambda geometry: ReverseKL(),
    ]


@pytest.mark.parametrize("make", _presets(), ids=["unbalanced", "paper", "reverse-kl"])
def test_other_numbers_of_positions_compile_nothing(
    make: Callable[[TokenGeometry], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *args, **named: compiled.append(str(named.get("repr")))
    )
    geometry = TokenGeometry.from_embeddings(clustered_embeddings(words=300, size=56).bfloat16(), neighbours=40)
    regularizer = make(geometry.to("cuda"))
    logits = 3 * torch.randn(2, 100, V, device="cuda")
    tokens = torch.randint(V, (101,), device="cuda")
    regularizer(*logits[:, :64], tokens[:64])
    assert compiled, "the hook does not tell"
    compiled.clear()
    for positions in (1, 2, 3, 5, 7, 16, 33, 100):
        regularizer(*logits[:, :positions], tokens[1 : positions + 1])  # tokens that start at an odd place
    assert not compiled
