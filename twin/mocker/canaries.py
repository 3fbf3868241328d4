"""Canaries of the simulated world: one token past all queues, and what comes of it.

An idle worker answers at once, a busy one when its running step ends; the token itself costs nothing here. One that
hangs, is gone or cannot be reached does not answer. It decides nothing about workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.cluster.actions import Probe
from policies.cluster.events import ProbeEnded, WorkerHeard
from policies.cluster.ids import ProbeResult, WorkerId
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.wires import FRONTEND

if TYPE_CHECKING:
    from twin.mocker.worker import MockWorker
    from twin.mocker.world import MockWorld

_LATE = int(Order.LATE)


class Canaries:
    """Of one world, which says whenever a worker has said something, if anybody wants to know."""

    def __init__(self, world: MockWorld) -> None:
        self._world = world
        self._heard_s: dict[WorkerId, float] = {}

    def heard(self, worker: MockWorker, at_s: float) -> None:
        """A worker said something good."""
        self._heard_s[worker.worker_id] = at_s

    def probe(self, action: Probe) -> None:
        """Ask a worker, unless it has said something in the last `idle_s`."""
        world, now_s = self._world, self._world.clock.now
        worker = world.workers[action.worker_id]
        asked = _Asked(self, action, worker, now_s)
        last_s = self.last_s(worker)
        if last_s is not None and last_s + action.idle_s > now_s:  # as the timer of the policy adds it up
            asked.heard_of(last_s)
            return
        world.clock.watch(instant(now_s + action.timeout_s), _LATE, asked.over)
        world.wires.send(FRONTEND, action.worker_id, asked.arrives)

    def last_s(self, worker: MockWorker) -> float | None:
        """When something good was heard last of a worker: the end of a prompt or an answer, or a token of a stream."""
        found = self._heard_s.get(worker.worker_id)
        since_s = found if found is not None and found >= worker.up.at_s else None
        if worker.down or self._world.partitions.is_cut_off(worker.worker_id):
            return since_s
        times = [since_s] if since_s is not None else []
        for request in self._world.churn.requests_of(worker.worker_id):
            if request.worker_id == worker.worker_id and request.sequence is not None:
                last_s = worker.last_token_s(request.sequence)
                times += [last_s] if last_s is not None else []
        return max(times, default=None)


class _Asked:
    """One probe under way; it ends once."""

    __slots__ = ("_action", "_all", "_done", "_since_s", "_worker")

    def __init__(self, every: Canaries, action: Probe, worker: MockWorker, since_s: float) -> None:
        self._all = every
        self._action = action
        self._worker = worker
        self._since_s = since_s
        self._done = False

    def arrives(self) -> None:
        """The canary reaches its worker."""
        worker = self._worker
        if worker.down:
            return
        if worker.busy and (worker.hung or not worker.between_steps()):
            worker.when_step_ends(self._answers)
        elif not worker.hung:
            self._answers()

    def _answers(self) -> None:
        world, worker = self._all._world, self._worker
        if not self._done and worker.up.epoch == self._action.epoch:
            world.news.hear(worker, lambda: self._end(ProbeResult.OK))

    def over(self) -> None:
        """Its time is up: what has been heard meanwhile counts, and silence is an answer too."""
        last_s = self._all.last_s(self._worker)
        if last_s is not None and last_s > self._since_s:
            self.heard_of(last_s)
        else:
            self._end(ProbeResult.SILENT)

    def heard_of(self, last_s: float) -> None:
        """The worker has said something: no answer of a canary is needed."""
        if self._finish():
            world, action = self._all._world, self._action
            now_s = world.clock.now
            world.post(WorkerHeard(at_s=now_s, worker_id=action.worker_id, epoch=action.epoch, last_s=last_s))

    def _end(self, result: ProbeResult) -> None:
        if self._finish():
            world, action = self._all._world, self._action
            now_s = world.clock.now
            world.post(ProbeEnded(at_s=now_s, worker_id=action.worker_id, epoch=action.epoch, result=result))

    def _finish(self) -> bool:
        """Whether this is its end: not a second one, and not that of a worker that has been lost or replaced."""
        if self._done:
            return False
        self._done = True
        worker, there = self._worker, self._all._world.controller.view.workers.get(self._action.worker_id)
        return there is not None and not worker.fenced and there.up.epoch == self._action.epoch
