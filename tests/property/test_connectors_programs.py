"""Random programs of orders, pods, hand edits and silence: every order has one end, and every decision too.

The invariants watch each event; a platform in memory does what it is asked, late, or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

import pytest
from connector_builders import GROUPS, LIMIT_S, Scaled

from executors.connectors.counting import Counting
from executors.connectors.protocol import ConnectorError, Seen
from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.ids import Role

ROLES = {name: Role(group.role) for name, group in GROUPS.items()}


class Platform:
    """Counts in memory. What it is asked for comes true pod by pod, as the test says."""

    name = "platform"
    watches = True
    roles = ROLES
    poll_s, timeout_s = 10.0, 60.0

    def __init__(self, random: Random) -> None:
        self._random = random
        self.wanted = dict.fromkeys(ROLES, 2)

    async def open(self) -> None: ...

    async def settled(self) -> None:
        await asyncio.sleep(0)

    async def asked(self) -> Mapping[str, int | None]:
        await asyncio.sleep(0)
        return {group: n if self._random.random() < 0.9 else None for group, n in self.wanted.items()}

    async def write(self, change: Mapping[str, int], base: Mapping[str, int]) -> Mapping[str, int]:
        await asyncio.sleep(0)
        if self._random.random() < 0.15:
            raise ConnectorError("it would not")
        targets = {group: max(0, base[group] + by) for group, by in change.items()}
        self.wanted.update(targets)
        return targets

    async def rehearse(self, change: Mapping[str, int], base: Mapping[str, int]) -> str:
        return ""

    async def look(self) -> Seen:
        await asyncio.sleep(0)
        if self._random.random() < 0.2:
            raise ConnectorError("it does not answer")
        return Seen(confirmed=self._random.random() < 0.7, targets=dict(self.wanted))

    async def give_up(self, undo: Mapping[str, int]) -> None:
        for group, by in undo.items():
            self.wanted[group] = max(0, self.wanted[group] + by)

    async def close(self) -> None: ...


class Program:
    def __init__(self, world: Scaled, platform: Platform, random: Random) -> None:
        self.world, self.platform, self.random = world, platform, random
        self.number = 0
        self.drained: set[int] = set()
        self.cancelled: set[int] = set()

    async def step(self) -> None:
        choose = self.random.choice
        group = choose(list(ROLES))
        match choose(["orders", "orders", "pods", "pods", "time", "time", "hand", "crash"]):
            case "orders":
                self.orders(self.random.randint(1, 4))
            case "pods":
                await self.pods(group)
            case "time":
                await self.world.clock.step()
            case "hand":
                self.platform.wanted[group] = self.random.randint(0, 4)
            case "crash":
                there = [one for one in self.world.world.fleet.workers.values() if not one.lost]
                if there and self.random.random() < 0.3:
                    self.world.world.fleet.lose(choose(there), "crashed")

    def orders(self, n: int) -> None:
        """What a planner may order by its view, under one number; cancels sometimes under none."""
        self.number += 1
        view = self.world.world.controller.view
        given: list[Action] = []
        for _ in range(n):
            ready = [w.worker_id for w in view.workers.values() if not w.draining and w.worker_id not in self.drained]
            leaving = [w.worker_id for w in view.workers.values() if w.draining and w.worker_id in self.drained]
            starts = [one for one in view.starting if one not in self.cancelled]
            kind = self.random.choice(["add", "drain", "cancel", "recall"])
            why, number = "random", self.number
            if kind == "add":
                group = self.random.choice(list(ROLES))
                given.append(AddWorker(group=group, role=ROLES[group], reason=why, decision_id=number))
            elif kind == "drain" and ready:
                self.drained.add(one := self.random.choice(ready))
                given.append(DrainWorker(worker_id=one, reason=why, decision_id=number))
            elif kind == "cancel" and starts:
                self.cancelled.add(one := self.random.choice(starts))
                unnumbered = self.random.random() < 0.3
                given.append(CancelStart(worker_id=one, reason=why, decision_id=None if unnumbered else number))
            elif kind == "recall" and leaving:
                self.drained.discard(one := self.random.choice(leaving))
                given.append(RecallWorker(worker_id=one, reason=why, decision_id=number))
        self.world.order(*given)

    async def pods(self, group: str) -> None:
        """The platform moves one pod towards what it was asked for."""
        there = [w for w in self.world.world.fleet.workers.values() if w.group == group and not w.lost]
        staying = [one for one in there if not one.draining]
        if len(there) < self.platform.wanted[group]:
            await self.world.come(group)
        elif len(staying) > self.platform.wanted[group]:
            self.world.go(self.random.choice(staying))


@pytest.mark.parametrize("number", range(40))
def test_every_order_and_every_decision_has_one_end(number: int, seed: int) -> None:
    random = Random(f"{seed}-{number}")

    async def body() -> None:
        world, platform = Scaled(), Platform(random)
        await Counting(world.world, platform, {}).begin()
        program = Program(world, platform, random)
        for _ in range(60):
            await program.step()
        for _ in range(40):  # then nobody orders anything any more
            for group in ROLES:
                await program.pods(group)
            await world.clock.step()
        await world.clock.waiting()
        assert not world.errors, world.errors
        scaling, view = world.world.scaling, world.world.controller.view
        assert not scaling.decisions
        assert not scaling.starts
        assert not view.starting
        assert all(view.pending(role) == 0 for role in ROLES.values())
        assert not [
            one for one in world.world.fleet.workers.values() if one.fenced and not one.lost and not one.draining
        ]
        ends = [end.decision_id for end in world.ends()]
        assert len(ends) == len(set(ends))
        await world.world.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
