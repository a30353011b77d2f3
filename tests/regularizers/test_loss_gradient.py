"""The gradient of every regularizer's loss, on the inputs that break naive formulas, against finite differences.

A loss is ``sum_i p_i penalty_i`` with the penalties held constant. So its gradient is that of the same sum with the
penalties computed once, in float64, and put in as numbers; central differences of that sum need no autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr import ForwardKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import Sum
from wpr.regularizers.registry import REGULARIZERS
from wpr.transport import kernels
from wpr.transport.support import log_masses

V = 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEOMETRY = TokenGeometry.from_embeddings(clustered_embeddings(words=V // 3), neighbours=8)
CENTRED = TokenGeometry.from_embeddings(clustered_embeddings(words=V // 3), neighbours=8, transform="centre/unit")
EXACT = {"tolerance": 0.0, "iterations": 150}
MAKE: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: make_regularizer(name) for name in REGULARIZERS if name != "wasserstein"},
    **{f"{name}, paper": lambda name=name: make_regularizer(name, estimator="paper")
       for name in REGULARIZERS if name != "wasserstein"},
    "unbalanced": lambda: Wasserstein(GEOMETRY, "unbalanced", k2=V, **EXACT),
    "unbalanced, k2=10": lambda: Wasserstein(GEOMETRY, "unbalanced", k2=10, **EXACT),
    "semantic": lambda: Wasserstein(CENTRED, "semantic", k2=10, **EXACT),
    "paper": lambda: Wasserstein(GEOMETRY, "paper", k2=10, scaled=True),
    "sum": lambda: ForwardKL() + 4 * Wasserstein(CENTRED, "semantic", k2=10, **EXACT),
}  # fmt: skip
SHARP = {"reverse-kl", "chi-squared"}  # infinite where the policy emits what the reference cannot
KINDS = (
    "plain",
    "sharp",
    "far apart",
    "farther",
    "identical",
    "few tokens left",
    "one token left",
    "one-hot",
    "masks differ",
)
DTYPES = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 1.5e-2}
"""And the tolerance, relative to the sum of the gradient's sizes, or to 0.01 if that is more. Gradients of bf16 logits
are rounded to 2^-8.
"""


def logits(kind: str, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Policy and reference ``(2, V)``, as numbers of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = 1.5 * torch.randn(2, 2, V, generator=generator)
    order = torch.randperm(V, generator=generator)
    if kind == "sharp":
        policy = 6 * policy
    elif kind in ("far apart", "farther"):  # probabilities that float32 has few digits of, or none
        policy[:, order[0]] += 92 if kind == "far apart" else 120
    elif kind == "identical":
        reference = policy
    elif kind == "few tokens left":  # fewer than k2: everything that lives is inside of the support
        policy[:, order[7:]] = reference[:, order[7:]] = -torch.inf
    elif kind == "one token left":
        policy[:, order[1:]] = reference[:, order[1:]] = -torch.inf
    elif kind == "one-hot":
        policy[:, order[0]] = 200.0
    elif kind == "masks differ":
        policy[:, order[15:]] = -torch.inf
        reference[:, order[:3]] = -torch.inf
    return policy.to(dtype), reference.to(dtype)


def weights_and_ids(regularizer: Any, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Penalties held constant ``(P, m)``, and the tokens ``(P, m - 1)`` that they belong to, the rest being the last
    column's.
    """
    if isinstance(regularizer, Wasserstein):
        support = regularizer.support(policy, reference, policy.argmax(-1))
        return regularizer.penalties(support)[0], support.ids[:, :-1]
    every = torch.arange(V, device=policy.device).expand(len(policy), V)
    penalties = torch.zeros(len(policy), V + 1, dtype=policy.dtype, device=policy.device)
    for row in range(len(policy)):
        possible = policy[row].isfinite().nonzero().squeeze(-1)
        rows = [x[row].expand(len(possible), V) for x in (policy, reference)]
        penalties[row, possible] = regularizer(*rows, possible).penalty
    return penalties, every


def finite_differences(regularizer: Any, policy: Tensor, reference: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient ``(P, V)`` in float64, zero where a logit is -inf, for no change of it changes anything."""
    if isinstance(regularizer, Sum):
        parts = [w * finite_differences(one, policy, reference, step) for w, one in regularizer.parts]
        return torch.stack(parts).sum(0)
    penalties, ids = (x.repeat_interleave(V, 0) for x in weights_and_ids(regularizer, policy, reference))

    def expected(change: float) -> Tensor:
        """With every logit changed by itself ``(P, V)``."""
        p = log_masses((policy.unsqueeze(1) + change * torch.eye(V).to(policy)).flatten(0, 1), ids).exp()
        return (p * penalties.masked_fill(p == 0, 0)).sum(-1).view(-1, V)

    gradient = (expected(step) - expected(-step)) / (2 * step)
    return gradient.masked_fill(policy == -torch.inf, 0)


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=12 if settings().derandomize else 300)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10_000), dtype=st.sampled_from(list(DTYPES)))
def test_gradient_is_the_one_of_finite_differences(name: str, kind: str, seed: int, dtype: torch.dtype) -> None:
    if kind == "masks differ" and name.removesuffix(", paper") in SHARP:
        return
    check(MAKE[name](), kind, seed, dtype)


BY_KERNELS: dict[str, Callable[[], Any]] = {
    **{name: MAKE[name] for name in REGULARIZERS if name != "wasserstein"},
    "sum": lambda: ForwardKL() + 4 * Wasserstein(CENTRED.to(DEVICE), "semantic", k2=10, tolerance=0.0, iterations=12),
}


@pytest.mark.needs("triton")
@pytest.mark.parametrize("name", BY_KERNELS)
def test_gradient_of_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "1")
    for seed, kind in enumerate(KINDS):
        if kind != "masks differ" or name not in SHARP:
            for dtype in (torch.float32, torch.bfloat16):
                check(BY_KERNELS[name](), kind, seed, dtype, DEVICE)


def check(regularizer: Any, kind: str, seed: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Loss and gradient by themselves, and the gradient against finite differences."""
    policy, reference = (x.to(device) for x in logits(kind, seed, dtype))
    expected = finite_differences(regularizer, policy.double(), reference.double())
    size = expected.abs().sum(-1, keepdim=True)
    policy.requires_grad_()
    loss = regularizer.loss(policy, reference)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient[policy.isinf()] == 0).all()
    assert ((gradient.double() - expected).abs() / size.clamp_min(0.01)).max().item() < DTYPES[dtype]


@pytest.mark.parametrize("name", sorted(SHARP))
def test_an_infinite_divergence_is_an_infinite_loss(name: str) -> None:
    """No gradient leads back from there in one step; what matters is that the loss says so."""
    policy, reference = logits("masks differ", 0, torch.float32)
    assert (make_regularizer(name).loss(policy, reference) == torch.inf).all()
