"""What the project claims of a real model; needs `make smollm2`, runs with `make test-slow`."""

from __future__ import annotations

import pytest

from benchmarks import registry_models
from benchmarks.semantic_contrast import cached_geometry, contrast, gaps, make_trial
from wpr import ReverseKL, SquaredHellinger, Wasserstein

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (registry_models.FOLDER / "config.json").exists(), reason="needs `make smollm2`"),
]


def test_semantic_contrast() -> None:
    """KL, its control and the paper's setting are blind; the semantic preset is not."""
    model, tokenizer = registry_models.load()
    geometry = cached_geometry(model, registry_models.FOLDER)
    assert 1.9 < geometry.scale < 2.2
    trial = make_trial(model, tokenizer, geometry, positions=64)
    for regularizer in (ReverseKL(), SquaredHellinger(), Wasserstein(geometry, "paper")):
        value, low, high = contrast(*gaps(regularizer, trial))
        assert value == pytest.approx(1, abs=1e-3)
        assert high - low < 2e-3
    value, _, high = contrast(*gaps(Wasserstein(geometry, "unbalanced"), trial))
    assert value < 0.25
    assert high < 0.25
