"""Stretches of a rank's block ids: consecutive blocks of one branch, each the child of the one before it.

A run knows its place, what it hangs on and what hangs on it, and which tiers hold which of its blocks; it decides
nothing. What happens to runs is the business of `lineage`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from policies.cluster.blocks import Branch
from policies.cluster.ids import BlockHash
from policies.cluster.kv_events import DumpEntry
from policies.router.chains.holders import TIERS, Mask


class Run:
    """Consecutive blocks of one branch, from block `lo` on, each the child of the one before it.

    The first is the child of block `above_at` of `above` (None: at the start of prompts, or its parent is forgotten).
    `held[t]` has bit i set when tier t holds block i. `below[i]` are the other runs that hang on block i.
    """

    __slots__ = ("above", "above_at", "below", "branch", "exts", "held", "lo")

    def __init__(self, branch: Branch, lo: int, exts: list[BlockHash], above: Run | None, above_at: int) -> None:
        self.branch = branch
        self.lo = lo
        self.exts = exts
        self.above = above
        self.above_at = above_at
        self.held = [0] * len(TIERS)
        self.below: dict[int, list[Run]] = {}

    @property
    def anywhere(self) -> Mask:
        """The blocks that some tier holds."""
        return self.held[0] | self.held[1] | self.held[2] | self.held[3]

    def hang(self) -> None:
        """Tell the run above."""
        if self.above is not None:
            self.above.below.setdefault(self.above_at, []).append(self)


class Spot(NamedTuple):
    """Behind which block something stands: block `end` - 1 of a branch (None: at the start of prompts)."""

    branch: Branch | None
    end: int


START = Spot(None, 0)


def spot_below(run: Run | None, ext: BlockHash | None) -> Spot:
    """Behind which block the children of an id stand; of no id, or an unknown one: the start."""
    if run is None or ext is None:
        return START
    exts = run.exts
    return Spot(run.branch, run.lo + (len(exts) if exts[-1] == ext else exts.index(ext) + 1))


def spot_of(run: Run, at: int) -> Spot:
    """Behind which block a block of a run stands."""
    if run.lo + at > run.branch.start:
        return Spot(run.branch, run.lo + at)
    return Spot(run.branch.parent, run.branch.start) if run.branch.parent is not None else START


def keys_before(branch: Branch | None, end: int) -> array[int]:
    """The local hashes of all blocks from the start up to a place."""
    parts: list[array[int]] = []
    while branch is not None:
        parts.append(array("Q", (branch.keys or [])[: end - branch.start]))
        end = branch.start
        branch = branch.parent
    keys = array("Q")
    for part in reversed(parts):
        keys.extend(part)
    return keys


def entries_of(run: Run) -> Iterator[DumpEntry]:
    """A run as entries, each with the same tiers throughout."""
    offset = run.lo - run.branch.start
    have = run.branch.keys or []
    parent = run.above.exts[run.above_at] if run.above is not None else None
    changes = 0  # where a block's tiers are not those of the block before it
    for mask in run.held:
        changes |= mask ^ mask << 1
    cuts = [at for at in bits(changes & ~1) if at < len(run.exts)]
    for lo, hi in pairwise([0, *cuts, len(run.exts)]):
        hashes = array("Q", have[offset + lo : offset + hi])
        if parent is None:
            hashes = keys_before(*spot_of(run, lo)) + hashes
        yield DumpEntry(
            parent_ext=parent,
            exts=tuple(run.exts[lo:hi]),
            local_hashes=tuple(map(BlockHash, hashes)),
            tiers=tuple(tier for tier, mask in zip(TIERS, run.held, strict=True) if mask >> lo & 1),
        )
        parent = run.exts[hi - 1]


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def intervals(mask: Mask) -> Iterator[tuple[int, int]]:
    """The stretches of bits that are set, ascending."""
    shift = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        length = (~mask & mask + 1).bit_length() - 1
        yield shift + skip, shift + skip + length
        mask >>= length
        shift += skip + length
