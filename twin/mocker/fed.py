"""A simulated world that is told, as it goes on, what happens outside it: arrivals, clients that leave, workers.

Nobody knows yet what comes next, so it runs up to an instant and waits there to be told more. What it is told must not
lie before that instant. Told the rows of a trace, it does to the last bit what `MockWorld` does with that trace.
"""

from __future__ import annotations

from policies.cluster.events import Event
from policies.cluster.ids import RequestId, WorkerId
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.demand import Row
from twin.mocker.world import MockWorld
from twin.worker_spec import WorkerSpec

_FAULT, _READY, _COMMAND, _ARRIVAL = map(int, (Order.FAULT, Order.WORKER_READY, Order.COMMAND, Order.ARRIVAL))


class FedWorld(MockWorld):
    """As `MockWorld`, of an empty demand. The workers that it is made with are those that may come: none is there until
    `join` says so. `advance` as far as everything is known, `run` when nothing more comes.
    """

    __slots__ = ()

    def _expect(self, spec: WorkerSpec) -> None:
        """It is there when somebody says so."""

    def open_to_news(self) -> None:
        """More is going to be told; until then, that nothing is on the clock means nothing."""
        self.clock.coming = True

    def _begin(self) -> None:
        """Nothing more is told: what has begun goes to its end."""
        self.clock.coming = False

    def advance(self, before_s: float) -> None:
        """Let everything happen that happens before `before_s`."""
        self.clock.run_before(before_s)

    # ------------------------------------------------------------ what it is told

    def arrive(self, row: Row, worker_hint: WorkerId | None = None) -> None:
        """A request arrives at `row.arrival_s`; `worker_hint`: it asks for that worker."""
        assert row.arrival_s is not None
        if worker_hint is not None:
            self.churn.pins[row.row] = worker_hint
        self._demand.keyed |= row.keys is not None
        self.call(instant(row.arrival_s), _ARRIVAL, lambda: self._arrive(row))

    def leave(self, request_id: RequestId, at_s: float) -> None:
        """A client gives up; a request that has ended by then has ended."""
        self.call(at_s, _FAULT, lambda: self._leave(request_id))

    def _leave(self, request_id: RequestId) -> None:
        self.churn.cancel(request_id)

    def join(self, spec: WorkerSpec, at_s: float) -> None:
        """A worker is ready, new or (again) under the id of one that was there."""
        self.call(at_s, _READY, lambda: self._join(spec))

    def _join(self, spec: WorkerSpec) -> None:
        known = self.workers.get(spec.worker_id)
        if known is not None and not known.down:
            self.churn.lose(spec.worker_id, "came back under a new epoch")
        self.specs[spec.worker_id] = spec
        self.start_worker(spec, 0 if known is None else known.up.epoch + 1)

    def lose(self, worker_id: WorkerId, reason: str, at_s: float) -> None:
        """A worker is gone with all that it had."""
        self.call(at_s, _FAULT, lambda: self._lose(worker_id, reason))

    def _lose(self, worker_id: WorkerId, reason: str) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and not worker.down:
            self.churn.lose(worker_id, reason)

    def drain(self, worker_id: WorkerId, at_s: float) -> None:
        """A worker takes nothing new, and leaves when it has nothing left."""
        self.call(at_s, _FAULT, lambda: self._drain(worker_id))

    def _drain(self, worker_id: WorkerId) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and not worker.down and worker_id not in self.churn.draining:
            self.churn.drain(worker_id)

    def recall(self, worker_id: WorkerId, at_s: float) -> None:
        """A worker that drains stays, if it is still there."""
        self.call(at_s, _FAULT, lambda: self._recall(worker_id))

    def _recall(self, worker_id: WorkerId) -> None:
        self.churn.recall(worker_id)

    def happen(self, event: Event) -> None:
        """Something that policies want to know, at its own instant."""
        self.call(event.at_s, _COMMAND, lambda: self.post(event))
