"""The view's own counts when a worker comes back under its old id."""

from __future__ import annotations

import pytest
from builders import Scene, router


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
