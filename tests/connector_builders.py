"""A live world whose workers come by themselves, on a clock that a test moves: for connectors with real I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, ClassVar

from live_builders import Log
from simulate import engine_settings

from executors.clock import Order
from executors.connectors.build import connect
from executors.connectors.settings import ConnectorSettings
from executors.engines.mock import MockEngine
from executors.live_worker import LiveWorker
from executors.world import LiveWorld
from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import Event
from policies.cluster.ids import Role, WorkerId
from policies.cluster.scaling import GpuBudgetChanged, ScaleDone, ScaleFailed
from policies.cluster.state import ClusterView
from twin.config import WorkerGroup
from twin.perf.fixed import FixedLatency

LIMIT_S = 30.0
GROUPS = {
    "prefill": WorkerGroup(name="prefill", role="prefill", tp=2),
    "decode": WorkerGroup(name="decode", role="decode", tp=1),
}


class _Entry:
    def __init__(self, what: Callable[[], None] | None) -> None:
        self.what = what

    def cancel(self) -> None:
        self.what = None


class SteppedClock:
    """What is due now happens soon; what is due later when the test goes there. I/O takes no time on it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[tuple[float, int, int, _Entry]] = []
        self._count = 0
        self._waits = asyncio.Event()

    def now(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, order: int, what: Callable[[], None]) -> _Entry:
        entry = _Entry(what)
        self._count += 1
        if at_s <= self._now_s:
            asyncio.get_running_loop().call_soon(self._fire, entry)
        else:
            heappush(self._queue, (at_s, order, self._count, entry))
            self._waits.set()
        return entry

    async def waiting(self) -> None:
        """Until somebody has nothing to do but to wait (drains that are cut one day do not count)."""
        while not any(entry.what for _, order, _, entry in self._queue if order == Order.TIMER):
            self._waits.clear()
            await self._waits.wait()
        for _ in range(20):  # what was made ready before
            await asyncio.sleep(0)

    async def step(self) -> float:
        """Go to the next instant at which somebody wakes up, once all wait; the time then."""
        await self.waiting()
        while self._queue:
            at_s, order, _, entry = heappop(self._queue)
            if entry.what is None:
                continue
            self._now_s = max(self._now_s, at_s)
            self._fire(entry)
            if order == Order.TIMER:
                break
        await asyncio.sleep(0)
        return self._now_s

    @staticmethod
    def _fire(entry: _Entry) -> None:
        if entry.what is not None:
            what, entry.what = entry.what, None
            what()


class Ordered:
    """Orders what the test says."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({GpuBudgetChanged})

    def __init__(self) -> None:
        self.next: list[Action] = []

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        orders, self.next = self.next, []
        return orders


class Scaled:
    """A world under test. `come` brings a worker that registered by itself, `go` drains one."""

    def __init__(self, policies: Sequence[Policy] = ()) -> None:
        self.clock = SteppedClock()
        self.log = Log()
        self.planner = Ordered()
        self.world = LiveWorld(Controller([self.planner, *policies], self.log), self.clock, ContentTree(16, 16))
        self.world.fleet.looks_after = False
        self.world.failed = self._failed  # type: ignore[method-assign]
        self.errors: list[BaseException | None] = []
        self._number = 0

    def _failed(self, error: BaseException | None) -> None:
        self.errors.append(error)

    async def connect(self, settings: ConnectorSettings) -> None:
        await connect(self.world, settings, GROUPS)

    async def come(self, group: str) -> LiveWorker:
        role = Role(GROUPS[group].role)
        name, self._number = f"pod-{self._number}", self._number + 1
        latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
        engine = MockEngine(
            name, engine_settings(), latency, self.clock, worker_id=WorkerId(0), role=role, tree=self.world.tree
        )
        return await self.world.fleet.welcome(engine, engine.facts(), name, group)

    def go(self, worker: LiveWorker) -> None:
        self.world.fleet.drain(worker.worker_id)

    def order(self, *orders: Action) -> None:
        """A planner orders these together."""
        self.planner.next = list(orders)
        self.world.post(GpuBudgetChanged(at_s=self.clock.now(), max_gpus=None))

    def add(self, number: int | None, **groups: int) -> None:
        self.order(*(_add(group, number) for group, n in groups.items() for _ in range(n)))

    def drain(self, number: int, *workers: LiveWorker) -> None:
        self.order(*(DrainWorker(worker_id=one.worker_id, reason="too many", decision_id=number) for one in workers))

    def recall(self, number: int, worker: LiveWorker) -> None:
        self.order(RecallWorker(worker_id=worker.worker_id, reason="too few", decision_id=number))

    def cancel(self, worker_id: WorkerId, number: int | None = None) -> None:
        self.order(CancelStart(worker_id=worker_id, reason="not needed", decision_id=number))

    def ends(self) -> list[ScaleDone | ScaleFailed]:
        return [event for event in self.log.events if isinstance(event, ScaleDone | ScaleFailed)]

    def heard(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.log.events if isinstance(event, kind)]

    async def until(self, true: Callable[[], object]) -> None:
        """Let time pass, one wait after the other, until something is so."""
        while not true():
            assert not self.errors, self.errors
            await self.clock.step()
        await self.clock.waiting()


def _add(group: str, number: int | None) -> AddWorker:
    return AddWorker(group=group, role=Role(GROUPS[group].role), reason="too few", decision_id=number)


def scaled(main: Callable[[Scaled], Coroutine[Any, Any, Any]], policies: Sequence[Policy] = ()) -> Any:
    """Run a test in a world, and close it."""

    async def body() -> Any:
        world = Scaled(policies)
        try:
            found = await main(world)
            assert not world.errors, world.errors
            return found
        finally:
            await world.world.close()

    return asyncio.run(asyncio.wait_for(body(), LIMIT_S))
