"""First in, first out: whoever was registered first goes first, the prefix of a request before its suffix."""

from __future__ import annotations

from typing import ClassVar

from policies.kvbm.eviction.order import Cut, OrderBase, Stretch
from policies.kvbm.eviction.ticks import Ticks


class Fifo(OrderBase):
    """By registration. Block p of a stretch is number `born + p - lo`; being used changes nothing."""

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        self._ticks = Ticks()

    def add(self, stretch: Stretch) -> None:
        self._ticks.put(stretch, stretch.born)

    def remove(self, stretch: Stretch) -> None:
        self._ticks.drop(stretch)

    def split(self, head: Stretch, tail: Stretch) -> None:
        self._ticks.put(tail, tail.born)

    def next(self, most: int) -> Cut | None:
        stretch = self._ticks.first()
        if stretch is None:
            return None
        return Cut(stretch, stretch.lo, min(stretch.hi, stretch.lo + most))

    def evicted(self, cut: Cut) -> None:
        stretch = cut.stretch
        if stretch.lo == stretch.hi:
            self._ticks.drop(stretch)
        else:
            self._ticks.put(stretch, stretch.born)
