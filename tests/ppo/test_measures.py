"""What two models say of a token, against the definitions."""

from __future__ import annotations

import pytest
import torch

from wpr import ForwardKL, ReverseKL
from wpr.ppo.measures import LogitsError, Measures, token_statistics
from wpr.ppo.scoring import PositionScorer


def logits(rows: int = 7, tokens: int = 23, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = 3 * torch.randn(2, rows, tokens, generator=generator)
    return policy, reference, torch.randint(tokens, (rows,), generator=generator)


def measured(regularizer, policy, reference, tokens) -> Measures:
    scorer = PositionScorer(regularizer)
    scorer.add(tokens, policy, reference)
    assert scorer.error is None
    return scorer.result()


def test_definitions() -> None:
    policy, reference, tokens = logits()
    out = measured(ForwardKL(), policy, reference, tokens)
    p, q = policy.double().softmax(-1), reference.double().softmax(-1)
    assert torch.allclose(out.log_prob.double(), p.log().gather(-1, tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(out.kl.double(), (p * (p / q).log()).sum(-1), atol=1e-5)
    assert torch.allclose(out.entropy.double(), -(p * p.log()).sum(-1), atol=1e-5)
    assert torch.allclose(out.divergence.double(), (q * (q / p).log()).sum(-1), atol=1e-5)


def test_kl_is_reverse_kl_whatever_the_regularizer() -> None:
    policy, reference, tokens = logits()
    own = measured(ReverseKL(), policy, reference, tokens)
    assert torch.allclose(own.kl, own.divergence, atol=1e-5)
    assert torch.equal(own.kl, measured(ForwardKL(), policy, reference, tokens).kl)


def test_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, and the same complaints."""
    pytest.importorskip("triton")
    policy, reference, tokens = logits()
    policy[:, 3] = reference[:, 3] = -torch.inf
    tokens = torch.where(tokens == 3, 4, tokens)
    by_torch = measured(ReverseKL(), policy, reference, tokens)
    monkeypatch.setenv("WPR_KERNELS", "1")
    by_kernels = measured(ReverseKL(), policy, reference, tokens)
    for name in ("log_prob", "penalty", "divergence", "kl", "entropy"):
        assert torch.allclose(getattr(by_torch, name), getattr(by_kernels, name), atol=1e-5), name
    reference[4, 2] = torch.nan
    with pytest.raises(LogitsError, match="reference") as caught:
        token_statistics(policy, reference, tokens, first=10)
    assert caught.value.position == 14


def test_masked_vocabularies_are_fine() -> None:
    policy, reference, tokens = logits()
    policy[:, 3] = reference[:, 3] = -torch.inf
    out = measured(ReverseKL(), policy, reference, torch.where(tokens == 3, 4, tokens))
    for name in ("log_prob", "penalty", "divergence", "kl", "entropy"):
        assert getattr(out, name).isfinite().all()


@pytest.mark.parametrize("model", ["policy", "reference"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_bad_logits_are_named(model: str, value: float) -> None:
    policy, reference, tokens = logits()
    (policy if model == "policy" else reference)[4, 2] = value
    with pytest.raises(LogitsError, match=model) as caught:
        token_statistics(policy, reference, tokens, first=10)
    assert caught.value.position == 14
    assert caught.value.values["nan" if value != value else "+inf"] == 1
