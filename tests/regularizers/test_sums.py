"""Sums of regularizers: their arithmetic, the optimum they lead to, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.problems import clustered_embeddings
from tests.reference import newton
from tests.regularizers.test_optimum import TOKENS, ascend, bandit, distance, penalties_by_call, solve
from wpr import ForwardKL, ReverseKL, TokenGeometry, Wasserstein
from wpr.regularizers import PRESETS, RegularizerOutput, Sum
from wpr.regularizers.wasserstein_settings import TRANSFORMS

V = 45
GEOMETRY = TokenGeometry.from_embeddings(clustered_embeddings(words=15), neighbours=6)


def inputs(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, rows, V, generator=generator, dtype=torch.float64)
    return policy, reference, torch.arange(rows)


def test_penalty_divergence_and_loss_add_up() -> None:
    kl, semantic, paper = ReverseKL(), Wasserstein(GEOMETRY, "unbalanced", k2=8), Wasserstein(GEOMETRY, "paper", k2=8)
    whole = kl + 4 * semantic + paper * 0.5
    given = inputs()
    out, parts = whole(*given), [part(*given) for part in (kl, semantic, paper)]
    for name in ("penalty", "divergence"):
        expected = sum(w * getattr(part, name) for w, part in zip((1, 4, 0.5), parts, strict=True))
        torch.testing.assert_close(getattr(out, name), expected, rtol=1e-12, atol=1e-12)
    losses = [part.loss(*given[:2]) for part in (kl, semantic, paper)]
    torch.testing.assert_close(whole.loss(*given[:2]), losses[0] + 4 * losses[1] + losses[2] / 2)


def test_diagnostics_are_each_parts_by_name() -> None:
    given = inputs()
    semantic = Wasserstein(GEOMETRY, "unbalanced", k2=8)
    out = (ReverseKL() + 4 * semantic + 2 * ReverseKL())(*given)
    own = semantic(*given)
    assert torch.equal(out.diagnostics["unbalanced.divergence"], own.divergence)
    for name, values in own.diagnostics.items():
        assert torch.equal(out.diagnostics[f"unbalanced.{name}"], values)
    assert {"reverse-kl.divergence", "reverse-kl-2.divergence"} < out.diagnostics.keys()


def test_slices_of_positions_give_the_same() -> None:
    policy, reference, tokens = inputs()
    whole = ReverseKL() + 4 * Wasserstein(GEOMETRY, "unbalanced", k2=8) + ForwardKL()
    rows = [slice(0, 3), slice(3, 4), slice(4, 7)]
    joined = whole.finish([whole.reduce(policy[part], reference[part], tokens[part]) for part in rows])
    expected = whole(policy, reference, tokens)
    assert torch.equal(joined.penalty, expected.penalty)
    assert torch.equal(joined.divergence, expected.divergence)
    assert joined.diagnostics.keys() == expected.diagnostics.keys()


def test_one_support_serves_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = Wasserstein.reduce
    monkeypatch.setattr(Wasserstein, "reduce", lambda self, *given: calls.append(self) or original(self, *given))
    (Wasserstein(GEOMETRY, "unbalanced", k2=8) + Wasserstein(GEOMETRY, "paper", k2=8))(*inputs())
    assert len(calls) == 1


def test_sums_of_sums_are_flat() -> None:
    whole = 2 * (ReverseKL() + 3 * ForwardKL()) + ReverseKL()
    assert [(weight, type(part)) for weight, part in whole.parts] == [(2, ReverseKL), (6, ForwardKL), (1, ReverseKL)]
    given = inputs()
    torch.testing.assert_close(whole(*given).penalty, 3 * ReverseKL()(*given).penalty + 6 * ForwardKL()(*given).penalty)


class Constant:
    """A regularizer of somebody else's, which knows nothing of sums."""

    def __call__(self, policy: Any, reference: Any, tokens: Any) -> RegularizerOutput:
        return RegularizerOutput(torch.ones(len(tokens)), torch.ones(len(tokens)))

    def loss(self, policy: Any, reference: Any, tokens: Any = None) -> torch.Tensor:
        return policy.sum(-1) * 0 + 1


def test_a_regularizer_that_is_not_ours() -> None:
    given = inputs()
    out = (ReverseKL() + Constant())(*given)
    torch.testing.assert_close(out.penalty, ReverseKL()(*given).penalty + 1)
    assert Sum([(2, Constant())])(*given).penalty[0] == 2


def test_another_geometry_for_all_parts() -> None:
    other = TokenGeometry.from_embeddings(2 * GEOMETRY.embeddings, neighbours=6)
    moved = (
        ReverseKL() + Wasserstein(GEOMETRY, "unbalanced", k2=8) + Wasserstein(GEOMETRY, "paper", k2=8)
    ).with_geometry(other)
    assert moved.geometry is other
    assert all(part.geometry is other for _, part in moved.parts if isinstance(part, Wasserstein))
    assert ReverseKL().__add__(ForwardKL()).geometry is None


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), True, "4"])
def test_weights_that_are_none(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"weight=.* of ReverseKL.* must be a finite positive number"):
        Sum([(weight, ReverseKL())])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="a sum of nothing"):
        Sum([])
    other = TokenGeometry.from_embeddings(GEOMETRY.embeddings, neighbours=5)
    with pytest.raises(ValueError, match="different geometries; build one TokenGeometry"):
        Wasserstein(GEOMETRY, "unbalanced", k2=8) + Wasserstein(other, "unbalanced", k2=8)
    with pytest.raises(ValueError, match="k2=8 and k2=9; they are measured on one support"):
        Wasserstein(GEOMETRY, "unbalanced", k2=8) + Wasserstein(GEOMETRY, "unbalanced", k2=9)
    with pytest.raises(TypeError, match="unsupported operand"):
        ReverseKL() + 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("preset", "lam", "rho", "share"), [("unbalanced", 5.0, 2.0, 2.0), ("semantic", 40.0, 2.0, 4.0)]
)
def test_the_optimum_is_that_of_the_summed_divergence(preset: Any, lam: float, rho: float, share: float) -> None:
    """Ascent with the penalties held constant, against a solver that knows the divergence's values alone."""
    rewards, reference = bandit()
    weight = clustered_embeddings(words=10, per_word=4, size=8, spread=0.4).double()
    geometry = TokenGeometry.from_embeddings(weight, neighbours=6, transform=TRANSFORMS[preset])
    beta = 0.3
    cost = geometry.cost(torch.arange(TOKENS).unsqueeze(0), scaled=PRESETS[preset].scaled)[0].numpy()
    cross = own = newton.unbalanced(reference, reference, cost, lam, rho)[:2]

    def divergence(p: np.ndarray) -> float:
        nonlocal cross, own
        *cross, value = newton.unbalanced(p, reference, cost, lam, rho, cross)
        *own, own_value = newton.unbalanced(p, p, cost, lam, rho, own)
        return float(p @ np.log(p / reference)) + share * (value - own_value / 2)

    transport = Wasserstein(geometry, preset, k2=TOKENS, lam=lam, rho=rho, tolerance=1e-6, iterations=300)
    penalties = penalties_by_call(ReverseKL() + share * transport, reference)
    reached = ascend(penalties, rewards, reference, beta, lambda _: 0.4, 120)
    optimum = solve(divergence, rewards, beta, reference)
    alone = solve(lambda p: float(p @ np.log(p / reference)), rewards, beta, reference)
    assert distance(optimum, reference) > 0.1
    assert distance(optimum, alone) > 0.02  # the transport does count
    assert distance(reached, optimum) < 1e-3
