"""A heap of stretches by tick. What left the heap, or moved in it, is only forgotten when it comes to the top.

A stretch stands in it under its own `tick`; None means that it does not.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from policies.kvbm.eviction.order import Stretch

_SLACK = 64


class Ticks:
    """Stretches, lowest tick first. No two blocks of a tier have one tick."""

    __slots__ = ("_entries", "_live", "_pushed")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Stretch]] = []
        self._pushed = 0
        self._live = 0

    def put(self, stretch: Stretch, tick: int) -> None:
        """Put a stretch in, or move it."""
        if stretch.tick is None:
            self._live += 1
        stretch.tick = tick
        self._pushed += 1
        heappush(self._entries, (tick, self._pushed, stretch))
        if len(self._entries) > 2 * self._live + _SLACK:
            self._tidy()

    def drop(self, stretch: Stretch) -> None:
        """Take a stretch out."""
        if stretch.tick is not None:
            stretch.tick = None
            self._live -= 1

    def first(self) -> Stretch | None:
        """The stretch with the lowest tick; it stays in."""
        entries = self._entries
        while entries:
            tick, _, stretch = entries[0]
            if stretch.tick == tick:
                return stretch
            heappop(entries)
        return None

    def _tidy(self) -> None:
        latest = {stretch: entry for entry in sorted(self._entries) if (stretch := entry[2]).tick == entry[0]}
        self._entries = list(latest.values())
        heapify(self._entries)
