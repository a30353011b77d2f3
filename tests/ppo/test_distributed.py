"""What processes agree on; runs of several processes are in test_processes.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

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


def test_a_reference_computes_as_fsdp_2_does() -> None:
    """To the last bit, from float32 weights, which the user's own model keeps; by autocast alone it would not."""
    ids = torch.arange(3, 27).reshape(2, 12)
    accelerator = with_plugin(fsdp_version=2)
    accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
    accelerator.native_amp, accelerator.mixed_precision, accelerator.device = True, "bf16", torch.device("cpu")
    given = tiny.policy(tie_word_embeddings=True)
    reference = place_reference(given, accelerator)
    frozen = place_frozen(tiny.policy(tie_word_embeddings=True), accelerator, ours=True)
    assert {weight.dtype for weight in given.parameters()} == {torch.float32}
    assert reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        policy = tiny.policy(tie_word_embeddings=True)
        fully_shard(policy, mesh=DeviceMesh("cpu", [0]), mp_policy=accelerator.state.fsdp_plugin.mixed_precision_policy)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            ours, half, mixed = (model(ids).logits.float() for model in (policy, reference, frozen))
    finally:
        distributed.destroy_process_group()
    assert torch.equal(ours, half)
    assert not torch.equal(ours, mixed)


def test_a_reference_is_left_as_it_is_where_nothing_holds_weights_in_half_precision() -> None:
    model = tiny.policy()
    assert place_reference(model, Accelerator(cpu=True)) is model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
