"""One router among several in front of one cluster: it decides on its own books, and tells the others of its bookings.

What a live router process runs; `fleet` puts several into one simulated cluster. News travel as actions and come back
as events (`PublishBooking`, `PeerBooking`): late, or never, as the world has it. A replica never sees a peer's request
but through them, and nothing that a peer says outlives its silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

from policies.cluster.actions import Action, Dispatch, PublishBooking, SetTimer
from policies.cluster.bookings import BookingOp, BookingStep, SyncKind
from policies.cluster.events import (
    ENDS,
    Event,
    FirstToken,
    PeerBooking,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestInterrupted,
    RequestMigrated,
    RouterRestarted,
    TimerFired,
)
from policies.cluster.ids import Leg, Place, RankId, RequestId
from policies.cluster.request import RequestState
from policies.cluster.state import ClusterView, RequestView

_TIMER = "sync"
BATCH_OPS = 256
"""Steps of bookings in one message, at most."""
TOMBSTONE_S = 60.0
"""How long it is remembered that a booking ended which had not been heard of."""
SILENCE_S = 30.0
"""A peer that says nothing for so long is taken for gone, and its bookings with it."""
ASK_AGAIN_S = 1.0
"""Between two requests for all that a peer has open, while none of them is answered."""


class Peered(Protocol):
    """A router that takes in what its peers have sent: a mode, one with a queue in front, or one that places legs."""

    subscribes: ClassVar[frozenset[type[Event]]]

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]: ...

    def counters(self) -> dict[str, int]: ...

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg) -> None:
        """A peer sent a leg of a request there: it counts as if this router had. Its end comes like any other."""


class _Key(NamedTuple):
    """One booking of a router: the name under which the request draws, and which leg of it."""

    booking: str
    leg: Leg


@dataclass(slots=True)
class _Own:
    """An open booking, of ours or of a peer: how it was announced, and whether its prompt is computed."""

    add: BookingOp
    prefilled: bool = False


@dataclass(slots=True)
class _Peer:
    """What one peer has said: the number of its last message, when that was, its open bookings."""

    seq: int = 0
    heard_s: float = float("-inf")
    stale: bool = False  # a message of it was missed, and it has not told all since
    asked_s: float = float("-inf")
    open: dict[_Key, _Own] = field(default_factory=dict)
    ended: dict[_Key, float] = field(default_factory=dict)  # ended before they were heard of: until when to remember


class Replica:
    """One router among several. Its decisions are its router's; beside them it publishes and takes in bookings.

    Counters beside the router's: `sync_sent` and `sync_heard` messages, `sync_gaps` (messages missed), `sync_resyncs`,
    `sync_tombstones` (ends before beginnings), `sync_silent` (peers taken for gone).
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {RequestArrived, RequestMigrated, RequestInterrupted, PrefillDone, FirstToken, PeerBooking, TimerFired, *ENDS}
    )

    def __init__(self, router: Peered, me: int, *, sync: bool, batch_s: float) -> None:
        self.subscribes = router.subscribes | Replica.subscribes  # type: ignore[misc]
        self.me = me
        self._router = router
        self._sync = sync
        self._batch_s = batch_s
        self._timing = False
        self._seq = 0
        self._news: deque[BookingOp] = deque()
        self._own: dict[RequestId, dict[Leg, _Own]] = {}
        self._peers: dict[int, _Peer] = {}
        self._counts = dict.fromkeys(("sent", "heard", "gaps", "resyncs", "tombstones", "silent"), 0)

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return self._router.counters() | {f"sync_{name}": n for name, n in self._counts.items()}

    @property
    def peer_bookings(self) -> int:
        """Bookings of peers that are charged now."""
        return sum(len(peer.open) for peer in self._peers.values())

    def decide(self, event: Event, view: ClusterView) -> Iterator[Action]:
        """The orders of the router one by one, each when the view has taken in the one before it; then news of them."""
        if isinstance(event, PeerBooking):
            if event.dest == self.me and event.origin != self.me:
                yield from self._hear(event, view)
            return
        if isinstance(event, TimerFired) and event.name == _TIMER:
            self._timing = False
            yield from self._flush()
            return
        if isinstance(event, RouterRestarted):
            yield from self._restart(event, view)
            return
        if isinstance(event, RequestArrived):
            yield from self._drop_the_silent(event.at_s, view)
        self._note(event)
        yield from self._ordered(event, view)
        yield from self._tell(event.at_s)

    def _ordered(self, event: Event, view: ClusterView) -> Iterator[Action]:
        """What our router orders for an event, of ours or of a peer's booking; what it sends out is noted."""
        for action in self._router.decide(event, view) if type(event) in self._router.subscribes else ():
            if self._sync and isinstance(action, Dispatch):
                self._add(view.requests[action.request_id].arrived, action)
            yield action

    def _tell(self, at_s: float) -> Iterable[Action]:
        """What the other routers are to hear now, or when it has waited for company."""
        if not self._news:
            return ()
        if self._batch_s <= 0.0 or len(self._news) >= BATCH_OPS:
            return self._flush()
        if self._timing:
            return ()
        self._timing = True
        return (SetTimer(name=_TIMER, due_s=at_s + self._batch_s, reason="tell other routers"),)

    # ------------------------------------------------------------ our news

    def _note(self, event: Event) -> None:
        """What an event means for our bookings."""
        if not self._sync or not isinstance(event, RequestEvent):
            return
        if type(event) in ENDS:
            self._over(event.request_id, *Leg)
        elif isinstance(event, RequestInterrupted):
            kept = event.kept_on is not None  # the leg that computed the prompt holds its KV still
            self._over(event.request_id, *(leg for leg in Leg if not (kept and leg is Leg.PREFILL)))
        elif isinstance(event, PrefillDone):
            self._over(event.request_id, Leg.PREFILL)
            self._prefilled(event.request_id, Leg.AGG)
        elif isinstance(event, FirstToken):
            self._prefilled(event.request_id, Leg.AGG, Leg.DECODE)

    def _over(self, request_id: RequestId, *legs: Leg) -> None:
        own = self._own.get(request_id)
        if own is None:
            return
        for leg in legs:
            if leg in own:
                self._news.append(BookingOp(step=BookingStep.FREE, booking=own.pop(leg).add.booking, leg=leg))
        if not own:
            del self._own[request_id]

    def _prefilled(self, request_id: RequestId, *legs: Leg) -> None:
        own = self._own.get(request_id, {})
        for leg in legs:
            if leg in own and not own[leg].prefilled:
                own[leg].prefilled = True
                self._news.append(BookingOp(step=BookingStep.PREFILL_DONE, booking=own[leg].add.booking, leg=leg))

    def _add(self, event: RequestArrived, sent: Dispatch) -> None:
        op = BookingOp(
            step=BookingStep.ADD,
            booking=event.draw_id,
            leg=sent.leg,
            worker_id=sent.worker_id,
            isl=event.isl,
            blocks=event.blocks,
            overlap_blocks=sent.overlap_blocks,
            dp_rank=sent.dp_rank,
            local_hashes=event.local_hashes,
        )
        self._own.setdefault(event.request_id, {})[sent.leg] = _Own(op)
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
        mine = [own for legs in self._own.values() for own in legs.values()]
        return (*self._flush(), self._publish(SyncKind.RESYNC, _told(mine), dest))

    # ------------------------------------------------------------ a restart

    def _restart(self, event: RouterRestarted, view: ClusterView) -> Iterator[Action]:
        """All that we knew of bookings is gone; peers tell theirs again, and ours as they know them."""
        self._own, self._peers, self._timing = {}, {}, False
        self._news.clear()
        if self._sync:
            yield self._publish(SyncKind.LOST, (), None)
        yield from self._ordered(event, view)
        yield from self._tell(event.at_s)

    def _take_back(self, event: PeerBooking, view: ClusterView) -> Iterator[Action]:
        """Bookings of ours that a peer knows: those that are open still count again, the others are over for all."""
        names = {request.arrived.draw_id: request for request in view.requests.values()}
        for op in event.ops:
            request = names.get(op.booking)
            known = request is not None and op.leg in self._own.get(request.arrived.request_id, {})
            if request is None or not (known or _is_open(request, op)):
                if op.step is BookingStep.ADD:
                    self._news.append(BookingOp(step=BookingStep.FREE, booking=op.booking, leg=op.leg))
            elif op.step is BookingStep.ADD and not known:
                assert op.worker_id is not None
                arrived = replace(request.arrived, at_s=event.at_s)
                self._own.setdefault(arrived.request_id, {})[op.leg] = _Own(op)
                self._router.peer_sent(arrived, _place(op), op.overlap_blocks, op.leg)
                if request.state in _COMPUTED:
                    yield from self._computed(arrived.request_id, op, event.at_s, view)

    def _computed(self, request_id: RequestId, op: BookingOp, at_s: float, view: ClusterView) -> Iterator[Action]:
        """The prompt of a booking that came back is computed."""
        assert op.worker_id is not None
        self._prefilled(request_id, op.leg)
        yield from self._ordered(FirstToken(at_s=at_s, request_id=request_id, worker_id=op.worker_id), view)

    # ------------------------------------------------------------ their news

    def _hear(self, event: PeerBooking, view: ClusterView) -> Iterator[Action]:
        self._counts["heard"] += 1
        peer = self._peers.setdefault(event.origin, _Peer())
        peer.heard_s = event.at_s
        if event.kind in (SyncKind.ASK, SyncKind.LOST):
            if self._sync:
                yield from self._all_open(event.origin)
                if event.kind is SyncKind.LOST:
                    yield self._publish(SyncKind.RETURN, _told(peer.open.values()), event.origin)
            return
        if event.kind is SyncKind.RETURN:
            yield from self._take_back(event, view)
            yield from self._tell(event.at_s)
            return
        if event.kind is SyncKind.RESYNC:
            self._counts["resyncs"] += 1
            keep = {_Key(op.booking, op.leg) for op in event.ops}
            yield from self._forget(event.origin, peer, event.at_s, view, keep)
            peer.stale = False
        elif event.seq > peer.seq + 1:
            self._counts["gaps"] += event.seq - peer.seq - 1
            peer.stale = True
        peer.seq = max(peer.seq, event.seq)
        for op in event.ops:
            yield from self._take(event.origin, peer, op, event.at_s, view)
        yield from self._tell(event.at_s)
        if peer.stale and event.at_s >= peer.asked_s + ASK_AGAIN_S:
            peer.asked_s = event.at_s
            yield self._publish(SyncKind.ASK, (), event.origin)

    def _take(self, origin: int, peer: _Peer, op: BookingOp, now_s: float, view: ClusterView) -> Iterator[Action]:
        """One step of a peer's booking, as if it were ours; our router may order something for it."""
        key = _Key(op.booking, op.leg)
        if op.step is BookingStep.ADD:
            _prune(peer.ended, now_s)
            if key not in peer.open and key not in peer.ended and op.worker_id in view.workers:
                peer.open[key] = _Own(op)
                self._router.peer_sent(_arrived(op, origin, key, now_s), _place(op), op.overlap_blocks, op.leg)
        elif op.step is BookingStep.FREE:
            if key in peer.open:
                yield from self._free(origin, peer, key, now_s, view)
            else:
                self._counts["tombstones"] += 1
                _prune(peer.ended, now_s)
                peer.ended[key] = now_s + TOMBSTONE_S
        elif key in peer.open:
            theirs = peer.open[key]
            theirs.prefilled = True
            assert theirs.add.worker_id is not None
            done = FirstToken(at_s=now_s, request_id=_name(origin, key), worker_id=theirs.add.worker_id)
            yield from self._ordered(done, view)

    def _free(self, origin: int, peer: _Peer, key: _Key, now_s: float, view: ClusterView) -> Iterator[Action]:
        del peer.open[key]
        yield from self._ordered(RequestCancelled(at_s=now_s, request_id=_name(origin, key)), view)

    def _forget(
        self, origin: int, peer: _Peer, now_s: float, view: ClusterView, keep: Set[_Key] = frozenset()
    ) -> Iterator[Action]:
        """All that a peer has said of its bookings, but those to keep, is over."""
        for key in [key for key in peer.open if key not in keep]:
            yield from self._free(origin, peer, key, now_s, view)

    def _drop_the_silent(self, now_s: float, view: ClusterView) -> Iterator[Action]:
        for origin, peer in self._peers.items():
            if peer.open and now_s >= peer.heard_s + SILENCE_S:
                self._counts["silent"] += 1
                yield from self._forget(origin, peer, now_s, view)


_COMPUTED = (RequestState.PREFILLED, RequestState.STREAMING)


def _is_open(request: RequestView, op: BookingOp) -> bool:
    """Whether a leg is where a booking says, and not over."""
    if op.leg is Leg.PREFILL:
        return request.prefill_worker_id == op.worker_id and request.state not in _COMPUTED
    return request.worker_id == op.worker_id


def _told(bookings: Iterable[_Own]) -> tuple[BookingOp, ...]:
    """Open bookings as a peer is told of them."""
    ops: list[BookingOp] = []
    for one in bookings:
        ops.append(one.add)
        if one.prefilled:
            ops.append(BookingOp(step=BookingStep.PREFILL_DONE, booking=one.add.booking, leg=one.add.leg))
    return tuple(ops)


def _place(op: BookingOp) -> Place:
    """Where an announced request went."""
    assert op.worker_id is not None
    return op.worker_id if op.dp_rank is None else RankId(op.worker_id, op.dp_rank)


def _arrived(op: BookingOp, origin: int, key: _Key, now_s: float) -> RequestArrived:
    """An announced request as our router books it."""
    return RequestArrived(
        at_s=now_s, request_id=_name(origin, key), isl=op.isl, blocks=op.blocks, local_hashes=op.local_hashes
    )


def _name(origin: int, key: _Key) -> RequestId:
    """The name of a peer's booking in our books."""
    leg = "" if key.leg is Leg.AGG else f" {key.leg.value}"
    return RequestId(f"router {origin}/{key.booking}{leg}")


def _prune(ended: dict[_Key, float], now_s: float) -> None:
    """Forget what need not be remembered any more; entries are in order of time."""
    while ended:
        name, until_s = next(iter(ended.items()))
        if until_s > now_s:
            return
        del ended[name]
