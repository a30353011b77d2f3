"""Every regularizer on inputs as they go wrong in practice: the right answer, or an error that names value, limit and
remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import Regularizer
from wpr.regularizers.registry import REGULARIZERS

V = 45
GEOMETRY = TokenGeometry.from_embeddings(clustered_embeddings(words=15), neighbours=6)
ALL: dict[str, Callable[[], Regularizer]] = {
    **{name: (lambda name=name: make_regularizer(name)) for name in REGULARIZERS if name != "wasserstein"},
    "paper": lambda: Wasserstein(GEOMETRY, "paper", k2=8),
    "semantic": lambda: Wasserstein(GEOMETRY, "unbalanced", k2=8),
    "sum": lambda: ReverseKL() + 4 * Wasserstein(GEOMETRY, "unbalanced", k2=8),
}
each = pytest.mark.parametrize("name", ALL)


def inputs(rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, V, generator=generator), torch.randn(rows, V, generator=generator), torch.arange(rows)


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_non_finite_logits_are_named_by_position(name: str, bad: float, which: int) -> None:
    arguments = inputs()
    arguments[which][[1, 3], 7] = bad
    side = ("policy", "reference")[which]
    with pytest.raises(ValueError, match=rf"{side} logits are not a distribution at 2 position\(s\): 1, 3 "):
        ALL[name]()(*arguments)


@each
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, q, t: (p, q[:4], t), r"\(5, 45\) and reference logits \(4, 45\)"),
        (lambda p, q, t: (p[None], q[None], t), "flatten batch and time"),
        (lambda p, q, t: (p, q, t[:3]), r"tokens of shape \(3,\).*5 positions"),
        (lambda p, q, t: (p, q, t.float()), "integer token id"),
        (lambda p, q, t: (p, q, t + V - 2), r"token id 45 at position 2 is outside the vocabulary \(0..44\)"),
        (lambda p, q, t: (p, q, t - 100), r"token id -100 at position 0"),
        (lambda p, q, t: (p.long(), q.long(), t), "floating point"),
        (lambda p, q, t: (p, q.to("meta"), t), "one device"),
    ],
)
def test_inputs_that_do_not_fit(name: str, change: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ALL[name]()(*change(*inputs()))


@each
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [Tensor.tolist, Tensor.numpy])
def test_lists_and_arrays_are_refused_by_name(name: str, which: int, change: Callable[[Tensor], object]) -> None:
    arguments: list[object] = list(inputs())
    arguments[which] = change(inputs()[which])
    argument = ("policy_logits", "reference_logits", "tokens")[which]
    kind = type(arguments[which]).__name__
    regularizer = ALL[name]()
    for called in (regularizer, regularizer.loss, *([regularizer.reduce] if hasattr(regularizer, "reduce") else [])):
        with pytest.raises(TypeError, match=rf"^{argument} is a {kind}; pass a tensor, as torch\.as_tensor"):
            called(*arguments)  # type: ignore[arg-type]


@each
def test_sampled_token_of_probability_zero(name: str) -> None:
    policy, reference, tokens = inputs()
    policy[2, tokens[2]] = -math.inf
    with pytest.raises(ValueError, match=r"token 2 at position 2 has probability 0 under the policy"):
        ALL[name]()(policy, reference, tokens)


def test_geometry_of_another_vocabulary() -> None:
    policy, reference, tokens = inputs()
    with pytest.raises(ValueError, match="logits over 44 tokens but a geometry of 45"):
        ALL["semantic"]()(policy[:, :44], reference[:, :44], tokens)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype(name: str, dtype: torch.dtype) -> None:
    policy, reference, tokens = inputs()
    policy, reference = policy.to(dtype), reference.to(dtype)
    out, exact = ALL[name]()(policy, reference, tokens), ALL[name]()(policy.double(), reference.double(), tokens)
    torch.testing.assert_close(out.penalty.double(), exact.penalty.double(), rtol=2e-3, atol=2e-3)


@each
def test_masked_vocabulary_of_both(name: str) -> None:
    """-inf logits over most of the vocabulary, fewer live tokens than k2."""
    policy, reference, tokens = inputs()
    policy[:, 6:] = reference[:, 6:] = -math.inf
    out = ALL[name]()(policy, reference, tokens)
    assert out.penalty.isfinite().all()
    assert out.divergence.isfinite().all()
    assert ALL[name]().loss(policy, reference, tokens).isfinite().all()


@pytest.mark.parametrize("name", ["semantic", "squared-hellinger", "jensen-shannon", "forward-kl", "alpha"])
def test_token_that_only_the_policy_can_emit_has_a_bounded_penalty(name: str) -> None:
    policy, reference, tokens = inputs()
    reference[:, :5] = -math.inf
    out = ALL[name]()(policy, reference, tokens)
    assert out.penalty.isfinite().all()
    assert (out.penalty > 0).all()


@each
def test_identical_distributions(name: str) -> None:
    policy, _, tokens = inputs()
    out = ALL[name]()(policy, policy.clone(), tokens)
    if name != "paper":  # the paper's penalty is not debiased
        assert out.penalty.abs().max() < 1e-5
        assert out.divergence.abs().max() < 1e-5
    assert out.penalty.isfinite().all()


@each
@pytest.mark.parametrize("height", [20.0, 200.0, 3e4])
def test_one_token_of_probability_one(name: str, height: float) -> None:
    """Sure of the same token, and sure of different ones."""
    policy, reference, tokens = inputs()
    policy[torch.arange(5), tokens] = height
    reference[:3] = policy[:3]
    reference[3:, 30] = height
    out = ALL[name]()(policy, reference, tokens)
    assert not out.penalty.isnan().any()
    if name != "chi-squared":  # whose true value overflows
        assert out.penalty.isfinite().all()
    if name != "paper":
        assert out.penalty[:3].abs().max() < 1e-4


def test_duplicated_embeddings_are_one_token_to_the_semantic_form() -> None:
    """Moving mass between tokens at distance 0 is free."""
    weight = clustered_embeddings(words=15)
    weight[1] = weight[0]
    regularizer = Wasserstein(
        TokenGeometry.from_embeddings(weight, neighbours=6), k2=20, tolerance=1e-6, iterations=300
    )
    reference = torch.zeros(1, V)
    reference[0, :2] = 4.0
    policy = reference.clone()
    policy[0, 0], policy[0, 1] = (
        math.log(2 * math.exp(4) - 1),
        0.0,
    )  # all but a little of the pair's mass on one of them
    moved = regularizer(policy, reference, torch.tensor([0]))
    assert moved.divergence.item() == pytest.approx(0, abs=1e-4)
    assert ReverseKL()(policy, reference, torch.tensor([0])).divergence.item() > 0.1


def test_vocabulary_of_which_three_quarters_were_never_trained() -> None:
    live = clustered_embeddings(words=15)
    dead = 1e-3 * torch.randn(135, 16, generator=torch.Generator().manual_seed(1))
    geometry = TokenGeometry.from_embeddings(torch.cat([live, dead]), neighbours=6)
    assert geometry.alive.sum() == V
    generator = torch.Generator().manual_seed(2)
    policy, reference = torch.randn(2, 6, 180, generator=generator)
    out = Wasserstein(geometry, "unbalanced", k2=60)(policy, reference, torch.arange(6) * 30)
    assert out.penalty.isfinite().all()
    assert out.diagnostics["converged"].all()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), name=st.sampled_from(sorted(ALL)))
def test_finite_answers_or_a_clear_error(data: st.DataObject, name: str) -> None:
    """Logits from a list of troublesome values in all combinations: never NaN, never a wrong shape, never another
    exception.
    """
    rows = data.draw(st.integers(1, 3))
    value = st.sampled_from([0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, -math.inf, 5e-324, 3.3e38])
    policy, reference = (
        torch.tensor(data.draw(st.lists(st.lists(value, min_size=V, max_size=V), min_size=rows, max_size=rows)))
        for _ in range(2)
    )
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, V - 1), min_size=rows, max_size=rows)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    policy, reference = policy.to(dtype), reference.to(dtype)
    try:
        out = ALL[name]()(policy, reference, tokens)
    except ValueError as error:
        assert any(words in str(error) for words in ("not a distribution", "probability 0"))  # noqa: PT017
        return
    assert out.penalty.shape == out.divergence.shape == (rows,)
    assert not out.penalty.isnan().any()
    assert not out.divergence.isnan().any()
    possible = policy.double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > -80
    if name in ("semantic", "squared-hellinger", "total-variation", "jensen-shannon"):
        assert out.penalty[possible].isfinite().all()
        assert (out.divergence > -1e-4).all()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 60),
    st.integers(1, 9),
    st.sampled_from(["normal", "duplicates", "mostly dead", "one outlier"]),
    st.integers(0, 10_000),
)
def test_geometries_of_all_kinds_give_finite_penalties(vocabulary: int, size: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, size, generator=generator)
    if kind == "duplicates":
        weight[: vocabulary // 2] = weight[0].clone()
    elif kind == "mostly dead":
        weight[vocabulary // 4 :] = 1e-4 * weight[vocabulary // 4 :]
    elif kind == "one outlier":
        weight[0] *= 1e6
    try:
        geometry = TokenGeometry.from_embeddings(weight, neighbours=max(1, vocabulary // 5))
    except ValueError as error:
        assert "degenerate" in str(error)  # noqa: PT017
        return
    policy, reference = 3 * torch.randn(2, 4, vocabulary, generator=generator)
    regularizer = Wasserstein(geometry, "unbalanced", k2=max(1, vocabulary // 3))
    tokens = policy.argmax(-1)
    out = regularizer(policy, reference, tokens)
    assert out.penalty.isfinite().all()
    # A debiased divergence is non-negative where its kernel is positive semi-definite. The radius rule can cut edges
    # between near-duplicates, and then it is not (docs/numerics.md, "When the divergence can be negative").
    support = regularizer.support(policy, reference, tokens)
    kernel = (-regularizer.settings.lam * geometry.cost(support.ids).double()).exp()
    definite = torch.linalg.eigvalsh(kernel)[:, 0] > -1e-6
    assert (out.divergence[definite] > -1e-3).all()


def test_a_kernel_cut_among_near_duplicates_can_make_the_divergence_negative() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(43, 3, generator=generator)
    weight[10:] *= 1e-4
    policy, reference = 3 * torch.randn(2, 4, 43, generator=generator)
    divergence = {
        neighbours: Wasserstein(TokenGeometry.from_embeddings(weight, neighbours=neighbours), "unbalanced", k2=14)(
            policy, reference, policy.argmax(-1)
        ).divergence[0]
        for neighbours in (8, 42)
    }
    assert divergence[8] < -0.05
    assert divergence[42] > 0.01
