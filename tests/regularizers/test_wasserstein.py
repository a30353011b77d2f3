"""The Wasserstein penalty: golden outputs of the released code, finite differences, limits, gauges, semantics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ppo import tiny
from tests.problems import clustered_embeddings
from tests.reference import newton
from wpr import ReverseKL, SquaredHellinger, TokenGeometry, Wasserstein
from wpr.regularizers import PRESETS, Regularizer
from wpr.regularizers.wasserstein_settings import TRANSFORMS

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "wpr_golden.npz")
CASES = [(lam, t) for lam in (5, 20, 100) for t in (1, 5, 10, 30, 50)]


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def golden_penalty(dtype: torch.dtype, **settings: Any) -> Tensor:
    rows = golden("active_rows")
    policy, reference = (golden(name).reshape(10, -1)[rows].to(dtype) for name in ("logits_policy", "logits_ref"))
    geometry = TokenGeometry.from_embeddings(golden("embeddings").to(dtype), neighbours=8, scale=None)
    regularizer = Wasserstein(geometry, preset="paper", k2=5, **settings)
    return regularizer(policy, reference, golden("labels").flatten()[rows]).penalty


@pytest.mark.parametrize("method", ["log", "absorbed"])
@pytest.mark.parametrize(("lam", "t"), CASES)
def test_paper_preset_reproduces_the_released_code(lam: int, t: int, method: str) -> None:
    ours = golden_penalty(torch.float32, lam=lam, iterations=t, method=method)
    assert (ours - golden(f"phi_perpos_fp32floor_lam{lam}_T{t}")).abs().max().item() < 5e-6


@pytest.mark.parametrize("method", ["log", "absorbed"])
@pytest.mark.parametrize(("lam", "t"), CASES)
def test_exact_float64_reproduces_the_log_domain_reference(lam: int, t: int, method: str) -> None:
    ours = golden_penalty(torch.float64, lam=lam, iterations=t, floor=0.0, method=method)
    assert (ours - golden(f"phi_perpos_log64_nofloor_lam{lam}_T{t}")).abs().max().item() < 1e-9


@pytest.mark.parametrize("lam", [5, 20, 100])
def test_converged_balanced_form_matches_golden_newton(lam: int) -> None:
    """Full support, all pairs: potentials, debiased potentials and the divergence of the golden file's own Newton
    solver.
    """
    rows = golden("active_rows")
    policy, reference = (golden(name).reshape(10, -1)[rows].double() for name in ("logits_policy", "logits_ref"))
    geometry = TokenGeometry.from_embeddings(golden("embeddings").double(), neighbours=None, scale=None)
    p = policy.softmax(-1)
    for debias, name in ((False, "exact_phi_centred_full"), (True, "exact_debiased_phi_centred_full")):
        regularizer = Wasserstein(
            geometry, preset="paper", k2=40, lam=lam, iterations=100_000, tolerance=1e-10, floor=0.0, debias=debias
        )
        support = regularizer.support(policy, reference, torch.zeros(6, dtype=torch.long))
        penalty, divergence, _ = regularizer.penalties(support)
        penalty = penalty[:, :40]
        centred = penalty - (p * penalty).sum(-1, keepdim=True)
        torch.testing.assert_close(centred, golden(f"{name}_lam{lam}"), atol=1e-7, rtol=0)
        expected = golden(f"sinkhorn_divergence_lam{lam}" if debias else f"exact_OT_value_HP_lam{lam}")
        torch.testing.assert_close(divergence, expected, atol=1e-8, rtol=0)


def toy(
    vocabulary: int = 24, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[TokenGeometry, Tensor, Tensor]:
    """A geometry with neighbours, and one position's logits of two models ``(1, V)``."""
    weight = clustered_embeddings(words=vocabulary // 3, per_word=3, size=8, spread=0.4).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, 1, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    return TokenGeometry.from_embeddings(weight, neighbours=6), logits[0], logits[1]


def all_penalties(regularizer: Regularizer, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Penalty of every token ``(V,)`` and the divergence, through the public interface."""
    n = policy.shape[-1]
    out = regularizer(policy.expand(n, n), reference.expand(n, n), torch.arange(n))
    return out.penalty, out.divergence[0]


FORMS: dict[str, dict[str, Any]] = {
    "balanced": {"marginals": "balanced", "debias": False, "tolerance": 1e-14, "iterations": 100_000},
    "unbalanced": {"debias": False, "tolerance": 1e-13, "iterations": 5000},
    "debiased unbalanced": {"debias": True, "tolerance": 1e-13, "iterations": 5000},
}


@pytest.mark.parametrize("gauge", ["raw", "value"])
@pytest.mark.parametrize("form", FORMS)
def test_penalty_is_the_gradient_of_the_divergence(form: str, gauge: str) -> None:
    """Central differences of the oracle's divergence along directions that keep the mass, to 1e-6 relative."""
    geometry, policy, reference = toy()
    if form == "balanced":
        geometry = TokenGeometry.from_embeddings(geometry.embeddings, neighbours=None)  # all pairs: feasible
    lam, rho = 5.0, 2.0
    regularizer = Wasserstein(geometry, "unbalanced", k2=24, lam=lam, rho=rho, gauge=gauge, **FORMS[form])
    penalty, divergence = all_penalties(regularizer, policy, reference)
    p, q = policy.softmax(-1)[0].numpy(), reference.softmax(-1)[0].numpy()
    cost = geometry.cost(torch.arange(24).unsqueeze(0))[0].numpy()
    value = {
        "balanced": lambda a: newton.balanced(a, q, cost, lam)[2],
        "unbalanced": lambda a: newton.unbalanced(a, q, cost, lam, rho)[2],
        "debiased unbalanced": lambda a: newton.debiased_unbalanced(a, q, cost, lam, rho),
    }[form]
    assert divergence.item() == pytest.approx(value(p), abs=1e-10)
    rng = np.random.default_rng(0)
    for _ in range(4):
        direction = p * rng.standard_normal(24)
        direction -= p * direction.sum()
        step = 1e-4
        ahead, behind, ahead2, behind2 = (value(p + s * step * direction) for s in (1, -1, 2, -2))
        slope = (8 * (ahead - behind) - (ahead2 - behind2)) / (12 * step)
        assert float(penalty.numpy() @ direction) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_debiased_penalty_vanishes_at_the_reference(dtype: torch.dtype, limit: float) -> None:
    """With the preset's own settings, but for a float64 tolerance to match; real tokens, dummy and padding included."""
    geometry = TokenGeometry.from_embeddings(clustered_embeddings(words=60).to(dtype), neighbours=9)
    logits = 3 * torch.randn(40, 180, generator=torch.Generator().manual_seed(1), dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else PRESETS["unbalanced"].tolerance
    regularizer = Wasserstein(geometry, "unbalanced", k2=32, tolerance=tolerance, iterations=200)
    out = regularizer(logits, logits.clone(), logits.argmin(-1))
    assert out.penalty.abs().max().item() < limit
    assert out.divergence.abs().max().item() < limit


def test_squared_hellinger_is_the_limit_without_neighbours() -> None:
    """No transport possible and little entropy: rho times the squared Hellinger distance, in value and penalty."""
    weight = torch.randn(20, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=3, scale=1e-9)  # costs of 1e9
    generator = torch.Generator().manual_seed(3)
    policy, reference = torch.randn(2, 1, 20, generator=generator, dtype=torch.float64)
    rho = 2.0
    hellinger, value = all_penalties(SquaredHellinger(gauge="raw"), policy, reference)
    errors = []
    for lam in (50.0, 500.0, 5000.0):
        regularizer = Wasserstein(
            geometry, "unbalanced", k2=20, lam=lam, rho=rho, gauge="raw", tolerance=1e-13, iterations=20_000
        )
        penalty, divergence = all_penalties(regularizer, policy, reference)
        errors.append((penalty / rho - hellinger).abs().max().item())
        assert divergence.item() / rho == pytest.approx(value.item(), rel=3 / lam)
    assert errors[2] < 1e-3
    assert errors[1] == pytest.approx(10 * errors[2], rel=0.1)  # first order in 1/lam


def test_without_neighbours_the_entropic_form_is_known_in_closed_form() -> None:
    """S = (rho + 1/(2 lam)) sum (a^c - b^c)^2 with c = 1 / (1 + tau), for every lam."""
    geometry, policy, reference = toy()
    geometry = TokenGeometry.from_embeddings(geometry.embeddings, neighbours=3, scale=1e-9)
    for lam, rho in ((1.0, 0.5), (5.0, 8.0)):
        regularizer = Wasserstein(geometry, "unbalanced", k2=24, lam=lam, rho=rho, tolerance=1e-13, iterations=10_000)
        _, divergence = all_penalties(regularizer, policy, reference)
        power = 1 / (1 + rho / (rho + 1 / lam))
        p, q = policy.softmax(-1), reference.softmax(-1)
        expected = (rho + 0.5 / lam) * (p**power - q**power).square().sum()
        assert divergence.item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("preset", ["paper", "unbalanced"])
def test_value_gauge_makes_the_mean_penalty_the_divergence(preset: str) -> None:
    geometry, policy, reference = toy()
    raw, value = (Wasserstein(geometry, preset, k2=24, gauge=gauge) for gauge in ("raw", "value"))
    penalty, divergence = all_penalties(value, policy, reference)
    assert (policy.softmax(-1)[0] * penalty).sum().item() == pytest.approx(divergence.item(), abs=1e-12)
    shift = penalty - all_penalties(raw, policy, reference)[0]
    assert shift.std().item() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_loss_has_the_gradient_of_the_divergence(form: str) -> None:
    """Through the logits, with truncation: the envelope gradient equals central differences of the divergence
    itself.
    """
    geometry, policy, reference = toy()
    if form == "balanced":
        geometry = TokenGeometry.from_embeddings(geometry.embeddings, neighbours=None)
    regularizer = Wasserstein(geometry, "unbalanced", k2=24, gauge="value", **FORMS[form])
    tokens = torch.tensor([4])
    policy.requires_grad_()
    loss = regularizer.loss(policy, reference, tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert loss.item() == pytest.approx(regularizer(policy, reference, tokens).divergence.item(), abs=1e-10)
    for i in (0, 7, 23):
        step = torch.zeros_like(policy)
        step[0, i] = 1e-4
        with torch.no_grad():
            ahead, behind = (regularizer(policy + s * step, reference, tokens).divergence.item() for s in (1, -1))
        assert gradient[0, i].item() == pytest.approx((ahead - behind) / 2e-4, rel=1e-5, abs=1e-9)


def test_loss_counts_the_leftover_mass() -> None:
    """With a small support, the expectation over support and leftover: gradient checked against the definition."""
    geometry, policy, reference = toy()
    regularizer = Wasserstein(geometry, "unbalanced", k2=4)
    policy.requires_grad_()
    (ours,) = torch.autograd.grad(regularizer.loss(policy, reference, torch.tensor([4])).sum(), policy)
    support = regularizer.support(policy.detach(), reference, torch.tensor([4]))
    penalties = regularizer.penalties(support)[0][0]
    per_token = penalties[-1].expand(24).clone()
    inside = support.ids[0] >= 0
    per_token[support.ids[0][inside]] = penalties[inside]
    (expected,) = torch.autograd.grad((policy.softmax(-1)[0] * per_token).sum(), policy)
    torch.testing.assert_close(ours, expected)
    assert regularizer.loss(policy, reference).isfinite().all()


def test_semantics() -> None:
    """Moving mass to a near synonym costs less than moving it to an unrelated token; reverse KL cannot tell them
    apart.
    """
    weight = clustered_embeddings(words=20, per_word=3, spread=0.15)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=6)
    reference = torch.full((60,), 0.1 / 57)
    origin, near, far = 0, 1, 30
    reference[[origin, near, far]] = torch.tensor([0.8, 0.05, 0.05])
    gaps = {}
    centred = TokenGeometry.from_embeddings(weight, neighbours=6, transform="centre/unit")
    for name, regularizer in (
        ("kl", ReverseKL()),
        ("unbalanced", Wasserstein(geometry, "unbalanced", k2=30)),
        ("semantic", Wasserstein(centred, k2=30)),
    ):
        for target in (near, far):
            policy = reference.clone()
            policy[origin], policy[target] = 0.4, 0.45
            logits = policy.log().expand(2, 60), reference.log().expand(2, 60)
            at_target, at_origin = regularizer(*logits, torch.tensor([target, origin])).penalty.tolist()
            gaps[name, target] = at_target - at_origin
    assert gaps["kl", near] == pytest.approx(gaps["kl", far], abs=1e-5)
    assert gaps["unbalanced", near] < 0.25 * gaps["unbalanced", far]
    assert gaps["semantic", near] < 0.25 * gaps["semantic", far]


def test_paper_preset_is_blind_where_tokens_are_far_apart() -> None:
    """Distances as real embeddings have them (about 2) and lam=100: the penalty is T log(a/b) + log b, over lam;
    nothing else.
    """
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(60, 16, generator=generator, dtype=torch.float64)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=20)
    assert geometry.nearest.min() > 0.8
    policy, reference = torch.randn(2, 5, 60, generator=generator, dtype=torch.float64)
    tokens = policy.argmax(-1)
    regularizer = Wasserstein(geometry, "paper", k2=20, floor=0.0)
    ours = regularizer(policy, reference, tokens).penalty
    a, b = (x.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (policy, reference))
    torch.testing.assert_close(ours, (10 * (a - b) + b) / 100, atol=1e-14, rtol=1e-12)


def test_positions_do_not_see_each_other() -> None:
    geometry, *_ = toy()
    policy, reference = 2 * torch.randn(2, 50, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tokens = torch.arange(50) % 24
    for preset in PRESETS:
        regularizer = Wasserstein(geometry, preset, k2=6)
        together = regularizer(policy, reference, tokens)
        for i in (0, 13, 49):
            alone = regularizer(policy[i : i + 1], reference[i : i + 1], tokens[i : i + 1])
            torch.testing.assert_close(alone.penalty[0], together.penalty[i], atol=1e-12, rtol=0)


def test_diagnostics() -> None:
    geometry, policy, reference = toy()
    out = Wasserstein(geometry, "unbalanced", k2=6)(policy, reference, torch.tensor([4]))
    assert set(out.diagnostics) >= {"iterations", "marginal_error", "converged", "support_size", "isolated_fraction"}
    assert all(value.shape == (1,) for value in out.diagnostics.values())
    assert out.diagnostics["converged"].all()
    assert out.diagnostics["marginal_error"].item() < 1e-3
    p = policy.softmax(-1)[0]
    support = Wasserstein(geometry, "unbalanced", k2=6).support(policy, reference, torch.tensor([4]))
    inside = support.ids[0][support.ids[0] >= 0]
    assert out.diagnostics["leftover_policy"].item() == pytest.approx(1 - p[inside].sum().item(), abs=1e-12)


def test_no_positions() -> None:
    geometry, *_ = toy()
    empty = torch.zeros(0, 24, dtype=torch.float64)
    for regularizer in (Wasserstein(geometry, "unbalanced", k2=6), ReverseKL()):
        out = regularizer(empty, empty, torch.zeros(0, dtype=torch.long))
        assert out.penalty.shape == out.divergence.shape == (0,)


def test_penalties_carry_no_gradient() -> None:
    geometry, policy, reference = toy()
    policy.requires_grad_()
    for regularizer in (Wasserstein(geometry, "unbalanced", k2=6), ReverseKL()):
        assert not regularizer(policy, reference, torch.tensor([4])).penalty.requires_grad


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": -1}, "lam=-1 must be a finite positive number"),
        ({"rho": math.inf}, "rho=inf must be .* marginals='balanced'"),
        ({"k2": 25}, r"k2=25 exceeds the vocabulary \(24 tokens\); set k2 to 24 or less"),
        ({"iterations": 0}, "iterations=0 must be an integer of at least 1"),
        ({"gauge": "mean"}, "gauge='mean' must be 'raw' or 'value'"),
        ({"marginals": "free"}, "marginals='free'"),
        ({"floor": 1e-16}, "floor=1e-16 has no meaning"),
        ({"tolerance": -1}, "tolerance=-1"),
        ({"k2": 8.5}, "k2=8.5 must be an integer"),
        ({"debias": "false"}, "debias='false' must be True or False"),
        ({"rho": 1e9}, r"lam \* rho = 5e\+09 exceeds 1e\+06"),
        ({"method": "scaling"}, "method='scaling' is unknown"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    geometry, *_ = toy()
    with pytest.raises(ValueError, match=message):
        Wasserstein(geometry, "unbalanced", **settings)


def test_unknown_settings_are_refused_with_the_nearest_name() -> None:
    geometry, *_ = toy()
    with pytest.raises(TypeError, match="unknown setting 'iteration'; did you mean 'iterations'?"):
        Wasserstein(geometry, "unbalanced", k2=6, iteration=3)
    with pytest.raises(ValueError, match="preset='best' is unknown"):
        Wasserstein(geometry, "best")  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_models_own_geometry_is_the_presets(preset: Any, recwarn: pytest.WarningsRecorder) -> None:
    model = tiny.policy()
    made = Wasserstein.from_model(model, preset, k2=4, neighbours=8)
    assert not recwarn.list
    expected = TokenGeometry.from_model(model, neighbours=8, transform=TRANSFORMS[preset])
    assert torch.equal(made.geometry.embeddings, expected.embeddings)
    assert made.settings == replace(PRESETS[preset], k2=4)


def test_a_model_and_settings_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="preset='best' is unknown; use one of 'paper', 'unbalanced', 'semantic'"):
        Wasserstein.from_model(tiny.policy(), "best")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown setting 'transform'"):
        Wasserstein.from_model(tiny.policy(), transform="unit")


def test_semantic_on_other_than_unit_vectors_is_pointed_out(recwarn: pytest.WarningsRecorder) -> None:
    weight = torch.randn(30, 4)
    for options in ({"transform": "centre/unit"}, {"transform": "unit/centre"}, {"metric": "cosine"}):
        Wasserstein(TokenGeometry.from_embeddings(weight, neighbours=5, **options), k2=6)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="for unit vectors, .* this geometry has transform='none'; make both with"):
        Wasserstein(TokenGeometry.from_embeddings(weight, neighbours=5), k2=6)


def test_unscaled_geometry_is_pointed_out() -> None:
    geometry = TokenGeometry.from_embeddings(torch.randn(30, 4), neighbours=5, scale=None)
    with pytest.warns(UserWarning, match="median-nn"):
        Wasserstein(geometry, "unbalanced", k2=6)
    assert "lam=100.0" in repr(Wasserstein(geometry, "paper", k2=6))


def test_loss_is_accurate_for_sharp_policies_in_float32() -> None:
    """The leftover's penalty is huge where the policy left almost nothing over; its product with that little is not."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(400, 16, generator=generator)
    regularizer = Wasserstein(
        TokenGeometry.from_embeddings(weight, neighbours=40), k2=32, tolerance=1e-5, iterations=300
    )
    policy, reference = 12 * torch.randn(4, 400, generator=generator), 2 * torch.randn(4, 400, generator=generator)
    policy[0, 200:] = -60.0
    policy[1, 200:] = -1e4
    results = []
    for dtype in (torch.float32, torch.float64):
        logits = policy.to(dtype).requires_grad_()
        loss = regularizer.loss(logits, reference.to(dtype))
        results.append((loss.detach().double(), torch.autograd.grad(loss.sum(), logits)[0].double()))
        divergence = regularizer(logits, reference.to(dtype), policy.argmax(-1)).divergence
        torch.testing.assert_close(loss.detach(), divergence, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(results[0][1], results[1][1], atol=2e-3, rtol=1e-3)


def test_autocast_changes_nothing() -> None:
    """Trainers score under autocast; products of embeddings and kernels must stay in full precision."""
    geometry, policy, reference = toy(dtype=torch.float32)
    regularizer = Wasserstein(geometry, "unbalanced", k2=8)
    plain = regularizer(policy, reference, torch.tensor([4])).penalty
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = regularizer(policy, reference, torch.tensor([4])).penalty
        radius = TokenGeometry.from_embeddings(geometry.embeddings, neighbours=6).radius
    assert torch.equal(plain, inside)
    assert torch.equal(radius, geometry.radius)
    assert torch.get_float32_matmul_precision() == "highest"


def test_tiny_masses_are_not_zero_in_float64() -> None:
    """Equation (4) at a sampled token with reference probability exp(-400)."""
    geometry = TokenGeometry.from_embeddings(torch.randn(20, 8, dtype=torch.float64), neighbours=3, scale=1e-9)
    policy, reference = torch.zeros(1, 20, dtype=torch.float64), torch.zeros(1, 20, dtype=torch.float64)
    reference[0, 5] = -400
    ours = Wasserstein(geometry, "paper", k2=20, floor=0.0, scaled=True)(policy, reference, torch.tensor([5])).penalty
    a, b = (x.log_softmax(-1)[0, 5].item() for x in (policy, reference))
    assert ours.item() == pytest.approx((10 * (a - b) + b) / 100, rel=1e-12)
