"""Sums of regularizers: ``ReverseKL() + 4 * Wasserstein(geometry)``.

    D(p, q)    =  sum_m  w_m D_m(p, q)                      w_m > 0
    penalty_i  =  sum_m  w_m penalty_m,i

Derivatives add up, so the penalty is the derivative of the summed divergence wherever each part's is. What a sum is
good for: transport knows which tokens mean nearly the same and is bounded where the reference never goes; KL knows how
likely the reference finds a token, and is not. See docs/numerics.md.

Notation for shapes: ``P`` positions, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wpr.regularizers.f_divergences import FDivergence
from wpr.regularizers.regularizer import Combinable, Regularizer, RegularizerOutput, check_tensors
from wpr.regularizers.wasserstein import Wasserstein
from wpr.transport.geometry import TokenGeometry
from wpr.transport.support import Support


@dataclass(frozen=True)
class ReducedSum:
    """What is kept of a slice's logits: one support for all parts with a geometry, and the others' outputs."""

    support: Support | None
    outputs: tuple[RegularizerOutput, ...]


class Sum(Combinable):
    """Several regularizers as one; usually written with ``+`` and ``*``.

    Diagnostics are each part's own, under ``PART.NAME``, and its ``PART.divergence``, without the weight.
    """

    name = "sum"

    def __init__(self, parts: Sequence[tuple[float, Regularizer]]) -> None:
        """parts: weights and regularizers. Sums among them are taken apart. Parts with a geometry must share it, and
        their k2, since all are measured on one support.
        """
        self.parts: list[tuple[float, Regularizer]] = []
        for weight, part in parts:
            check_weight(weight, part)
            inner = part.parts if isinstance(part, Sum) else [(1.0, part)]
            self.parts += [(float(weight) * own, one) for own, one in inner]
        if not self.parts:
            raise ValueError("a sum of nothing; pass at least one weight and regularizer")
        self._transports = transports_of(self)
        self._others = [part for _, part in self.parts if not isinstance(part, Wasserstein)]
        for one in self._transports[1:]:
            _check_shared(self._transports[0], one)
        self.labels = _labels([part for _, part in self.parts])

    @property
    def geometry(self) -> TokenGeometry | None:
        """What the parts that have a geometry share."""
        return self._transports[0].geometry if self._transports else None

    def with_geometry(self, geometry: TokenGeometry) -> Sum:
        """The same sum on another geometry, for instance the same one on another device."""
        return Sum(
            [(w, part.with_geometry(geometry) if isinstance(part, Wasserstein) else part) for w, part in self.parts]
        )

    def __repr__(self) -> str:
        return " + ".join(part.__repr__() if weight == 1 else f"{weight:g} * {part!r}" for weight, part in self.parts)

    @torch.no_grad()
    def __call__(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> RegularizerOutput:
        """See `Regularizer.__call__`."""
        support, others, refuse = self._reduce(policy_logits, reference_logits, tokens)
        transported = self._transported(support)  # first, so that a GPU has work while the host hands over the rest
        out = self._added(transported, others())
        refuse()
        return out

    @torch.no_grad()
    def reduce(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> ReducedSum:
        """See `TwoPhaseRegularizer.reduce`."""
        support, others, refuse = self._reduce(policy_logits, reference_logits, tokens)
        reduced = ReducedSum(support, others())
        refuse()
        return reduced

    def _reduce(
        self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor
    ) -> tuple[Support | None, Callable[[], tuple[RegularizerOutput, ...]], Callable[[], None]]:
        """The support, a function that gives the outputs of parts without a geometry, and one that refuses bad rows,
        for which the host waits. With the kernels all parts that can share it are measured in one read of the logits.
        """
        given = policy_logits, reference_logits, tokens
        check_tensors(policy_logits=policy_logits, reference_logits=reference_logits)
        if not self._transports or not self._transports[0].uses_kernels(policy_logits, reference_logits):
            support = self._transports[0].reduce(*given) if self._transports else None
            return support, lambda: tuple(part(*given) for part in self._others), lambda: None
        known = [part for part in self._others if isinstance(part, FDivergence) and part.uses_kernels(*given[:2])]
        with_kl = any(part.name == "reverse-kl" for part in known)
        reduced, refuse = self._transports[0].reduce_by_kernels(*given, with_kl)

        def others() -> tuple[RegularizerOutput, ...]:
            sharing = {id(part): part.beside_transport(*given, reduced) for part in known}
            return tuple(sharing.get(id(part)) or part(*given) for part in self._others)

        return reduced.support, others, refuse

    def _transported(self, support: Support | None) -> list[RegularizerOutput]:
        return [part.finish([support]) for part in self._transports] if support is not None else []

    @torch.no_grad()
    def finish(self, slices: Sequence[ReducedSum]) -> RegularizerOutput:
        """See `TwoPhaseRegularizer.finish`."""
        supports = [part.support for part in slices if part.support is not None]
        support = Support.join(supports) if supports else None
        others = [RegularizerOutput.join(column) for column in zip(*(part.outputs for part in slices), strict=True)]
        return self._added(self._transported(support), others)

    @torch.no_grad()
    def penalties(self, support: Support) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Penalties of all entries of a support ``(P, n)``, of which f-divergences take it for the whole vocabulary,
        the divergence ``(P,)``, and the parts' diagnostics. All parts must be regularizers of this package.
        """
        transported, others = (
            [RegularizerOutput(*part.penalties(support)) for part in parts]  # type: ignore[attr-defined]
            for parts in (self._transports, self._others)
        )
        out = self._added(transported, others)
        return out.penalty, out.divergence, dict(out.diagnostics)

    def loss(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See `Regularizer.loss`."""
        weights = [weight for weight, _ in self.parts]
        losses = self.part_losses(policy_logits, reference_logits, tokens).unbind(-1)
        return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum(0)

    def part_losses(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """`loss` of each part, without its weight: one column for each of `labels`."""
        return torch.stack([part.loss(policy_logits, reference_logits, tokens) for _, part in self.parts], -1)

    def _added(
        self, transported: Sequence[RegularizerOutput], others: Sequence[RegularizerOutput]
    ) -> RegularizerOutput:
        """From the outputs of the parts with a geometry, and of those without."""
        kinds = iter(transported), iter(others)
        outputs = [next(kinds[0] if isinstance(part, Wasserstein) else kinds[1]) for _, part in self.parts]
        weights = [weight for weight, _ in self.parts]
        penalty = sum(weight * out.penalty for weight, out in zip(weights, outputs, strict=True))
        divergence = sum(weight * out.divergence for weight, out in zip(weights, outputs, strict=True))
        assert isinstance(penalty, Tensor)
        assert isinstance(divergence, Tensor)
        diagnostics = {
            f"{label}.{name}": value
            for label, out in zip(self.labels, outputs, strict=True)
            for name, value in [("divergence", out.divergence), *out.diagnostics.items()]
        }
        return RegularizerOutput(penalty, divergence, diagnostics)


def check_weight(weight: object, part: object) -> None:
    """Refuse a weight that is not a positive number."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or not weight > 0:  # type: ignore[arg-type,operator]
        raise ValueError(f"weight={weight!r} of {part} must be a finite positive number; leave the part out for 0")


def _check_shared(first: Wasserstein, other: Wasserstein) -> None:
    if other.geometry is not first.geometry:
        raise ValueError(
            "the parts of a sum have different geometries; build one TokenGeometry and pass it to each of them"
        )
    if other.settings.k2 != first.settings.k2:
        raise ValueError(
            f"the parts of a sum have k2={first.settings.k2} and k2={other.settings.k2}; they are measured on one "
            "support: set both to the larger"
        )


def _labels(parts: Sequence[Regularizer]) -> list[str]:
    """A name for each part: its own, or its preset's; numbered where several are called alike."""
    names = [part.preset if isinstance(part, Wasserstein) else getattr(part, "name", "part") for part in parts]
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        labels.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return labels


def transports_of(regularizer: object) -> list[Wasserstein]:
    """The Wasserstein penalties in a regularizer: itself, or parts of a sum."""
    parts = [part for _, part in regularizer.parts] if isinstance(regularizer, Sum) else [regularizer]
    return [part for part in parts if isinstance(part, Wasserstein)]
