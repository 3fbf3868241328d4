"""The guard around every forecaster: what goes in is finite, what comes out is too, and who fails is counted.

It also keeps how far off the forecaster was, so that a path can be drawn through what may come: a quantile, or one with
errors drawn anew from those that were made (a bootstrap).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from policies.cluster.draws import pick
from policies.planner.forecast.series import Forecaster

_RESIDUALS = 64
_MOST_TIMES = 100.0
"""A forecast beyond this many times the most that was ever seen (1 at least) is a failure, not a forecast."""


class Guarded:
    """Takes values of one quantity and foresees them; never raises for a forecaster that does.

    Zeros before the first traffic are remembered, and not fitted.
    """

    def __init__(self, model: Forecaster) -> None:
        self.model = model
        self.refused = 0
        """Values that were not taken: NaN, infinite, negative."""
        self.failures = 0
        """Forecasts that had to be replaced by the last value."""
        self.last: float | None = None
        self.points = 0
        self._most = 1.0
        self._residuals: deque[float] = deque(maxlen=_RESIDUALS)
        self._cache: dict[int, float] = {}

    @property
    def ready(self) -> bool:
        """Whether the model foresees; else the last value stands in."""
        return self.points > 0 and self.model.ready

    @property
    def residuals(self) -> tuple[float, ...]:
        """Value less forecast one interval before, oldest first; of forecasts that the model made."""
        return tuple(self._residuals)

    def observe(self, y: float) -> bool:
        """Take in the next value; False where it is refused, and nothing changes."""
        if not (math.isfinite(y) and y >= 0):
            self.refused += 1
            return False
        if self.last is not None and self.ready:
            foreseen = self.predict(1)
            assert foreseen is not None
            self._residuals.append(y - foreseen)
        self.last = y
        self._cache.clear()
        if self.points == 0 and y == 0:
            return True
        self.points += 1
        self._most = max(self._most, y)
        try:
            self.model.observe(y)
        except Exception:  # a plug-in may fail in any way, and the planner goes on
            self.failures += 1
        return True

    def predict(self, h: int) -> float | None:
        """The value `h` intervals ahead; the last one where the model is not ready or fails; None before any."""
        if self.last is None or not self.ready:
            return self.last
        known = self._cache.get(h)
        if known is None:
            known = self._cache[h] = self._asked(h)
        return known

    def quantile(self, h: int, q: float) -> float | None:
        """The `q` quantile `h` intervals ahead: forecast plus that quantile of residuals times √h, as if errors of
        successive intervals added up (Hyndman, ch. 5.5)."""
        middle = self.predict(h)
        if middle is None or not self._residuals:
            return middle
        return max(0.0, middle + empirical(sorted(self._residuals), q) * math.sqrt(h))

    def path(self, steps: int, q: float | None = None) -> tuple[float, ...]:
        """Forecasts for 1 to `steps` intervals ahead, or their `q` quantiles; empty before any value."""
        ahead = [self.predict(h) if q is None else self.quantile(h, q) for h in range(1, steps + 1)]
        return tuple(value for value in ahead if value is not None)

    def bootstrap(self, steps: int, draw: Callable[[int], float]) -> tuple[float, ...]:
        """A path with residuals drawn with replacement; `draw(k)` is the k-th number in [0, 1) of a stream."""
        errors = self._residuals or (0.0,)
        path = self.path(steps)
        return tuple(max(0.0, y + errors[pick(draw(k), len(errors))]) for k, y in enumerate(path))

    def _asked(self, h: int) -> float:
        assert self.last is not None
        try:
            ahead = float(self.model.predict(h))
        except Exception:  # as above
            ahead = math.nan
        if math.isfinite(ahead) and 0 <= ahead <= _MOST_TIMES * self._most:
            return ahead
        self.failures += 1
        return self.last


def empirical(values: list[float], q: float) -> float:
    """The `q` quantile of sorted values, interpolated linearly."""
    at = q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])
