"""Sets of blocks, kept as runs: which blocks of which branches.

Every question and every change costs per run that it touches, never per block. It knows no tier and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from policies.cluster.blocks import BlockRun, Branch

Span: TypeAlias = tuple[int, int]
"""Blocks [lo, hi)."""
Reach: TypeAlias = Callable[[Branch, int], int]
"""How far a branch goes on somewhere from a block that is there; that block itself where it is not."""


def reach_together(several: Sequence[Spans], branch: Branch, at: int) -> int:
    """How far a branch goes on from block `at` without a gap, in one set or another."""
    while (further := max((spans.reach(branch, at) for spans in several), default=at)) > at:
        at = further
    return at


def along(pieces: Iterable[tuple[Branch, int]], at: int, limit: int, reach: Reach) -> int:
    """How far a prompt goes on from block `at` without a gap, `limit` at most, as `reach` says of each branch."""
    for branch, end in pieces:
        end = min(end, limit)
        if at < end:
            at = min(reach(branch, at), end)
            if at < end:
                break
    return at


class Spans:
    """A set of blocks. Per branch its spans ascend, and no two of them overlap or touch."""

    __slots__ = ("_by_branch", "blocks")

    def __init__(self) -> None:
        self._by_branch: dict[Branch, list[Span]] = {}
        self.blocks = 0

    def __iter__(self) -> Iterator[BlockRun]:
        for branch, spans in self._by_branch.items():
            for lo, hi in spans:
                yield BlockRun(branch, lo, hi)

    def lacking(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """The blocks of [lo, hi) that are not in the set."""
        found = []
        for a, b in self._by_branch.get(branch, ()):
            if b <= lo:
                continue
            if a >= hi:
                break
            if lo < a:
                found.append((lo, a))
            lo = b
        if lo < hi:
            found.append((lo, hi))
        return found

    def common(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """The blocks of [lo, hi) that are in the set."""
        return [
            (a if a > lo else lo, b if b < hi else hi) for a, b in self._by_branch.get(branch, ()) if a < hi and lo < b
        ]

    def reach(self, branch: Branch, at: int) -> int:
        """How far the set goes on without a gap from block `at`; `at` itself when that is not in it."""
        for a, b in self._by_branch.get(branch, ()):
            if a <= at < b:
                return b
        return at

    def add(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """Put [lo, hi) in; returns what was not in before."""
        spans = self._by_branch.get(branch)
        if spans is None:
            self._by_branch[branch] = [(lo, hi)]
            self.blocks += hi - lo
            return [(lo, hi)]
        fresh = self.lacking(branch, lo, hi)
        if fresh:
            before = [span for span in spans if span[1] < lo]
            after = [span for span in spans if span[0] > hi]
            touched = spans[len(before) : len(spans) - len(after)]
            joined = (min([lo, *(a for a, _ in touched)]), max([hi, *(b for _, b in touched)]))
            self._by_branch[branch] = [*before, joined, *after]
            self.blocks += sum(b - a for a, b in fresh)
        return fresh

    def remove(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """Take [lo, hi) out; returns what was in."""
        spans = self._by_branch.get(branch)
        if spans is None:
            return []
        gone = self.common(branch, lo, hi)
        if gone:
            left = [(a, b) for c, d in spans for a, b in ((c, min(d, lo)), (max(c, hi), d)) if a < b]
            if left:
                self._by_branch[branch] = left
            else:
                del self._by_branch[branch]
            self.blocks -= sum(b - a for a, b in gone)
        return gone

    def clear(self) -> list[BlockRun]:
        """Take everything out; returns what was in."""
        gone = list(self)
        self._by_branch.clear()
        self.blocks = 0
        return gone
