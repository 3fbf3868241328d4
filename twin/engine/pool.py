"""The block pool of one engine with its prefix cache, kept in runs of blocks instead of single blocks.

A `Copies` object is a stretch of physical blocks with known content, all in the same state: held by `refs` requests,
or cached and evictable (`refs == 0`, then linked into one LRU list). Several copies of the same content may exist; a
look-up takes the oldest. Evicting shrinks the oldest stretch from its far end, which is the order in which single
blocks released last-to-first would die (specs: engine P1-P9). Everything costs per stretch, not per block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch, merged_runs
from policies.errors import InvariantError


class Copies:
    """Blocks `lo..hi` of `branch` in this pool. `rest` is where the tail went when the stretch was split."""

    __slots__ = ("branch", "hi", "lo", "newer", "older", "refs", "rest")

    def __init__(self, branch: Branch | None, lo: int, hi: int, refs: int) -> None:
        self.branch = branch
        self.lo = lo
        self.hi = hi
        self.refs = refs
        self.rest: Copies | None = None
        self.older: Copies | None = None
        self.newer: Copies | None = None

    def __repr__(self) -> str:
        return f"Copies({self.branch}, {self.lo}..{self.hi}, refs={self.refs})"


class Hold(NamedTuple):
    """A request's claim on blocks `lo..hi`; they start in `copies` and go on in its `rest`."""

    copies: Copies
    lo: int
    hi: int


class Match(NamedTuple):
    """A cached prefix: which copies, how many blocks, and how many of those nobody holds now."""

    parts: tuple[Hold, ...]
    blocks: int
    inactive: int


NO_MATCH = Match((), 0, 0)


class BlockPool:
    """`capacity` blocks: free, owned by requests (private or published), or cached and evictable.

    With `events` on, `stored` and `removed` collect what became findable and what was lost since they were last
    taken; content that only one request can use is left out of both. `on_evict` and `on_publish` hear of every run of
    blocks that is evicted or becomes findable (a tier below listens).
    """

    __slots__ = (
        "_by_branch",
        "_ends",
        "capacity",
        "events",
        "evictions",
        "free",
        "inactive",
        "on_evict",
        "on_publish",
        "removed",
        "stored",
    )

    def __init__(self, capacity: int, *, events: bool = False) -> None:
        self.capacity = capacity
        self.free = capacity
        self.inactive = 0
        self.evictions = 0
        self.events = events
        self.stored: list[BlockRun] = []
        self.removed: list[BlockRun] = []
        self.on_evict: Callable[[Branch, int, int], None] | None = None
        self.on_publish: Callable[[Branch, int, int], None] | None = None
        self._by_branch: dict[Branch, list[Copies]] = {}
        ends = Copies(None, 0, 0, 0)  # newer of it is the oldest stretch, older of it the newest
        ends.older = ends.newer = ends
        self._ends = ends

    @property
    def active(self) -> int:
        """Blocks owned by somebody now."""
        return self.capacity - self.free - self.inactive

    # ------------------------------------------------------------ look-up

    def match(self, pieces: tuple[tuple[Branch, int], ...], limit: int, start: int = 0) -> Match:
        """The longest cached run of `pieces` from block `start` on, up to block `limit`. Touches nothing."""
        by_branch = self._by_branch
        parts: list[Hold] = []
        pos = start
        inactive = 0
        for branch, end in pieces:
            if end <= pos:
                continue
            stretches = by_branch.get(branch)
            if stretches is None:
                break
            if end > limit:
                end = limit
            while pos < end:
                found = stretches[0]
                if found.lo <= pos < found.hi:
                    hi = found.hi
                else:
                    picked = _oldest_at(stretches, pos)
                    if picked is None:
                        break
                    found, hi = picked
                if hi > end:
                    hi = end
                parts.append(Hold(found, pos, hi))
                if not found.refs:
                    inactive += hi - pos
                pos = hi
            if pos < end or pos >= limit:
                break
        if not parts:
            return NO_MATCH
        return Match(tuple(parts), pos, inactive)

    # ------------------------------------------------------------ taking and giving back

    def pin(self, match: Match) -> list[Hold]:
        """Claim a match that `match()` has just returned; it leaves the LRU list."""
        holds = []
        for copies, lo, hi in match.parts:
            if copies.lo < lo:
                copies = self._split(copies, lo)
            if copies.hi > hi:
                self._split(copies, hi)
            if not copies.refs:
                self._unlink(copies)
                self.inactive -= hi - lo
            copies.refs += 1
            holds.append(Hold(copies, lo, hi))
        return holds

    def take(self, blocks: int) -> None:
        """Take `blocks` fresh ones, evicting the oldest cached ones for what free ones do not cover."""
        free = self.free
        if blocks <= free:
            self.free = free - blocks
            return
        short = blocks - free
        if short > self.inactive:
            raise InvariantError(
                f"pool: {blocks} blocks asked, {free} free and {self.inactive} evictable of {self.capacity}"
            )
        self.free = 0
        self._evict(short)

    def publish(self, holds: list[Hold], branch: Branch, lo: int, hi: int) -> None:
        """Blocks `lo..hi`, owned by the request with `holds`, are complete and can be found from now on."""
        stretches = self._by_branch.get(branch)
        if stretches is None:
            copies = Copies(branch, lo, hi, 1)
            self._by_branch[branch] = [copies]
            holds.append(Hold(copies, lo, hi))
        else:
            copies = stretches[0]
            if (
                holds
                and len(stretches) == 1
                and copies.hi == lo
                and copies.refs == 1
                and copies.rest is None
                and holds[-1].copies is copies
            ):
                copies.hi = hi
                holds[-1] = Hold(copies, holds[-1].lo, hi)
            else:
                copies = Copies(branch, lo, hi, 1)
                stretches.append(copies)
                holds.append(Hold(copies, lo, hi))
        if self.events and branch.keys is not None:
            self.stored.append(BlockRun(branch, lo, hi))
        if self.on_publish is not None:
            self.on_publish(branch, lo, hi)

    def release(self, holds: list[Hold], private: int) -> None:
        """Give back `private` unpublished blocks, then what `holds` claim, last block first."""
        self.free += private
        ends = self._ends
        for copies, _, hi in reversed(holds):
            if copies.hi == hi:
                copies.refs -= 1
                if not copies.refs:
                    self.inactive += hi - copies.lo
                    newest = ends.older
                    copies.older = newest
                    copies.newer = ends
                    newest.newer = ends.older = copies  # type: ignore[union-attr]
            else:
                self._release_split(copies, hi)

    # ------------------------------------------------------------ inside

    def _release_split(self, copies: Copies, hi: int) -> None:
        parts = []
        part: Copies | None = copies
        while part is not None and part.lo < hi:
            parts.append(part)
            part = part.rest
        ends = self._ends
        for part in reversed(parts):
            part.refs -= 1
            if not part.refs:
                self.inactive += part.hi - part.lo
                newest = ends.older
                part.older = newest
                part.newer = ends
                newest.newer = ends.older = part  # type: ignore[union-attr]

    def _evict(self, blocks: int) -> None:
        self.inactive -= blocks
        self.evictions += blocks
        ends = self._ends
        while blocks:
            oldest = ends.newer
            if oldest is None or oldest is ends:
                raise InvariantError("pool: nothing left to evict although blocks are counted as evictable")
            taken = oldest.hi - oldest.lo
            if taken > blocks:
                taken = blocks
            oldest.hi -= taken
            blocks -= taken
            branch = oldest.branch
            assert branch is not None
            stretches = self._by_branch[branch]
            if oldest.hi == oldest.lo:
                self._unlink(oldest)
                if len(stretches) == 1:
                    del self._by_branch[branch]
                else:
                    stretches.remove(oldest)
            if self.events and branch.keys is not None:
                self._note_removed(branch, oldest.hi, oldest.hi + taken)
            if self.on_evict is not None:
                self.on_evict(branch, oldest.hi, oldest.hi + taken)

    def _note_removed(self, branch: Branch, lo: int, hi: int) -> None:
        """Note the blocks of `lo..hi` that have no other copy."""
        if branch not in self._by_branch:
            self.removed.append(BlockRun(branch, lo, hi))
            return
        self.removed.extend(BlockRun(branch, a, b) for a, b in self.lacking(branch, [(lo, hi)]))

    def lacking(self, branch: Branch, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those blocks of the spans of a branch that are not in this pool."""
        for copies in self._by_branch.get(branch, ()):
            left = []
            for lo, hi in spans:
                if copies.hi <= lo or copies.lo >= hi:
                    left.append((lo, hi))
                    continue
                if lo < copies.lo:
                    left.append((lo, copies.lo))
                if copies.hi < hi:
                    left.append((copies.hi, hi))
            spans = left
        return spans

    def _split(self, copies: Copies, at: int) -> Copies:
        """Cut a stretch in two at block `at`; returns the tail, which is evicted before the front."""
        tail = Copies(copies.branch, at, copies.hi, copies.refs)
        tail.rest = copies.rest
        copies.hi = at
        copies.rest = tail
        assert copies.branch is not None
        stretches = self._by_branch[copies.branch]
        stretches.insert(stretches.index(copies) + 1, tail)
        if not copies.refs:
            older = copies.older
            tail.older = older
            tail.newer = copies
            older.newer = copies.older = tail  # type: ignore[union-attr]
        return tail

    @staticmethod
    def _unlink(copies: Copies) -> None:
        older, newer = copies.older, copies.newer
        older.newer = newer  # type: ignore[union-attr]
        newer.older = older  # type: ignore[union-attr]
        copies.older = copies.newer = None

    def findable(self) -> list[BlockRun]:
        """What can be found and others can share, parents before children, each block once. Touches nothing."""
        return merged_runs(
            BlockRun(branch, copies.lo, copies.hi)
            for branch, stretches in self._by_branch.items()
            if branch.keys is not None
            for copies in stretches
        )

    # ------------------------------------------------------------ for reports and tests

    def clear(self) -> None:
        """Forget every cached block that nobody holds."""
        if self.inactive:
            self.free += self.inactive
            self._evict(self.inactive)

    def audit(self) -> None:
        """Recount everything; raises InvariantError where a count is off. Costs per stretch."""
        cached = sum(c.hi - c.lo for s in self._by_branch.values() for c in s)
        idle = sum(c.hi - c.lo for s in self._by_branch.values() for c in s if not c.refs)
        linked = 0
        item = self._ends.newer
        while item is not None and item is not self._ends:
            linked += item.hi - item.lo
            item = item.newer
        if idle != self.inactive or linked != idle:
            raise InvariantError(
                f"pool: {self.inactive} evictable blocks counted, {idle} found, {linked} in the LRU list"
            )
        if not 0 <= self.free <= self.capacity or cached - idle > self.active or self.active < 0:
            raise InvariantError(f"pool: free {self.free}, evictable {idle}, published {cached} of {self.capacity}")


def _oldest_at(stretches: list[Copies], pos: int) -> tuple[Copies, int] | None:
    """The oldest stretch with block `pos` and how far it stays the oldest."""
    for i, copies in enumerate(stretches):
        if copies.lo <= pos < copies.hi:
            hi = copies.hi
            for earlier in stretches[:i]:
                if pos < earlier.lo < hi:
                    hi = earlier.lo
            return copies, hi
    return None
