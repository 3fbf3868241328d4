"""The live world with mock engines on a virtual clock, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from simulate import engine_settings

from executors.backend import Ask, End
from executors.clock import Order
from executors.deadlines import Deadlines
from executors.engines.mock import MockEngine
from executors.leases import LeaseTerms
from executors.requests import OpenRequest, Stream
from executors.virtual import VirtualClock, run
from executors.world import USUAL, LiveWorld, Watch
from policies.cluster.actions import Action, Dispatch
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import BlocksStored, Event, RequestArrived, RequestMigrated
from policies.cluster.ids import RequestId, Role, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.state import ClusterView
from twin.perf.fixed import FixedLatency

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)


class Log:
    """Every event, with the invariants watching."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._invariants = Invariants()

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self._invariants.observe(event, actions)
        self.events.append(event)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class First:
    """Dispatches to the first live worker that is not excluded."""

    subscribes = frozenset({RequestArrived, RequestMigrated})

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        assert isinstance(event, RequestArrived)
        barred = event.excluded if isinstance(event, RequestMigrated) else ()
        for worker in view.live_for(event.lora):
            if worker.worker_id not in barred:
                to = worker.worker_id
                return (Dispatch(reason="first", request_id=event.request_id, worker_id=to, rule="first"),)
        return ()


class _Ends(Watch):
    def __init__(self, ends: dict[str, End]) -> None:
        self._ends = ends

    def ended(self, request: OpenRequest, end: End) -> None:
        self._ends[request.ask.request_id] = end


class Live:
    """A world under test: its clock, its log and its mock workers."""

    def __init__(
        self,
        clock: VirtualClock,
        policies: Sequence[Policy],
        roles: Sequence[Role] = (Role.MIXED,),
        deadlines: Deadlines = USUAL,
        latency: Any = TOY,
        lease: LeaseTerms | None = None,
        **settings: object,
    ) -> None:
        self.clock = clock
        self.log = Log()
        controller = Controller(policies, self.log)
        tree = ContentTree(16, 16)
        self.ends: dict[str, End] = {}
        self.world = LiveWorld(controller, clock, tree, deadlines=deadlines, lease=lease, watch=_Ends(self.ends))
        self.world.fleet.looks_after = False
        self.world.failed = self._failed  # type: ignore[method-assign]
        self.engines = []
        for number, role in enumerate(roles):
            self.add(number, role, latency, **settings)

    def _failed(self, error: BaseException | None) -> None:
        assert error is not None
        raise error

    def add(self, number: int, role: Role = Role.MIXED, latency: Any = TOY, **settings: object) -> MockEngine:
        wants = self.world.controller.wants(BlocksStored)
        engine = MockEngine(
            f"w{number}",
            engine_settings(**settings),
            latency,
            self.clock,
            worker_id=WorkerId(number),
            role=role,
            tree=self.world.tree,
            tell=self.world.post if wants else None,
        )
        self.engines.append(engine)
        self.world.fleet.join(engine, engine.facts(), f"w{number}", role.value, WorkerId(number))
        return engine

    def ask(self, name: str, tokens: int | Sequence[int], out: int, **more: Any) -> Stream:
        ids = range(1000, 1000 + tokens) if isinstance(tokens, int) else tokens
        return self.world.submit(Ask(request_id=RequestId(name), token_ids=ids, max_tokens=out, model="mock", **more))

    def at(self, at_s: float, what: Callable[[], object]) -> None:
        self.clock.call_at(at_s, Order.ARRIVAL, lambda: (what(), None)[1])

    async def until(self, at_s: float) -> None:
        """Let everything happen up to an instant."""
        reached = asyncio.Event()
        self.clock.call_at(at_s, Order.STEP_START * 2, reached.set)
        await reached.wait()


async def tokens_of(stream: Stream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


def live(
    main: Callable[[Live], Coroutine[Any, Any, Any]], policies: Sequence[Policy] | None = None, **given: Any
) -> Any:
    """Run a test on a virtual clock, and close its world."""

    async def body(clock: VirtualClock) -> Any:
        world = Live(clock, policies if policies is not None else [First()], **given)
        try:
            return await main(world)
        finally:
            await world.world.close()

    return run(body)
