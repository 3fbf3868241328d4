"""Tomorrow is like today: the last value; and the mean of the last few."""

from __future__ import annotations

from collections import deque


class Constant:
    """The last value, from the first point on."""

    name = "constant"

    def __init__(self) -> None:
        self._last: float | None = None

    @property
    def ready(self) -> bool:
        return self._last is not None

    def observe(self, y: float) -> None:
        self._last = y

    def predict(self, h: int) -> float:
        assert self._last is not None
        return self._last


class MovingWindow:
    """The mean of the last `points` values."""

    name = "moving-window"

    def __init__(self, points: int = 5) -> None:
        self._values: deque[float] = deque(maxlen=points)

    @property
    def ready(self) -> bool:
        return bool(self._values)

    def observe(self, y: float) -> None:
        self._values.append(y)

    def predict(self, h: int) -> float:
        return sum(self._values) / len(self._values)
