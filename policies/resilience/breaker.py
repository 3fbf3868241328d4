"""A circuit breaker for each worker: one that fails what it is given is left alone for a while, then tried with one.

    closed -> open (fenced)  after failures in a row, or too large a share of the last requests
    open -> half open        after a while: the fence is lifted for one request
    half open -> closed      when that one is answered; -> open when it fails

What the client did wrong or gave up never counts, nor does an orderly shutdown. A breaker never ends a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from policies.cluster.actions import Action, Fence, SetTimer, Unfence
from policies.cluster.events import (
    ENDS,
    Event,
    FirstToken,
    RequestArrived,
    RequestEvent,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    TimerFired,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import FenceCause, LossCause, RequestId, WorkerId
from policies.cluster.state import ClusterView
from policies.errors import ConfigError
from policies.frozen import frozen

FAILURES = frozenset(LossCause) - {LossCause.SHUTDOWN, LossCause.OVERLOAD}
"""Causes that say something against a worker."""
_TIMER = "breaker "


class BreakerState(Enum):
    """Where a worker's breaker stands; `PROBING`: half open, and the one request is out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    PROBING = "probing"


@frozen
class BreakerSettings:
    """Opens after `failures` in a row, or when at least `share` of at least `requests` answers of the last `window_s`
    failed; stays open for `open_s`.
    """

    failures: int
    share: float
    requests: int
    window_s: float
    open_s: float

    def __post_init__(self) -> None:
        for key in ("failures", "requests"):
            if getattr(self, key) < 1:
                raise ConfigError(f"breaker_{key} is {getattr(self, key)}, it must be 1 or more")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"breaker_share is {self.share}, it must be more than 0 and at most 1")
        for key in ("window_s", "open_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"breaker_{key} is {getattr(self, key)}, it must be more than 0")


@dataclass(slots=True)
class _Circuit:
    """One worker: its state, failures in a row, and answers by second: [second, answered, failed]."""

    state: BreakerState = BreakerState.CLOSED
    in_a_row: int = 0
    seconds: deque[list[int]] = field(default_factory=deque)
    probe: RequestId | None = None
    opened_s: float = 0.0

    def note(self, at_s: float, failed: bool) -> None:
        second = int(at_s)
        if not self.seconds or self.seconds[-1][0] != second:
            self.seconds.append([second, 0, 0])
        self.seconds[-1][1] += 1
        self.seconds[-1][2] += failed

    def share(self, at_s: float, window_s: float) -> tuple[int, int]:
        """Answers and failures of the window; older ones are forgotten."""
        while self.seconds and self.seconds[0][0] <= at_s - window_s - 1:
            self.seconds.popleft()
        return sum(entry[1] for entry in self.seconds), sum(entry[2] for entry in self.seconds)


class Breaker:
    """One circuit for each worker that is up. It must stand behind the router in the controller: it looks at what an
    arrival was sent to.

    Counters: `breaker_opened`, `breaker_closed`, `breaker_probes`.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {RequestArrived, RequestMigrated, RequestInterrupted, FirstToken, TimerFired, WorkerUp, WorkerLost, *ENDS}
    )

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self._circuits: dict[WorkerId, _Circuit] = {}
        self._half_open = 0
        self._probes: dict[RequestId, WorkerId] = {}
        self._counts = {"breaker_opened": 0, "breaker_closed": 0, "breaker_probes": 0}

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return dict(self._counts)

    def state(self, worker_id: WorkerId) -> BreakerState:
        """Where the breaker of a worker stands; closed for one that is not known."""
        circuit = self._circuits.get(worker_id)
        return circuit.state if circuit is not None else BreakerState.CLOSED

    def retry_after_s(self, now_s: float) -> float | None:
        """When a client may try again where every worker is left alone: the time until the first is tried (None: none
        is left alone)."""
        left = [
            circuit.opened_s + self.settings.open_s - now_s
            for circuit in self._circuits.values()
            if circuit.state is BreakerState.OPEN
        ]
        return max(min(left), 0.0) if left else None

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        match event:
            case RequestArrived():
                return self._sent(event, view) if self._half_open else ()
            case FirstToken() | RequestFinished():
                return self._answered(event.request_id, event.worker_id, event.at_s, isinstance(event, RequestFinished))
            case RequestInterrupted():
                return self._interrupted(event)
            case TimerFired() if event.name.startswith(_TIMER):
                return self._try(WorkerId(int(event.name.removeprefix(_TIMER))))
            case WorkerUp():
                self._forget(event.worker_id)
                self._circuits[event.worker_id] = _Circuit()
            case WorkerLost():
                self._forget(event.worker_id)
            case RequestEvent():
                return self._gave_up(event.request_id)
        return ()

    # ------------------------------------------------------------ closed

    def _answered(self, request_id: RequestId, worker_id: WorkerId, at_s: float, whole: bool) -> Sequence[Action]:
        circuit = self._circuits.get(worker_id)
        if circuit is None:
            return ()
        circuit.in_a_row = 0
        if whole:
            circuit.note(at_s, failed=False)
        if circuit.state is not BreakerState.PROBING or circuit.probe != request_id:
            return ()
        self._probe_over(circuit)
        circuit.state = BreakerState.CLOSED
        circuit.seconds.clear()
        self._counts["breaker_closed"] += 1
        return (Unfence(worker_id=worker_id, cause=FenceCause.BREAKER, reason="the one request was answered"),)

    def _interrupted(self, event: RequestInterrupted) -> Sequence[Action]:
        circuit = self._circuits.get(event.worker_id)
        if event.cause not in FAILURES or circuit is None:
            return self._gave_up(event.request_id)
        circuit.in_a_row += 1
        circuit.note(event.at_s, failed=True)
        if circuit.state is BreakerState.PROBING and circuit.probe == event.request_id:
            self._probe_over(circuit)
            return (self._open(event.worker_id, circuit, event.at_s),)  # the fence of its probe stands
        if circuit.state is not BreakerState.CLOSED:
            return ()
        why = self._why_open(circuit, event.at_s)
        if why is None:
            return ()
        fence = Fence(worker_id=event.worker_id, cause=FenceCause.BREAKER, reason=why)
        return (fence, self._open(event.worker_id, circuit, event.at_s))

    def _why_open(self, circuit: _Circuit, at_s: float) -> str | None:
        settings = self.settings
        if circuit.in_a_row >= settings.failures:
            return f"{circuit.in_a_row} failures in a row"
        answers, failed = circuit.share(at_s, settings.window_s)
        if answers >= settings.requests and failed >= settings.share * answers:
            return f"{failed} of {answers} failed in {settings.window_s:g} s"
        return None

    # ------------------------------------------------------------ open, half open

    def _open(self, worker_id: WorkerId, circuit: _Circuit, at_s: float) -> SetTimer:
        circuit.state, circuit.opened_s = BreakerState.OPEN, at_s
        self._counts["breaker_opened"] += 1
        due_s = at_s + self.settings.open_s
        return SetTimer(name=f"{_TIMER}{worker_id}", due_s=due_s, background=True, reason="left alone until then")

    def _try(self, worker_id: WorkerId) -> Sequence[Action]:
        circuit = self._circuits.get(worker_id)
        if circuit is None or circuit.state is not BreakerState.OPEN:
            return ()
        return self._offer(worker_id, circuit)

    def _offer(self, worker_id: WorkerId, circuit: _Circuit) -> Sequence[Action]:
        """The next request that is sent there decides."""
        circuit.state = BreakerState.HALF_OPEN
        self._half_open += 1
        return (Unfence(worker_id=worker_id, cause=FenceCause.BREAKER, reason="one request may try it"),)

    def _sent(self, event: RequestArrived, view: ClusterView) -> Sequence[Action]:
        """Where an arrival went: to a worker that is half open, it is the one request."""
        request = view.requests.get(event.request_id)
        if request is None:
            return ()
        for worker_id in (request.prefill_worker_id, request.worker_id):
            circuit = self._circuits.get(worker_id) if worker_id is not None else None
            if worker_id is not None and circuit is not None and circuit.state is BreakerState.HALF_OPEN:
                self._half_open -= 1
                circuit.state, circuit.probe = BreakerState.PROBING, event.request_id
                self._probes[event.request_id] = worker_id
                self._counts["breaker_probes"] += 1
                return (Fence(worker_id=worker_id, cause=FenceCause.BREAKER, reason="one request tries it"),)
        return ()

    def _gave_up(self, request_id: RequestId) -> Sequence[Action]:
        """A request ended without saying anything of its worker: another one may try it."""
        worker_id = self._probes.get(request_id)
        circuit = self._circuits.get(worker_id) if worker_id is not None else None
        if worker_id is None or circuit is None:
            return ()
        self._probe_over(circuit)
        return self._offer(worker_id, circuit)

    def _probe_over(self, circuit: _Circuit) -> None:
        if circuit.probe is not None:
            self._probes.pop(circuit.probe, None)
            circuit.probe = None

    def _forget(self, worker_id: WorkerId) -> None:
        circuit = self._circuits.pop(worker_id, None)
        if circuit is not None:
            self._half_open -= circuit.state is BreakerState.HALF_OPEN
            self._probe_over(circuit)
