"""A radix ledger that says what its sequences bring into the tree: prompts as they enter it, what was generated when
its request lets go.

Pages that a decoding request completes are written into the tree late, and at other times with leaps than without; so
nobody is told of them before. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.blocks import BlockRun
from twin.engine.batch import DecodeBatch
from twin.engine.radix import RadixCache
from twin.engine.radix_ledger import RadixLedger
from twin.engine.sequence import Sequence


class TellingLedger(RadixLedger):
    """`tell` hears of runs of pages, parents first, whether somebody else had them there before or not (None: nobody
    wants to know)."""

    __slots__ = ("_tell", "_told")

    def __init__(self, pool: RadixCache, batch: DecodeBatch, *, tell: Callable[[list[BlockRun]], None] | None) -> None:
        super().__init__(pool, batch, caching=True)
        self._tell = tell
        self._told: dict[Sequence, int] = {}  # pages of a sequence that have been told of, or were there when it came

    def _take(self, seq: Sequence, pages: int, below: int) -> None:
        self.nothing_new(seq)
        super()._take(seq, pages, below)

    def nothing_new(self, seq: Sequence) -> None:
        """What a sequence has in the tree now is known to be there."""
        if self._tell is not None:
            self._told[seq] = seq.published

    def publish_computed(self, seq: Sequence) -> None:
        super().publish_computed(seq)
        self._say(seq)

    def release(self, seq: Sequence) -> None:
        self._say(seq)
        self._told.pop(seq, None)
        super().release(seq)

    def _say(self, seq: Sequence) -> None:
        """What of a sequence is new in the tree."""
        if self._tell is None or seq not in self._told:
            return
        lo, upto = self._told[seq], seq.published
        self._told[seq] = upto
        new = []
        for branch, end in self.pieces(seq, upto):
            hi = min(end, upto)
            if hi > lo:
                new.append(BlockRun(branch, lo, hi))
                lo = hi
        if new:
            self._tell(new)
