"""The store of leases, and what it does not say while it is down: nobody is removed by lease then, nobody is added.

A lease of a worker that is not heard of ends by `policies.resilience.discovery`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.engine.ticks import instant
from twin.mocker.faults.stage import Entry, Stage, name_of
from twin.mocker.worker import MockWorker
from twin.scenario.model import Fault, Occurrence


def when_lease_ends(stage: Stage, worker: MockWorker, then: Callable[[], None]) -> None:
    """A worker is not heard of from now on: something happens when its lease ends, which it does not while the store of
    leases is down."""
    leases, world, worker_id = stage.leases, stage.world, worker.worker_id
    upset = world.churn.upsets.get(worker_id)
    leases.beat(worker_id, stage.now_s + (upset.skew_s if upset is not None else 0.0))  # by its own clock

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


def flap(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """The store is down and up again by turns, each for a while; at the end it is up."""
    if stage.world.churn.outage is not None:
        return "the store is down already"
    assert occurrence.until_s is not None
    until_s = occurrence.until_s

    def turn(at_s: float) -> None:
        if stage.world.churn.outage is None:
            _goes_down(stage)
        else:
            _comes_back(stage)
        if at_s + fault.delay_s < until_s:
            stage.call(at_s + fault.delay_s, lambda: turn(at_s + fault.delay_s))

    turn(stage.now_s)
    stage.until(occurrence, entry, lambda: _comes_back(stage) if stage.world.churn.outage is not None else None)
    return None


def skew(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """A worker's clock is not the cluster's: it stamps heart-beats and reports by its own. Where it is so far behind
    that its heart-beats look older than a lease, it is taken for lost, and registers anew when that is over."""
    world, name = stage.world, name_of(fault, occurrence)
    upset = world.churn.upset(worker.worker_id)
    upset.skews_s[name] = fault.delay_s

    def take_for_lost() -> None:
        if name in upset.skews_s and not worker.down:
            world.churn.take_for_lost(worker, "its heart-beats are older than a lease", entry.loss)

    def over() -> None:
        upset.over(name)
        lives = world.workers[worker.worker_id] is worker and not worker.down
        if lives and worker.fenced and upset.skew_s > -stage.detection.lease_s:
            world.partitions.rejoin(worker)

    if upset.skew_s <= -stage.detection.lease_s and not worker.fenced:
        when_lease_ends(stage, worker, take_for_lost)
    stage.expect(occurrence, worker)
    stage.until(occurrence, entry, over)


def _goes_down(stage: Stage) -> None:
    stage.world.churn.outage = []
    stage.leases.store_down()


def _comes_back(stage: Stage) -> None:
    churn = stage.world.churn
    waiting, churn.outage = churn.outage or [], None
    stage.leases.store_up(stage.now_s)
    for what in waiting:
        what()
