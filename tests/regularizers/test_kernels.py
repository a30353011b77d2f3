"""Regularizers through the Triton kernels against the torch path in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers.registry import REGULARIZERS
from wpr.regularizers.wasserstein_settings import TRANSFORMS
from wpr.transport import kernels

pytestmark = pytest.mark.needs("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "1")


def logits(positions: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(positions, vocabulary, generator=generator)
    policy = reference + torch.randn(positions, vocabulary, generator=generator)
    tokens = torch.distributions.Categorical(logits=policy).sample()
    return policy.to(dtype).to(DEVICE), reference.to(dtype).to(DEVICE), tokens.to(DEVICE)


def geometry(dtype: torch.dtype = torch.bfloat16, metric: Any = "euclidean", **options: Any) -> TokenGeometry:
    weight = clustered_embeddings(words=100, size=33).to(dtype).to(DEVICE)
    return TokenGeometry.from_embeddings(weight, metric, neighbours=20, progress=False, **options)


def compare(ours: Any, exact: Any) -> None:
    for name in ("penalty", "divergence"):
        mine, expected = getattr(ours, name).double(), getattr(exact, name)
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=2e-5)
    assert ours.diagnostics.keys() == exact.diagnostics.keys()
    for name in ("converged", "support_size"):
        assert torch.equal(ours.diagnostics[name], exact.diagnostics[name]), name
    for name in ("isolated_fraction", "leftover_policy", "leftover_reference", "marginal_error"):
        torch.testing.assert_close(
            ours.diagnostics[name].double(), exact.diagnostics[name].double(), rtol=1e-3, atol=2e-5
        )


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("semantic", {}),
        ("unbalanced", {}),
        ("paper", {}),
        ("paper", {"lam": 5.0, "scaled": True}),
        ("unbalanced", {"debias": False, "gauge": "raw"}),
        ("unbalanced", {"marginals": "balanced", "iterations": 12, "tolerance": 0.0}),
    ],
)
def test_wasserstein(preset: Any, settings: dict[str, Any], by_kernels: None) -> None:
    arguments = logits(2, 300)
    made = geometry(transform=TRANSFORMS[preset])
    regularizer = Wasserstein(made, preset, k2=9, **settings)
    exact = Wasserstein(made, preset, k2=9, method="log", **settings)
    compare(regularizer(*arguments), exact(*(x.double() for x in arguments[:2]), arguments[2]))


def test_a_support_of_258_entries(by_kernels: None) -> None:
    arguments = logits(1, 300)
    compare(
        Wasserstein(geometry(), "unbalanced", k2=128)(*arguments),
        Wasserstein(geometry(), "unbalanced", k2=128, method="log")(*(x.double() for x in arguments[:2]), arguments[2]),
    )


@pytest.mark.parametrize("metric", ["cosine", torch.cdist])
def test_other_metrics(metric: Any, by_kernels: None) -> None:
    """A user's metric has no kernel; the torch functions take over."""
    arguments = logits(2, 300, torch.float32)
    regularizer = Wasserstein(geometry(torch.float32, metric), "unbalanced", k2=6)
    exact = Wasserstein(geometry(torch.float64, metric), "unbalanced", k2=6)
    compare(regularizer(*arguments), exact(*(x.double() for x in arguments[:2]), arguments[2]))


def test_a_k2_beyond_the_kernels(by_kernels: None) -> None:
    """The torch functions take over."""
    vocabulary = 1100
    weight = torch.randn(vocabulary, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wide = TokenGeometry.from_embeddings(weight, neighbours=3, progress=False)
    arguments = logits(1, vocabulary)
    ours, exact = (
        Wasserstein(wide, "unbalanced", k2=1025, iterations=2, method=x)(*arguments) for x in ("auto", "absorbed")
    )
    assert torch.equal(ours.penalty, exact.penalty)


def test_adversarial_rows(by_kernels: None) -> None:
    """All equal, one-hot, masked tails, policy = reference: finite, and what float64 says."""
    policy, reference, tokens = logits(6, 300)
    policy[0], reference[0] = 0, 0
    policy[1], reference[1] = -torch.inf, -torch.inf
    policy[1, 250], reference[1, 3], tokens[1] = 1, 2, 250
    policy[2, 40:], tokens[2] = -torch.inf, 5
    reference[3, 10:] = -torch.inf
    reference[4] = policy[4]
    policy[5, 3], tokens[5] = 80, 3
    for preset in ("unbalanced", "paper"):
        ours = Wasserstein(geometry(), preset, k2=7)(policy, reference, tokens)
        exact = Wasserstein(geometry(), preset, k2=7, method="log")(policy.double(), reference.double(), tokens)
        compare(ours, exact)
        if preset == "unbalanced":
            assert ours.penalty[4].abs() < 1e-4


@pytest.mark.parametrize("other", ["reverse-kl", "forward-kl", "alpha"])
def test_a_sum(other: str, by_kernels: None) -> None:
    """Each part as by itself, and both against float64."""
    policy, reference, tokens = logits(3, 300)
    policy[1, 100:], reference[1, 90:], tokens[1] = -torch.inf, -torch.inf, 3
    reference[2] = policy[2]
    transport = Wasserstein(geometry(), "unbalanced", k2=9)
    ours = (make_regularizer(other) + 4 * transport)(policy, reference, tokens.int())
    exact = make_regularizer(other) + 4 * Wasserstein(geometry(), "unbalanced", k2=9, method="log")
    expected = exact(policy.double(), reference.double(), tokens)
    assert torch.equal(ours.diagnostics["unbalanced.divergence"], transport(policy, reference, tokens).divergence)
    for name in ("penalty", "divergence"):
        mine, theirs = getattr(ours, name).double(), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_sum_with_reverse_kl_reads_the_logits_once(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from wpr.transport.kernels import divergence, support

    reads = []
    original = support.block_statistics
    monkeypatch.setattr(support, "block_statistics", lambda *x, **y: reads.append("support") or original(*x, **y))
    monkeypatch.setattr(divergence, "block_statistics", lambda *x, **y: reads.append("divergence") or original(*x, **y))
    monkeypatch.setattr(divergence, "divergence_sums", lambda *x, **y: reads.append("sums"))
    (ReverseKL() + 4 * Wasserstein(geometry(), "unbalanced", k2=9))(*logits(1, 300))
    assert reads == ["support"]


@pytest.mark.parametrize(
    "transform",
    ["unit", "centre/unit", "unit/centre", "centre/remove-2/unit", "centre/whiten-0.5", "centre/unit/shuffle-1"],
)
def test_transforms(transform: str, by_kernels: None) -> None:
    arguments = logits(1, 300)
    weight = clustered_embeddings(words=100, size=33).to(torch.bfloat16).to(DEVICE)
    made = TokenGeometry.from_embeddings(weight, neighbours=20, progress=False, transform=transform)
    compare(
        Wasserstein(made, "unbalanced", k2=9)(*arguments),
        Wasserstein(made, "unbalanced", k2=9, method="log")(*(x.double() for x in arguments[:2]), arguments[2]),
    )


def test_slices_of_positions_give_the_same(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = logits(2, 300)
    regularizer = Wasserstein(geometry(), "unbalanced", k2=6)
    whole = regularizer(*arguments).penalty
    monkeypatch.setattr("wpr.regularizers.wasserstein.KERNEL_COST_BYTES", 1)
    assert torch.equal(regularizer(*arguments).penalty, whole)


@pytest.mark.needs("two gpus")
@pytest.mark.parametrize("name", ["wasserstein", "reverse-kl"])
def test_another_device_than_the_current_one(name: str) -> None:
    """Triton launches on the current device, where the other's memory cannot be reached."""
    make = {"wasserstein": lambda g: Wasserstein(g, "unbalanced", k2=6), "reverse-kl": lambda g: ReverseKL()}[name]
    here, there = geometry(), geometry().to("cuda:1")
    arguments = logits(2, 300)
    ours = make(there)(*(x.to("cuda:1") for x in arguments))
    assert torch.equal(ours.penalty.to(DEVICE), make(here)(*arguments).penalty)


def test_every_second_position(by_kernels: None) -> None:
    """Its masses and ids lie farther apart in memory than they are long."""
    regularizer = Wasserstein(geometry(), "unbalanced", k2=6)
    support = regularizer.reduce(*logits(3, 300))
    whole, some = regularizer.finish([support]), regularizer.finish([support[::2]])
    assert torch.equal(some.penalty, whole.penalty[::2])
    assert torch.equal(some.divergence, whole.divergence[::2])


def test_impossible_tokens_and_bad_rows_are_refused(by_kernels: None) -> None:
    policy, reference, tokens = logits(3, 300)
    regularizer = Wasserstein(geometry(), "unbalanced", k2=6)
    policy[1, 7], tokens[1] = -torch.inf, 7
    with pytest.raises(ValueError, match="token 7 at position 1 has probability 0"):
        regularizer(policy, reference, tokens)
    reference[2, 9] = torch.nan
    with pytest.raises(ValueError, match=r"reference logits are not a distribution at 1 position\(s\): 2 "):
        regularizer(policy, reference, tokens)


@pytest.mark.parametrize("name", [name for name in REGULARIZERS if name != "wasserstein"])
@pytest.mark.parametrize("settings", [{}, {"gauge": "raw"}, {"estimator": "paper"}])
def test_f_divergences(name: str, settings: dict[str, Any], by_kernels: None) -> None:
    policy, reference, tokens = logits(2, 300)
    regularizer = make_regularizer(name, **settings)
    ours, exact = (regularizer(x, y, tokens) for x, y in ((policy, reference), (policy.double(), reference.double())))
    torch.testing.assert_close(ours.penalty.double(), exact.penalty, rtol=2e-5, atol=5e-6)
    torch.testing.assert_close(ours.divergence.double(), exact.divergence, rtol=2e-5, atol=2e-6)


def test_a_subclass_keeps_its_own_formulas(by_kernels: None) -> None:
    class Doubled(ReverseKL):
        def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
            return 2 * super().terms(log_p, log_q)

    arguments = logits(2, 300, torch.float32)
    torch.testing.assert_close(
        Doubled()(*arguments).divergence, 2 * ReverseKL()(*arguments).divergence, rtol=1e-4, atol=1e-6
    )


def test_a_divergence_without_a_kernel_uses_torch(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReverseKL, "name", "brand-new")
    arguments = logits(2, 300, torch.float32)
    found = ReverseKL()(*arguments)
    monkeypatch.undo()
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert torch.equal(found.penalty, ReverseKL()(*arguments).penalty)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", ["semantic", "reverse-kl"])
def test_logits_column_by_column(name: str) -> None:
    """What torch takes, the kernels take too, at the price of a copy."""
    policy, reference, tokens = logits(2, 300)
    regularizer = ReverseKL() if name == "reverse-kl" else Wasserstein(geometry(), "unbalanced", k2=10)
    whole = regularizer(policy, reference, tokens)
    turned = regularizer(policy.mT.contiguous().mT, reference, tokens)
    assert torch.equal(turned.penalty, whole.penalty)
    assert torch.equal(turned.divergence, whole.divergence)
