"""Faults of workers: gone and back, hanging, slow, draining, failing what they are given.

Each acts on one worker at the world's present instant. Whom it hits is decided before; what becomes of the requests
there is the policies' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from policies.cluster.ids import LossCause
from policies.resilience.drain import DrainRules
from twin.engine.ticks import instant
from twin.mocker.faults import store
from twin.mocker.faults.stage import Entry, Stage, name_of
from twin.mocker.worker import MockWorker
from twin.perf.slowed import Slowed
from twin.scenario.model import Fault, Occurrence

if TYPE_CHECKING:
    from twin.mocker.requests import OpenRequest

OnWorker = Callable[[Stage, Fault, Occurrence, Entry, MockWorker], None]


def down(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """A worker dies with all that it has; one on its way up does not get there."""
    world = stage.world
    stage.expect(occurrence, worker, world.specs[worker.worker_id].startup_s)
    if worker.worker_id in world.starts:
        world.starts.break_off(worker.worker_id)
    else:
        by_lease = fault.detection_delay_s is None and fault.detect == "lease"
        delay_s = None if by_lease else stage.delay_s(fault)
        world.churn.lose(worker.worker_id, "disconnected", delay_s, entry.loss)
        if by_lease:
            store.when_lease_ends(stage, worker, lambda: world.churn.detect(worker, "its lease ended"))
    if occurrence.until_s is not None:
        stage.call(occurrence.until_s, lambda: start(stage, entry, worker))


def start(stage: Stage, entry: Entry, worker: MockWorker) -> None:
    """A worker that is down starts again, and is there when that is over."""
    world, worker_id = stage.world, worker.worker_id
    spec = world.specs[worker_id]

    def back() -> None:
        entry.over_s = stage.now_s
        world.churn.restore(worker_id)

    if world.workers[worker_id] is worker and worker.down and worker_id not in world.starts:
        world.starts.begin(worker_id, spec.startup_s, back)
    else:
        entry.over_s = stage.now_s  # somebody else has seen to it


def up(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """A worker that is down starts now."""
    world = stage.world
    spec = world.specs[worker.worker_id]
    if spec.startup_s or spec.weights is not None or world.starts.is_hindered:
        world.churn.expect(worker.worker_id, instant(stage.now_s + spec.startup_s))
        start(stage, entry, worker)
    else:
        entry.over_s = stage.now_s
        world.churn.restore(worker.worker_id)


def hang(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """It stops where it is; who waits too long for an answer takes it for lost, and it comes back empty."""
    world, churn = stage.world, stage.world.churn
    delay_s = fault.detection_delay_s if fault.detection_delay_s is not None else stage.detection.inactivity_s
    churn.hang(worker)

    def give_up() -> None:
        if worker.hung and not worker.down:
            why = f"no answer for {delay_s:g} s"
            churn.lose(worker.worker_id, why, 0.0, entry.loss, LossCause.RESPONSE_TIMEOUT)

    def over() -> None:
        if worker.down:
            if world.workers[worker.worker_id] is worker:
                churn.restore(worker.worker_id)
        elif worker.hung:
            worker.resume()

    stage.call(stage.now_s + delay_s, give_up)
    stage.expect(occurrence, worker)
    stage.until(occurrence, entry, over)


def slow(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """Its steps take longer."""
    world = stage.world
    usual = world.specs[worker.worker_id].latency
    world.churn.pace(worker, Slowed(usual, fault.factor))
    stage.until(occurrence, entry, lambda: None if worker.down else world.churn.pace(worker, usual))


def drain(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """It leaves in three phases, and comes back at its time or when it has left, whichever is later."""
    churn = stage.world.churn
    usual = churn.rules or DrainRules(grace_s=0.0, timeout_s=None)
    stage.expect(occurrence, worker, stage.world.specs[worker.worker_id].startup_s)
    rules = DrainRules(
        grace_s=usual.grace_s if fault.grace_s is None else fault.grace_s,
        timeout_s=usual.timeout_s if fault.timeout_s is None else fault.timeout_s,
    )
    churn.drain(worker.worker_id, rules, entry.loss, fault.known_after_s)

    def begin() -> None:
        if worker.down:
            start(stage, entry, worker)
        else:
            churn.when_gone[worker.worker_id] = begin

    if occurrence.until_s is not None:
        stage.call(occurrence.until_s, begin)


def undrain(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """It stays."""
    stage.world.churn.recall(worker.worker_id)
    entry.over_s = stage.now_s


def errors(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """A worker fails a share of what reaches it; draws belong to the request and its attempt."""
    failing, name = stage.world.churn.failing, name_of(fault, occurrence)
    rate = 1.0 if fault.rate is None else fault.rate
    worker_id = worker.worker_id

    def fails(request: OpenRequest) -> bool:
        return stage.u(f"engine_error {name}", request.request_id, request.migrations) < rate

    failing.setdefault(worker_id, {})[name] = fails

    def over() -> None:
        failing[worker_id].pop(name, None)
        if not failing[worker_id]:
            del failing[worker_id]

    stage.until(occurrence, entry, over)


ON_WORKER: Mapping[str, OnWorker] = {
    "worker_down": down,
    "worker_up": up,
    "worker_hang": hang,
    "worker_slow": slow,
    "drain": drain,
    "undrain": undrain,
    "engine_error": errors,
}


def can(stage: Stage, fault: Fault, worker: MockWorker) -> bool:
    """Whether a fault can happen to a worker now."""
    kind, churn, worker_id = fault.kind, stage.world.churn, worker.worker_id
    starts, by_name = worker_id in stage.world.starts, fault.worker == stage.names[worker_id]
    if kind == "worker_up":
        return worker.down and not starts
    if kind == "worker_down" and starts:
        return by_name  # on its way up: only if it is meant
    if kind == "undrain":
        return worker_id in churn.draining and not worker.down
    if kind == "drain" and worker_id in churn.draining:
        return by_name  # a second signal is meant for one
    busy = worker.hung or stage.world.partitions.is_cut_off(worker_id) or worker_id in churn.draining
    busy = busy or worker.fenced
    if kind in ("drain", "worker_hang", "partition", "clock_skew") and busy:
        return False
    return not worker.down
