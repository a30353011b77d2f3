"""One token after the other at fixed places in memory: a cache of fixed size, and the step that draws the next token.

Notation for shapes: ``B`` responses, ``P`` prompt tokens, ``L`` tokens of a response, ``C`` places of the cache, ``R``
rows that go on, ``V`` vocabulary.

All that a step reads or writes lies in tensors that stay where they are: the last tokens, their positions, the slot of
the cache that comes next, which slots hold a token, the uniform numbers of all steps. So a CUDA graph of one step is
right for all, and the host has nothing to do between tokens.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wpr.language_models import evaluating
from wpr.ppo.generation import Sampling, SeededChoice, warpers
from wpr.ppo.rollout import Prompts

ATTENTION = "wpr_grouped_sdpa"
FULL, SLIDING = "full_attention", "sliding_attention"
"""What transformers calls the kinds of layers that are known here."""


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
    """What a step reads and writes, for up to ``batch`` rows, ``places`` of the cache and ``length`` new tokens.

    compiled: steps run what torch.compile makes of the model.
    """

    def __init__(
        self, model: Any, batch: int, places: int, length: int, device: torch.device, compiled: bool = False
    ) -> None:
        self.model, self.batch, self.places, self.length = model, batch, places, length
        self.step_model = torch.compile(model, dynamic=False) if compiled else model
        self.windows = windows_of(model)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.held = torch.zeros(batch, 1, 1, places, dtype=torch.bool, device=device)
        self.slot, self.step = torch.zeros(2, 1, dtype=torch.long, device=device)
        self.places_from_0 = torch.arange(places, device=device)
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
        places = torch.arange(length, device=ids.device)
        back = places.unsqueeze(-1) - places
        # Padding attends to itself: with nothing to attend to it would be NaN, and a masked NaN is still one.
        allowed = ((back >= 0) & mask.unsqueeze(1)) | (back == 0)
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
        with self._reading():
            logits = self._logits(self.model, ids, self._masks(allowed.unsqueeze(1), back), positions)
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
        masks = self._masks(self.held[:rows], self.slot - self.places_from_0)
        logits = self._logits(self.step_model, self.ids[:rows], masks, self.positions[:rows])
        self.slot.add_(1)
        self.positions[:rows].add_(1)
        self._draw(logits, rows, sampling)

    def _masks(self, allowed: Tensor, back: Tensor) -> Tensor | dict[str, Tensor]:
        """What queries attend to ``(R, 1, queries, keys)``, by kind of layer where there are several.

        back: how many tokens before the query a key is.
        """
        found = {
            kind: allowed if window is None else allowed & (back < window) for kind, window in self.windows.items()
        }
        return found if len(found) > 1 else next(iter(found.values()))

    def _logits(self, model: Any, ids: Tensor, masks: Tensor | Mapping[str, Tensor], positions: Tensor) -> Tensor:
        """Of the last tokens ``(R, V)``, in float32."""
        out = model(
            input_ids=ids, attention_mask=masks, position_ids=positions, past_key_values=self.cache, use_cache=True,
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


@torch.no_grad()
def differs(model: Any, device: torch.device) -> str | None:
    """In what the model's logits differ if it is run by steps, with a padded prompt beside another; None if they do
    not. What a model does with masks, positions and the cache is its own affair: trying is the only way to know.
    """
    tokens = min(7, model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(10, device=device).reshape(2, 5) % tokens
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    more = torch.arange(6, device=device).reshape(2, 3) % tokens
    state, sampling = State(model, 2, 16, 4, device), Sampling(1.0, 0, 1.0, 0, 4, ())
    found: list[Tensor] = []
    state._draw = lambda logits, *_: found.append(logits)  # type: ignore[method-assign]
    choice = SeededChoice([0, 1], 4, ids)
    both = torch.cat([mask, torch.ones_like(more)], 1)
    positions = (both.cumsum(-1) - 1).clamp_min(0)
    given = {"input_ids": torch.cat([ids, more], 1), "attention_mask": both, "position_ids": positions}
    try:
        with evaluating(model):
            wanted = model(**given, use_cache=False).logits[:, 4:].float()
            with use_grouped_attention(model):
                state.read(Prompts(ids, mask), choice, sampling)
                for step in range(more.shape[1]):
                    state.ids.copy_(more[:, step : step + 1])
                    state.advance(2, sampling)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"{type(model).__name__} cannot be run with a cache of fixed size ({type(error).__name__})"
    far = float((torch.stack(found, 1) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    exact = next(model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    if math.isnan(far) or far <= (0.01 if exact else 0.1):  # NaN of the weights is met where tokens are drawn
        return None
    return f"{type(model).__name__} gives other logits with a cache of fixed size (off by {far:.1g} of the largest)"


def windows_of(model: Any) -> dict[str, int | None]:
    """How many tokens a layer attends to, itself included, by kind of layer; None: all."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {FULL: window}
    return {kind: window if kind == SLIDING else None for kind in dict.fromkeys(kinds)}


@contextmanager
def use_grouped_attention(model: Any) -> Iterator[None]:
    """`grouped_attention` for the duration."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


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
