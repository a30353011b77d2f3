"""A copy of the policy to draw with: whole, its adapter merged, in the type that autocast reads.

A policy's weights may be float32 under autocast, held in parts (FSDP 2, ZeRO-3), or stand beside an adapter's. Whatever
draws from it as it is converts, gathers or adds them up for every token; the copy does so once per rollout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wpr.language_models import Module, is_partitioned
from wpr.ppo.distributed import keep_as_autocast_reads


def needs_copy(policy: Module, device: torch.device) -> bool:
    """Whether drawing from the policy as it is would do work for every token that a copy does once."""
    in_parts = is_partitioned(policy) or any(hasattr(weight, "full_tensor") for weight in policy.parameters())
    return in_parts or torch.is_autocast_enabled(device.type)


def why_not_copied(policy: Module) -> str | None:
    """Why a policy cannot be copied, if so."""
    if not all(weight.is_floating_point() for weight in policy.parameters()):
        return "its weights are quantised"
    for layer in policy.modules():
        if hasattr(layer, "token_adapter"):
            return "its adapter trains single tokens"
        if not hasattr(layer, "base_layer"):
            continue
        variants = [*getattr(layer, "lora_variant", {}), *filter(None, getattr(layer, "lora_bias", {}).values())]
        if not hasattr(layer, "lora_A") or variants:
            return (
                f"its adapter ({type(layer).__module__.split('.')[-2]}) is no plain LoRA, which can be added to weights"
            )
    return None


class PolicyCopy:
    """The copy of one policy, on a device; its weights are what they were at the last `refresh`.

    model: a transformers model without wrappers. Under autocast its linear layers and its head are in autocast's type.
    """

    def __init__(self, policy: Module, device: torch.device) -> None:
        with torch.device("meta"):
            self.model = type(policy)(copy.deepcopy(policy.config)).requires_grad_(False)
        for module, source in self._places(policy):
            for name, empty, value in _values(module, source):
                made = torch.empty(empty.shape, dtype=value.dtype, device=device)
                if name in module._parameters:
                    module._parameters[name] = nn.Parameter(made, requires_grad=False)
                else:
                    module._buffers[name] = made
        self.model.tie_weights()
        if torch.is_autocast_enabled(device.type):
            keep_as_autocast_reads(self.model, torch.get_autocast_dtype(device.type), head=True)
        self.model.eval()

    @torch.no_grad()
    def refresh(self, policy: Module) -> Module:
        """Take the policy's weights of now; where they are held in parts, all processes do so together."""
        kind = self.model.device.type
        with torch.autocast(kind, enabled=False):  # an adapter's product is as exact as its weights
            for module, source in self._places(policy):
                with _gathered(source):
                    for name, kept, value in _values(module, source):
                        kept.copy_(_with_adapter(source, name, value))
        return self.model

    def _places(self, policy: Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The copy's modules that have weights or buffers of their own, and what stands in their places."""
        for name, module in self.model.named_modules():
            if module._parameters or module._buffers:
                source = policy
                for part in filter(None, name.split(".")):
                    source = _behind_wrapper(getattr(source, part))
                yield module, source


def _behind_wrapper(module: nn.Module) -> nn.Module:
    """The module that computes where PEFT trains a copy of a whole one."""
    if not hasattr(module, "modules_to_save"):
        return module
    wrapper: Any = module
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    found: nn.Module = wrapper.modules_to_save[active[0]] if active else wrapper.original_module
    return found


def _values(module: nn.Module, source: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, tensors and the source's tensors of a module's own weights and buffers."""
    base: Any = source.get_base_layer() if hasattr(source, "base_layer") else source  # type: ignore[operator]
    for name, value in [*module._parameters.items(), *module._buffers.items()]:
        if value is not None:
            yield name, value, getattr(base, name)


def _gathered(source: nn.Module) -> AbstractContextManager[Any]:
    """ZeRO-3's parts of a module put together, for the duration."""
    if not is_partitioned(source):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(source.parameters()))
    return gathered


def _with_adapter(source: Any, name: str, value: Tensor) -> Tensor:
    """A whole tensor, with what the active LoRA adapters add to it."""
    total = _whole(value)
    if name != "weight" or not hasattr(source, "base_layer") or source.merged or source.disable_adapters:
        return total
    for adapter in source.active_adapters:
        if adapter in source.lora_A or adapter in source.lora_embedding_A:
            total = total + _whole(source.get_delta_weight(adapter))
    return total


def _whole(values: Any) -> Tensor:
    """What FSDP 2 holds in parts, put together."""
    found: Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return found
