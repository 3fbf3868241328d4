"""What engines say of their own blocks, as mode kv asks for it: `chains.live` behind the seam of `cached`.

A prompt is looked up by its local hashes, and is a path of the index's own from then on, in books and guesses too. What
cannot be told for sure is used all the same, and said: `mode` of a place goes into each decision. It chooses nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from policies.cluster.actions import Action
from policies.cluster.blocks import BlockPath
from policies.cluster.events import Event, RequestArrived, WorkerLost, WorkerUp
from policies.cluster.ids import Place, RankId, WorkerId
from policies.cluster.kv_events import IndexDump, IndexRecoveryFailed, KvStored
from policies.router.below import NOTHING, Beyond
from policies.router.chains.feed import FeedMode
from policies.router.chains.live import SUBSCRIBES, LiveIndex

ENGINE_EVENTS: Final = SUBSCRIBES - {WorkerUp, WorkerLost}
"""What engines say of caches, the answers of those who were asked, and the timers of who waits for one."""

_WORST = (FeedMode.LIVE, FeedMode.RECOVERING, FeedMode.DEGRADED)


class EngineIndex:
    """A worker is one place, or each of its ranks is one (`by_rank`). Of a worker whose ranks are not told apart, the
    rank that has most of a prompt counts: nobody knows yet which one will get it."""

    def __init__(self, block_size: int, *, by_rank: bool, credits_peers: bool = False) -> None:
        self.live = LiveIndex(block_size)
        self.stores = 0
        self._by_rank = by_rank
        self._credits_peers = credits_peers
        self._layouts: dict[RankId, str] = {}  # of those that read host memory of each other
        self._ranks: dict[Place, tuple[RankId, ...]] = {}
        self._place: dict[RankId, Place] = {}
        self._last: tuple[tuple[int, ...], BlockPath] | None = None

    def on(self, event: Event) -> Sequence[Action]:
        """Take in an event; what to ask engines for."""
        if isinstance(event, KvStored):
            self.stores += 1
        elif isinstance(event, WorkerUp):
            self._forget(event.worker_id)
            for place, ranks in self._places(event).items():
                self._ranks[place] = ranks
                self._place.update(dict.fromkeys(ranks, place))
                if self._credits_peers and event.peers is not None:
                    self._layouts.update(dict.fromkeys(ranks, event.peers))
        elif isinstance(event, WorkerLost):
            self._forget(event.worker_id)
        return self.live.on(event)

    def _places(self, up: WorkerUp) -> Mapping[Place, tuple[RankId, ...]]:
        ranks = [RankId(up.worker_id, n) for n in range(up.dp_ranks)]
        if self._by_rank and len(ranks) > 1:
            return {rank: (rank,) for rank in ranks}
        return {up.worker_id: tuple(ranks)}

    def _forget(self, worker_id: WorkerId) -> None:
        for rank in [rank for rank in self._place if rank.worker_id == worker_id]:
            self._ranks.pop(self._place.pop(rank), None)
            self._layouts.pop(rank, None)

    # ------------------------------------------------------------ what is asked

    def named(self, event: RequestArrived) -> RequestArrived:
        """The request with its prompt as a path of this index; as it is, where nothing is known of its content."""
        hashes = event.local_hashes
        if hashes is None:
            return event
        if self._last is None or self._last[0] is not hashes:  # asked again and again in one decision
            self._last = hashes, self.live.path(hashes)
        return replace(event, blocks=self._last[1])

    def depths(self, path: BlockPath, most_blocks: int) -> Mapping[Place, int]:
        """Leading blocks of `path` that each place has in device memory, `most_blocks` at most; none: left out."""
        found: dict[Place, int] = {}
        for rank, depth in self.live.depths(path, most_blocks).items():
            place = self._place.get(rank)
            if place is not None:
                found[place] = max(depth, found.get(place, 0))
        return found

    @property
    def is_flat(self) -> bool:
        """Whether nothing is cached below device memory."""
        return self.live.is_flat

    def beyond(self, path: BlockPath | None, place: Place, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below its first `device_blocks`, up to block `usable`."""
        ranks = self._ranks.get(place, ())
        if path is None or not ranks:
            return NOTHING
        found = (self.live.beyond(path, rank, device_blocks, usable, self._peers(rank)) for rank in ranks)
        return max((Beyond(*blocks) for blocks in found), key=sum)

    def _peers(self, rank: RankId) -> Sequence[RankId]:
        """The others whose host memory a rank may read."""
        layout = self._layouts.get(rank)
        return [other for other, one in self._layouts.items() if one == layout] if layout is not None else ()

    def mode(self, place: Place) -> FeedMode:
        """How far the content of a place can be trusted: as its worst rank."""
        modes = [self.live.mode(rank) or FeedMode.DEGRADED for rank in self._ranks.get(place, ())]
        return max(modes, key=_WORST.index, default=FeedMode.DEGRADED)

    def dump(self, rank: RankId, ask: int, at_s: float) -> IndexDump | IndexRecoveryFailed:
        """What is known of a rank, for another router that starts."""
        return self.live.dump(rank, ask, at_s)

    def counters(self) -> dict[str, int]:
        """Those of the live index; `index_blocks` as every index counts them."""
        counts = self.live.counters()
        return counts | {"index_blocks": counts["index_resident"]}
