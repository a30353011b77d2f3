"""f-divergences against their definition, summed slowly; penalties against derivatives; both estimators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from wpr import Alpha, ChiSquared, ForwardKL, JensenShannon, ReverseKL, SquaredHellinger, TotalVariation
from wpr.regularizers import FDivergence, Regularizer

KINDS = [ReverseKL, ForwardKL, JensenShannon, Alpha, TotalVariation, ChiSquared, SquaredHellinger]
GENERATORS = {
    "reverse-kl": lambda u: u * np.log(u),
    "forward-kl": lambda u: -np.log(u),
    "jensen-shannon": lambda u: u * np.log(u) - (u + 1) * np.log((u + 1) / 2),
    "alpha": lambda u: (u**0.5 - 0.5 * u - 0.5) / (0.5 * -0.5),
    "total-variation": lambda u: abs(u - 1) / 2,
    "chi-squared": lambda u: (u - 1) ** 2,
    "squared-hellinger": lambda u: (np.sqrt(u) - 1) ** 2,
}
"""f(u) as the paper's table has it."""


def logits(rows: int = 6, vocabulary: int = 31, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [1.5 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def exact_divergence(kind: type[FDivergence], p: Tensor, q: Tensor) -> Tensor:
    u = (p / q).numpy()
    return (q * torch.as_tensor(GENERATORS[kind.name](u))).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_the_definition(kind: type[FDivergence]) -> None:
    policy, reference = logits()
    p, q = policy.softmax(-1), reference.softmax(-1)
    out = kind()(policy, reference, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(out.divergence, exact_divergence(kind, p, q), atol=1e-12, rtol=1e-12)
    assert isinstance(kind(), Regularizer)


@pytest.mark.parametrize("kind", KINDS)
def test_paper_estimator_is_f_over_u(kind: type[FDivergence]) -> None:
    policy, reference = logits()
    tokens = torch.arange(6)
    p, q = policy.softmax(-1)[tokens, tokens], reference.softmax(-1)[tokens, tokens]
    u = (p / q).numpy()
    penalty = kind(estimator="paper")(policy, reference, tokens).penalty
    np.testing.assert_allclose(penalty.numpy(), GENERATORS[kind.name](u) / u, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gauge", ["raw", "value"])
def test_penalty_is_the_derivative_of_the_divergence(kind: type[FDivergence], gauge: str) -> None:
    """Moving mass from token j to token i changes D by penalty_i - penalty_j, to first order, by central
    differences.
    """
    policy, reference = logits(rows=1)
    p, q = policy.softmax(-1)[0], reference.softmax(-1)[0]
    n = len(p)
    tokens = torch.arange(n)
    penalty = kind(gauge=gauge)(policy.expand(n, n), reference.expand(n, n), tokens).penalty
    for i, j in ((0, 1), (5, 9), (17, 30)):
        move = torch.zeros_like(p)
        move[i], move[j] = 1, -1
        step = 1e-3 * min(p[i].item(), p[j].item())
        values = [exact_divergence(kind, p + s * step * move, q).item() for s in (1, -1, 2, -2)]
        slope = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)
        assert (penalty[i] - penalty[j]).item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_value_gauge_makes_the_mean_penalty_the_divergence(kind: type[FDivergence]) -> None:
    policy, reference = logits(rows=1)
    n = policy.shape[-1]
    out = kind()(policy.expand(n, n), reference.expand(n, n), torch.arange(n))
    mean = (policy.softmax(-1)[0] * out.penalty).sum()
    torch.testing.assert_close(mean, out.divergence[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["gradient", "paper"])
def test_no_penalty_where_policy_equals_reference(kind: type[FDivergence], estimator: str) -> None:
    policy, _ = logits(dtype=torch.float32)
    out = kind(estimator=estimator)(policy, policy.clone(), torch.arange(6))
    assert out.penalty.abs().max() < 1e-6
    assert out.divergence.abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_loss_has_the_gradient_of_the_divergence(kind: type[FDivergence]) -> None:
    policy, reference = logits(rows=3)
    policy.requires_grad_()
    loss = kind().loss(policy, reference)
    (ours,) = torch.autograd.grad(loss.sum(), policy)
    torch.testing.assert_close(loss, kind()(policy, reference, torch.zeros(3, dtype=torch.long)).divergence)
    p, q = policy.softmax(-1), reference.softmax(-1)
    u = p / q
    f = {
        "reverse-kl": u * u.log(),
        "forward-kl": -u.log(),
        "jensen-shannon": u * u.log() - (u + 1) * ((u + 1) / 2).log(),
        "alpha": (u.sqrt() - 0.5 * u - 0.5) / -0.25,
        "total-variation": (u - 1).abs() / 2,
        "chi-squared": (u - 1) ** 2,
        "squared-hellinger": (u.sqrt() - 1) ** 2,
    }[kind.name]
    (exact,) = torch.autograd.grad((q * f).sum(), policy)
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-10)


def test_cosine_of_the_papers_gradient() -> None:
    """DESIGN's table: the paper's estimator follows another direction, but for reverse KL; signs are what matters
    here.
    """
    policy, reference = logits(rows=1, vocabulary=60, seed=3)
    policy.requires_grad_()
    cosine = {}
    for kind in KINDS[:-1]:
        both = [
            torch.autograd.grad(kind(estimator=estimator).loss(policy, reference).sum(), policy)[0]
            for estimator in ("gradient", "paper")
        ]
        cosine[kind.name] = torch.nn.functional.cosine_similarity(both[0].flatten(), both[1].flatten(), dim=0).item()
    assert cosine["reverse-kl"] == pytest.approx(1, abs=1e-9)
    assert cosine["forward-kl"] < -0.9
    assert cosine["total-variation"] < -0.5
    assert cosine["jensen-shannon"] < 0
    assert cosine["alpha"] < 0
    assert cosine["chi-squared"] < 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: type[FDivergence], dtype: torch.dtype) -> None:
    policy, reference = (x.to(dtype) for x in logits())
    tokens = torch.arange(6)
    ours, exact = (kind()(a, b, tokens) for a, b in ((policy, reference), (policy.double(), reference.double())))
    assert ours.penalty.dtype == torch.float32
    torch.testing.assert_close(ours.penalty.double(), exact.penalty, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.divergence.double(), exact.divergence, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_vocabulary(kind: type[FDivergence]) -> None:
    """Tokens that neither model can emit change nothing."""
    policy, reference = logits()
    masked = [torch.cat([x, torch.full((6, 4), -math.inf, dtype=x.dtype)], dim=-1) for x in (policy, reference)]
    tokens = torch.arange(6)
    plain, out = kind()(policy, reference, tokens), kind()(*masked, tokens)
    torch.testing.assert_close(out.penalty, plain.penalty)
    torch.testing.assert_close(out.divergence, plain.divergence)
    masked[0].requires_grad_()
    (gradient,) = torch.autograd.grad(kind().loss(*masked).sum(), masked[0])
    assert gradient.isfinite().all()


def test_support_mismatch() -> None:
    """A token that only the policy can emit: infinite for reverse KL and chi-squared, bounded for the others; never
    NaN.
    """
    policy, reference = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, -math.inf]])
    for kind, finite in zip(KINDS, (False, True, True, True, True, False, True), strict=True):
        out = kind()(policy, reference, torch.tensor([3]))
        assert not out.penalty.isnan().any()
        assert bool(out.penalty.isfinite().all()) == finite
    out = ForwardKL()(reference, policy, torch.tensor([0]))
    assert out.divergence.item() == math.inf


def test_one_hot() -> None:
    policy = torch.tensor([[50.0, 0.0, 0.0], [0.0, -math.inf, -math.inf]])
    reference = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    for kind in KINDS:
        out = kind()(policy, reference, torch.tensor([0, 0]))
        assert out.penalty.isfinite().all()


def test_alpha_limits() -> None:
    policy, reference = logits()
    tokens = torch.arange(6)
    near_reverse, near_forward = Alpha(1e-5)(policy, reference, tokens), Alpha(1 - 1e-5)(policy, reference, tokens)
    torch.testing.assert_close(
        near_reverse.penalty, ReverseKL()(policy, reference, tokens).penalty, atol=1e-3, rtol=1e-3
    )
    torch.testing.assert_close(
        near_forward.penalty, ForwardKL()(policy, reference, tokens).penalty, atol=1e-3, rtol=1e-3
    )
    half, hellinger = Alpha(0.5)(policy, reference, tokens), SquaredHellinger()(policy, reference, tokens)
    torch.testing.assert_close(half.penalty, 2 * hellinger.penalty)
    for bad in (0, 1, -0.3, math.nan):
        with pytest.raises(ValueError, match="alpha="):
            Alpha(bad)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="estimator='exact'"):
        ReverseKL(estimator="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gauge='mean'"):
        ReverseKL(gauge="mean")  # type: ignore[arg-type]
    assert repr(Alpha(0.3)) == "Alpha(0.3, estimator='gradient', gauge='value')"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["gradient", "paper"])
@pytest.mark.parametrize("low", [-90.0, -150.0, -1e4, torch.finfo(torch.float32).min, -math.inf])
def test_loss_where_the_policy_has_next_to_no_mass(kind: type[FDivergence], estimator: str, low: float) -> None:
    """A vocabulary mask on the policy alone, as a large negative number or -inf: finite loss and gradient."""
    policy, reference = torch.tensor([[0.3, 0.0, -0.2, low]]).requires_grad_(), torch.zeros(1, 4)
    loss = kind(estimator=estimator).loss(policy, reference)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert gradient.isfinite().all()
    assert loss.isfinite().all()
    if estimator == "gradient" and low > -100:
        divergence = kind()(policy, reference, torch.tensor([0])).divergence
        torch.testing.assert_close(loss, divergence, rtol=1e-4, atol=1e-4)


def test_paper_estimator_at_the_ends() -> None:
    """Limits of f(u)/u for u -> inf: 0 (forward KL), log 2 (JS), 1/alpha (alpha), 1/2 (TV), 1 (Hellinger); never
    NaN.
    """
    policy, reference = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, -math.inf]])
    limits = {
        "forward-kl": 0,
        "jensen-shannon": math.log(2),
        "alpha": 2,
        "total-variation": 0.5,
        "squared-hellinger": 1,
    }
    for kind in KINDS:
        high = kind(estimator="paper")(policy, reference, torch.tensor([3])).penalty.item()
        assert high == pytest.approx(limits.get(kind.name, math.inf), abs=1e-6)
        low = kind(estimator="paper")(torch.tensor([[0.0, 0.0, 0.0, -200.0]]), policy, torch.tensor([3])).penalty.item()
        assert not math.isnan(low)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_any_integer_type_of_tokens(dtype: torch.dtype) -> None:
    policy, reference = logits(vocabulary=300)
    tokens = torch.tensor([0, 5, 100, 120, 7, 8])
    for kind in KINDS:
        expected = kind()(policy, reference, tokens).penalty
        assert torch.equal(kind()(policy, reference, tokens.to(dtype)).penalty, expected)
