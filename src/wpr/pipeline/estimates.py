"""What a recipe needs before it starts: parameters, memory of each stage, disk, downloads.

Notation: N parameters of the model, V vocabulary, h hidden size, L layers, B sequences of T tokens on a device.

Weights and optimizer are float32, so that training all weights takes 16 bytes a parameter: weight 4, gradient 4, Adam's
two moments 8. A frozen model takes 4. With LoRA the base is frozen and only the adapter's share is trained.

    SFT     16 N + activations + logits                             logits:      B T V * 4 * 3 (float32; their
    reward  16 N + activations of 2 B sequences                                  log-softmax and gradient)
    PPO     16 N (policy) + 16 N (critic) + 4 N (reference) + 4 N (reward model), and the larger of activations +
            logits_memory_mb and the cache of keys and values of the responses that are drawn together
    GRPO, RLOO  the same without critic; all responses of a rollout are drawn together
    graphs      on a GPU, PPO holds beside that, while it draws, the cache and, under autocast, a copy of the policy:
            2 N, and 4 V h for its embeddings, which stay in float32, beside a head of their own; where weights are
            held in parts every GPU has that copy, of 4 N without autocast
    vllm    its share of the device's memory, always

Activations: with gradient checkpointing one hidden state a layer and one layer's inner states; without it the inner
states of all layers, 56 B T h bytes per layer in half precision (fitted to measured peaks) and twice that in float32.
T is the longest that the recipe allows.

On disk a saved model takes 4 N, a checkpoint 12 N of every model that is trained (weights and moments); of ZeRO or
FSDP 18 N, with the float32 weights of its optimizer and those in half precision. While a stage trains there is one
checkpoint more than `save_total_limit`, since the oldest goes when the newest is whole; `finished_checkpoints` says
what stays.

With the optimizer offloaded, moments and float32 weights (12 bytes of a trained parameter) are in the host's memory,
and the devices keep weights and gradients in half precision (4).

Estimates, meant to be right within a third; `docs/recipes.md` compares them with measured peaks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpr.config.recipe import Recipe
from wpr.config.trainers import config_class
from wpr.pipeline.arguments import trainer_arguments
from wpr.pipeline.run import PlannedStage
from wpr.ppo.back_ends import BackEnd
from wpr.ppo.graph_generation import KEPT, PLACES


@dataclass(frozen=True)
class ModelSize:
    """What decides a model's memory. source: where the numbers come from."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    key_value_width: int
    source: str


KNOWN = {
    "google/gemma-2b": ModelSize(2_506_172_416, 256_000, 2048, 18, 256, "known"),
    "google/gemma-7b": ModelSize(8_537_680_896, 256_000, 3072, 28, 4096, "known"),
    "google/codegemma-7b": ModelSize(8_537_680_896, 256_000, 3072, 28, 4096, "known"),
    "google/codegemma-7b-it": ModelSize(8_537_680_896, 256_000, 3072, 28, 4096, "known"),
    "Qwen/Qwen1.5-1.8B-Chat": ModelSize(1_836_828_672, 151_936, 2048, 24, 2048, "known"),
}
"""The paper's models, so that their recipes can be estimated without a network."""

DOWNLOADS = {"tldr": 0.1e9, "full-hh": 0.2e9, "apps": 1.4e9}
"""Bytes of the hub's datasets, roughly."""

ROWS = {"tldr": 92_858, "full-hh": 112_052, "apps": 5_000}
"""Training rows of the hub's datasets: comparisons, or problems."""
SOLUTIONS = 117_232
"""Programs that APPS has for its training problems, all of which SFT learns."""


@dataclass(frozen=True)
class StageEstimate:
    """Bytes on one device that holds everything, by what they are for; the parts that sharding divides are `states`.

    disk: at the most, while it trains; sharded_disk: with ZeRO's or FSDP's checkpoints. kept: once it is done.
    trained: parameters that have a gradient.
    """

    stage: str
    states: float
    activations: float
    disk: float
    kept: float = 0
    sharded_disk: float = 0
    trained: float = 0

    @property
    def memory(self) -> float:
        return self.states + self.activations

    def sharded(self, devices: int) -> float:
        """Bytes a device when ZeRO-3 or FSDP spreads weights, gradients and moments over so many."""
        return self.states / devices + self.activations

    @property
    def host(self) -> float:
        """Bytes that go to the host's memory when the optimizer is offloaded, over all devices."""
        return 12 * self.trained


def disk_needed(stages: Sequence[StageEstimate], sharded: bool = False) -> float:
    """Bytes at the most, of stages that run one after the other: what those before it left, and the one that runs."""
    needed = left = 0.0
    for stage in stages:
        needed = max(needed, left + (stage.sharded_disk if sharded else stage.disk))
        left += stage.kept
    return max(needed, left)


def model_size(name: str) -> ModelSize | None:
    """Sizes of a model: from its folder or cached configuration, or from the table; None where neither is there."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return KNOWN.get(name)
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSize(
        _count(config),
        text.vocab_size,
        text.hidden_size,
        text.num_hidden_layers,
        (getattr(text, "num_key_value_heads", None) or heads) * width,
        "configuration",
    )


def _count(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def estimate(stage: PlannedStage, size: ModelSize, bf16: bool, devices: int = 1) -> StageEstimate:
    """Memory and disk of one stage, on one device that holds everything; batches are shared by so many devices."""
    recipe, kind = stage.recipe, stage.name.partition("/")[0]
    if kind == "prepare":
        return StageEstimate(stage.name, 0, 0, 0)
    settings = _settings(recipe, kind, bf16, devices)
    batch = settings["per_device_train_batch_size"]
    tokens = recipe.data.max_prompt_tokens + recipe.data.max_completion_tokens
    if kind == "ppo":
        tokens = settings["max_prompt_length"] + settings["max_new_tokens"]
    trained = 16 * size.parameters if recipe.model.lora is None else 4 * size.parameters + 16 * _adapter(recipe, size)
    width = 2 if settings["bf16"] or settings["fp16"] else 4
    rows = 2 * batch if kind == "reward" else batch
    has_critic = kind == "ppo" and recipe.trainer == "ppo" and not settings["share_backbone"]
    if has_critic:
        rows = 2 * batch  # policy and critic
    activations = _activations(size, rows * tokens, width, bool(settings["gradient_checkpointing"]))
    frozen = 0.0
    if kind == "sft":
        activations += 3 * 4 * batch * tokens * size.vocabulary
    if kind == "ppo":
        critic = 16 * size.parameters if has_critic else 0
        reference = 0 if recipe.model.lora is not None else 4 * size.parameters
        scorer = 4 * size.parameters if recipe.scorer.kind == "model" else 0
        frozen = critic + reference + scorer
        cache = _cache(recipe, settings, size, width, tokens)
        activations = max(activations + settings["logits_memory_mb"] * 2**20, cache)
    own = size.parameters if recipe.model.lora is None else _adapter(recipe, size)
    parameters = own + (size.parameters if has_critic else 0)
    saved = 4 * (size.parameters + (0 if recipe.model.lora is None else own))
    total = settings.get("save_total_limit") or 2
    weights = 4 * own
    stays = {"all": total * 12 * parameters, "weights": total * weights, "none": 0}[recipe.finished_checkpoints]
    return StageEstimate(
        stage.name,
        trained + frozen,
        activations,
        max((total + 1) * 12 * parameters, total * 12 * parameters + saved),
        saved + stays,
        max((total + 1) * 18 * parameters, total * 18 * parameters + saved),
        parameters,
    )


@dataclass(frozen=True)
class GenerationEstimate:
    """What draws a policy's responses, and bytes that this holds while it does, beside weights and optimizer.

    back_end: ``transformers``, ``graphs``, ``vllm``, or ``trl``. cache: keys and values. copy: of the weights.
    gathered: of weights that are held in parts; every device has all of it. share: of the device's memory, always held.
    """

    back_end: str
    cache: float = 0
    copy: float = 0
    gathered: float = 0
    share: float = 0

    def peak(self, stage: StageEstimate, device_memory: float, devices: int = 1) -> float:
        """Bytes of the stage with it, on each of so many devices that ZeRO-3 or FSDP spread weights over: what is a
        small share of the device's memory is held while training, too.
        """
        held = self.cache + (self.copy if devices == 1 else self.gathered)
        training = stage.sharded(devices) + self.share * device_memory
        return training + held if held <= KEPT * device_memory else max(training, stage.states / devices + held)


def estimate_generation(
    stage: PlannedStage, size: ModelSize, bf16: bool, device_type: str, devices: int = 1
) -> GenerationEstimate:
    """Of a policy's stage, on such a device; batches are shared by so many of them."""
    settings = _settings(stage.recipe, "ppo", bf16, devices)
    back_end = BackEnd(settings["generation"], settings["vllm_url"]).resolve(device_type)
    if settings["generation"] == "auto" and stage.recipe.trainer != "ppo" and back_end != "graphs":
        return GenerationEstimate("trl")
    if back_end != "graphs":
        own = back_end == "vllm" and settings["vllm_url"] is None
        return GenerationEstimate(back_end, share=settings["vllm_memory"] if own else 0)
    half = settings["bf16"] or settings["fp16"]
    places = PLACES * math.ceil((settings["max_prompt_length"] + settings["max_new_tokens"]) / PLACES)
    # Under autocast values are in half precision, and keys in float32, as rotary positions leave them.
    cache = _cache(stage.recipe, settings, size, 3 if half else 4, places)
    copy = 2 * size.parameters + 4 * size.vocabulary * size.hidden if half else 0
    return GenerationEstimate(back_end, cache, copy, gathered=copy or 4 * size.parameters)


def _cache(recipe: Recipe, settings: dict[str, Any], size: ModelSize, width: int, tokens: int) -> float:
    """Bytes of keys and values of the responses that are drawn together, each with its prompt so many tokens long."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_minibatches")
    rollout: int = math.prod(settings[name] for name in names)
    together: int = min(rollout, settings["generation_batch_size"] or rollout) if recipe.trainer == "ppo" else rollout
    return 2.0 * width * size.key_value_width * size.layers * tokens * together


def _settings(recipe: Recipe, kind: str, bf16: bool, devices: int) -> dict[str, Any]:
    kinds = dataclasses.fields(config_class(kind))
    defaults = {field.name: field.default for field in kinds if field.default is not dataclasses.MISSING}
    return defaults | trainer_arguments(recipe, kind, Path("."), devices, bf16)


def _adapter(recipe: Recipe, size: ModelSize) -> int:
    """Parameters of adapters on all linear layers, about: seven matrices a layer whose sides add up to 20 h."""
    assert recipe.model.lora is not None
    return recipe.model.lora.r * 20 * size.hidden * size.layers


def _activations(size: ModelSize, tokens: int, width: int, checkpointing: bool) -> float:
    layer = 28 * width * tokens * size.hidden
    if checkpointing:
        return width * tokens * size.hidden * size.layers + layer
    return layer * size.layers


def planned_steps(recipe: Recipe, kind: str) -> int:
    """Optimizer steps of a stage, on the hub's dataset where the recipe names no other number; 0 where that is unknown.
    Rows that are left out for a fault, or for their prompts, make it a few fewer.
    """
    settings = _settings(recipe, kind, bf16=False, devices=1)
    if settings["max_steps"] > 0:
        return int(settings["max_steps"])
    rows = ROWS.get(recipe.data.format, 0) if recipe.data.source is None else 0
    if kind == "sft" and recipe.data.format == "apps" and rows:
        rows = SOLUTIONS
    batch = math.prod(settings[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    epoch = rows * getattr(recipe.split, kind) / batch
    return int((math.floor(epoch) if kind == "ppo" else math.ceil(epoch)) * settings["num_train_epochs"])


def downloads(recipe: Recipe, size: ModelSize | None) -> dict[str, float]:
    """Bytes that would come from the hub, by name; nothing for what lies on this machine."""
    found: dict[str, float] = {}
    if (
        not recipe.model.name.startswith("{")
        and not Path(recipe.model.name).exists()
        and not _cached(recipe.model.name)
    ):
        found[recipe.model.name] = 2.0 * size.parameters if size is not None else float("nan")
    if recipe.data.source is None and recipe.data.format in DOWNLOADS:
        found[f"data ({recipe.data.format})"] = DOWNLOADS[recipe.data.format]
    return found


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        return False
