"""What happens to routers while they run: a restart, an index that is lost, other limits on load.

It tells them and does nothing itself; what they make of it is theirs. After a loss every worker says again all that it
has, each when its dump is made.
"""

from __future__ import annotations

from policies.cluster.events import BusyThresholdsChanged, Event, IndexLost, RouterRestarted
from twin.mocker.clock import Order
from twin.mocker.faults.stage import Entry, Stage
from twin.mocker.worker import MockWorker
from twin.scenario.model import Fault, Occurrence

DUMP_S_PER_BLOCK = 20e-6
"""What it takes to make and send a dump, for each block that is held: 2.27 million took 45 s where it was measured."""


def set_limits(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """Limits of `[router.busy]` change from now on; those not named stay as they are."""
    told = (f"{one.name} = {'none' if one.limit is None else f'{one.limit:g}'}" for one in fault.changes)
    entry.target = ", ".join(told)
    stage.world.post(BusyThresholdsChanged(at_s=stage.now_s, changes=fault.changes))
    return None


def lose(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """A router loses its index, or (restarted) all that it keeps. Its index comes back by dumps of the workers."""
    world, router = stage.world, fault.router
    entry.target = f"router {router}"
    world.news.learn_evictions(world.clock.over_s)
    lost: Event = (
        RouterRestarted(at_s=stage.now_s, router=router)
        if fault.kind == "router_restart"
        else IndexLost(at_s=stage.now_s, router=router)
    )
    world.post(lost)
    left = 0
    for worker in world.workers.values():
        if not worker.down and world.news.tells_blocks(world.specs[worker.worker_id]):
            left += 1
            _dump(stage, entry, worker)
    if not left:
        entry.over_s = stage.now_s
    return None


def _dump(stage: Stage, entry: Entry, worker: MockWorker) -> None:
    """A worker says what it has when its dump is made, unless it is gone by then."""
    world, epoch = stage.world, worker.up.epoch
    blocks = sum(run.hi - run.lo for run in worker.engine.pool.findable())

    def told() -> None:
        entry.over_s = stage.now_s
        if worker.down or worker.fenced or worker.up.epoch != epoch or world.partitions.is_cut_off(worker.worker_id):
            return
        world.news.learn_evictions(stage.now_s)
        world.news.on_changed(worker)
        world.news.tell_all(worker)

    stage.call(stage.now_s + DUMP_S_PER_BLOCK * blocks, told, int(Order.LATE))
