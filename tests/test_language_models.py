"""Batches of token lists, and logits at a temperature."""

from __future__ import annotations

import pytest
import torch

from tests.ppo import tiny
from wpr.language_models import fingerprint, hidden_states, logits_of, merged_weights, pad, states_before


def test_padding_on_either_side() -> None:
    ids, mask = pad([[5, 6, 7], [8], []], value=9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    ids, mask = pad([[5, 6, 7], [8], []], left=True)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.int64)


@torch.no_grad()
def test_states_before_the_last_tokens() -> None:
    model, ids = tiny.policy(), torch.arange(3, 13).reshape(2, 5)
    whole = hidden_states(model, ids, torch.ones_like(ids))
    assert torch.equal(states_before(model, ids, torch.ones_like(ids), 3), whole[:, 1:4])
    assert states_before(model, ids, torch.ones_like(ids), 0).shape == (2, 0, 32)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_temperature_is_not_rounded_to_bf16(temperature: float) -> None:
    model = tiny.policy().bfloat16()
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    plain, found = logits_of(model, states), logits_of(model, states, temperature)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(found.float(), plain.float() / temperature)


def test_the_fingerprint_sees_changes_that_torch_does_not_count() -> None:
    model = tiny.policy(tie_word_embeddings=True).bfloat16()
    before = fingerprint(model)
    assert fingerprint(tiny.policy(tie_word_embeddings=True).bfloat16()) == before
    counted = model.lm_head.weight._version
    model.lm_head.weight.data[3, 3] += 0.01
    assert model.lm_head.weight._version == counted
    assert fingerprint(model) != before


@torch.no_grad()
def test_the_fingerprint_sees_places() -> None:
    """Of single values and of whole rows; and the sum is that of the definition."""
    model = tiny.policy()
    before = fingerprint(model)
    for weight in model.parameters():
        weight.copy_(weight.flip(0))
    assert fingerprint(model) != before
    for weight in model.parameters():
        weight.copy_(weight.flip(0))
    assert fingerprint(model) == before
    weight = model.lm_head.weight
    weight[2, 5], weight[4, 1] = weight[4, 1].item(), weight[2, 5].item()
    assert fingerprint(model) != before
    layer = torch.nn.Linear(5, 3, bias=False)
    layer.register_buffer("count", torch.tensor(7))
    layer.register_buffer("none", torch.empty(0, 2))
    bits = layer.weight.flatten().view(torch.int32).tolist()
    wanted = sum((2 * place + 1) * value for place, value in enumerate(bits))
    assert fingerprint(layer) == ((wanted + 2**63) % 2**64 - 2**63, 7, 0)


def test_the_fingerprint_sees_what_adapters_do() -> None:
    """Weights stay as they are, and what they are merged to does not."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.policy(), config)
    model.add_adapter("other", config)
    before = fingerprint(model)
    with model.disable_adapter():
        assert fingerprint(model) != before
    assert fingerprint(model) == before
    model.set_adapter("other")
    assert fingerprint(model) != before


def test_weights_have_the_names_of_a_checkpoint() -> None:
    model = tiny.policy(tie_word_embeddings=True)
    found, own = merged_weights(model), model.state_dict()
    assert found.keys() == own.keys()
    assert all(found[name].data_ptr() == weight.data_ptr() for name, weight in own.items())
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
