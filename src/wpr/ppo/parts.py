"""What users pass to the trainer, made ready: models by name, the regularizer on its device, the stop tokens."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wpr.damaged_files import refuse_damaged_model
from wpr.language_models import (
    check_split,
    is_causal,
    is_partitioned,
    is_peft,
    plain_model,
    scores_split,
    without_dropout,
)
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.config import PPOConfig
from wpr.ppo.distributed import build_geometry_once, whole_embeddings
from wpr.ppo.generation import Sampling
from wpr.ppo.metrics import is_reserved
from wpr.regularizers import Regularizer, Sum, Wasserstein
from wpr.regularizers.spec import OUTPUT, RegularizerSpec
from wpr.rewards import Reward, RewardModel, WeightedSum, as_reward

logger = logging.getLogger(__name__)


def load_models(
    model: Any, critic: Any, reference: Any, peft_config: Any, args: PPOConfig
) -> tuple[ActorCritic, Any | None]:
    """Policy and critic as one module, and the reference; None where that is the policy with its adapter off."""
    policy, critic = load_policy(model, peft_config), load_critic(critic, args)
    if isinstance(reference, str | Path):
        reference = load_policy(reference, None)
    elif reference is None and not is_peft(policy):
        if is_partitioned(policy):
            raise ValueError("under ZeRO-3 the reference cannot be copied from the policy; pass reference=")
        reference = copy.deepcopy(policy)
    if reference is policy:
        raise ValueError("reference and model are the same object, which would freeze the policy; pass reference=None")
    actor_critic = ActorCritic(policy, critic)
    if args.disable_dropout:
        without_dropout(actor_critic)
    return actor_critic, reference


def load_policy(model: Any, peft_config: Any) -> Any:
    """The causal LM, with its adapter. By name it is loaded in float32: ``bf16=True`` computes in bf16 anyway, but
    weights that are kept in bf16 lose every update below 1/256 of them.
    """
    if isinstance(model, str | Path):
        refuse_damaged_model(str(model))
        if (Path(model) / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, dtype=torch.float32)
        else:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("the model has an adapter of its own (add_adapter); pass the plain model and peft_config=")
    if peft_config is not None and is_peft(model):
        raise ValueError("the model has an adapter already; pass peft_config=None to go on training it")
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    if is_peft(model) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{model.active_peft_config.peft_type} changes the prompt instead of the weights, which is not "
            "supported; use an adapter such as LoRA"
        )
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if trained & {torch.bfloat16, torch.float16}:
        logger.warning(
            "the policy's trained weights are %s, which rounds small updates away; load it with dtype=torch.float32 "
            "and set bf16=True",
            " and ".join(sorted(map(str, trained))),
        )
    return model


def load_tokenizer_of(model: str | Path) -> Any:
    """The tokenizer of a model's folder; the base model's, for an adapter that has none."""
    from transformers import AutoTokenizer

    config, folder = Path(model) / "adapter_config.json", str(model)
    if config.exists() and not (Path(model) / "tokenizer_config.json").exists():
        folder = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return AutoTokenizer.from_pretrained(folder)


def load_critic(critic: Any, args: PPOConfig) -> Any:
    """The sequence classifier, loaded if it is a name; None for a shared backbone."""
    if args.share_backbone:
        if critic is not None:
            raise ValueError("share_backbone=True has no critic of its own; pass critic=None")
        return None
    if critic is None:
        raise ValueError(
            "PPO needs a critic: pass critic=, a sequence-classification model with one label, usually the reward "
            "model's checkpoint, or set share_backbone=True for a value head on the policy"
        )
    if isinstance(critic, str | Path):
        from transformers import AutoModelForSequenceClassification

        refuse_damaged_model(str(critic))
        critic = AutoModelForSequenceClassification.from_pretrained(critic, num_labels=1, dtype=torch.float32)
    return critic


def check_reference(policy: Any, reference: Any) -> None:
    """Refuse a reference that cannot be split into body and head, or that is over other tokens than the policy."""
    check_split(reference)
    sizes = [plain_model(model).config.get_text_config().vocab_size for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the policy has a vocabulary of {sizes[0]} tokens and the reference one of {sizes[1]}; they must "
            "be the same"
        )


def check_actor_critic(model: ActorCritic) -> None:
    """Refuse an actor-critic that cannot learn, whose policy cannot be split into body and head, or whose critic cannot
    be read at every position.
    """
    check_split(model.policy)
    for part, role in zip(model.parts, ("model", "critic"), strict=False):
        if not any(parameter.requires_grad for parameter in part.parameters()):
            raise ValueError(
                f"no parameter of {role}= is trainable; set requires_grad, or load an adapter with is_trainable=True"
            )
    if hasattr(model, "critic"):
        _check_tokens("critic", model.critic, model.policy)
        if not (is_partitioned(model.critic) or (scores_split(model.critic) and is_causal(model.critic))):
            raise ValueError(
                f"{type(plain_model(model.critic)).__name__} cannot be the critic: its score is not a linear function "
                "of a causal model's last hidden state; use a decoder's sequence-classification model"
            )


def place_reward(
    source: Any, weights: Sequence[float] | None, model: ActorCritic, device: torch.device, tokenizer: Any = None
) -> Reward:
    """The reward that is learned from, on the device; refused if it places scores on tokens that it cannot read."""
    reward = as_reward(source, weights)
    _check_apart(reward, getattr(model, "critic", None))
    if hasattr(reward, "check_tokenizer"):
        reward.check_tokenizer(tokenizer)
    return _placed(reward, model.policy, device)


def _placed(reward: Reward, policy: Any, device: torch.device) -> Reward:
    """On the device; refused if it is a model that does not know the policy's tokens."""
    _check_reward_vocabulary(reward, policy)
    if hasattr(reward, "to"):
        reward.to(device)
    return reward


def _check_reward_vocabulary(reward: Reward, policy: Any) -> None:
    """Refuse a reward model that does not know the policy's tokens, unless it has a tokenizer of its own."""
    for part in [part for part, _ in reward.parts] if isinstance(reward, WeightedSum) else [reward]:
        if isinstance(part, RewardModel) and part.tokenizer is None:
            _check_tokens("reward model", part.model, policy)


def make_monitors(sources: Mapping[str, Any], policy: Any, device: torch.device) -> dict[str, Reward]:
    """Scores to be logged beside the reward, by the name that they have in the log."""
    monitors = {}
    for name, source in sources.items():
        if not name.isidentifier() or is_reserved(name):
            raise ValueError(f"a monitor cannot be called {name!r}: the log has its own number of that name; rename it")
        monitors[name] = _placed(as_reward(source), policy, device)
    return monitors


def _check_tokens(role: str, model: Any, policy: Any) -> None:
    own, wanted = (plain_model(one).config.get_text_config().vocab_size for one in (model, policy))
    if own < wanted:
        raise ValueError(
            f"the {role} has a vocabulary of {own} tokens, the policy one of {wanted}; use one of the same tokenizer"
            + ("" if role == "critic" else ", or RewardModel(model, tokenizer=...)")
        )


def _check_apart(reward: Reward, critic: Any) -> None:
    """Refuse a reward model that is the critic itself: one is frozen, the other trained."""
    rewards = [part for part, _ in reward.parts] if isinstance(reward, WeightedSum) else [reward]
    trained = {id(parameter) for parameter in critic.parameters()} if critic is not None else set()
    for part in rewards:
        if isinstance(part, RewardModel) and any(id(parameter) in trained for parameter in part.model.parameters()):
            raise ValueError(
                "reward model and critic are the same object, but the reward model is frozen and the critic trained; "
                "load it twice, or pass copy.deepcopy(model) as one of them"
            )


def use_one_gpu(args: PPOConfig) -> None:
    """One process drives one GPU: the Trainer would spread a single process over all of them (DataParallel)."""
    if args.n_gpu > 1:
        logger.warning(
            "%d GPUs are visible to one process, which uses the first; use all of them with `accelerate launch`",
            args.n_gpu,
        )
        args._n_gpu = 1


def sampling_of(args: PPOConfig, policy: Any, tokenizer: Any) -> Sampling:
    """How tokens are drawn, with the stop tokens of settings, model and tokenizer."""
    eos = args.stop_token_ids
    if eos is None:
        own = getattr(plain_model(policy).generation_config, "eos_token_id", None)
        found = [*(own if isinstance(own, list) else [own]), getattr(tokenizer, "eos_token_id", None)]
        eos = sorted({token for token in found if token is not None})
    if args.missing_eos_penalty is not None and not eos:
        raise ValueError(
            f"missing_eos_penalty={args.missing_eos_penalty} but neither model nor tokenizer has an end-of-sequence "
            "token; set stop_token_ids"
        )
    vocabulary = plain_model(policy).config.get_text_config().vocab_size
    outside = [token for token in eos if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(f"stop tokens {outside} are outside the vocabulary (0..{vocabulary - 1}); set stop_token_ids")
    return Sampling(args.temperature, args.top_k, args.top_p, args.min_new_tokens, args.max_new_tokens, tuple(eos))


def place_regularizer(
    regularizer: Regularizer | RegularizerSpec | str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    reference: Any,
    accelerator: Any,
) -> Regularizer:
    """On this process's device; a geometry made from the reference's input or output embeddings uses them in place."""
    if isinstance(regularizer, Mapping | list | tuple):
        regularizer = RegularizerSpec.from_plain(regularizer)
    if isinstance(regularizer, type) or not isinstance(regularizer, str | Regularizer | RegularizerSpec):
        raise TypeError(f"regularizer={regularizer!r} is no regularizer; pass a name, or an object such as ReverseKL()")
    if isinstance(regularizer, str | RegularizerSpec):
        spec = RegularizerSpec.parse(regularizer) if isinstance(regularizer, str) else regularizer
        if not spec.is_wasserstein:
            return spec.build()
        if spec.costs.other_model is not None:
            raise ValueError(
                f"regularizer={regularizer!r} names another model's embeddings, which a recipe loads and a trainer "
                "does not; pass wpr.model_geometry.regularizer_on(reference, RegularizerSpec.parse(...))"
            )
        weight = whole_embeddings(plain_model(reference), "output" if spec.costs.embeddings == OUTPUT else "input")
        spec, notes = spec.fitted(len(weight))
        for note in notes:
            logger.warning("regularizer=%s: %s", regularizer, note)
        measured = build_geometry_once(weight, accelerator, **spec.costs.options())
        regularizer = spec.build(weight, {spec.costs: measured})
    elif isinstance(regularizer, Wasserstein | Sum):
        weight = whole_embeddings(plain_model(reference))
    if not isinstance(regularizer, Wasserstein | Sum) or regularizer.geometry is None:
        return regularizer
    geometry = regularizer.geometry
    if geometry.vocabulary != weight.shape[0]:
        raise ValueError(
            f"the regularizer's geometry has {geometry.vocabulary} tokens but the reference {weight.shape[0]}; "
            "build it with TokenGeometry.from_model(reference)"
        )
    moved = geometry.to(accelerator.device)
    for layer in ("input", "output"):
        own = whole_embeddings(plain_model(reference), layer)
        if moved.embeddings.shape == own.shape and torch.equal(moved.embeddings, own):
            moved = dataclasses.replace(moved, embeddings=own)
            break
    return regularizer.with_geometry(moved)
