"""A transformers model in two parts: the body, which runs once over whole sequences, and the head, which is applied to
the positions that are wanted, a few at a time.

Notation for shapes: ``B`` sequences, ``T`` tokens per sequence, ``N`` positions, ``H`` hidden size, ``V`` vocabulary.

Logits of a whole batch are the largest tensor of RLHF by far: 64 responses of 128 tokens over 256,000 tokens are 4 GB
in bf16 for one model. Splitting the forward pass lets the caller hold a slice of them at a time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wpr.transport.geometry import Layer, input_embeddings, output_embeddings

Module = Any
"""A transformers model or a part of one: their attributes are known only when the program runs."""


def plain_model(model: Module) -> Module:
    """The transformers model inside a PEFT wrapper, its adapter layers in place; the model itself if it has none."""
    return model.get_base_model() if is_peft(model) else model


def is_peft(model: Module) -> bool:
    """Whether the model carries a PEFT adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def positions_of(attention_mask: Tensor) -> Tensor:
    """Position ids ``(B, T)`` that count real tokens only, so that padding on either side moves nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


def pad(
    rows: Sequence[Sequence[int]], *, left: bool = False, value: int = 0, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids of several sequences as one batch, padded on the right or on the left, and which of them are real (1)
    or padding (0): two ``(B, T)``.
    """
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        real = slice(width - len(tokens), width) if left else slice(len(tokens))
        ids[row, real] = torch.tensor(tokens, dtype=torch.long)
        mask[row, real] = 1
    return ids.to(device), mask.to(device)


def hidden_states(model: Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states ``(B, T, H)`` of a causal LM or sequence classifier, without its head."""
    body = plain_model(model).base_model
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if "position_ids" in inspect.signature(body.forward).parameters:
        inputs["position_ids"] = positions_of(attention_mask)
    states: Tensor = body(**inputs).last_hidden_state
    return states


def states_before(model: Module, input_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """Last hidden states ``(B, length, H)`` that predict the last ``length`` tokens of ``(B, T)``."""
    return hidden_states(model, input_ids, attention_mask)[:, -length - 1 : -1]


def logits_of(
    model: Module, states: Tensor, temperature: float = 1.0, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Next-token logits ``(N, V)`` of hidden states ``(N, H)``, as the model's own forward pass computes them; over a
    temperature other than 1 in float32 at least, since a quotient rounded to bf16 is another distribution.

    weights: that the head uses in the place of those of its own that have these names.
    """
    plain = plain_model(model)
    head = plain.get_output_embeddings()
    given = states.to(head.weight.dtype) if not torch.is_autocast_enabled(states.device.type) else states
    logits: Tensor = head(given) if weights is None else functional_call(head, dict(weights), (given,))
    config = plain.config.get_text_config()
    # What some architectures do between the head and the logits that they return.
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    if temperature != 1.0:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits


@torch.no_grad()
def check_split(model: Module) -> None:
    """Refuse a causal LM whose logits are not those of body and head: something in between would be lost silently."""
    plain = plain_model(model)
    if getattr(plain.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(plain).__name__} is an encoder-decoder; pass a causal language model")
    if plain.get_output_embeddings() is None:
        raise ValueError(f"{type(plain).__name__} has no language-model head; load it with AutoModelForCausalLM")
    if is_partitioned(plain):
        return  # the weights are not here to be tried
    training = plain.training
    plain.eval()
    vocabulary = plain.get_input_embeddings().weight.shape[0]
    ids = torch.arange(8, device=plain.device).remainder(vocabulary).unsqueeze(0)
    mask = torch.ones_like(ids)
    whole = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].float()
    split = logits_of(plain, hidden_states(plain, ids, mask)[0]).float()
    plain.train(training)
    # NaN is met later, where it can be told at which token.
    whole, split = whole.nan_to_num(), split.nan_to_num()
    if not torch.allclose(whole, split, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise ValueError(
            f"{type(plain).__name__} does something between its head and its logits that wpr does not know (largest "
            f"difference {float((whole - split).abs().max()):.3g}); teach it to wpr.language_models.logits_of"
        )


def position_limit(model: Module) -> int | None:
    """The longest sequence that the model has positions for, where it says so."""
    return getattr(plain_model(model).config.get_text_config(), "max_position_embeddings", None)


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 holds the weights in parts, so that they are empty outside its engine; see
    `is_in_parts`.
    """
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def is_in_parts(model: nn.Module) -> bool:
    """Whether this process holds a part of the weights only: under ZeRO-3 or FSDP 2."""
    return any(hasattr(weight, "ds_id") or hasattr(weight, "full_tensor") for weight in model.parameters())


def whole_weight(weight: Tensor) -> Tensor:
    """A weight itself, or a copy that is gathered where ZeRO-3 or FSDP 2 hold it in parts. All processes must ask."""
    if hasattr(weight, "full_tensor"):
        return weight.detach().full_tensor()  # type: ignore[attr-defined, no-any-return]
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().clone()


def whole_embeddings(model: Module, layer: Layer = "input") -> Tensor:
    """The input or output embeddings ``(V, d)``, see `whole_weight`."""
    (input_embeddings if layer == "input" else output_embeddings)(model)  # refuses a model that has none
    embedding = model.get_input_embeddings() if layer == "input" else model.get_output_embeddings()
    # A policy that is its own reference may train a copy of its embeddings beside the original (PEFT's
    # modules_to_save).
    return whole_weight(getattr(embedding, "original_module", embedding).weight)


def is_gathered_to_save(model: nn.Module) -> bool:
    """Whether `whole_state` has more than the model's own state dict: weights in parts, or those in float32 that
    DeepSpeed's optimizer keeps in parts beside the ones of half precision.
    """
    return is_in_parts(model) or any(map(_has_master, model.parameters()))


def _has_master(weight: Tensor) -> bool:
    kept = hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")  # of ZeRO-3; of ZeRO-1 and 2
    return kept and weight.dtype != torch.float32


def whole_state(model: Module, keep: bool) -> dict[str, Tensor] | None:
    """The state dict in main memory, gathered one weight at a time, in float32 where DeepSpeed has that: updates that
    half precision would round away are kept. All processes must ask; those that do not ``keep`` it get None. Tied
    weights are one tensor, as in the model.
    """
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            whole = _master(tensor) if _has_master(tensor) else whole_weight(tensor)
            known[id(tensor)] = whole.cpu() if keep else whole.new_empty(0)
        found[name] = known[id(tensor)]
    return found if keep else None


def _master(weight: Tensor) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    found = safe_get_full_fp32_param(weight)
    return whole_weight(weight) if found is None else found  # none of a weight that is not trained


def merged_weights(model: Module) -> dict[str, Tensor]:
    """Weights by the names of a checkpoint, adapters merged into them; tied ones by each of their names. Those without
    an adapter are the model's own tensors; the others are new ones, and the model stays as it is, to the last bit.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain = plain_model(model)
    found: dict[str, Tensor] = {}
    _collect_weights(plain, "", found)
    return dict(revert_weight_conversion(plain, found))


def without_wrapper(module: Module) -> Module:
    """The plain layer that computes what a layer of PEFT's does: its base with the adapters merged into a copy of it,
    or what is trained in its place as a whole. Other layers are themselves.
    """
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        trained = [] if module.disable_adapters else module.active_adapters
        return module.modules_to_save[trained[0]] if trained else module.original_module
    if not hasattr(module, "get_base_layer") or not hasattr(module, "merge"):
        return module
    if bool(module.merged) != module.disable_adapters:  # what computes is in the base already
        return module.get_base_layer()
    copied = copy.deepcopy(module)
    (copied.unmerge if module.merged else copied.merge)()
    return copied.get_base_layer()


def _collect_weights(module: Module, prefix: str, found: dict[str, Tensor]) -> None:
    module = without_wrapper(module)
    module._save_to_state_dict(found, prefix, False)
    for name, child in module.named_children():
        _collect_weights(child, f"{prefix}{name}.", found)


@torch.no_grad()
def fingerprint(model: nn.Module) -> tuple[Hashable, ...]:
    """A number for every weight, and what every adapter layer does with its own: other `merged_weights`, another
    fingerprint. (Torch's count of changes misses those that optimizers make behind its back.)
    """
    sums = [_sum_of_places(weight.detach()) for weight in (*model.parameters(), *model.buffers())]
    numbers = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    layers = (layer for layer in model.modules() if isinstance(getattr(layer, "disable_adapters", None), bool))
    return *numbers, *(_adapter_state(layer) for layer in layers)


def _sum_of_places(weight: Tensor) -> Tensor:
    """The bits of values at places ``p`` of a weight, read as integers and each times ``2 p + 1``, added up modulo
    2**64: every change of one value and, of up to 32 bits, every exchange of two different ones is another sum. In rows
    of ``m`` values, ``p = m i + j``, sums of rows and of columns are enough, and no product is as large as the weight.
    """
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.view(kind)
    bits = bits.flatten(1) if bits.dim() > 1 else bits.reshape(-1, 1)
    rows, columns = (torch.arange(length, device=weight.device) for length in bits.shape)
    of_rows, of_columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    return (2 * bits.shape[1] * rows * of_rows).sum() + ((2 * columns + 1) * of_columns).sum()


def _adapter_state(layer: Module) -> Hashable:
    return layer.disable_adapters, tuple(layer.active_adapters), bool(getattr(layer, "merged", False))


def scalar_head(model: Module) -> nn.Module:
    """The layer that turns hidden states into one score, of a sequence-classification model."""
    plain = plain_model(model)
    head = getattr(plain, "score", None) or getattr(plain, "classifier", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(plain).__name__} has no score head; load a reward model with "
            "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
        )
    labels = getattr(plain.config, "num_labels", 1)
    if labels != 1:
        raise ValueError(
            f"{type(plain).__name__} has num_labels={labels}, but a reward is one number; load it with num_labels=1"
        )
    return head


def _tokens_to_try(plain: Module) -> Tensor:
    """A few tokens ``(1, 6)``, none of them padding."""
    padding = plain.config.get_text_config().pad_token_id
    known = [token for token in range(8) if token != padding][:6]
    vocabulary = plain.config.get_text_config().vocab_size
    return torch.tensor([known], device=plain.device).clamp_max(vocabulary - 1)


@torch.no_grad()
def scores_split(model: Module) -> bool:
    """Whether a sequence classifier's score is its head applied to the last token's hidden state."""
    plain = plain_model(model).eval()
    ids = _tokens_to_try(plain)
    mask = torch.ones_like(ids)
    try:
        split = scores_at(plain, hidden_states(plain, ids, mask))[0, -1]
    except (IndexError, RuntimeError):  # a head that wants something else
        return False
    own = plain(input_ids=ids, attention_mask=mask).logits.float().reshape(-1)[0]
    return bool((own - split).abs() <= 1e-2 * own.abs() + 1e-3)


@torch.no_grad()
def is_causal(model: Module) -> bool:
    """Whether the hidden state at a token does not depend on the tokens after it."""
    plain = plain_model(model).eval()
    ids = _tokens_to_try(plain)
    mask = torch.ones_like(ids)
    other = torch.cat([ids[:, :-1], ids[:, :1]], -1)
    one, two = (hidden_states(plain, tokens, mask)[0, :-1].float() for tokens in (ids, other))
    return bool((one - two).abs().max() <= 1e-4 * one.abs().max())


def scores_at(model: Module, states: Tensor) -> Tensor:
    """Scores ``(...)`` of hidden states ``(..., H)`` under a sequence-classification model, in float32."""
    head = scalar_head(model)
    dtype = next(head.parameters()).dtype
    scores: Tensor = head(states if torch.is_autocast_enabled(states.device.type) else states.to(dtype))
    return scores.squeeze(-1).float()


REFERENCE_ADAPTER = "ref"
"""What TRL calls the copy that it keeps of an adapter which it goes on training."""


def starting_point(policy: Module, *, adapter_is_new: bool) -> Module | None:
    """What a policy that is about to be trained will be compared with, for `as_reference`: a copy of it, or None if it
    has an adapter. One that is not new is kept as it is now, frozen, as `REFERENCE_ADAPTER`, unless TRL has done so.
    """
    if not is_peft(policy):
        copied = copy.deepcopy(policy)
        # TRL puts functions there that go on calling the policy.
        for module in (copied, copied.get_output_embeddings()):
            vars(module).pop("forward", None)
        return copied
    if not adapter_is_new and REFERENCE_ADAPTER not in policy.peft_config:
        name = policy.active_adapter
        with _trainable_as_before(policy):
            policy.add_adapter(REFERENCE_ADAPTER, policy.peft_config[name])
        for own, parameter in list(policy.named_parameters()):
            if f".{name}." in own:
                kept = policy.get_parameter(own.replace(f".{name}.", f".{REFERENCE_ADAPTER}."))
                kept.requires_grad_(False).copy_(parameter.detach())
    return None


@contextmanager
def adapter_off(model: Module) -> Iterator[None]:
    """The model as it was before its PEFT adapter, for the duration."""
    with _trainable_as_before(model), model.disable_adapter():
        yield


@contextmanager
def as_reference(policy: Module, reference: Module | None) -> Iterator[Module]:
    """The model that a policy is compared with: the reference or, where that is None, the policy with its adapter off
    for the duration, or with `REFERENCE_ADAPTER` where it has one.
    """
    if reference is not None:
        yield reference
    elif REFERENCE_ADAPTER in policy.peft_config:
        active = policy.active_adapter
        with _trainable_as_before(policy):
            policy.set_adapter(REFERENCE_ADAPTER)
            try:
                yield policy
            finally:
                policy.set_adapter(active)
    else:
        with adapter_off(policy):
            yield policy


@contextmanager
def _trainable_as_before(model: Module) -> Iterator[None]:
    """Whenever PEFT switches adapters, it makes all of the active one trainable, also what was frozen; that is undone
    at the end.
    """
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, before in trained:
            parameter.requires_grad_(before)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """The model without dropout, for the duration."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def cudnn_attention_disabled() -> Iterator[None]:
    """No cuDNN attention for the duration: for forward passes that gradients are taken of, and those whose results they
    are compared with.

    From torch 2.11 on it is the first choice on Hopper GPUs. Under a mask its backward pass gives NaN for the queries'
    gradient, from a finite loss, where the number of tokens is 64 more than a multiple of 128 and a row's log-sum-exp
    is below -88 (pytorch issue 196678). Batches come in all lengths, so that a long run may meet it. The
    memory-efficient and the flash kernels do the same work.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout probability set to 0: old and new probabilities of a token must be comparable."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # attention_dropout, hidden_dropout, layerdrop, ...
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
