"""What processes agree on: sums, flags, one geometry, frozen models on the right device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import is_partitioned
from wpr.transport.geometry import TokenGeometry, input_embeddings


def sum_over_processes(accelerator: Any) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over all processes."""
    if accelerator.num_processes == 1:
        return lambda tensor: tensor
    return lambda tensor: accelerator.reduce(tensor.to(accelerator.device), reduction="sum")


def largest(accelerator: Any, value: int) -> int:
    """The largest of the processes' values."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def is_sharded(accelerator: Any) -> bool:
    """Whether weights are in parts, so that processes must run the same layers equally often."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    zero3 = plugin is not None and plugin.zero_stage == 3
    return zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None


def build_geometry_once(
    reference: Any, accelerator: Any, build: Callable[[Any], TokenGeometry] = TokenGeometry.from_model
) -> TokenGeometry:
    """The geometry of the reference's vocabulary, measured by the first process and sent to the others.

    Measuring takes seconds to minutes and, done by several processes at once, would have them wait for each other's
    cores; radii and distances are a few bytes a token.
    """
    if accelerator.num_processes == 1:
        return build(reference)
    from accelerate.utils import broadcast_object_list

    shared: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            geometry = build(reference)
            kept = replace(geometry, embeddings=geometry.embeddings[:0].cpu())
            shared = [{name: _to_cpu(getattr(kept, name)) for name in kept.__dataclass_fields__}]
        except Exception as error:  # sent, so that the others do not wait for ever
            shared = [error]
    broadcast_object_list(shared)
    if isinstance(shared[0], Exception):
        raise shared[0]
    weight = input_embeddings(reference)
    parts = {name: value.to(weight.device) if isinstance(value, Tensor) else value for name, value in shared[0].items()}
    return TokenGeometry(**{**parts, "embeddings": weight})


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def place_frozen(model: Any, accelerator: Any) -> Any:
    """A model that is not trained, ready to run: on this process's device, or, where ZeRO-3 loaded it in parts, in an
    engine that gathers them.
    """
    model.eval().requires_grad_(False)
    if not is_partitioned(model):
        return model.to(accelerator.device)
    import deepspeed

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        **{name: settings[name] for name in ("bf16", "fp16") if name in settings},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine.module.eval()
