"""TokenGeometry: what it costs to turn one token into another, from the embeddings and one radius per token.

Notation for shapes: ``V`` vocabulary, ``d`` embedding size, ``P`` positions, ``n`` support entries.

The paper keeps each token's ``k1`` nearest other tokens and mirrors the list. That is the same as the rule

    keep (i, j)  iff  C_ij <= max(r_i, r_j),        r_i = cost from token i to its k1-th nearest other token

so one float per token replaces a sparse V x V matrix of gigabytes, and costs are computed on the fly for the few tokens
of a support. A cost may be a power of the metric, ``C_ij = d_ij ** power``. Only the order counts in the rule, which is
decided before the power is taken.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from wpr.transport.distances import Metric, PairwiseCost, resolve_metric
from wpr.transport.neighbours import ALIVE, Scale, measure_neighbours, resolve_scale
from wpr.transport.precision import full_precision
from wpr.transport.support import NO_TOKEN, working_dtype
from wpr.transport.transforms import IDENTITY, NONE, Transform, fit

Layer = Literal["input", "output"]

NEIGHBOURS = 512
"""The paper's k1: how many of a token's nearest others it can be moved to."""

RADIUS_SLACK = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Relative slack of the radius rule: a cost is computed in blocks of another shape when the radii are built, and rounds
differently.
"""

ALONE = -1.0
"""The radius of a token without an embedding: it reaches no token and no token reaches it."""

POWERS = (0.1, 4.0)
"""Smallest and largest power. float32 has the fourth powers of all distances from 1e-9 to 1e9; below 0.1, tokens that
are ten times farther apart cost less than 1.26 times as much, and a geometry says next to nothing.
"""


@dataclass(frozen=True)
class TokenGeometry:
    """The cost of exchanging tokens, in units of ``scale``.

    embeddings: ``(V, d)`` the model's own matrix, by reference; or what the transform made of it.
    radius: ``(V,)`` distance by the metric, before ``power``, to the ``neighbours``-th nearest other token; infinite
        where ``neighbours`` is None; `ALONE` for a token without an embedding, which is infinitely far from all others.
    nearest: ``(V,)`` cost to the nearest other token, not divided by ``scale``.
    alive: ``(V,)`` False for near-duplicates of other tokens, such as tokens that training never touched, and for
        tokens without an embedding. They count in no scale.
    scale: costs are divided by this number. ``scale_rule`` says where it came from.
    transform: what was done to the model's matrix. source: the fingerprint of that matrix, where something was done.
    power: a cost is the metric's distance to this power.
    """

    embeddings: Tensor
    metric: Metric
    neighbours: int | None
    radius: Tensor
    nearest: Tensor
    alive: Tensor
    scale: float
    scale_rule: str
    transform: Transform = IDENTITY
    source: str | None = None
    power: float = 1.0

    @classmethod
    def from_embeddings(
        cls,
        weight: Tensor,
        metric: str | PairwiseCost | Metric = "euclidean",
        neighbours: int | None = NEIGHBOURS,
        scale: Scale = "median-nn",
        *,
        power: float = 1.0,
        transform: str = NONE,
        token_weights: Tensor | None = None,
        mapped: Tensor | None = None,
        progress: bool = True,
    ) -> TokenGeometry:
        """Measure the vocabulary of embeddings ``weight`` ``(V, d)``.

        metric: ``"euclidean"``, ``"cosine"``, or a function of rows ``(..., n, d)`` and ``(..., m, d)`` giving costs
            ``(..., n, m)``.
        neighbours: the paper's k1; None keeps all pairs.
        power: costs are distances to this power, from 0.1 to 4, before the scale is taken: 2 with ``"euclidean"`` makes
            them squared distances. Far tokens cost the more against near ones, the larger it is.
        scale: ``"median-nn"`` divides costs by the median, over live tokens, of the cost to the nearest other token,
            which makes ``lam`` and ``rho`` mean the same for every model; a number divides by that number; None leaves
            costs as they are.
        transform: steps before distances are taken, such as ``"centre/unit"``: see `transforms`.
        token_weights: ``(V,)`` how much each token counts in the median and in a mean by frequency, for instance its
            probability under the reference (`token_frequencies`).
        mapped: ``(V,)`` False for tokens whose rows are no embeddings. They count nowhere and are infinitely far from
            all others. Default: all are embeddings.
        progress: show a bar on a terminal; building takes seconds to minutes.
        """
        weight = weight.detach()
        known = slice(None) if mapped is None else mapped.to(weight.device)
        _check_per_token(weight, token_weights=token_weights, mapped=mapped)
        _check_embeddings(weight, neighbours, known)
        check_power(power)
        resolved = resolve_metric(metric)
        weights = None if token_weights is None else token_weights.to(weight.device)[known]
        fitted = fit(transform, weight[known], weights)
        source = None if fitted.is_identity else fingerprint(weight)
        weight = fitted(weight)
        with full_precision(weight.device):
            radius, nearest, typical = measure_neighbours(weight[known], resolved, neighbours, progress)
        alive = nearest > ALIVE**resolved.degree * typical
        nearest = to_power(nearest, power)
        value, rule = resolve_scale(scale, nearest, alive, weights)
        if mapped is not None:
            radius, nearest = _spread(radius, known, ALONE), _spread(nearest, known, torch.inf)
            alive = _spread(alive, known, False)
        return cls(weight, resolved, neighbours, radius, nearest, alive, value, rule, fitted, source, power)

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        metric: str | PairwiseCost | Metric = "euclidean",
        neighbours: int | None = NEIGHBOURS,
        scale: Scale = "median-nn",
        *,
        power: float = 1.0,
        transform: str = NONE,
        token_weights: Tensor | None = None,
        progress: bool = True,
        embeddings: Layer = "input",
    ) -> TokenGeometry:
        """Measure a transformers model's vocabulary. Other arguments as above.

        embeddings: those of ``model.get_input_embeddings()`` or of ``model.get_output_embeddings()``, which many models
            tie together.

        Use the frozen reference: the embeddings are kept by reference, and radii and scale are those of now.
        """
        if embeddings not in ("input", "output"):
            raise ValueError(f"embeddings={embeddings!r} must be 'input' or 'output'")
        return cls.from_embeddings(
            input_embeddings(model) if embeddings == "input" else output_embeddings(model),
            metric,
            neighbours,
            scale,
            power=power,
            transform=transform,
            token_weights=token_weights,
            progress=progress,
        )

    @property
    def vocabulary(self) -> int:
        return self.embeddings.shape[0]

    @property
    def mapped(self) -> Tensor:
        """``(V,)`` False for tokens without an embedding."""
        return self.radius >= 0

    def cost(self, ids: Tensor, *, scaled: bool = True) -> Tensor:
        """Costs among the tokens of each support, divided by ``scale`` if ``scaled``: ids ``(P, n)`` to ``(P, n, n)``.

        Zero on the diagonal; infinite between tokens that are not among each other's nearest, for tokens without an
        embedding and for entries that are not tokens (``NO_TOKEN``: the dummy and padding). Symmetric to the last bit.
        """
        if ids.device != self.embeddings.device:
            raise ValueError(
                f"ids are on {ids.device} but the geometry is on {self.embeddings.device}; move one of them, for "
                f"instance geometry.to({str(ids.device)!r})"
            )
        if ids.numel() and not NO_TOKEN <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            raise ValueError(
                f"token ids {int(ids.min())}..{int(ids.max())} are not all within the geometry's vocabulary, "
                f"0..{self.vocabulary - 1} ({NO_TOKEN} for no token)"
            )
        index = ids.clamp_min(0)
        radius = self.radius[index]
        token = (ids != NO_TOKEN) & (radius >= 0)
        rows = self.embeddings[index].to(working_dtype(self.embeddings))
        pairs = token.unsqueeze(-1) & token.unsqueeze(-2)
        with full_precision(ids.device):
            cost = self.metric.pairwise(rows, rows, wanted=pairs.triu(1))
        upper = cost.triu_(1)
        cost = upper + upper.mT  # one side for both: rounding, or a user's function, may differ in the last bits
        reach = torch.maximum(radius.unsqueeze(-1), radius.unsqueeze(-2)).mul_(
            1 + max(RADIUS_SLACK[cost.dtype], RADIUS_SLACK[radius.dtype])
        )
        apart = (cost > reach).logical_or_(~pairs)
        cost = to_power(cost.div_(self.unit(scaled)), self.power).masked_fill_(apart, torch.inf)
        cost.diagonal(dim1=-2, dim2=-1).zero_()
        return cost

    def unit(self, scaled: bool = True) -> float:
        """The distance that costs 1: distances are divided by it before the power is taken, which keeps float32 from
        overflowing.
        """
        return self.scale ** (1 / self.power) if scaled else 1.0

    def nearest_tokens(self, token: int, count: int = 8) -> tuple[Tensor, Tensor]:
        """Ids and costs of the tokens nearest to one token, nearest first: two ``(count,)``. Costs are infinite where
        there is no embedding.
        """
        if not (0 <= token < self.vocabulary and 1 <= count < self.vocabulary):
            raise ValueError(
                f"token={token}, count={count} are outside a vocabulary of {self.vocabulary} tokens; "
                f"token must be in 0..{self.vocabulary - 1} and count in 1..{self.vocabulary - 1}"
            )
        rows = self.embeddings.to(working_dtype(self.embeddings))
        with full_precision(rows.device):
            distance = self.metric.pairwise(rows[token : token + 1], rows).squeeze(0)
        cost = to_power(distance / self.unit(), self.power)
        cost.masked_fill_(~(self.mapped & self.mapped[token]), torch.inf)[token] = torch.inf
        costs, ids = cost.topk(count, largest=False)
        return ids, costs

    def to(self, device: str | torch.device) -> TokenGeometry:
        """The same geometry on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("embeddings", "radius", "nearest", "alive")}
        return replace(self, **moved)

    def save(self, path: str | Path) -> None:
        """Write radii, scale and a fingerprint of the embeddings (not the embeddings) to a safetensors file,
        atomically.
        """
        from wpr.transport.geometry_file import save

        save(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        embeddings: Tensor | torch.nn.Module,
        metric: str | PairwiseCost | Metric | None = None,
        neighbours: int | Literal["any"] | None = "any",
        transform: str = "any",
        power: float | Literal["any"] = "any",
    ) -> TokenGeometry:
        """Read a file written by `save`, for the embeddings (or the model, by its input embeddings) that it was made
        from.

        Refuses a file made from other embeddings, by another version of the format, damaged, or with another metric,
        ``neighbours``, ``transform`` or ``power`` than asked for. A file made with a user's metric needs that function
        as ``metric``.
        """
        from wpr.transport.geometry_file import load

        weight = input_embeddings(embeddings) if isinstance(embeddings, torch.nn.Module) else embeddings
        return load(Path(path), weight.detach(), metric, neighbours, transform, power)

    def describe(self) -> str:
        """A few lines for a person: size, distances, how many tokens were left out of the scale."""
        live = self.nearest[self.alive]
        quantiles = (
            torch.quantile(live.float(), torch.tensor([0.05, 0.5, 0.95], device=live.device)).tolist()
            if len(live)
            else [math.nan] * 3
        )
        mapped = int(self.mapped.sum())
        dead, alone = mapped - len(live), self.vocabulary - mapped
        kept = "all pairs" if self.neighbours is None else f"the {self.neighbours} nearest"
        return "\n".join(
            [
                f"vocabulary {self.vocabulary} tokens of size {self.embeddings.shape[1]}, {self.metric.name} cost"
                f"{'' if self.power == 1 else f' to the power {self.power:g}'}"
                f"{'' if self.transform.is_identity else f' after {self.transform.text}'}, {kept} kept",
                f"nearest-neighbour cost of live tokens: median {quantiles[1]:.4g}, 5% to 95%: {quantiles[0]:.4g} to "
                f"{quantiles[2]:.4g}",
                f"left out of the scale as near-duplicates: {dead} tokens ({dead / self.vocabulary:.1%})",
                *([f"without an embedding: {alone} tokens ({alone / self.vocabulary:.1%})"] if alone else []),
                f"scale {self.scale:.6g} ({self.scale_rule})",
            ]
        )


def to_power(distance: Tensor, power: float) -> Tensor:
    """Distances to a power, of the same shape; the tensor itself where it is 1."""
    return distance if power == 1 else distance.pow(power)


def check_power(power: float) -> None:
    """Refuse a power outside `POWERS`."""
    if not POWERS[0] <= power <= POWERS[1]:
        raise ValueError(
            f"power={power:g} is outside {POWERS[0]:g} to {POWERS[1]:g}; set 1 for distances, 2 for squared ones"
        )


def input_embeddings(model: torch.nn.Module) -> Tensor:
    """The input embedding matrix ``(V, d)`` of a transformers model."""
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"{type(model).__name__} has no get_input_embeddings(); pass its embedding matrix to "
            f"TokenGeometry.from_embeddings instead"
        )
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return weight.detach()


def output_embeddings(model: torch.nn.Module) -> Tensor:
    """The output embedding matrix ``(V, d)`` of a transformers language model: a row per token, whose product with the
    last hidden state is the token's logit.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"{type(model).__name__} has no output embeddings; load it with AutoModelForCausalLM, or use its input "
            "embeddings"
        )
    return weight.detach()


@torch.no_grad()
def token_frequencies(model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Mean next-token probability of each token over calibration prompts ``(B, L)``: ``(V,)``, for
    ``token_weights``.
    """
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    keep = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    frequencies: Tensor = logits[keep].float().softmax(-1).mean(0)
    return frequencies


def fingerprint(weight: Tensor) -> str:
    """SHA-256 of the embeddings' shape and values. The same values in bf16, float32 or float64 give the same
    fingerprint.
    """
    digest = hashlib.sha256(f"{tuple(weight.shape)}".encode())
    for block in weight.detach().split(4096):
        digest.update(block.to(device="cpu", dtype=torch.float64).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_per_token(weight: Tensor, **parts: Tensor | None) -> None:
    for name, part in parts.items():
        if part is not None and part.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} of shape {tuple(part.shape)} for a vocabulary of {len(weight)} tokens; pass one number per "
                "token"
            )


def _check_embeddings(weight: Tensor, neighbours: int | None, known: Tensor | slice) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"embeddings of shape {tuple(weight.shape)} and type {weight.dtype}; they must be a float matrix "
            f"(tokens, size)"
        )
    vocabulary = weight.shape[0] if isinstance(known, slice) else int(known.sum())
    if vocabulary < 2:
        raise ValueError(f"embeddings of {vocabulary} token(s); a geometry needs at least 2")
    if neighbours is not None and not 1 <= neighbours <= vocabulary - 1:
        raise ValueError(
            f"neighbours={neighbours} is outside 1..{vocabulary - 1} for a vocabulary of {vocabulary} tokens; set it "
            f"to {vocabulary - 1} or less, or to None for all pairs"
        )
    bad = (~weight.isfinite().all(-1)).nonzero().squeeze(-1)
    if len(bad):
        raise ValueError(
            f"embeddings of {len(bad)} token(s) are not finite, first at token {int(bad[0])}; repair the model's "
            f"embedding matrix"
        )


def _spread(values: Tensor, known: Tensor | slice, other: float) -> Tensor:
    """Values ``(n,)`` of the known tokens among all: ``(V,)``, the others filled."""
    assert isinstance(known, Tensor)
    return torch.full_like(known, other, dtype=values.dtype).masked_scatter(known, values)
