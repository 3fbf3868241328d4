"""Random programs of arrivals, cancellations, losses, returns, drains, hangs, throttles and partitions over several
workers.

Whatever the program: every invariant holds at each event, each request ends exactly once, nothing leaks, no token is
lost or made twice, and leaping changes nothing that anybody can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import CacheWatcher, EventLog, RowsDemand, Uncollected, engine_settings, sglang_settings, trace_row
from test_engine_against_naive import KEY_TOKENS, traces
from test_engine_sglang import engines as sglang_engines
from test_engine_trtllm_and_ranks import trtllm_settings

from policies.cluster.actions import Action
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import Event, RequestFinished, RequestMigrated, WorkerLost
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.state import ClusterView
from policies.resilience.breaker import Breaker, BreakerSettings
from policies.resilience.drain import DrainRules
from policies.resilience.health import Canaries, CanarySettings
from policies.resilience.migration import Migration, MigrationSettings
from policies.router.build import build
from policies.router.queue import QueueSettings
from twin.engine.settings import EngineSettings
from twin.engine.ticks import instant
from twin.engine.trtllm import TrtllmSettings
from twin.mocker.churn import Loss
from twin.mocker.clock import Clock, Order
from twin.mocker.demand import Row
from twin.mocker.links import Network
from twin.mocker.sinks import MemorySinks
from twin.mocker.tierplan import TierPlan
from twin.mocker.worker import MockWorker
from twin.mocker.world import MockWorld, Observation
from twin.perf.fixed import FixedLatency
from twin.perf.links import Link
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel
from twin.perf.slowed import Slowed
from twin.worker_spec import WorkerSpec

EXAMPLES = examples(300)
FIXED = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)


def guards() -> tuple[Canaries, Breaker]:
    """Canaries and breakers that are quick to act."""
    breaker = BreakerSettings(failures=2, share=0.5, requests=4, window_s=1.0, open_s=0.05)
    return Canaries(CanarySettings(idle_s=0.03, timeout_s=0.02)), Breaker(breaker)


@dataclass(frozen=True)
class Blow:
    """Something that happens to a worker or a request; it is passed over where it cannot happen."""

    at_ms: float
    kind: str
    target: int
    delay_ms: float = 0.0

    def later_s(self, ms: float = 0.0) -> float:
        """The instant so many ms after it."""
        return instant((self.at_ms + ms) / 1e3)

    def act(self, world: MockWorld) -> None:
        churn, worker_id = world.churn, WorkerId(self.target % len(world.specs))
        worker = world.workers[worker_id]
        lone = world.partitions.is_cut_off(worker_id)
        busy_with_itself = worker.down or worker.hung or lone or worker_id in churn.draining
        match self.kind:
            case "cancel":
                churn.cancel(RequestId(str(self.target)))
            case "kill" if not worker.down:
                churn.lose(worker_id, "killed", self.delay_ms / 1e3)
            case "restore" if worker.down:
                churn.restore(worker_id)
            case "drain" if not busy_with_itself:
                churn.drain(worker_id, self._drain_rules, known_after_s=self.delay_ms / 1e3)
            case "drain" if worker_id in churn.draining:  # a second signal, or a recall
                churn.recall(worker_id) if self.delay_ms == 10.0 else churn.drain(worker_id)
            case "hang" if not busy_with_itself:
                churn.hang(worker)
                world.call(self.later_s(20 + self.delay_ms), Order.FAULT, lambda: _go_on(world, worker_id))
            case "cut" | "island" if not busy_with_itself:
                self._cut_off(world, worker)
            case "part" if world.handoffs is not None or world.block_tiers is not None:
                self._part(world, worker_id)
            case "errors":
                failing = churn.failing.setdefault(worker_id, {})
                failing["blow"] = lambda request: request.row.row % 2 == 0
            case "slow" if not worker.down:
                churn.pace(worker, Slowed(world.specs[worker_id].latency, 2.5))
            case "usual" if not worker.down:
                churn.pace(worker, world.specs[worker_id].latency)

    @property
    def _drain_rules(self) -> DrainRules:
        """None, or the second time with a grace and a bound."""
        return DrainRules(grace_s=self.delay_ms / 2e3, timeout_s=self.delay_ms / 1e3 if self.delay_ms else None)

    def _cut_off(self, world: MockWorld, worker: MockWorker) -> None:
        """For 20, 30 or 65 ms, or for good; the cluster takes it for lost after 35 ms."""
        name = f"{self.kind} {self.at_ms} {self.target}"

        def give_up() -> None:
            if name in world.wires.parts and not worker.down:
                world.churn.take_for_lost(worker, "not heard of", Loss())

        world.partitions.cut_off(name, worker)
        world.call(self.later_s(35), Order.FAULT, give_up)
        if self.kind == "cut":
            over_s = self.later_s(20 + self.delay_ms)
            world.call(over_s, Order.TRANSFER_DONE, lambda: world.partitions.reconnect(name, worker.worker_id))

    def _part(self, world: MockWorld, worker_id: WorkerId) -> None:
        """A worker does not reach the others, nor they it, for 20, 30 or 65 ms; all reach the cluster."""
        name = f"part {self.at_ms} {self.target}"
        if name in world.wires.parts:
            return
        world.partitions.part(name, frozenset((worker_id,)), frozenset(world.specs) - {worker_id})
        world.call(self.later_s(20 + self.delay_ms), Order.TRANSFER_DONE, lambda: world.partitions.join(name))


def _go_on(world: MockWorld, worker_id: WorkerId) -> None:
    worker = world.workers[worker_id]
    if worker.hung and not worker.down:
        worker.resume()


KINDS = ["cancel", "cancel", "kill", "restore", "restore", "drain", "hang", "slow", "usual", "errors"]
KINDS += ["cut", "cut", "island", "part"]


@st.composite
def blows(draw: st.DrawFn, ties: bool) -> list[Blow]:
    """Up to ten, on the same grid of times as arrivals and step ends if `ties`; in the end everybody is back."""
    step_ms = 5 if ties else 3.337
    found = [
        Blow(
            draw(st.integers(0, 120)) * step_ms,
            draw(st.sampled_from(KINDS)),
            draw(st.integers(0, 11)),
            draw(st.sampled_from([0.0, 0.0, 10.0, 45.0])),
        )
        for _ in range(draw(st.integers(1, 10)))
    ]
    return found


@st.composite
def engine_options(draw: st.DrawFn) -> dict:
    chunked = draw(st.booleans())
    exclusive = not chunked and draw(st.booleans())
    return {
        "block_size": draw(st.sampled_from([2, 4, 5])),
        "blocks": draw(st.integers(12, 40)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 8])),
        "max_num_batched_tokens": 4096 if exclusive else draw(st.sampled_from([8, 16, 64, 4096])),
        "prefix_caching": draw(st.booleans()),
        "chunked_prefill": chunked,
        "exclusive_prefill": exclusive,
        "preemption": draw(st.sampled_from(["lifo", "fifo"])),
    }


class Watched(EventLog):
    """Every invariant at every event, and tokens told of at the end of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.invariants = Invariants()
        self.finished: dict[RequestId, int] = {}

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        super().note(event, actions)
        self.invariants.observe(event, actions)
        if isinstance(event, RequestFinished):
            self.finished[event.request_id] = event.output_tokens


class Caches(CacheWatcher):
    """What is cached where, noted whenever a request is sent, for the first time or again."""

    subscribes: ClassVar[frozenset[type[Event]]] = CacheWatcher.subscribes | {RequestMigrated, WorkerLost}

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, WorkerLost):
            own = (event.worker_id, *((event.worker_id, tier) for tier in Tier))
            for place in own:
                self.held.pop(place, None)
            return ()
        return super().decide(event, view)


@Uncollected()
def perform(
    rows: list[Row],
    program: list[Blow],
    engine: EngineSettings,
    latency: LatencyModel,
    mode: str,
    *,
    workers: int = 3,
    limit: int = 2,
    lag_s: float = 0.0,
    tiers: Sequence[TierPlan] | None = None,
    links: Sequence[Link] = (),
    guarded: bool = False,
    queue: QueueSettings | None = None,
    in_engine_words: bool = False,
    listeners: Sequence[Policy] = (),
    before: Callable[[MockWorld, Policy], None] = lambda world, router: None,
) -> tuple[MemorySinks, Watched, Caches]:
    """Run a program to its end and check what must hold then. `in_engine_words`: mode kv listens to engines' events,
    which are told again in no time. `listeners` stand in front of the router; `before` sees the world before it runs.
    """
    index = "engine" if in_engine_words else "simulated"
    router = build(router_settings(mode, block_size=engine.block_size, index=index, queue=queue))
    watched, sinks = Watched(), MemorySinks()
    caches = Caches()
    listens = [caches] if mode == "kv" and not in_engine_words else []
    migration = Migration(MigrationSettings(limit=limit, max_seq_len=None))
    controller = Controller([*listens, *listeners, router, migration, *(guards() if guarded else ())], watched)
    world = MockWorld(
        controller=controller,
        workers=[
            WorkerSpec(
                worker_id=WorkerId(i),
                name=f"w{i}",
                settings=engine,
                latency=latency,
                tiers=None if tiers is None else tiers[i],
            )
            for i in range(workers)
        ],
        demand=RowsDemand(rows),
        sinks=sinks,
        router=mode,
        key_tokens=KEY_TOKENS,
        observe=Observation(
            kv_event_lag_s=lag_s, engine_events=in_engine_words, kv_dump_block_s=0.0, kv_dump_bytes_per_s=1e18
        ),
        network=Network(Clock(), links) if links else None,
    )
    for blow in program:
        world.call(blow.later_s(), Order.FAULT, lambda blow=blow: blow.act(world))  # type: ignore[misc]
    before(world, router)
    world.run()
    world.audit()
    watched.invariants.finish()
    watched.invariants.audit(controller.view)
    _check(rows, sinks, watched, cuts=isinstance(engine, TrtllmSettings))
    counters = router.counters() if hasattr(router, "counters") else {}
    assert counters.get("open_bookings", 0) == 0
    assert counters.get("unknown_free", 0) == 0
    return sinks, watched, caches


def _check(rows: list[Row], sinks: MemorySinks, watched: Watched, *, cuts: bool) -> None:
    """Each request ended once, and what completed has all its tokens, unless the engine `cuts` what cannot fit."""
    assert sinks.requests.keys() == {row.row for row in rows}
    for row in rows:
        record = sinks.requests[row.row]
        status, first_s, last_s, outputs, migrations = record[6], record[12], record[13], record[14], record[17]
        assert status in ("completed", "failed", "cancelled", "rejected")
        assert isinstance(outputs, int)
        assert isinstance(migrations, int)
        assert migrations <= 2
        if status == "completed":
            assert outputs == watched.finished[RequestId(row.request_id)]
            assert outputs == row.osl or (cuts and outputs < row.osl)
        else:
            assert outputs < row.osl or status == "failed"
        assert (first_s is None) == (outputs == 0)
        assert (last_s is None) == (outputs == 0)
        if outputs:
            assert row.arrival_s is not None
            assert row.arrival_s <= first_s <= last_s  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["round-robin", "least-loaded", "kv"])
@EXAMPLES
@given(traces(), engine_options(), blows(ties=True), st.sampled_from([0.0, 0.004]), st.booleans())
def test_leaping_changes_nothing_under_faults_with_ties(
    mode: str, rows: list[Row], options: dict, program: list[Blow], lag_s: float, guarded: bool
) -> None:
    _same(rows, program, engine_settings(**options), FIXED, mode, lag_s, guarded=guarded)


@EXAMPLES
@given(traces(), engine_options(), blows(ties=False), st.sampled_from(["power-of-two", "kv"]))
def test_leaping_changes_nothing_under_faults_where_context_costs(
    rows: list[Row], options: dict, program: list[Blow], mode: str
) -> None:
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    _same(rows, program, engine_settings(**options), latency, mode, 0.0)


@EXAMPLES
@given(traces(), engine_options(), blows(ties=True), st.sampled_from(["guaranteed_no_evict", "max_utilization"]))
def test_leaping_changes_nothing_under_faults_of_trtllm(
    rows: list[Row], options: dict, program: list[Blow], policy: str
) -> None:
    _same(rows, program, trtllm_settings(options, policy), FIXED, "kv", 0.0)


@EXAMPLES
@given(traces(), sglang_engines(), blows(ties=True), st.sampled_from(["kv", "least-loaded"]))
def test_leaping_changes_nothing_under_faults_of_sglang(
    rows: list[Row], options: dict, program: list[Blow], mode: str
) -> None:
    _same(rows, program, sglang_settings(**options), FIXED, mode, 0.0)


def _same(
    rows: list[Row],
    program: list[Blow],
    engine: EngineSettings,
    latency: LatencyModel,
    mode: str,
    lag_s: float,
    *,
    guarded: bool = False,
) -> None:
    leaping, told, known = perform(rows, program, engine, latency, mode, lag_s=lag_s, guarded=guarded)
    steps = replace(engine, leap=False)
    stepping, literally, known_then = perform(rows, program, steps, latency, mode, lag_s=lag_s, guarded=guarded)
    assert leaping.requests == stepping.requests
    assert leaping.decisions == stepping.decisions
    assert told.events == literally.events
    assert known.notes == known_then.notes


@st.composite
def short_cuts(draw: st.DrawFn) -> list[Blow]:
    """Partitions that are over before the cluster takes anybody for lost."""
    return [
        Blow(draw(st.integers(0, 120)) * 5, "cut", draw(st.integers(0, 2)), draw(st.sampled_from([0.0, 10.0])))
        for _ in range(draw(st.integers(1, 8)))
    ]


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
@EXAMPLES
@given(traces(), st.one_of(engine_options().map(lambda o: engine_settings(**o)),
                           sglang_engines().map(lambda o: sglang_settings(**o))), short_cuts())  # fmt: skip
def test_gaps_add_up_to_the_streams_that_clients_see(
    leap: bool, rows: list[Row], engine: EngineSettings, program: list[Blow]
) -> None:
    """Nothing is lost or told twice: as many gaps as tokens behind the first ones, as long together as the streams."""
    sinks, _, _ = perform(rows, program, replace(engine, leap=leap), FIXED, "round-robin")
    gaps, gaps_s = 0, 0.0
    for cells in sinks.steps:
        steps, tokens, (g0, g1, g2) = cells[4], cells[14], cells[15:18]
        gaps += steps * tokens  # type: ignore[operator]
        gaps_s += sum(tokens * (g0 + g1 * j + g2 * j * j) for j in range(steps))  # type: ignore[operator, arg-type]
    records = [record for record in sinks.requests.values() if record[14]]
    assert gaps == sum(record[14] - 1 for record in records)  # type: ignore[operator]
    assert gaps_s == pytest.approx(sum(record[13] - record[12] for record in records), abs=1e-6)  # type: ignore[operator, misc]


def test_a_thousand_cancellations_under_load_leave_nothing_behind() -> None:
    """B8: gauges, bookings and blocks are zero at the end (the audits of `perform`), and nobody is left waiting."""
    rows = [trace_row(n, n * 0.004, 40 + n % 50, 5 + n % 40, [n % 7, *range(100, 120)]) for n in range(2000)]
    program = [Blow(n * 8.0 + 4 + (n * 37) % 300, "cancel", 2 * n) for n in range(1000)]
    engine = engine_settings(blocks=400, max_num_seqs=16)
    sinks, _, _ = perform(rows, program, engine, FIXED, "kv", workers=4)
    statuses = [record[6] for record in sinks.requests.values()]
    assert statuses.count("cancelled") > 900
    assert statuses.count("cancelled") + statuses.count("completed") == 2000


def test_a_request_that_was_sent_again_and_preempted_keeps_the_count_of_its_pool() -> None:
    """Found among 10,000 programs: what it had generated before and after the loss are one piece of content."""
    lengths = [(41, 25, [0, 1, 2, *range(1000, 1004)]), (1, 1, [1020]), (1, 20, [1040]), (1, 1, [1060])]
    lengths += [(13, 5, [1080, 1081, 1082])]
    rows = [trace_row(n, 0.0, isl, osl, keys) for n, (isl, osl, keys) in enumerate(lengths)]
    program = [Blow(0, "kill", 1), Blow(0, "cancel", 0), Blow(245, "kill", 0)]
    options = {"block_size": 4, "blocks": 21, "max_num_seqs": 2, "preemption": "fifo"}
    engine = engine_settings(chunked_prefill=False, exclusive_prefill=True, **options)
    sinks, _, _ = perform(rows, program, engine, FIXED, "round-robin")
    assert [record[6] for _, record in sorted(sinks.requests.items())].count("completed") == 5
