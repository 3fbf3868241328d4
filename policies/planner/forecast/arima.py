"""ARIMA without the MA: AR(p) with intercept on the series or its differences, by conditional least squares.

Of the orders d ∈ {0, 1}, p ≤ 3 the one of least AICc wins (Hurvich and Tsai 1989),

    n ln(SSE / n) + 2k + 2k(k + 1)/(n − k − 1),   k = p + 2 (coefficients, intercept, variance)

over the same n targets for every order. A fit that explodes (a root of 1.05 or more) is refused and the next
best taken. With `log1p` all of this is done on ln(1 + y).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from policies.planner.forecast.series import is_constant
from policies.planner.least_squares import dot, solve

_EXPLODES = 1.05
_WINDOW = 200
"""Values that a fit looks back on."""
_MOST_P = 3
_PERFECT = 1e-12
"""Share of the series' own variance below which a residual is only rounding."""


class Fit(NamedTuple):
    """z(t) = c + Σ φ[k] z(t−k−1), z being the series (d = 0) or its differences (d = 1)."""

    d: int
    phi: tuple[float, ...]
    c: float
    aicc: float


class Arima:
    """`order` (p, d) fixes what is fitted; else AICc chooses. Fits once for each value that it has to foresee from."""

    name = "arima"

    def __init__(self, order: tuple[int, int] | None = None, log1p: bool = False, min_points: int = 5) -> None:
        self._order = order
        self._log1p = log1p
        self._min_points = min_points
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._fit: Fit | None = None
        self._fresh = False

    @property
    def ready(self) -> bool:
        return len(self._values) >= self._min_points

    @property
    def fit(self) -> Fit | None:
        """The fit to all values so far; None where no order can be fitted."""
        if not self._fresh:
            values = list(self._values)
            self._fit = fit_order(values, *self._order, 0) if self._order else best(values)
            self._fresh = True
        return self._fit

    def observe(self, y: float) -> None:
        self._values.append(math.log1p(y) if self._log1p else y)
        self._fresh = False

    def predict(self, h: int) -> float:
        values = list(self._values)
        ahead = values[-1] if is_constant(values) else self._ahead(values, h)
        return max(0.0, math.expm1(ahead) if self._log1p else ahead)

    def _ahead(self, values: list[float], h: int) -> float:
        fit = self.fit
        if fit is None:
            raise ArithmeticError("no order can be fitted to the series")
        z = differences(values) if fit.d else list(values)
        level = values[-1]
        for _ in range(h):
            z.append(fit.c + sum(phi * z[-1 - k] for k, phi in enumerate(fit.phi)))
            level = level + z[-1] if fit.d else z[-1]
        return level


def differences(values: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(values)]


def best(values: Sequence[float]) -> Fit | None:
    """The order of least AICc whose fit does not explode; of equal ones the smaller."""
    most_p = max(0, min(_MOST_P, (len(values) - 4) // 2))
    skipped = most_p + 1
    fits = [fit_order(values, p, d, skipped - p - d) for d in (0, 1) for p in range(most_p + 1)]
    found = [fit for fit in fits if fit is not None]
    return min(found, key=lambda fit: (fit.aicc, fit.d, len(fit.phi)), default=None)


def fit_order(values: Sequence[float], p: int, d: int, skip: int = 0) -> Fit | None:
    """One order by least squares, its first `skip` targets left out; None where that is not possible, or explodes."""
    z = differences(values) if d else list(values)
    targets = range(p + skip, len(z))
    n, k = len(targets), p + 2
    if n < p + 1:
        return None
    rows = [[1.0, *(z[t - 1 - j] for j in range(p))] for t in targets]
    y = [z[t] for t in targets]
    x = solve(rows, y)
    if x is None or not stable(x[1:], _EXPLODES):
        return None
    off = [a - dot(row, x) for row, a in zip(rows, y, strict=True)]
    mean = sum(values) / len(values)
    least = _PERFECT * sum((v - mean) ** 2 for v in values) + 1e-300
    sse = max(dot(off, off), least)
    spare = n - k - 1
    small = 2 * k * (k + 1) / spare if spare > 0 else math.inf
    return Fit(d, tuple(x[1:]), x[0], n * math.log(sse / n) + 2 * k + small)


def stable(phi: Sequence[float], radius: float) -> bool:
    """Whether every root of z^p − φ₁ z^(p−1) − … − φ_p lies inside `radius`: coefficients are scaled to the unit
    circle, and stepped down to partial autocorrelations, all of which must be below 1 (Durbin-Levinson backwards)."""
    a = [value / radius ** (k + 1) for k, value in enumerate(phi)]
    while a:
        last = a[-1]
        if not abs(last) < 1:
            return False
        a = [(a[k] + last * a[-2 - k]) / (1 - last * last) for k in range(len(a) - 1)]
    return True
