"""Penalties from hidden states are those of the logits, for heads of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from wpr import ReverseKL, TokenGeometry, Wasserstein, from_hidden
from wpr.language_models import hidden_states

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "soft-capped": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "scaled": ("Granite", {"logits_scaling": 3.0}),
}


def model(kind: str, seed: int) -> Any:
    name, extra = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # far from uniform, so that the cap and the scale matter
        made.get_output_embeddings().weight.mul_(20)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_mb", [256.0, 0.004])
@pytest.mark.parametrize("name", ["semantic", "reverse-kl"])
def test_the_same_as_from_logits(kind: str, memory_mb: float, name: str) -> None:
    policy, reference = model(kind, 0), model(kind, 1)
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    tokens = ids[:, 1:].flatten()
    geometry = TokenGeometry.from_embeddings(reference.get_input_embeddings().weight.detach(), neighbours=20)
    regularizer = ReverseKL() if name == "reverse-kl" else Wasserstein(geometry, k2=10)
    with torch.no_grad():
        states = [hidden_states(each, ids, mask)[:, :-1].flatten(0, 1) for each in (policy, reference)]
        logits = [each(input_ids=ids).logits[:, :-1].flatten(0, 1) for each in (policy, reference)]
    ours = from_hidden(regularizer, policy, states[0], reference, states[1], tokens, memory_mb=memory_mb)
    whole = regularizer(*logits, tokens)
    torch.testing.assert_close(ours.penalty, whole.penalty, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.divergence, whole.divergence, rtol=1e-4, atol=1e-5)
    assert ours.diagnostics.keys() == whole.diagnostics.keys()


def test_refusals() -> None:
    policy = model("tied", 0)
    states, tokens = torch.zeros(5, 32), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(5, 32\) and \(4, 32\)"):
        from_hidden(ReverseKL(), policy, states, policy, states[:4], tokens)
    with pytest.raises(ValueError, match=r"tokens of shape \(4,\) for 5 positions"):
        from_hidden(ReverseKL(), policy, states, policy, states, tokens[:4], memory_mb=0.003)  # 4 positions a slice
    with pytest.raises(ValueError, match="memory_mb=0"):
        from_hidden(ReverseKL(), policy, states, policy, states, tokens, memory_mb=0)
    broken = states.clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match=r"position.* 0 .*counted from 3"):
        from_hidden(ReverseKL(), policy, broken, policy, states, tokens, memory_mb=0.001)


def test_no_positions() -> None:
    policy = model("tied", 0)
    nothing = torch.zeros(0, 32)
    out = from_hidden(ReverseKL(), policy, nothing, policy, nothing, torch.zeros(0, dtype=torch.long))
    assert out.penalty.shape == (0,)
