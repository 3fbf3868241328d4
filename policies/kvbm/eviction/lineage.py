"""Leaves first: a block goes only when no block that continues it is resident, and then the longest unused one.

So a prefix never dies before what stands on it. A parent that becomes a leaf keeps the tick of its own release;
ancestors that are not here are no obstacle.
"""

from __future__ import annotations

from typing import ClassVar

from policies.cluster.blocks import Branch
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.eviction.order import Cut, Stretch
from policies.kvbm.spans import Spans


def before(branch: Branch, block: int) -> tuple[Branch, int] | None:
    """The block that `block` of a branch continues; None for the first of a prompt."""
    if block <= 0:
        return None
    above: Branch | None = branch
    while above is not None and above.start >= block:
        above = above.parent
    return None if above is None else (above, block - 1)


class Lineage(Lru):
    """By tick of release, among leaves. What is not a leaf is set aside until its last child has left."""

    name: ClassVar[str] = "lineage"

    def __init__(self) -> None:
        super().__init__()
        self._resident = Spans()
        self._copies: dict[Branch, dict[int, int]] = {}  # further copies, by block
        self._tops: dict[Branch, dict[int, int]] = {}  # where resident first blocks of other branches hang on
        self._aside: dict[tuple[Branch, int], list[tuple[Stretch, int]]] = {}  # by last block, with their ticks

    def remove(self, stretch: Stretch) -> None:
        if stretch.tick is None:
            self._take_back(stretch)
        else:
            super().remove(stretch)

    def split(self, head: Stretch, tail: Stretch) -> None:
        if head.tick is None:
            tick = self._take_back(head, tail.hi)
            self._ticks.put(head, tick)
        super().split(head, tail)

    def next(self, most: int) -> Cut | None:
        while (stretch := self._ticks.first()) is not None:
            last = stretch.hi - 1
            if self._has_child(stretch.branch, last):
                assert stretch.tick is not None
                self._aside.setdefault((stretch.branch, last), []).append((stretch, stretch.tick))
                self._ticks.drop(stretch)
                continue
            tops = self._tops.get(stretch.branch, ())
            lowest = max([stretch.lo, *(at + 1 for at in tops if at < last)])
            copies = self._copies.get(stretch.branch)
            if copies:
                lowest = max(last, lowest)  # one at a time: another copy may stand in the way of the next
            return Cut(stretch, max(lowest, stretch.hi - most), stretch.hi)
        return None

    def arrived(self, branch: Branch, lo: int, hi: int) -> None:
        fresh = self._resident.add(branch, lo, hi)
        again = hi - lo - sum(b - a for a, b in fresh)
        if again:
            copies = self._copies.setdefault(branch, {})
            new = {block for a, b in fresh for block in range(a, b)}
            for block in range(lo, hi):
                if block not in new:
                    copies[block] = copies.get(block, 0) + 1
        if fresh and fresh[0][0] == branch.start and (parent := before(branch, branch.start)) is not None:
            tops = self._tops.setdefault(parent[0], {})
            tops[parent[1]] = tops.get(parent[1], 0) + 1

    def left(self, branch: Branch, lo: int, hi: int) -> None:
        copies = self._copies.get(branch)
        if copies is None:
            self._gone(branch, lo, hi)
            return
        for block in range(lo, hi):
            if block in copies:
                copies[block] -= 1
                if not copies[block]:
                    del copies[block]
            else:
                self._gone(branch, block, block + 1)
        if not copies:
            del self._copies[branch]

    def _gone(self, branch: Branch, lo: int, hi: int) -> None:
        """The last copy of these blocks has left: what they continued may be a leaf now."""
        self._resident.remove(branch, lo, hi)
        parent = before(branch, lo)
        if lo == branch.start and parent is not None:
            tops = self._tops[parent[0]]
            tops[parent[1]] -= 1
            if not tops[parent[1]]:
                del tops[parent[1]]
                if not tops:
                    del self._tops[parent[0]]
        if parent is not None and parent in self._aside:
            for stretch, tick in self._aside.pop(parent):
                self._ticks.put(stretch, tick)

    def _has_child(self, branch: Branch, block: int) -> bool:
        if block in self._tops.get(branch, ()):
            return True
        return self._resident.reach(branch, block + 1) > block + 1

    def _take_back(self, stretch: Stretch, hi: int | None = None) -> int:
        """A stretch that stood aside, last block before `hi`, does so no longer; returns its tick."""
        slot = (stretch.branch, (stretch.hi if hi is None else hi) - 1)
        aside = self._aside[slot]
        at = next(i for i, (other, _) in enumerate(aside) if other is stretch)
        _, tick = aside.pop(at)
        if not aside:
            del self._aside[slot]
        return tick
