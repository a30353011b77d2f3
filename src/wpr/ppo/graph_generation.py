"""Sampling at the speed of a GPU: a cache of fixed size, and one CUDA graph a token.

Notation for shapes: ``B`` responses, ``P`` prompt tokens, ``L`` tokens of a response, ``C`` places of the cache, ``R``
rows of a bucket, ``V`` vocabulary.

`generate` launches a thousand small kernels a token, and a small model waits for the host. Here prompts are read as
usual; then a step (forward pass, seeded draw, flags of rows that ended) is captured once and replayed for every token.
All that a step reads or writes lies in tensors that stay where they are: the last tokens, their positions, the slot of
the cache that comes next, which slots hold a token, the uniform numbers of all steps. So there is nothing for the host
to do between tokens. It looks at the flags every `LOOK` tokens; rows that ended leave the batch when half of it has,
which takes a graph for each bucket of R = B, B/2, B/4, ... rows.

The graph reads the policy's weights in place: an optimizer step needs no new capture. Under autocast a copy of the
policy, its linear layers in autocast's type, is refreshed once a rollout instead, so that weights are not converted
for every token; its arithmetic is the same.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wpr.language_models import is_partitioned, plain_model
from wpr.ppo.distributed import keep_as_autocast_reads
from wpr.ppo.generation import (
    Generation,
    Sampling,
    SeededChoice,
    TransformersGeneration,
    generate_in_parts,
    warpers,
)
from wpr.ppo.rollout import Prompts, Responses, responses_from_tokens

logger = logging.getLogger(__name__)

LOOK = 16
"""Tokens between two looks at which rows have ended."""

PLACES = 64
"""The cache has a multiple of so many places, so that prompts of about the same length share a graph."""

ATTENTION = "wpr_grouped_sdpa"


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`sdpa` in which the query heads ``(R, h, 1, d)`` that share a key head ``(R, g, C, d)`` are its queries, in the
    place of copies of the keys; other shapes as transformers has them.
    """
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] != 1 or heads == groups:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    together = query.reshape(len(query), groups, heads // groups, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        together, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return out.reshape(len(query), 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, grouped_attention)


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values ``(B, heads, C, d)`` of a layer: a prompt is written at the start, a token at the slot ``(1,)``,
    which is a tensor that all layers share.
    """

    def __init__(self, batch: int, places: int, slot: Tensor) -> None:
        super().__init__()
        self.batch, self.places, self.slot = batch, places, slot
        self.reading = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self.batch, states.shape[1], self.places, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, length = key_states.shape[0], key_states.shape[2]
        if self.reading:
            self.keys[:rows, :, :length], self.values[:rows, :, :length] = key_states, value_states
            return key_states, value_states
        keys, values = self.keys[:rows], self.values[:rows]
        keys.index_copy_(2, self.slot, key_states)
        values.index_copy_(2, self.slot, value_states)
        return keys, values

    def keep(self, rows: Tensor) -> None:
        """Move these rows to the front."""
        for states in (self.keys, self.values):
            states[: len(rows)] = states[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.places, 0

    def get_seq_length(self, *_: Any) -> int:
        return 0  # positions and masks are given

    def get_max_length(self) -> int:
        return self.places

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class State:
    """What a step reads and writes, for up to ``batch`` rows, ``places`` of the cache and ``length`` new tokens."""

    def __init__(self, model: Any, batch: int, places: int, length: int, device: torch.device) -> None:
        self.model, self.batch, self.places, self.length = model, batch, places, length
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.held = torch.zeros(batch, 1, 1, places, dtype=torch.bool, device=device)
        self.slot, self.step = torch.zeros(2, 1, dtype=torch.long, device=device)
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[FixedLayer(batch, places, self.slot) for _ in range(layers)])
        self.uniforms = torch.zeros(batch, length, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.bad_step = torch.full((batch,), -1, device=device)
        self.bad_value = torch.zeros(batch, device=device)
        self.ends: dict[Sampling, Tensor] = {}
        self.graphs: dict[tuple[int, Sampling], Any] = {}
        self.pool: Any = None

    @property
    def per_row(self) -> list[Tensor]:
        return [
            self.ids, self.positions, self.held, self.uniforms, self.tokens, self.ended, self.bad_step, self.bad_value
        ]  # fmt: skip

    def read(self, prompts: Prompts, choice: SeededChoice, sampling: Sampling) -> None:
        """Read the prompts, and draw the first token of each."""
        ids, mask = prompts.input_ids, prompts.attention_mask.bool()
        rows, length = ids.shape
        self.ends.setdefault(sampling, torch.tensor(sampling.eos, dtype=torch.long, device=ids.device))
        self.held.zero_()
        self.held[:rows, 0, 0, :length] = mask
        self.held[rows:, ..., 0] = True  # rows without a prompt attend to something, too
        self.uniforms[:rows, : sampling.max_new_tokens] = choice.uniforms
        self.ended.fill_(True)[:rows] = False
        self.bad_step.fill_(-1)
        self.step.zero_()
        self.slot.fill_(length)
        self.positions.zero_()[:rows] = mask.sum(-1, keepdim=True)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding attends to itself: with nothing to attend to it would be NaN, and a masked NaN is still one.
        allowed = (causal & mask.unsqueeze(1)) | torch.eye(length, dtype=torch.bool, device=ids.device)
        with self._reading():
            logits = self._logits(ids, allowed.unsqueeze(1), (mask.long().cumsum(-1) - 1).clamp_min(0))
        self._draw(logits, rows, sampling)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """For the duration, keys and values that come are those of prompts."""
        for layer in self.cache.layers:
            layer.reading = True
        try:
            yield
        finally:
            for layer in self.cache.layers:
                layer.reading = False

    def advance(self, rows: int, sampling: Sampling) -> None:
        """One more token of the first ``rows`` rows."""
        self.held[:rows].index_fill_(3, self.slot, True)
        logits = self._logits(self.ids[:rows], self.held[:rows], self.positions[:rows])
        self.slot.add_(1)
        self.positions[:rows].add_(1)
        self._draw(logits, rows, sampling)

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Of the last tokens ``(R, V)``, in float32."""
        out = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        last: Tensor = out.logits[:, -1].to(torch.float32, copy=True)
        return last

    def _draw(self, scores: Tensor, rows: int, sampling: Sampling) -> None:
        eos = self.ends[sampling]
        if sampling.min_new_tokens and sampling.eos:
            barred = torch.where(self.step < sampling.min_new_tokens, -torch.inf, scores.index_select(1, eos))
            scores = scores.index_copy(1, eos, barred)
        for warp in warpers(sampling):
            scores = warp(None, scores)
        drawn, bad = SeededChoice.quantile(scores, self.uniforms[:rows].index_select(1, self.step))
        bad &= self.bad_step[:rows] < 0
        self.bad_step[:rows] = torch.where(bad, self.step, self.bad_step[:rows])
        self.bad_value[:rows] = torch.where(bad, scores.amax(-1), self.bad_value[:rows])
        self.tokens[:rows].index_copy_(1, self.step, drawn)
        self.ids[:rows] = drawn
        self.ended[:rows] |= (drawn == eos).any(-1)
        self.step.add_(1)

    def keep(self, rows: Tensor) -> None:
        """Move these rows to the front."""
        for layer in self.cache.layers:
            layer.keep(rows)
        for values in self.per_row:
            values[: len(rows)] = values[rows]
        self.ended[len(rows) :] = True

    def replay(self, rows: int, sampling: Sampling, precision: Callable[[], AbstractContextManager[None]]) -> None:
        """One more token, by the graph for so many rows, which is captured if there is none."""
        if (rows, sampling) not in self.graphs:
            self.graphs[rows, sampling] = self._capture(rows, sampling, precision)
        self.graphs[rows, sampling].replay()

    def _capture(self, rows: int, sampling: Sampling, precision: Callable[[], AbstractContextManager[None]]) -> Any:
        changed = [*self.per_row, self.slot, self.step]
        before = [values.clone() for values in changed]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside), precision():  # libraries allocate what they need at their first call
            self.advance(rows, sampling)
        torch.cuda.current_stream().wait_stream(beside)
        for values, old in zip(changed, before, strict=True):
            values.copy_(old)
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with _no_garbage(), torch.cuda.graph(graph, pool=self.pool), precision():
            self.advance(rows, sampling)
        return graph


class GraphGeneration:
    """A static cache and CUDA graphs; without a GPU the same steps one by one, for tests.

    It holds its cache of keys and values, and the memory of its graphs, from one call to the next. Where a model cannot
    be run in this way, it says so once and uses `fallback`.
    """

    def __init__(
        self, fallback: Generation | None = None, say: Callable[[str], None] = logger.warning, graphs: bool = True
    ) -> None:
        self.fallback = fallback or TransformersGeneration()
        self.say, self.graphs = say, graphs
        self.state: State | None = None
        self._copy: tuple[Any, Any] | None = None  # of which model, and what
        self._addresses: tuple[int, ...] = ()
        self._said: set[str] = set()

    @torch.no_grad()
    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """See `Generation.generate`."""
        model = plain_model(getattr(policy, "policy", policy))
        length = prompts.input_ids.shape[1] + sampling.max_new_tokens
        obstacle = why_not(model, length)
        if obstacle is not None:
            self._note(f"responses are drawn by transformers' generate: {obstacle}")
            return self.fallback.generate(policy, prompts, sampling, seeds)
        try:
            return self._generate(model, prompts, sampling, seeds)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise
            self.free()
            half = (len(prompts) + 1) // 2
            self._note(f"{len(prompts)} responses do not fit the GPU's memory at a time; {half} are drawn instead")
        return generate_in_parts(self, policy, prompts, sampling, seeds, half)

    def free(self) -> None:
        """Give the memory back; the next call captures its graphs again."""
        self.state = self._copy = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _generate(self, model: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        device, (batch, length) = prompts.input_ids.device, prompts.input_ids.shape
        precision = _precision(device)
        with precision():
            runs = self._weights(model, device)
            state = self._state(runs, batch, length + sampling.max_new_tokens, sampling, device)
            choice = SeededChoice(seeds, sampling.max_new_tokens, prompts.input_ids)
            training = runs.training
            runs.eval()
            try:
                with _attention(runs):
                    return self._loop(state, prompts, sampling, choice, precision)
            finally:
                runs.train(training)

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
        responses = responses_from_tokens(tokens, sampling.eos)
        width = int(responses.mask.sum(-1).max()) if sampling.eos else tokens.shape[1]
        return Responses(tokens[:, :width], responses.mask[:, :width], responses.finished)

    def _results(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        return state.tokens, state.bad_step, state.bad_value

    def _store(self, state: State, found: list[Tensor], order: Tensor) -> None:
        for values, kept in zip(self._results(state), found, strict=True):
            kept[order] = values[: len(order)]

    def _weights(self, model: Any, device: torch.device) -> Any:
        """The model that is run: itself or, under autocast, a copy in its precision with the weights of now."""
        if not torch.is_autocast_enabled(device.type):
            return model
        if self._copy is None or self._copy[0] is not model:
            self.state = None
            made = copy.deepcopy(model).requires_grad_(False)
            keep_as_autocast_reads(made, torch.get_autocast_dtype(device.type), head=True)
            self._copy = (model, made)
        made = self._copy[1]
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        kept = dict(made.named_parameters(remove_duplicate=False)) | dict(made.named_buffers(remove_duplicate=False))
        torch._foreach_copy_([kept[name] for name in own], [values.detach() for values in own.values()])
        return made

    def _state(self, model: Any, batch: int, places: int, sampling: Sampling, device: torch.device) -> State:
        """That of before, if it is large enough and the weights lie where they lay."""
        addresses = tuple(values.data_ptr() for values in (*model.parameters(), *model.buffers()))
        old, length = self.state, sampling.max_new_tokens
        fits = old is not None and old.model is model and addresses == self._addresses
        if old is None or not (fits and old.batch >= batch and old.places >= places and old.length >= length):
            self.state = None
            if fits and old is not None:
                batch, places, length = max(batch, old.batch), max(places, old.places), max(length, old.length)
            old = None  # its memory goes before the new one's is taken
            old = self.state = State(model, batch, PLACES * math.ceil(places / PLACES), length, device)
            self._addresses = addresses
        return old


def default_generation(device: torch.device, *, synced: bool = False) -> Generation:
    """Graphs on a GPU, where every process can go at its own pace; else transformers' generate."""
    plain = TransformersGeneration(synced)
    return GraphGeneration(plain) if device.type == "cuda" and not synced else plain


def why_not(model: Any, length: int) -> str | None:
    """Why a model cannot be run with a cache of fixed size for sequences of this length, if so."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    usual = {"full_attention", "sliding_attention", "chunked_attention"}
    if is_partitioned(model) or any(type(weight).__name__ == "DTensor" for weight in model.parameters()):
        return "its weights are held in parts"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} has no cache of fixed size"
    if types - usual:
        return f"{type(model).__name__} has layers of another kind ({', '.join(sorted(types - usual))})"
    if types != {"full_attention"} and any(window and length > window for window in windows):
        return f"{length} tokens are more than a layer's window of {min(filter(None, windows))}"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"its attention is {config._attn_implementation}, not sdpa"
    return None


def _bucket(rows: int, batch: int) -> int:
    """The smallest of batch, batch/2, batch/4, ... that has room for these rows."""
    while batch > 1 and (batch + 1) // 2 >= rows:
        batch = (batch + 1) // 2
    return batch


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect it now, and none for the duration: a graph that is destroyed while another is captured breaks that."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """`grouped_attention` for the duration."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _precision(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Autocast as it is now, without a cache of converted weights: what a graph reads must not be freed."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    kind = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=kind, cache_enabled=False)
