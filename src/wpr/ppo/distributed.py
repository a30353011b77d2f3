"""What processes agree on: sums, flags, one geometry, frozen models on the right device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wpr.language_models import is_partitioned
from wpr.transport.distances import resolve_metric
from wpr.transport.geometry import TokenGeometry


def sum_over_processes(accelerator: Any) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over all processes."""
    if accelerator.num_processes == 1:
        return lambda tensor: tensor
    return lambda tensor: accelerator.reduce(tensor.to(accelerator.device), reduction="sum")


def names_of_all(accelerator: Any) -> Callable[[list[str]], list[str]]:
    """A function that unites the processes' lists of names, sorted."""
    if accelerator.num_processes == 1:
        return lambda names: names
    from accelerate.utils import gather_object

    return lambda names: sorted(set(gather_object(names)))


def max_over_processes(accelerator: Any, value: int) -> int:
    """The largest of the processes' values."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def is_sharded(accelerator: Any) -> bool:
    """Whether weights are in parts, so that processes must run the same layers equally often."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    zero3 = plugin is not None and plugin.zero_stage == 3
    return zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None


def check_fsdp(accelerator: Any) -> None:
    """Refuse FSDP 1, which gathers weights only in a module's own forward pass, not for generation; and let FSDP 2
    return what the module computes in float32 as it is: log-probabilities rounded to bf16 are worthless as ratios. Nor
    may it round what layers are given: some are given angles in float32 (OLMo 2).
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version={plugin.fsdp_version} is not supported; set fsdp_version: 2")
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None, cast_forward_inputs=False)


def build_geometry_once(weight: Tensor, accelerator: Any, **options: Any) -> TokenGeometry:
    """The geometry of embeddings ``(V, d)``, measured by the first process and sent to the others.

    Measuring takes seconds to minutes and, done by several processes at once, would have them wait for each other's
    cores; radii and distances are a few bytes per token. ``options`` are those of `TokenGeometry.from_embeddings`.
    """
    if accelerator.num_processes == 1:
        return TokenGeometry.from_embeddings(weight, **options)
    from accelerate.utils import broadcast_object_list

    measured: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            geometry = TokenGeometry.from_embeddings(weight, **options)
            names = ("neighbours", "radius", "nearest", "alive", "scale", "scale_rule", "transform", "source", "power")
            parts = {name: getattr(geometry, name) for name in names}
            measured = [{name: part.cpu() if isinstance(part, Tensor) else part for name, part in parts.items()}]
        except Exception as error:  # sent, so that the others do not wait for ever
            measured = [error]
    broadcast_object_list(measured)
    if isinstance(measured[0], Exception):
        raise measured[0]
    here: dict[str, Any] = {
        name: part.to(weight.device) if isinstance(part, Tensor) else part for name, part in measured[0].items()
    }
    embeddings = here["transform"](weight)
    return TokenGeometry(embeddings=embeddings, metric=resolve_metric(options.get("metric", "euclidean")), **here)


def held_type(accelerator: Any) -> torch.dtype | None:
    """The type that DeepSpeed or FSDP 2 compute in; None where weights are kept, and autocast decides."""
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        policy = plugin.mixed_precision_policy
        return None if policy is None else policy.param_dtype
    if getattr(accelerator.state, "deepspeed_plugin", None) is None:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def place_reference(model: Any, accelerator: Any, *, ours: bool = False) -> Any:
    """`place_frozen` for a model that the policy is compared with: it computes as the policy does.

    DeepSpeed and FSDP 2 compute with all weights in half precision, and autocast only with those of products. Between
    these, the KL of a model with itself was 0.002 a token (SmolLM2-135M, bf16), as much as two steps of training made.

    ours: nobody else has it; of another model there will be a copy.
    """
    kind = held_type(accelerator)
    if kind is not None and not is_partitioned(model):
        other = [weight for weight in model.parameters() if weight.is_floating_point() and weight.dtype != kind]
        if ours:
            for weight in other:
                weight.data = weight.data.to(kind)
        elif other:
            halves = {id(weight): nn.Parameter(weight.detach().to(kind), requires_grad=False) for weight in other}
            model = copy.deepcopy(model, halves)
    return place_frozen(model, accelerator, ours=ours)


def place_frozen(model: Any, accelerator: Any, *, ours: bool = False) -> Any:
    """A model that is not trained, ready to run: on this process's device, or, where ZeRO-3 loaded it in parts, in an
    engine that gathers them.

    ours: nobody else has it, so that its linear layers may be kept in the type that autocast reads them in.
    """
    model.eval().requires_grad_(False)
    if not is_partitioned(model):
        if ours and accelerator.native_amp:
            keep_as_autocast_reads(model, {"bf16": torch.bfloat16, "fp16": torch.float16}[accelerator.mixed_precision])
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


_Trainer: Any = object  # a Trainer stands behind it


class EndsInTime(_Trainer):  # type: ignore[misc]
    """A Trainer that takes no step more where a checkpoint has them all: with sharded weights only `train` can load
    one, and it would train on to the end of a batch.
    """

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)


class HalfLinear(nn.Linear):
    """A frozen layer whose weights are kept in the type that autocast reads them in; usable without autocast, too."""

    def forward(self, states: Tensor) -> Tensor:
        if torch.is_autocast_enabled(states.device.type):
            return super().forward(states)
        bias = None if self.bias is None else self.bias.to(states.dtype)
        return nn.functional.linear(states, self.weight.to(states.dtype), bias)


def keep_as_autocast_reads(model: Any, kind: torch.dtype, *, head: bool = False) -> None:
    """Convert float32 linear layers. Autocast would convert a frozen weight at every call: the results are the same to
    the last bit, in half the memory.

    head: of the head, too, which is no longer tied to the embeddings then.
    """
    if head and type(last := model.get_output_embeddings()) is nn.Linear:
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        last.to(kind).__class__ = HalfLinear
    ends = (part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None)
    kept = {id(weight) for part in ends for weight in part.parameters()}
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and id(layer.weight) not in kept:
            layer.to(kind).__class__ = HalfLinear
