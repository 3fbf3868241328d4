"""What mode kv asks about caches, whoever tells it: the one seam between the mode and an index.

`SimulatedIndex` (here) listens to the simulator's own events, which name content by its place in the tree of prompts
and lose nothing. `engine_index.EngineIndex` listens to engines, which name blocks by ids of their own, number what they
say, and must be asked again for what was lost. An index chooses nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from policies.cluster.actions import Action
from policies.cluster.blocks import BlockPath
from policies.cluster.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, WorkerLost, WorkerUp
from policies.cluster.ids import Place, Tier, WorkerId
from policies.router.below import Beyond, LowerTiers
from policies.router.index import PrefixIndex

BLOCK_EVENTS: frozenset[type[Event]] = frozenset({BlocksStored, BlocksRemoved, BlocksCleared})
"""What the simulator says of caches in its own words."""


class CacheIndex(Protocol):
    """What places have cached, by what was said of them. `stores`: how often anything was said to be stored."""

    stores: int

    def on(self, event: Event) -> Sequence[Action]:
        """Take in an event about blocks, or that a worker is there or gone; what must be ordered for it."""
        ...

    def depths(self, path: BlockPath, most_blocks: int) -> Mapping[Place, int]:
        """Leading blocks of `path` that each place has in device memory, `most_blocks` at most; none: left out."""
        ...

    @property
    def is_flat(self) -> bool:
        """Whether nothing is cached below device memory."""
        ...

    def beyond(self, path: BlockPath | None, place: Place, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below its first `device_blocks`, up to block `usable`."""
        ...

    def counters(self) -> dict[str, int]:
        """Counts for the report: `index_blocks` held on devices (by any place, with repetitions), and what was odd."""
        ...


class SimulatedIndex(PrefixIndex):
    """Fed by `BlocksStored`, `BlocksRemoved`, `BlocksCleared`. Late news of a worker that is gone must not bring its
    blocks back: they are `stale_events`. `credits_peers`: what a worker can read in host memory of others counts for
    it."""

    __slots__ = ("_below", "_credits_peers", "_up", "stale_events", "stores")

    def __init__(self, *, credits_peers: bool = False) -> None:
        super().__init__()
        self._credits_peers = credits_peers
        self._below = LowerTiers()
        self._up: set[WorkerId] = set()
        self.stores = self.stale_events = 0

    def on(self, event: Event) -> Sequence[Action]:
        """Take in an event; it never orders anything."""
        if isinstance(event, (BlocksStored, BlocksRemoved)):
            if event.worker_id not in self._up and event.tier is not Tier.G4_REMOTE:
                self.stale_events += 1
            elif event.tier is not Tier.G1_DEVICE:
                change = self._below.store if isinstance(event, BlocksStored) else self._below.remove
                change(event.worker_id, event.tier, event.runs)
            elif isinstance(event, BlocksStored):
                self.stores += 1
                self.store(event.worker_id, event.runs)
            else:
                self.remove(event.worker_id, event.runs)
        elif isinstance(event, BlocksCleared):
            if event.tier in (None, Tier.G1_DEVICE):
                self.clear(event.worker_id)
            if event.tier is not Tier.G1_DEVICE:
                self._below.clear(event.worker_id, event.tier)
        elif isinstance(event, (WorkerUp, WorkerLost)):  # whoever had this id before: a new one holds nothing
            self.clear(event.worker_id)
            self._below.clear(event.worker_id)
            if self._credits_peers:
                self._below.reads_peers(event.worker_id, event.peers if isinstance(event, WorkerUp) else None)
            (self._up.add if isinstance(event, WorkerUp) else self._up.discard)(event.worker_id)
        return ()

    @property
    def is_flat(self) -> bool:
        return self._below.is_empty

    def beyond(self, path: BlockPath | None, place: Place, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below its first `device_blocks`, up to block `usable`."""
        return self._below.beyond(path, place, device_blocks, usable)

    def counters(self) -> dict[str, int]:
        return {
            "index_blocks": len(self),
            "duplicate_stores": self.duplicate_stores,
            "orphan_stores": self.orphan_stores,
            "unknown_removals": self.unknown_removals,
            "lower_tier_blocks": len(self._below),
            "stale_events": self.stale_events,
        }
