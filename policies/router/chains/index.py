"""The blocks of all ranks, by content: which leading blocks of a prompt each rank holds, tier by tier.

Ranks are registered, told about with events in the right order (`feed` sees to that), and matched. A rank can be dumped
and loaded, so that a new router starts from what another one knows. What nobody holds leaves no trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, TypeAlias

from policies.cluster.blocks import BlockPath, ContentTree
from policies.cluster.ids import WorkerId
from policies.cluster.kv_events import DumpEntry, KvCleared, KvEvent, KvRefused, KvRemoved, KvStored, RankId
from policies.errors import CapabilityError, InvariantError
from policies.router.chains.counts import Counts, Sizes
from policies.router.chains.holders import TIERS, Columns, Holders, Mask, Overlap, Reach, reach
from policies.router.chains.lineage import Lineage, World

Semantics: TypeAlias = Literal["set", "cascade"]
"""What a removal means: `set`, the rank holds everything but those blocks; `cascade`, all that stands below them is
gone too, and blocks with unknown parents are refused: how NVIDIA Dynamo 1.6.1 keeps its tree."""

_BRANCH_BLOCKS = 128
"""Longest branch, in blocks: a rank that holds one block of a branch keeps at most the keys of so many alive."""


class ChainIndex:
    """One block size, all ranks. `counts` are the odd things, over all ranks and since the start."""

    __slots__ = ("_everyone", "_names", "_numbers", "_ranks", "_refused", "_tree", "_world")

    def __init__(self, semantics: Semantics = "set") -> None:
        self._tree = ContentTree(1, 1, _BRANCH_BLOCKS)
        self._world = World(self._tree, tuple(Holders() for _ in TIERS), Counts(), semantics == "cascade")
        self._ranks: dict[RankId, Lineage] = {}
        self._names: list[RankId | None] = []  # by bit; None: free
        self._numbers: dict[RankId, int] = {}  # bits by name
        self._everyone: Mask = 0
        self._refused = 0

    # ------------------------------------------------------------ ranks

    def up(self, rank: RankId) -> None:
        """A rank registers; whatever was known of it is dropped."""
        self.drop(rank)
        self._enter(rank, Lineage(self._world, self._free_bit()))

    def drop(self, rank: RankId) -> None:
        """A rank is gone, with everything that it held."""
        lineage = self._ranks.pop(rank, None)
        if lineage is not None:
            lineage.clear()
            self._names[self._numbers.pop(rank)] = None
            self._everyone &= ~lineage.bit

    def __contains__(self, rank: RankId) -> bool:
        return rank in self._ranks

    @property
    def ranks(self) -> tuple[RankId, ...]:
        """The registered ranks, sorted."""
        return tuple(sorted(self._ranks))

    def _free_bit(self) -> Mask:
        if None in self._names:
            return 1 << self._names.index(None)
        self._names.append(None)
        return 1 << len(self._names) - 1

    def _enter(self, rank: RankId, lineage: Lineage) -> None:
        self._ranks[rank] = lineage
        self._numbers[rank] = lineage.bit.bit_length() - 1
        self._names[self._numbers[rank]] = rank
        self._everyone |= lineage.bit

    # ------------------------------------------------------------ what they hold

    def apply(self, event: KvEvent) -> None:
        """Take in one event of a registered rank; the order is the caller's promise."""
        lineage = self._of((event.worker_id, event.dp_rank))
        if isinstance(event, KvStored):
            lineage.store(event.tier, event.parent_ext, event.exts, event.local_hashes, event.start_position)
        elif isinstance(event, KvRemoved):
            lineage.remove(event.tier, event.exts)
        elif isinstance(event, KvCleared):
            lineage.clear(event.tier)
        elif isinstance(event, KvRefused):
            self._refused += 1
        else:
            raise CapabilityError(f"{type(self).__name__} cannot take {event!r}")

    def load(self, rank: RankId, entries: Sequence[DumpEntry]) -> None:
        """A rank holds exactly this from now on; built aside, so the old content stands until all of it is there."""
        self._of(rank)
        new = Lineage(self._world._replace(counts=Counts()), self._free_bit())
        try:
            new.load(entries)
        except BaseException:
            new.clear()
            raise
        new.belongs_to(self._world)
        self.drop(rank)
        self._enter(rank, new)

    def dump(self, rank: RankId) -> tuple[DumpEntry, ...]:
        """What `load` needs, here or in another router; the age of ghosts and orphans is not told."""
        return tuple(self._of(rank).dump())

    def _of(self, rank: tuple[WorkerId, int]) -> Lineage:
        """A registered rank by its name, or by the pair that it is equal to, which is cheaper to make."""
        lineage: Lineage | None = self._ranks.get(rank)  # type: ignore[call-overload]
        if lineage is None:
            raise InvariantError(f"{RankId(*rank)} is not registered; `up` comes before what it holds")
        return lineage

    # ------------------------------------------------------------ matching

    def path(self, local_hashes: Sequence[int]) -> BlockPath:
        """The prompt with these local hashes, for `match` and for books; an array("Q") is taken as it is."""
        keys = local_hashes if isinstance(local_hashes, array) else array("Q", local_hashes)
        return self._tree.path(keys, len(keys))

    def match(self, path: BlockPath, most_blocks: int | None = None) -> Reach:
        """How far along a prompt, but no farther than `most_blocks`, each rank gets."""
        return reach(self._world.tiers, path, self._everyone, most_blocks)

    def depths(self, found: Reach) -> dict[RankId, int]:
        """Leading blocks in device memory of each rank that has any."""
        return found.depths(self._registered)

    def columns(self, found: Reach, ranks: Sequence[RankId]) -> Columns:
        """The overlaps of these ranks, in this order; of one that is not registered: nothing."""
        return found.columns(list(map(self._numbers.get, ranks)), len(self._names))

    def overlaps(self, found: Reach) -> dict[RankId, Overlap]:
        """The overlap of every registered rank, sorted by rank."""
        ranks = self.ranks
        columns = self.columns(found, ranks)
        return {rank: Overlap(*blocks) for rank, *blocks in zip(ranks, *columns, strict=True)}

    def why_not_more(self, path: BlockPath, rank: RankId) -> str:
        """What ends a rank's overlap: `hole at n` when it holds later blocks, `ends at n` when not, counting the blocks
        of the prompt from 1; `whole prompt` when nothing does.
        """
        bit = self._of(rank).bit
        overlap = self.overlaps(self.match(path))[rank]
        reached = sum(overlap)
        if reached == path.blocks:
            return "whole prompt"
        for branch, lo, hi in path.runs():
            for block in range(max(lo, reached + 1), hi):
                if any(holders.of(branch, block) & bit for holders in self._world.tiers):
                    return f"hole at {reached + 1}"
        return f"ends at {reached + 1}"

    @property
    def _registered(self) -> Sequence[RankId]:
        """Ranks by bit; a free bit is in no answer, so its name does not matter."""
        return self._names  # type: ignore[return-value]

    # ------------------------------------------------------------ how much it is

    @property
    def sizes(self) -> Sizes:
        """Block ids of all ranks, by state."""
        return Sizes(*map(sum, zip((0, 0, 0), *(lineage.sizes for lineage in self._ranks.values()), strict=True)))

    def sizes_of(self, rank: RankId) -> Sizes:
        return self._of(rank).sizes

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory: 0 when no rank is registered."""
        held = sum(holders.size for holders in self._world.tiers)
        return len(self._ranks) + sum(sum(lineage.sizes) for lineage in self._ranks.values()) + held + len(self._tree)

    def counters(self) -> dict[str, int]:
        """Counts for the report, with the sizes."""
        resident, ghosts, orphans = self.sizes
        return self._world.counts.table() | {
            "refused_events": self._refused,
            "index_resident": resident,
            "index_ghosts": ghosts,
            "index_orphans": orphans,
        }
