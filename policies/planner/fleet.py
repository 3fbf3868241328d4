"""Workers of the planned roles, by state: what the view shows, less what has been ordered and not happened yet.

Orders take time: between a `DrainWorker` and `WorkerDraining` the view still shows a worker that takes work, and it
must not be ordered away twice. It must never count a worker in two states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.events import Event, WorkerDraining, WorkerLost, WorkerRecalled, WorkerStarting, WorkerUp
from policies.cluster.ids import Role, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.frozen import frozen
from policies.planner.settings import PoolSettings
from policies.planner.who_goes import to_cancel, to_drain, to_recall


@frozen
class Count:
    """Workers of one role that take work, that are on their way up, and out; how many of those can be called back."""

    ready: int
    pending: int
    draining: int
    recallable: int

    @property
    def current(self) -> int:
        return self.ready + self.pending


class Fleet:
    """Our own orders about workers that are not carried out yet, and who came or went without one."""

    def __init__(self) -> None:
        self._drained: set[WorkerId] = set()  # by us; until it is gone or stays
        self._recalled: set[WorkerId] = set()
        self._cancelled: set[WorkerId] = set()
        self._started: dict[WorkerId, Role] = {}  # by us, seen starting
        self.strangers: dict[Role, int] = {}
        """Workers of a role that came, drained or went without an order of ours, since the last look."""

    def hear(self, event: Event, view: ClusterView) -> None:
        """Keep the books; to be called for every event about workers."""
        match event:
            case WorkerStarting():
                self._started[event.worker_id] = event.role
            case WorkerUp():
                if event.worker_id not in self._started:
                    self._strange(event.role)
                self._started.pop(event.worker_id, None)
                self._forget(event.worker_id)
            case WorkerDraining() if event.worker_id not in self._drained:
                worker = view.workers.get(event.worker_id)
                if worker is not None:
                    self._strange(worker.up.role)
            case WorkerRecalled():
                self._forget(event.worker_id)
            case WorkerLost():
                self._forget(event.worker_id)

    def count(self, view: ClusterView, role: Role) -> Count:
        ready, leaving = self._split(view, role)
        cancelled = sum(1 for one in self._cancelled if one in view.starting and view.starting[one].role is role)
        return Count(
            ready=len(ready),
            pending=view.pending(role) - cancelled,
            draining=len(leaving),
            recallable=len(self._recallable(leaving)),
        )

    def strangers_of(self, role: Role) -> int:
        """How many changes of a role were not ours since this was last asked."""
        return self.strangers.pop(role, 0)

    def orders(
        self,
        view: ClusterView,
        targets: Mapping[Role, tuple[int, str]],
        pools: Mapping[Role, PoolSettings],
        decision_id: int,
        drain_s: float,
    ) -> Iterator[Action]:
        """What makes the counts so: first what frees, then what takes. `targets`: workers and the reason, by role."""
        gaps = {role: self.count(view, role).current - n for role, (n, _) in targets.items()}
        for role, (_, reason) in targets.items():
            if gaps[role] > 0:
                yield from self._fewer(view, role, gaps[role], reason, decision_id, drain_s)
        for role, (_, reason) in targets.items():
            if gaps[role] < 0:
                yield from self._more(view, role, -gaps[role], reason, decision_id, pools[role].group)

    def cancel_all(self, view: ClusterView, role: Role, reason: str) -> Iterator[Action]:
        """Call off every start of a role."""
        for worker_id in sorted(s.worker_id for s in self._starts(view, role)):
            self._cancelled.add(worker_id)
            yield CancelStart(worker_id=worker_id, reason=reason)

    def _fewer(
        self, view: ClusterView, role: Role, n: int, reason: str, decision_id: int, drain_s: float
    ) -> Iterator[Action]:
        starts = to_cancel(self._starts(view, role), n)
        for worker_id in starts:
            self._cancelled.add(worker_id)
            yield CancelStart(worker_id=worker_id, reason=reason, decision_id=decision_id)
        ready, _ = self._split(view, role)
        for worker in to_drain(ready, n - len(starts)):
            self._drained.add(worker.worker_id)
            yield DrainWorker(worker_id=worker.worker_id, reason=reason, decision_id=decision_id, deadline_s=drain_s)

    def _more(
        self, view: ClusterView, role: Role, n: int, reason: str, decision_id: int, group: str
    ) -> Iterator[Action]:
        _, leaving = self._split(view, role)
        back = to_recall(self._recallable(leaving), n)
        for worker in back:
            self._recalled.add(worker.worker_id)
            yield RecallWorker(worker_id=worker.worker_id, reason=reason, decision_id=decision_id)
        for _ in range(n - len(back)):
            yield AddWorker(group=group, reason=reason, role=role, decision_id=decision_id)

    def _split(self, view: ClusterView, role: Role) -> tuple[list[WorkerView], list[WorkerView]]:
        """Workers of a role that take work, and that are on their way out."""
        ready: list[WorkerView] = []
        leaving: list[WorkerView] = []
        for worker in view.workers.values():
            if worker.up.role is role:
                goes = (worker.draining or worker.worker_id in self._drained) and worker.worker_id not in self._recalled
                (leaving if goes else ready).append(worker)
        return ready, leaving

    def _recallable(self, leaving: list[WorkerView]) -> list[WorkerView]:
        """Ours, and heard of as draining: an operator's drain is not undone."""
        return [worker for worker in leaving if worker.draining and worker.worker_id in self._drained]

    def _starts(self, view: ClusterView, role: Role) -> list[WorkerStarting]:
        return [s for s in view.starting.values() if s.role is role and s.worker_id not in self._cancelled]

    def _forget(self, worker_id: WorkerId) -> None:
        for book in (self._drained, self._recalled, self._cancelled):
            book.discard(worker_id)

    def start_ended(self, worker_id: WorkerId) -> Role | None:
        """A start failed or was called off: of which role."""
        self._forget(worker_id)
        return self._started.pop(worker_id, None)

    def _strange(self, role: Role) -> None:
        self.strangers[role] = self.strangers.get(role, 0) + 1
