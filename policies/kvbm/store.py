"""What one tier holds, by content, and the life of its blocks: reserved, on their way in, to be found, in use, evicted.

A reference to blocks that are held nowhere else is weak (`Found`: may be used if still there) or strong (`Hold`: cannot
be evicted). Nothing can be found before it has landed, and nothing that somebody holds ever leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch
from policies.errors import InvariantError
from policies.kvbm.eviction.order import EvictionOrder, Stretch
from policies.kvbm.lifecycle import BlockState, Cause, Gauges
from policies.kvbm.spans import Span, Spans

UNLIMITED_BLOCKS = 2**60
"""Capacity of a tier that is never full."""


class Found(NamedTuple):
    """A weak reference: blocks `lo..hi` as they were found. `upgrade` says whether they are still there."""

    stretch: Stretch
    lo: int
    hi: int


class Hold(NamedTuple):
    """A strong reference to blocks `lo..hi`; they start in `stretch` and go on in its `rest`."""

    stretch: Stretch
    lo: int
    hi: int


class Lot:
    """Blocks that are reserved, being written or on their way in; nobody finds them."""

    __slots__ = ("blocks", "state")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.state = BlockState.RESERVED


class Gone(NamedTuple):
    """Blocks that were evicted or dropped: how old they were, how often used, and whether that was the last copy."""

    run: BlockRun
    age_s: float
    reuses: int
    is_last: bool


class TierStore:
    """`capacity` blocks whose inactive ones leave in the given `order`.

    `duplicates`: content that comes in a second time is kept as another copy ("allow"; a match takes the oldest), or
    the newcomer is freed ("reject").
    """

    __slots__ = ("_born", "_by_branch", "duplicates", "gauges", "order")

    def __init__(self, capacity: int, order: EvictionOrder, *, duplicates: str = "reject", name: str = "tier") -> None:
        self.gauges = Gauges(capacity, name)
        self.order = order
        self.duplicates = duplicates
        self._born = 0
        self._by_branch: dict[Branch, list[Stretch]] = {}  # oldest first

    @property
    def room(self) -> int:
        """Blocks that could be reserved now at most: free ones, and those that nobody holds."""
        return self.gauges[BlockState.FREE] + self.gauges[BlockState.INACTIVE]

    @property
    def resident(self) -> int:
        """Blocks that can be found."""
        return self.gauges[BlockState.REGISTERED] + self.gauges[BlockState.INACTIVE]

    # ------------------------------------------------------------ look-up, touches nothing

    def match(self, pieces: Sequence[tuple[Branch, int]], start: int, limit: int) -> tuple[Found, ...]:
        """The blocks of a prompt from `start` on that are here without a gap, up to block `limit`."""
        found: list[Found] = []
        at = start
        for branch, end in pieces:
            if end <= at:
                continue
            end = min(end, limit)
            parts = self.find(branch, at, end)
            found += parts
            if parts:
                at = parts[-1].hi
            if at < end or at >= limit:
                break
        return tuple(found)

    def find(self, branch: Branch, lo: int, hi: int) -> list[Found]:
        """The blocks of [lo, hi) that are here from `lo` on without a gap, oldest copies."""
        stretches = self._by_branch.get(branch)
        found: list[Found] = []
        while stretches is not None and lo < hi:
            part = _oldest_at(stretches, lo, hi)
            if part is None:
                break
            found.append(part)
            lo = part.hi
        return found

    def lacking(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """The blocks of [lo, hi) that are not here."""
        spans = [(lo, hi)]
        for stretch in self._by_branch.get(branch, ()):
            if stretch.hi > lo and stretch.lo < hi:
                spans = [
                    (a, b) for c, d in spans for a, b in ((c, min(d, stretch.lo)), (max(c, stretch.hi), d)) if a < b
                ]
        return spans

    def findable(self) -> Iterator[BlockRun]:
        """All blocks that can be found, each once."""
        for branch, stretches in self._by_branch.items():
            seen = Spans()
            for stretch in stretches:
                for lo, hi in seen.add(branch, stretch.lo, stretch.hi):
                    yield BlockRun(branch, lo, hi)

    # ------------------------------------------------------------ strong references

    def upgrade(self, found: Sequence[Found]) -> list[Hold]:
        """Turn weak references into strong ones, as far as their blocks are still there; gone ones are left out."""
        holds = []
        for stretch, lo, hi in found:
            for part in _parts_of(stretch, lo, hi):
                holds.append(self._hold(part, max(part.lo, lo), min(part.hi, hi)))
        return holds

    def release(self, holds: Sequence[Hold]) -> None:
        """Give strong references back, the last one first: what nobody holds may be evicted."""
        for stretch, lo, hi in reversed(holds):
            for part in reversed(_parts_of(stretch, lo, hi)):
                self._drop_ref(part)

    # ------------------------------------------------------------ coming in

    def reserve(self, blocks: int) -> Lot | None:
        """Take `blocks` free ones, all or none."""
        if blocks > self.gauges[BlockState.FREE]:
            return None
        self.gauges.move(blocks, BlockState.FREE, Cause.RESERVE)
        return Lot(blocks)

    def advance(self, lot: Lot, cause: Cause) -> None:
        """A lot goes on: first write, block full, load started. Ends that free it are `free`."""
        lot.state = self.gauges.move(lot.blocks, lot.state, cause)

    def free(self, lot: Lot, cause: Cause) -> None:
        """A lot comes to nothing: its request ended, its load failed or was cancelled."""
        after = self.gauges.move(lot.blocks, lot.state, cause)
        if after is not BlockState.FREE:
            raise InvariantError(f"{self.gauges.name}: {cause.value!r} does not free a block")
        lot.blocks, lot.state = 0, after

    def register(self, lot: Lot, run: BlockRun, now_s: float) -> tuple[list[Hold], list[Span]]:
        """The first blocks of a lot are complete (written here, or landed) and are these.

        Returns a strong reference to them, in order, and those of them that are new to the tier. What is here already
        is kept twice or freed, as `duplicates` says; its users are moved to the first copy.
        """
        branch, lo, hi = run
        cause = Cause.LANDED if lot.state is BlockState.LOADING else Cause.REGISTER
        if hi - lo > lot.blocks:
            raise InvariantError(f"{self.gauges.name}: {run} registered from a lot of {lot.blocks} blocks")
        fresh = self.lacking(branch, lo, hi)
        spans = [(lo, hi)] if self.duplicates == "allow" else fresh
        twice = hi - lo - sum(b - a for a, b in spans)
        lot.blocks -= hi - lo
        if twice:
            self.gauges.move(twice, lot.state, Cause.DUPLICATE)
        holds = self.upgrade(self._parts(branch, lo, hi)) if twice else []
        for a, b in spans:
            self.gauges.move(b - a, lot.state, cause)
            stretch = Stretch(branch, a, b, born=self._born, since_s=now_s)
            self._born += b - a
            self._by_branch.setdefault(branch, []).append(stretch)
            self.order.arrived(branch, a, b)
            holds.append(Hold(stretch, a, b))
        holds.sort(key=_by_hold)
        return holds, fresh

    # ------------------------------------------------------------ going out

    def evict(self, blocks: int, now_s: float) -> list[Gone]:
        """Make up to `blocks` of the inactive ones free, in order; fewer where the order lets no more go."""
        gone: list[Gone] = []
        while blocks > 0 and (cut := self.order.next(blocks)) is not None:
            stretch, lo, hi = cut
            if lo == stretch.lo and hi != stretch.hi:
                stretch.born += hi - lo
                stretch.lo = hi
            else:
                stretch.hi = lo
            self.order.evicted(cut)
            gone += self._gone(stretch, lo, hi, now_s)
            blocks -= hi - lo
        return gone

    def drop(self, branch: Branch, lo: int, hi: int, now_s: float) -> list[Gone]:
        """Forget these blocks as far as nobody holds them: their content is no good."""
        gone = []
        for stretch in list(self._by_branch.get(branch, ())):
            a, b = max(stretch.lo, lo), min(stretch.hi, hi)
            if a < b and not stretch.refs:
                if stretch.lo < a:
                    stretch = self._split(stretch, a)
                if b < stretch.hi:
                    self._split(stretch, b)
                self.order.remove(stretch)
                stretch.hi = stretch.lo
                gone += self._gone(stretch, a, b, now_s)
        return gone

    def clear(self, now_s: float) -> list[Gone]:
        """Forget everything that nobody holds."""
        gone = []
        for branch, stretches in list(self._by_branch.items()):
            spans = [(stretch.lo, stretch.hi) for stretch in stretches]
            for lo, hi in spans:
                gone += self.drop(branch, lo, hi, now_s)
        return gone

    # ------------------------------------------------------------ inside

    def _parts(self, branch: Branch, lo: int, hi: int) -> list[Found]:
        """Oldest copies of what is here of [lo, hi), gaps or not."""
        found: list[Found] = []
        at = lo
        for a, b in [*self.lacking(branch, lo, hi), (hi, hi)]:
            if at < a:
                found += self.find(branch, at, a)
            at = b
        return found

    def _hold(self, stretch: Stretch, lo: int, hi: int) -> Hold:
        if stretch.lo < lo:
            stretch = self._split(stretch, lo)
        if hi < stretch.hi:
            self._split(stretch, hi)
        if not stretch.refs:
            self.order.remove(stretch)
            self.gauges.move(hi - lo, BlockState.INACTIVE, Cause.MATCH)
        stretch.refs += 1
        return Hold(stretch, lo, hi)

    def _drop_ref(self, stretch: Stretch) -> None:
        stretch.refs -= 1
        if stretch.refs:
            return
        self.gauges.move(stretch.hi - stretch.lo, BlockState.REGISTERED, Cause.RELEASE)
        for seam in reversed(self.order.seams(stretch)):
            self.order.add(self._split_active(stretch, seam))
        self.order.add(stretch)

    def _split(self, stretch: Stretch, at: int) -> Stretch:
        """Cut a stretch in two at block `at`; returns the tail."""
        tail = self._split_active(stretch, at)
        if not stretch.refs:
            self.order.split(stretch, tail)
        return tail

    def _split_active(self, stretch: Stretch, at: int) -> Stretch:
        tail = Stretch(stretch.branch, at, stretch.hi, born=stretch.born + at - stretch.lo, since_s=stretch.since_s)
        tail.refs, tail.reuses, tail.level = stretch.refs, stretch.reuses, stretch.level
        tail.rest = stretch.rest
        stretch.hi = at
        stretch.rest = tail
        stretches = self._by_branch[stretch.branch]
        stretches.insert(stretches.index(stretch) + 1, tail)
        return tail

    def _gone(self, stretch: Stretch, lo: int, hi: int, now_s: float) -> list[Gone]:
        branch = stretch.branch
        self.gauges.move(hi - lo, BlockState.INACTIVE, Cause.EVICT)
        if stretch.lo == stretch.hi:
            stretches = self._by_branch[branch]
            stretches.remove(stretch)
            if not stretches:
                del self._by_branch[branch]
        self.order.left(branch, lo, hi)
        age_s = now_s - stretch.since_s
        last = self.lacking(branch, lo, hi)
        if last == [(lo, hi)]:
            return [Gone(BlockRun(branch, lo, hi), age_s, stretch.reuses, True)]
        runs = [(a, b, True) for a, b in last]
        at = lo
        for a, b in [*last, (hi, hi)]:
            if at < a:
                runs.append((at, a, False))
            at = b
        return [Gone(BlockRun(branch, a, b), age_s, stretch.reuses, is_last) for a, b, is_last in sorted(runs)]

    # ------------------------------------------------------------ for tests and the end of a run

    def audit(self) -> None:
        """Recount everything; raises InvariantError where a count is off."""
        self.gauges.check()
        counted = {True: 0, False: 0}
        for stretches in self._by_branch.values():
            for stretch in stretches:
                if stretch.lo >= stretch.hi or stretch.refs < 0:
                    raise InvariantError(f"{self.gauges.name}: {stretch} is empty, or held less than never")
                counted[stretch.refs > 0] += stretch.hi - stretch.lo
        for state, held in ((BlockState.REGISTERED, True), (BlockState.INACTIVE, False)):
            if self.gauges[state] != counted[held]:
                raise InvariantError(
                    f"{self.gauges.name}: {self.gauges[state]} blocks counted as {state.value}, {counted[held]} found"
                )


def _parts_of(stretch: Stretch, lo: int, hi: int) -> list[Stretch]:
    """Where blocks [lo, hi) of what was one stretch are now, ascending; those that have gone are left out."""
    parts = []
    part: Stretch | None = stretch
    while part is not None and part.lo < hi:
        if lo < part.hi and part.lo < part.hi:
            parts.append(part)
        part = part.rest
    return parts


def _by_hold(hold: Hold) -> int:
    return hold.lo


def _oldest_at(stretches: list[Stretch], at: int, limit: int) -> Found | None:
    """The oldest copy of block `at`, and how far it stays the oldest."""
    for i, stretch in enumerate(stretches):
        if stretch.lo <= at < stretch.hi:
            hi = min(stretch.hi, limit)
            for earlier in stretches[:i]:
                if at < earlier.lo < hi:
                    hi = earlier.lo
            return Found(stretch, at, hi)
    return None
