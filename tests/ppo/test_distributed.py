"""What processes agree on; runs of several processes are in test_processes.py."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Olmo2ForCausalLM, PreTrainedModel

from tests.ppo import tiny
from wpr.language_models import whole_embeddings
from wpr.ppo.distributed import (
    check_fsdp,
    is_sharded,
    max_over_processes,
    place_frozen,
    place_reference,
    sum_over_processes,
)

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5,
}  # fmt: skip


def with_plugin(**options) -> SimpleNamespace:
    """The part of an accelerator that is looked at, with a real plugin."""
    plugin = FullyShardedDataParallelPlugin(**options)
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None))


def test_fsdp_1_is_refused() -> None:
    with pytest.raises(ValueError, match="fsdp_version=1 is not supported; set fsdp_version: 2"):
        check_fsdp(with_plugin(fsdp_version=1))


def test_fsdp_2_returns_float32_as_it_is() -> None:
    accelerator = with_plugin(fsdp_version=2)
    accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
    assert accelerator.state.fsdp_plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    check_fsdp(accelerator)
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    assert policy.output_dtype is None
    assert policy.param_dtype == torch.bfloat16
    assert is_sharded(accelerator)


def test_one_process_agrees_with_itself() -> None:
    accelerator = Accelerator(cpu=True)
    assert max_over_processes(accelerator, 3) == 3
    assert sum_over_processes(accelerator)(torch.ones(2)).tolist() == [1.0, 1.0]
    assert not is_sharded(accelerator)
    model = place_frozen(tiny.policy().train(), accelerator)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    weight = whole_embeddings(model)
    assert weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_model_is_kept_as_autocast_reads_it(tied: bool) -> None:
    """To the last bit, also after a bias; embeddings and head stay as they are, and so does a model of the user's."""
    changes = {"tie_word_embeddings": tied, "attention_bias": True}
    ids = torch.arange(3, 27).reshape(2, 12)
    accelerator = SimpleNamespace(native_amp=True, mixed_precision="bf16", device=torch.device("cpu"))
    found, without = {}, {}
    for ours in (False, True):
        model = place_frozen(tiny.policy(**changes), accelerator, ours=ours)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            found[ours] = model(ids).logits
        without[ours] = model(ids).logits
        kinds = {name: weight.dtype for name, weight in model.named_parameters()}
        half = {name for name, kind in kinds.items() if kind == torch.bfloat16}
        assert half == ({name for name in kinds if "proj" in name} if ours else set())
    assert torch.equal(found[False], found[True])
    assert 0 < (without[False] - without[True]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Olmo2ForCausalLM], ids=["llama", "olmo2"])
def test_a_reference_computes_as_fsdp_2_does(kind: type[PreTrainedModel]) -> None:
    """To the last bit, from float32 weights, which the user's own model keeps; by autocast alone it would not.

    Layers of OLMo 2 are given angles in float32.
    """
    ids = torch.arange(3, 27).reshape(2, 12)
    accelerator = with_plugin(fsdp_version=2)
    accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
    accelerator.native_amp, accelerator.mixed_precision, accelerator.device = True, "bf16", torch.device("cpu")
    check_fsdp(accelerator)
    torch.manual_seed(0)
    given = kind(kind.config_class(**SMALL, tie_word_embeddings=True)).eval()
    policy, ours, autocast = (copy.deepcopy(given) for _ in range(3))
    models = [policy, place_reference(given, accelerator), place_reference(ours, accelerator, ours=True)]
    models.append(place_frozen(autocast, accelerator, ours=True))
    assert {weight.dtype for weight in given.parameters()} == {torch.float32}
    assert {weight.dtype for model in models[1:3] for weight in model.parameters()} == {torch.bfloat16}
    assert models[1].get_output_embeddings().weight is models[1].get_input_embeddings().weight
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        options = {
            "mesh": DeviceMesh("cpu", [0]),
            "mp_policy": accelerator.state.fsdp_plugin.mixed_precision_policy,
        }
        for layer in policy.model.layers:
            fully_shard(layer, **options)
        fully_shard(policy, **options)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            wanted, *found, other = (model(ids).logits.float() for model in models)
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(one, wanted) for one in found)
    assert not torch.equal(other, wanted)


@pytest.mark.parametrize(
    ("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)]
)
def test_a_reference_is_held_as_deepspeed_holds_the_policy(precision: str, kind: torch.dtype) -> None:
    plugin = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=object())
    accelerator = SimpleNamespace(state=plugin, native_amp=False, mixed_precision=precision, device=torch.device("cpu"))
    assert {weight.dtype for weight in place_reference(tiny.policy(), accelerator).parameters()} == {kind}


def test_a_reference_is_left_as_it_is_where_nothing_holds_weights_in_half_precision() -> None:
    model = tiny.policy()
    assert place_reference(model, Accelerator(cpu=True)) is model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
