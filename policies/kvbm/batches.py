"""Batches on their way down, from the commit point on, and how to cut what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.cluster.blocks import BlockRun
from policies.kvbm.landing import Landing
from policies.kvbm.lane import Waiting
from policies.kvbm.store import Hold, Lot, TierStore


class Pinned(NamedTuple):
    """What of a batch can be copied, and the references that keep it where it is."""

    parts: list[Waiting]
    holds: list[Hold]
    store: TierStore | None  # whose they are


class Moving(NamedTuple):
    """A batch that has been committed: where it goes, what it is, and the room that it has there."""

    level: int
    parts: tuple[Waiting, ...]
    lot: Lot
    store: TierStore
    source: Pinned
    landing: Landing


def between(lo: int, hi: int, gaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [lo, hi) outside of ascending `gaps`."""
    found = []
    for a, b in [*gaps, (hi, hi)]:
        if lo < a:
            found.append((lo, a))
        lo = b
    return found


def before_first(holds: Sequence[Hold], bad: Sequence[BlockRun]) -> int:
    """Blocks before the first bad one."""
    good = 0
    for stretch, lo, hi in holds:
        first = [max(b.lo, lo) for b in bad if b.branch is stretch.branch and b.lo < hi and lo < b.hi]
        if first:
            return good + min(first) - lo
        good += hi - lo
    return good


def first_blocks(parts: Sequence[Waiting], blocks: int) -> list[Waiting]:
    """The first `blocks` of what waits."""
    kept = []
    for part in parts:
        branch, lo, hi = part.run
        if blocks <= 0:
            break
        kept.append(part._replace(run=BlockRun(branch, lo, min(hi, lo + blocks))))
        blocks -= hi - lo
    return kept


def rest(parts: Sequence[Waiting], kept: Sequence[Waiting]) -> list[Waiting]:
    """What of `parts` is not in the first of them, which were kept."""
    rest = list(parts[len(kept) :])
    if kept and kept[-1].run.hi < parts[len(kept) - 1].run.hi:
        cut = parts[len(kept) - 1]
        rest.insert(0, cut._replace(run=BlockRun(cut.run.branch, kept[-1].run.hi, cut.run.hi)))
    return rest
