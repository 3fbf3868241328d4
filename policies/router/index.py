"""The prefix index: which leading blocks of a prompt each worker holds in device memory.

The truth it mirrors is the *set* of blocks that a worker holds; a prefix counts only while every block from the start
is in that set. Odd reports (unknown removals, repeated stores, stores without what stands before) are counted and
never raise. What nobody holds leaves no trace: memory is bounded by what is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from policies.cluster.blocks import BlockPath, BlockRun, Branch
from policies.cluster.ids import WorkerId
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
        self._branches: dict[WorkerId, set[Branch]] = {}  # where a worker is in `_ends`
        self._stranded: dict[WorkerId, dict[Branch, Intervals]] = {}  # behind a hole
        self._blocks: dict[WorkerId, int] = {}
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

    def blocks(self, worker_id: WorkerId) -> int:
        """Blocks that one worker holds."""
        return self._blocks.get(worker_id, 0)

    def depths(self, path: BlockPath) -> dict[WorkerId, int]:
        """Leading blocks of `path` that each worker holds; workers that hold none are left out."""
        return depths(self._ends, path)

    def store(self, worker_id: WorkerId, runs: Iterable[BlockRun]) -> None:
        """A worker holds these blocks now."""
        stranded = self._stranded.get(worker_id, ())
        gained = last = 0
        orphaned = False
        for branch, lo, hi in runs:
            here = self._ends.get(branch)
            end = here.get(worker_id, branch.start) if here is not None else branch.start
            orphaned = (orphaned and lo == last) or not self._holds_before(worker_id, branch, lo, end)
            last = hi
            if lo > end or branch in stranded:
                added = self._store_apart(worker_id, branch, lo, hi)
                stranded = self._stranded.get(worker_id, ())
            elif hi > end:
                added = hi - end
                self._reach(worker_id, branch, hi)
            else:
                added = 0
            gained += added
            self.duplicate_stores += hi - lo - added
            if orphaned:
                self.orphan_stores += added
        if gained:
            self._blocks[worker_id] = self._blocks.get(worker_id, 0) + gained

    def remove(self, worker_id: WorkerId, runs: Iterable[BlockRun]) -> None:
        """A worker holds these blocks no longer. Blocks after them stay held, but match no more."""
        stranded = self._stranded.get(worker_id, ())
        lost = 0
        for branch, lo, hi in runs:
            here = self._ends.get(branch)
            end = here.get(worker_id, branch.start) if here is not None else branch.start
            if hi < end or branch in stranded:
                taken = self._remove_apart(worker_id, branch, lo, hi)
                stranded = self._stranded.get(worker_id, ())
            elif lo < end:
                taken = end - lo
                self._reach(worker_id, branch, lo)
            else:
                taken = 0
            lost += taken
            self.unknown_removals += hi - lo - taken
        if lost:
            self._blocks[worker_id] -= lost
            if not self._blocks[worker_id]:
                del self._blocks[worker_id]

    def clear(self, worker_id: WorkerId) -> None:
        """A worker holds nothing any more."""
        for branch in self._branches.pop(worker_id, ()):
            self._leave(worker_id, branch)
        self._stranded.pop(worker_id, None)
        self._blocks.pop(worker_id, None)

    # ------------------------------------------------------------ one worker in one branch

    def _reach(self, worker_id: WorkerId, branch: Branch, end: int) -> None:
        """From now on the worker has the branch from its start to `end`."""
        if end > branch.start:
            here = self._ends.get(branch)
            if here is None:
                here = self._ends[branch] = {}
            if worker_id not in here:
                mine = self._branches.get(worker_id)
                if mine is None:
                    mine = self._branches[worker_id] = set()
                mine.add(branch)
            here[worker_id] = end
        elif branch in self._branches.get(worker_id, ()):
            self._leave(worker_id, branch)
            mine = self._branches[worker_id]
            mine.remove(branch)
            if not mine:
                del self._branches[worker_id]

    def _leave(self, worker_id: WorkerId, branch: Branch) -> None:
        here = self._ends[branch]
        del here[worker_id]
        if not here:
            del self._ends[branch]

    def _holds_before(self, worker_id: WorkerId, branch: Branch, lo: int, end: int) -> bool:
        """Whether a worker that has `branch` to `end` holds the block before `lo`; True for the very first block."""
        if lo > branch.start:
            return lo <= end or _within(lo - 1, self._stranded.get(worker_id, {}).get(branch, ()))
        above = branch.parent
        while above is not None and above.start >= lo:
            above = above.parent
        if above is None:
            return True
        if self._ends.get(above, {}).get(worker_id, 0) >= lo:
            return True
        return _within(lo - 1, self._stranded.get(worker_id, {}).get(above, ()))

    def _store_apart(self, worker_id: WorkerId, branch: Branch, lo: int, hi: int) -> int:
        held = self._held(worker_id, branch)
        before = [(a, b) for a, b in held if b < lo]
        after = [(a, b) for a, b in held if a > hi]
        touched = held[len(before) : len(held) - len(after)]
        joined = (min([lo, *(a for a, _ in touched)]), max([hi, *(b for _, b in touched)]))
        self._hold(worker_id, branch, [*before, joined, *after])
        return joined[1] - joined[0] - sum(b - a for a, b in touched)

    def _remove_apart(self, worker_id: WorkerId, branch: Branch, lo: int, hi: int) -> int:
        held = self._held(worker_id, branch)
        kept = [(a, b) for c, d in held for a, b in ((c, min(d, lo)), (max(c, hi), d)) if a < b]
        self._hold(worker_id, branch, kept)
        return sum(b - a for a, b in held) - sum(b - a for a, b in kept)

    def _held(self, worker_id: WorkerId, branch: Branch) -> Intervals:
        end = self._ends.get(branch, {}).get(worker_id)
        front = [(branch.start, end)] if end is not None else []
        return front + self._stranded.get(worker_id, {}).get(branch, [])

    def _hold(self, worker_id: WorkerId, branch: Branch, held: Intervals) -> None:
        front = held[0][1] if held and held[0][0] == branch.start else branch.start
        self._reach(worker_id, branch, front)
        rest = held[1:] if front > branch.start else held
        mine = self._stranded.setdefault(worker_id, {})
        if rest:
            mine[branch] = rest
        else:
            mine.pop(branch, None)
        if not mine:
            del self._stranded[worker_id]


def _within(block: int, intervals: Iterable[tuple[int, int]]) -> bool:
    return any(lo <= block < hi for lo, hi in intervals)
