"""The part of the invariants that watches decisions about worker counts, and questions to the twin.

Its own small account, beside that of requests; it must never change what it watches.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.events import (
    Event,
    WorkerLost,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role, WorkerId
from policies.cluster.scaling import ScaleDone, ScaleEvent, ScaleFailed
from policies.cluster.twin_asks import AskTwin, TwinAnswered

Complain = Callable[[str], Exception]


class ScalingAccount:
    """What decisions have asked for and what became of it. `complain` makes the error of a broken promise."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._asked: dict[tuple[int, Role], int] = {}
        self._starting: set[WorkerId] = set()
        self._cancels: set[WorkerId] = set()
        self._decisions: set[int] = set()
        self._over: set[int] = set()
        self._questions: set[int] = set()

    @property
    def open_cancels(self) -> list[WorkerId]:
        return sorted(self._cancels)

    def on_event(self, event: Event) -> None:
        match event:
            case WorkerStarting():
                key = (event.decision_id, event.role)
                if not self._asked.get(key):
                    raise self._complain(f"{event!r}, and its decision asked for fewer workers")
                if event.worker_id in self._starting:
                    raise self._complain(f"{event!r}, which is starting already")
                self._asked[key] -= 1
                self._starting.add(event.worker_id)
            case WorkerUp():
                self._end_start(event.worker_id)
            case WorkerStartFailed() | WorkerStartCancelled():
                if event.worker_id not in self._starting:
                    raise self._complain(f"{event!r}, which is not starting")
                self._end_start(event.worker_id)
            case WorkerLost() if event.worker_id in self._starting:
                raise self._complain(f"{event!r}, which was only starting: its start fails, it is not lost")
            case ScaleEvent():
                self._on_scale(event)
            case TwinAnswered():
                if event.query_id not in self._questions:
                    raise self._complain(f"{event!r}, and nobody asked, or it was answered before")
                self._questions.remove(event.query_id)

    def on_action(self, action: Action) -> None:
        match action:
            case AddWorker() if action.decision_id is not None and action.role is not None:
                key = (action.decision_id, action.role)
                self._asked[key] = self._asked.get(key, 0) + 1
            case CancelStart():
                if action.worker_id not in self._starting or action.worker_id in self._cancels:
                    raise self._complain(f"{action!r}, which is not starting, or is called off already")
                self._cancels.add(action.worker_id)
            case AskTwin():
                if action.query_id in self._questions:
                    raise self._complain(f"question {action.query_id} to the twin, which is open already")
                self._questions.add(action.query_id)
        if isinstance(action, AddWorker | CancelStart | DrainWorker | RecallWorker) and action.decision_id is not None:
            if action.decision_id in self._over:
                raise self._complain(f"{action!r}, and its decision has ended")
            self._decisions.add(action.decision_id)

    def _end_start(self, worker_id: WorkerId) -> None:
        self._starting.discard(worker_id)
        self._cancels.discard(worker_id)

    def _on_scale(self, event: ScaleEvent) -> None:
        if event.decision_id not in self._decisions:
            raise self._complain(f"{event!r}, and there is no such decision open")
        if isinstance(event, ScaleDone | ScaleFailed):
            self._decisions.remove(event.decision_id)
            self._over.add(event.decision_id)
        if isinstance(event, ScaleFailed):
            self._asked = {key: n for key, n in self._asked.items() if key[0] != event.decision_id}
