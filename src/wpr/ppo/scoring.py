"""From hidden states to penalties: the logits of neither model ever exist as a whole.

Notation for shapes: ``P`` positions, ``p`` positions of a slice, ``H`` hidden size (the two models may differ in it),
``V`` vocabulary.

Logits are made for a slice of positions, reduced to what the regularizer needs, and dropped. What a language model does
between its head and its logits (soft-capping, scaling; tied or untied heads) is done by `language_models.logits_of`.

Why not one kernel that multiplies and reduces at once? It would save one write and two reads of the logits, which is
little beside the products (on an H200, 2,048 positions, two heads of 256,000 x 2,048: 5.6 ms for the products, 0.6 ms
to read both logits once); and the most likely tokens, known only after a whole row has been seen, would have to be
multiplied again. Slices get the same memory from the library's matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import Module, as_reference, logits_of, plain_model
from wpr.ppo.measures import LogitsError, Measures, reading_once, token_statistics
from wpr.regularizers import Regularizer, RegularizerOutput
from wpr.regularizers.regularizer import TwoPhaseRegularizer


def slice_count(positions: int, vocabulary: int, memory_mb: float, bytes_per_logit: int) -> int:
    """In how many slices positions are scored, so that a slice of the logits fits the memory; 1 for no positions.

    bytes_per_logit: of all copies of a logit, in both models, that exist at a time.
    """
    per_slice = max(1, int(memory_mb * 2**20 / (bytes_per_logit * vocabulary)))
    return max(1, math.ceil(positions / per_slice))


def slices_of(count: int, slices: int) -> Iterator[slice]:
    """``slices`` contiguous parts of ``count`` positions, as equal as can be; some are empty if there are more parts
    than positions.
    """
    bounds = [math.floor(count * part / slices) for part in range(slices + 1)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


def logits_in_slices(
    policy: Module,
    policy_states: Tensor,
    reference: Module | None,
    reference_states: Tensor,
    slices: int,
    temperature: float = 1.0,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slice by slice: which positions, and the logits ``(p, V)`` of policy and reference, from states ``(P, H)``.

    reference: None is the policy with its adapter off.

    Delete the logits before the next slice is asked for, or two slices exist at a time.
    """
    for rows in slices_of(len(policy_states), slices):
        policy_logits = logits_of(policy, policy_states[rows], temperature)
        with as_reference(policy, reference) as model:
            reference_logits = logits_of(model, reference_states[rows], temperature)
        yield rows, policy_logits, reference_logits
        del policy_logits, reference_logits


class SlicedPenalties:
    """The penalties of one regularizer, for positions whose logits come slice by slice."""

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self._slices: list[Any] = []

    def add(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> None:
        """The next slice: logits ``(p, V)`` and sampled tokens ``(p,)``."""
        two_phases = isinstance(self.regularizer, TwoPhaseRegularizer)
        work = self.regularizer.reduce if two_phases else self.regularizer  # type: ignore[attr-defined]
        self._slices.append(work(policy_logits, reference_logits, tokens))

    def result(self) -> RegularizerOutput:
        """Of all positions, in the order in which they came. There must have been a slice."""
        if isinstance(self.regularizer, TwoPhaseRegularizer):
            return self.regularizer.finish(self._slices)
        return RegularizerOutput.join(self._slices)


class PositionScorer:
    """What a rollout keeps of full-vocabulary logits that come slice by slice.

    error: the first one that was met, in the logits or in the penalty. It is not raised: under sharding the other
        processes wait in the layers that come next. positions: how many came so far.
    """

    def __init__(
        self,
        regularizer: Regularizer,
        reference: Module | None = None,
        eval_regularizers: Mapping[str, Regularizer] | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Start without positions.

        reference: whose logits the policy's are compared with; None is the policy with its adapter off.
        eval_regularizers: other regularizers, of which the divergence is wanted.
        timed: a context that the work is done in.
        """
        self.reference, self.timed = reference, timed
        self.eval_regularizers = dict(eval_regularizers or {})
        self.error: LogitsError | ValueError | None = None
        self.positions = 0
        self._statistics: list[Tensor] = []
        self._penalties = SlicedPenalties(regularizer)
        self._divergences: dict[str, list[Tensor]] = {name: [] for name in self.eval_regularizers}

    @torch.no_grad()
    def add(self, tokens: Tensor, policy_logits: Tensor, reference_logits: Tensor) -> None:
        """The next slice: sampled tokens ``(p,)`` and logits ``(p, V)`` of both models."""
        first, self.positions = self.positions, self.positions + len(tokens)
        if self.error is not None or len(tokens) == 0:
            return
        try:
            with self.timed(), reading_once(policy_logits, reference_logits):
                self._statistics.append(token_statistics(policy_logits, reference_logits, tokens, first))
                for name, other in self.eval_regularizers.items():
                    found = other(policy_logits, reference_logits, tokens)
                    self._divergences[name].append(found.divergence.float())
                self._penalties.add(policy_logits, reference_logits, tokens)
        except (LogitsError, ValueError) as error:
            self.error = error

    @torch.no_grad()
    def result(self) -> Measures:
        """Of all positions, in the order in which they came. There must have been one, and no error."""
        with self.timed():
            penalties = self._penalties.result()
        log_prob, kl, entropy = torch.cat(self._statistics, -1)
        return Measures(
            log_prob=log_prob,
            penalty=penalties.penalty.float(),
            divergence=penalties.divergence.float(),
            kl=kl,
            entropy=entropy,
            diagnostics={name: values.float() for name, values in penalties.diagnostics.items()},
            eval_regularizers={name: torch.cat(parts) for name, parts in self._divergences.items()},
        )


@torch.no_grad()
def from_hidden(
    regularizer: Regularizer,
    policy: Module,
    policy_states: Tensor,
    reference: Module | None,
    reference_states: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    memory_mb: float = 512.0,
) -> RegularizerOutput:
    """The same as ``regularizer(policy logits / temperature, reference logits / temperature, tokens)``.

    policy, reference: causal language models of transformers, for their heads; also wrapped by PEFT. A reference of
        None is the policy with its adapter off.
    policy_states, reference_states: ``(P, H)`` last hidden states, see `language_models.hidden_states`.
    tokens: ``(P,)`` the sampled tokens.
    memory_mb: of the logits of both models that exist at a time.

    Example::

        states = [hidden_states(model, ids, mask)[:, :-1].flatten(0, 1) for model in (policy, reference)]
        out = from_hidden(Wasserstein(geometry), policy, states[0], reference, states[1], ids[:, 1:].flatten())
    """
    slices = checked_slices(policy, policy_states, reference_states, memory_mb, temperature)
    if tokens.shape != policy_states.shape[:1]:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} for {len(policy_states)} positions; pass one token id per position"
        )
    penalties = SlicedPenalties(regularizer)
    for rows, policy_logits, reference_logits in logits_in_slices(
        policy, policy_states, reference, reference_states, slices, temperature
    ):
        with counted_from(rows.start):
            penalties.add(policy_logits, reference_logits, tokens[rows])
        del policy_logits, reference_logits
    return penalties.result()


def checked_slices(
    policy: Module, policy_states: Tensor, reference_states: Tensor, memory_mb: float, temperature: float
) -> int:
    """In how many slices these states ``(P, H)`` are scored; refuse what does not fit together."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be a positive number; 1 leaves the logits as they are")
    if policy_states.ndim != 2 or reference_states.ndim != 2 or len(policy_states) != len(reference_states):
        raise ValueError(
            f"hidden states {tuple(policy_states.shape)} and {tuple(reference_states.shape)} must be (positions, "
            "hidden size) of the same positions; flatten batch and time first, and drop padding"
        )
    if not memory_mb > 0:
        raise ValueError(
            f"memory_mb={memory_mb} must be positive; set it to the megabytes that the logits of both models may take"
        )
    weight, device = plain_model(policy).get_output_embeddings().weight, policy_states.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return slice_count(len(policy_states), weight.shape[0], memory_mb, 2 * kind.itemsize)


@contextmanager
def counted_from(start: int) -> Iterator[None]:
    """Errors name positions of a slice; say where the slice starts."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (positions are counted from {start})") from error
