"""Runs rows through the simulated world in memory, for tests: engine settings in, ended requests and events out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from policies.cluster.actions import Action, Dispatch
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, RequestArrived
from policies.cluster.ids import Tier, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.state import ClusterView
from twin.engine.settings import EngineSettings, SglangSettings
from twin.mocker.clock import Clock, Order
from twin.mocker.demand import Demand, Row
from twin.mocker.links import Network
from twin.mocker.sinks import MemorySinks
from twin.mocker.tierplan import TierPlan
from twin.mocker.world import PROMPT, MockWorld, Observation, OpenRequest
from twin.perf.links import Link
from twin.perf.protocol import LatencyModel
from twin.worker_spec import WorkerSpec

KEY_TOKENS = 6
"""Tokens of a hash id in generated traces."""


def engine_settings(**changes: object) -> EngineSettings:
    """vLLM-like settings with the given ones changed."""
    base: dict = {
        "block_size": 16,
        "blocks": 1000,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": None,
        "prefix_caching": True,
        "chunked_prefill": True,
        "exclusive_prefill": False,
        "preemption": "lifo",
    }
    return EngineSettings(**(base | changes))  # type: ignore[arg-type]


def sglang_settings(**changes: object) -> SglangSettings:
    """SGLang settings with the given ones changed; pages of one token."""
    base = engine_settings(block_size=1)
    sizes = {name: getattr(base, name) for name in base.__dataclass_fields__}
    own: dict = {
        "schedule_policy": "fifo",
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "schedule_conservativeness": 1.0,
        "clip_max_new_tokens": 4096,
        "prefill_decode_interval": 0,
    }
    return SglangSettings(**(sizes | own | changes))  # type: ignore[arg-type]


def trace_row(
    row: int, arrival_s: float | None, isl: int, osl: int, keys: list[int] | None = None, **more: object
) -> Row:
    base: dict = {"session_id": None, "delay_s": None, "max_tokens": None, "priority": 0, "lora": None}
    return Row(row=row, request_id=str(row), arrival_s=arrival_s, isl=isl, osl=osl, keys=keys, **(base | more))


class InTurn:
    """Dispatches to the live workers in turn; with `kv_events` it also listens to the caches."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived})

    def __init__(self) -> None:
        self._next = 0

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        assert isinstance(event, RequestArrived)
        worker = view.live[self._next % len(view.live)]
        self._next += 1
        return (Dispatch(request_id=event.request_id, worker_id=worker.worker_id, rule="turn", reason="in turn"),)


Place = int | tuple[int | None, Tier]


class CacheWatcher:
    """Keeps the set of blocks that each worker says it holds, and notes it at every arrival. Orders nothing."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {BlocksStored, BlocksRemoved, BlocksCleared, RequestArrived}
    )

    def __init__(self) -> None:
        self.held: dict[Place, set[tuple[int, int]]] = {}
        self.notes: list[dict[Place, frozenset[tuple[int, int]]]] = []

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, BlocksStored):
            self.held.setdefault(self._place(event), set()).update(self._blocks(event))
        elif isinstance(event, BlocksRemoved):
            gone = self._blocks(event)
            place = self._place(event)
            held = self.held.get(place, set())
            told = event.tier is not Tier.G4_REMOTE  # others may have stored it, who were not heard
            assert gone <= held or not told, "a block was removed that was never stored"
            held -= gone
        elif isinstance(event, BlocksCleared):
            assert event.tier is not None
            self.held.pop((None if event.tier is Tier.G4_REMOTE else event.worker_id, event.tier), None)
        else:
            self.notes.append({w: frozenset(blocks) for w, blocks in self.held.items()})
        return ()

    @staticmethod
    def _place(event: BlocksStored | BlocksRemoved) -> Place:
        """A worker's device, or a tier below it; the remote tier is everybody's."""
        if event.tier is Tier.G1_DEVICE:
            return event.worker_id
        return None if event.tier is Tier.G4_REMOTE else event.worker_id, event.tier

    @staticmethod
    def _blocks(event: BlocksStored | BlocksRemoved) -> set[tuple[int, int]]:
        return {(run.branch.hash, block) for run in event.runs for block in range(run.lo, run.hi)}


class EventLog:
    """A journal sink that keeps what became of requests and workers, checking the clock on the way, and with
    `strict` every invariant."""

    def __init__(self, *, strict: bool = False) -> None:
        self.events: list[tuple] = []
        self._last_s = 0.0
        self._invariants = Invariants() if strict else None

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        if self._invariants is not None:
            self._invariants.observe(event, actions)
        assert event.at_s >= self._last_s, f"the clock went back from {self._last_s} to {event!r}"
        self._last_s = event.at_s
        if not isinstance(event, RequestArrived | BlocksStored | BlocksRemoved):
            self.events.append((type(event).__name__, event.at_s, getattr(event, "request_id", None)))


class Seen:
    """What a simulation brought: ended requests by row with their status, rows of the record, events."""

    def __init__(self, world: MockWorld, sinks: MemorySinks, events: list[tuple], watcher: CacheWatcher) -> None:
        self.watcher = watcher
        self.world = world
        self.sinks = sinks
        self.events = events
        self.ended: dict[int, tuple[OpenRequest, str]] = {}

    def ms(self, what: str) -> list[float | None]:
        """A time of every request, in ms after its arrival, by row: first_token_s, last_token_s, admit_s."""
        out: list[float | None] = []
        for _, (request, _) in sorted(self.ended.items()):
            at_s = getattr(request.sequence, what)
            out.append(None if at_s is None else round((at_s - request.arrival_s) * 1e3, 6))
        return out


class RowsDemand(Demand):
    """Demand from rows in hand."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__([])
        self._rows = rows

    def rows(self) -> Iterable[Row]:
        return iter(self._rows)


def leap_or_not(
    rows: Sequence[Row], setting: EngineSettings, latency: LatencyModel, *, events: bool, lag_s: float = 0.0
) -> Seen:
    """Two workers, once leaping and once step by step: nothing differs, nor what anybody can know of the caches when a
    request arrives. Returns the run with leaps."""
    leapt, stepped = (
        simulate(
            rows,
            [(replace(setting, leap=leap), latency)] * 2,
            key_tokens=KEY_TOKENS,
            kv_events=events,
            observe=Observation(kv_event_lag_s=lag_s),
        )
        for leap in (True, False)
    )
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.events == stepped.events
    assert leapt.watcher.notes == stepped.watcher.notes
    return leapt


class Uncollected(ContextDecorator):
    """Without the cyclic collector, as a replay runs: content is cut by what is still held, and when garbage goes must
    be no part of a run."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()


@Uncollected()
def simulate(
    rows: Sequence[Row],
    engines: Sequence[tuple[EngineSettings, LatencyModel]],
    *,
    key_tokens: int | None = None,
    concurrency: int | None = None,
    policies: Sequence[Policy] | None = None,
    kv_events: bool = False,
    observe: Observation = PROMPT,
    events: Sequence[Event] = (),
    tiers: Sequence[TierPlan] | None = None,
    links: Sequence[Link] = (),
    before: Callable[[MockWorld], None] = lambda world: None,
    strict: bool = False,
) -> Seen:
    """Run to the end and check the books of every pool. `events` come from outside, each at its time; `tiers` below
    each worker's device move blocks over `links`; `before` sees the world before it runs; with `strict` the invariants
    watch."""
    log = EventLog(strict=strict)
    watcher = CacheWatcher()
    watching: tuple[Policy, ...] = (watcher,) if kv_events else ()
    controller = Controller([*watching, *(policies if policies is not None else [InTurn()])], log)
    sinks = MemorySinks()
    ended: dict[int, tuple[OpenRequest, str]] = {}
    world = MockWorld(
        controller=controller,
        workers=[
            WorkerSpec(
                worker_id=WorkerId(i),
                name=f"w{i}",
                settings=settings,
                latency=latency,
                tiers=None if tiers is None else tiers[i],
            )
            for i, (settings, latency) in enumerate(engines)
        ],
        demand=RowsDemand(rows),
        sinks=sinks,
        router="test",
        key_tokens=key_tokens,
        concurrency=concurrency,
        observe=observe,
        network=Network(Clock(), links) if links else None,
        on_end=lambda request, status: ended.update({request.row.row: (request, status)}),
    )
    seen = Seen(world, sinks, log.events, watcher)
    seen.ended = ended
    for event in events:
        world.call(event.at_s, int(Order.FAULT), partial(world.post, event))
    before(world)
    world.run()
    if world.block_tiers is not None:
        world.block_tiers.audit()
    for worker in world.workers.values():
        worker.engine.pool.audit()
        assert worker.engine.pool.active == 0, "blocks are still owned after the last request"
        assert worker.engine.idle
        assert not worker.engine.batch.size
    return seen
