"""What engines say about their KV blocks, in one form for every engine, and the answers of those who can say it again.

An event carries the engine's own block ids (`exts`, opaque) beside the local hashes that the router computes for
prompts, a number that rises by one per rank, and the registration that it belongs to. Adapters make these; nothing here
reads a wire. The simulator's own events (`events.BlocksStored` and its kin) name branches instead and lose nothing on
the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.cluster.events import WorkerEvent
from policies.cluster.ids import BlockHash, RankId, Tier
from policies.frozen import frozen

_G1 = ("GPU", "DEVICE")
_G2 = ("CPU", "CPU_PINNED", "CPU_TIER1")
_G3 = ("CPU_TIER2", "DISK", "NVME", "STORAGE")
_G4 = ("EXTERNAL", "NETWORK", "REMOTE", "SHARED")

TIER_OF_MEDIUM: Mapping[str, Tier] = MappingProxyType(
    {name: tier for tier, names in zip(Tier, (_G1, _G2, _G3, _G4), strict=True) for name in names}
)
"""Tier of what engines call the place of a block. Of any other name an adapter makes a `KvRefused`."""


@frozen
class RankEvent(WorkerEvent):
    """A fact about one rank of a worker, as of its registration `epoch`."""

    epoch: int = 0
    dp_rank: int = 0

    @property
    def rank(self) -> RankId:
        return RankId(self.worker_id, self.dp_rank)


# ---------------------------------------------------------------- what engines say


@frozen
class KvEvent(RankEvent):
    """Something about a rank's blocks. `event_id` rises by one from each event of the rank to the next, from 0."""

    event_id: int


@frozen
class KvStored(KvEvent):
    """Blocks are held in a tier: the first stands below `parent_ext` (None: at the start), each other below the one
    before it. `start_position` is the first one's place in the prompt, in blocks, where the engine tells it.

    Raises ValueError when ids and hashes are not equally many.
    """

    exts: tuple[BlockHash, ...]
    local_hashes: tuple[BlockHash, ...]
    parent_ext: BlockHash | None = None
    start_position: int | None = None
    tier: Tier = Tier.G1_DEVICE

    def __post_init__(self) -> None:
        if len(self.exts) != len(self.local_hashes):
            raise ValueError(f"{len(self.exts)} block ids with {len(self.local_hashes)} local hashes; one each")


@frozen
class KvRemoved(KvEvent):
    """Blocks left a tier."""

    exts: tuple[BlockHash, ...]
    tier: Tier = Tier.G1_DEVICE


@frozen
class KvCleared(KvEvent):
    """The rank dropped all its blocks (of one tier, or of all when `tier` is None)."""

    tier: Tier | None = None


@frozen
class KvRefused(KvEvent):
    """An event that the adapter could not take (an unknown medium, say): its number is used up, `what` says why."""

    what: str


# ---------------------------------------------------------------- what answers a request for it


@frozen
class DumpEntry:
    """Blocks that a rank knows: each below the one before it, all held in exactly the same `tiers` (none: only known,
    because blocks below them are held).

    Local hashes beyond the number of `exts` stand first and name what is before these blocks: for blocks whose parent
    (then None) is not known any more.
    """

    parent_ext: BlockHash | None
    exts: tuple[BlockHash, ...]
    local_hashes: tuple[BlockHash, ...]
    tiers: tuple[Tier, ...] = (Tier.G1_DEVICE,)

    def __post_init__(self) -> None:
        before = len(self.local_hashes) - len(self.exts)
        if before < 0 or (before > 0 and self.parent_ext is not None):
            raise ValueError(
                f"{len(self.exts)} block ids below {self.parent_ext} with {len(self.local_hashes)} local hashes; "
                "one each, more only without a parent"
            )


@frozen
class IndexAnswer(RankEvent):
    """What became of the request number `ask` of router `origin` about a rank."""

    ask: int
    origin: int = 0


@frozen
class IndexReplay(IndexAnswer):
    """Earlier events of a rank once more, ascending."""

    events: tuple[KvEvent, ...]


@frozen
class IndexDump(IndexAnswer):
    """All that a rank holds after its event `last_id` (None: it never had one); parents stand before children."""

    last_id: int | None
    entries: tuple[DumpEntry, ...]


@frozen
class IndexRecoveryFailed(IndexAnswer):
    """Whoever was asked cannot, or will not, say it again."""

    reason: str
