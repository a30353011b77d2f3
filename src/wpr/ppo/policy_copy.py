"""A copy of the policy to draw with: whole, its adapter merged, in the type that autocast reads.

A policy's weights may be float32 under autocast, held in parts (FSDP 2, ZeRO-3), or stand beside an adapter's. Whatever
draws from it as it is converts, gathers or adds them up for every token; the copy does so once per rollout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wpr.language_models import Module, is_in_parts, whole_weight, without_wrapper
from wpr.ppo.distributed import keep_as_autocast_reads


def needs_copy(policy: Module, device: torch.device) -> bool:
    """Whether drawing from the policy as it is would do work for every token that a copy does once."""
    return is_in_parts(policy) or torch.is_autocast_enabled(device.type)


def why_not_copied(policy: Module) -> str | None:
    """Why a policy cannot be copied, if so."""
    if not all(weight.is_floating_point() for weight in policy.parameters()):
        return "its weights are quantised"
    for layer in policy.modules():
        if hasattr(layer, "token_adapter"):
            return "its adapter trains single tokens"
        if not hasattr(layer, "base_layer"):
            continue
        if any(getattr(layer, "lora_bias", {}).values()) and getattr(_base(layer), "bias", None) is None:
            return "its adapter adds biases to layers that have none"
        if is_in_parts(layer) and not _is_plain_lora(layer):
            kind = type(layer).__module__.split(".")[-2]
            return f"its weights are held in parts, and its adapter ({kind}) is no plain LoRA on linear layers"
    return None


class PolicyCopy:
    """The copy of one policy, on a device; its weights are what they were at the last `refresh`.

    model: a transformers model without wrappers. Under autocast its linear layers and its head are in autocast's type.
    """

    def __init__(self, policy: Module, device: torch.device) -> None:
        with torch.device("meta"):
            self.model = type(policy)(copy.deepcopy(policy.config)).requires_grad_(False)
        made: dict[Any, nn.Parameter] = {}
        for module, source in self._places(policy):
            for name, empty in _own(module):
                value = getattr(_base(source), name)
                if name in module._buffers:
                    module._buffers[name] = torch.empty(empty.shape, dtype=value.dtype, device=device)
                    continue
                # Tied as the policy's are: an adapter may have untied them.
                key = (id(source), name) if hasattr(source, "base_layer") else id(value)
                if key not in made:
                    new = torch.empty(empty.shape, dtype=value.dtype, device=device)
                    made[key] = nn.Parameter(new, requires_grad=False)
                module._parameters[name] = made[key]
        if torch.is_autocast_enabled(device.type):
            keep_as_autocast_reads(self.model, torch.get_autocast_dtype(device.type), head=True)
        self.model.eval()

    @torch.no_grad()
    def refresh(self, policy: Module) -> Module:
        """Take the policy's weights of now; where they are held in parts, all processes do so together."""
        with torch.autocast(self.model.device.type, enabled=False):  # an adapter's product is as exact as its weights
            for module, source in self._places(policy):
                gathered = is_in_parts(source)
                layer = source if gathered else without_wrapper(source)
                for name, kept in _own(module):
                    kept.copy_(_merged(source, name) if gathered else getattr(layer, name))
        return self.model

    def _places(self, policy: Module) -> Iterator[tuple[nn.Module, Any]]:
        """The copy's modules that have weights or buffers of their own, and what stands in their places."""
        for name, module in self.model.named_modules():
            if module._parameters or module._buffers:
                source = policy
                for part in filter(None, name.split(".")):
                    source = getattr(source, part)
                    source = without_wrapper(source) if hasattr(source, "modules_to_save") else source
                yield module, source


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own weights and buffers."""
    found = [*module._parameters.items(), *module._buffers.items()]
    return [(name, value) for name, value in found if value is not None]


def _base(layer: Any) -> Any:
    return layer.get_base_layer() if hasattr(layer, "base_layer") else layer


def _is_plain_lora(layer: Any) -> bool:
    """Whether all that an adapter does is to add a product of two matrices to the weight of a linear layer."""
    others = [*getattr(layer, "lora_variant", {}), *filter(None, getattr(layer, "lora_bias", {}).values())]
    linear = isinstance(layer.base_layer, nn.Linear) and not getattr(layer, "fan_in_fan_out", False)
    return linear and not others and set(layer.active_adapters) <= set(getattr(layer, "lora_A", ()))


def _merged(layer: Any, name: str) -> Tensor:
    """A weight that is held in parts, whole, with what the active LoRA adapters add to it."""
    total = whole_weight(getattr(_base(layer), name))
    if name != "weight" or not hasattr(layer, "base_layer") or layer.merged or layer.disable_adapters:
        return total
    for adapter in layer.active_adapters:
        first, second = (whole_weight(part[adapter].weight) for part in (layer.lora_A, layer.lora_B))
        total = total + layer.scaling[adapter] * (second @ first)
    return total
