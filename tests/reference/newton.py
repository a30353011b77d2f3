"""Slow float64 oracles in NumPy: entropic transport solved by Newton's method on the dual. One problem at a time, no
tricks.

`balanced`: max <phi, a> + <psi, b> - (1/lam) sum exp(lam (phi_i + psi_j - C_ij)), the paper's dual; its value is the
entropic distance with H(P).

`unbalanced`: max rho <a, 1 - exp(-f/rho)> + rho <b, 1 - exp(-g/rho)> - (1/lam) sum a_i b_j (exp(lam (f_i + g_j - C_ij))
- 1), the dual of
    min <P, C> + (1/lam) KL(P | a x b) + rho KL(P 1 | a) + rho KL(P^T 1 | b).
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp


def balanced(a: np.ndarray, b: np.ndarray, cost: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray, float]:
    """phi (centred so that <a, phi> = <b, psi>), psi, and the value. Costs must be finite."""
    n = len(a)
    psi = np.zeros(n)
    for strength in [*np.geomspace(min(lam, 5 / cost.max()), lam, 12), *[lam] * 10]:  # annealed Sinkhorn as a start
        for _ in range(20):
            phi = (np.log(a) - logsumexp(strength * (psi - cost), axis=1)) / strength
            psi = (np.log(b) - logsumexp(strength * (phi[:, None] - cost), axis=0)) / strength
    for _ in range(100):
        plan = np.exp(lam * (phi[:, None] + psi - cost))
        rows, columns = plan.sum(1), plan.sum(0)
        gradient = np.concatenate([a - rows, (b - columns)[:-1]])
        if np.abs(gradient).max() < 1e-14:
            break
        hessian = (
            lam * np.block([[np.diag(rows), plan], [plan.T, np.diag(columns)]])[:-1, :-1]
        )  # psi_n held: it fixes the constant
        step = np.linalg.solve(hessian, gradient)
        size = _line_search(
            lambda t: _balanced_value(phi + t * step[:n], psi + t * np.append(step[n:], 0), a, b, cost, lam)
        )
        phi, psi = phi + size * step[:n], psi + size * np.append(step[n:], 0)
    shift = (b @ psi - a @ phi) / 2
    return phi + shift, psi - shift, _balanced_value(phi, psi, a, b, cost, lam)


def _balanced_value(
    phi: np.ndarray, psi: np.ndarray, a: np.ndarray, b: np.ndarray, cost: np.ndarray, lam: float
) -> float:
    with np.errstate(over="ignore"):
        return float(phi @ a + psi @ b - np.exp(lam * (phi[:, None] + psi - cost)).sum() / lam)


def unbalanced(
    a: np.ndarray,
    b: np.ndarray,
    cost: np.ndarray,
    lam: float,
    rho: float,
    start: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """f, g and the value; costs may be infinite. ``start`` saves time, if it is the solution of a problem close by."""
    n, tau = len(a), rho / (rho + 1 / lam)
    f, g = (np.zeros(n), np.zeros(n)) if start is None else start
    for _ in range(10 if start is None else 0):
        f = -(tau / lam) * logsumexp(np.log(b) + lam * (g - cost), axis=1)
        g = -(tau / lam) * logsumexp(np.log(a)[:, None] + lam * (f[:, None] - cost), axis=0)
    for _ in range(60):
        plan = a[:, None] * b * np.exp(lam * (f[:, None] + g - cost))
        kept_a, kept_b = a * np.exp(-f / rho), b * np.exp(-g / rho)
        gradient = np.concatenate([kept_a - plan.sum(1), kept_b - plan.sum(0)])
        if np.abs(gradient).max() < 1e-14:
            break
        diagonal = np.concatenate([kept_a / rho + lam * plan.sum(1), kept_b / rho + lam * plan.sum(0)])
        hessian = np.diag(diagonal)
        hessian[:n, n:] += lam * plan
        hessian[n:, :n] += lam * plan.T
        step = np.linalg.solve(hessian, gradient)
        size = _line_search(lambda t: unbalanced_value(f + t * step[:n], g + t * step[n:], a, b, cost, lam, rho))
        f, g = f + size * step[:n], g + size * step[n:]
    return f, g, unbalanced_value(f, g, a, b, cost, lam, rho)


def unbalanced_value(
    f: np.ndarray, g: np.ndarray, a: np.ndarray, b: np.ndarray, cost: np.ndarray, lam: float, rho: float
) -> float:
    """The dual objective."""
    with np.errstate(over="ignore"):
        plan = a[:, None] * b * np.exp(lam * (f[:, None] + g - cost))
        held = rho * a @ (1 - np.exp(-f / rho)) + rho * b @ (1 - np.exp(-g / rho))
        return float(held - (plan.sum() - a.sum() * b.sum()) / lam)


def debiased_balanced(a: np.ndarray, b: np.ndarray, cost: np.ndarray, lam: float) -> float:
    """OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2."""
    return balanced(a, b, cost, lam)[2] - balanced(a, a, cost, lam)[2] / 2 - balanced(b, b, cost, lam)[2] / 2


def debiased_unbalanced(a: np.ndarray, b: np.ndarray, cost: np.ndarray, lam: float, rho: float) -> float:
    """UOT(a, b) - UOT(a, a) / 2 - UOT(b, b) / 2, plus the mass term that makes it a divergence off the simplex (zero on
    it).
    """
    parts = [unbalanced(x, y, cost, lam, rho)[2] for x, y in ((a, b), (a, a), (b, b))]
    return parts[0] - parts[1] / 2 - parts[2] / 2 + (a.sum() - b.sum()) ** 2 / (2 * lam)


def _line_search(value: object) -> float:
    """Halve a Newton step until the concave objective does not fall."""
    start, size = value(0.0), 1.0  # type: ignore[operator]
    while size > 1e-10 and not value(size) >= start - 1e-15 * abs(start):  # type: ignore[operator]
        size /= 2
    return size
