"""The view's own counts when a worker comes back under its old id, and events that name a worker that is not there."""

from __future__ import annotations

import pytest
from builders import Scene, router, worker

from policies.cluster.events import WorkerDraining, WorkerLost
from policies.cluster.ids import WorkerId
from policies.cluster.state import Cluster
from policies.errors import InvariantError


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_late_ends_of_a_lost_worker_do_not_touch_its_successor(mode: str) -> None:
    scene = Scene(router(mode), workers=1)
    scene.send("old")
    scene.lost(0)
    scene.up(0, epoch=1)
    assert scene.view.live[0].in_flight == 0
    scene.send("new")
    scene.fail("old")
    assert scene.view.live[0].in_flight == 1
    scene.finish("new")
    assert scene.view.live[0].in_flight == 0
    scene.invariants.finish()


def test_only_a_worker_that_is_there_can_start_to_drain() -> None:
    cluster = Cluster()
    cluster.fold(worker(0))
    with pytest.raises(InvariantError, match=r"^WorkerDraining\(at_s=1\.0, .*: no such worker"):
        cluster.fold(WorkerDraining(at_s=1.0, worker_id=WorkerId(1)))
    cluster.fold(WorkerLost(at_s=2.0, worker_id=WorkerId(0)))
    with pytest.raises(InvariantError, match="no such worker; it was lost before"):
        cluster.fold(WorkerDraining(at_s=3.0, worker_id=WorkerId(0)))
    assert cluster.live == ()
