"""Who is held up for good when nothing is left to happen, and by what: a link, a partition, a worker that is gone.

It only looks; whoever asked ends those requests with what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policies.cluster.ids import WorkerId
from twin.mocker.faults.links import links_down
from twin.mocker.faults.reach import lasts, two_sides
from twin.mocker.faults.stage import Stage

if TYPE_CHECKING:
    from twin.mocker.requests import OpenRequest


def stuck(stage: Stage) -> tuple[str, list[OpenRequest]] | None:
    """Which open requests are held up for good, and by what. Those whose transfer stands still, or whose worker is
    gone, come first: without them the others may go on."""
    found = [(why, requests) for why, requests in _held_up(stage) if why]
    for why, requests in found:
        if requests:
            return f"stuck: {why}", requests
    return (f"stuck: {'; '.join(why for why, _ in found)}", list(stage.world.open.values())) if found else None


def _held_up(stage: Stage) -> Iterator[tuple[str, list[OpenRequest]]]:
    """What stays broken to the end (a text, empty where nothing is), and which open requests it stops."""
    world = stage.world
    moving = [r for r in world.open.values() if r.moving]
    yield _to_the_end("link", links_down(stage), "is down", "are down"), moving
    apart = [fault for fault in stage.scenario.faults if fault.between and lasts(stage, fault)]
    stalled = world.handoffs.held_up if world.handoffs is not None else []
    yield _to_the_end("partition between", tuple(two_sides(fault) for fault in apart), "lasts", "last"), stalled
    there = sorted(world.workers.items())
    gone = [worker_id for worker_id, worker in there if worker.down or worker.hung]
    yield _workers_to_the_end(stage, gone, "is down", "are down")
    lone = [worker_id for worker_id, _ in there if world.partitions.is_cut_off(worker_id)]
    yield _workers_to_the_end(stage, lone, "is cut off", "are cut off")


def _workers_to_the_end(stage: Stage, ids: list[WorkerId], one: str, several: str) -> tuple[str, list[OpenRequest]]:
    requests = {r.request_id: r for worker_id in ids for r in stage.world.churn.requests_of(worker_id)}
    names = tuple(stage.names[worker_id] for worker_id in ids)
    return _to_the_end("worker", names, one, several), list(requests.values())


def _to_the_end(what: str, names: tuple[str, ...], one: str, several: str) -> str:
    """Names of what stays broken, three at most; empty where there are none."""
    if not names:
        return ""
    if len(names) == 1:
        return f"{what} {names[0]} {one} to the end of the run"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}s {', '.join(names[:3])}{more} {several} to the end of the run"
