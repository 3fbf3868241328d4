"""Simulated workers that tell of their caches as engines do: numbered events per rank, in the engines' own ids.

It stands in for `News` where a policy listens to engines' events. Every rank keeps its last events and can say them
again, or say all that it holds, in the time that takes; what is lost or late on the way is only ever an event. It
decides nothing, and tells nothing that the simulator's own events would not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from policies.cluster.actions import Action, Dispatch, RequestIndexDump, RequestIndexReplay
from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.controller import Controller
from policies.cluster.events import ENDS, Event, IndexLost, RequestArrived, RequestEvent, RouterRestarted, WorkerUp
from policies.cluster.ids import BlockHash, Leg, RankId, RequestId, Tier, WorkerId
from policies.cluster.kv_events import (
    DumpEntry,
    IndexAnswer,
    IndexDump,
    IndexRecoveryFailed,
    IndexReplay,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
)
from policies.cluster.state import ClusterView
from twin.engine.ranks import RankedEngine
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.kvnames import BlockNames
from twin.mocker.news import News
from twin.mocker.wires import FRONTEND
from twin.mocker.worker import MockWorker

if TYPE_CHECKING:
    from policies.kvbm.consolidate import Change
    from twin.engine.protocol import Pool
    from twin.engine.sequence import Sequence as EngineSequence
    from twin.mocker.world import MockWorld, Observation

ENTRY_BYTES = 32
"""What a block takes in a dump or a replay: its id, its local hash, its parent, its place."""

_LATE = int(Order.LATE)
_HUNG_AGAIN_S = 1.0


class Stream:
    """What one rank says, under one registration: the number of its next event, and the last `most` events."""

    __slots__ = ("epoch", "next_id", "rank", "said")

    def __init__(self, rank: RankId, epoch: int, most: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.next_id = 0
        self.said: deque[KvEvent] = deque(maxlen=most)

    @property
    def last_id(self) -> int | None:
        """The number of its last event; None before the first."""
        return self.next_id - 1 if self.next_id else None

    def again(self, from_id: int, to_id: int) -> tuple[KvEvent, ...] | None:
        """Those events once more; None when they are not all there any more."""
        if not self.said or self.said[0].event_id > from_id or to_id >= self.next_id:
            return None
        first = self.said[0].event_id
        return tuple(self.said[number - first] for number in range(from_id, to_id + 1))


class EngineNews(News):
    """Of one world. Ranks tell each of its own blocks if that is asked for (`observe.ranks_apart`); else a worker tells
    of what any of them has, as its rank 0."""

    def __init__(self, world: MockWorld, observe: Observation, *, decode_events: bool, loses_events: bool) -> None:
        super().__init__(world, observe, decode_events=decode_events, loses_events=loses_events)
        self.of_blocks = world.controller.wants(KvStored)
        self._ranks_apart = observe.ranks_apart
        self._streams: dict[RankId, Stream] = {}
        self._names: BlockNames | None = None
        self._routed: dict[tuple[RequestId, Leg], int] = {}
        self._lives: dict[int, int] = {}  # how often each router has lost its index, or all it had
        world.controller = Interpreter(world.controller, self)

    @property
    def names(self) -> BlockNames:
        """How blocks are named; from when the world has its content tree."""
        if self._names is None:
            tree = self._world.tree
            self._names = BlockNames(tree.key_tokens, tree.block_size)
        return self._names

    # ------------------------------------------------------------ who is there

    def registered(self, up: WorkerUp) -> WorkerUp:
        """A worker registers: its ranks begin to count anew. The registration as it is told."""
        worker = self._world.workers[up.worker_id]
        ranks = worker.engine.settings.ranks if self._ranks_apart else 1
        for n in range(ranks):
            rank = RankId(up.worker_id, n)
            self._streams[rank] = Stream(rank, up.epoch, self._observe.kv_replay_events)
        if ranks == 1:
            return up
        assert isinstance(worker.engine, RankedEngine)
        worker.engine.pool.apart = True
        worker.engine.routed = self._rank_for
        return replace(up, dp_ranks=ranks)

    def ordered(self, sent: Dispatch) -> None:
        """A request goes to a rank that the router has chosen."""
        if sent.dp_rank is not None:
            self._routed[sent.request_id, sent.leg] = sent.dp_rank

    def ended(self, request_id: RequestId) -> None:
        """A request is over; no leg of it will reach a worker any more."""
        for leg in Leg:
            self._routed.pop((request_id, leg), None)

    def _rank_for(self, seq: EngineSequence) -> int | None:
        return self._routed.pop((seq.request_id, seq.leg), None)

    def _pools(self, worker: MockWorker) -> Iterator[tuple[Stream, Pool]]:
        engine = worker.engine
        pools = engine.pool.each if isinstance(engine, RankedEngine) and self._ranks_apart else [engine.pool]
        for n, pool in enumerate(pools):
            yield self._streams[RankId(worker.worker_id, n)], pool

    # ------------------------------------------------------------ what happens to blocks

    def post_blocks(self, worker: MockWorker) -> None:
        lag_s, upset = self._way(worker.worker_id)
        silent = self._is_silent(worker.up.role)
        for stream, pool in self._pools(worker):
            if silent:
                pool.removed, pool.stored = [], []
                continue
            removed, stored = self.accounts.take(worker.worker_id, pool)
            events: list[KvEvent] = []
            if removed:
                events.append(self._removed(stream, removed, Tier.G1_DEVICE, lag_s))
            if stored:
                events += self._stored(stream, stored, Tier.G1_DEVICE, lag_s)
            self._send(worker, events, lag_s, upset)

    def _tell_change(self, worker_id: WorkerId, change: Change) -> None:
        def made(stream: Stream, lag_s: float) -> list[KvEvent]:
            if change.is_store:
                return list(self._stored(stream, change.runs, change.tier, lag_s))
            return [self._removed(stream, change.runs, change.tier, lag_s)]

        self._tell_stream(worker_id, change.tier, made)

    def _tell_cleared(self, worker_id: WorkerId, tier: Tier) -> None:
        self._tell_stream(worker_id, tier, lambda stream, lag_s: [self._note(KvCleared, stream, lag_s, tier=tier)])

    def tell_all(self, worker: MockWorker) -> None:
        """Whoever registers anew is asked for all that it has, and says so then."""

    def _tell_stream(self, worker_id: WorkerId, tier: Tier, made: Callable[[Stream, float], Sequence[KvEvent]]) -> None:
        """Each rank tells of its worker's own tiers, since what stands before their blocks may be on its device alone;
        what all workers share is told once."""
        worker = self._world.workers.get(worker_id)
        if worker is None or (tier is not Tier.G4_REMOTE and self._is_silent(worker.up.role)):
            return
        lag_s, upset = self._way(worker_id)
        ranks = 1 if tier is Tier.G4_REMOTE or not self._ranks_apart else worker.engine.settings.ranks
        for n in range(ranks):
            stream = self._streams.get(RankId(worker_id, n))
            if stream is not None:
                self._send(worker, made(stream, lag_s), lag_s, upset)

    def _stored(self, stream: Stream, runs: Iterable[BlockRun], tier: Tier, lag_s: float) -> Iterator[KvEvent]:
        """One event for each stretch of blocks that stand below each other."""
        names = self.names
        for line in _lines(runs):
            parts = [names.of(*run) for run in line]
            branch, lo, _ = line[0]
            yield self._note(
                KvStored,
                stream,
                lag_s,
                exts=tuple(ext for part in parts for ext in part.exts),
                local_hashes=tuple(name for part in parts for name in part.local_hashes),
                parent_ext=names.before(branch, lo),
                start_position=lo,
                tier=tier,
            )

    def _removed(self, stream: Stream, runs: Iterable[BlockRun], tier: Tier, lag_s: float) -> KvEvent:
        exts = tuple(ext for run in runs for ext in self.names.of(*run).exts)
        return self._note(KvRemoved, stream, lag_s, exts=exts, tier=tier)

    def _note(self, kind: type[KvEvent], stream: Stream, lag_s: float, **more: Any) -> KvEvent:
        """The next event of a stream, which remembers it."""
        event = kind(
            at_s=instant(self._world.clock.now + lag_s),
            worker_id=stream.rank.worker_id,
            dp_rank=stream.rank.dp_rank,
            epoch=stream.epoch,
            event_id=stream.next_id,
            **more,
        )
        stream.next_id += 1
        stream.said.append(event)
        return event

    # ------------------------------------------------------------ saying it again

    def answer(self, asked: RequestIndexReplay | RequestIndexDump) -> None:
        """A rank is asked for events, or for all that it has: it answers when the question reaches it, in the time that
        its answer takes."""
        worker, life = self._world.workers[asked.worker_id], self._lives.get(asked.origin, 0)
        self._world.wires.send(FRONTEND, asked.worker_id, partial(self._reply, worker, asked, life))

    def forget(self, router: int) -> None:
        """A router has forgotten what it asked for: nobody waits for those answers any more."""
        self._lives[router] = self._lives.get(router, 0) + 1

    def _reply(self, worker: MockWorker, asked: RequestIndexReplay | RequestIndexDump, life: int) -> None:
        stream, now_s = self._streams[RankId(asked.worker_id, asked.dp_rank)], self._world.clock.now
        if worker.fenced or worker.up.epoch != asked.epoch:
            return  # whoever asked has heard that it is lost
        if life != self._lives.get(asked.origin, 0):
            return
        common: dict[str, Any] = {
            "at_s": now_s,
            "worker_id": asked.worker_id,
            "dp_rank": asked.dp_rank,
            "epoch": asked.epoch,
            "ask": asked.ask,
            "origin": asked.origin,
        }
        if worker.down:
            self._world.post(IndexRecoveryFailed(reason="no connection", **common))
            return
        if worker.hung:
            self._world.clock.watch(instant(now_s + _HUNG_AGAIN_S), _LATE, partial(self._reply, worker, asked, life))
            return
        events = stream.again(asked.from_id, asked.to_id) if isinstance(asked, RequestIndexReplay) else None
        answer: IndexAnswer
        if events is not None:
            answer, blocks = IndexReplay(events=events, **common), sum(map(_blocks_of, events))
        else:
            entries = tuple(self._holdings(worker, stream))
            answer, blocks = (
                IndexDump(last_id=stream.last_id, entries=entries, **common),
                sum(len(entry.exts) for entry in entries),
            )
        _, upset = self._way(worker.worker_id)
        delay_s = upset.delay_s if upset is not None else 0.0
        self._deliver(worker, answer, now_s + blocks * self._block_s + delay_s, life)

    @property
    def _block_s(self) -> float:
        """What one block adds to an answer."""
        observe = self._observe
        return observe.kv_dump_block_s + ENTRY_BYTES / observe.kv_dump_bytes_per_s

    def _deliver(self, worker: MockWorker, answer: IndexAnswer, at_s: float, life: int) -> None:
        world = self._world

        def heard() -> None:
            if life == self._lives.get(answer.origin, 0):
                world.post(replace(answer, at_s=world.clock.now))

        def arrive() -> None:
            self.hear(worker, heard, news=True)

        if instant(at_s) <= world.clock.now:
            arrive()
        else:
            world.clock.watch(instant(at_s), _LATE, arrive)

    def _holdings(self, worker: MockWorker, stream: Stream) -> Iterator[DumpEntry]:
        """All that a rank has, the tiers of a block together, parents before children."""
        pool = next((pool for own, pool in self._pools(worker) if own is stream), None)
        if pool is None or not self.tells_blocks(self._world.specs[worker.worker_id]):
            return
        held: dict[Branch, list[tuple[int, int, Tier]]] = {}
        told_as_one = self.accounts.held(worker.worker_id)
        for run in pool.findable() if told_as_one is None else told_as_one:
            held.setdefault(run.branch, []).append((run.lo, run.hi, Tier.G1_DEVICE))
        for change in self._below(worker.worker_id) if told_as_one is None else ():
            for run in change.runs:
                held.setdefault(run.branch, []).append((run.lo, run.hi, change.tier))
        told: set[BlockHash] = set()
        for branch in sorted(held, key=lambda branch: (branch.start, branch.uid)):
            yield from self._entries(branch, held[branch], told)

    def _entries(
        self, branch: Branch, held: Sequence[tuple[int, int, Tier]], told: set[BlockHash]
    ) -> Iterator[DumpEntry]:
        """The blocks of one branch, cut where their tiers change."""
        cuts = sorted({cut for lo, hi, _ in held for cut in (lo, hi)})
        for lo, hi in pairwise(cuts):
            tiers = tuple(tier for tier in Tier if any(a <= lo and hi <= b and t is tier for a, b, t in held))
            if not tiers:
                continue
            names, parent = self.names.of(branch, lo, hi), self.names.before(branch, lo)
            known = parent is None or parent in told
            told.update(names.exts)
            yield DumpEntry(
                parent_ext=parent if known else None,
                exts=names.exts,
                local_hashes=names.local_hashes if known else self.names.hashes_to(branch, hi),
                tiers=tiers,
            )


class Interpreter(Controller):
    """Stands between a world and its controller where policies listen to engines: prompts are told with their local
    hashes, workers with their ranks, and the ranks that requests are sent to are remembered until they get there."""

    def __init__(self, inner: Controller, news: EngineNews) -> None:
        self._inner = inner
        self._news = news

    @property
    def view(self) -> ClusterView:
        return self._inner.view

    def wants(self, kind: type[Event]) -> bool:
        """Whether some policy subscribes to this type of event."""
        return self._inner.wants(kind)

    def step(self, event: Event) -> Sequence[Action]:
        """Fold one event, ask the policies that subscribe, return what the world must do."""
        if isinstance(event, RequestArrived):
            if event.blocks is not None:
                event = replace(event, local_hashes=self._news.names.prompt(event.blocks))
        elif isinstance(event, WorkerUp):
            event = self._news.registered(event)
        elif isinstance(event, RequestEvent) and type(event) in ENDS:
            self._news.ended(event.request_id)
        elif isinstance(event, RouterRestarted | IndexLost):
            self._news.forget(event.router)
        actions = self._inner.step(event)
        for action in actions:
            if isinstance(action, Dispatch):
                self._news.ordered(action)
        return actions


def _lines(runs: Iterable[BlockRun]) -> Iterator[list[BlockRun]]:
    """Runs in stretches of which each goes on where the one before it ends, in the same branch or one below it."""
    line: list[BlockRun] = []
    for run in runs:
        if line and not _goes_on(line[-1], run):
            yield line
            line = []
        line.append(run)
    if line:
        yield line


def _goes_on(last: BlockRun, run: BlockRun) -> bool:
    if run.lo != last.hi:
        return False
    above: Branch | None = run.branch
    while above is not None and above.start >= run.lo:  # the branch that has the block before
        above = above.parent
    return above is last.branch


def _blocks_of(event: KvEvent) -> int:
    """Blocks that an event names; one that names none takes as much as one."""
    return len(event.exts) if isinstance(event, (KvStored, KvRemoved)) else 1
