"""Blocks of one rank whose parent is not known: held, counted, and not matched until the parent comes.

There are never more than `MOST_ORPHANS`; the oldest is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cluster.ids import BlockHash
from policies.router.chains.counts import Counts

MOST_ORPHANS = 65_536
"""Orphans that a rank may have."""


class Orphan:
    """What is known of a block without a parent: the id that it waits for, its local hash, and its tiers as bits."""

    __slots__ = ("key", "parent", "tiers")

    def __init__(self, parent: BlockHash, key: int) -> None:
        self.parent = parent
        self.key = key
        self.tiers = 0


class Orphans:
    """The orphans of a rank, by id (`by_ext`, to be read only, the oldest first) and by the id that they wait for."""

    __slots__ = ("_counts", "_waiting", "by_ext")

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.by_ext: dict[BlockHash, Orphan] = {}
        self._waiting: dict[BlockHash, dict[BlockHash, None]] = {}

    def any_of(self, exts: Sequence[BlockHash]) -> bool:
        """Whether one of these is an orphan."""
        return bool(self.by_ext) and not self.by_ext.keys().isdisjoint(exts)

    def any_below(self, exts: Sequence[BlockHash]) -> bool:
        """Whether an orphan waits for one of these."""
        return bool(self._waiting) and not self._waiting.keys().isdisjoint(exts)

    def store(self, number: int, parent: BlockHash, ext: BlockHash, key: int) -> None:
        """An orphan is held in a tier."""
        orphan = self.by_ext.get(ext)
        if orphan is not None and (orphan.parent, orphan.key) != (parent, key):
            self._counts.ext_conflicts += 1
            self.take(ext)
            orphan = None
        if orphan is None:
            orphan = self.by_ext[ext] = Orphan(parent, key)
            self._waiting.setdefault(parent, {})[ext] = None
        if orphan.tiers >> number & 1:
            self._counts.duplicate_stores += 1
            return
        orphan.tiers |= 1 << number
        self._counts.orphans += 1
        if len(self.by_ext) > MOST_ORPHANS:
            self._counts.orphans_dropped += 1
            self.take(next(iter(self.by_ext)))

    def remove(self, number: int, ext: BlockHash) -> bool:
        """Whether such an orphan was held in the tier; it is no more."""
        orphan = self.by_ext.get(ext)
        if orphan is None or not orphan.tiers >> number & 1:
            return False
        orphan.tiers ^= 1 << number
        if not orphan.tiers:
            self.take(ext)
        return True

    def clear(self, number: int | None) -> None:
        """All left a tier, or all tiers."""
        if number is None:
            self.by_ext.clear()
            self._waiting.clear()
        else:
            for ext in tuple(self.by_ext):
                self.remove(number, ext)

    def take(self, ext: BlockHash) -> Orphan:
        """Forget an orphan."""
        orphan = self.by_ext.pop(ext)
        waiting = self._waiting[orphan.parent]
        del waiting[ext]
        if not waiting:
            del self._waiting[orphan.parent]
        return orphan

    def take_below(self, parent: BlockHash) -> list[tuple[BlockHash, Orphan]]:
        """The orphans that waited for this id; they are adopted, and counted."""
        found = [(ext, self.by_ext.pop(ext)) for ext in self._waiting.pop(parent, ())]
        self._counts.adopted += len(found)
        return found

    def count_in(self, counts: Counts) -> None:
        """Count there from now on."""
        self._counts = counts
