"""The prefix index: which leading blocks of a prompt each worker holds in device memory.

The truth it mirrors is the *set* of blocks that a worker holds; a prefix counts only while every block from the start
is in that set. Odd reports (unknown removals, repeated stores, stores without what stands before) are counted and
never raise. What nobody holds leaves no trace: memory is bounded by what is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from policies.cluster.blocks import BlockPath, BlockRun, Branch
from policies.cluster.ids import Place
from policies.router.walk import Ends, depths

Intervals: TypeAlias = list[tuple[int, int]]
"""Blocks [lo, hi), ascending; no two overlap or touch."""


class PrefixIndex:
    """Blocks held per worker, by branch.

    The blocks of a worker in a branch nearly always reach from the branch's start to one end. That end is what
    queries read; blocks behind a hole are kept apart until the hole is filled.

    Counts, in blocks: `duplicate_stores`; `unknown_removals`; `orphan_stores`, blocks of a report that began behind a
    block that was not held.
    """

    __slots__ = ("_blocks", "_branches", "_ends", "_stranded", "duplicate_stores", "orphan_stores", "unknown_removals")

    def __init__(self) -> None:
        self._ends: Ends = {}
        self._branches: dict[Place, set[Branch]] = {}  # where a worker is in `_ends`
        self._stranded: dict[Place, dict[Branch, Intervals]] = {}  # behind a hole
        self._blocks: dict[Place, int] = {}
        self.duplicate_stores = 0
        self.orphan_stores = 0
        self.unknown_removals = 0

    def __len__(self) -> int:
        """Blocks held, over all workers."""
        return sum(self._blocks.values())

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory: 0 when nothing is held."""
        tables = (*self._ends.values(), *self._branches.values(), *self._stranded.values())
        return len(self._blocks) + sum(map(len, tables)) + len(tables)

    def blocks(self, place: Place) -> int:
        """Blocks that one worker holds."""
        return self._blocks.get(place, 0)

    def depths(self, path: BlockPath, most_blocks: int | None = None) -> dict[Place, int]:
        """Leading blocks of `path` that each worker holds, `most_blocks` at most; who holds none is left out."""
        found = depths(self._ends, path)
        if most_blocks is not None and most_blocks < path.blocks:
            return {place: min(depth, most_blocks) for place, depth in found.items()}
        return found

    def store(self, place: Place, runs: Iterable[BlockRun]) -> None:
        """A worker holds these blocks now."""
        stranded = self._stranded.get(place, ())
        gained = last = 0
        orphaned = False
        for branch, lo, hi in runs:
            here = self._ends.get(branch)
            end = here.get(place, branch.start) if here is not None else branch.start
            orphaned = (orphaned and lo == last) or not self._holds_before(place, branch, lo, end)
            last = hi
            if lo > end or branch in stranded:
                added = self._store_apart(place, branch, lo, hi)
                stranded = self._stranded.get(place, ())
            elif hi > end:
                added = hi - end
                self._reach(place, branch, hi)
            else:
                added = 0
            gained += added
            self.duplicate_stores += hi - lo - added
            if orphaned:
                self.orphan_stores += added
        if gained:
            self._blocks[place] = self._blocks.get(place, 0) + gained

    def remove(self, place: Place, runs: Iterable[BlockRun]) -> None:
        """A worker holds these blocks no longer. Blocks after them stay held, but match no more."""
        stranded = self._stranded.get(place, ())
        lost = 0
        for branch, lo, hi in runs:
            here = self._ends.get(branch)
            end = here.get(place, branch.start) if here is not None else branch.start
            if hi < end or branch in stranded:
                taken = self._remove_apart(place, branch, lo, hi)
                stranded = self._stranded.get(place, ())
            elif lo < end:
                taken = end - lo
                self._reach(place, branch, lo)
            else:
                taken = 0
            lost += taken
            self.unknown_removals += hi - lo - taken
        if lost:
            self._blocks[place] -= lost
            if not self._blocks[place]:
                del self._blocks[place]

    def clear(self, place: Place) -> None:
        """A worker holds nothing any more."""
        for branch in self._branches.pop(place, ()):
            self._leave(place, branch)
        self._stranded.pop(place, None)
        self._blocks.pop(place, None)

    # ------------------------------------------------------------ one worker in one branch

    def _reach(self, place: Place, branch: Branch, end: int) -> None:
        """From now on the worker has the branch from its start to `end`."""
        if end > branch.start:
            here = self._ends.get(branch)
            if here is None:
                here = self._ends[branch] = {}
            if place not in here:
                mine = self._branches.get(place)
                if mine is None:
                    mine = self._branches[place] = set()
                mine.add(branch)
            here[place] = end
        elif branch in self._branches.get(place, ()):
            self._leave(place, branch)
            mine = self._branches[place]
            mine.remove(branch)
            if not mine:
                del self._branches[place]

    def _leave(self, place: Place, branch: Branch) -> None:
        here = self._ends[branch]
        del here[place]
        if not here:
            del self._ends[branch]

    def _holds_before(self, place: Place, branch: Branch, lo: int, end: int) -> bool:
        """Whether a worker that has `branch` to `end` holds the block before `lo`; True for the very first block."""
        if lo > branch.start:
            return lo <= end or _within(lo - 1, self._stranded.get(place, {}).get(branch, ()))
        above = branch.parent
        while above is not None and above.start >= lo:
            above = above.parent
        if above is None:
            return True
        if self._ends.get(above, {}).get(place, 0) >= lo:
            return True
        return _within(lo - 1, self._stranded.get(place, {}).get(above, ()))

    def _store_apart(self, place: Place, branch: Branch, lo: int, hi: int) -> int:
        held = self._held(place, branch)
        before = [(a, b) for a, b in held if b < lo]
        after = [(a, b) for a, b in held if a > hi]
        touched = held[len(before) : len(held) - len(after)]
        joined = (min([lo, *(a for a, _ in touched)]), max([hi, *(b for _, b in touched)]))
        self._hold(place, branch, [*before, joined, *after])
        return joined[1] - joined[0] - sum(b - a for a, b in touched)

    def _remove_apart(self, place: Place, branch: Branch, lo: int, hi: int) -> int:
        held = self._held(place, branch)
        kept = [(a, b) for c, d in held for a, b in ((c, min(d, lo)), (max(c, hi), d)) if a < b]
        self._hold(place, branch, kept)
        return sum(b - a for a, b in held) - sum(b - a for a, b in kept)

    def _held(self, place: Place, branch: Branch) -> Intervals:
        end = self._ends.get(branch, {}).get(place)
        front = [(branch.start, end)] if end is not None else []
        return front + self._stranded.get(place, {}).get(branch, [])

    def _hold(self, place: Place, branch: Branch, held: Intervals) -> None:
        front = held[0][1] if held and held[0][0] == branch.start else branch.start
        self._reach(place, branch, front)
        rest = held[1:] if front > branch.start else held
        mine = self._stranded.setdefault(place, {})
        if rest:
            mine[branch] = rest
        else:
            mine.pop(branch, None)
        if not mine:
            del self._stranded[place]


def _within(block: int, intervals: Iterable[tuple[int, int]]) -> bool:
    return any(lo <= block < hi for lo, hi in intervals)
