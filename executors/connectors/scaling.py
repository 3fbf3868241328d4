"""Orders about worker counts in the live world: what each decision still waits for, and its one end.

Every start ends with WorkerUp, WorkerStartFailed or WorkerStartCancelled, every drain with WorkerLost or
WorkerRecalled, every decision with ScaleDone or ScaleFailed. Who carries the orders out is `local` (processes of this
host, by worker) or a connector that takes counts. It decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from executors.clock import Order
from executors.connectors.local import Local
from policies.cluster.actions import AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.events import (
    WorkerDraining,
    WorkerEvent,
    WorkerLost,
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role, WorkerId
from policies.cluster.scaling import RoleProgress, ScaleDone, ScaleFailed, ScaleProgress
from policies.cluster.ticks import Tick
from policies.errors import CapabilityError

if TYPE_CHECKING:
    from executors.world import LiveWorld

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Start:
    """A worker that was ordered and is not up. `claimed`: one that came by itself is about to be it; `decision_id`
    None: the decision has been given up meanwhile."""

    name: str
    group: str
    decision_id: int | None
    claimed: bool = False


@dataclass(slots=True)
class Decision:
    """What one decision waits for, and why a part of it did not come to be. `confirmed`: the platform has done its."""

    roles: dict[Role, None] = field(default_factory=dict)  # in order
    starts: set[WorkerId] = field(default_factory=set)
    drains: set[WorkerId] = field(default_factory=set)
    failed: str | None = None
    confirmed: bool = False
    told: tuple[RoleProgress, ...] = ()


class Carrier(Protocol):
    """Carries orders out. `confirms`: a decision waits for its word too."""

    confirms: bool

    def start(self, worker_id: WorkerId, order: AddWorker) -> tuple[str, Role, int]:
        """Begin to start a worker; its name, role and GPUs."""
        ...

    def call_off(self, worker_id: WorkerId, group: str, decision_id: int | None) -> None:
        """A start is not wanted any more."""
        ...

    def drain(self, order: DrainWorker) -> bool:
        """Begin to drain a worker; False where it is gone or on its way out already."""
        ...

    def recall(self, order: RecallWorker) -> bool:
        """Have a worker stay; True where that is so at once and still to be told."""
        ...

    def settle(self) -> None:
        """All orders of this instant have been given."""
        ...

    def advise(self, tick: Tick) -> None:
        """What would be done about a tick of a planner that only advises."""
        ...

    async def close(self) -> None: ...


class Scaling:
    """Of one world. `carrier`: who carries orders out, processes of this host unless told otherwise."""

    def __init__(self, world: LiveWorld) -> None:
        self._world = world
        self.carrier: Carrier = Local(world.fleet)
        self.starts: dict[WorkerId, Start] = {}
        self.decisions: dict[int, Decision] = {}
        self._checks: set[int] = set()
        self._settling = False
        fleet = world.fleet
        fleet.on_event.append(self._hear)
        fleet.on_failed_start.append(self._start_failed)
        fleet.claim, fleet.unclaim = self._claim, self._unclaim

    # ------------------------------------------------------------ orders

    def add(self, order: AddWorker) -> None:
        """Have one more worker. One that no decision asked for is started as it is."""
        if order.decision_id is None:
            if self.carrier.confirms:
                raise CapabilityError(
                    f"a worker of group {order.group} was ordered without a decision, and the connector takes nothing "
                    "else: give AddWorker a decision_id"
                )
            self._world.fleet.add(order.group)
            return
        worker_id = self._world.fleet.reserve()
        name, role, gpus = self.carrier.start(worker_id, order)
        self.starts[worker_id] = Start(name=name, group=order.group, decision_id=order.decision_id)
        self._part(order.decision_id, role).starts.add(worker_id)
        self._world.post(
            WorkerStarting(
                at_s=self._world.clock.now(),
                worker_id=worker_id,
                name=name,
                role=role,
                group=order.group,
                decision_id=order.decision_id,
                gpus=gpus,
            )
        )

    def cancel(self, order: CancelStart) -> None:
        """Call a start off; one that is over, or just about to be, has its own end."""
        start = self.starts.get(order.worker_id)
        if order.decision_id is not None:
            self._part(order.decision_id, None)
        if start is None or start.claimed:
            return
        self.carrier.call_off(order.worker_id, start.group, order.decision_id)
        self._settle_soon()
        self._cancelled(order.worker_id)

    def drain(self, order: DrainWorker) -> None:
        """Have a worker leave, and what it has end first."""
        worker = self._world.fleet.workers[order.worker_id]
        waits = self.carrier.drain(order)
        if order.decision_id is not None:
            decision = self._part(order.decision_id, worker.up.role)
            if waits and not worker.lost:
                decision.drains.add(order.worker_id)

    def recall(self, order: RecallWorker) -> None:
        """Have a worker stay that was to leave, where it still can."""
        worker = self._world.fleet.workers[order.worker_id]
        if order.decision_id is not None:
            self._part(order.decision_id, worker.up.role)
        if self.carrier.recall(order):
            self.stays(order.worker_id)

    def advise(self, tick: Tick) -> None:
        """The record of a tick; nobody waits for anything."""
        self.carrier.advise(tick)

    def _part(self, decision_id: int, role: Role | None) -> Decision:
        decision = self.decisions.setdefault(decision_id, Decision(confirmed=not self.carrier.confirms))
        if role is not None:
            decision.roles[role] = None
        self._look(decision_id)
        self._settle_soon()
        return decision

    def _settle_soon(self) -> None:
        """Tell the carrier once all orders of this instant have been given."""
        if not self._settling:
            self._settling = True
            self._world.clock.call_at(self._world.clock.now(), Order.COMMAND, self._settle)

    def _settle(self) -> None:
        self._settling = False
        self.carrier.settle()

    # ------------------------------------------------------------ what becomes of them

    def _hear(self, event: WorkerEvent) -> None:
        match event:
            case WorkerUp():
                self._end_start(event.worker_id)
            case WorkerDraining() if self.carrier.confirms:
                self._swap(event.worker_id)
            case WorkerLost():
                if self.carrier.confirms:
                    self._swap(event.worker_id)
                self._end_drain(event.worker_id)
            case WorkerRecalled():
                self._end_drain(event.worker_id)

    def _start_failed(self, name: str, _: str, error: Exception) -> None:
        worker_id = next((one for one, start in self.starts.items() if start.name == name), None)
        if worker_id is not None:
            self._failed_to_start(worker_id, f"{name}: {error}")

    def _failed_to_start(self, worker_id: WorkerId, reason: str) -> None:
        decision_id = self.starts[worker_id].decision_id
        if decision_id in self.decisions:
            decision = self.decisions[decision_id]
            decision.failed = decision.failed or reason
        self._world.post(WorkerStartFailed(at_s=self._world.clock.now(), worker_id=worker_id, reason=reason))
        self._end_start(worker_id)

    def _cancelled(self, worker_id: WorkerId) -> None:
        self._world.post(WorkerStartCancelled(at_s=self._world.clock.now(), worker_id=worker_id))
        self._end_start(worker_id)

    def _end_start(self, worker_id: WorkerId) -> None:
        start = self.starts.pop(worker_id, None)
        if start is not None and start.decision_id is not None and start.decision_id in self.decisions:
            self.decisions[start.decision_id].starts.discard(worker_id)
            self._look(start.decision_id)

    def _end_drain(self, worker_id: WorkerId) -> None:
        for number, decision in self.decisions.items():
            if worker_id in decision.drains:
                decision.drains.discard(worker_id)
                self._look(number)

    def _swap(self, worker_id: WorkerId) -> None:
        """A platform that takes counts lets one of its own choice go: the one that was ordered to go stays for it."""
        if any(worker_id in decision.drains for decision in self.decisions.values()):
            return
        workers = self._world.fleet.workers
        for decision in self.decisions.values():
            for ordered in sorted(decision.drains):
                if workers[ordered].group == workers[worker_id].group and not self._goes(ordered):
                    decision.drains.add(worker_id)
                    self.stays(ordered)
                    return

    def _goes(self, worker_id: WorkerId) -> bool:
        """Whether the platform has begun to let a worker go."""
        worker = self._world.fleet.workers[worker_id]
        return worker.draining or worker.lost

    def stays(self, worker_id: WorkerId) -> None:
        """A worker that was ordered to go, and did not begin to, stays."""
        self._world.fleet.workers[worker_id].fenced = False
        self._world.post(WorkerRecalled(at_s=self._world.clock.now(), worker_id=worker_id))
        self._end_drain(worker_id)

    def _claim(self, role: Role, group: str) -> WorkerId | None:
        """A worker came by itself: it is the one of its group that was ordered first."""
        if not self.carrier.confirms:
            return None
        waiting = [one for one, start in self.starts.items() if start.group == group and not start.claimed]
        if not waiting:
            return None
        self.starts[waiting[0]].claimed = True
        return waiting[0]

    def _unclaim(self, worker_id: WorkerId) -> None:
        if worker_id in self.starts:
            self.starts[worker_id].claimed = False

    # ------------------------------------------------------------ decisions

    def confirm(self, decision_id: int) -> None:
        """The platform has done what the decision asked of it, and as many workers take work as there are to be. Orders
        that somebody else's doing has overtaken (a crash, a hand edit) end now: nobody is going to carry them out."""
        decision = self.decisions.get(decision_id)
        if decision is None:
            return
        decision.confirmed = True
        for worker_id in sorted(decision.starts):
            if not self.starts[worker_id].claimed:
                self._cancelled(worker_id)
        for worker_id in sorted(decision.drains):
            if not self._goes(worker_id):
                self.stays(worker_id)
        self._look(decision_id)

    def give_up(self, decision_id: int, reason: str, *, rehearsed: bool = False) -> Mapping[str, int]:
        """A decision will not come to its end: what is left of it ends now. By group, how many more (or fewer) workers
        that leaves than it asked for."""
        decision = self.decisions.get(decision_id)
        if decision is None:
            return {}
        undo: dict[str, int] = {}
        workers = self._world.fleet.workers
        for worker_id in sorted(decision.starts):
            start = self.starts[worker_id]
            if start.claimed:
                start.decision_id = None  # it comes all the same
                continue
            undo[start.group] = undo.get(start.group, 0) - 1
            if rehearsed:
                self._cancelled(worker_id)
            else:
                self._failed_to_start(worker_id, reason)
        for worker_id in sorted(decision.drains):
            if not self._goes(worker_id):
                group = workers[worker_id].group
                undo[group] = undo.get(group, 0) + 1
                self.stays(worker_id)
        decision.starts.clear()
        decision.drains.clear()
        decision.confirmed = True
        decision.failed = reason
        self._look(decision_id)
        return undo

    def _look(self, decision_id: int) -> None:
        if decision_id not in self._checks:
            self._checks.add(decision_id)
            self._world.clock.call_at(self._world.clock.now(), Order.COMMAND, lambda: self._report(decision_id))

    def _report(self, decision_id: int) -> None:
        """Say how far a decision is, or that it has ended."""
        self._checks.discard(decision_id)
        decision = self.decisions.get(decision_id)
        if decision is None:
            return
        now_s = self._world.clock.now()
        if decision.starts or decision.drains or not decision.confirmed:
            roles = tuple(self._progress(role) for role in decision.roles)
            if roles != decision.told:
                decision.told = roles
                self._world.post(ScaleProgress(at_s=now_s, decision_id=decision_id, roles=roles))
            return
        del self.decisions[decision_id]
        if decision.failed is None:
            self._world.post(ScaleDone(at_s=now_s, decision_id=decision_id))
        else:
            log.warning("decision %d about worker counts has failed: %s", decision_id, decision.failed)
            self._world.post(ScaleFailed(at_s=now_s, decision_id=decision_id, reason=decision.failed))

    def _progress(self, role: Role) -> RoleProgress:
        view = self._world.controller.view
        mine = [worker for worker in view.workers.values() if worker.up.role is role]
        leaving = sum(worker.draining for worker in mine)
        return RoleProgress(role=role, ready=len(mine) - leaving, pending=view.pending(role), draining=leaving)

    async def close(self) -> None:
        """Let go of the carrier. What is open stays as it is ordered."""
        await self.carrier.close()
