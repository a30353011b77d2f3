"""No result depends on what memory held before: NaN shows what is never written, numbers show what is read unwritten.

NaN alone would not do. It is no edge of a neighbour list, for instance, where a number is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from tests.transport.kernels.memory import rubbish
from tests.transport.kernels.test_potentials import problems
from wpr.transport.geometry import TokenGeometry
from wpr.transport.support import NO_TOKEN

pytestmark = pytest.mark.needs("triton")

BEFORE = (float("nan"), 0.25)


def tensors(result: Any) -> list[Tensor]:
    """All tensors of a result, in one order; of a solution, not those of the problem."""
    if isinstance(result, Tensor):
        return [result]
    if is_dataclass(result):
        result = [getattr(result, field.name) for field in fields(result) if field.name != "problem"]
    parts = result.values() if isinstance(result, dict) else result
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


def check(compute: Callable[[], Any], before: tuple[float, ...] = BEFORE) -> None:
    results = []
    for value in before:
        with rubbish(value):
            results.append(tensors(compute()))
    for tensor in results[0]:
        assert not tensor.isnan().any()
        assert tensor.is_floating_point() or tensor.dtype == torch.bool or (tensor < 1 << 14).all()
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def logits(positions: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows; if there are more, one that is nearly one-hot, and one with a masked tail."""
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(positions, vocabulary, generator=generator)
    policy = reference + torch.randn(positions, vocabulary, generator=generator)
    tokens = policy.argmax(-1)
    if positions > 2:
        policy[1], reference[1], policy[1, 5], reference[1, 5], tokens[1] = -torch.inf, -torch.inf, 1, 2, 5
        policy[2, 9:], reference[2, 12:], tokens[2] = -torch.inf, -torch.inf, 3
    return policy.bfloat16().to(device), reference.bfloat16().to(device), tokens.to(device)


@pytest.mark.parametrize(("vocabulary", "k"), [(50, 1), (97, 97), (300, 5)])
def test_vocabulary_and_support(vocabulary: int, k: int, device: str) -> None:
    from wpr.transport.kernels import support
    from wpr.transport.kernels import vocabulary as pass_

    policy, reference, tokens = logits(3, vocabulary, device)
    check(lambda: pass_.top_ids(policy, reference, k=k))
    check(lambda: pass_.log_totals(pass_.block_statistics(policy, reference)))
    check(lambda: support.reduce_logits(policy, reference, tokens, k))
    check(lambda: support.reduce_logits(policy, reference, tokens, k, with_kl=True))
    ids = support.reduce_logits(policy, reference, tokens, k).support.ids[:, :-1]
    check(lambda: support.log_masses(policy, ids))


@pytest.mark.parametrize("kind", ["reverse-kl", "kl-and-entropy"])
def test_divergence(kind: str, device: str) -> None:
    from wpr.transport.kernels.divergence import divergence_sums

    policy, _, _ = logits(3, 97, device)
    check(lambda: divergence_sums(policy, policy.roll(1, 0).nan_to_num(), kind))
    check(lambda: divergence_sums(policy, torch.zeros_like(policy).float(), kind))


@pytest.mark.parametrize(("n", "dtype"), [(4, torch.bfloat16), (66, torch.float32), (130, torch.bfloat16)])
def test_cost(n: int, dtype: torch.dtype, device: str) -> None:
    """Of what is left unfilled, what a solver reads is there; -1 is what marks a pair as near."""
    from wpr.transport.kernels.cost import cost

    weight = clustered_embeddings(words=100, size=8).to(dtype).to(device)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=20, progress=False)
    ids = torch.full((2, n), NO_TOKEN, device=device)
    for row, used in enumerate((1, n // 2 - 1)):
        ids[row, :used] = 4 * torch.arange(used, device=device)
    check(lambda: cost(geometry, ids), (float("nan"), -1.0))
    read = ids >= 0
    read[:, -1] = True
    pairs = read.unsqueeze(-1) & read.unsqueeze(-2)
    check(lambda: cost(geometry, ids, fill=False)[pairs], (float("nan"), -1.0))


@pytest.mark.parametrize("capacity", [0.0, 1.0])
@pytest.mark.parametrize("n", [12, 34, 66])
def test_potentials(n: int, capacity: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lists and by the matrix; the costs of padding are rubbish too."""
    from wpr.transport.kernels import neighbour_lists, potentials

    monkeypatch.setattr(neighbour_lists, "CAPACITY", capacity)
    a, b, cost = (x.float().to(device) for x in problems(2, n))
    padding = (a == -torch.inf) & (b == -torch.inf)
    nowhere = padding.unsqueeze(-1) | padding.unsqueeze(-2)

    def everything() -> Any:
        seen = torch.where(nowhere, torch.empty(cost.shape, device=device), cost)
        settings: dict[str, Any] = {"lam": 5.0, "iterations": 2}
        return (
            potentials.balanced(a, b, seen, floor=1e-16, **settings),
            potentials.self_transport(a, seen, **settings),
            *tensors(potentials.debiased(a, b, seen, rho=8.0, tolerance=1e-4, **settings)),
        )

    check(everything)


@pytest.mark.parametrize(("k2", "neighbours"), [(1, 20), (16, 20), (40, None)])
def test_penalties(k2: int, neighbours: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits to penalties. With all pairs as neighbours, one of the problems is dense."""
    from wpr import Wasserstein
    from wpr.transport import kernels

    monkeypatch.setenv(kernels.VARIABLE, "1")
    weight = clustered_embeddings(words=100, size=20).bfloat16().to(device)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=neighbours, progress=False)
    arguments = logits(3, 300, device)
    regularizer = Wasserstein(geometry, "unbalanced", k2=k2, iterations=2)
    check(lambda: regularizer.penalties(regularizer.support(*arguments)))
