"""Several routers in front of one cluster: each decides on its own books, and tells the others of its bookings.

    Replica   one router and what it knows of its peers' bookings; what a live router process runs
    Fleet     several replicas under one controller, each with a view of its own; what the simulated world runs

News travel as actions and come back as events (`PublishBooking`, `PeerBooking`): late, or never, as the world has it.
A replica never sees a peer's request but through them, and nothing that a peer says outlives its silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import xxhash

from policies.cluster.actions import (
    Action,
    Dispatch,
    PublishBooking,
    RequestIndexDump,
    RequestIndexReplay,
    SetTimer,
)
from policies.cluster.bookings import BookingOp, BookingStep, SyncKind
from policies.cluster.draws import draw, pick
from policies.cluster.events import (
    ENDS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    PeerBooking,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestInterrupted,
    RequestMigrated,
    TimerFired,
    WorkerDraining,
    WorkerEvent,
    WorkerFenced,
    WorkerLost,
    WorkerRecalled,
    WorkerReported,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import RankId, RequestId, WorkerId
from policies.cluster.kv_events import IndexAnswer, KvEvent
from policies.cluster.state import Cluster, ClusterView
from policies.errors import ConfigError
from policies.router.base import Router

Spread = Literal["round-robin", "random", "session"]

BATCH_OPS = 256
"""Steps of bookings in one message, at most."""
TOMBSTONE_S = 60.0
"""How long it is remembered that a booking ended which had not been heard of."""
SILENCE_S = 30.0
"""A peer that says nothing for so long is taken for gone, and its bookings with it."""
ASK_AGAIN_S = 1.0
"""Between two requests for all that a peer has open, while none of them is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """`count` routers share the arrivals as `spread` says. `sync`: whether they tell each other of their bookings,
    `batch_s` how long news wait for company. `kv_lag_s`: KV events reach router i later by i times this.
    """

    count: int
    spread: Spread
    seed: int
    sync: bool
    batch_s: float
    kv_lag_s: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"replicas.count is {self.count}, it must be 1 or more")
        for key in ("batch_s", "kv_lag_s"):
            if getattr(self, key) < 0:
                raise ConfigError(f"replicas.{key} is {getattr(self, key)}, it must be 0 or more")


@dataclass(slots=True)
class _Own:
    """An open booking of ours: how it was announced, and whether its prompt is computed."""

    add: BookingOp
    prefilled: bool = False


@dataclass(slots=True)
class _Peer:
    """What one peer has said: the number of its last message, when that was, its open bookings."""

    seq: int = 0
    heard_s: float = float("-inf")
    stale: bool = False  # a message of it was missed, and it has not told all since
    asked_s: float = float("-inf")
    open: dict[str, WorkerId] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)  # ended before they were heard of: until when to remember


class Replica:
    """One router among several. Its decisions are its router's; beside them it publishes and takes in bookings.

    Counters beside the router's: `sync_sent` and `sync_heard` messages, `sync_gaps` (messages missed), `sync_resyncs`,
    `sync_tombstones` (ends before beginnings), `sync_silent` (peers taken for gone).
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {RequestArrived, RequestMigrated, RequestInterrupted, PrefillDone, FirstToken, PeerBooking, TimerFired, *ENDS}
    )

    def __init__(self, router: Router, me: int, *, sync: bool, batch_s: float) -> None:
        self.subscribes = router.subscribes | Replica.subscribes  # type: ignore[misc]
        self.me = me
        self._router = router
        self._sync = sync
        self._batch_s = batch_s
        self._timer = f"sync {me}"
        self._timing = False
        self._seq = 0
        self._news: deque[BookingOp] = deque()
        self._own: dict[RequestId, _Own] = {}
        self._peers: dict[int, _Peer] = {}
        self._ordered: list[Action] = []  # by our router, for what a peer has said
        self._counts = dict.fromkeys(("sent", "heard", "gaps", "resyncs", "tombstones", "silent"), 0)

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return self._router.counters() | {f"sync_{name}": n for name, n in self._counts.items()}

    @property
    def peer_bookings(self) -> int:
        """Bookings of peers that are charged now."""
        return sum(len(peer.open) for peer in self._peers.values())

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if isinstance(event, PeerBooking):
            return self._hear(event, view) if event.dest == self.me and event.origin != self.me else ()
        if isinstance(event, TimerFired) and event.name == self._timer:
            self._timing = False
            return self._flush()
        if isinstance(event, RequestArrived):
            self._drop_the_silent(event.at_s, view)
        ordered, self._ordered = self._ordered, []
        actions = (*ordered, *self._asked(event, view))
        return self._and_tell(event, view, actions)

    def _and_tell(self, event: Event, view: ClusterView, actions: Sequence[Action]) -> Sequence[Action]:
        """What was ordered, and what the other routers are to hear of it."""
        if not self._sync:
            return actions
        self._note(event, view, actions)
        if not self._news:
            return actions
        if self._batch_s <= 0.0 or len(self._news) >= BATCH_OPS:
            return (*actions, *self._flush())
        if self._timing:
            return actions
        self._timing = True
        return (*actions, SetTimer(name=self._timer, due_s=event.at_s + self._batch_s, reason="tell other routers"))

    def _asked(self, event: Event, view: ClusterView) -> Sequence[Action]:
        return tuple(self._router.decide(event, view)) if type(event) in self._router.subscribes else ()

    # ------------------------------------------------------------ our news

    def _note(self, event: Event, view: ClusterView, actions: Iterable[Action]) -> None:
        """What an event, and what was ordered for it, means for our bookings."""
        if isinstance(event, RequestInterrupted) or type(event) in ENDS:
            assert isinstance(event, RequestEvent)
            own = self._own.pop(event.request_id, None)
            if own is not None:
                self._news.append(BookingOp(step=BookingStep.FREE, booking=own.add.booking))
        elif isinstance(event, (PrefillDone, FirstToken)):
            own = self._own.get(event.request_id)
            if own is not None and not own.prefilled:
                own.prefilled = True
                self._news.append(BookingOp(step=BookingStep.PREFILL_DONE, booking=own.add.booking))
        for action in actions:
            if isinstance(action, Dispatch):
                self._add(view.requests[action.request_id].arrived, action)

    def _add(self, event: RequestArrived, sent: Dispatch) -> None:
        op = BookingOp(
            step=BookingStep.ADD,
            booking=event.draw_id,
            worker_id=sent.worker_id,
            isl=event.isl,
            blocks=event.blocks,
            overlap_blocks=sent.overlap_blocks,
            dp_rank=sent.dp_rank,
            local_hashes=event.local_hashes,
        )
        self._own[event.request_id] = _Own(op)
        self._news.append(op)

    def _flush(self) -> Sequence[Action]:
        """All news that wait, in messages of bounded size."""
        sent = []
        while self._news:
            ops = tuple(self._news.popleft() for _ in range(min(len(self._news), BATCH_OPS)))
            sent.append(self._publish(SyncKind.NEWS, ops, None))
        return sent

    def _publish(self, kind: SyncKind, ops: tuple[BookingOp, ...], dest: int | None) -> PublishBooking:
        if kind is SyncKind.NEWS:
            self._seq += 1
        self._counts["sent"] += 1
        return PublishBooking(
            origin=self.me, seq=self._seq, kind=kind, ops=ops, dest=dest, reason=f"{kind.value}: {len(ops)} steps"
        )

    def _all_open(self, dest: int) -> Sequence[Action]:
        """Everything that we have open, for a peer that has missed something; what waits is told before it."""
        ops: list[BookingOp] = []
        for own in self._own.values():
            ops.append(own.add)
            if own.prefilled:
                ops.append(BookingOp(step=BookingStep.PREFILL_DONE, booking=own.add.booking))
        return (*self._flush(), self._publish(SyncKind.RESYNC, tuple(ops), dest))

    # ------------------------------------------------------------ their news

    def _hear(self, event: PeerBooking, view: ClusterView) -> Sequence[Action]:
        self._counts["heard"] += 1
        peer = self._peers.setdefault(event.origin, _Peer())
        peer.heard_s = event.at_s
        if event.kind is SyncKind.ASK:
            return self._all_open(event.origin) if self._sync else ()
        if event.kind is SyncKind.RESYNC:
            self._counts["resyncs"] += 1
            self._forget(event.origin, peer, event.at_s, view, keep={op.booking for op in event.ops})
            peer.stale = False
        elif event.seq > peer.seq + 1:
            self._counts["gaps"] += event.seq - peer.seq - 1
            peer.stale = True
        peer.seq = max(peer.seq, event.seq)
        for op in event.ops:
            self._take(event.origin, peer, op, event.at_s, view)
        ordered, self._ordered = self._ordered, []
        actions = self._and_tell(event, view, ordered)
        if peer.stale and event.at_s >= peer.asked_s + ASK_AGAIN_S:
            peer.asked_s = event.at_s
            return (*actions, self._publish(SyncKind.ASK, (), event.origin))
        return actions

    def _take(self, origin: int, peer: _Peer, op: BookingOp, now_s: float, view: ClusterView) -> None:
        booking = _name(origin, op.booking)
        if op.step is BookingStep.ADD:
            _prune(peer.ended, now_s)
            if op.booking in peer.open or op.booking in peer.ended:
                return
            if op.worker_id is None or op.worker_id not in view.workers:
                return
            peer.open[op.booking] = op.worker_id
            arrived = RequestArrived(
                at_s=now_s, request_id=booking, isl=op.isl, blocks=op.blocks, local_hashes=op.local_hashes
            )
            place = op.worker_id if op.dp_rank is None else RankId(op.worker_id, op.dp_rank)
            self._router.peer_sent(arrived, place, op.overlap_blocks)
        elif op.step is BookingStep.FREE:
            if op.booking in peer.open:
                self._free(peer, op.booking, booking, now_s, view)
            else:
                self._counts["tombstones"] += 1
                _prune(peer.ended, now_s)
                peer.ended[op.booking] = now_s + TOMBSTONE_S
        elif op.booking in peer.open:
            self._tell(FirstToken(at_s=now_s, request_id=booking, worker_id=peer.open[op.booking]), view)

    def _tell(self, event: Event, view: ClusterView) -> None:
        """Let our router know; what it orders for that is kept."""
        self._ordered += self._asked(event, view)

    def _free(self, peer: _Peer, name: str, booking: RequestId, now_s: float, view: ClusterView) -> None:
        del peer.open[name]
        self._tell(RequestCancelled(at_s=now_s, request_id=booking), view)

    def _forget(self, origin: int, peer: _Peer, now_s: float, view: ClusterView, keep: set[str]) -> None:
        """All that a peer has said of its bookings, but those to keep, is over."""
        for name in [name for name in peer.open if name not in keep]:
            self._free(peer, name, _name(origin, name), now_s, view)

    def _drop_the_silent(self, now_s: float, view: ClusterView) -> None:
        for origin, peer in self._peers.items():
            if peer.open and now_s >= peer.heard_s + SILENCE_S:
                self._counts["silent"] += 1
                self._forget(origin, peer, now_s, view, keep=set())


class Fleet:
    """Several replicas in one controller, with the arrivals spread over them.

    Each replica has a view of its own: workers come and go for all of them at once, a request is seen by the one that
    it arrived at alone. KV events reach router i later by i times the lag of the settings.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {WorkerUp, WorkerDraining, WorkerRecalled, WorkerFenced, WorkerUnfenced, WorkerLost, *Replica.subscribes}
    )

    def __init__(self, routers: Sequence[Router], settings: ReplicaSettings) -> None:
        if len(routers) != settings.count:
            raise ConfigError(f"replicas.count is {settings.count}, and {len(routers)} routers were made")
        self._settings = settings
        self._replicas = tuple(
            Replica(router, me, sync=settings.sync and settings.count > 1, batch_s=settings.batch_s)
            for me, router in enumerate(routers)
        )
        self.subscribes = Fleet.subscribes.union(*(replica.subscribes for replica in self._replicas))  # type: ignore[misc]
        self._views = tuple(Cluster() for _ in routers)
        self._late: list[deque[tuple[float, WorkerEvent]]] = [deque() for _ in routers]
        self._home: dict[RequestId, int] = {}
        self._arrived = 0

    @property
    def replicas(self) -> Sequence[Replica]:
        return self._replicas

    def counters(self) -> dict[str, int]:
        """The counters of all replicas, added up."""
        told: dict[str, int] = {}
        for replica in self._replicas:
            for name, count in replica.counters().items():
                told[name] = told.get(name, 0) + count
        return told

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if isinstance(event, RequestEvent):
            return self._request(event)
        if isinstance(event, PeerBooking):
            return self._ask(event.dest, event)
        if isinstance(event, IndexAnswer):
            return self._ask(event.origin, event)
        if isinstance(event, TimerFired):
            return self._fired(event)
        everybody = range(len(self._replicas))
        if isinstance(event, (BlocksStored, BlocksRemoved, BlocksCleared, KvEvent)):
            return [action for i in everybody for action in self._blocks(i, event)]
        if isinstance(event, WorkerEvent):
            for i, one in enumerate(self._views):
                one.fold(event)
                if isinstance(event, (WorkerUp, WorkerLost)):
                    self._late[i] = deque(late for late in self._late[i] if late[1].worker_id != event.worker_id)
            if isinstance(event, WorkerReported):
                return [action for i in everybody for action in self._ask(i, event)]
        return [action for i in everybody for action in self._ask(i, event)]

    # ------------------------------------------------------------ who hears what

    def _request(self, event: RequestEvent) -> Sequence[Action]:
        home = self._home.get(event.request_id)
        if home is None:
            assert isinstance(event, RequestArrived)
            home = self._home[event.request_id] = self._choose(event)
        view = self._views[home]
        view.fold(event)
        actions = self._ask(home, event)
        if type(event) in ENDS:
            del self._home[event.request_id]
        return actions

    def _choose(self, event: RequestArrived) -> int:
        """The router that a request arrives at."""
        settings, turn = self._settings, self._arrived
        self._arrived += 1
        if settings.spread == "random":
            return pick(draw(settings.seed, "replica", event.request_id), settings.count)
        if settings.spread == "session" and event.session_id is not None:
            return xxhash.xxh3_64_intdigest(event.session_id.encode()) % settings.count
        return turn % settings.count

    def _ask(self, i: int, event: Event) -> Sequence[Action]:
        replica = self._replicas[i]
        if type(event) not in replica.subscribes:
            return ()
        late, actions = self._late[i], list[Action]()
        while late and late[0][0] <= event.at_s:
            due_s, before = late.popleft()
            actions += replica.decide(replace(before, at_s=due_s), self._views[i])
        actions += replica.decide(event, self._views[i])
        for action in actions:
            self._views[i].apply(action)
        return tuple(_signed(action, i) for action in actions)

    def _fired(self, event: TimerFired) -> Sequence[Action]:
        """A timer of one router."""
        router, mark, name = event.name.partition(_MARK)
        if not mark or not router.startswith(_ROUTER):
            return ()  # of another policy
        return self._ask(int(router.removeprefix(_ROUTER)), replace(event, name=name))

    def _blocks(self, i: int, event: BlocksStored | BlocksRemoved | BlocksCleared | KvEvent) -> Sequence[Action]:
        """KV events of a worker, now or later; later ones are taken in before whatever this router is asked next."""
        lag_s = i * self._settings.kv_lag_s
        if lag_s > 0.0:
            if type(event) in self._replicas[i].subscribes:
                self._late[i].append((event.at_s + lag_s, event))
            return ()
        return self._ask(i, event)


_ROUTER, _MARK = "router ", ": "


def _signed(action: Action, router: int) -> Action:
    """An order of one router among several, so that it is known whose it is, and what it brings goes back there."""
    if isinstance(action, Dispatch):
        return replace(action, reason=f"{_ROUTER}{router}{_MARK}{action.reason}")
    if isinstance(action, SetTimer):
        return replace(action, name=f"{_ROUTER}{router}{_MARK}{action.name}")
    if isinstance(action, (RequestIndexReplay, RequestIndexDump)):
        return replace(action, origin=router)
    return action


def _name(origin: int, booking: str) -> RequestId:
    """The name of a peer's booking in our books."""
    return RequestId(f"router {origin}/{booking}")


def _prune(ended: dict[str, float], now_s: float) -> None:
    """Forget what need not be remembered any more; entries are in order of time."""
    while ended:
        name, until_s = next(iter(ended.items()))
        if until_s > now_s:
            return
        del ended[name]
