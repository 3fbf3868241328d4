"""Workers that come and go on order: starts, their cancellation, drains, recalls, and what is billed.

It carries out the orders of planners on one world. A worker is billed from its order to the instant at which it is
gone; each decision ends with one `ScaleDone` or `ScaleFailed`, once all it asked for has ended. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from policies.cluster.actions import AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.events import WorkerStartCancelled, WorkerStartFailed, WorkerStarting
from policies.cluster.ids import Role, WorkerId
from policies.cluster.scaling import RoleProgress, ScaleDone, ScaleFailed, ScaleProgress
from policies.errors import CapabilityError
from policies.resilience.drain import DrainRules
from twin.engine.ticks import instant
from twin.mocker.clock import Order

if TYPE_CHECKING:
    from twin.mocker.world import MockWorld
    from twin.worker_spec import WorkerSpec

_COMMAND = int(Order.COMMAND)
_STARTED, _DRAINED = "start", "drain"
PATIENCE_S = 3600.0
"""How long a run goes on for the sake of requests that wait for a worker, and nothing else."""


class Nursery(Protocol):
    """Makes workers of a group that the run did not begin with."""

    def make(self, group: str, worker_id: WorkerId) -> WorkerSpec:
        """A new worker of a group. Raises ConfigError for a group that there is not."""
        ...


@dataclass(slots=True)
class Stay:
    """A worker that was ordered: from when to when it is paid for, and when it was ready (None: not, or not yet)."""

    spec: WorkerSpec
    group: str
    ordered_s: float
    up_s: float | None = None
    gone_s: float | None = None


@dataclass(slots=True)
class _Decision:
    """What one decision waits for: what it ordered of whom. `failed`: why a part of it did not come to be."""

    open: dict[WorkerId, str] = field(default_factory=dict)
    roles: dict[Role, None] = field(default_factory=dict)  # in order
    failed: str | None = None


class Scaling:
    """Acts on one world, at its present instant. `stays` has every worker that was ordered, by id.

    `cuts`: a drain may cut off what is left when its time is over, since that goes on elsewhere; without it a drain
    takes as long as it takes, and nothing is lost. `rules`: grace and time of drains that do not say otherwise.
    """

    def __init__(self, world: MockWorld, nursery: Nursery, *, rules: DrainRules, cuts: bool) -> None:
        self._world = world
        self._nursery = nursery
        self._rules = rules
        self._cuts = cuts
        self._next_id = max(world.specs, default=-1) + 1
        self._decisions: dict[int, _Decision] = {}
        self._checks: set[int] = set()  # decisions that are looked at once the orders of this instant are carried out
        self.stays: dict[WorkerId, Stay] = {}
        self.done = Counter[str]()  # starts, starts_failed, starts_cancelled, drains, recalls
        self.on_new: list[Callable[[WorkerSpec], None]] = []
        self.on_change: list[Callable[[], None]] = []  # called when a worker was ordered, is up, drains or is gone

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a worker while there is none, and has not done so for too long."""
        world = self._world
        if not world.open or world.controller.view.live:
            return False
        return world.clock.now - next(iter(world.open.values())).arrival_s < PATIENCE_S

    # ------------------------------------------------------------ orders

    def add(self, order: AddWorker) -> None:
        """Start a worker, under a new id."""
        world, now_s = self._world, self._world.clock.now
        self.done["starts"] += 1
        worker_id = WorkerId(self._next_id)
        self._next_id += 1
        spec = self._nursery.make(order.group, worker_id)
        if order.role is not None and order.role is not spec.role:
            raise CapabilityError(
                f"a {order.role.value} worker was ordered of group {order.group}, whose workers are {spec.role.value}"
            )
        world.specs[worker_id] = spec
        world.starts.know(worker_id, spec.weights)
        self.stays[worker_id] = Stay(spec=spec, group=order.group, ordered_s=now_s)
        for heard in self.on_new:
            heard(spec)
        if order.decision_id is not None:
            self._await(order.decision_id, worker_id, _STARTED, spec.role)
            world.post(
                WorkerStarting(
                    at_s=now_s,
                    worker_id=worker_id,
                    name=spec.name,
                    role=spec.role,
                    group=order.group,
                    decision_id=order.decision_id,
                    gpus=spec.gpus,
                )
            )
        world.churn.expect(worker_id, instant(now_s + spec.startup_s))
        world.starts.begin(
            worker_id, spec.startup_s, lambda: self._on_up(worker_id), on_failed=lambda: self._on_failed(worker_id)
        )
        self._changed()

    def cancel(self, order: CancelStart) -> None:
        """Call a start off; one that is over by now has ended already."""
        world, worker_id = self._world, order.worker_id
        if order.decision_id is not None:
            self._await(order.decision_id, None, "", world.specs[worker_id].role)
        if worker_id not in world.starts or worker_id in world.workers:
            return
        self.done["starts_cancelled"] += 1
        world.starts.break_off(worker_id)
        world.churn.due_s.pop(worker_id, None)
        self._gone(worker_id)
        world.post(WorkerStartCancelled(at_s=world.clock.now, worker_id=worker_id))
        self._settle(worker_id)
        self._changed()

    def drain(self, order: DrainWorker) -> None:
        """Let a worker leave: it finishes what it has, for so long as the order or the rules say."""
        world, worker_id = self._world, order.worker_id
        role = world.specs[worker_id].role
        if order.decision_id is not None:
            self._await(order.decision_id, worker_id, _DRAINED, role)
        if worker_id in world.churn.draining:
            return  # it is leaving already; a second signal would cut it short
        self.done["drains"] += 1
        timeout_s = self._rules.timeout_s if order.deadline_s is None else order.deadline_s
        world.churn.drain(
            worker_id, DrainRules(grace_s=self._rules.grace_s, timeout_s=timeout_s if self._cuts else None)
        )
        self._changed()

    def recall(self, order: RecallWorker) -> None:
        """Let a worker that is leaving stay, if it is still there."""
        if order.decision_id is not None:
            self._await(order.decision_id, None, "", self._world.specs[order.worker_id].role)
        self.done["recalls"] += self._world.churn.recall(order.worker_id)
        self._changed()

    # ------------------------------------------------------------ what becomes of them

    def on_gone(self, worker_id: WorkerId) -> None:
        """A worker is known to be gone, drained or lost."""
        self._gone(worker_id)
        self._settle(worker_id, _DRAINED)
        self._changed()

    def on_back(self, worker_id: WorkerId) -> None:
        """A worker that was lost is there again; it was paid for all the time."""
        stay = self.stays.get(worker_id)
        if stay is not None:
            stay.gone_s = None
        self._changed()

    def on_recalled(self, worker_id: WorkerId) -> None:
        """A worker that was leaving stays."""
        self._settle(worker_id, _DRAINED)
        self._changed()

    def _on_up(self, worker_id: WorkerId) -> None:
        stay, world = self.stays[worker_id], self._world
        stay.up_s = world.clock.now
        world.start_worker(stay.spec)
        self._settle(worker_id, _STARTED)
        self._changed()

    def _on_failed(self, worker_id: WorkerId) -> None:
        """A start has failed, and nobody tries again unless it is ordered."""
        world, why = self._world, "the start failed"
        self.done["starts_failed"] += 1
        self._gone(worker_id)
        for decision in self._decisions.values():
            if worker_id in decision.open:
                decision.failed = f"{world.specs[worker_id].name}: {why}"
        world.post(WorkerStartFailed(at_s=world.clock.now, worker_id=worker_id, reason=why))
        self._settle(worker_id)
        self._changed()

    def _gone(self, worker_id: WorkerId) -> None:
        stay = self.stays.get(worker_id)
        if stay is not None:
            stay.gone_s = self._world.clock.now

    # ------------------------------------------------------------ decisions

    def _await(self, decision_id: int, worker_id: WorkerId | None, what: str, role: Role) -> None:
        """A decision ends when this has ended too; looked at when all of its orders are carried out."""
        decision = self._decisions.setdefault(decision_id, _Decision())
        decision.roles[role] = None
        if worker_id is not None:
            decision.open[worker_id] = what
        self._look(decision_id)

    def _settle(self, worker_id: WorkerId, what: str | None = None) -> None:
        """What was ordered of a worker has ended."""
        for decision_id, decision in self._decisions.items():
            if worker_id in decision.open and what in (None, decision.open[worker_id]):
                del decision.open[worker_id]
                self._look(decision_id)

    def _look(self, decision_id: int) -> None:
        if decision_id not in self._checks:
            self._checks.add(decision_id)
            now_s = self._world.clock.now
            self._world.clock.watch(now_s, _COMMAND, lambda: self._report(decision_id))

    def _report(self, decision_id: int) -> None:
        """Say how far a decision is, or that it has ended."""
        self._checks.discard(decision_id)
        decision = self._decisions.get(decision_id)
        if decision is None:
            return
        world, now_s = self._world, self._world.clock.now
        if decision.open:
            roles = tuple(self._progress(role) for role in decision.roles)
            world.post(ScaleProgress(at_s=now_s, decision_id=decision_id, roles=roles))
            return
        del self._decisions[decision_id]
        if decision.failed is None:
            world.post(ScaleDone(at_s=now_s, decision_id=decision_id))
        else:
            world.post(ScaleFailed(at_s=now_s, decision_id=decision_id, reason=decision.failed))

    def _progress(self, role: Role) -> RoleProgress:
        view = self._world.controller.view
        mine = [worker for worker in view.workers.values() if worker.up.role is role]
        leaving = sum(worker.draining for worker in mine)
        return RoleProgress(role=role, ready=len(mine) - leaving, pending=view.pending(role), draining=leaving)

    def _changed(self) -> None:
        for heard in self.on_change:
            heard()
