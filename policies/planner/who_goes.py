"""Which worker goes, and which start is called off.

Fewest open requests, then fewest cached blocks that nobody else holds, then the youngest, then the lowest id. A worker
that is not ready yet goes before any that is: nothing is lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.cluster.events import WorkerStarting
from policies.cluster.ids import WorkerId
from policies.cluster.state import WorkerView

Unique = Callable[[WorkerView], int]
"""Cached blocks of a worker that no other holds."""


def reported_blocks(worker: WorkerView) -> int:
    """All cached blocks that a worker last reported: what is known without an index of who holds what."""
    return 0 if worker.report is None else worker.report.cached_blocks


def open_requests(worker: WorkerView) -> int:
    """By our own count or the worker's, whichever is more: others may send to it too."""
    told = 0 if worker.report is None else worker.report.running + worker.report.waiting
    return max(worker.in_flight, told)


def to_drain(workers: Sequence[WorkerView], n: int, unique: Unique = reported_blocks) -> list[WorkerView]:
    """The n that go first."""
    return sorted(workers, key=lambda w: (open_requests(w), unique(w), -w.up.at_s, w.worker_id))[:n]


def to_cancel(starts: Sequence[WorkerStarting], n: int) -> list[WorkerId]:
    """The n starts that are called off first: the last ones begun."""
    return [start.worker_id for start in sorted(starts, key=lambda s: (-s.at_s, -s.worker_id))[:n]]


def to_recall(workers: Sequence[WorkerView], n: int, unique: Unique = reported_blocks) -> list[WorkerView]:
    """The n draining workers that stay first: those that would have gone last."""
    return to_drain(workers, len(workers), unique)[::-1][:n]
