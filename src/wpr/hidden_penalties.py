"""Penalties straight from hidden states: the logits of neither model ever exist as a whole.

Notation for shapes: ``P`` positions, ``H`` hidden size (the two models may differ in it), ``V`` vocabulary.

Logits are made for a slice of positions, reduced to what the regularizer needs, and dropped. What a language model does
between its head and its logits (soft-capping, scaling; tied or untied heads) is done by `language_models.logits_of`.

Why not one kernel that multiplies and reduces at once? It would save one write and two reads of the logits, which is
little beside the products (on an H200, 2,048 positions, two heads of 256,000 x 2,048: 5.6 ms for the products, 0.6 ms
to read both logits once); and the likeliest tokens, known only after a whole row has been seen, would have to be
multiplied again. Slices get the same memory from the library's matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wpr.language_models import Module, logits_of, plain_model
from wpr.regularizers import Regularizer, RegularizerOutput
from wpr.regularizers.regularizer import TwoPhaseRegularizer
from wpr.transport.support import Support


@torch.no_grad()
def from_hidden(
    regularizer: Regularizer,
    policy: Module,
    policy_states: Tensor,
    reference: Module,
    reference_states: Tensor,
    tokens: Tensor,
    *,
    memory_mb: float = 512.0,
) -> RegularizerOutput:
    """The same as ``regularizer(policy logits, reference logits, tokens)``.

    policy, reference: causal language models of transformers, for their heads; also wrapped by PEFT.
    policy_states, reference_states: ``(P, H)`` last hidden states, see `language_models.hidden_states`.
    tokens: ``(P,)`` the sampled tokens.
    memory_mb: of the logits of both models that exist at a time.

    Example::

        states = [hidden_states(model, ids, mask)[:, :-1].flatten(0, 1) for model in (policy, reference)]
        out = from_hidden(Wasserstein(geometry), policy, states[0], reference, states[1], ids[:, 1:].flatten())
    """
    if policy_states.ndim != 2 or reference_states.ndim != 2 or len(policy_states) != len(reference_states):
        raise ValueError(
            f"hidden states {tuple(policy_states.shape)} and {tuple(reference_states.shape)} must be (positions, "
            "hidden size) of the same positions; flatten batch and time first, and drop padding"
        )
    if tokens.shape != policy_states.shape[:1]:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} for {len(policy_states)} positions; pass one token id per position"
        )
    if not memory_mb > 0:
        raise ValueError(
            f"memory_mb={memory_mb} must be positive; set it to the megabytes that the logits of both models may take"
        )
    weight = plain_model(policy).get_output_embeddings().weight
    step = max(1, int(memory_mb * 2**20) // (2 * weight.shape[0] * weight.element_size()))
    supports: list[Support] = []
    outputs: list[RegularizerOutput] = []
    for start in range(0, max(1, len(tokens)), step):
        rows = slice(start, start + step)
        logits = logits_of(policy, policy_states[rows]), logits_of(reference, reference_states[rows])
        try:
            if isinstance(regularizer, TwoPhaseRegularizer):
                supports.append(regularizer.reduce(*logits, tokens[rows]))
            else:
                outputs.append(regularizer(*logits, tokens[rows]))
        except ValueError as error:
            raise ValueError(f"{error} (positions are counted from {start})") from error
        del logits
    if isinstance(regularizer, TwoPhaseRegularizer):
        return regularizer.finish(Support.join(supports))
    return RegularizerOutput(
        torch.cat([out.penalty for out in outputs]),
        torch.cat([out.divergence for out in outputs]),
        {name: torch.cat([out.diagnostics[name] for out in outputs]) for name in outputs[0].diagnostics},
    )
