"""The cluster as policies may see it: folded from events and from our own dispatches, nothing else.

`ClusterView` is what a policy is handed. It is read-only: assigning to a view raises, and only `Cluster.fold` and
`Cluster.apply`, which the controller calls, change what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

from policies.cluster.actions import Action, AddWorker, Dispatch, Enqueue
from policies.cluster.events import (
    ENDS,
    BlocksRemoved,
    BlocksStored,
    Event,
    PrefillDone,
    RequestArrived,
    RequestEvent,
    RequestInterrupted,
    RequestMigrated,
    WorkerDraining,
    WorkerFenced,
    WorkerLost,
    WorkerRecalled,
    WorkerReported,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import FenceCause, Leg, RequestId, Role, WorkerId
from policies.cluster.request import TRANSITIONS, RequestState
from policies.cluster.scaling import ScaleFailed
from policies.errors import InvariantError


def _setter(cls: type, slot: str) -> Callable[[object, object], None]:
    """The way past `_ReadOnly` for this module alone."""
    write: Callable[[object, object], None] = cls.__dict__[slot].__set__
    return write


class _ReadOnly:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: policies act through actions")


NO_FENCES: frozenset[FenceCause] = frozenset()


class WorkerView(_ReadOnly):
    """One worker: what it registered with, our own open dispatches, why it gets no new work for now (`fences`), and its
    last report (None before the first)."""

    __slots__ = ("draining", "fences", "in_flight", "report", "up")

    up: WorkerUp
    in_flight: int
    draining: bool
    fences: frozenset[FenceCause]
    report: WorkerReported | None

    def __init__(self, up: WorkerUp) -> None:
        _set_up(self, up)
        _set_in_flight(self, 0)
        _set_draining(self, False)
        _set_fences(self, NO_FENCES)
        _set_report(self, None)

    @property
    def worker_id(self) -> WorkerId:
        return self.up.worker_id

    @property
    def name(self) -> str:
        return self.up.name


_set_up = _setter(WorkerView, "up")
_set_in_flight = _setter(WorkerView, "in_flight")
_set_draining = _setter(WorkerView, "draining")
_set_fences = _setter(WorkerView, "fences")
_set_report = _setter(WorkerView, "report")


class RequestView(_ReadOnly):
    """One open request: how it arrived (the last time), its state, the worker that answers it and the one that computes
    its prompt where these are two (None before dispatch).

    `attempt` counts how often it was sent again, `failed_on` where it was when its stream broke: worker and epoch.
    """

    __slots__ = (
        "_holder",
        "_prefill_holder",
        "arrived",
        "attempt",
        "failed_on",
        "prefill_worker_id",
        "state",
        "worker_id",
    )

    arrived: RequestArrived
    state: RequestState
    worker_id: WorkerId | None
    prefill_worker_id: WorkerId | None
    attempt: int
    failed_on: tuple[tuple[WorkerId, int], ...]
    _holder: WorkerView | None  # who counts it; a worker that comes back under the same id is another one
    _prefill_holder: WorkerView | None

    def __init__(self, arrived: RequestArrived) -> None:
        _set_arrived(self, arrived)
        _set_state(self, RequestState.ARRIVED)
        _set_worker(self, None)
        _set_prefill_worker(self, None)
        _set_attempt(self, 0)
        _set_failed_on(self, ())
        _set_holder(self, None)
        _set_prefill_holder(self, None)


_set_arrived = _setter(RequestView, "arrived")
_set_state = _setter(RequestView, "state")
_set_worker = _setter(RequestView, "worker_id")
_set_prefill_worker = _setter(RequestView, "prefill_worker_id")
_set_attempt = _setter(RequestView, "attempt")
_set_failed_on = _setter(RequestView, "failed_on")
_set_holder = _setter(RequestView, "_holder")
_set_prefill_holder = _setter(RequestView, "_prefill_holder")


class ClusterView:
    """What a policy may see: workers that are starting (of decisions), up or draining, and open requests."""

    __slots__ = (
        "_asked",
        "_live",
        "_live_by_role",
        "_picky",
        "_requests",
        "_serving",
        "_starting",
        "_workers",
        "requests",
        "starting",
        "workers",
    )

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerView] = {}
        self._requests: dict[RequestId, RequestView] = {}
        self._starting: dict[WorkerId, WorkerStarting] = {}
        self._asked: dict[tuple[int, Role], int] = {}  # workers ordered by a decision, and nobody has said who
        self._live: tuple[WorkerView, ...] | None = ()
        self._live_by_role: dict[Role, tuple[WorkerView, ...]] = {}
        self._serving: dict[tuple[Role | None, str], tuple[WorkerView, ...]] = {}
        self._picky = False  # whether some live worker does not serve every adapter
        self.workers: Mapping[WorkerId, WorkerView] = MappingProxyType(self._workers)
        self.requests: Mapping[RequestId, RequestView] = MappingProxyType(self._requests)
        self.starting: Mapping[WorkerId, WorkerStarting] = MappingProxyType(self._starting)

    def pending(self, role: Role) -> int:
        """Workers of a role that decisions have asked for and that are not up: ordered, or starting."""
        asked = sum(count for (_, kind), count in self._asked.items() if kind is role)
        return asked + sum(1 for start in self._starting.values() if start.role is role)

    @property
    def live(self) -> tuple[WorkerView, ...]:
        """Workers that take new work, sorted by id."""
        live = self._live
        if live is None:
            live = tuple(w for _, w in sorted(self._workers.items()) if not w.draining and not w.fences)
            self._live = live
            self._live_by_role.clear()
            self._serving.clear()
            self._picky = any(w.up.loras is not None for w in live)
        return live

    def live_of(self, role: Role) -> tuple[WorkerView, ...]:
        """Workers of one role that take new work, sorted by id; the same tuple until the workers change."""
        live = self.live
        found = self._live_by_role.get(role)
        if found is None:
            found = self._live_by_role[role] = tuple(w for w in live if w.up.role is role)
        return found

    def live_for(self, lora: str | None, role: Role | None = None) -> tuple[WorkerView, ...]:
        """Workers (of one role) that take new work and serve an adapter (None or "": no adapter), sorted by id; the
        same tuple until the workers change."""
        live = self.live if role is None else self.live_of(role)
        if not lora or not self._picky:
            return live
        found = self._serving.get((role, lora))
        if found is None:
            found = tuple(w for w in live if w.up.serves(lora))
            if found:  # what nobody serves may be any text, and is not kept
                self._serving[role, lora] = found
        return found


class Cluster(ClusterView):
    """The view plus the right to change it; the controller alone holds one."""

    __slots__ = ()

    def fold(self, event: Event) -> None:
        """Take in one event. Raises InvariantError, with the request's story, for what must not happen."""
        if type(event) is RequestArrived:
            if event.request_id in self._requests:
                raise InvariantError(f"{event!r}: a request of that id is open; ids must be unique")
            self._requests[event.request_id] = RequestView(event)
        elif isinstance(event, RequestEvent):
            self._fold_request(event)
        elif isinstance(event, (BlocksStored, BlocksRemoved)):
            pass  # the most frequent of all; who wants to know of caches keeps an index
        elif isinstance(event, WorkerReported):
            worker = self._workers.get(event.worker_id)
            if worker is not None:  # a late report of a worker that has gone is only late
                _set_report(worker, event)
        elif isinstance(event, WorkerUp):
            self._starting.pop(event.worker_id, None)
            self._workers[event.worker_id] = WorkerView(event)
            self._live = None
        elif isinstance(event, WorkerStarting):
            self._begin_start(event)
        elif isinstance(event, (WorkerStartFailed, WorkerStartCancelled)):
            if self._starting.pop(event.worker_id, None) is None:
                raise InvariantError(f"{event!r}: no such start; it ended before, or nobody asked for it")
        elif isinstance(event, WorkerDraining):
            worker = self._workers.get(event.worker_id)
            if worker is None:
                raise InvariantError(f"{event!r}: no such worker; it was lost before, or never came up")
            _set_draining(worker, True)
            self._live = None
        elif isinstance(event, WorkerRecalled):
            worker = self._workers.get(event.worker_id)
            if worker is None:
                raise InvariantError(f"{event!r}: no such worker; it was lost before, or never came up")
            _set_draining(worker, False)
            self._live = None
        elif isinstance(event, (WorkerFenced, WorkerUnfenced)):
            worker = self._workers.get(event.worker_id)
            if worker is not None:  # lost meanwhile
                alone = frozenset((event.cause,))
                fenced = isinstance(event, WorkerFenced)
                _set_fences(worker, worker.fences | alone if fenced else worker.fences - alone)
                self._live = None
        elif isinstance(event, WorkerLost):
            self._workers.pop(event.worker_id, None)
            self._live = None

        elif isinstance(event, ScaleFailed):  # whoever has not begun to start will not
            for key in [key for key in self._asked if key[0] == event.decision_id]:
                del self._asked[key]

    def _begin_start(self, event: WorkerStarting) -> None:
        asked = self._asked.get((event.decision_id, event.role), 0)
        if not asked:
            raise InvariantError(f"{event!r}: decision {event.decision_id} has no such worker open; it asked for fewer")
        if asked == 1:
            del self._asked[event.decision_id, event.role]
        else:
            self._asked[event.decision_id, event.role] = asked - 1
        self._starting[event.worker_id] = event

    def apply(self, action: Action) -> None:
        """Take in one order of ours."""
        if isinstance(action, Dispatch):
            request = self._requests.get(action.request_id)
            if request is None:
                raise InvariantError(f"{action!r}: no such open request")
            worker = self._workers.get(action.worker_id)
            if worker is None or worker.draining or worker.fences:
                state = "not there" if worker is None else "draining" if worker.draining else "fenced"
                raise InvariantError(f"{action!r}: worker {action.worker_id} is {state}")
            lora = request.arrived.lora
            if lora and not worker.up.serves(lora):
                raise InvariantError(f"{action!r}: worker {action.worker_id} does not serve adapter {lora!r}")
            after = TRANSITIONS[request.state].get(Dispatch)
            if after is None:
                raise _impossible(request, action)
            _set_state(request, after)
            if action.leg is Leg.PREFILL:
                _set_prefill_worker(request, action.worker_id)
                _set_prefill_holder(request, worker)
            else:
                _set_worker(request, action.worker_id)
                _set_holder(request, worker)
            _set_in_flight(worker, worker.in_flight + 1)
        elif isinstance(action, Enqueue):
            request = self._requests.get(action.request_id)
            if request is None:
                raise InvariantError(f"{action!r}: no such open request")
            after = TRANSITIONS[request.state].get(Enqueue)
            if after is None:
                raise _impossible(request, action)
            _set_state(request, after)
        elif isinstance(action, AddWorker) and action.decision_id is not None:
            if action.role is None:
                raise InvariantError(f"{action!r}: a worker of a decision has a role")
            key = (action.decision_id, action.role)
            self._asked[key] = self._asked.get(key, 0) + 1

    def _fold_request(self, event: RequestEvent) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            raise InvariantError(f"{event!r}: no such open request; it ended before, or never arrived")
        kind = type(event)
        after = TRANSITIONS[request.state].get(kind)
        if after is None:
            raise _impossible(request, event)
        _set_state(request, after)
        if kind in ENDS:
            del self._requests[event.request_id]
            holder = request._holder
            if holder is not None:
                _set_in_flight(holder, holder.in_flight - 1)
            if request._prefill_holder is not None:
                self._prefill_over(request)
        elif kind is PrefillDone:
            self._prefill_over(request)
        elif kind is RequestInterrupted:
            self._interrupt(request, event)  # type: ignore[arg-type]
        elif kind is RequestMigrated:
            assert isinstance(event, RequestMigrated)
            _set_attempt(request, event.attempt)
            _set_arrived(request, event)

    def _interrupt(self, request: RequestView, event: RequestInterrupted) -> None:
        """Nobody has the request any more, or its prefill worker alone; who had it is remembered."""
        holders = [request._holder, request._prefill_holder] if event.kept_on is None else [request._holder]
        for holder in holders:
            if holder is not None:
                _set_in_flight(holder, holder.in_flight - 1)
                if holder.worker_id == event.worker_id:
                    _set_failed_on(request, (*request.failed_on, (event.worker_id, holder.up.epoch)))
        _set_worker(request, None)
        _set_holder(request, None)
        if event.kept_on is None:
            _set_prefill_worker(request, None)
            _set_prefill_holder(request, None)

    @staticmethod
    def _prefill_over(request: RequestView) -> None:
        holder = request._prefill_holder
        if holder is not None:
            _set_in_flight(holder, holder.in_flight - 1)
            _set_prefill_holder(request, None)


def _impossible(request: RequestView, cause: Event | Action) -> InvariantError:
    """What may not follow the state that a request is in."""
    return InvariantError(
        f"{cause!r} cannot follow state {request.state.value!r} of request "
        f"{request.arrived.request_id!r} (arrived {request.arrived.at_s} s, worker {request.worker_id})"
    )
