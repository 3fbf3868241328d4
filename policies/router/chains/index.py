"""The blocks of all ranks, by content: which leading blocks of a prompt each rank holds, tier by tier.

Ranks are registered, told about with events in the right order (`feed` sees to that), and matched. A rank can be dumped
and loaded, so that a new router starts from what another one knows. What nobody holds leaves no trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from policies.cluster.blocks import BlockPath, ContentTree
from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.kv_events import DumpEntry, KvCleared, KvEvent, KvRefused, KvRemoved, KvStored
from policies.errors import CapabilityError, InvariantError
from policies.router.chains.counts import Counts, Sizes
from policies.router.chains.holders import SHARED, TIERS, Columns, Holders, Mask, Overlap, Reach, beyond, reach
from policies.router.chains.lineage import Lineage, World

Semantics: TypeAlias = Literal["set", "cascade"]
"""What a removal means: `set`, the rank holds everything but those blocks; `cascade`, all that stands below them is
gone too, and blocks with unknown parents are refused: how NVIDIA Dynamo 1.6.1 keeps its tree."""

_BRANCH_BLOCKS = 128
"""Longest branch, in blocks: a rank that holds one block of a branch keeps at most the keys of so many alive."""


class ChainIndex:
    """One block size, all ranks. `counts` are the odd things, over all ranks and since the start.

    The shared tier is everybody's: a block there counts for every rank, and is gone once any rank says so; for that all
    who tell of it must give a block one id. What a rank put there stays when the rank is gone.
    """

    __slots__ = ("_everyone", "_gone", "_names", "_numbers", "_ranks", "_refused", "_tree", "_world")

    def __init__(self, semantics: Semantics = "set") -> None:
        self._tree = ContentTree(1, 1, _BRANCH_BLOCKS)
        self._world = World(self._tree, tuple(Holders() for _ in TIERS), Counts(), semantics == "cascade")
        self._ranks: dict[RankId, Lineage] = {}
        self._gone: list[Lineage] = []  # ranks that are not there any more, with what they put into the shared tier
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
        """A rank is gone, with everything that was its own."""
        lineage = self._ranks.pop(rank, None)
        if lineage is None:
            return
        del self._numbers[rank]
        self._everyone &= ~lineage.bit
        self._clear_own(lineage)
        if lineage.resident:
            self._gone.append(lineage)
        else:
            self._free(lineage)

    def _clear_own(self, lineage: Lineage) -> None:
        """All leaves the tiers that are a rank's own."""
        if self._world.tiers[SHARED].covers and lineage.holds_any(Tier.G4_REMOTE):
            for tier in TIERS[:SHARED]:
                lineage.clear(tier)
        else:
            lineage.clear()

    def _free(self, lineage: Lineage) -> None:
        """Nobody holds anything as this holder any more."""
        lineage.clear()
        self._names[lineage.bit.bit_length() - 1] = None

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
            if event.tier is Tier.G4_REMOTE:
                lineage = self._who_knows(event.parent_ext, lineage)
            lineage.store(event.tier, event.parent_ext, event.exts, event.local_hashes, event.start_position)
        elif isinstance(event, KvRemoved):
            if event.tier is Tier.G4_REMOTE:
                self._remove_shared(lineage, event.exts)
            else:
                lineage.remove(event.tier, event.exts)
        elif isinstance(event, KvCleared):
            if event.tier is None:
                self._clear_own(lineage)
            elif event.tier is Tier.G4_REMOTE:
                self._clear_shared()
            else:
                lineage.clear(event.tier)
        elif isinstance(event, KvRefused):
            self._refused += 1
        else:
            raise CapabilityError(f"{type(self).__name__} cannot take {event!r}")

    def _who_knows(self, parent: BlockHash | None, lineage: Lineage) -> Lineage:
        """The rank whose blocks say where the children of an id stand: `lineage` itself, if it can."""
        if parent is None or lineage.knows(parent):
            return lineage
        return next((one for one in self._lineages if one.knows(parent)), lineage)

    def _remove_shared(self, lineage: Lineage, exts: Sequence[BlockHash]) -> None:
        """Blocks left the shared tier, whoever had put them there."""
        left = dict.fromkeys(exts)
        for one in tuple(self._lineages):
            mine = [ext for ext in exts if one.holds(Tier.G4_REMOTE, ext)]
            if mine:
                one.remove(Tier.G4_REMOTE, mine)
                for ext in mine:
                    left.pop(ext, None)
        if left:  # unknown, or an orphan
            lineage.remove(Tier.G4_REMOTE, tuple(left))
        self._bury()

    def _clear_shared(self) -> None:
        for one in tuple(self._lineages):
            one.clear(Tier.G4_REMOTE)
        self._bury()

    def _bury(self) -> None:
        """Forget ranks that are gone and have nothing in the shared tier any more."""
        for one in [one for one in self._gone if not one.resident]:
            self._gone.remove(one)
            self._free(one)

    @property
    def _lineages(self) -> Iterator[Lineage]:
        yield from self._ranks.values()
        yield from self._gone

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
        old = self._ranks.pop(rank)
        self._everyone &= ~old.bit
        self._free(old)
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

    @property
    def is_flat(self) -> bool:
        """Whether nothing is held below device memory."""
        return not any(holders.covers for holders in self._world.tiers[1:])

    def beyond(
        self, path: BlockPath, rank: RankId, at: int, most_blocks: int, peers: Iterable[RankId] = ()
    ) -> tuple[int, int, int, int]:
        """Blocks that a rank has of a prompt below its first `at`: in host memory, on disk, in the shared tier, and in
        host memory of `peers`."""
        lineage, others = self._ranks.get(rank), 0
        for peer in peers:
            known = self._ranks.get(peer)
            others |= known.bit if known is not None else 0
        return beyond(self._world.tiers, path, lineage.bit if lineage is not None else 0, at, most_blocks, others)

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
                masks = [holders.of(branch, block) for holders in self._world.tiers]
                if any(mask & bit for mask in masks) or masks[SHARED]:
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
        return Sizes(*map(sum, zip((0, 0, 0), *(lineage.sizes for lineage in self._lineages), strict=True)))

    def sizes_of(self, rank: RankId) -> Sizes:
        return self._of(rank).sizes

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory: 0 when no rank is registered."""
        held = sum(holders.size for holders in self._world.tiers)
        return len(self._ranks) + sum(sum(lineage.sizes) for lineage in self._lineages) + held + len(self._tree)

    def counters(self) -> dict[str, int]:
        """Counts for the report, with the sizes."""
        resident, ghosts, orphans = self.sizes
        return self._world.counts.table() | {
            "refused_events": self._refused,
            "index_resident": resident,
            "index_ghosts": ghosts,
            "index_orphans": orphans,
        }
