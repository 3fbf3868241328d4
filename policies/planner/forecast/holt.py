"""Holt's linear trend (double exponential smoothing): C. C. Holt 1957, as in Hyndman, Forecasting, ch. 8.2.

L = α y + (1 − α)(L₋ + T₋)        T = β (L − L₋) + (1 − β) T₋        foreseen: L + h T, 0 at least
"""

from __future__ import annotations


class Holt:
    """Level and trend, both smoothed; begins with the first value and no trend."""

    name = "holt"

    def __init__(self, alpha: float = 0.5, beta: float = 0.3) -> None:
        self.alpha, self.beta = alpha, beta
        self.level: float | None = None
        self.trend = 0.0
        self._points = 0

    @property
    def ready(self) -> bool:
        return self._points >= 2

    def observe(self, y: float) -> None:
        self._points += 1
        if self.level is None:
            self.level = y
            return
        before = self.level
        self.level = self.alpha * y + (1 - self.alpha) * (before + self.trend)
        self.trend = self.beta * (self.level - before) + (1 - self.beta) * self.trend

    def predict(self, h: int) -> float:
        assert self.level is not None
        return max(0.0, self.level + h * self.trend)
