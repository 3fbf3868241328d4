"""Starts of workers that take longer, or fail when they are all but over and begin again.

They concern every start of the workers that are meant that begins (slow) or would be over (fail) while a fault lasts.
Who tries again waits as `policies.resilience.backoff` says; nobody tries once nothing else is left to happen.
"""

from __future__ import annotations

from policies.cluster.ids import WorkerId
from policies.resilience.backoff import Backoff
from twin.engine.ticks import instant
from twin.mocker.faults.stage import Entry, Stage, name_of, whom
from twin.mocker.starts import Start
from twin.scenario.model import Fault, Occurrence


class _Hindered:
    """One fault of starts while it lasts; it has happened when a start was subject to it."""

    def __init__(self, stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> None:
        self._stage = stage
        self._fault = fault
        self._name = name_of(fault, occurrence)
        self._entry = entry
        self._asked: dict[WorkerId, int] = {}
        self._in_a_row: dict[WorkerId, int] = {}
        self._backoff = Backoff(seed=stage.seed)

    def extra_s(self, worker_id: WorkerId) -> float:
        if self._fault.kind != "start_slow" or not self._is_meant(worker_id):
            return 0.0
        self._stage.world.churn.expect(worker_id, instant(self._due_s(worker_id) + self._fault.extra_s))
        return self._fault.extra_s

    def fails(self, worker_id: WorkerId) -> bool:
        if self._fault.kind != "start_fail" or not self._is_meant(worker_id):
            return False
        n = self._asked[worker_id] = self._asked.get(worker_id, 0) + 1
        rate = 1.0 if self._fault.rate is None else self._fault.rate
        failed = self._stage.u(f"start_fail {self._name}", str(worker_id), n) < rate
        self._in_a_row[worker_id] = self._in_a_row.get(worker_id, 0) + 1 if failed else 0
        return failed

    def after_failure(self, start: Start) -> None:
        """It begins again after a while, unless nothing else is left to happen."""
        stage, worker_id = self._stage, start.worker_id
        if stage.is_quiet:
            return
        wait_s = self._backoff.wait_s(f"start {worker_id}", self._in_a_row[worker_id])
        spec = stage.world.specs[worker_id]
        stage.world.churn.expect(worker_id, instant(stage.now_s + wait_s + spec.startup_s))

        def again() -> None:
            worker = stage.world.workers[worker_id]
            if worker.down and worker_id not in stage.world.starts:
                stage.world.starts.begin(worker_id, spec.startup_s, start.on_up)

        stage.call(stage.now_s + wait_s, again)

    def _is_meant(self, worker_id: WorkerId) -> bool:
        meant = self._stage.is_meant(self._fault, self._stage.world.specs[worker_id])
        if meant:
            self._entry.why_not, self._entry.target = None, self._stage.world.specs[worker_id].name
        return meant

    def _due_s(self, worker_id: WorkerId) -> float:
        return max(self._stage.world.churn.due_s.get(worker_id, 0.0), self._stage.now_s)


def hinder(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """From now on, and until it is over."""
    hindered, starts = _Hindered(stage, fault, occurrence, entry), stage.world.starts
    starts.hinder(hindered)
    stage.until(occurrence, entry, lambda: starts.unhinder(hindered))
    return f"none of {whom(fault)} started while it lasted"
