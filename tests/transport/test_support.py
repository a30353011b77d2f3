"""Truncation against a slow construction in Python, one position at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wpr.transport import support as support_module
from wpr.transport.support import NO_TOKEN, top_ids, truncate


def slow_support(
    policy: np.ndarray, reference: np.ndarray, token: int, k2: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sorted ids, and the masses of both distributions at them and outside them, by summation in float64."""

    def top(logits: np.ndarray) -> list[int]:
        return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k2]

    ids = sorted({*top(policy), *top(reference), token})
    masses = []
    for logits in (policy, reference):
        weights = np.exp(logits.astype(np.float64) - logits.max())
        inside = weights[ids]
        outside = np.delete(weights, ids).sum()
        masses.append(np.append(inside, outside) / weights.sum())
    return ids, masses[0], masses[1]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.data(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_matches_the_slow_construction(vocabulary: int, data: st.DataObject, dtype: torch.dtype) -> None:
    """Integer logits make ties the rule; some logits are -inf, as masked vocabularies have them."""
    k2 = data.draw(st.integers(1, vocabulary))
    rows = data.draw(st.integers(1, 4))
    value = st.one_of(st.integers(-6, 6).map(float), st.just(-math.inf))
    logits = [
        data.draw(st.lists(st.lists(value, min_size=vocabulary, max_size=vocabulary), min_size=rows, max_size=rows))
        for _ in range(2)
    ]
    policy, reference = (np.array(x) for x in logits)
    for x in (policy, reference):
        x[np.isinf(x).all(1), 0] = 0
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=rows, max_size=rows))
    support = truncate(
        torch.tensor(policy, dtype=dtype), torch.tensor(reference, dtype=dtype), torch.tensor(tokens), k2
    )
    assert support.ids.shape == (rows, 2 * k2 + 2)
    for row, token in enumerate(tokens):
        ids, a, b = slow_support(policy[row], reference[row], token, k2)
        used = len(ids)
        assert support.ids[row].tolist() == ids + [NO_TOKEN] * (2 * k2 + 2 - used)
        assert support.size[row] == used + 1
        for ours, slow in ((support.log_policy[row], a), (support.log_reference[row], b)):
            got = torch.cat([ours[:used], ours[-1:]]).double().exp().numpy()
            np.testing.assert_allclose(got, slow, rtol=2e-5, atol=1e-300)
            assert (ours[used:-1] == -math.inf).all()
        assert support.ids[row, support.sampled[row]] == token


def test_leftover_keeps_its_digits() -> None:
    """The support covers all but 4e-12; one minus the rest would round to zero in float32."""
    logits = torch.full((1, 50), -30.0)
    logits[0, :2] = 0.0
    support = truncate(logits, logits, torch.tensor([0]), 2)
    assert support.log_policy[0, -1].item() == pytest.approx(math.log(48) - 30 - math.log(2), abs=1e-5)


def test_nothing_is_left_over_when_the_support_is_the_vocabulary() -> None:
    logits = torch.randn(3, 6)
    support = truncate(logits, logits, torch.tensor([0, 1, 2]), 6)
    assert (support.log_policy[:, -1] == -math.inf).all()
    torch.testing.assert_close(support.log_policy.exp().sum(-1), torch.ones(3))


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6])
    assert top_ids(logits, 4).sort().values.tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_positions_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(7, 60, generator=generator), torch.randn(7, 60, generator=generator)
    tokens = torch.arange(7)
    together = truncate(policy, reference, tokens, 8)
    for i in range(7):
        alone = truncate(policy[i : i + 1], reference[i : i + 1], tokens[i : i + 1], 8)
        assert torch.equal(alone.ids[0], together.ids[i])
        assert torch.equal(alone.log_policy[0], together.log_policy[i])


def test_slices_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = torch.randn(2, 11, 40, generator=torch.Generator().manual_seed(3))
    whole = truncate(policy, reference, torch.arange(11), 5)
    monkeypatch.setitem(support_module._ELEMENTS_AT_ONCE, "cpu", 80)
    parts = truncate(policy, reference, torch.arange(11), 5)
    assert torch.equal(whole.ids, parts.ids)
    torch.testing.assert_close(whole.log_policy, parts.log_policy)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_rows_are_named_by_position(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(support_module._ELEMENTS_AT_ONCE, "cpu", 20)
    logits = torch.randn(9, 10)
    worse = logits.clone()
    worse[[4, 7], 3] = bad
    with pytest.raises(ValueError, match=r"reference logits are not a distribution at 1 position\(s\): 4"):
        truncate(logits, worse, torch.zeros(9, dtype=torch.long), 3)


def test_row_without_any_token_is_refused() -> None:
    logits = torch.zeros(2, 5)
    logits[1] = -math.inf
    with pytest.raises(ValueError, match=r"policy logits are not a distribution at 1 position\(s\): 1"):
        truncate(logits, torch.zeros(2, 5), torch.tensor([0, 0]), 2)
