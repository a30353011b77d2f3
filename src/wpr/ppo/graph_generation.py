"""Sampling at the speed of a GPU: a cache of fixed size, and one CUDA graph a token.

`generate` launches a thousand small kernels a token, and a small model waits for the host. Here prompts are read as
usual; then a step (forward pass, seeded draw, flags of rows that ended; `fixed_cache`) is captured once and replayed
for every token. The host looks at the flags every `LOOK` tokens; rows that ended leave the batch when half of it has,
which takes a graph for each bucket of B, B/2, B/4, ... rows.

The graph reads the policy's weights in place: an optimizer step needs no new capture. Under autocast, and where weights
are held in parts, it reads a copy that is refreshed once a rollout (`policy_copy`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import evaluating, is_in_parts, plain_model
from wpr.ppo.fixed_cache import ATTENTION, FULL, SLIDING, State, differs, use_grouped_attention
from wpr.ppo.generation import (
    Generation,
    GenerationError,
    Sampling,
    SeededChoice,
    TransformersGeneration,
    generate_in_parts,
)
from wpr.ppo.policy_copy import PolicyCopy, needs_copy, why_not_copied
from wpr.ppo.rollout import Prompts, Responses, responses_from_tokens

logger = logging.getLogger(__name__)

LOOK = 16
"""Tokens between two looks at which rows have ended."""

PLACES = 64
"""The cache has a multiple of so many places, so that prompts of about the same length share a graph."""

KEPT = 0.1
"""Share of a GPU's memory that may stay taken between rollouts, where training needs it."""


class GraphGeneration:
    """A cache of fixed size and CUDA graphs; without a GPU the same steps one by one, for tests.

    Where a model cannot be run in this way, it says so once and uses `fallback`. What it holds (cache, graphs, a copy
    of the policy) stays for the next call if it is small, and is freed otherwise.

    fallback: by default transformers' `generate`. say: where it says what it does.
    graphs: capture them. compiled: of what torch.compile makes of the model, which takes a compiler and a minute.
    kept_bytes: how much may be held between calls; by default a share of the GPU's memory, `KEPT`.
    """

    def __init__(
        self,
        fallback: Generation | None = None,
        say: Callable[[str], None] = logger.warning,
        graphs: bool = True,
        compiled: bool = False,
        kept_bytes: float | None = None,
    ) -> None:
        self.fallback = fallback or TransformersGeneration()
        self.say, self.drawer = say, FixedDrawer(graphs, compiled)
        self.kept_bytes = kept_bytes
        self.rows: int | None = None  # that fit the memory at a time, where not all did
        self._copy: tuple[Any, Any, PolicyCopy] | None = None  # of which policy, in which type
        self._tried: tuple[Any, str | None] | None = None  # which model, and what came of it
        self._depth, self._fresh = 0, None  # scopes that are open, and the copy that is of now within them
        self._said: set[str] = set()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """For the duration the policy stays as it is: its weights are copied once, and what is held stays held."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._fresh = None
                if self._held_bytes() > self._kept_bytes():
                    self.free()

    @torch.no_grad()
    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """See `Generation.generate`."""
        with self.rollout():
            model, device = plain_model(getattr(policy, "policy", policy)), prompts.input_ids.device
            runs = self._runs(model, prompts.input_ids.shape[1] + sampling.max_new_tokens, device)
            if runs is None:
                return self.fallback.generate(policy, prompts, sampling, seeds)
            return self._draw(runs, prompts, sampling, seeds)

    def _runs(self, model: Any, length: int, device: torch.device) -> Any | None:
        """What is run for a policy: itself, or a copy; None, and it is said why, where neither can be."""
        copied = needs_copy(model, device)
        obstacle = why_not(model, length) or (why_not_copied(model) if copied else None)
        if obstacle is None:
            runs = self._refreshed(model, device) if copied else model
            obstacle = "there is no memory for a copy of the policy" if runs is None else self._differs(runs, device)
            if obstacle is None:
                return runs
        self._note(f"responses are drawn by transformers' generate: {obstacle}")
        return None

    def _differs(self, runs: Any, device: torch.device) -> str | None:
        """What a trial of the model shows, once."""
        if self._tried is None or self._tried[0] is not runs:
            self._tried = (runs, differs(runs, device))
        return self._tried[1]

    def _draw(self, runs: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        size = min(self.rows or len(prompts), len(prompts))
        while True:
            try:
                return generate_in_parts(self.drawer, runs, prompts, sampling, seeds, size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            self.drawer.free()  # here, where the error's traceback holds nothing any more
            self.rows = size = (size + 1) // 2
            self._note(f"{len(prompts)} responses do not fit the GPU's memory at a time; {size} are drawn instead")

    def free(self) -> None:
        """Give the memory back; the next call captures its graphs again."""
        self._copy = self._tried = self._fresh = None
        self.drawer.free()

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _refreshed(self, model: Any, device: torch.device) -> Any | None:
        """A copy with the weights of now; None where a process has no memory for one."""
        kind = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        if self._copy is None or self._copy[:2] != (model, kind):
            self.free()  # its memory goes before the new one's is taken
            made = _copy_if_it_fits(model, device)
            if not _everyone(made is not None, is_in_parts(model), device) or made is None:
                return None
            self._copy = (model, kind, made)
        copied = self._copy[2]
        if self._fresh is not model:
            copied.refresh(model)
            self._fresh = model
        return copied.model

    def _held_bytes(self) -> int:
        copied = [] if self._copy is None else [*self._copy[2].model.parameters()]
        return sum(values.nbytes for values in (*copied, *self.drawer.held))

    def _kept_bytes(self) -> float:
        held = self.drawer.held
        if self.kept_bytes is not None or not held or not held[0].is_cuda:
            return math.inf if self.kept_bytes is None else self.kept_bytes
        return KEPT * torch.cuda.get_device_properties(held[0].device).total_memory


class FixedDrawer:
    """Draws from a model that can be run with a cache of fixed size; a `Generation` of its own."""

    def __init__(self, graphs: bool = True, compiled: bool = False) -> None:
        self.graphs, self.compiled = graphs, compiled
        self.state: State | None = None
        self._addresses: tuple[int, ...] = ()

    @property
    def held(self) -> list[Tensor]:
        """The cache."""
        layers = self.state.cache.layers if self.state is not None else []
        return [values for layer in layers if layer.is_initialized for values in (layer.keys, layer.values)]

    def free(self) -> None:
        self.state = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def generate(self, model: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """See `Generation.generate`; ``model``: a transformers model without wrappers."""
        device, (batch, length) = prompts.input_ids.device, prompts.input_ids.shape
        precision = _precision(device)
        with precision():
            state = self._state(model, batch, length + sampling.max_new_tokens, sampling, device)
            choice = SeededChoice(seeds, sampling.max_new_tokens, prompts.input_ids)
            try:
                with evaluating(model), use_grouped_attention(model):
                    return self._loop(state, prompts, sampling, choice, precision)
            except GenerationError:
                self.state = None  # its cache has NaN, and a masked NaN is still one
                raise

    def _loop(
        self, state: State, prompts: Prompts, sampling: Sampling, choice: SeededChoice, precision: Any
    ) -> Responses:
        batch, rows = len(prompts), _bucket(len(prompts), state.batch)
        order = torch.arange(batch, device=prompts.input_ids.device)
        found = [values.new_zeros(batch, *values.shape[1:]) for values in self._results(state)]
        state.read(prompts, choice, sampling)
        captured = self.graphs and state.ids.is_cuda
        for step in range(1, sampling.max_new_tokens):
            if step % LOOK == 0:
                going = (~state.ended[: len(order)]).nonzero().squeeze(-1)  # here the host waits
                if not len(going):
                    break
                if (fewer := _bucket(len(going), state.batch)) < rows:
                    self._store(state, found, order)
                    state.keep(going)
                    order, rows = order[going], fewer
            if captured:
                state.replay(rows, sampling, precision)
            else:
                state.advance(rows, sampling)
        self._store(state, found, order)
        tokens, choice.bad_step, choice.bad_value = found
        choice.check()
        tokens = tokens[:, : sampling.max_new_tokens]  # the state may have room for more
        responses = responses_from_tokens(tokens, sampling.eos)
        width = int(responses.mask.sum(-1).max()) if sampling.eos else tokens.shape[1]
        return Responses(tokens[:, :width], responses.mask[:, :width], responses.finished)

    def _results(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        return state.tokens, state.bad_step, state.bad_value

    def _store(self, state: State, found: list[Tensor], order: Tensor) -> None:
        for values, kept in zip(self._results(state), found, strict=True):
            kept[order] = values[: len(order)]

    def _state(self, model: Any, batch: int, places: int, sampling: Sampling, device: torch.device) -> State:
        """That of before, if it is large enough, the weights lie where they lay and the same adapters are on."""
        addresses = tuple(values.data_ptr() for values in (*model.parameters(), *model.buffers()))
        addresses += tuple(hash(mode) for mode in _adapter_modes(model))
        old, length = self.state, sampling.max_new_tokens
        fits = old is not None and old.model is model and addresses == self._addresses
        if old is None or not (fits and old.batch >= batch and old.places >= places and old.length >= length):
            self.state = None
            if fits and old is not None:
                batch, places, length = max(batch, old.batch), max(places, old.places), max(length, old.length)
            old = None  # its memory goes before the new one's is taken
            places = PLACES * math.ceil(places / PLACES)
            old = self.state = State(model, batch, places, length, device, self.compiled)
            self._addresses = addresses
        return old


def why_not(model: Any, length: int) -> str | None:
    """Why a model cannot be run with a cache of fixed size for sequences of this length, if so."""
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or [FULL]) - {FULL, SLIDING}
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    moving = [kind for kind in ("dynamic", "longrope") if f"'{kind}'" in rope]
    chunk = getattr(config, "attention_chunk_size", None)
    if unknown == {"chunked_attention"} and chunk and length <= chunk:
        unknown = set()
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} has no cache of fixed size"
    if unknown:
        return f"{type(model).__name__} has layers of another kind ({', '.join(sorted(unknown))})"
    if moving:
        return f"its positions ({moving[0]}) change with the length of a sequence"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"its attention is {config._attn_implementation}, not sdpa"
    return None


def _adapter_modes(model: Any) -> Iterator[tuple[Any, ...]]:
    """Which adapters PEFT's layers use."""
    for layer in model.modules():
        if hasattr(layer, "base_layer"):
            yield tuple(layer.active_adapters), bool(layer.disable_adapters), bool(layer.merged)


def _copy_if_it_fits(model: Any, device: torch.device) -> PolicyCopy | None:
    try:
        return PolicyCopy(model, device)
    except torch.OutOfMemoryError:
        return None


def _everyone(fine: bool, together: bool, device: torch.device) -> bool:
    """Whether all processes are fine, where they must do the same."""
    if not together or not torch.distributed.is_initialized():
        return fine
    flag = torch.tensor([int(fine)], device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
    return bool(flag)


def _bucket(rows: int, batch: int) -> int:
    """The smallest of batch, batch/2, batch/4, ... that has room for these rows."""
    while batch > 1 and (batch + 1) // 2 >= rows:
        batch = (batch + 1) // 2
    return batch


def _precision(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Autocast as it is now, without a cache of converted weights: what a graph reads must not be freed."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    kind = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=kind, cache_enabled=False)
