"""The lists hold every finite cost among entries with mass, once, in the stated places."""

from __future__ import annotations

import pytest
import torch

from tests.transport.kernels.test_potentials import problems

pytestmark = pytest.mark.needs("triton")


@pytest.mark.parametrize(("n", "gaps"), [(4, 0.4), (34, 0.6), (70, 0.8), (130, 0.9)])
def test_lists_are_the_matrix(n: int, gaps: float, device: str) -> None:
    from wpr.transport.kernels.neighbour_lists import GROUP, STEP, neighbour_lists

    log_a, log_b, cost = (x.float().to(device) for x in problems(3, n, gaps=gaps))
    log_a[1, 0] = log_b[1, 0] = -torch.inf  # padding in front, too
    lists = neighbour_lists(log_a, log_b, cost)
    for p in range(3):
        assert lists.dense[p] == 0
        real = (log_a[p] != -torch.inf) | (log_b[p] != -torch.inf)
        edges = cost[p].isfinite() & real & real.unsqueeze(-1)
        order = lists.order[p].long()
        counts = lists.count[p, order]
        assert sorted(order.tolist()) == list(range(len(order)))
        steps = (counts + STEP - 1) // STEP
        assert torch.equal(steps.sort(descending=True).values, steps)
        rebuilt = torch.full_like(cost[p], torch.inf)
        for place, (entry, count) in enumerate(zip(order.tolist(), counts.tolist(), strict=True)):
            if entry >= n:
                assert count == 0
                continue
            assert count == int(edges[entry].sum())
            first, width = int(lists.first[p, place // GROUP]), int(lists.width[p, place // GROUP])
            assert count <= width
            start = first + place % GROUP * width
            found = slice(start, start + count)
            rebuilt[entry, order[lists.index[p, found].long()]] = lists.cost[p, found]
            assert (lists.cost[p, start + count : start + width] == torch.inf).all()
        assert torch.equal(rebuilt, cost[p].masked_fill(~edges, torch.inf))


def test_what_does_not_fit_is_marked(device: str) -> None:
    from wpr.transport.kernels.neighbour_lists import neighbour_lists

    log_a, log_b, cost = (x.float().to(device) for x in problems(2, 258, gaps=0.95))
    cost[1] = torch.rand(258, 258, device=device)
    cost[1].diagonal().zero_()
    assert neighbour_lists(log_a, log_b, cost).dense.tolist() == [0, 1]
