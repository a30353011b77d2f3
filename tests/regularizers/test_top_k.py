"""Divergences from a reference of which only the most likely tokens are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr import Alpha, ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import Regularizer
from wpr.regularizers.top_k import SMALLEST_REST, top_k_loss
from wpr.transport import kernels

DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse-kl": lambda p, q: p * (p / q).log(),
    "forward-kl": lambda p, q: q * (q / p).log(),
    "jensen-shannon": lambda p, q: p * (2 * p / (p + q)).log() + q * (2 * q / (p + q)).log(),
    "alpha": lambda p, q: 2 * (p.sqrt() - q.sqrt()) ** 2,  # at 1/2
    "total-variation": lambda p, q: (p - q).abs() / 2,
    "chi-squared": lambda p, q: (p - q) ** 2 / q,
    "squared-hellinger": lambda p, q: (p.sqrt() - q.sqrt()) ** 2,
}
"""What is summed over tokens, by the definition."""


def problem(positions: int = 7, tokens: int = 41, k: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of the policy, log-probabilities of the whole reference, and what is known of these; in float64."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = 2 * torch.randn(2, positions, tokens, generator=generator, dtype=torch.float64)
    known = reference.log_softmax(-1).topk(k, -1)
    return policy, reference.log_softmax(-1), known.indices, known.values


def slow(name: str, logits: Tensor, log_q: Tensor, k: int) -> Tensor:
    """The same from both whole distributions, row by row and token by token."""
    losses = []
    for p, q in zip(logits.softmax(-1), log_q.exp(), strict=True):
        top = set(q.argsort(descending=True)[:k].tolist())
        others = [token for token in range(len(q)) if token not in top]
        pairs = [(p[token], q[token]) for token in top]
        if others:
            pairs.append((p[others].sum(), q[others].sum()))
        losses.append(torch.stack([DIVERGENCES[name](*pair) for pair in pairs]).sum())
    return torch.stack(losses)


def with_gradient(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Losses ``(P,)``, and the gradient of a sum of them in which each has another weight."""
    logits = logits.clone().requires_grad_()
    losses = loss(logits)
    (losses * torch.linspace(1, 2, len(losses), dtype=losses.dtype, device=losses.device)).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 5, 30, 41])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 8e-3)])
def test_as_from_whole_distributions(name: str, k: int, dtype: torch.dtype, tolerance: float) -> None:
    logits, log_q, ids, log_probs = problem(k=k)
    logits = logits.to(dtype)  # the same numbers for both
    given = log_probs if dtype == torch.float64 else log_probs.float()
    losses, gradient = with_gradient(logits, lambda z: top_k_loss(make_regularizer(name), z, ids, given))
    expected, slope = with_gradient(logits.double(), lambda z: slow(name, z, log_q, k))
    assert gradient.dtype == dtype
    scale = expected.abs().max()
    value_tolerance = min(tolerance, 2e-5)  # the sums are in float32 whatever the logits are
    torch.testing.assert_close(losses.double(), expected, rtol=value_tolerance, atol=value_tolerance * scale.item())
    torch.testing.assert_close(gradient.double(), slope, rtol=tolerance, atol=tolerance * slope.abs().max().item())


def transport(vocabulary: int, k2: int) -> Wasserstein:
    embeddings = clustered_embeddings()[:vocabulary]
    geometry = TokenGeometry.from_embeddings(embeddings, neighbours=6, progress=False)
    return Wasserstein(geometry, "unbalanced", k2=k2)


@pytest.mark.parametrize("name", [*DIVERGENCES, "transport", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_whole_vocabulary_is_the_usual_loss(name: str, dtype: torch.dtype) -> None:
    regularizer: Regularizer = transport(41, 41) if name in ("transport", "sum") else make_regularizer(name)
    if name == "sum":
        regularizer = ReverseKL() + 4 * regularizer  # type: ignore[operator]
    logits, log_q, ids, log_probs = (x.to(dtype) if x.is_floating_point() else x for x in problem(k=41))
    got = with_gradient(logits, lambda z: top_k_loss(regularizer, z, ids, log_probs))
    expected = with_gradient(logits, lambda z: regularizer.loss(z, log_q))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_transport_where_both_models_have_the_same_most_likely_tokens() -> None:
    """Then the package's own support is those tokens."""
    _, log_q, ids, log_probs = problem(k=8)
    logits = log_q + 0.3 * torch.sin(torch.arange(41.0)) + 4 * torch.zeros_like(log_q).scatter(-1, ids, 1.0)
    regularizer = transport(41, 8)
    got = with_gradient(logits, lambda z: top_k_loss(regularizer, z, ids, log_probs))
    expected = with_gradient(logits, lambda z: regularizer.loss(z, log_q))
    assert expected[0].min() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.needs("triton")
@pytest.mark.parametrize("name", [*DIVERGENCES, "transport", "sum"])
@pytest.mark.parametrize("k", [1, 9, pytest.param(41, marks=pytest.mark.slow)])
def test_by_kernels(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    regularizer: Regularizer = transport(41, 8) if name in ("transport", "sum") else make_regularizer(name)
    if name == "sum":
        regularizer = ReverseKL() + 4 * regularizer  # type: ignore[operator]
    logits, _, ids, log_probs = problem(k=k)
    logits = logits.bfloat16()
    expected = with_gradient(logits.double(), lambda z: top_k_loss(regularizer, z, ids, log_probs))
    if name in ("transport", "sum"):
        regularizer = regularizer.with_geometry(regularizer.geometry.to(device))  # type: ignore[attr-defined]
    monkeypatch.setenv(kernels.VARIABLE, "1")
    given = ids.to(device), log_probs.float().to(device)
    got = with_gradient(logits.to(device), lambda z: top_k_loss(regularizer, z, *given))
    for mine, exact, tolerance in zip(got, expected, (1e-4, 1e-2), strict=True):  # the gradient is in bfloat16
        torch.testing.assert_close(
            mine.cpu().double(), exact, rtol=tolerance, atol=tolerance * exact.abs().max().item()
        )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_more_tokens_never_lower_it(name: str) -> None:
    """From 0 or more to the exact divergence."""
    regularizer = make_regularizer(name)
    for seed in range(5):
        logits, log_q, ids, log_probs = problem(k=41, seed=seed)
        losses = torch.stack([top_k_loss(regularizer, logits, ids[:, :k], log_probs[:, :k]) for k in range(1, 42)])
        exact = DIVERGENCES[name](logits.softmax(-1), log_q.exp()).sum(-1)
        assert losses.min() >= 0
        assert (losses.diff(dim=0) >= -1e-9 * exact).all()  # the rest is a difference: right to 1e-16, not to its 1e-10
        assert losses[20].sum() < 0.999 * exact.sum()  # and it is less where tokens are left out
        torch.testing.assert_close(losses[-1], exact)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_where_both_agree(name: str) -> None:
    _, log_q, ids, log_probs = problem()
    losses, gradient = with_gradient(log_q + 3, lambda z: top_k_loss(make_regularizer(name), z, ids, log_probs))
    assert losses.abs().max() < 1e-12
    if name != "total-variation":  # its derivative is a sign
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradient_by_differences(name: str) -> None:
    logits, _, ids, log_probs = problem(positions=3, tokens=11, k=4)
    loss = lambda z: top_k_loss(make_regularizer(name), z, ids, log_probs)  # noqa: E731
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_any_order() -> None:
    logits, _, ids, log_probs = problem()
    order = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(row)) for row in range(7)])
    other = top_k_loss(Alpha(0.3), logits, ids.gather(-1, order).int(), log_probs.gather(-1, order))
    torch.testing.assert_close(other, top_k_loss(Alpha(0.3), logits, ids, log_probs))


def test_a_rest_that_rounding_hides() -> None:
    """Probabilities that sum to 1, or a little above it, leave the smallest rest."""
    logits = torch.zeros(1, 4)
    for excess in (0.0, 9e-4):
        log_probs = torch.tensor([[math.log(0.5 + excess), math.log(0.5)]])
        loss = top_k_loss(ReverseKL(), logits, torch.tensor([[2, 0]]), log_probs)
        q = torch.tensor([0.5 + excess, 0.5, SMALLEST_REST], dtype=torch.float64)
        p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
        assert loss.item() == pytest.approx((p * (p / q).log()).sum().item() + q.sum().log().item(), rel=1e-5)


def test_logits_may_be_overwritten() -> None:
    """As cross-entropies that write their gradient in place do, between the forward and the backward pass."""
    logits, _, ids, log_probs = problem()
    expected = with_gradient(logits, lambda z: top_k_loss(ReverseKL(), z, ids, log_probs))[1]
    logits.requires_grad_()
    losses = top_k_loss(ReverseKL(), logits, ids, log_probs)
    logits.data.fill_(torch.nan)
    (losses * torch.linspace(1, 2, 7)).sum().backward()
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_held_for_the_backward_pass(dtype: torch.dtype) -> None:
    """One tensor of the logits' shape and type, and nothing else that grows with the vocabulary."""
    logits = torch.randn(6, 1000).to(dtype).requires_grad_()
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        top_k_loss(ReverseKL(), logits, torch.arange(8).expand(6, 8), torch.full((6, 8), -3.0))
    large = [x for x in held if x.numel() >= 1000]
    assert [(x.shape, x.dtype) for x in large] == [(logits.shape, dtype)]
    held.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        top_k_loss(ReverseKL(), logits.detach(), torch.arange(8).expand(6, 8), torch.full((6, 8), -3.0))
    assert held == []


def test_masked_vocabularies() -> None:
    """Tokens that the policy cannot emit, among the k, outside of them, and all that are outside."""
    logits, _, ids, log_probs = problem(positions=3)
    logits[0, 7:20] = -torch.inf
    logits[1] = torch.full_like(logits[1], -torch.inf).scatter(-1, ids[1], logits[1].gather(-1, ids[1]))
    logits[2, ids[2, 0]] = -torch.inf
    losses, gradient = with_gradient(logits, lambda z: top_k_loss(ReverseKL(), z, ids, log_probs))
    expected = with_gradient(
        logits.masked_fill(logits == -torch.inf, -60), lambda z: top_k_loss(ReverseKL(), z, ids, log_probs)
    )
    torch.testing.assert_close((losses, gradient), expected, rtol=1e-9, atol=1e-9)


def test_no_positions() -> None:
    logits = torch.zeros(0, 9, requires_grad=True)
    losses = top_k_loss(ReverseKL(), logits, torch.zeros(0, 3, dtype=torch.int), torch.zeros(0, 3))
    losses.sum().backward()
    assert losses.shape == (0,)
    assert logits.grad is not None
    assert logits.grad.shape == (0, 9)


def changed(values: Tensor, value: float) -> Tensor:
    values = values.clone()
    values[4, 2] = value
    return values


LOGITS, _, IDS, LOG_PROBS = problem()
REFUSED: dict[str, tuple[tuple[Any, Any, Any], type[Exception], str]] = {
    "a list": ((LOGITS, IDS.tolist(), LOG_PROBS), TypeError, "reference_ids is a list; pass a tensor"),
    "three axes": ((LOGITS[None], IDS, LOG_PROBS), ValueError, r"policy logits \(1, 7, 41\) .* flatten"),
    "whole numbers": ((LOGITS.long(), IDS, LOG_PROBS), ValueError, "policy logits .* floating point"),
    "other positions": ((LOGITS[:6], IDS, LOG_PROBS), ValueError, r"ids \(7, 5\) .* for 6 positions"),
    "other k": ((LOGITS, IDS[:, :4], LOG_PROBS), ValueError, r"ids \(7, 4\) .* log-probabilities \(7, 5\)"),
    "no whole ids": ((LOGITS, IDS.float(), LOG_PROBS), ValueError, "of type torch.float32 .* integer ids"),
    "no tokens": ((LOGITS, IDS[:, :0], LOG_PROBS[:, :0]), ValueError, "k=0 .* set k from 1"),
    "k beyond": ((LOGITS[:, :4], IDS, LOG_PROBS), ValueError, "k=5 .* vocabulary has 4"),
    "half": ((LOGITS, IDS, LOG_PROBS.half()), ValueError, "type torch.float16 .* float32"),
    "an id beyond": ((LOGITS, changed(IDS, 41), LOG_PROBS), ValueError, r"id 41 at position 4 .* \(0..40\)"),
    "an id below": ((LOGITS, changed(IDS, -1), LOG_PROBS), ValueError, "id -1 at position 4"),
    "an id twice": ((LOGITS, changed(IDS, int(IDS[4, 0])), LOG_PROBS), ValueError, "comes twice at position 4"),
    "nan": ((LOGITS, IDS, changed(LOG_PROBS, torch.nan)), ValueError, "nan at position 4 is no number"),
    "logits": ((LOGITS, IDS, changed(LOG_PROBS, 0.5)), ValueError, "sum to .* at position 4, beyond 1 .*not logits"),
    "nan logits": ((changed(LOGITS, torch.nan), IDS, LOG_PROBS), ValueError, "policy logits are not .*: 4 "),
    "inf logits": ((changed(LOGITS, torch.inf), IDS, LOG_PROBS), ValueError, "policy logits are not .*: 4 "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    given, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        top_k_loss(ReverseKL(), *given)


def test_a_geometry_of_another_vocabulary() -> None:
    with pytest.raises(ValueError, match="logits over 41 tokens but a geometry of 30"):
        top_k_loss(ReverseKL() + transport(30, 8), LOGITS, IDS, LOG_PROBS)
