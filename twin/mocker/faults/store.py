"""The store of leases, and what it does not say while it is down: nobody is removed by lease then, nobody is added.

A lease of a worker that is not heard of ends by `policies.resilience.discovery`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.engine.ticks import instant
from twin.mocker.faults.stage import Entry, Stage
from twin.mocker.worker import MockWorker
from twin.scenario.model import Fault, Occurrence


def when_lease_ends(stage: Stage, worker: MockWorker, then: Callable[[], None]) -> None:
    """A worker is not heard of from now on: something happens when its lease ends, which it does not while the store of
    leases is down."""
    leases, world, worker_id = stage.leases, stage.world, worker.worker_id
    leases.beat(worker_id, stage.now_s)

    def judge() -> None:
        if world.workers[worker_id] is not worker or worker.fenced:
            return  # somebody else is there, or it is known already
        ends_s = leases.ends_s(worker_id)
        if ends_s is None:
            assert world.churn.outage is not None
            world.churn.outage.append(judge)
        elif instant(ends_s) > stage.now_s:
            stage.call(ends_s, judge)
        else:
            then()

    judge()


def down(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """The store is down: nobody is removed, and nobody is added."""
    if stage.world.churn.outage is not None:
        return "the store is down already"
    _goes_down(stage)
    stage.until(occurrence, entry, lambda: _comes_back(stage))
    return None


def _goes_down(stage: Stage) -> None:
    stage.world.churn.outage = []
    stage.leases.store_down()


def _comes_back(stage: Stage) -> None:
    churn = stage.world.churn
    waiting, churn.outage = churn.outage or [], None
    stage.leases.store_up(stage.now_s)
    for what in waiting:
        what()
