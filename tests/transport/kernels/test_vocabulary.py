"""The vocabulary pass against torch: float64 sums, and the ids that the torch version chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wpr.transport import support as slow

pytestmark = pytest.mark.needs("triton")


def rows(positions: int, vocabulary: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(positions, vocabulary, generator=generator)).to(dtype).to(device)


def check(logits: Tensor, k: int) -> None:
    from wpr.transport.kernels import vocabulary

    statistics = vocabulary.block_statistics(logits)
    expected = logits.double().logsumexp(-1)
    torch.testing.assert_close(vocabulary.log_totals(statistics)[0].double(), expected, rtol=1e-6, atol=1e-6)
    ids = vocabulary.top_ids(logits, k=k, statistics=statistics)[0]
    assert torch.equal(ids, slow.top_ids(logits.float(), k).sort(-1).values)


@pytest.mark.parametrize(("positions", "vocabulary", "k"), [(1, 97, 1), (3, 401, 33), (3, 1271, 5), (2, 5000, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_rows(positions: int, vocabulary: int, k: int, dtype: torch.dtype, device: str) -> None:
    """bf16 and fp16 rows of a thousand logits are full of ties."""
    check(rows(positions, vocabulary, dtype, device), k)


def test_many_rows(device: str) -> None:
    check(rows(41, 401, torch.bfloat16, device), 33)


@pytest.mark.parametrize("k", [1, 63, 64, 97])
def test_up_to_the_whole_vocabulary(k: int, device: str) -> None:
    check(rows(3, 97, torch.bfloat16, device), k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adversarial_rows(dtype: torch.dtype, device: str) -> None:
    logits = rows(9, 700, dtype, device)
    logits[0] = 0  # all equal
    logits[1] = -3.5
    logits[2] = -torch.inf  # one-hot
    logits[2, 650] = 1
    logits[3, 100:] = -torch.inf  # a masked tail, fewer finite values than k
    logits[4, 5:] = logits[4, 4]  # duplicates
    logits[5, ::2], logits[5, 1::2] = 0.0, -0.0  # equal, though their bits differ
    logits[6] = 60000.0 if dtype == torch.float16 else 3e38  # a sum beyond float32
    logits[7, 3], logits[7, 4:] = 80, -80
    logits[8] = -60000.0 if dtype == torch.float16 else -3e38
    check(logits, 128)


def test_rows_that_are_no_distribution(device: str) -> None:
    """NaN, +inf, nothing but -inf: the log-sum-exp says so, the ids stay ids, and the neighbours do not notice."""
    from wpr.transport.kernels import vocabulary

    good = rows(5, 300, torch.float32, device)
    logits = good.clone()
    logits[1, 7], logits[2, 290], logits[3] = torch.nan, torch.inf, -torch.inf
    totals = vocabulary.log_totals(vocabulary.block_statistics(logits))[0]
    assert totals.isfinite().tolist() == [True, False, False, False, True]
    ids = vocabulary.top_ids(logits, k=20)[0]
    assert ((ids >= 0) & (ids < 300)).all()
    assert (ids.diff(dim=-1) > 0).all()
    for row in (0, 4):
        assert torch.equal(ids[row], vocabulary.top_ids(good, k=20)[0, row])


def test_slices_and_no_rows(device: str) -> None:
    """A slice of a larger tensor has rows farther apart than they are long."""
    from wpr.transport.kernels import vocabulary

    check(rows(4, 600, torch.float32, device)[1:3, 50:450], 20)
    nothing = torch.empty(0, 97, device=device)
    assert vocabulary.top_ids(nothing, k=5).shape == (1, 0, 5)
    assert vocabulary.log_totals(vocabulary.block_statistics(nothing)).shape == (1, 0)


def test_refusals(device: str) -> None:
    from wpr.transport.kernels import vocabulary

    logits = rows(2, 97, torch.float32, device)
    with pytest.raises(ValueError, match=r"k=98 is outside 1\.\.97"):
        vocabulary.top_ids(logits, k=98)
    with pytest.raises(ValueError, match="torch.float64"):
        vocabulary.top_ids(logits.double(), k=3)
    with pytest.raises(ValueError, match="contiguous"):
        vocabulary.block_statistics(logits.mT)


def test_two_sides_share_a_launch(device: str) -> None:
    """The same as each by itself; rows of one may be far apart in memory."""
    from wpr.transport.kernels import vocabulary

    generator = torch.Generator().manual_seed(1)
    first = torch.randn(3, 401, generator=generator).to(device)
    second = torch.randn(3, 2, 401, generator=generator).to(device)[:, 1]
    both = vocabulary.block_statistics(first, second)
    ids = vocabulary.top_ids(first, second, k=33, statistics=both)
    for side, logits in enumerate((first, second)):
        alone = vocabulary.block_statistics(logits)
        assert torch.equal(alone.highest[0], both.highest[side])
        assert torch.equal(vocabulary.log_totals(alone)[0], vocabulary.log_totals(both)[side])
        assert torch.equal(vocabulary.top_ids(logits, k=33)[0], ids[side])
    with pytest.raises(ValueError, match="one shape and type"):
        vocabulary.block_statistics(first, second.bfloat16())


@pytest.mark.parametrize(("positions", "vocabulary"), [(1, 97), (3, 401), (2, 9000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reverse_kl_of_the_same_read(positions: int, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    from wpr.transport.kernels import vocabulary as pass_

    policy, reference = (rows(positions, vocabulary, dtype, device, seed) for seed in range(2))
    for shift in (0.0, 30.0):  # logits that differ by a constant are the same distribution
        both = policy, (reference.float() + shift).to(dtype)
        statistics = pass_.block_statistics(*both, differences=True)
        plain = pass_.block_statistics(*both)
        assert torch.equal(statistics.highest, plain.highest)
        torch.testing.assert_close(statistics.total, plain.total)
        log_p, log_q = (x.double().log_softmax(-1) for x in both)
        found = pass_.reverse_kl(statistics, *pass_.log_totals(statistics))
        torch.testing.assert_close(found.double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-5, atol=2e-6)


def test_reverse_kl_of_adversarial_rows(device: str) -> None:
    """Equal rows, a constant between them, masks alike, a mask of the policy, one of the reference, one-hot rows."""
    from wpr.transport.kernels import vocabulary as pass_

    policy = rows(6, 300, torch.float32, device)
    reference = policy.clone()
    reference[1] += 1000
    reference[2] += torch.randn(300, generator=torch.Generator().manual_seed(0)).to(device)
    policy[2, 70:], reference[2, 70:] = -torch.inf, -torch.inf
    policy[3, 64:128] = -torch.inf
    reference[4, 128:192] = -torch.inf
    policy[5] = -torch.inf
    policy[5, 299] = 3.0
    statistics = pass_.block_statistics(policy, reference, differences=True)
    found = pass_.reverse_kl(statistics, *pass_.log_totals(statistics))
    log_p, log_q = policy.double().log_softmax(-1), reference.double().log_softmax(-1)
    expected = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
    assert found[4] == torch.inf
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_logits_are_read_once_where_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, to the last bit of the log-sum-exps, and one read for all; copies are read by themselves."""
    from wpr.transport.kernels import divergence, vocabulary

    policy, reference = rows(3, 401, torch.bfloat16, device), rows(3, 401, torch.bfloat16, device, seed=1)
    apart = divergence.divergence_sums(policy, reference, "kl-and-entropy")
    statistics = vocabulary.block_statistics(policy, reference, differences=True)
    reads, read = [], vocabulary._block_statistics
    monkeypatch.setattr(
        vocabulary, "_block_statistics", lambda *logits, **options: reads.append(logits) or read(*logits, **options)
    )
    with vocabulary.read_once(policy, reference):
        together = divergence.divergence_sums(policy, reference, "kl-and-entropy")
        found = vocabulary.block_statistics(policy, reference, differences=True)
        assert len(reads) == 1
        vocabulary.block_statistics(policy.clone(), reference)
        vocabulary.block_statistics(reference, policy)
        vocabulary.block_statistics(policy)
        assert len(reads) == 4
    vocabulary.block_statistics(policy, reference)
    assert len(reads) == 5
    for name in ("terms", "offset", "log_policy", "log_reference"):
        torch.testing.assert_close(getattr(together, name), getattr(apart, name), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.highest, statistics.highest)
    assert torch.equal(found.differences, statistics.differences)
