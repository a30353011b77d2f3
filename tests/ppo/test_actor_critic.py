"""Policy and critic as one module: the split forward pass against the models' own."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.ppo import tiny
from wpr import ReverseKL
from wpr.language_models import check_split, hidden_states, logits_of
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.scoring import PositionScorer


def batch(width: int = 4, length: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts of 1 to 4 tokens padded on the left, responses of 0 to 6 padded on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, tiny.TOKENS, (5, width + length), generator=generator)
    prompt = torch.arange(width) >= width - torch.tensor([[1], [4], [2], [3], [1]])
    mask = torch.arange(length) < torch.tensor([[6], [0], [3], [1], [5]])
    return ids, torch.cat([prompt, mask], -1).long(), mask


def alone(model, ids: torch.Tensor, attention: torch.Tensor, row: int) -> torch.Tensor:
    """The model's own output for one row without any padding."""
    return model(input_ids=ids[row : row + 1, attention[row].bool()])


def test_log_probs_and_values_are_those_of_each_row_alone() -> None:
    policy, critic = tiny.policy(), tiny.critic()
    ids, attention, mask = batch()
    log_probs, values = ActorCritic(policy, critic)(ids, attention, mask, temperature=0.7)
    for row in range(len(ids)):
        count, prompt = int(mask[row].sum()), int(attention[row].sum() - mask[row].sum())
        logits = alone(policy, ids, attention, row).logits[0] / 0.7
        tokens = ids[row, 4 : 4 + count]
        expected = logits[prompt - 1 : prompt - 1 + count].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(log_probs[row, :count], expected, atol=1e-5)
        assert (log_probs[row, count:] == 0).all()
        for t in range(count):  # the classifier's own score of the sequence so far
            known = ids[row : row + 1, attention[row].bool()][:, : prompt + t]
            assert float(values[row, t]) == pytest.approx(float(critic(input_ids=known).logits), abs=1e-5)


@pytest.mark.parametrize("slices", [1, 2, 7, 40])
def test_slices_change_neither_numbers_nor_gradients(slices: int) -> None:
    ids, attention, mask = batch()
    results = []
    for count in (1, slices):
        model = ActorCritic(tiny.policy(), tiny.critic())
        log_probs, values = model(ids, attention, mask, slices=count)
        (log_probs.square().sum() + values.masked_fill(~mask, 0).sum()).backward()
        results.append((log_probs.detach(), [parameter.grad for parameter in model.parameters()]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_logits_of_prompts_are_never_computed() -> None:
    model = ActorCritic(tiny.policy(), tiny.critic())
    ids, attention, mask = batch()
    seen = []
    model.policy.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    scorer = PositionScorer(ReverseKL(), tiny.policy(1))
    with torch.no_grad():
        model(ids, attention, mask, slices=4, scorer=scorer)
    assert scorer.positions == int(mask.sum())
    assert len(seen) == 4
    assert sum(seen) == int(mask.sum())
    assert max(seen) <= 4


def test_a_batch_of_empty_responses_still_has_gradients() -> None:
    """Every process must take part in a step, also one whose responses are all empty."""
    model = ActorCritic(tiny.policy(), tiny.critic())
    ids, attention, mask = batch()
    log_probs, values = model(ids, attention & ~torch.cat([torch.zeros(5, 4), mask], -1).long(), mask & False)
    (log_probs.sum() + values.sum() * 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all((parameter.grad == 0).all() for parameter in model.policy.parameters())


def test_shared_backbone_starts_at_zero() -> None:
    model = ActorCritic(tiny.policy(), None)
    ids, attention, mask = batch()
    _, values = model(ids, attention, mask)
    assert (values == 0).all()
    values.sum().backward()
    assert model.value_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.05,
            )
        ),
        CohereForCausalLM(
            CohereConfig(
                vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                logit_scale=0.3, pad_token_id=0, bos_token_id=2, eos_token_id=1,
            )
        ),
        GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=1)),
    ],
    ids=lambda model: type(model).__name__,
)  # fmt: skip
def test_what_comes_after_the_head_is_not_lost(model) -> None:
    model.eval()
    ids = torch.arange(6).unsqueeze(0)
    whole = model(input_ids=ids).logits[0]
    assert torch.allclose(logits_of(model, hidden_states(model, ids, torch.ones_like(ids))[0]), whole, atol=1e-6)
    check_split(model)


def test_an_unknown_step_after_the_head_is_refused() -> None:
    class Odd(type(tiny.policy())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3
            return out

    with pytest.raises(ValueError, match="between its head and its logits"):
        check_split(Odd(tiny.config()).eval())


def test_a_critic_with_several_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="num_labels=3"):
        ActorCritic(tiny.policy(), type(tiny.critic())(tiny.config(num_labels=3)))
    with pytest.raises(ValueError, match="no score head"):
        ActorCritic(tiny.policy(), tiny.policy())
