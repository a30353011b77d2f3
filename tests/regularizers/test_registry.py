"""Regularizers by name."""

from __future__ import annotations

import pytest
import torch

from wpr import Alpha, ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import register
from wpr.regularizers.registry import ALIASES, REGULARIZERS


def test_names_and_aliases() -> None:
    assert isinstance(make_regularizer("rkl"), ReverseKL)
    assert make_regularizer("alpha", alpha=0.3, estimator="paper").alpha == 0.3  # type: ignore[attr-defined]
    geometry = TokenGeometry.from_embeddings(torch.randn(30, 4), neighbours=5)
    assert isinstance(make_regularizer("wasserstein", geometry=geometry, preset="paper", k2=8), Wasserstein)
    assert set(ALIASES.values()) <= set(REGULARIZERS)


def test_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'wasserstien' is unknown; did you mean 'wasserstein'\?"):
        make_regularizer("wasserstien")


def test_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wpr.regularizers.registry.REGULARIZERS", dict(REGULARIZERS))
    register("mine", lambda: Alpha(0.9))
    assert make_regularizer("mine").alpha == 0.9  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'rkl' is taken"):
        register("rkl", ReverseKL)
