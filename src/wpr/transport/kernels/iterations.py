"""The iterations of all solvers: one program solves one problem, start to end.

Notation for shapes: ``P`` problems, ``n`` support entries. Everything is in the log domain to base 2, potentials
multiplied by lam included, so that one operation is left:

    y_i  =  log2 sum_j 2^( x_j - k C_ij ),        k = lam / log 2

It appears once in the program: a loop whose *phase* says which x comes next and what y is for. So the instructions fit
the cache, and any solver is a list of phases. A program stops when its own problem is done.

`log_sums` has that sum, and its two ways to the costs. The kernel is launched once for each way, and a program without
work ends at once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wpr.transport.kernels.log_sums import list_log_sums, lists_of, matrix_log_sums
from wpr.transport.sinkhorn import RAMP, STRIKES

# The phases of the kernel. The first four are also the rows in which it remembers its last results.
_SELF_A, _SELF_B, _TO_F, _TO_G, _LAST_G, _LAST_F, _ANSWER, _DONE = (tl.constexpr(i) for i in range(8))
SCRATCH_ROWS = tl.constexpr(6)
_RAMP, _STRIKES = tl.constexpr(RAMP), tl.constexpr(STRIKES)


class Matrix(NamedTuple):
    """The costs ``(P, n, n)``, whose rows lie side by side."""

    cost: Any
    problem_stride: Any
    row_stride: Any


class Settings(NamedTuple):
    """Numbers that are the same for all problems.

    k: lam / log 2; same_k: once more, see `_row_log_sums`. tau: rho / (rho + 1/lam), 1 for balanced marginals.
    full, window, enough, ceiling: `sinkhorn.relaxation_schedule`. log_tiny: masses are no smaller.
    own_tolerance: of self-transports. log_floor: to base 2.
    """

    k: Any
    same_k: Any
    inverse_lam_rho: Any
    tau: Any
    full: Any
    window: Any
    enough: Any
    ceiling: Any
    log_tiny: Any
    iterations: Any
    tolerance: Any
    own_tolerance: Any
    log_floor: Any


class Results(NamedTuple):
    """Where results go: four ``(P, n)`` potentials in units of cost, and four ``(P,)``."""

    f: Any
    g: Any
    own_a: Any
    own_b: Any
    count: Any
    converged: Any
    error: Any
    change: Any


class Masses(NamedTuple):
    """One problem's log masses to base 2, ``(SIZE,)``; real: whether there is an entry at all."""

    a: Any
    b: Any
    real: Any


class State(NamedTuple):
    """Where a problem stands.

    phase: what the next sums are for. x: ``(SIZE,)`` what they are of.
    f, g: potentials of the transport between the two. s: of the self-transport that comes now, or was the last.
    own_a: of the first self-transport, when it is done.
    count: iterations of the solver that is at work. converged, error, change: as in `Solution`.
    """

    phase: Any
    x: Any
    f: Any
    g: Any
    s: Any
    own_a: Any
    count: Any
    converged: Any
    error: Any
    change: Any


class RelaxationState(NamedTuple):
    """The over-relaxation of `sinkhorn.Relaxation`, of one problem; residual: how far f was from its answer."""

    residual: Any
    excess: Any
    before: Any
    first: Any
    strikes: Any
    omega: Any


@triton.jit(do_not_specialize=["log_a", "log_b"])
def iterate(
    matrix,
    lists,
    log_a,
    log_b,
    results,
    scratch,
    n,
    settings,
    FLOOR: tl.constexpr,
    OWN: tl.constexpr,
    CROSS: tl.constexpr,
    LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
    PANEL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """OWN: how many self-transports come first. CROSS: 0 none, 1 unbalanced, 2 balanced. LISTS: which of the two ways
    to the sums; problems of the other way are left alone.
    """
    problem = tl.program_id(0).to(tl.int64)
    mine = tl.load(lists.dense + problem) == 0 if LISTS else tl.load(lists.dense + problem) != 0
    scratch += problem * (SCRATCH_ROWS * SIZE)
    place = tl.arange(0, SIZE)
    entry = place
    if LISTS:
        lists = lists_of(lists, problem, GROUP)
        entry = tl.load(lists.order + place, mask=place < lists.groups * GROUP, other=n)
    cost = matrix.cost + problem * matrix.problem_stride
    inside = entry < tl.where(mine, n, 0)
    masses = _masses(log_a + problem * n, log_b + problem * n, entry, inside, settings)
    used = tl.max(tl.where(masses.real & (LISTS | (place < CORE)), place + 1, 0), axis=0)
    for remembered in tl.static_range(4):
        tl.store(scratch + remembered * SIZE + place, tl.zeros([SIZE], tl.float32))

    vectors = scratch + 4 * SIZE
    state = _start(masses, mine, settings, OWN, CROSS, SIZE)
    relaxation = _no_relaxation(settings)
    while state.phase != _DONE:
        shifts = _shifts(state.phase, scratch, SIZE)
        if LISTS:
            y = list_log_sums(lists, state.x, shifts, vectors, masses.real, used, settings.k, SIZE, GROUP, DEPTH)
        else:
            y = matrix_log_sums(
                cost, matrix.row_stride, state.x, shifts, vectors, masses.real, used, n, settings.k, settings.same_k,
                SIZE, CORE, BORDER, PANEL, EVEN,
            )  # fmt: skip
        tl.store(shifts + place, y)
        if state.phase <= _SELF_B:
            state = _self_step(state, y, masses, settings, OWN)
        elif CROSS == 2:
            state = _balanced_step(state, y, masses, settings, FLOOR)
        elif CROSS == 1:
            state, relaxation = _unbalanced_step(state, relaxation, y, masses, settings)

    _write(results, state, problem, problem * n + entry, inside, mine, masses.real, settings, FLOOR, OWN, CROSS)


@triton.jit
def _masses(log_a, log_b, entry, inside, settings):
    """The masses of one problem's entries, in the order of its places."""
    to_bits = 1.4426950408889634
    a = tl.load(log_a + entry, mask=inside, other=-float("inf"))
    b = tl.load(log_b + entry, mask=inside, other=-float("inf"))
    real = (a != -float("inf")) | (b != -float("inf"))
    tiny = settings.log_tiny
    a = tl.where(real, tl.where(a < tiny, tiny, a) * to_bits, -float("inf"))
    b = tl.where(real, tl.where(b < tiny, tiny, b) * to_bits, -float("inf"))
    return Masses(a, b, real)


@triton.jit
def _start(masses, mine, settings, OWN: tl.constexpr, CROSS: tl.constexpr, SIZE: tl.constexpr):
    """The first phase and its x; `_DONE` where the problem is not this program's."""
    f = tl.zeros([SIZE], tl.float32)
    g = tl.zeros([SIZE], tl.float32)
    s = _alone(masses.a, masses.real, settings.tau)
    if OWN > 0:
        phase = tl.where(mine, _SELF_A, _DONE)
        x = masses.a + s
    else:
        phase = tl.where(mine, _TO_F, _DONE)
        x = masses.b
        if CROSS == 2:
            g = tl.where(masses.real, 0.0, -float("inf"))
            x = g
    zero = tl.full([], 0, tl.int32)
    far = tl.full([], float("inf"), tl.float32)
    return State(phase, x, f, g, s, tl.zeros([SIZE], tl.float32), zero, zero, far, far)


@triton.jit
def _alone(mass, real, tau):
    """The potential of a self-transport where nothing can be transported."""
    return tl.where(real, mass * (-tau / (1.0 + tau)), 0.0)


@triton.jit
def _self_step(state, y, masses, settings, OWN: tl.constexpr):
    """``s <- s + weight (-tau y - s)``; at the end on to the next self-transport, or to the transport between the two,
    which begins at the potentials of both.
    """
    phase, x, f, g, s, own_a, count, converged, error, change = state
    step = tl.where(masses.real, -settings.tau * y - s, 0.0)
    change = tl.max(tl.abs(step), axis=0) * (1.0 / settings.k)
    mass = tl.where(phase == _SELF_A, masses.a, masses.b)
    at_rest = s
    s += 2.0 / (2.0 + settings.tau) * step
    count += 1
    x = mass + s
    done = (settings.own_tolerance > 0) & (change <= settings.own_tolerance)
    if done | (count >= settings.iterations):
        converged = done.to(tl.int32)
        # Before the update, which shrinks it once more.
        gap = tl.exp2(mass - at_rest * settings.inverse_lam_rho) * (1.0 - tl.exp2(-step / settings.tau))
        error = tl.sum(tl.abs(gap), axis=0)
        if phase == _SELF_A:
            own_a = s
            if OWN == 2:
                phase = _SELF_B
                count = 0
                s = _alone(masses.b, masses.real, settings.tau)
                x = masses.b + s
            else:
                phase = _DONE
        else:
            f = own_a
            g = s
            phase = _TO_F
            count = 0
            converged = 0
            x = masses.b + g
    return State(phase, x, f, g, s, own_a, count, converged, error, change)


@triton.jit
def _balanced_step(state, y, masses, settings, FLOOR: tl.constexpr):
    """``f <- a - y``, then ``g <- b - y``: log u and log v, each with the floor under what it divides by."""
    phase, x, f, g, s, own_a, count, converged, error, change = state
    if phase == _TO_F:
        # y is what log v reaches. One more plain update would move log u from f to a - y.
        if (count > 0) & ((settings.tolerance > 0) | (count >= settings.iterations)):
            error = tl.sum(tl.where(masses.real, tl.abs(tl.exp2(f + y) - tl.exp2(masses.a)), 0.0), axis=0)
            change = tl.max(tl.where(masses.real, tl.abs(masses.a - y - f), 0.0), axis=0) * (1.0 / settings.k)
            converged = ((settings.tolerance > 0) & (error <= settings.tolerance)).to(tl.int32)
        if (converged != 0) | (count >= settings.iterations):
            phase = _DONE
        else:
            f = tl.where(masses.real, masses.a - _with_floor(y, settings.log_floor, FLOOR), -float("inf"))
            x = f
            phase = _TO_G
    else:
        g = tl.where(masses.real, masses.b - _with_floor(y, settings.log_floor, FLOOR), -float("inf"))
        x = g
        count += 1
        phase = _TO_F
    return State(phase, x, f, g, s, own_a, count, converged, error, change)


@triton.jit
def _unbalanced_step(state, relaxation, y, masses, settings):
    """``f <- f + omega (-tau y - f)``, then the same for g; at the end a plain sweep, so that f is the answer to g, and
    once more y for the error.
    """
    phase, x, f, g, s, own_a, count, converged, error, change = state
    unit = 1.0 / settings.k
    answer = tl.where(masses.real, -settings.tau * y, 0.0)
    if phase == _TO_F:
        relaxation = _relax(relaxation, tl.max(tl.abs(answer - f), axis=0), count, settings)
        f += relaxation.omega * (answer - f)
        x = masses.a + f
        phase = _TO_G
    elif phase == _TO_G:
        step = answer - g
        change = tl.maximum(relaxation.residual, tl.max(tl.abs(step), axis=0)) * unit
        g += relaxation.omega * step
        count += 1
        converged = ((settings.tolerance > 0) & (change <= settings.tolerance)).to(tl.int32)
        if (converged != 0) | (count >= settings.iterations):
            phase = _LAST_G
            x = masses.a + f
        else:
            phase = _TO_F
            x = masses.b + g
    elif phase == _LAST_G:
        g = answer
        x = masses.b + g
        phase = _LAST_F
    elif phase == _LAST_F:
        change = tl.max(tl.abs(answer - f), axis=0) * unit
        f = answer
        x = masses.a + f
        phase = _ANSWER
    else:
        change = tl.maximum(change, tl.max(tl.abs(answer - g), axis=0) * unit)
        gap = tl.exp2(masses.b - g * settings.inverse_lam_rho) * (1.0 - tl.exp2((g - answer) / settings.tau))
        error = tl.sum(tl.abs(gap), axis=0)
        phase = _DONE
    return State(phase, x, f, g, s, own_a, count, converged, error, change), relaxation


@triton.jit
def _no_relaxation(settings):
    """Before the first step."""
    zero = tl.full([], 0.0, tl.float32)
    excess = zero + settings.full
    return RelaxationState(zero, excess, zero + float("inf"), zero, tl.full([], 0, tl.int32), zero + 1.0)


@triton.jit
def _relax(relaxation, residual, count, settings):
    """How far to go beyond the answer this time, by how the residual has fallen: `sinkhorn.Relaxation`."""
    _, excess, before, first, strikes, _ = relaxation
    first = tl.where(count < _RAMP, tl.maximum(first, residual), first)
    excess = tl.where(residual > settings.ceiling * first, 0.0, excess)
    if (count > 0) & (count % settings.window == 0):
        stuck = residual > settings.enough * before
        strikes += stuck.to(tl.int32)
        raised = tl.minimum(tl.where(strikes < _STRIKES, 1.5 * excess, excess), settings.full)
        excess = tl.where(stuck, excess * 0.5, raised)
        before = residual
    omega = 1.0 + excess * tl.minimum(1.0, count * 1.0 / _RAMP)
    return RelaxationState(residual, excess, before, first, strikes, omega)


@triton.jit
def _write(
    results,
    state,
    problem,
    where,
    inside,
    mine,
    real,
    settings,
    FLOOR: tl.constexpr,
    OWN: tl.constexpr,
    CROSS: tl.constexpr,
):
    """Store what was asked for, potentials in units of cost."""
    unit = 1.0 / settings.k
    if OWN > 0:
        tl.store(results.own_a + where, state.own_a * unit, mask=inside)
    if OWN > 1:
        tl.store(results.own_b + where, state.s * unit, mask=inside)
    if CROSS > 0:
        f = state.f
        g = state.g
        if CROSS == 2:
            f = tl.where(real, _with_floor(f, settings.log_floor, FLOOR), 0.0)
            g = tl.where(real, _with_floor(g, settings.log_floor, FLOOR), 0.0)
        tl.store(results.f + where, f * unit, mask=inside)
        tl.store(results.g + where, g * unit, mask=inside)
    if mine:
        tl.store(results.count + problem, state.count)
        tl.store(results.converged + problem, state.converged != 0)
        tl.store(results.error + problem, state.error)
        tl.store(results.change + problem, state.change)


@triton.jit
def _shifts(phase, scratch, SIZE: tl.constexpr):
    """The row with the last y of a phase, of which the last two of an unbalanced transport have none of their own."""
    row = phase
    if phase >= _LAST_G:
        row = tl.where(phase == _LAST_F, _TO_F, _TO_G)
    return scratch + row * SIZE


@triton.jit
def _with_floor(x, log_floor, FLOOR: tl.constexpr):
    """``log2(2^x + floor)``."""
    if FLOOR:
        top = tl.maximum(x, log_floor)
        x = top + tl.log2(tl.exp2(x - top) + tl.exp2(log_floor - top))
    return x
