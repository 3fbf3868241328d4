"""Partitions of the simulated network: who is cut off works on, and is not heard of; what then was late, or never.

A worker that is reached again before the cluster took it for lost delivers all that it has made meanwhile, at that
instant. One that was taken for lost is a new worker: under a new epoch, with what it has cached and without the
requests that it had, which went on elsewhere or failed. Nothing that it did for them is ever believed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from policies.cluster.ids import WorkerId
from twin.engine.ticks import before
from twin.mocker.wires import Part
from twin.mocker.worker import MockWorker

if TYPE_CHECKING:
    from twin.mocker.requests import OpenRequest
    from twin.mocker.world import MockWorld


class Reached:
    """Who reaches whom in one world now, as the tiers of its workers ask it. The registry stands with the store of
    leases, where the frontend is."""

    def __init__(self, world: MockWorld) -> None:
        self._world = world

    @property
    def is_out(self) -> bool:
        """Whether the store of leases is down, and the registry with it."""
        return self._world.churn.outage is not None

    def is_cut(self, a: WorkerId, b: WorkerId | None) -> bool:
        """Whether a worker does not reach another one, or (None) the registry."""
        return self._world.wires.cut(a, b)


class Partitions:
    """Acts on one world. Each method acts at the world's present instant: what cuts off before everything else of that
    instant, what reconnects after the steps that end then."""

    def __init__(self, world: MockWorld) -> None:
        self._world = world
        self._since_s: dict[WorkerId, float] = {}  # workers that are cut off, and since when

    def is_cut_off(self, worker_id: WorkerId) -> bool:
        """Whether nothing goes to a worker or comes from it now."""
        return worker_id in self._since_s

    # ------------------------------------------------------------ between workers

    def part(self, name: str, some: frozenset[WorkerId], rest: frozenset[WorkerId]) -> None:
        """Two sets of workers cannot reach each other any more; both reach the cluster."""
        self._world.wires.parts[name] = Part(some, rest)
        self._break_moves()

    def join(self, name: str) -> None:
        """They can again."""
        world = self._world
        del world.wires.parts[name]
        world.wires.deliver()
        self._move_again()

    # ------------------------------------------------------------ one worker from everybody

    def cut_off(self, name: str, worker: MockWorker) -> None:
        """Nothing goes to a worker or comes from it any more, and it works on."""
        world, worker_id = self._world, worker.worker_id
        now_s = world.clock.now
        world.news.learn_evictions(before(now_s))
        for request in world.churn.requests_of(worker_id):
            if request.worker_id == worker_id and request.sequence is not None:
                request.cut_off(*worker.made(request.sequence))
        worker.cut_off()
        self._since_s[worker_id] = now_s
        world.wires.parts[name] = Part(frozenset((worker_id,)), None)
        world.starts.on_gone(worker_id)
        self._break_moves()

    def reconnect(self, name: str, worker_id: WorkerId) -> None:
        """A worker is reached again: it delivers what was late, or (taken for lost) registers anew."""
        world = self._world
        now_s = world.clock.now
        since_s = self._since_s.pop(worker_id)
        worker = world.workers[worker_id]
        world.news.learn_evictions(now_s)
        if not worker.down and not worker.fenced:
            worker.caught_up(now_s)
            for request in list(world.open.values()):
                if request.heard is not None and request.worker_id == worker_id:
                    self._catch_up(request, worker, since_s)
        del world.wires.parts[name]
        world.wires.deliver()
        if worker.fenced and not worker.down:
            self.rejoin(worker)
        world.churn.check_drained()
        self._move_again()

    def _break_moves(self) -> None:
        """What moves between workers that do not reach each other any more breaks off."""
        if self._world.handoffs is not None:
            self._world.handoffs.break_moves()
        if self._world.block_tiers is not None:
            self._world.block_tiers.break_reads()

    def _move_again(self) -> None:
        """What broke off is moved again where it can be."""
        if self._world.handoffs is not None:
            self._world.handoffs.move_again()
        if self._world.block_tiers is not None:
            self._world.block_tiers.read_again()

    def _catch_up(self, request: OpenRequest, worker: MockWorker, since_s: float) -> None:
        """The client gets at once what was made while it could not be reached: one gap, the others are none."""
        world, seq = self._world, request.sequence
        now_s = world.clock.now
        assert seq is not None
        before_s, tokens = request.catch_up(worker.engine.made(seq)[0], since_s, now_s)
        if not tokens:
            return
        if before_s is not None:
            world.note_gap(worker.worker_id, before_s, now_s)
        if tokens > 1:
            world.note_gap(worker.worker_id, now_s, now_s, tokens - 1)

    def rejoin(self, worker: MockWorker) -> None:
        """A worker that was taken for lost registers under a new epoch, and says what it has cached."""
        world = self._world
        world.news.start_over(worker)
        up = replace(worker.up, at_s=world.clock.now, epoch=worker.up.epoch + 1)
        worker.return_as(up)
        world.post(up)
        world.news.tell_all(worker)
