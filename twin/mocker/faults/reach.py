"""Partitions: one worker that nobody reaches, or two sets of workers that do not reach each other.

Whoever is cut off works on; what then was late, or never, is `twin.mocker.partitions`.
"""

from __future__ import annotations

from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from twin.mocker.faults import store
from twin.mocker.faults.stage import Entry, Stage, name_of
from twin.mocker.worker import MockWorker
from twin.scenario.model import Fault, Occurrence


def cut_off(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
    """Nothing reaches a worker and nothing comes from it; who does not hear of it takes it for lost."""
    world, name = stage.world, name_of(fault, occurrence)
    delay_s, since_s = stage.delay_s(fault), stage.now_s
    world.partitions.cut_off(name, worker)

    def give_up() -> None:
        if name in world.wires.parts and not worker.down:
            silent_s = stage.now_s - since_s
            world.churn.take_for_lost(worker, f"cut off, and not heard of for {silent_s:g} s", entry.loss)

    if fault.detection_delay_s is None and fault.detect == "lease":
        store.when_lease_ends(stage, worker, give_up)
    elif delay_s is not None:
        stage.call(stage.now_s + delay_s, give_up)
    stage.expect(occurrence, worker)
    stage.until_steps_end(occurrence, entry, lambda: world.partitions.reconnect(name, worker.worker_id))


def part(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """Two sets of workers do not reach each other for a while."""
    partitions, name = stage.world.partitions, name_of(fault, occurrence)
    some, rest = two_sets(stage, fault)
    entry.target = two_sides(fault)
    partitions.part(name, some, rest)
    stage.until_steps_end(occurrence, entry, lambda: partitions.join(name))
    return None


def two_sets(stage: Stage, fault: Fault) -> tuple[frozenset[WorkerId], frozenset[WorkerId]]:
    """The two sets of workers of a partition between workers. Raises ConfigError where there are none."""
    assert fault.between is not None
    reads = any(spec.tiers is not None and spec.tiers.peers is not None for spec in stage.world.specs.values())
    if stage.world.handoffs is None and not reads:
        raise ConfigError(
            f"{fault.where}: between has no effect: no worker of this run sends anything to another one; "
            "cut workers off from all with worker = or role ="
        )
    some, rest = (_members(stage, fault, names) for names in fault.between)
    if some & rest:
        both = ", ".join(stage.names[worker_id] for worker_id in sorted(some & rest))
        raise ConfigError(f"{fault.where}: between: {both} is on both sides")
    return some, rest


def _members(stage: Stage, fault: Fault, names: tuple[str, ...]) -> frozenset[WorkerId]:
    found: set[WorkerId] = set()
    for name in names:
        ids = {worker_id for worker_id, spec in stage.world.specs.items() if spec.role.value == name}
        if name in stage.ids:
            ids = {stage.ids[name]}
        if not ids:
            some = ", ".join(list(stage.ids)[:8])
            raise ConfigError(f"{fault.where}: between: no worker has the name or role {name!r}; there are {some}")
        found |= ids
    return frozenset(found)


def lasts(stage: Stage, fault: Fault) -> bool:
    """Whether a partition is there now."""
    return any(name.startswith(f"{fault.index}.") for name in stage.world.wires.parts)


def two_sides(fault: Fault) -> str:
    """Who is cut off from whom, as a line says it."""
    assert fault.between is not None
    return " and ".join(", ".join(names) for names in fault.between)
