"""Prefill/decode hand-off: who holds what until when, between the engines of two workers.

    submitted -> held (source keeps the blocks) -> reserved (destination has room) -> moving -> active -> released

Source first looks for a destination when the prompt is computed; destination first reserves room, then computes. A busy
worker carries out what it is told when its step ends, an idle one at once. At one instant: all step ends come first,
then, worker by worker (prefill pool before decode pool), reservations take effect, deferred commands run in order of
arrival, newly held prompts look for a destination (specs: engine 1 T3 and 11). No KV is used before it has arrived, and
none is given back before it has been fetched, given up or its lease has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from policies.cluster.blocks import ContentTree
from policies.cluster.events import Event, FirstToken, PrefillDone, RoomReserved
from policies.cluster.ids import Leg, Role, WorkerId
from policies.frozen import frozen
from twin.engine.plan import Outcome
from twin.engine.sequence import Sequence
from twin.engine.ticks import instant
from twin.mocker.clock import Clock, Order
from twin.mocker.wires import FRONTEND, Node, Wires
from twin.mocker.worker import MockWorker

if TYPE_CHECKING:
    from twin.mocker.links import Network
    from twin.mocker.requests import OpenRequest

_DECODE_POOL = 1 << 31  # commands of decode workers come behind those of prefill workers at one instant


class State(Enum):
    """Where a hand-off stands."""

    SUBMITTED = "submitted"
    HELD = "held"
    RESERVED = "reserved"
    MOVING = "moving"
    ACTIVE = "active"
    RELEASED = "released"


class Load(NamedTuple):
    """KV of `tokens` tokens in `blocks` blocks from one worker to another; `share` of its bytes is still to be sent."""

    source: WorkerId
    dest: WorkerId
    tokens: int
    blocks: int
    share: float = 1.0


class Move(Protocol):
    """A transfer under way."""

    def cancel(self) -> object: ...


class Mover(Protocol):
    """Moves KV from one worker to another and says when it is there (at once, if it takes no time). `network` are the
    links that transfers share, None where each has its own."""

    @property
    def network(self) -> Network | None: ...

    def move(self, load: Load, on_done: Callable[[], None]) -> Move | None: ...

    def alone_s(self, load: Load) -> float:
        """How long the load would take if it started now and nothing changed."""
        ...


class PrivateMover:
    """Every transfer has a link of its own: set-up plus bytes over bandwidth (None: no time), nothing contends."""

    def __init__(
        self, clock: Clock, *, bytes_per_token: int, bandwidth_bytes_per_s: float | None, setup_s: float
    ) -> None:
        self._clock = clock
        self._bytes_per_token = bytes_per_token
        self._bandwidth = bandwidth_bytes_per_s
        self._setup_s = setup_s
        self.network: Network | None = None

    def move(self, load: Load, on_done: Callable[[], None]) -> Move | None:
        took_s = self.alone_s(load)
        if took_s <= 0.0:
            on_done()
            return None
        return _Timed(self._clock, instant(self._clock.now + took_s), int(Order.TRANSFER_DONE), on_done)

    def alone_s(self, load: Load) -> float:
        if self._bandwidth is None:
            return self._setup_s
        return self._setup_s + load.share * load.tokens * self._bytes_per_token / self._bandwidth


class _Timed:
    """A call at an instant that can be called off."""

    __slots__ = ("_what",)

    def __init__(self, clock: Clock, at_s: float, order: int, what: Callable[[], None]) -> None:
        self._what: Callable[[], None] | None = what
        clock.at(at_s, order, (self._fire,))

    def _fire(self, _: object) -> None:
        what, self._what = self._what, None
        if what is not None:
            what()

    def cancel(self) -> bool:
        pending = self._what is not None
        self._what = None
        return pending


@frozen
class HandoffRules:
    """What holds for every hand-off of a run.

    `first_token`: which worker's token the client sees first. `lease_s`: how long a source holds blocks that nobody
    fetches (None: for ever). `missing_only`: only blocks that the destination has not cached are sent. `one_at_a_time`:
    the reference's rules (one reservation per attempt; preempted requests stay out while others wait for room).
    `overlap_layers`: KV is sent layer by layer, of so many, while the prompt is computed, where the destination has
    room by then (None: when the prompt is complete).
    """

    first_token: str
    lease_s: float | None
    missing_only: bool
    one_at_a_time: bool
    block_size: int
    overlap_layers: int | None = None


@frozen
class HandoffPlan:
    """How a run hands KV over. `mover` makes what moves it, on the run's clock; `decode_kv_events`: decode workers tell
    what they have cached (the reference's do not).
    """

    rules: HandoffRules
    mover: Callable[[Clock], Mover]
    decode_kv_events: bool = False


class Handoff:
    """One request between two workers, with the instants of its stages (None where it has not been)."""

    __slots__ = (
        "activated_s",
        "asked",
        "dest",
        "dst",
        "expired",
        "held_s",
        "lease",
        "move",
        "released_s",
        "request",
        "reserved_s",
        "retried",
        "source",
        "source_first",
        "src",
        "stalled",
        "state",
        "told",
    )

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self.state = State.SUBMITTED
        self.source: MockWorker | None = None
        self.dest: MockWorker | None = None
        self.src: Sequence | None = None
        self.dst: Sequence | None = None
        self.move: Move | None = None
        self.lease: _Timed | None = None
        self.asked = 0
        self.expired = False
        self.told = False  # the cluster knows that the prompt has been computed
        self.stalled = False  # its two workers cannot reach each other
        self.retried = False  # what they had begun to send is sent again
        self.source_first = False  # the prompt was begun before room was taken for it
        self.held_s: float | None = None
        self.reserved_s: float | None = None
        self.activated_s: float | None = None
        self.released_s: float | None = None

    @property
    def arrived(self) -> bool:
        """Whether the KV is where it is used."""
        return self.state is State.ACTIVE

    @property
    def over(self) -> bool:
        """Whether the request has ended, or goes on elsewhere."""
        return self.request.closed or self.request.handoff is not self


class _Side:
    """What one worker has to do for hand-offs besides its steps."""

    __slots__ = ("deferred", "held", "pending", "refused", "reserved", "scheduled", "worker")

    def __init__(self, worker: MockWorker) -> None:
        self.worker = worker
        self.pending: deque[Handoff] = deque()  # ask for room, first come first served
        self.refused = False  # the head did not fit, and nothing has changed since
        self.reserved: list[Handoff] = []  # got room at the end of the step, not acted upon yet
        self.deferred: list[Callable[[], None]] = []
        self.held: list[Handoff] = []
        self.scheduled = False


class Handoffs:
    """All hand-offs of a run. `post` hands an event to the controller; `close` ends a request; `changed` is called when
    what a worker has cached may have changed between its steps; `tell` lets the cluster hear what a worker says. What
    one side tells the other goes over `wires`.
    """

    def __init__(
        self,
        clock: Clock,
        rules: HandoffRules,
        mover: Mover,
        tree: ContentTree,
        *,
        post: Callable[[Event], None],
        close: Callable[[OpenRequest, str, str | None], None],
        interrupt: Callable[[OpenRequest, MockWorker, str], None],
        freed: Callable[[MockWorker], None],
        changed: Callable[[MockWorker], None],
        wires: Wires,
        tell: Callable[[MockWorker, Callable[[], None]], None],
    ) -> None:
        self._clock = clock
        self.rules = rules
        self._mover = mover
        self.network = mover.network
        self._tree = tree
        self._post = post
        self._close = close
        self._interrupt = interrupt
        self._freed = freed
        self._changed = changed
        self._wires = wires
        self._tell = tell
        self._sides: dict[WorkerId, _Side] = {}
        self._by_src: dict[Sequence, Handoff] = {}
        self._stalled: list[Handoff] = []  # wait until their two workers reach each other
        self._asked = 0
        self.leases_expired = 0

    def alone_s(self, source: WorkerId, dest: WorkerId, tokens: int) -> float:
        """How long the KV of so many tokens would take from one worker to another if nothing else moved now."""
        return self._mover.alone_s(Load(source, dest, tokens, -(-tokens // self.rules.block_size)))

    # ------------------------------------------------------------ dispatches

    def begin(self, request: OpenRequest) -> Handoff:
        """A leg of a request is about to be sent to a worker."""
        return Handoff(request)

    def start_prefill(self, handoff: Handoff, worker: MockWorker, seq: Sequence) -> str | None:
        """The prefill leg goes to a worker; returns the reason when its engine can never run it."""
        refusal = worker.submit(seq)
        if refusal is None:
            handoff.source, handoff.src = worker, seq
            handoff.source_first = handoff.dest is None
            self._by_src[seq] = handoff
        return refusal

    def place_decode(self, handoff: Handoff, worker: MockWorker, seq: Sequence) -> str | None:
        """The decode leg asks a worker for room; returns the reason when it can never have it."""
        settings = worker.engine.settings
        if self.rules.first_token == "prefill":
            seq.expected = 1  # or those who have arrived could fill the pool, and none of them go on
        blocks = -(-(seq.prompt + seq.expected) // settings.block_size)
        if blocks > settings.blocks:
            return (
                f"prompt of {seq.prompt} tokens needs {blocks} KV blocks of {settings.block_size} on decode worker "
                f"{worker.up.name}, its pool has {settings.blocks}"
            )
        if seq.prompt > settings.longest_prompt_tokens:
            return (
                f"prompt of {seq.prompt} tokens leaves no room for an output on decode worker {worker.up.name}, "
                f"its pool holds {settings.blocks * settings.block_size} tokens"
            )
        if settings.max_model_len is not None:
            if seq.prompt >= settings.max_model_len:
                return (
                    f"prompt of {seq.prompt} tokens reaches max_model_len {settings.max_model_len} "
                    f"of decode worker {worker.up.name}"
                )
            seq.outputs_limit = min(seq.outputs_limit, settings.max_model_len - seq.prompt)
        handoff.dest, handoff.dst = worker, seq
        self._asked += 1
        seq.asked = handoff.asked = self._asked
        side = self._side(worker)
        side.pending.append(handoff)
        self._queue_changed(side)
        first = len(side.pending) == 1
        between = worker.between_steps()
        if between or first:
            worker.cut()
        if between:
            self._try_now(side)
            self._changed(worker)
        return None

    # ------------------------------------------------------------ steps

    def on_step(self, worker: MockWorker, outcome: Outcome) -> None:
        """A step of a worker has ended: note what it held, try reservations, and act when all steps have ended."""
        side = self._side(worker)
        if outcome.freed:
            side.refused = False
        if outcome.held:
            side.held += [self._by_src[seq] for seq in outcome.held]
        if side.pending:
            side.reserved += self._attempt(side)
        if side.held or side.reserved or side.deferred:
            self._schedule(side)

    def _schedule(self, side: _Side) -> None:
        if not side.scheduled:
            side.scheduled = True
            up = side.worker.up
            order = Order.COMMAND + up.worker_id + (_DECODE_POOL if up.role is not Role.PREFILL else 0)
            self._clock.at(self._clock.now, order, (lambda _: self._act(side),))

    def _act(self, side: _Side) -> None:
        side.scheduled = False
        reserved, side.reserved = side.reserved, []
        for handoff in reserved:
            if handoff.dest is side.worker:
                self._on_reserved(handoff)
        deferred, side.deferred = side.deferred, []
        for command in deferred:
            command()
        held, side.held = side.held, []
        for handoff in held:
            self._on_held(handoff)
        self._changed(side.worker)

    # ------------------------------------------------------------ source

    def _on_held(self, handoff: Handoff) -> None:
        """The prompt is computed; its blocks wait for whoever fetches them."""
        now_s, request, src, source = self._clock.now, handoff.request, handoff.src, handoff.source
        if src is None:
            return  # dropped in this very step
        assert source is not None
        if handoff.over:
            if not self._wires.cut(FRONTEND, source.worker_id):  # or it does not know yet
                self._release_source(handoff, src)
            return
        again = handoff.held_s is not None
        handoff.held_s = now_s
        reserved = handoff.dest is not None and handoff.reserved_s is not None
        handoff.state = State.RESERVED if reserved else State.HELD
        if self.rules.first_token == "prefill" and not again and request.row.osl - request.carried <= 1:
            self._release_source(handoff, src)
            self._tell(source, lambda: self._answered(handoff, source))
            return
        if not again:
            self._tell(source, lambda: self._prefilled(handoff, source))
        if handoff.over:
            return
        if reserved:
            self._start_move(handoff)
        elif handoff.state is State.HELD:
            self._lease(handoff)

    def _prefilled(self, handoff: Handoff, source: MockWorker) -> None:
        """The cluster hears that the prompt is computed, and the client has its first token if that comes from here."""
        now_s, request = self._clock.now, handoff.request
        if handoff.over:
            return
        handoff.told = True
        first = self.rules.first_token == "prefill"
        if first:
            request.has_prefill_token(now_s)
        self._post(PrefillDone(at_s=now_s, request_id=request.request_id, worker_id=source.worker_id))
        if first and not handoff.over and not request.carried:
            self._post(FirstToken(at_s=now_s, request_id=request.request_id, worker_id=source.worker_id))

    def _answered(self, handoff: Handoff, source: MockWorker) -> None:
        """A one-token answer that the prefill worker gave: nothing is handed over."""
        now_s, request = self._clock.now, handoff.request
        if handoff.over:
            return
        request.has_prefill_token(now_s)
        if not request.carried:
            self._post(FirstToken(at_s=now_s, request_id=request.request_id, worker_id=source.worker_id))
        request.outputs = request.row.osl
        self._give_up_room(handoff)
        self._close(request, "completed", None)

    def _lease(self, handoff: Handoff) -> None:
        """From now on the source holds the blocks for the length of a lease, unless somebody fetches them."""
        lease_s = self.rules.lease_s
        self._hold_until(handoff, None if lease_s is None else instant(self._clock.now + lease_s))

    def _hold_until(self, handoff: Handoff, at_s: float | None) -> None:
        """The source holds the blocks until then (None: for ever), or until they are fetched."""
        if handoff.lease is not None:
            handoff.lease.cancel()
            handoff.lease = None
        if at_s is not None:
            handoff.lease = _Timed(self._clock, at_s, int(Order.TIMER), lambda: self._expire(handoff))

    def _expire(self, handoff: Handoff) -> None:
        """Nobody fetched the blocks in time, or said that it had: the source takes them back. A prompt that found no
        room is computed again later; one that could not be sent goes elsewhere, or fails."""
        src, source = handoff.src, handoff.source
        assert source is not None
        if handoff.state not in (State.HELD, State.ACTIVE):
            return
        self.leases_expired += 1
        if handoff.state is State.HELD:
            handoff.expired = True
            handoff.state = State.SUBMITTED
        self._do(source, lambda: self._release_source(handoff, src))
        if handoff.stalled:
            why = f"its KV could not be fetched within the lease of {self.rules.lease_s:g} s"
            self._tell(source, lambda: self._give_up(handoff, source, why))

    def _give_up(self, handoff: Handoff, source: MockWorker, why: str) -> None:
        if not handoff.over:
            self._interrupt(handoff.request, source, why)

    def _release_source(self, handoff: Handoff, src: Sequence | None) -> None:
        """The source's blocks are free; `src` is the sequence that was meant when this was decided."""
        source = handoff.source
        if src is None or source is None or self._by_src.pop(src, None) is None:
            return  # done already
        if handoff.src is src:
            handoff.src = None
            if handoff.lease is not None:
                handoff.lease.cancel()
        handoff.released_s = self._clock.now
        source.engine.release(src)
        source.nudge()
        self._freed(source)

    # ------------------------------------------------------------ destination

    def _attempt(self, side: _Side) -> list[Handoff]:
        """Give room to the head of the queue (and to those behind it, unless one at a time)."""
        got: list[Handoff] = []
        while side.pending and not side.refused and not side.worker.down:
            handoff = side.pending[0]
            assert handoff.dst is not None
            if not side.worker.engine.reserve(handoff.dst):
                side.refused = True
                break
            side.pending.popleft()
            side.worker.attend()
            handoff.reserved_s = self._clock.now
            got.append(handoff)
            if self.rules.one_at_a_time:
                break
        self._queue_changed(side)
        return got

    def _try_now(self, side: _Side) -> None:
        if side.pending:
            for handoff in self._attempt(side):
                self._on_reserved(handoff)

    def _on_reserved(self, handoff: Handoff) -> None:
        """Room is taken: fetch what is held, or ask for it to be computed."""
        dst, dest = handoff.dst, handoff.dest
        assert dst is not None
        assert dest is not None
        if handoff.over:
            return
        if handoff.state is State.HELD:
            handoff.state = State.RESERVED
            self._start_move(handoff)
        elif handoff.expired and handoff.source is not None:
            self._compute_again(handoff)
        else:
            self._tell(dest, lambda: self._has_room(handoff, dest))

    def _has_room(self, handoff: Handoff, dest: MockWorker) -> None:
        if not handoff.over:
            request_id = handoff.request.request_id
            self._post(RoomReserved(at_s=self._clock.now, request_id=request_id, worker_id=dest.worker_id))

    def _compute_again(self, handoff: Handoff) -> None:
        source, dest = handoff.source, handoff.dest
        assert source is not None
        assert dest is not None
        if source.fenced:
            handoff.expired = False
            self._tell(dest, lambda: self._give_up(handoff, source, "prompt lost"))
            return
        if self._wires.cut(source.worker_id, dest.worker_id):
            handoff.stalled = True
            self._stalled.append(handoff)
            return
        handoff.expired = False
        src = handoff.request.leg(Leg.PREFILL, self._tree, self._clock.now)
        if self.start_prefill(handoff, source, src) is not None:
            self._close(handoff.request, "failed", "the prompt could not be computed again after its lease ended")

    def _start_move(self, handoff: Handoff) -> None:
        source, dest, dst = handoff.source, handoff.dest, handoff.dst
        assert source is not None
        assert dest is not None
        assert dst is not None
        if self._wires.cut(source.worker_id, dest.worker_id):
            self._stall(handoff)
            return
        handoff.state = State.MOVING
        if handoff.lease is not None:
            handoff.lease.cancel()
        size = self.rules.block_size
        tokens, blocks = dst.prompt, -(-dst.prompt // size)
        if self.rules.missing_only:
            blocks -= dst.published
            tokens = blocks * size
        load = Load(source.worker_id, dest.worker_id, tokens, blocks)
        if self.rules.overlap_layers is not None:
            load = load._replace(share=self._left_to_send(handoff, load, self.rules.overlap_layers))
        handoff.move = self._mover.move(load, lambda: self._on_moved(handoff))

    def _left_to_send(self, handoff: Handoff, load: Load, layers: int) -> float:
        """Share of the KV that could not be sent layer by layer while the prompt was being computed.

        The last layer is always left. Only a destination that had room before the end could take anything; what went
        over its links meanwhile is taken at the pace that they have now.
        """
        src, held_s, reserved_s = handoff.src, handoff.held_s, handoff.reserved_s
        if src is None or src.admit_s is None or held_s is None or reserved_s is None or handoff.retried:
            return 1.0
        sending_s = held_s - max(src.admit_s, reserved_s)
        alone_s = self._mover.alone_s(load)
        if sending_s <= 0.0 or alone_s <= 0.0:
            return 1.0
        return max(1.0 / layers, 1.0 - sending_s / alone_s)

    def _on_moved(self, handoff: Handoff) -> None:
        handoff.move = None
        dest, dst = handoff.dest, handoff.dst
        assert dest is not None
        assert dst is not None
        if not handoff.over:
            self._do(dest, lambda: self._activate(handoff, dest, dst))

    def _activate(self, handoff: Handoff, dest: MockWorker, dst: Sequence) -> None:
        """The KV is here: the request enters the destination, the source lets go, the next in line may have room."""
        if handoff.over or handoff.dst is not dst:
            return
        handoff.state = State.ACTIVE
        handoff.activated_s = self._clock.now
        side = self._side(dest)
        if self.rules.first_token == "prefill" and handoff.held_s is not None:
            _has_first(dst, handoff.held_s)
        if dest.engine.activate(dst):
            side.refused = False
        dest.nudge()
        src, source = handoff.src, handoff.source
        assert source is not None
        if src is not None and self._wires.cut(source.worker_id, dest.worker_id):
            self._lease(handoff)  # it will not hear that its blocks have been fetched
        self._order(dest.worker_id, source, lambda: self._release_source(handoff, src))
        self._try_now(side)

    # ------------------------------------------------------------ partitions

    def break_moves(self) -> None:
        """Workers have been cut off from each other: what moves between them stops, and is held at its source."""
        for handoff in list(self._by_src.values()):
            source, dest = handoff.source, handoff.dest
            if source is None or dest is None or not self._wires.cut(source.worker_id, dest.worker_id):
                continue
            handoff.retried = True
            if handoff.move is not None:
                handoff.move.cancel()
                handoff.move = None
                self._stall(handoff)

    @property
    def held_up(self) -> list[OpenRequest]:
        """Requests that wait until their two workers reach each other."""
        return [handoff.request for handoff in self._stalled if not handoff.over]

    def _stall(self, handoff: Handoff) -> None:
        handoff.state = State.HELD
        handoff.stalled = True
        self._lease(handoff)
        self._stalled.append(handoff)

    def move_again(self) -> None:
        """Workers reach each other again: what was held up between them is sent, or computed again and sent."""
        stalled, self._stalled = self._stalled, []
        for handoff in stalled:
            source, dest = handoff.source, handoff.dest
            assert source is not None
            assert dest is not None
            if handoff.over or source.down or dest.down:
                continue
            if self._wires.cut(source.worker_id, dest.worker_id):
                self._stalled.append(handoff)
                continue
            handoff.stalled = False
            if handoff.state is State.HELD:
                handoff.state = State.RESERVED
                self._start_move(handoff)
            elif handoff.expired:
                self._compute_again(handoff)

    # ------------------------------------------------------------ ends

    def cancel(self, handoff: Handoff) -> None:
        """The request is over, whatever its state: free both sides, each when its step ends, each exactly once."""
        if handoff.move is not None:
            handoff.move.cancel()
            handoff.move = None
        src, source = handoff.src, handoff.source
        if src is not None:
            assert source is not None
            self._order(FRONTEND, source, lambda: self._drop_source(handoff, src))
        self._give_up_room(handoff)

    def _drop_source(self, handoff: Handoff, src: Sequence | None) -> None:
        source = handoff.source
        if src is None or source is None or self._by_src.pop(src, None) is None:
            return
        if handoff.src is src:
            handoff.src = None
            if handoff.lease is not None:
                handoff.lease.cancel()
        source.engine.cancel(src)
        source.nudge()
        self._freed(source)

    def _give_up_room(self, handoff: Handoff) -> None:
        dest, dst = handoff.dest, handoff.dst
        if dest is not None and dst is not None:
            self._wires.send(FRONTEND, dest.worker_id, lambda: self._take_room_back(handoff, dest, dst))

    def _take_room_back(self, handoff: Handoff, dest: MockWorker, dst: Sequence) -> None:
        side = self._side(dest)
        if handoff in side.pending:
            head = side.pending[0] is handoff
            side.pending.remove(handoff)
            self._queue_changed(side)
            if head:
                side.refused = False
                self._do(dest, lambda: self._try_now(side))
            return
        self._do(dest, lambda: self._drop_dest(side, dst))

    def _drop_dest(self, side: _Side, dst: Sequence) -> None:
        side.worker.engine.cancel(dst)
        side.refused = False
        side.worker.nudge()
        self._try_now(side)
        self._freed(side.worker)

    def lose_destination(self, handoff: Handoff, worker: MockWorker) -> bool:
        """The decode worker is gone: whether the source goes on holding what it has computed, for another one.

        It does until its lease ends. Not where room was taken before the prompt was begun: held without room, and room
        without a prompt, could wait for each other for ever.
        """
        source, dest = handoff.source, handoff.dest
        lost = dest is worker or (dest is None and handoff.request.worker_id == worker.worker_id)  # or not heard of it
        if not lost or handoff.src is None or source is None or source.down or source.fenced:
            return False
        if not handoff.source_first or handoff.state not in (State.HELD, State.RESERVED, State.MOVING):
            return False
        until_s = None
        assert handoff.held_s is not None
        if self.rules.lease_s is not None:
            until_s = instant(handoff.held_s + self.rules.lease_s)
            if until_s <= self._clock.now:
                return False
        if handoff.move is not None:
            handoff.move.cancel()
            handoff.move = None
        if worker.down:
            handoff.dst = None
        self._hold_for_another(handoff, until_s)
        self._give_up_room(handoff)  # of the one that is over now: who is cut off keeps it until it hears of that
        return True

    def _hold_for_another(self, handoff: Handoff, until_s: float | None) -> None:
        """The source holds its blocks for a new hand-off of the same request, which looks for a destination."""
        request, src = handoff.request, handoff.src
        assert src is not None
        another = Handoff(request)
        another.state = State.HELD
        another.source, another.src, another.held_s = handoff.source, src, handoff.held_s
        another.told, another.retried = handoff.told, handoff.retried
        another.source_first = True
        self._hold_until(handoff, None)
        handoff.src = None
        self._by_src[src] = another
        request.handoff = another
        self._hold_until(another, until_s)

    def stop(self, worker: MockWorker) -> None:
        """A worker is down: nothing moves to it or from it any more."""
        self._sides.pop(worker.worker_id, None)
        for handoff in list(self._by_src.values()):
            if handoff.move is not None and worker in (handoff.source, handoff.dest):
                handoff.move.cancel()
                handoff.move = None

    def break_off(self, handoff: Handoff) -> None:
        """The request starts again elsewhere: what is left of both legs is freed; a worker that is down has nothing."""
        if handoff.source is not None and handoff.source.down and handoff.src is not None:
            self._by_src.pop(handoff.src, None)
            handoff.src = None
        if handoff.dest is not None and handoff.dest.down:
            handoff.dst = None
        self.cancel(handoff)

    # ------------------------------------------------------------ inside

    def _side(self, worker: MockWorker) -> _Side:
        side = self._sides.get(worker.worker_id)
        if side is None or side.worker is not worker:  # another one has come back under the same id
            side = self._sides[worker.worker_id] = _Side(worker)
            self._queue_changed(side)
        return side

    def _order(self, by: Node, worker: MockWorker, command: Callable[[], None]) -> None:
        """Somebody else wants a worker to do something: it does when it hears of it."""
        self._wires.send(by, worker.worker_id, lambda: self._do(worker, command))

    def _do(self, worker: MockWorker | None, command: Callable[[], None]) -> None:
        """At once between steps of a worker, at the end of its step within one."""
        assert worker is not None
        between = worker.between_steps()
        worker.cut()
        if between:
            command()
            self._changed(worker)
        else:
            self._side(worker).deferred.append(command)

    def _queue_changed(self, side: _Side) -> None:
        side.worker.attentive = bool(side.pending) and not side.refused
        if self.rules.one_at_a_time:
            side.worker.engine.hold_back(bool(side.pending))


def _has_first(dst: Sequence, at_s: float) -> None:
    """The answer's first token was made elsewhere, at `at_s`."""
    dst.outputs = 1
    dst.first_token_s = dst.last_token_s = at_s
