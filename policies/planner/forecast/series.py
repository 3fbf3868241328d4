"""What a forecaster is: values in, one at a time, at equal intervals; values ahead out.

A forecaster may fail in any way, `Guarded` stands in front of it. It must never read a clock: time is its index.
"""

from __future__ import annotations

from typing import Protocol


class Forecaster(Protocol):
    """Foresees one quantity, of no unit of its own."""

    name: str

    @property
    def ready(self) -> bool:
        """Whether it has seen enough to foresee anything; until then the last value stands."""
        ...

    def observe(self, y: float) -> None:
        """Take in the next value, finite and 0 or more."""
        ...

    def predict(self, h: int) -> float:
        """The value `h` >= 1 intervals after the last one, 0 or more. Called while `ready` alone."""
        ...


def is_constant(values: list[float]) -> bool:
    """Whether every value is the same: then what comes next is that."""
    return min(values) == max(values)
