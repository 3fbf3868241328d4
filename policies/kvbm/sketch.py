"""How often blocks were used lately, in little memory: a count-min sketch with small counters that are halved in time.

Four rows of counters of 4 bits, as TinyLFU has them. A count is never too low by collisions, only too high; whoever
asks for a block that was never used may be told that it was.
"""

from __future__ import annotations

import xxhash

from policies.cluster.blocks import Branch

ROWS = 4
MOST = 15
"""A counter of 4 bits goes no higher."""
_PER_WORD = 16
_HALVE_AFTER = 10
"""Increments per block of capacity after which all counters are halved."""
_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that no two blocks of a branch get one name."""


def chain_of(branch: Branch, block: int) -> int:
    """A 64-bit name of one block, content and everything before it."""
    return (branch.hash + block * _STRIDE) & _MASK


class Sketch:
    """For a tier of `capacity` blocks. `halvings` says how often all counts were halved."""

    __slots__ = ("_counters", "_left", "_period", "_places", "halvings")

    def __init__(self, capacity: int) -> None:
        self._places = max(1, capacity // 4) * _PER_WORD
        self._counters = [bytearray(self._places) for _ in range(ROWS)]
        self._period = self._left = max(1, _HALVE_AFTER * capacity)
        self.halvings = 0

    def touch(self, chain: int) -> None:
        """A block was used once more."""
        name = chain.to_bytes(8, "little")
        places = self._places
        for row, counters in enumerate(self._counters):
            at = xxhash.xxh3_64_intdigest(name, row) % places
            if counters[at] < MOST:
                counters[at] += 1
        self._left -= 1
        if not self._left:
            self._halve()

    def count(self, chain: int) -> int:
        """How often it was used, at most; 15 stands for anything above."""
        name = chain.to_bytes(8, "little")
        places = self._places
        return min(c[xxhash.xxh3_64_intdigest(name, row) % places] for row, c in enumerate(self._counters))

    def touch_run(self, branch: Branch, lo: int, hi: int) -> None:
        """All blocks of a run were used."""
        for block in range(lo, hi):
            self.touch(chain_of(branch, block))

    def _halve(self) -> None:
        table = bytes(value >> 1 for value in range(256))
        self._counters = [counters.translate(table) for counters in self._counters]
        self._left = self._period
        self.halvings += 1
