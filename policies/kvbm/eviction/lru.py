"""Least recently used: whoever was released longest ago goes first, the suffix of a request before its prefix."""

from __future__ import annotations

from typing import ClassVar

from policies.kvbm.eviction.order import Cut, OrderBase, Stretch
from policies.kvbm.eviction.ticks import Ticks


class Lru(OrderBase):
    """By tick of release. Block p of a stretch has tick `tick + hi - 1 - p`."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._ticks = Ticks()
        self._now = 0

    def add(self, stretch: Stretch) -> None:
        self._ticks.put(stretch, self._now)
        self._now += stretch.hi - stretch.lo

    def remove(self, stretch: Stretch) -> None:
        self._ticks.drop(stretch)

    def split(self, head: Stretch, tail: Stretch) -> None:
        tick = head.tick
        assert tick is not None
        self._ticks.put(tail, tick)
        self._ticks.put(head, tick + tail.hi - tail.lo)

    def next(self, most: int) -> Cut | None:
        stretch = self._ticks.first()
        if stretch is None:
            return None
        return Cut(stretch, max(stretch.lo, stretch.hi - most), stretch.hi)

    def evicted(self, cut: Cut) -> None:
        stretch, lo, hi = cut
        assert stretch.tick is not None
        if stretch.lo == stretch.hi:
            self._ticks.drop(stretch)
        else:
            self._ticks.put(stretch, stretch.tick + hi - lo)
