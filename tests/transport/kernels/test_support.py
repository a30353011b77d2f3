"""The support put together on the device against the torch version: the same entries, the same masses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wpr.transport import support as slow

pytestmark = pytest.mark.needs("triton")


def pair(positions: int, vocabulary: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    policy = 4 * torch.randn(positions, vocabulary, generator=generator)
    reference = policy + torch.randn(positions, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, (positions,), generator=generator)
    return policy.to(dtype).to(device), reference.to(dtype).to(device), tokens.to(device)


def check(policy: Tensor, reference: Tensor, tokens: Tensor, k2: int) -> None:
    from wpr.transport.kernels import support as fast

    ours = fast.truncate(policy, reference, tokens, k2)
    exact = slow.truncate(policy.double(), reference.double(), tokens, k2)
    assert torch.equal(ours.ids, exact.ids)
    assert torch.equal(ours.sampled, exact.sampled)
    for mine, expected in ((ours.log_policy, exact.log_policy), (ours.log_reference, exact.log_reference)):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("positions", "vocabulary", "k2"), [(1, 97, 1), (9, 401, 33), (3, 1271, 5), (2, 5000, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_rows(positions: int, vocabulary: int, k2: int, dtype: torch.dtype, device: str) -> None:
    check(*pair(positions, vocabulary, dtype, device), k2)


def test_the_whole_vocabulary_is_the_support(device: str) -> None:
    """Then nothing is left over."""
    check(*pair(3, 70, torch.float32, device), 70)


def test_disjoint_lists_and_a_token_outside(device: str) -> None:
    """All 2 k2 + 1 places are taken."""
    from wpr.transport.kernels import support as fast

    policy, reference, _ = pair(2, 300, torch.float32, device)
    policy[:, :100] += 100
    reference[:, 150:] += 100
    tokens = torch.tensor([120, 299], device=device)
    tokens[1] = reference[1].argmin()
    check(policy, reference, tokens, 32)
    assert fast.truncate(policy, reference, tokens, 32).size.tolist() == [66, 66]


def test_adversarial_rows(device: str) -> None:
    policy, reference, tokens = pair(8, 700, torch.bfloat16, device)
    policy[0], reference[0] = 0, 0  # all equal
    policy[1], reference[1] = -torch.inf, -torch.inf  # one-hot, at different tokens
    policy[1, 650], reference[1, 3], tokens[1] = 1, 2, 650
    policy[2, 100:] = -torch.inf  # masked tails; the reference has mass where the policy has none
    tokens[2] = 5
    reference[3, 10:] = -torch.inf
    policy[4, 5:] = policy[4, 4]  # duplicates
    reference[5] = policy[5]  # the same distribution
    tokens[5] = policy[5].argmax()
    policy[6] = 3000  # a sum beyond float32
    policy[7, 3], tokens[7] = 80, 3  # the leftover is 1e-30 of the mass
    check(policy, reference, tokens, 40)


def test_log_masses_at_given_ids(device: str) -> None:
    from wpr.transport.kernels import support as fast

    policy, reference, tokens = pair(4, 500, torch.float32, device)
    ids = slow.truncate(policy, reference, tokens, 20).ids[:, :-1]
    torch.testing.assert_close(
        fast.log_masses(policy, ids).double(), slow.log_masses(policy.double(), ids), rtol=1e-6, atol=2e-6
    )


def test_more_tokens_than_can_be_merged_are_refused(device: str) -> None:
    from wpr.transport.kernels import support as fast

    with pytest.raises(ValueError, match="k2=1025 exceeds 1024, the most that the kernels merge"):
        fast.truncate(*pair(1, 1100, torch.float32, device), 1025)


def test_slices_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wpr.transport.kernels import support as fast

    arguments = pair(5, 300, torch.float32, device)
    whole = fast.truncate(*arguments, 10)
    monkeypatch.setattr(fast, "_BYTES_AT_ONCE", 24 * 5 * 2)  # two positions at a time
    parts = fast.truncate(*arguments, 10)
    for name in ("ids", "log_policy", "log_reference", "sampled"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_rows_that_are_no_distribution_are_refused(device: str) -> None:
    from wpr.transport.kernels import support as fast

    policy, reference, tokens = pair(4, 200, torch.float32, device)
    reference[2, 7] = torch.nan
    with pytest.raises(ValueError, match=r"reference logits are not a distribution at 1 position\(s\): 2 "):
        fast.truncate(policy, reference, tokens, 8)
    policy[1] = -torch.inf
    with pytest.raises(ValueError, match=r"policy logits are not a distribution at 1 position\(s\): 1 "):
        fast.truncate(policy, reference, tokens, 8)
