"""Who holds which blocks of the content tree, and how far along a prompt each holder gets, tier by tier.

Holders are bits of an integer. A branch is cut into stretches whose blocks have exactly the same holders, so a prompt
is answered for all holders at once, stretch by stretch. Whoever adds twice is told, not counted: copies are the
business of `lineage`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress
from operator import and_, xor
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.ids import Tier

TIERS: tuple[Tier, ...] = tuple(Tier)
"""The tiers, fastest first; a tier's place here is its number below."""

HOST = TIERS.index(Tier.G2_HOST)
SHARED = TIERS.index(Tier.G4_REMOTE)
"""The number of the tier that is everybody's, whoever tells of a block there."""

Mask: TypeAlias = int
"""A set of holders, one bit each."""

EVERYBODY: Mask = -1

_Name = TypeVar("_Name")
_Name_contra = TypeVar("_Name_contra", contravariant=True)


class _Found(Protocol[_Name_contra]):
    """A dict by name, or a list by number."""

    def __setitem__(self, name: _Name_contra, depth: int, /) -> None: ...


_FLAGS = bytes.maketrans(b"01", b"\x00\x01")

_FEW = 8
"""Fewer bits than this are picked out one by one; writing all of them out takes a few microseconds."""


class Ends(NamedTuple):
    """Where holders stop: `masks[i]` have all blocks before `blocks[i]` and not that one, ascending; a holder is in one
    of the masks, or in none and has nothing. Two lists of numbers, because a pair for each is garbage to look through.
    """

    blocks: list[int]
    masks: list[Mask]

    def append(self, block: int, mask: Mask) -> None:
        self.blocks.append(block)
        self.masks.append(mask)


class Cover:
    """One branch in one tier: blocks `cuts[i]` to `cuts[i + 1]` are held by `masks[i]`, nobody holds those after."""

    __slots__ = ("cuts", "masks")

    def __init__(self, start: int) -> None:
        self.cuts = [start]
        self.masks: list[Mask] = [0]

    def add(self, bit: Mask, lo: int, hi: int) -> Sequence[tuple[int, int]]:
        """A holder has blocks lo to hi; returns those of them that he had before."""
        cuts, masks = self.cuts, self.masks
        if lo == cuts[-1]:  # the usual case: the branch goes on
            if len(masks) > 1 and masks[-2] == bit:
                cuts[-1] = hi
            else:
                masks[-1] = bit
                cuts.append(hi)
                masks.append(0)
            return ()
        first, last = self._cut(lo), self._cut(hi)
        before = []
        for i in range(first, last):
            if masks[i] & bit:
                before.append((cuts[i], cuts[i + 1]))
            else:
                masks[i] |= bit
        self._join(first, last)
        return before

    def remove(self, bit: Mask, lo: int, hi: int) -> None:
        """A holder has blocks lo to hi no more."""
        masks = self.masks
        first, last = self._cut(lo), self._cut(hi)
        for i in range(first, last):
            masks[i] &= ~bit
        self._join(first, last)

    def of(self, block: int) -> Mask:
        """Who holds one block of the branch."""
        return self.masks[bisect_right(self.cuts, block) - 1]

    def along(self, bit: Mask, at: int, end: int) -> int:
        """How far one of these holders at a time has all blocks from `at` on, no farther than `end`."""
        cuts, masks = self.cuts, self.masks
        i = bisect_right(cuts, at) - 1
        while at < end and masks[i] & bit:
            i += 1
            at = cuts[i]
        return min(at, end)

    def _cut(self, at: int) -> int:
        """The stretch that begins at block `at`, cut off from the one before it if need be."""
        cuts = self.cuts
        i = bisect_left(cuts, at)
        if i == len(cuts) or cuts[i] != at:
            cuts.insert(i, at)
            self.masks.insert(i, self.masks[i - 1])
        return i

    def _join(self, first: int, last: int) -> None:
        """Stretches that have the same holders again become one."""
        cuts, masks = self.cuts, self.masks
        for i in range(min(last, len(masks) - 1), max(first, 1) - 1, -1):
            if masks[i] == masks[i - 1]:
                del cuts[i], masks[i]


class Holders:
    """The branches that somebody holds something of, in one tier."""

    __slots__ = ("covers",)

    def __init__(self) -> None:
        self.covers: dict[Branch, Cover] = {}

    def add(self, bit: Mask, branch: Branch, lo: int, hi: int) -> Sequence[tuple[int, int]]:
        """A holder has blocks lo to hi of a branch; returns the stretches of them that he had before."""
        cover = self.covers.get(branch)
        if cover is None:
            cover = self.covers[branch] = Cover(branch.start)
        return cover.add(bit, lo, hi)

    def remove(self, bit: Mask, branch: Branch, lo: int, hi: int) -> None:
        """A holder has blocks lo to hi of a branch no more; each must be his."""
        cover = self.covers[branch]
        cover.remove(bit, lo, hi)
        if len(cover.cuts) == 1:
            del self.covers[branch]

    def of(self, branch: Branch, block: int) -> Mask:
        """Who holds a block."""
        cover = self.covers.get(branch)
        return cover.of(block) if cover is not None else 0

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory."""
        return sum(2 * len(cover.cuts) for cover in self.covers.values())


class Overlap(NamedTuple):
    """What one rank has of a prompt, in blocks: from the start in device memory, and what each lower tier adds."""

    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0


class Columns(NamedTuple):
    """`Overlap` of several ranks, field by field, in an order that the caller chose."""

    device_blocks: list[int]
    host_blocks: list[int]
    disk_blocks: list[int]
    shared_blocks: list[int]


class Reach:
    """How far along one prompt holders get: `ends[t]` says where tier t is left for the next lower one.

    Only tiers that hold anything are there; a tier that is not adds nothing.
    """

    __slots__ = ("ends", "tiers")

    def __init__(self, tiers: Sequence[int], ends: Sequence[Ends]) -> None:
        self.tiers = tiers
        self.ends = ends

    def depths(self, names: Sequence[_Name], tier: int = 0) -> dict[_Name, int]:
        """Leading blocks that each holder has in the tiers down to `tier`; `names` are the holders by bit.

        Who has none is left out.
        """
        ends = [ends for number, ends in zip(self.tiers, self.ends, strict=True) if number <= tier]
        found: dict[_Name, int] = {}
        if ends:
            _spread(ends[-1], names, found)
        return found

    def columns(self, bits: Sequence[int | None], width: int) -> Columns:
        """The overlaps of the holders with these bit numbers (None: holds nothing), of `width` bits in all."""
        columns = Columns([], [], [], [])
        reached = dict(zip(self.tiers, self.ends, strict=True))
        above: list[int] | None = None
        for tier, column in enumerate(columns):
            if tier not in reached:
                column.extend([0] * len(bits))
                continue
            depths = [0] * width
            _spread(reached[tier], range(width), depths)
            here = [0 if bit is None else depths[bit] for bit in bits]
            column.extend(here if above is None else map(int.__sub__, here, above))
            above = here
        return columns


def reach(tiers: Sequence[Holders], path: BlockPath, everyone: Mask, most_blocks: int | None = None) -> Reach:
    """How far along a path, and no farther than `most_blocks`, each of `everyone` gets.

    Device memory counts from the start to the first block that is missing there; from there on the next tier counts,
    and so on. Blocks behind a gap in all of that do not count. What is in the shared tier is there for everyone.
    """
    used = [number for number, holders in enumerate(tiers) if holders.covers]
    most = path.blocks if most_blocks is None else max(0, min(path.blocks, most_blocks))
    covers = [tiers[number].covers for number in used]
    if not used:
        return Reach((), ())
    if used == [0]:
        return Reach(used, [_along_one(covers[0], path, everyone, most)])
    return Reach(used, _along_all(covers, path, everyone, most, shared=used[-1] == SHARED))


def beyond(
    tiers: Sequence[Holders], path: BlockPath, bit: Mask, at: int, most_blocks: int, peers: Mask = 0
) -> tuple[int, int, int, int]:  # by host, disk, shared, peers
    """How a path goes on below `at` blocks for one holder, tier by tier as in `reach`: in host memory, then in that of
    its `peers`, on disk, in the shared tier."""
    found = [0, 0, 0, 0]
    most = min(path.blocks, most_blocks)
    ways = [(HOST, bit, 0), (HOST, peers, 3), *((tier, bit, tier - 1) for tier in range(HOST + 1, len(tiers)))]
    for tier, who, place in ways:
        if tier == SHARED:
            who = EVERYBODY
        covers = tiers[tier].covers if who else {}
        for branch, end in path.pieces if covers else ():
            end = min(end, most)
            if at < end:
                cover = covers.get(branch)
                upto = cover.along(who, at, end) if cover is not None else at
                found[place] += upto - at
                at = upto
                if at < end:
                    break
    return found[0], found[1], found[2], found[3]


def _along_one(covers: dict[Branch, Cover], path: BlockPath, everyone: Mask, most: int) -> Ends:
    """All stretches of the path at once: who is left after each, and so who is left behind where it begins."""
    cuts: list[int] = []
    masks: list[Mask] = []
    lo = 0
    for branch, end in path.pieces:
        cover = covers.get(branch)
        if cover is None or lo >= most:
            break
        lo = min(end, most)
        used = bisect_left(cover.cuts, lo)
        cuts += cover.cuts[:used]
        masks += cover.masks[:used]
    if not masks:
        return Ends([], [])
    masks[0] &= everyone
    alive = list(accumulate(masks, and_))
    gone = list(map(xor, alive, alive[1:]))
    ends = Ends(list(compress(cuts[1:], gone)), list(filter(None, gone)))
    if alive[-1]:
        ends.append(lo, alive[-1])
    return ends


def _along_all(
    covers: Sequence[dict[Branch, Cover]], path: BlockPath, everyone: Mask, most: int, *, shared: bool
) -> list[Ends]:
    """The same with several tiers: who leaves one falls into the next, at the same block. `shared`: the last of them is
    everybody's."""
    last = len(covers) - 1 if shared else None
    ends = [Ends([], []) for _ in covers]
    alive = [everyone, *(0 for _ in covers[1:])]
    for at, masks in _stretches(covers, path, most):
        falling = 0
        for tier, mask in enumerate(masks):
            if mask and tier == last:
                mask = everyone
            here = alive[tier] | falling
            alive[tier] = here & mask
            falling = here & ~mask
            if falling and at:
                ends[tier].append(at, falling)
        if not any(alive):
            return ends
    over = 0
    for tier, still in enumerate(alive):
        over |= still
        if over and most:
            ends[tier].append(most, over)
    return ends


def _stretches(
    covers: Sequence[dict[Branch, Cover]], path: BlockPath, most: int
) -> Iterator[tuple[int, tuple[Mask, ...]]]:
    """The stretches of a path in which no tier's holders change: where each begins, and the holders in each tier."""
    lo = 0
    for branch, end in path.pieces:
        here = [tier.get(branch) for tier in covers]
        end = min(end, most)
        cuts = {at for cover in here if cover is not None for at in cover.cuts if at < end}
        for at in sorted(cuts | {lo} if lo < end else ()):
            yield at, tuple(0 if cover is None else cover.of(at) for cover in here)
        lo = end


def _spread(ends: Ends, names: Sequence[_Name], found: _Found[_Name]) -> None:
    """Write down where each holder got to, by name; `names` are by bit."""
    for depth, mask in zip(ends.blocks, ends.masks, strict=True):
        count = mask.bit_count()
        if count == 1:
            found[names[mask.bit_length() - 1]] = depth
        elif count < _FEW:
            while mask:
                number = mask.bit_length() - 1
                found[names[number]] = depth
                mask ^= 1 << number
        else:
            for name in compress(names, f"{mask:b}"[::-1].encode().translate(_FLAGS)):
                found[name] = depth
