"""The copy that responses are drawn from: the same tokens as from the policy itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from tests.ppo.test_generation import sampling
from tests.ppo.test_graph_generation import DEVICE, SEEDS, batch, same
from wpr.ppo.generation import TransformersGeneration
from wpr.ppo.graph_generation import GraphGeneration
from wpr.ppo.policy_copy import PolicyCopy, needs_copy, why_not_copied

WANTED = sampling(max_new_tokens=20)


def changed(model: Any, by: float = 0.2) -> None:
    """A step of some optimizer."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE))


def with_lora(base: dict[str, Any] | None = None, **settings: Any) -> Any:
    """base: changes of the model that gets the adapter."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    given = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    return peft.get_peft_model(tiny.policy(3, **(base or {})), peft.LoraConfig(**given | settings)).to(DEVICE).eval()


def test_it_is_refreshed_under_autocast() -> None:
    """In its precision; the policy itself stays as it is."""
    model, generation = tiny.policy(3, tie_word_embeddings=True).to(DEVICE), GraphGeneration(say=pytest.fail)
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            theirs = TransformersGeneration().generate(model, batch(), WANTED, SEEDS)
            ours = generation.generate(model, batch(), WANTED, SEEDS)
        share = (ours.tokens == theirs.tokens)[ours.mask & theirs.mask].float().mean()
        assert share > 0.9  # a sum in another order rounds otherwise in bf16, and a token at the edge is another one
        changed(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_without_autocast_it_is_the_policy(tied: bool) -> None:
    model = tiny.policy(3, tie_word_embeddings=tied, attention_bias=True).to(DEVICE).to(torch.bfloat16)
    made = PolicyCopy(model, torch.device(DEVICE)).refresh(model)
    theirs, ours = (dict(one.state_dict()) for one in (model, made))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
    ids = batch().input_ids
    assert torch.equal(made(ids).logits, model(ids).logits)


TIED = {"base": {"tie_word_embeddings": True}}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}, TIED, TIED | {"modules_to_save": ["lm_head"]},
        TIED | {"modules_to_save": ["embed_tokens"]}, TIED | {"target_modules": ["q_proj", "lm_head"]},
        TIED | {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)  # fmt: skip
def test_an_adapter_is_merged(settings: dict[str, Any]) -> None:
    """Tied weights are untied by an adapter on one of them."""
    policy = with_lora(**settings)
    model, device = policy.get_base_model(), torch.device(DEVICE)
    before = copy.deepcopy(policy.state_dict())
    copied = PolicyCopy(model, device)
    for _ in range(2):
        made, ids = copied.refresh(model), batch().input_ids
        assert not any("lora" in name for name, _ in made.named_modules())
        torch.testing.assert_close(made(ids).logits, policy(ids).logits, rtol=1e-4, atol=1e-5)
        changed(policy)
    with policy.disable_adapter():
        torch.testing.assert_close(copied.refresh(model)(ids).logits, policy(ids).logits, rtol=1e-4, atol=1e-5)
    assert policy.state_dict().keys() == before.keys()


def test_when() -> None:
    model, device = tiny.policy(3).to(DEVICE), torch.device(DEVICE)
    assert not needs_copy(model, device)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert needs_copy(model, device)


def test_what_cannot_be_copied() -> None:
    """Adapters that are not added to weights, where these are held in parts (as FSDP 2 marks them)."""
    assert why_not_copied(tiny.policy(3)) is None
    policy = with_lora(use_dora=True).get_base_model()
    assert why_not_copied(policy) is None
    policy.model.layers[0].self_attn.q_proj.base_layer.weight.full_tensor = None
    assert (
        why_not_copied(policy)
        == "its weights are held in parts, and its adapter (lora) is no plain LoRA on linear layers"
    )
    assert why_not_copied(with_lora(lora_bias=True, base={"attention_bias": True, "mlp_bias": True})) is None
    whole = tiny.policy(3)
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.to(torch.uint8), requires_grad=False)
    assert why_not_copied(whole) == "its weights are quantised"
    said: list[str] = []
    whole.lm_head.weight = torch.nn.Parameter(tiny.policy(3).lm_head.weight.detach())
    whole.extra = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    with torch.autocast(DEVICE, torch.bfloat16):
        GraphGeneration(say=said.append).generate(whole.to(DEVICE), batch(), WANTED, SEEDS)
    assert said == ["responses are drawn by transformers' generate: its weights are quantised"]


def test_it_draws_what_the_adapter_draws() -> None:
    policy = with_lora()
    theirs = TransformersGeneration().generate(policy, batch(), WANTED, SEEDS)
    model = policy.get_base_model()
    made = PolicyCopy(model, torch.device(DEVICE)).refresh(model)
    same(GraphGeneration(say=pytest.fail).generate(made, batch(), WANTED, SEEDS), theirs)


def test_a_copy_is_refreshed_once_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts it is drawn in; what is beyond the limit is freed at its end."""
    model, generation, refreshed = tiny.policy(3).to(DEVICE), GraphGeneration(kept_bytes=0), []
    refresh = PolicyCopy.refresh
    monkeypatch.setattr(PolicyCopy, "refresh", lambda self, policy: refreshed.append(1) or refresh(self, policy))
    with torch.autocast(DEVICE, torch.bfloat16):
        for rollouts in (1, 2):
            with generation.rollout():
                for _ in range(3):
                    generation.generate(model, batch(), WANTED, SEEDS)
                assert generation.drawer.state is not None
            assert generation.drawer.state is None
            assert len(refreshed) == rollouts


def test_without_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has no room for it."""
    from wpr.ppo import graph_generation

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graph_generation, "PolicyCopy", full)
    model, said = tiny.policy(3).to(DEVICE), []
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = GraphGeneration(say=said.append).generate(model, batch(), WANTED, SEEDS)
        same(ours, TransformersGeneration().generate(model, batch(), WANTED, SEEDS))
    assert said == ["responses are drawn by transformers' generate: there is no memory for a copy of the policy"]
