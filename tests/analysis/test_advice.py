"""The rule that chooses a regularizer."""

from __future__ import annotations

import math

import pytest
import torch

from wpr.analysis.advice import OTHER_TRANSFORM, Geometry, recommend
from wpr.analysis.geometry_diagnostics import GeometryDiagnostics
from wpr.analysis.starting_beta import KL
from wpr.analysis.statistics import Estimate
from wpr.regularizers.spec import RECOMMENDED

WORDING, CONTENT, UNTOLD = Estimate(0.9, 0.8, 1.0), Estimate(0.1, 0.05, 0.2), Estimate(0.5, 0.3, 0.7)
KNOWS, KNOWS_NOT = Estimate(0.2, 0.1, 0.3), Estimate(0.0, -0.05, 0.05)


@pytest.mark.parametrize(
    ("share", "screened", "other", "regularizer", "compare"),
    [
        (WORDING, KNOWS, KNOWS, RECOMMENDED, KL),
        (WORDING, KNOWS_NOT, KNOWS, f"reverse-kl + 4*semantic:{OTHER_TRANSFORM}", KL),
        (WORDING, KNOWS_NOT, KNOWS_NOT, KL, RECOMMENDED),
        (WORDING, None, None, RECOMMENDED, KL),
        (CONTENT, KNOWS, KNOWS, KL, None),
        (UNTOLD, KNOWS, KNOWS, KL, RECOMMENDED),
        (Estimate(math.nan), None, None, KL, RECOMMENDED),
    ],
)
def test_rule(
    share: Estimate, screened: Estimate | None, other: Estimate | None, regularizer: str, compare: str | None
) -> None:
    none = torch.zeros(1)
    seen = GeometryDiagnostics(none, none, none, none, none, 1.0, (0.5, 0.4, 0.6), screened)
    found = recommend(share, Geometry(seen, 1, other))
    assert (found.regularizer, found.compare) == (regularizer, compare)
