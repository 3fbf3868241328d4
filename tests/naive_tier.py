"""A tier block by block, as the rules are written: every copy of a block is an object, every choice looks at all."""

from __future__ import annotations

from collections.abc import Callable

Name = tuple[int, ...]
"""A block by everything that its content depends on: its own key and all before it."""


class Copy:
    """One physical block with content."""

    def __init__(self, name: Name, born: int) -> None:
        self.name = name
        self.born = born
        self.refs = 1
        self.tick = 0
        self.level = 0


class NaiveTier:
    """`rank` is lru, lineage, fifo or multi_lru; `level` gives the level of a block for the last of them."""

    def __init__(self, capacity: int, rank: str, duplicates: str, level: Callable[[Name], int]) -> None:
        self.capacity = capacity
        self.rank = rank
        self.duplicates = duplicates
        self.level = level
        self.copies: list[Copy] = []  # oldest first
        self._born = 0
        self._now = 0

    @property
    def free(self) -> int:
        return self.capacity - len(self.copies)

    def oldest(self, name: Name) -> Copy | None:
        return next((copy for copy in self.copies if copy.name == name), None)

    def register(self, names: list[Name]) -> list[Copy]:
        held = []
        for name in names:
            first = self.oldest(name)
            if first is not None and self.duplicates == "reject":
                first.refs += 1
                held.append(first)
                continue
            copy = Copy(name, self._born)
            self._born += 1
            self.copies.append(copy)
            held.append(copy)
        return held

    def match(self, names: list[Name]) -> list[Copy]:
        held = []
        for name in names:
            copy = self.oldest(name)
            if copy is None:
                break
            copy.refs += 1
            held.append(copy)
        return held

    def release(self, held: list[Copy]) -> None:
        for copy in reversed(held):
            copy.refs -= 1
            if not copy.refs:
                copy.tick = self._now
                self._now += 1
                copy.level = self.level(copy.name)

    def evict(self, blocks: int) -> list[tuple[Name, bool]]:
        gone = []
        for _ in range(blocks):
            candidates = [copy for copy in self.copies if not copy.refs and self._may_go(copy)]
            if not candidates:
                break
            victim = min(candidates, key=self._key)
            self.copies.remove(victim)
            gone.append((victim.name, self.oldest(victim.name) is None))
        return gone

    def drop(self, names: list[Name]) -> None:
        self.copies = [copy for copy in self.copies if copy.refs or copy.name not in names]

    def _may_go(self, copy: Copy) -> bool:
        if self.rank != "lineage":
            return True
        return not any(other.name[:-1] == copy.name for other in self.copies)

    def _key(self, copy: Copy) -> tuple[int, int]:
        if self.rank == "fifo":
            return (0, copy.born)
        return (copy.level if self.rank == "multi_lru" else 0, copy.tick)
