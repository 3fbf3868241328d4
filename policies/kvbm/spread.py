"""How something that blocks have (an age, a number of uses) is spread: counts between fixed bounds, and the sum.

Weighted by blocks; no value is kept.
"""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (0.0, 0.1, 1.0, 10.0, 100.0, 1000.0)
"""Upper bounds, inclusive; what is above the last has a count of its own."""


class Spread:
    """`counts[i]` blocks had at most `BOUNDS[i]`, the last of them more than all."""

    __slots__ = ("blocks", "counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.blocks = 0
        self.total = 0.0

    def add(self, value: float, blocks: int) -> None:
        """So many blocks had this value."""
        self.counts[bisect_left(BOUNDS, value)] += blocks
        self.blocks += blocks
        self.total += value * blocks

    @property
    def mean(self) -> float | None:
        """None while nothing was counted."""
        return self.total / self.blocks if self.blocks else None
