"""Seasons: a trend that bends with a daily shape, by ridge regression; and plainly what was one period ago.

    y(t) = a + b t + Σ c[j] max(0, t − τ[j]) + Σ_k (s[k] sin 2πkt/P + u[k] cos 2πkt/P)

The five τ lie evenly in the first 80 % of the window, as in Prophet (Taylor and Letham 2018), with a ridge penalty on
bends and seasons in place of its priors. Needs two periods of data.
"""

from __future__ import annotations

import math
from collections import deque

from policies.planner.forecast.series import is_constant
from policies.planner.least_squares import solve_ridge

_BENDS = 5
_BEND_SHARE = 0.8


class Seasonal:
    """`period` in intervals, `harmonics` K, `ridge` the penalty on the scale of the series' own spread."""

    name = "prophet"

    def __init__(self, period: int, harmonics: int = 2, ridge: float = 0.1, window: int = 50) -> None:
        self.period, self.harmonics, self.ridge = period, harmonics, ridge
        self._values: deque[float] = deque(maxlen=max(window, 2 * period))
        self._seen = 0
        self._fit: list[float] | None = None
        self._fresh = False

    @property
    def ready(self) -> bool:
        return self._seen >= 2 * self.period

    def observe(self, y: float) -> None:
        self._values.append(y)
        self._seen += 1
        self._fresh = False

    def predict(self, h: int) -> float:
        values = list(self._values)
        if is_constant(values):
            return values[-1]
        mean = sum(values) / len(values)
        spread = max(abs(v - mean) for v in values)
        if not self._fresh:
            self._fit = self._fitted([(v - mean) / spread for v in values])
            self._fresh = True
        if self._fit is None:
            raise ArithmeticError("the seasons of the series cannot be told apart")
        features = self._features(len(values) - 1 + h, len(values))
        ahead = math.fsum(a * b for a, b in zip(features, self._fit, strict=True))
        return max(0.0, mean + spread * ahead)

    def _fitted(self, values: list[float]) -> list[float] | None:
        n = len(values)
        rows = [self._features(t, n) for t in range(n)]
        return solve_ridge(rows, values, [0.0, 0.0, *([self.ridge] * (len(rows[0]) - 2))])

    def _features(self, t: int, n: int) -> list[float]:
        """At index `t` of a window of `n`; time in windows, so that all columns are of one size."""
        bends = [_BEND_SHARE * n * (j + 1) / (_BENDS + 1) for j in range(_BENDS)]
        row = [1.0, t / n, *(max(0.0, t - bend) / n for bend in bends)]
        for k in range(1, self.harmonics + 1):
            angle = 2 * math.pi * k * t / self.period
            row.append(math.cos(angle))
            if 2 * k != self.period:  # there the sine is 0 at every index
                row.append(math.sin(angle))
        return row


class SeasonalNaive:
    """y(t − P): what every forecaster has to beat."""

    name = "seasonal-naive"

    def __init__(self, period: int) -> None:
        self._values: deque[float] = deque(maxlen=period)
        self.period = period

    @property
    def ready(self) -> bool:
        return len(self._values) == self.period

    def observe(self, y: float) -> None:
        self._values.append(y)

    def predict(self, h: int) -> float:
        return self._values[(h - 1) % self.period]
