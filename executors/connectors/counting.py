"""Drives a connector that takes counts: one decision after the other is written, then watched until it is so.

The orders of one decision are summed into a change by group, and added to what the platform was last asked for: it may
have been asked for workers that are not up yet, and they must not be taken away by an order for one more. A decision is
done when the platform says so *and* as many workers take work; one that takes longer than it may is given up and told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executors.connectors.protocol import Connector, ConnectorError, Rehearsed, pause
from policies.cluster.actions import AddWorker, DrainWorker, RecallWorker
from policies.cluster.events import WorkerDraining
from policies.cluster.ids import Role, WorkerId
from policies.cluster.ticks import PlanReason, Tick
from policies.errors import ConfigError

if TYPE_CHECKING:
    from executors.world import LiveWorld

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Written:
    """A decision that was written: how many workers of each group it wants, and by when."""

    targets: Mapping[str, int]
    until_s: float


class Counting:
    """Carries the orders of a world out through `connector`; `gpus` of one worker by group (1 where nobody says).

    `counters`: decisions, timed_out, failed, unanswered (looks at the platform that it did not answer).
    """

    confirms = True

    def __init__(self, world: LiveWorld, connector: Connector, gpus: Mapping[str, int]) -> None:
        self._world = world
        self.connector = connector
        self._gpus = gpus
        self._changes: dict[int | None, Counter[str]] = {}
        self._todo: deque[tuple[int | None, Mapping[str, int]]] = deque()
        self._taken: set[int] = set()  # of the decisions that are not over, those that were taken to be carried out
        self._open: dict[int, _Written] = {}
        self._wake = asyncio.Event()
        self._advice: Mapping[str, int] | None = None
        self._advised: Mapping[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.counters = Counter[str]()
        self.waits_for = ""
        """What the platform is waiting for, in its own words."""

    async def begin(self) -> None:
        """Open the connector, and take over the orders of the world. Raises ConfigError, CapabilityError."""
        await self.connector.open()
        self._world.scaling.carrier = self
        self._task = self._world.spawn(self._run())

    # ------------------------------------------------------------ orders

    def start(self, worker_id: WorkerId, order: AddWorker) -> tuple[str, Role, int]:
        role = self._known(order.group)
        if order.role not in (None, role):
            raise ConfigError(
                f"{order!r}, and workers of that group are {role.value}: give the planner's pool another group"
            )
        self._change(order.decision_id, order.group, 1)
        return f"{order.group}~{worker_id}", role, self._gpus.get(order.group, 1)

    def call_off(self, worker_id: WorkerId, group: str, decision_id: int | None) -> None:
        self._change(decision_id, group, -1)

    def drain(self, order: DrainWorker) -> bool:
        worker = self._world.fleet.workers[order.worker_id]
        if worker.draining or worker.fenced or worker.lost:
            return not worker.lost
        self._known(worker.group)
        self._change(order.decision_id, worker.group, -1)
        worker.fenced = True  # it is the platform that lets it leave
        self._world.post(WorkerDraining(at_s=self._world.clock.now(), worker_id=order.worker_id))
        return True

    def recall(self, order: RecallWorker) -> bool:
        worker = self._world.fleet.workers[order.worker_id]
        if not worker.fenced or worker.draining or worker.lost:
            return False  # the platform has let it go already: too late
        self._change(order.decision_id, worker.group, 1)
        return True

    def _known(self, group: str) -> Role:
        role = self.connector.roles.get(group)
        if role is None:
            raise ConfigError(
                f"connector {self.connector.name} scales {', '.join(self.connector.roles) or 'nothing'}, and a worker "
                f"of group {group!r} was ordered: name its object too"
            )
        return role

    def _change(self, decision_id: int | None, group: str, by: int) -> None:
        self._changes.setdefault(decision_id, Counter())[group] += by

    def settle(self) -> None:
        for decision_id in self._world.scaling.decisions.keys() - self._taken:
            self._changes.setdefault(decision_id, Counter())  # one whose orders all came too late ends too
        self._taken = set(self._world.scaling.decisions)
        self._todo.extend((number, dict(change)) for number, change in self._changes.items())
        self._changes.clear()
        self._wake.set()

    def advise(self, tick: Tick) -> None:
        """What a planner that only advises would have written is rehearsed, once as long as it says the same."""
        groups = {role: group for group, role in self.connector.roles.items()}
        change = {
            groups[role.role]: role.final - role.ready - role.pending
            for role in tick.roles
            if role.reason is PlanReason.ADVISORY and role.role in groups
        }
        if change and change != self._advised:
            self._advice = change
            self._wake.set()
        self._advised = change

    # ------------------------------------------------------------ the platform

    def live(self, group: str) -> int:
        """Workers of a group that take work."""
        return sum(
            1 for one in self._world.fleet.workers.values() if one.group == group and not one.lost and not one.draining
        )

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            while self._todo:
                await self._carry_out(*self._todo.popleft())
            if self._advice is not None:
                advice, self._advice = self._advice, None
                await self._rehearse(advice)
            if self._open or self.connector.watches:
                await self._look()
            if not self._todo and self._advice is None:
                await pause(self._world.clock, self.connector.poll_s, self._wake)

    async def _carry_out(self, number: int | None, change: Mapping[str, int]) -> None:
        self.counters["decisions"] += 1
        try:
            await self.connector.settled()
            change = {group: by for group, by in change.items() if by}
            asked = await self.connector.asked() if change else {}
            base = self._base(asked, change)
            targets = await self.connector.write(change, base) if change else {}
        except ConnectorError as error:
            self._fail(number, str(error), rehearsed=isinstance(error, Rehearsed))
            return
        if number is not None:
            self._open[number] = _Written(targets, self._world.clock.now() + self.connector.timeout_s)
            for group, wanted in targets.items():  # the last word on a group is the one that all wait for
                for earlier in self._open.values():
                    if group in earlier.targets:
                        earlier.targets = {**earlier.targets, group: wanted}

    async def _rehearse(self, change: Mapping[str, int]) -> None:
        try:
            said = await self.connector.rehearse(change, self._base(await self.connector.asked(), change))
        except ConnectorError as error:
            said = f"an advice could not be rehearsed: {error}"
        log.info("%s: %s", self.connector.name, said)

    def _base(self, asked: Mapping[str, int | None], change: Mapping[str, int]) -> dict[str, int]:
        """What there was to be before a change; where nobody has said, what there is."""
        known = {group: asked.get(group) for group in {**self.connector.roles, **change}}
        return {group: self.live(group) if n is None else n for group, n in known.items()}

    def _fail(self, number: int | None, reason: str, *, rehearsed: bool) -> None:
        if not rehearsed:
            self.counters["failed"] += 1
        if number is None:
            log.log(logging.INFO if rehearsed else logging.ERROR, "%s: %s", self.connector.name, reason)
        else:
            self._world.scaling.give_up(number, reason, rehearsed=rehearsed)

    async def _look(self) -> None:
        try:
            seen = await self.connector.look()
        except ConnectorError as error:
            self.counters["unanswered"] += 1
            self.waits_for = str(error)
        else:
            self.waits_for = seen.waits_for
            for number, written in list(self._open.items()):
                written.targets = {group: seen.targets.get(group, n) for group, n in written.targets.items()}
                if seen.confirmed and all(self.live(group) == n for group, n in written.targets.items()):
                    del self._open[number]
                    self._world.scaling.confirm(number)
        for number, written in list(self._open.items()):
            if self._world.clock.now() >= written.until_s:
                await self._time_out(number, written)

    async def _time_out(self, number: int, written: _Written) -> None:
        del self._open[number]
        self.counters["timed_out"] += 1
        there = ", ".join(f"{group} {self.live(group)} of {n}" for group, n in written.targets.items())
        why = f"; {self.waits_for}" if self.waits_for else ""
        reason = f"{self.connector.name}: not so after {self.connector.timeout_s:g} s ({there}){why}"
        undo = self._world.scaling.give_up(number, reason)
        log.error("%s: given up, and planned anew from the workers that there are", reason)
        try:
            await self.connector.give_up(undo)
        except ConnectorError as error:
            log.error("%s: what is left of the decision is still asked for: %s", self.connector.name, error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.connector.close()
