"""A Kalman filter for a level with a trend (local linear trend: Durbin and Koopman, ch. 3.2).

State (level, trend), F = [[1, 1], [0, 1]], H = [1, 0], Q = diag(q_level, q_trend), R = r; it begins at the first value,
with no trend and P = 1000 I. Foreseen: level + h trend, 0 at least. One prediction step for each value.
"""

from __future__ import annotations

_P0 = 1000.0
"""Variance of what is not known at the start, in squared units of the series."""


class Kalman:
    """`min_points` values until it foresees anything."""

    name = "kalman"

    def __init__(self, q_level: float = 1.0, q_trend: float = 0.1, r: float = 10.0, min_points: int = 5) -> None:
        self._q_level, self._q_trend, self._r = q_level, q_trend, r
        self._min_points = min_points
        self._points = 0
        self.level = self.trend = 0.0
        self._p = (_P0, 0.0, _P0)  # variances of level, of both together, of trend

    @property
    def ready(self) -> bool:
        return self._points >= self._min_points

    def observe(self, y: float) -> None:
        self._points += 1
        if self._points == 1:
            self.level = y
            return
        ll, lt, tt = self._p
        ll, lt, tt = ll + 2 * lt + tt + self._q_level, lt + tt, tt + self._q_trend
        self.level += self.trend
        gain_level, gain_trend = ll / (ll + self._r), lt / (ll + self._r)
        off = y - self.level
        self.level += gain_level * off
        self.trend += gain_trend * off
        self._p = ((1 - gain_level) * ll, (1 - gain_level) * lt, tt - gain_trend * lt)

    def predict(self, h: int) -> float:
        return max(0.0, self.level + h * self.trend)
