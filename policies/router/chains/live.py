"""The index as a router uses it: events of the cluster in, orders out, matches for prompts on demand.

It owns a feed per rank and an index per block size. A worker whose block size is not the router's is refused, by name
and with both sizes, unless re-cutting is allowed; an event of a rank or registration that is not known changes nothing
and is counted. Nothing here chooses a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

from policies.cluster.actions import Action
from policies.cluster.blocks import BlockPath
from policies.cluster.events import Event, TimerFired, WorkerLost, WorkerUp
from policies.cluster.ids import RankId, WorkerId
from policies.cluster.kv_events import (
    IndexAnswer,
    IndexDump,
    IndexRecoveryFailed,
    IndexReplay,
    KvCleared,
    KvEvent,
    KvRefused,
    KvRemoved,
    KvStored,
    RankEvent,
)
from policies.errors import ConfigError
from policies.router.chains.counts import Sizes
from policies.router.chains.feed import Feed, FeedCounts, FeedMode
from policies.router.chains.holders import Columns
from policies.router.chains.index import ChainIndex, Semantics

SUBSCRIBES: frozenset[type[Event]] = frozenset(
    {
        WorkerUp,
        WorkerLost,
        KvStored,
        KvRemoved,
        KvCleared,
        KvRefused,
        IndexReplay,
        IndexDump,
        IndexRecoveryFailed,
        TimerFired,
    }
)
"""What a policy that owns a `LiveIndex` must subscribe to and pass on."""


class Prompt(NamedTuple):
    """A prompt of `isl` tokens as paths, by block size."""

    isl: int
    paths: Mapping[int, BlockPath]


class LiveIndex:
    """What every rank of every worker holds, as far as its events tell.

    `block_size` is the router's, in tokens. With `recut`, workers whose blocks are a multiple or a fraction of that are
    taken too: prompts must then come with the local hashes of every size in `block_sizes`.
    """

    def __init__(self, block_size: int, *, semantics: Semantics = "set", recut: bool = False) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size} tokens, at least 1 is needed; 16 is usual")
        self.block_size = block_size
        self._semantics = semantics
        self._recut = recut
        self._indexes = {block_size: ChainIndex(semantics)}
        self._size_of: dict[WorkerId, int] = {}
        self._ranks: dict[WorkerId, list[RankId]] = {}
        self._feeds: dict[RankId, Feed] = {}
        self._timers: dict[str, RankId] = {}
        self._counts = FeedCounts()
        self._strange_events = 0
        self._old_events = 0
        self._mismatches = 0
        self.refused: dict[WorkerId, str] = {}

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The block sizes in which prompts must be hashed, the router's first."""
        return tuple(self._indexes)

    # ------------------------------------------------------------ what happened

    def on(self, event: Event) -> list[Action]:
        """Take in one event; what must be ordered for it."""
        if isinstance(event, KvEvent):
            return self._on_kv(event)
        match event:
            case IndexAnswer():
                return self._on_answer(event)
            case WorkerUp():
                return self._on_up(event)
            case WorkerLost():
                self._drop(event.worker_id)
            case TimerFired() if event.name in self._timers:
                return self._feeds[self._timers[event.name]].on_timer(event.at_s)
        return []

    def _on_up(self, up: WorkerUp) -> list[Action]:
        size, ours = up.block_size, self.block_size
        if self._size_of.get(up.worker_id) == size and self._begun(up.worker_id, up.epoch):
            ranks = [n for n in range(up.dp_ranks) if RankId(up.worker_id, n) not in self._feeds]
            return [order for n in ranks for order in self._register(up, n, up.epoch)]
        self._drop(up.worker_id)
        if size != ours and not (self._recut and (size % ours == 0 or ours % size == 0)):
            self._mismatches += 1
            way = "neither divides the other" if self._recut else "recut is off"
            self.refused[up.worker_id] = (
                f"worker {up.worker_id} ({up.name}) has blocks of {size} tokens, the router hashes {ours} ({way}): "
                f"its cache is not seen; set one of the two block sizes to the other"
            )
            return []
        self.refused.pop(up.worker_id, None)
        self._size_of[up.worker_id] = size
        self._ranks[up.worker_id] = []
        if size not in self._indexes:
            self._indexes[size] = ChainIndex(self._semantics)
        return [order for n in range(up.dp_ranks) for order in self._register(up, n, up.epoch)]

    def _begun(self, worker_id: WorkerId, epoch: int) -> bool:
        """Whether events of a registration came before its `WorkerUp`."""
        return any(self._feeds[rank].epoch >= epoch for rank in self._ranks[worker_id])

    def _register(self, event: WorkerUp | KvEvent, dp_rank: int, epoch: int) -> list[Action]:
        """A rank begins anew: nothing is known of it until it, or somebody else, tells all."""
        rank = RankId(event.worker_id, dp_rank)
        index = self._indexes[self._size_of[event.worker_id]]
        index.up(rank)
        if rank not in self._feeds:
            self._ranks[event.worker_id].append(rank)
        feed = self._feeds[rank] = Feed(rank, epoch, index, self._counts)
        self._timers[feed.timer] = rank
        return feed.begin(event.at_s)

    def _drop(self, worker_id: WorkerId) -> None:
        self.refused.pop(worker_id, None)
        size = self._size_of.pop(worker_id, None)
        for rank in self._ranks.pop(worker_id, ()):
            del self._timers[self._feeds.pop(rank).timer]
            self._indexes[size or self.block_size].drop(rank)

    def _on_kv(self, event: KvEvent) -> list[Action]:
        feed = self._known(event)
        if feed is None:
            return []
        if event.epoch == feed.epoch:
            return feed.on_event(event)
        orders = self._register(event, event.dp_rank, event.epoch)  # it was restarted, its WorkerUp is late
        return orders + self._feeds[event.rank].on_event(event)

    def _on_answer(self, answer: IndexAnswer) -> list[Action]:
        feed = self._known(answer)
        if feed is None or answer.epoch != feed.epoch:
            return []
        match answer:
            case IndexReplay():
                return feed.on_replay(answer)
            case IndexDump():
                return feed.on_dump(answer)
            case IndexRecoveryFailed():
                return feed.on_failed(answer)
        return []

    def _known(self, event: RankEvent) -> Feed | None:
        """The feed of the event's rank; None, and counted, for one of nobody or of an earlier registration."""
        pair = (event.worker_id, event.dp_rank)  # equal to its RankId, and cheaper to make
        feed: Feed | None = self._feeds.get(pair)  # type: ignore[call-overload]
        if feed is None:
            self._strange_events += 1
        elif event.epoch < feed.epoch:
            self._old_events += 1
            return None
        return feed

    # ------------------------------------------------------------ what is asked

    def prompt(self, isl: int, local_hashes: Mapping[int, Sequence[int]]) -> Prompt:
        """A prompt of `isl` tokens from its local hashes by block size; raises ConfigError when a size is missing."""
        lacking = [size for size in self._indexes if size not in local_hashes]
        if lacking:
            raise ConfigError(
                f"the prompt is hashed in blocks of {sorted(local_hashes)} tokens, workers have {lacking} too; "
                "hash it in every size of `block_sizes`"
            )
        return Prompt(isl, {size: index.path(local_hashes[size]) for size, index in self._indexes.items()})

    def path(self, local_hashes: Sequence[int]) -> BlockPath:
        """A prompt by its local hashes in the router's block size; the same content is the same path."""
        return self._indexes[self.block_size].path(local_hashes)

    def depths(self, path: BlockPath, most_blocks: int) -> dict[RankId, int]:
        """Leading blocks of a path that each rank of the router's block size has in device memory; none: left out."""
        index = self._indexes[self.block_size]
        return index.depths(index.match(path, most_blocks))

    @property
    def is_flat(self) -> bool:
        """Whether no such rank has anything below device memory."""
        return self._indexes[self.block_size].is_flat

    def beyond(
        self, path: BlockPath, rank: RankId, at: int, most_blocks: int, peers: Iterable[RankId] = ()
    ) -> tuple[int, int, int, int]:
        """Blocks that such a rank has of a path below its first `at`: in host memory, on disk, in the shared tier, and
        in host memory of `peers`."""
        return self._indexes[self.block_size].beyond(path, rank, at, most_blocks, peers)

    def columns(self, prompt: Prompt, ranks: Sequence[RankId]) -> Columns:
        """What these ranks have of a prompt, in the router's blocks, never all of it: its last token is computed."""
        (size, index), *others = self._indexes.items()
        found = index.columns(index.match(prompt.paths[size], (prompt.isl - 1) // size), ranks)
        for other, more in others:
            reached = more.columns(more.match(prompt.paths[other], (prompt.isl - 1) // other), ranks)
            for column, added in zip(found, _cut(reached, other, size), strict=True):
                column[:] = map(add, column, added)
        return found

    def dump(self, rank: RankId, ask: int, at_s: float) -> IndexDump | IndexRecoveryFailed:
        """The answer to another router that asks what is known of a rank: all of it, as of the cursor."""
        feed = self._feeds.get(rank)
        if feed is None or not feed.exact:
            reason = "not known here" if feed is None else f"not exact here ({feed.mode.value})"
            epoch = feed.epoch if feed is not None else 0
            return IndexRecoveryFailed(
                at_s=at_s, worker_id=rank.worker_id, dp_rank=rank.dp_rank, epoch=epoch, ask=ask, reason=reason
            )
        entries = self._indexes[self._size_of[rank.worker_id]].dump(rank)
        return IndexDump(
            at_s=at_s,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            epoch=feed.epoch,
            ask=ask,
            last_id=feed.cursor,
            entries=entries,
        )

    def mode(self, rank: RankId) -> FeedMode | None:
        """How far the content of a rank can be trusted, for the decision record; None for one that is not known."""
        feed = self._feeds.get(rank)
        return feed.mode if feed is not None else None

    @property
    def sizes(self) -> Sizes:
        return Sizes(*map(sum, zip(*(index.sizes for index in self._indexes.values()), strict=True)))

    @property
    def size(self) -> int:
        """Entries of all tables, a measure of memory."""
        buffered = sum(feed.buffered for feed in self._feeds.values())
        return sum(index.size for index in self._indexes.values()) + len(self._feeds) + buffered

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        total: dict[str, int] = {}
        for index in self._indexes.values():
            for name, count in index.counters().items():
                total[name] = total.get(name, 0) + count
        return (
            total
            | self._counts.table()
            | {
                "strange_events": self._strange_events,
                "old_events": self._old_events,
                "block_size_mismatch": self._mismatches,
                "ranks_degraded": sum(feed.mode is FeedMode.DEGRADED for feed in self._feeds.values()),
            }
        )


def _cut(columns: Columns, size: int, ours: int) -> Columns:
    """Overlaps in blocks of another size as whole blocks of ours: what is covered down to each tier, rounded down."""
    cut = Columns([], [], [], [])
    above_ours = above = [0] * len(columns.device_blocks)
    for column, out in zip(columns, cut, strict=True):
        above = [a + b for a, b in zip(above, column, strict=True)]
        here = [blocks * size // ours for blocks in above]
        out.extend(a - b for a, b in zip(here, above_ours, strict=True))
        above_ours = here
    return cut
