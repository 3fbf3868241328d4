"""Who leaves, who comes back, and what becomes of the requests that were there.

It carries out losses, returns, drains, cancellations and migrations on the world; whether a request is sent again or
fails is the policies' decision. What happens at an instant for this reason comes before everything else at that
instant: a token is delivered when its step has ended before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from policies.cluster.actions import Migrate
from policies.cluster.events import (
    PrefillDone,
    RequestInterrupted,
    RequestMigrated,
    WorkerDraining,
    WorkerLost,
    WorkerRecalled,
)
from policies.cluster.ids import Leg, LossCause, RequestId, WorkerId
from twin.engine.sequence import Phase, Sequence
from twin.engine.ticks import before, instant
from twin.mocker.clock import Order
from twin.mocker.requests import OpenRequest
from twin.mocker.wires import FRONTEND
from twin.mocker.worker import MockWorker
from twin.perf.protocol import LatencyModel

if TYPE_CHECKING:
    from policies.resilience.drain import Drain, DrainRules
    from twin.mocker.world import MockWorld

_FAULT = int(Order.FAULT)


@dataclass(slots=True)
class Loss:
    """What a loss came to: when the cluster knew, how many requests it interrupted, how these ended."""

    detected_s: float | None = None
    interrupted: int = 0
    tokens_carried: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


class Draining(NamedTuple):
    """A worker on its way out, and how far it is."""

    worker: MockWorker
    drain: Drain


class Upset:
    """How a worker's messages are disturbed now, by whatever causes: keyed by cause."""

    __slots__ = ("copies", "delays_s", "later_s", "losses", "silent", "skews_s")

    def __init__(self) -> None:
        self.losses: dict[str, Callable[[], bool]] = {}
        self.delays_s: dict[str, float] = {}
        self.later_s: dict[str, Callable[[], float]] = {}  # how much later than usual a message of blocks comes
        self.copies: dict[str, Callable[[], bool]] = {}  # whether it comes once more
        self.skews_s: dict[str, float] = {}  # how far its clock is before the cluster's
        self.silent: set[str] = set()

    @property
    def skew_s(self) -> float:
        return sum(self.skews_s.values())

    def fates_s(self) -> tuple[float, ...]:
        """How much later than usual a message of blocks comes, once for each time that it does; every cause draws."""
        lost = self.loses()
        later_s = sum(late() for late in self.later_s.values())
        copies = sum(again() for again in self.copies.values())
        return () if lost else (later_s,) * (1 + copies)

    def loses(self) -> bool:
        """Whether this message is lost; every cause draws."""
        return sum(lost() for lost in self.losses.values()) > 0

    @property
    def delay_s(self) -> float:
        return sum(self.delays_s.values())

    def over(self, cause: str) -> None:
        self.losses.pop(cause, None)
        self.delays_s.pop(cause, None)
        self.later_s.pop(cause, None)
        self.copies.pop(cause, None)
        self.skews_s.pop(cause, None)
        self.silent.discard(cause)


class Churn:
    """Acts on one world. Each method acts at the world's present instant."""

    def __init__(self, world: MockWorld) -> None:
        self._world = world
        self.rules: DrainRules | None = None  # of drains that do not say otherwise; None: no grace and no bound
        self.draining: dict[WorkerId, Draining] = {}
        self.upsets: dict[WorkerId, Upset] = {}
        self.on_arrival: list[Callable[[int, RequestId], None]] = []  # called with each row that arrives
        self.pins: dict[int, WorkerId] = {}  # rows that ask for a worker
        self.due_s: dict[WorkerId, float] = {}  # workers that are known to come (back), and when
        self.when_gone: dict[WorkerId, Callable[[], None]] = {}  # called when a draining worker has left
        self.touched: dict[RequestId, list[Loss]] = {}
        self.outage: list[Callable[[], None]] | None = None  # the store is down; what is told when it is back
        self.failing: dict[WorkerId, dict[str, Callable[[OpenRequest], bool]]] = {}  # who fails what, by cause
        self._losses: dict[WorkerId, Loss] = {}

    # ------------------------------------------------------------ losses and returns

    def lose(
        self,
        worker_id: WorkerId,
        reason: str,
        detect_s: float | None = 0.0,
        loss: Loss | None = None,
        cause: LossCause = LossCause.DISCONNECTED,
    ) -> None:
        """A worker dies now; the cluster knows after `detect_s` (None: not before it comes back)."""
        world = self._world
        world.news.learn_evictions(before(world.clock.now))
        worker = world.workers[worker_id]
        for request in self.requests_of(worker_id):
            for seq in _legs_on(request, worker_id):
                worker.count(seq)
        worker.kill()
        world.wires.forget(worker_id)
        world.starts.on_gone(worker_id)
        if world.handoffs is not None:
            world.handoffs.stop(worker)
        if loss is not None:
            self._losses[worker_id] = loss
        if detect_s is not None:
            self.detect(worker, reason, detect_s, cause)

    def detect(
        self, worker: MockWorker, reason: str, after_s: float = 0.0, cause: LossCause = LossCause.DISCONNECTED
    ) -> None:
        """The cluster learns, now or later, that a worker is gone (or takes it for gone): it is fenced, its requests
        are interrupted.
        """
        world = self._world
        if after_s > 0.0:
            world.call(instant(world.clock.now + after_s), _FAULT, lambda: self.detect(worker, reason, cause=cause))
            return
        if worker.fenced:
            return
        world.news.learn_evictions(before(world.clock.now))
        worker.fenced = True
        self.draining.pop(worker.worker_id, None)
        loss = self._losses.pop(worker.worker_id, None) or Loss()
        loss.detected_s = world.clock.now
        world.post(WorkerLost(at_s=world.clock.now, worker_id=worker.worker_id, reason=reason))
        for request in self.requests_of(worker.worker_id):
            if not request.closed:
                self.interrupt(request, worker, reason, loss, cause)
        gone = self.when_gone.pop(worker.worker_id, None)
        if gone is not None:
            gone()
        if world.scaling is not None:
            world.scaling.on_gone(worker.worker_id)

    def expect(self, worker_id: WorkerId, at_s: float) -> None:
        """A worker is going to be there (again) at `at_s`."""
        self.due_s[worker_id] = at_s

    @property
    def next_due(self) -> str:
        """Which worker is due next, in words; empty where none is."""
        now_s, names = self._world.clock.now, self._world.specs
        due = [(at_s, names[worker_id].name) for worker_id, at_s in self.due_s.items() if at_s > now_s]
        return f"; {min(due)[1]} is due at {min(due)[0]:g} s" if due else ""

    def take_for_lost(self, worker: MockWorker, reason: str, loss: Loss) -> None:
        """The cluster does not hear of a worker that lives, and takes it for lost."""
        self._losses[worker.worker_id] = loss
        self.detect(worker, reason)

    def restore(self, worker_id: WorkerId) -> None:
        """A worker that is down comes back, empty, under a new epoch; whoever took it for alive learns better first.
        One that cannot reach the cluster, or register, is there when it can.
        """
        if self.outage is not None:
            self.outage.append(lambda: self.restore(worker_id))
            return
        self._world.wires.send(worker_id, FRONTEND, lambda: self._restore(worker_id))

    def _restore(self, worker_id: WorkerId) -> None:
        world = self._world
        gone = world.workers[worker_id]
        if not gone.down:
            return  # it came back for another reason, while both had to wait
        self.detect(gone, "came back under a new epoch")
        world.start_worker(world.specs[worker_id], gone.up.epoch + 1)
        if world.scaling is not None:
            world.scaling.on_back(worker_id)

    # ------------------------------------------------------------ slow, hanging, garbled

    def hang(self, worker: MockWorker) -> None:
        """A worker stops where it is."""
        self._world.news.learn_evictions(before(self._world.clock.now))
        worker.hang()

    def pace(self, worker: MockWorker, latency: LatencyModel) -> None:
        """A worker takes another time for its steps from the next one on."""
        self._world.news.learn_evictions(before(self._world.clock.now))
        worker.pace(latency)

    def upset(self, worker_id: WorkerId) -> Upset:
        """How the messages of a worker are disturbed."""
        return self.upsets.setdefault(worker_id, Upset())

    # ------------------------------------------------------------ drains

    def drain(
        self,
        worker_id: WorkerId,
        rules: DrainRules | None = None,
        loss: Loss | None = None,
        known_after_s: float = 0.0,
    ) -> None:
        """A worker leaves in three phases; the cluster hears of it after `known_after_s`, and sends it work until then.

        One that is leaving already stops now: that is what a second signal means.
        """
        from policies.resilience import drain as drains

        world, now_s = self._world, self._world.clock.now
        if worker_id in self.draining:
            self.draining[worker_id].drain.hurry(now_s)
            self.check_drained()
            return
        usual = drains.Drain.of(rules or self.rules or drains.DrainRules(grace_s=0.0, timeout_s=None), now_s)
        drain = drains.Drain(instant(usual.grace_ends_s), None if usual.cut_s is None else instant(usual.cut_s))
        self.draining[worker_id] = Draining(world.workers[worker_id], drain)
        if loss is not None:
            self._losses[worker_id] = loss
        if known_after_s > 0.0:
            world.call(instant(now_s + known_after_s), _FAULT, lambda: self._deregister(worker_id, drain))
        else:
            self._deregister(worker_id, drain)
        for at_s in (drain.grace_ends_s, drain.cut_s):
            if at_s is not None and at_s > now_s:
                world.clock.watch(at_s, _FAULT, self.check_drained)
        self.check_drained()

    def _deregister(self, worker_id: WorkerId, drain: Drain) -> None:
        """The cluster hears that a worker is leaving, unless it has gone or stays."""
        if self.outage is not None:
            self.outage.append(lambda: self._deregister(worker_id, drain))
            return
        found = self.draining.get(worker_id)
        if found is not None and found.drain is drain:
            self._world.post(WorkerDraining(at_s=self._world.clock.now, worker_id=worker_id))

    def recall(self, worker_id: WorkerId) -> bool:
        """A worker that is leaving stays, under its epoch; False if it is not leaving (any more)."""
        if self.draining.pop(worker_id, None) is None:
            return False
        self._losses.pop(worker_id, None)
        self.when_gone.pop(worker_id, None)
        world = self._world
        view = world.controller.view.workers.get(worker_id)
        if view is not None and view.draining:
            world.post(WorkerRecalled(at_s=world.clock.now, worker_id=worker_id))
        if world.scaling is not None:
            world.scaling.on_recalled(worker_id)
        return True

    def refuses(self, worker_id: WorkerId) -> bool:
        """Whether a worker is past its grace and takes nothing new."""
        found = self.draining.get(worker_id)
        return found is not None and not found.drain.accepts(self._world.clock.now)

    def turns_away(self, request: OpenRequest, worker: MockWorker, seq: Sequence) -> bool:
        """A leg reaches a worker: whether it takes nothing new, or fails what it takes. The request is interrupted
        then, and has lost nothing but time."""
        worker_id = worker.worker_id
        if self.refuses(worker_id):
            self._turn_away(request, worker, seq, "it is shutting down and takes nothing new", LossCause.SHUTDOWN)
            return True
        if worker_id in self.failing and any(fails(request) for fails in self.failing[worker_id].values()):
            self._turn_away(request, worker, seq, "internal error of the engine", LossCause.ENGINE_ERROR)
            return True
        return False

    def _turn_away(self, request: OpenRequest, worker: MockWorker, seq: Sequence, why: str, cause: LossCause) -> None:
        seq.phase = Phase.DONE
        if request.sequence is seq:
            request.sequence = None
        else:
            request.prefill = None
        self.interrupt(request, worker, why, self._losses.get(worker.worker_id), cause)

    def on_freed(self, worker: MockWorker) -> None:
        """A worker has given blocks back: it leaves if it is draining and these were the last."""
        found = self.draining.get(worker.worker_id)
        if found is not None and found.worker is worker:
            self.check_drained()

    def check_drained(self) -> None:
        """Let draining workers go that have nothing left, or no time."""
        world, now_s = self._world, self._world.clock.now
        for worker_id, (worker, drain) in list(self.draining.items()):
            if drain.may_go(now_s, idle=False):
                why = "engine shutdown at the end of the drain time"
                self.lose(worker_id, why, cause=LossCause.SHUTDOWN)
            elif not world.partitions.is_cut_off(worker_id) and drain.may_go(now_s, idle=self._has_nothing(worker)):
                del self.draining[worker_id]
                worker.kill()
                world.starts.on_gone(worker_id)
                self.detect(worker, "drained")

    def _has_nothing(self, worker: MockWorker) -> bool:
        """Whether nobody waits for anything of a worker, and it holds nothing for anybody."""
        view = self._world.controller.view.workers.get(worker.worker_id)
        idle = worker.engine.idle and not worker.engine.pool.active and not worker.busy
        return view is not None and not view.in_flight and idle

    # ------------------------------------------------------------ requests

    def cancel(self, request_id: RequestId) -> bool:
        """The client leaves: the request ends now, its engine lets go at the end of the step. False if it is over."""
        world = self._world
        request = world.open.get(request_id)
        if request is None:
            return False
        self.give_up(request, "cancelled", "the client left")
        return True

    def give_up(self, request: OpenRequest, status: str, reason: str) -> None:
        """An open request ends now, wherever it is; what its legs hold is freed at the end of the step."""
        world = self._world
        world.news.learn_evictions(before(world.clock.now))
        if request.handoff is not None and world.handoffs is not None:
            self._count(request)
            request.closed = True
            world.handoffs.break_off(request.handoff)
        else:
            self._drop(request)
        world.end(request.request_id, status, reason)

    def _drop(self, request: OpenRequest) -> None:
        """Its worker hears that nobody wants a request any more."""
        seq, worker_id = request.sequence, request.worker_id
        if seq is None or worker_id is None:
            return
        worker = self._world.workers[worker_id]
        if not worker.down:
            self._world.wires.send(FRONTEND, worker_id, lambda: worker.drop(seq))

    def migrate(self, action: Migrate) -> None:
        """Send an interrupted request again, what the client has already as part of the prompt."""
        from policies.resilience.carry import carry

        world = self._world
        request = world.open[action.request_id]
        request.migrations += 1
        row = request.row
        carried = carry(row.isl, row.max_tokens, request.carried)
        world.post(
            RequestMigrated(
                at_s=world.clock.now,
                request_id=action.request_id,
                isl=carried.isl,
                blocks=request.path,
                max_tokens=carried.max_tokens,
                priority=row.priority,
                session_id=row.session_id,
                lora=row.lora,
                attempt=action.attempt,
                emitted_tokens=carried.emitted_tokens,
                traits=world.controller.view.requests[action.request_id].arrived.traits,
                excluded=action.excluded,
                kept_on=request.prefill_worker_id if request.prefill is not None else None,
            )
        )

    def on_continued(self, seq: Sequence, worker: MockWorker) -> None:
        """A request that was sent again goes on: one gap in its stream, and its prompt is computed."""
        now_s, request = self._world.clock.now, self._world.open[seq.request_id]
        assert request.last_token_s is not None
        self._world.note_gap(worker.worker_id, request.last_token_s, now_s)
        if seq.leg is Leg.AGG:
            self._world.post(PrefillDone(at_s=now_s, request_id=seq.request_id, worker_id=worker.worker_id))

    def on_end(self, request_id: RequestId, status: str) -> None:
        """A request has ended: the losses that it survived, or did not, learn how."""
        for loss in self.touched.pop(request_id, ()):
            loss.outcomes[status] = loss.outcomes.get(status, 0) + 1

    def interrupt(
        self,
        request: OpenRequest,
        worker: MockWorker,
        reason: str = "prompt lost",
        loss: Loss | None = None,
        cause: LossCause = LossCause.DISCONNECTED,
    ) -> None:
        """What a request had is gone with a worker, or its prefill worker has it still; the policies say what becomes
        of it."""
        world, handoff = self._world, request.handoff
        loss = loss or Loss()
        kept = False
        if handoff is None:
            self._drop(request)
        elif world.handoffs is not None:
            kept = world.handoffs.lose_destination(handoff, worker)
        if not kept:
            self._count(request)
        emitted = request.made
        if kept:
            request.lose_decode_leg()
        else:
            request.interrupt(world.tree)  # first: what is freed below may let a draining worker go, with its requests
            if handoff is not None and world.handoffs is not None:
                world.handoffs.break_off(handoff)
        loss.interrupted += 1
        loss.tokens_carried += request.carried
        self.touched.setdefault(request.request_id, []).append(loss)
        world.post(
            RequestInterrupted(
                at_s=world.clock.now,
                request_id=request.request_id,
                worker_id=worker.worker_id,
                emitted_tokens=emitted,
                reason=reason,
                cause=cause,
                kept_on=request.prefill_worker_id if kept else None,
            )
        )

    def _count(self, request: OpenRequest) -> None:
        """Let the legs that are on living workers say what they have made, where they can be asked."""
        for worker_id, seq in _legs(request):
            worker = self._world.workers[worker_id]
            if not worker.down and not self._world.partitions.is_cut_off(worker_id):
                worker.count(seq)

    def requests_of(self, worker_id: WorkerId) -> list[OpenRequest]:
        """Open requests with a leg on a worker, in order of arrival."""
        return [request for request in self._world.open.values() if _legs_on(request, worker_id)]


def _legs(request: OpenRequest) -> list[tuple[WorkerId, Sequence]]:
    """The legs that an open request depends on, and where they are."""
    legs = []
    if request.worker_id is not None and request.sequence is not None:
        legs.append((request.worker_id, request.sequence))
    if request.prefill_worker_id is not None and request.prefill is not None and _needs_prefill(request):
        legs.append((request.prefill_worker_id, request.prefill))
    return legs


def _needs_prefill(request: OpenRequest) -> bool:
    """Whether something is still to come from the leg that computes the prompt: its KV, or the news that it is done."""
    handoff, prefill = request.handoff, request.prefill
    if handoff is None or prefill is None or handoff.arrived:
        return False
    return not handoff.told or handoff.stalled or prefill.phase is not Phase.DONE


def _legs_on(request: OpenRequest, worker_id: WorkerId) -> list[Sequence]:
    """The legs of a request that are on a worker."""
    return [seq for where, seq in _legs(request) if where == worker_id]
