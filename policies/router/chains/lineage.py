"""One rank's blocks by the engine's own ids: where each stands, which tiers hold it, and what waits for its parent.

The truth to mirror is the set of blocks that the rank holds. A removed block stays known (a ghost) while others stand
below it; a block whose parent is not known is an orphan, counted and not matched until the parent comes. Odd events are
counted and never raise. Memory is at most what is held, ghosts (never more than held blocks) and orphans (capped).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from policies.cluster.blocks import Branch, ContentTree
from policies.cluster.ids import BlockHash, Tier
from policies.cluster.kv_events import DumpEntry
from policies.router.chains.counts import Counts, Sizes
from policies.router.chains.holders import TIERS, Holders, Mask
from policies.router.chains.orphans import Orphans
from policies.router.chains.runs import START, Run, Spot, bits, entries_of, intervals, spot_below, spot_of

_number = TIERS.index  # by identity, several times as fast as a dict with an enumeration's hashes


class World(NamedTuple):
    """What all ranks of an index share: the content, the holders tier by tier, the counts, and how removals work."""

    tree: ContentTree
    tiers: tuple[Holders, ...]
    counts: Counts
    cascade: bool


class Lineage:
    """The blocks of one rank, which is holder `bit` in the tiers of its world."""

    __slots__ = ("_copies", "_ghosts", "_orphans", "_where", "_world", "bit", "resident")

    def __init__(self, world: World, bit: Mask) -> None:
        self._world = world
        self.bit = bit
        self.resident = 0
        self._where: dict[BlockHash, Run] = {}
        self._ghosts: dict[BlockHash, None] = {}  # in the order in which they became ghosts
        self._copies: dict[tuple[int, Branch, int], int] = {}  # further ids of one block in one tier
        self._orphans = Orphans(world.counts)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.resident, len(self._ghosts), len(self._orphans.by_ext))

    def knows(self, ext: BlockHash) -> bool:
        """Whether it is known where a block of that id stands."""
        return ext in self._where

    def holds(self, tier: Tier, ext: BlockHash) -> bool:
        """Whether a tier holds a block of that id, whose place is known."""
        run = self._where.get(ext)
        return run is not None and bool(run.held[_number(tier)] >> run.exts.index(ext) & 1)

    def holds_any(self, tier: Tier) -> bool:
        """Whether a tier holds any block whose place is known."""
        number = _number(tier)
        return any(run.held[number] for run in self._where.values())

    def belongs_to(self, world: World) -> None:
        """Count what is odd there from now on; content and holders must be the same."""
        self._world = world
        self._orphans.count_in(world.counts)

    # ------------------------------------------------------------ the three things that happen

    def store(
        self,
        tier: Tier,
        parent: BlockHash | None,
        exts: Sequence[BlockHash],
        local_hashes: Sequence[int],
        start_position: int | None = None,
    ) -> None:
        """Blocks are held in a tier, the first below `parent` (None: at the start), each other below the last."""
        if not exts or (start_position is not None and self._misplaced(parent, start_position)):
            return
        number = _number(tier)
        if len(exts) == 1 and parent is not None and self._goes_on(number, parent, exts[0], local_hashes[0]):
            return
        keys = array("Q", local_hashes)
        if (parent is None or parent in self._where) and self._all_new(exts):
            self._store_new(number, parent, exts, keys)
        else:
            self._store_one_by_one(number, parent, exts, keys)
            self._limit_ghosts()

    def remove(self, tier: Tier, exts: Sequence[BlockHash]) -> None:
        """Blocks left a tier."""
        number = _number(tier)
        if self._world.cascade:
            exts = self._with_all_below(number, exts)
        self._remove(number, exts)
        self._limit_ghosts()

    def clear(self, tier: Tier | None = None) -> None:
        """Everything left a tier, or all of them."""
        if tier is None:
            self._clear_all()
            return
        number = _number(tier)
        self._orphans.clear(number)
        held = [
            (-run.lo - at, ext)
            for run in dict.fromkeys(self._where.values())
            for at, ext in enumerate(run.exts)
            if run.held[number] >> at & 1
        ]
        self._remove(number, [ext for _, ext in sorted(held)])  # deepest first, so that no ghost is made in vain
        self._limit_ghosts()

    def _clear_all(self) -> None:
        for run in dict.fromkeys(self._where.values()):
            for number, held in enumerate(run.held):
                for lo, hi in intervals(held):
                    self._let_go(number, run.branch, run.lo + lo, run.lo + hi)
            run.above = None  # no cycle is left behind, so branches end with their last holder
            run.below.clear()
        self._where.clear()
        self._ghosts.clear()
        self._orphans.clear(None)
        self.resident = 0

    # ------------------------------------------------------------ storing

    def _misplaced(self, parent: BlockHash | None, start: int) -> bool:
        """Whether the place that an engine states is not the one below that parent; such a store would lie."""
        run = self._where.get(parent) if parent is not None else None
        if parent is not None and run is None:
            return False  # an orphan: there is no telling
        if spot_below(run, parent).end == start:
            return False
        self._world.counts.misplaced += 1
        return True

    def _goes_on(self, number: int, parent: BlockHash, ext: BlockHash, key: int) -> bool:
        """The usual event while tokens are generated: one new id behind the last one of a run, in the same branch.

        Whether it was that; if not, nothing has changed.
        """
        where = self._where
        run = where.get(parent)
        if run is None or ext in where or ext in self._orphans.by_ext:
            return False
        branch, exts = run.branch, run.exts
        at = len(exts)
        block = run.lo + at
        if exts[-1] != parent or not self._world.tree.goes_on(branch, block, key):
            return False
        exts.append(ext)
        run.held[number] |= 1 << at
        where[ext] = run
        self._take(number, branch, block, block + 1)
        self.resident += 1
        if self._orphans.by_ext:
            self._adopt((ext,))
        return True

    def _all_new(self, exts: Sequence[BlockHash]) -> bool:
        """Whether nothing is known of these ids, and each comes once."""
        if len(exts) == 1:
            return exts[0] not in self._where and exts[0] not in self._orphans.by_ext
        new = dict.fromkeys(exts)
        if len(new) < len(exts) or not self._where.keys().isdisjoint(new):
            return False
        return not self._orphans.any_of(exts)

    def _store_new(self, number: int, parent: BlockHash | None, exts: Sequence[BlockHash], keys: array[int]) -> None:
        """Ids of which nothing is known, below a parent that is."""
        run = self._where[parent] if parent is not None else None
        self._append(number, run, spot_below(run, parent), exts, keys)
        if self._orphans.any_below(exts):
            self._adopt(exts)

    def _append(self, number: int, above: Run | None, spot: Spot, exts: Sequence[BlockHash], keys: array[int]) -> None:
        """New ids at a known place, each below the one before it, held in one tier."""
        at = spot.end - above.lo - 1 if above is not None else 0
        done = 0
        for piece in self._world.tree.below(spot.branch, spot.end, keys):
            part = exts[done : done + piece.hi - piece.lo]
            done += len(part)
            if above is not None and above.branch is piece.branch and at == len(above.exts) - 1:
                run, first = above, at + 1
                run.exts.extend(part)
            else:
                run, first = Run(piece.branch, piece.lo, list(part), above, at), 0
                run.hang()
            run.held[number] |= ((1 << len(part)) - 1) << first
            self._where.update(dict.fromkeys(part, run))
            self._take(number, *piece)
            above, at = run, len(run.exts) - 1
        self.resident += len(exts)

    def _store_one_by_one(
        self, number: int, parent: BlockHash | None, exts: Sequence[BlockHash], keys: array[int]
    ) -> None:
        """The same when something is odd; stretches of known blocks, and new ones behind them, are taken at once."""
        i = 0
        while i < len(exts):
            known = self._hold_again(number, parent, exts, keys, i)
            if known:
                i += known
                parent = exts[i - 1]
                if i < len(exts) and self._all_new(exts[i:]):
                    self._store_new(number, parent, exts[i:], keys[i:])
                    return
            else:
                self._store_one(number, parent, exts[i], keys[i])
                parent = exts[i]
                i += 1

    def _hold_again(
        self, number: int, parent: BlockHash | None, exts: Sequence[BlockHash], keys: array[int], i: int
    ) -> int:
        """How many of `exts[i:]` are known already as just these blocks; they are held from now on."""
        run = self._where.get(exts[i])
        if run is None:
            return 0
        at = run.exts.index(exts[i])
        count = min(len(exts) - i, len(run.exts) - at)
        if count > 1 and run.exts[at : at + count] != list(exts[i : i + count]):
            count = 1
        offset = run.lo + at - run.branch.start
        have = run.branch.keys
        if have is None or have[offset : offset + count] != keys[i : i + count]:
            count = 1
            if have is None or have[offset] != keys[i]:
                return 0
        above = self._where.get(parent) if parent is not None else None
        if (parent is None or above is not None) and spot_below(above, parent) != spot_of(run, at):
            return 0
        self._hold(number, run, ((1 << count) - 1) << at)
        return count

    def _hold(self, number: int, run: Run, wanted: Mask) -> None:
        """Known blocks of a run are held in a tier."""
        new = wanted & ~run.held[number]
        self._world.counts.duplicate_stores += (wanted ^ new).bit_count()
        back = new & ~run.anywhere
        run.held[number] |= new
        for lo, hi in intervals(new):
            self._take(number, run.branch, run.lo + lo, run.lo + hi)
        if back:
            self.resident += back.bit_count()
            for lo, hi in intervals(back):
                for ext in run.exts[lo:hi]:
                    del self._ghosts[ext]

    def _store_one(self, number: int, parent: BlockHash | None, ext: BlockHash, key: int) -> None:
        """One block that is new, or whose id named another one until now."""
        above = self._where.get(parent) if parent is not None else None
        spot = spot_below(above, parent)
        if ext in self._where:
            self._world.counts.ext_conflicts += 1
            self._expel(ext)
            above = self._where.get(parent) if parent is not None else None
        if parent is not None and spot is START:
            self._store_orphan(number, parent, ext, key)
            return
        tiers = 1 << number
        if ext in self._orphans.by_ext:
            orphan = self._orphans.take(ext)
            if orphan.key == key:
                tiers |= orphan.tiers
                self._world.counts.adopted += 1
            else:
                self._world.counts.ext_conflicts += 1
        self._place(above, spot, ext, key, tiers)
        self._adopt((ext,))

    def _place(self, above: Run | None, spot: Spot, ext: BlockHash, key: int, tiers: int) -> None:
        """A new id at a known place, held in one tier or several."""
        first = (tiers & -tiers).bit_length() - 1
        self._append(first, above, spot, (ext,), array("Q", (key,)))
        run = self._where[ext]
        for number in bits(tiers & ~(1 << first)):
            self._hold(number, run, 1 << len(run.exts) - 1)

    def _take(self, number: int, branch: Branch, lo: int, hi: int) -> None:
        """Hold blocks; those held already get one copy more."""
        for first, last in self._world.tiers[number].add(self.bit, branch, lo, hi):
            for block in range(first, last):
                slot = (number, branch, block)
                self._copies[slot] = self._copies.get(slot, 0) + 1

    # ------------------------------------------------------------ orphans

    def _store_orphan(self, number: int, parent: BlockHash, ext: BlockHash, key: int) -> None:
        if self._world.cascade:
            self._world.counts.unknown_parents += 1
        else:
            self._orphans.store(number, parent, ext, key)

    def _adopt(self, exts: Sequence[BlockHash]) -> None:
        """Place what waited for these ids, and what waited for that; nearest first."""
        parents = deque(exts)
        while self._orphans.by_ext and parents:
            parent = parents.popleft()
            for ext, orphan in self._orphans.take_below(parent):
                run = self._where[parent]
                self._place(run, spot_below(run, parent), ext, orphan.key, orphan.tiers)
                parents.append(ext)

    # ------------------------------------------------------------ removing

    def _remove(self, number: int, exts: Sequence[BlockHash]) -> None:
        where = self._where
        branch: Branch | None = None
        lo = hi = at = 0
        run: Run | None = None
        for ext in exts:
            found = where.get(ext)
            if found is None:
                if not self._orphans.remove(number, ext):
                    self._world.counts.unknown_removals += 1
                continue
            if found is run and 0 < at <= len(run.exts) and run.exts[at - 1] == ext:
                at -= 1
            elif found is run and at + 1 < len(run.exts) and run.exts[at + 1] == ext:
                at += 1
            else:
                run = found
                at = len(run.exts) - 1 if run.exts[-1] == ext else run.exts.index(ext)
            if not run.held[number] >> at & 1:
                self._world.counts.unknown_removals += 1
                continue
            block = run.lo + at
            if run.branch is branch and block == lo - 1:
                lo = block
            elif run.branch is branch and block == hi:
                hi += 1
            else:
                if branch is not None:
                    self._let_go(number, branch, lo, hi)
                branch, lo, hi = run.branch, block, block + 1
            run.held[number] ^= 1 << at
            if not run.anywhere >> at & 1:
                self._lose(run, at, ext)
        if branch is not None:
            self._let_go(number, branch, lo, hi)

    def _let_go(self, number: int, branch: Branch, lo: int, hi: int) -> None:
        """Hold blocks no more, or one copy fewer of them."""
        holders, bit = self._world.tiers[number], self.bit
        if not self._copies:
            holders.remove(bit, branch, lo, hi)
            return
        for block in range(lo, hi):
            slot = (number, branch, block)
            copies = self._copies.get(slot, 0)
            if copies > 1:
                self._copies[slot] = copies - 1
            elif copies:
                del self._copies[slot]
            else:
                holders.remove(bit, branch, block, block + 1)

    def _lose(self, run: Run, at: int, ext: BlockHash) -> None:
        """No tier holds a block any more: it is a ghost while anything stands below it."""
        self.resident -= 1
        self._ghosts[ext] = None
        if at == len(run.exts) - 1 and at not in run.below:
            self._prune(run)

    def _prune(self, run: Run | None) -> None:
        """Forget ghosts that nothing stands below, from the end of a run upwards."""
        while run is not None:
            exts, below, anywhere = run.exts, run.below, run.anywhere
            while exts and not anywhere >> len(exts) - 1 & 1 and len(exts) - 1 not in below:
                ext = exts.pop()
                del self._where[ext], self._ghosts[ext]
            if exts:
                return
            run = self._unhang(run)

    def _unhang(self, run: Run) -> Run | None:
        """Take a run from the one above it; returns that one."""
        above = run.above
        if above is not None:
            runs = above.below[run.above_at]
            runs.remove(run)
            if not runs:
                del above.below[run.above_at]
            run.above = None
        return above

    def _limit_ghosts(self) -> None:
        """Ghosts are never more than what is held: the oldest is forgotten, what stands below stays where it is."""
        while len(self._ghosts) > self.resident:
            self._world.counts.ghosts_dropped += 1
            self._forget(next(iter(self._ghosts)))

    def _expel(self, ext: BlockHash) -> None:
        """An id names this block no more: no tier holds it under that id, and nothing is below it."""
        run = self._where[ext]
        at = run.exts.index(ext)
        if run.anywhere >> at & 1:
            for number, held in enumerate(run.held):
                if held >> at & 1:
                    run.held[number] ^= 1 << at
                    self._let_go(number, run.branch, run.lo + at, run.lo + at + 1)
            self.resident -= 1
            self._ghosts[ext] = None
        self._forget(ext)

    def _forget(self, ext: BlockHash) -> None:
        """Forget a ghost in the middle: its children keep their places and have no parent any more."""
        run = self._where.pop(ext)
        del self._ghosts[ext]
        at = run.exts.index(ext)
        for child in run.below.pop(at, ()):
            child.above = None
        rest = run.exts[at + 1 :]
        if rest:
            self._split_off(run, at + 1, rest)
        del run.exts[at:]
        run.held = [held & (1 << at) - 1 for held in run.held]
        self._prune(run)

    def _split_off(self, run: Run, at: int, exts: list[BlockHash]) -> None:
        """The end of a run becomes a run of its own, without a parent."""
        new = Run(run.branch, run.lo + at, exts, None, 0)
        new.held = [held >> at for held in run.held]
        for place in [place for place in run.below if place >= at]:
            new.below[place - at] = run.below.pop(place)
            for child in new.below[place - at]:
                child.above, child.above_at = new, place - at
        self._where.update(dict.fromkeys(exts, new))

    def _with_all_below(self, number: int, exts: Sequence[BlockHash]) -> list[BlockHash]:
        """The ids, each followed by all below it that the tier holds; unknown ones stay, to be counted."""
        found: dict[BlockHash, None] = {}
        for ext in exts:
            run = self._where.get(ext)
            if run is None or not run.held[number] >> run.exts.index(ext) & 1:
                found.setdefault(ext)
                continue
            stack = [(run, run.exts.index(ext))]
            while stack:
                here, first = stack.pop()
                for at in range(first, len(here.exts)):
                    if here.held[number] >> at & 1:
                        found.setdefault(here.exts[at])
                    stack += [(child, 0) for child in here.below.get(at, ())]
        return list(found)

    # ------------------------------------------------------------ dump and load

    def dump(self) -> Iterator[DumpEntry]:
        """All that is known, parents before children, orphans last."""
        told: set[Run] = set()
        for run in dict.fromkeys(self._where.values()):
            line: list[Run] = []
            above: Run | None = run
            while above is not None and above not in told:
                line.append(above)
                told.add(above)
                above = above.above
            for new in reversed(line):
                yield from entries_of(new)
        for ext, orphan in self._orphans.by_ext.items():
            tiers = tuple(TIERS[number] for number in bits(orphan.tiers))
            yield DumpEntry(parent_ext=orphan.parent, exts=(ext,), local_hashes=(BlockHash(orphan.key),), tiers=tiers)

    def load(self, entries: Sequence[DumpEntry]) -> None:
        """Take in what `dump`, or an engine, tells of a rank that holds nothing here yet."""
        ghosts = []
        for entry in entries:
            before = len(entry.local_hashes) - len(entry.exts)
            if before:
                self._load_below_nothing(entry, before)
            else:
                for tier in entry.tiers or TIERS[:1]:
                    self.store(tier, entry.parent_ext, entry.exts, entry.local_hashes)
            if not entry.tiers:
                ghosts.append(entry.exts)
        for exts in ghosts:
            self._remove(0, exts)
        self._limit_ghosts()

    def _load_below_nothing(self, entry: DumpEntry, before: int) -> None:
        """Blocks whose parent is not known but whose place is."""
        keys = array("Q", entry.local_hashes)
        end = before
        (*_, last) = self._world.tree.below(None, 0, keys[:before])
        for ext, key in zip(entry.exts, keys[before:], strict=True):
            assert ext not in self._where
            above = self._where.get(entry.exts[end - before - 1]) if end > before else None
            spot = spot_below(above, entry.exts[end - before - 1]) if above is not None else Spot(last.branch, end)
            tiers = sum(1 << _number(tier) for tier in entry.tiers) or 1
            self._place(above, spot, ext, key, tiers)
            end += 1
        self._adopt(entry.exts)
