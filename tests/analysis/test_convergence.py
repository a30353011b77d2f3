"""Convergence: the semantic form ends, a balanced problem in unequal pieces does not, and both are told."""

from __future__ import annotations

import pytest
import torch

from tests.problems import clustered_embeddings
from wpr import TokenGeometry, Wasserstein
from wpr.analysis.convergence import convergence_curve, convergence_finding, infeasible
from wpr.transport.support import Support


def logits(vocabulary: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def geometry() -> TokenGeometry:
    return TokenGeometry.from_embeddings(clustered_embeddings(), neighbours=2, progress=False)


def support(solver: Wasserstein) -> Support:
    size = solver.geometry.vocabulary
    return solver.support(logits(size, 0), logits(size, 1), torch.arange(6))


def test_the_semantic_form_ends(geometry: TokenGeometry) -> None:
    solver = Wasserstein(geometry, "unbalanced", k2=12)
    curve = convergence_curve(solver, support(solver), steps=(1, 10, 60))
    assert curve.ended.all()
    assert not curve.infeasible.any()
    error = curve.penalty_error.amax(-1)
    assert error[0] > error[1] > error[2]
    assert float(error[2]) < 1e-6
    exact = Wasserstein(geometry, "unbalanced", k2=12, iterations=5000, tolerance=1e-13)
    torch.testing.assert_close(curve.final, exact.finish([support(exact)]).penalty, rtol=0, atol=1e-9)


def test_the_papers_form_drifts_where_pieces_are_unequal(geometry: TokenGeometry) -> None:
    solver = Wasserstein(geometry, "paper", k2=12, lam=10.0)
    curve = convergence_curve(solver, support(solver), steps=(1, 10, 100))
    assert curve.infeasible.all(), "the leftover of both distributions is a piece of its own, and never the same"
    assert not curve.ended.any()
    finding = convergence_finding({"paper": curve})
    assert any("no end was reached" in sentence and "At 100% there is none" in sentence for sentence in finding.text)
    assert [row[1] for row in finding.rows] == [1, 10, 100]


def test_connected_pieces_of_equal_mass_have_a_solution() -> None:
    geometry = TokenGeometry.from_embeddings(clustered_embeddings(), neighbours=None, progress=False)
    size = geometry.vocabulary
    solver = Wasserstein(geometry, "paper", k2=size, lam=5.0, floor=0.0, scaled=True)
    assert not infeasible(solver, support(solver)).any(), "all tokens are in the support and every pair is connected"
    curve = convergence_curve(solver, support(solver), steps=(1,))
    assert curve.ended.all()


def test_pieces_are_found_through_others() -> None:
    """Four tokens on a line, each near the next alone: one piece, though its ends are not neighbours."""
    line = TokenGeometry.from_embeddings(torch.tensor([[0.0], [1.0], [2.1], [3.3]]), neighbours=1, progress=False)
    a, b = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]])
    ids = torch.tensor([[0, 1, 2, 3, -1]])
    one_piece = Support(ids, a.log(), b.log(), torch.tensor([0]))
    assert line.cost(ids, scaled=False)[0, 0, 3] == torch.inf
    solver = Wasserstein(line, "paper", k2=4)
    assert infeasible(solver, one_piece).tolist() == [False]
    missing = torch.tensor([[0, 1, 3, -1, -1]])  # without the token in between
    two = torch.tensor([[0.4, 0.3, 0.3, 0.0, 0.0]]), torch.tensor([[0.3, 0.3, 0.4, 0.0, 0.0]])
    assert infeasible(solver, Support(missing, two[0].log(), two[1].log(), torch.tensor([0]))).tolist() == [True]
