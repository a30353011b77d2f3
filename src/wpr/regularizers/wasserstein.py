"""Wasserstein policy regularization: penalties from optimal transport between next-token distributions.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``n = 2 * k2 + 2`` support entries; ``a`` the policy and ``b``
the reference on the support.

Two forms, three presets; every part can be set by itself. Debiasing subtracts from each the same derivative of
the policy's transport to itself, with potential s. ``docs/numerics.md`` derives both.

    balanced (the paper)    penalty_i = (1/lam) log u_i
    unbalanced              penalty_i = (rho + 1/lam) (1 - exp(-f_i/rho))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wpr.regularizers.regularizer import (
    Combinable,
    RegularizerOutput,
    check_inputs,
    check_shapes,
    check_tensors,
    checked_loss,
    refuse_impossible_tokens,
    validation,
)
from wpr.regularizers.wasserstein_settings import PRESETS, TRANSFORMS, Preset, refuse_unknown_settings
from wpr.transport import kernels
from wpr.transport.distances import EUCLIDEAN
from wpr.transport.geometry import NEIGHBOURS, TokenGeometry
from wpr.transport.gibbs import GibbsKernel, resolve_method
from wpr.transport.precision import full_precision
from wpr.transport.problem import Problem, Solution, mean_potential
from wpr.transport.sinkhorn import chunk_size, make_problem, solve_balanced, solve_self, solve_unbalanced
from wpr.transport.support import NO_TOKEN, Support, log_masses, truncate

if TYPE_CHECKING:
    from wpr.transport.kernels.losses import HeldLoss
    from wpr.transport.kernels.support import ReducedLogits

KERNEL_COST_BYTES = 640 << 20
"""Costs that exist at a time on a GPU: two thousand positions of 258 entries."""

LOSS_COST_BYTES = 128 << 20
"""The same for losses, which are taken while the activations of a training step fill the memory."""


Solved = tuple[Solution, tuple[Solution, Solution] | None]
"""The transport between policy and reference, and those of each to itself."""


@dataclass(frozen=True)
class TransportPlan:
    """What is moved from the policy's masses to the reference's, entry by entry of the support.

    plan: ``(P, n, n)``, see `Solution.plan`.
    cost: ``(P, n, n)`` as the solver saw it, in units of the geometry's scale if the settings say ``scaled``.
    policy_at_rest, reference_at_rest: ``(P, n)`` what a distribution matches of itself: the row sums of its plan to
        itself with debiased unbalanced marginals, else its masses. Debiased penalties are
        ``(rho + 1/lam) (policy_at_rest - row sum) / a``, up to the gauge.
    """

    plan: Tensor
    cost: Tensor
    policy_at_rest: Tensor
    reference_at_rest: Tensor


class Wasserstein(Combinable):
    """A penalty that knows which tokens mean nearly the same.

    Example::

        regularizer = Wasserstein.from_model(reference, preset="semantic")
        out = regularizer(policy_logits, reference_logits, tokens)      # (P, V), (P, V), (P,)
        reward = score - beta * out.penalty
    """

    name = "wasserstein"

    def __init__(
        self, geometry: TokenGeometry, preset: Preset = "semantic", *, method: str = "auto", **settings: Any
    ) -> None:
        """Settings not given come from the preset; `WassersteinSettings` lists them.

        method: the domain of the torch solvers, see `transport.gibbs`. On a GPU ``"auto"`` means the Triton kernels,
            see `transport.kernels`.
        """
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r} is unknown; use one of {', '.join(map(repr, PRESETS))}")
        refuse_unknown_settings(settings, asdict(PRESETS[preset]))
        self.geometry = geometry
        self.preset: Preset = preset
        self.settings = replace(PRESETS[preset], **settings)
        resolve_method(method)
        self.method = method
        if self.settings.k2 > geometry.vocabulary:
            raise ValueError(
                f"k2={self.settings.k2} exceeds the vocabulary ({geometry.vocabulary} tokens); set k2 to "
                f"{geometry.vocabulary} or less"
            )
        if self.settings.scaled and geometry.scale_rule == "none":
            warnings.warn(
                "this geometry has scale=None, so that lam and rho are in the embedding's own units and their "
                "defaults may be blind or blurred; "
                "build the geometry with scale='median-nn'",
                stacklevel=2,
            )

        plain = geometry.metric is EUCLIDEAN and "unit" not in geometry.transform.text
        if preset == "semantic" and plain and not {"lam", "rho"} <= settings.keys():
            warnings.warn(
                f"preset='semantic' is for unit vectors, whose distances are at most 2, and this geometry has "
                f"transform={geometry.transform.text!r}; make both with Wasserstein.from_model(model), or build the "
                f"geometry with transform={TRANSFORMS[preset]!r}; for distances as they are take preset='unbalanced'",
                stacklevel=2,
            )

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        preset: Preset = "semantic",
        *,
        neighbours: int | None = NEIGHBOURS,
        **settings: Any,
    ) -> Wasserstein:
        """On a transformers model's input embeddings, with the transform that the preset is for. Use the frozen
        reference. Measuring the vocabulary takes a while: where several regularizers share a geometry, build it once,
        with `TokenGeometry.from_model`.
        """
        if preset not in TRANSFORMS:
            raise ValueError(f"preset={preset!r} is unknown; use one of {', '.join(map(repr, PRESETS))}")
        refuse_unknown_settings(settings, [*asdict(PRESETS[preset]), "method"])
        geometry = TokenGeometry.from_model(model, neighbours=neighbours, transform=TRANSFORMS[preset])
        return cls(geometry, preset, **settings)

    def with_geometry(self, geometry: TokenGeometry) -> Wasserstein:
        """The same regularizer on another geometry, for instance the same one on another device."""
        return Wasserstein(geometry, self.preset, method=self.method, **asdict(self.settings))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self.settings).items())
        return f"Wasserstein(preset={self.preset!r}, {settings})"

    @torch.no_grad()
    def __call__(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> RegularizerOutput:
        """See `Regularizer.__call__`."""
        support, refuse = self._reduce(policy_logits, reference_logits, tokens)
        out = self.finish([support])
        refuse()
        return out

    @torch.no_grad()
    def reduce(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> Support:
        """See `TwoPhaseRegularizer.reduce`."""
        support, refuse = self._reduce(policy_logits, reference_logits, tokens)
        refuse()
        return support

    @torch.no_grad()
    def finish(self, slices: Sequence[Support]) -> RegularizerOutput:
        """See `TwoPhaseRegularizer.finish`."""
        reduced = Support.join(slices)
        penalties, divergence, diagnostics = self.penalties(reduced)
        sampled = reduced.sampled.unsqueeze(-1)
        return RegularizerOutput(penalties.gather(-1, sampled).squeeze(-1), divergence, diagnostics)

    def loss(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See `Regularizer.loss`. ``tokens``, if given, are made part of the support; the expectation runs over the
        support and its leftover mass.
        """
        check_tensors(policy_logits=policy_logits, reference_logits=reference_logits)
        if self.holds_loss(policy_logits, reference_logits) and tokens is None:
            return checked_loss(self, policy_logits, reference_logits)
        with torch.no_grad():
            if tokens is None:
                tokens = policy_logits.argmax(-1)
            support = self.support(policy_logits.detach(), reference_logits, tokens)
            penalties, _, _ = self.penalties(support)
        log_p = log_masses(policy_logits.to(support.log_policy.dtype), support.ids[:, :-1], "policy")
        p = log_p.exp()
        # Where the policy's probability is zero in this precision, the penalty may be unbounded, but it is not paid.
        return (p * penalties.masked_fill(p == 0, 0)).sum(-1)

    def holds_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> bool:
        """See `LossHolder`."""
        return self.uses_kernels(policy_logits, reference_logits)

    @torch.no_grad()
    def held_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> HeldLoss:
        """See `LossHolder`."""
        from wpr.transport.kernels.losses import SupportLoss

        reduced, _ = self.reduce_by_kernels(policy_logits, reference_logits, policy_logits.argmax(-1))
        return SupportLoss.measure(reduced, self.penalties(reduced.support, LOSS_COST_BYTES)[0])

    @torch.no_grad()
    def penalties(
        self, support: Support, cost_bytes: int = KERNEL_COST_BYTES
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Penalties of all support entries ``(P, n)``, the divergence ``(P,)``, and diagnostics ``(P,)`` each.

        cost_bytes: that costs may take at a time, by the kernels.
        """
        rows, n = support.ids.shape
        if self.uses_kernels(support.log_policy):
            step = max(1, cost_bytes // (n * (n + 16) * 4))
        else:
            step = chunk_size(n, support.log_policy.element_size(), support.ids.device)
            # The gathered embeddings of a chunk count too, where they are wide.
            step = min(step, max(1, 8 * step * n // self.geometry.embeddings.shape[1]))
        with full_precision(support.ids.device), torch.cuda.device_of(support.ids):
            parts = [self._penalties_of_chunk(support[start : start + step]) for start in range(0, max(rows, 1), step)]
        if len(parts) == 1:
            return parts[0]
        diagnostics = {name: torch.cat([part[2][name] for part in parts]) for name in parts[0][2]}
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), diagnostics

    def support(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> Support:
        """The support that the penalties of these positions are computed on, from checked inputs."""
        tokens = check_inputs(policy_logits, reference_logits, tokens)
        self._check(policy_logits)
        if self.uses_kernels(policy_logits, reference_logits):
            from wpr.transport.kernels.support import truncate as truncate_by_kernels

            with torch.cuda.device_of(policy_logits):
                return truncate_by_kernels(policy_logits, reference_logits, tokens, self.settings.k2)
        return truncate(policy_logits, reference_logits, tokens, self.settings.k2)

    def _reduce(
        self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor
    ) -> tuple[Support, Callable[[], None]]:
        """The support, and a function that refuses bad rows and impossible tokens. With the kernels that question is
        the only one that makes the host wait for the device, so it is put off until all work has been handed over.
        """
        check_tensors(policy_logits=policy_logits, reference_logits=reference_logits)
        if self.uses_kernels(policy_logits, reference_logits):
            reduced, refuse = self.reduce_by_kernels(policy_logits, reference_logits, tokens)
            return reduced.support, refuse
        support = self.support(policy_logits, reference_logits, tokens)
        return support, lambda: refuse_impossible_tokens(support.log_of_sampled, tokens)

    def reduce_by_kernels(
        self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, with_kl: bool = False
    ) -> tuple[ReducedLogits, Callable[[], None]]:
        """The same by the kernels, with what else their one read of the logits gives: see `ReducedLogits`."""
        from wpr.transport.kernels.support import reduce_logits

        tokens = check_shapes(policy_logits, reference_logits, tokens)
        self._check(policy_logits)
        vocabulary = self.geometry.vocabulary
        with torch.cuda.device_of(policy_logits):  # Triton launches on the current device, whatever the tensors' is
            reduced = reduce_logits(policy_logits, reference_logits, tokens, self.settings.k2, with_kl)
            refuse = validation(
                tokens, vocabulary, reduced.log_policy, reduced.log_reference, reduced.support.log_of_sampled
            )
        return reduced, refuse

    def _check(self, policy_logits: Tensor) -> None:
        """Refuse logits that do not belong to the geometry."""
        if policy_logits.shape[-1] != self.geometry.vocabulary:
            raise ValueError(
                f"logits over {policy_logits.shape[-1]} tokens but a geometry of {self.geometry.vocabulary}; "
                "build the geometry from the embeddings of the model that gives the logits"
            )
        if policy_logits.device != self.geometry.embeddings.device:
            raise ValueError(
                f"logits are on {policy_logits.device} but the geometry is on {self.geometry.embeddings.device}; use "
                f"geometry.to({str(policy_logits.device)!r})"
            )

    def uses_kernels(self, *tensors: Tensor) -> bool:
        """Whether the Triton kernels do the work on these tensors."""
        if self.method != "auto" or any(tensor.dtype == torch.float64 for tensor in tensors):
            return False
        if not kernels.chosen(tensors[0].device):
            return False
        if self._obstacle:
            kernels.say_once(f"Wasserstein: torch functions, because {self._obstacle}")
        return self._obstacle is None

    @cached_property
    def _obstacle(self) -> str | None:
        """Why the kernels cannot work on this geometry, if so."""
        from wpr.transport.kernels.cost import supports
        from wpr.transport.kernels.support import LARGEST_K2

        if self.settings.k2 > LARGEST_K2:
            return f"k2={self.settings.k2} exceeds {LARGEST_K2}, the most that the kernels merge"
        return supports(self.geometry)

    def _penalties_of_chunk(self, support: Support) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.uses_kernels(support.log_policy):
            return self._penalties_by_kernels(support)
        cross, own = self._solve(support)
        problem = cross.problem
        penalty, divergence = self.derive(cross, own)
        tokens = (support.ids != NO_TOKEN) & ~problem.padding  # those that one of the two can emit
        connected = (problem.cost.isfinite() & ~problem.padding.unsqueeze(-2)).sum(-1) > 1
        lonely = tokens & ~connected
        diagnostics = {
            "iterations": cross.iterations,
            "marginal_error": cross.marginal_error,
            "change": cross.change,
            "converged": cross.converged,
            "support_size": support.size,
            "isolated_fraction": lonely.sum(-1) / tokens.sum(-1),
            "leftover_policy": problem.log_a[:, -1].exp(),
            "leftover_reference": problem.log_b[:, -1].exp(),
        }
        return penalty, divergence, diagnostics

    def _penalties_by_kernels(self, support: Support) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same with the Triton kernels."""
        from wpr.transport.kernels import potentials
        from wpr.transport.kernels.cost import cost as cost_of
        from wpr.transport.kernels.neighbour_lists import neighbour_lists
        from wpr.transport.kernels.penalty import penalties

        s = self.settings
        log_a, log_b = support.log_policy, support.log_reference
        cost = cost_of(self.geometry, support.ids, scaled=s.scaled, fill=False)
        lists = neighbour_lists(log_a, log_b, cost)
        rho = s.rho if s.marginals == "unbalanced" else math.inf
        cross, own = potentials.solve(
            log_a, log_b, cost, lists,
            lam=s.lam, rho=rho, iterations=s.iterations, tolerance=s.tolerance, floor=s.floor, debias=s.debias,
        )  # fmt: skip
        out = penalties(
            support.ids, log_a, log_b, lists.count, cross, own, lam=s.lam, rho=rho, value_gauge=s.gauge == "value"
        )
        diagnostics = {
            "iterations": cross.iterations,
            "marginal_error": cross.marginal_error,
            "change": cross.change,
            "converged": cross.converged,
            "support_size": out.support_size,
            "isolated_fraction": out.isolated_fraction,
            "leftover_policy": out.leftover_policy,
            "leftover_reference": out.leftover_reference,
        }
        return out.penalty, out.divergence, diagnostics

    @torch.no_grad()
    def transport_plan(self, support: Support) -> TransportPlan:
        """The plan behind the penalties of these positions, with the same potentials. It takes n^2 numbers a position:
        ask for a few positions at a time.
        """
        s = self.settings
        with full_precision(support.ids.device):
            cross, own = self._solve(support)
            at_rest = [cross.problem.log_a, cross.problem.log_b]
            if own is not None and s.marginals == "unbalanced":
                at_rest = [one.problem.log_a - one.f / s.rho for one in own]
            return TransportPlan(cross.plan(), cross.problem.cost, at_rest[0].exp(), at_rest[1].exp())

    def _solve(self, support: Support) -> Solved:
        return self.solve(*self.problem(support))

    def problem(self, support: Support) -> tuple[Problem, GibbsKernel]:
        """The transport between policy and reference on a support, and the kernel of its costs."""
        s = self.settings
        rho = s.rho if s.marginals == "unbalanced" else math.inf
        cost = self.geometry.cost(support.ids, scaled=s.scaled).to(support.log_policy.dtype)
        problem = make_problem(support.log_policy, support.log_reference, cost, s.lam, rho, s.floor)
        return problem, GibbsKernel(cost, s.lam, self.method)

    def solve(self, problem: Problem, kernel: GibbsKernel, start: Solved | None = None) -> Solved:
        """The transport between the two, and if asked for that of each to itself. Those converge three times faster an
        iteration, so they are solved more exactly.

        start: what was found for nearly the same masses; where the solvers converge, it only makes them faster.
        """
        s = self.settings
        before = (None, None) if start is None or start[1] is None else (start[1][0].f, start[1][1].f)
        own = None
        if s.debias:
            sides = [replace(problem, log_a=x, log_b=x) for x in (problem.log_a, problem.log_b)]
            both = [
                solve_self(side, kernel, s.iterations, s.tolerance / 100, one)
                for side, one in zip(sides, before, strict=True)
            ]
            own = (both[0], both[1])
        if problem.balanced:
            return solve_balanced(problem, kernel, s.iterations, s.tolerance), own
        # The self-potentials are also a good start: where policy and reference agree, they are the solution.
        potentials = None if own is None else (own[0].f, own[1].f)
        if start is not None:
            potentials = (start[0].f, start[0].g)
        return solve_unbalanced(problem, kernel, s.iterations, s.tolerance, potentials), own

    def derive(self, cross: Solution, own: tuple[Solution, Solution] | None) -> tuple[Tensor, Tensor]:
        """Penalties ``(P, n)`` and divergence ``(P,)`` of what `solve` found."""
        s = self.settings
        form = self._unbalanced if s.marginals == "unbalanced" else self._balanced
        penalty, mean, divergence = form(cross, own)
        if s.gauge == "value":
            penalty = penalty + (divergence - mean).unsqueeze(-1)
        return penalty, divergence

    def _unbalanced(self, cross: Solution, own: tuple[Solution, Solution] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Penalties, their mean under the policy, and the divergence. A self-transport moves as much on either side,
        A, and costs (2 rho + 1/lam) (1 - A).
        """
        s = self.settings
        price = s.rho + 1 / s.lam
        moved = cross.moved_a
        if own is None:
            return price * (1 - _growth(cross.f, s.rho)), price * (1 - moved), cross.value()
        own_a, own_b = own[0].moved_a, own[1].moved_a
        penalty = price * (_growth(own[0].f, s.rho) - _growth(cross.f, s.rho))
        divergence = cross.value() - (s.rho + price) * ((1 - own_a) + (1 - own_b)) / 2
        return penalty, price * (own_a - moved), divergence

    def _balanced(self, cross: Solution, own: tuple[Solution, Solution] | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same for exact marginals."""
        s = self.settings
        mean = mean_potential(cross.problem.log_a, cross.f)
        if own is None:
            return cross.f, mean, cross.value()
        # Potentials relative to a (x) a; in the convention of phi they are s + (1/lam) log a.
        phi = [one.f + (one.problem.log_a / s.lam).masked_fill(one.problem.padding, 0) for one in own]
        own_mean_a, own_mean_b = (mean_potential(one.problem.log_a, x) for one, x in zip(own, phi, strict=True))
        return cross.f - phi[0], mean - own_mean_a, cross.value() - own_mean_a - own_mean_b + 1 / s.lam


def _growth(potential: Tensor, rho: float) -> Tensor:
    """``exp(-potential / rho)``, bounded at exp(80), which only tokens of no mass exceed."""
    return (-potential / rho).clamp_max(80).exp()
