"""Four levels by how often a block was used: the least used level goes first, and within it the least recently used.

The level is set when a block is released, from a sketch of counts; what was used often survives a burst of new blocks.
"""

from __future__ import annotations

from typing import ClassVar

from policies.cluster.blocks import Branch
from policies.errors import ConfigError
from policies.kvbm.eviction.order import Cut, OrderBase, Stretch
from policies.kvbm.eviction.ticks import Ticks
from policies.kvbm.sketch import MOST, Sketch, chain_of


class MultiLru(OrderBase):
    """Level 0 below the first of `thresholds`, 1 below the second, and so on."""

    name: ClassVar[str] = "multi_lru"

    def __init__(self, sketch: Sketch, thresholds: tuple[int, ...] = (2, 6, 15)) -> None:
        ascending = list(thresholds) == sorted(set(thresholds))
        if not thresholds or not ascending or thresholds[0] < 1 or thresholds[-1] > MOST:
            raise ConfigError(
                f"multi_lru thresholds are {thresholds}; they must ascend and lie between 1 and {MOST}, which is as "
                "far as a counter goes"
            )
        self._sketch = sketch
        self._thresholds = thresholds
        self._levels = [Ticks() for _ in range(len(thresholds) + 1)]
        self._now = 0

    def level(self, count: int) -> int:
        """The level of a block that was used `count` times."""
        return sum(count >= limit for limit in self._thresholds)

    def seams(self, stretch: Stretch) -> list[int]:
        branch = stretch.branch
        levels = [self._level_of(branch, block) for block in range(stretch.lo, stretch.hi)]
        return [stretch.lo + i for i in range(1, len(levels)) if levels[i] != levels[i - 1]]

    def add(self, stretch: Stretch) -> None:
        stretch.level = self._level_of(stretch.branch, stretch.lo)
        self._levels[stretch.level].put(stretch, self._now)
        self._now += stretch.hi - stretch.lo

    def remove(self, stretch: Stretch) -> None:
        self._levels[stretch.level].drop(stretch)

    def split(self, head: Stretch, tail: Stretch) -> None:
        tick = head.tick
        assert tick is not None
        tail.level = head.level
        self._levels[head.level].put(tail, tick)
        self._levels[head.level].put(head, tick + tail.hi - tail.lo)

    def next(self, most: int) -> Cut | None:
        for ticks in self._levels:
            stretch = ticks.first()
            if stretch is not None:
                return Cut(stretch, max(stretch.lo, stretch.hi - most), stretch.hi)
        return None

    def evicted(self, cut: Cut) -> None:
        stretch, lo, hi = cut
        assert stretch.tick is not None
        ticks = self._levels[stretch.level]
        if stretch.lo == stretch.hi:
            ticks.drop(stretch)
        else:
            ticks.put(stretch, stretch.tick + hi - lo)

    def _level_of(self, branch: Branch, block: int) -> int:
        return self.level(self._sketch.count(chain_of(branch, block)))
