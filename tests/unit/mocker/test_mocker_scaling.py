"""Workers that come and go on order in the simulated world: what is billed, what becomes of requests, who is told.

The engine is the TOY: 1 ms per prompt token, 10 ms per decode step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from builders import router_settings
from simulate import RowsDemand, engine_settings, trace_row

from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker, SetTimer
from policies.cluster.controller import Controller
from policies.cluster.events import (
    Event,
    RequestInterrupted,
    TimerFired,
    WorkerDraining,
    WorkerLost,
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.scaling import ScaleDone, ScaleFailed, ScaleProgress
from policies.cluster.state import ClusterView
from policies.cluster.traffic import ForwardPass, TrafficWindow
from policies.resilience.drain import DrainRules
from policies.resilience.migration import Migration, MigrationSettings
from policies.router.build import build
from twin.mocker.demand import Row
from twin.mocker.hearing import Hearing, HearingRules
from twin.mocker.scaling import Scaling
from twin.mocker.sinks import MemorySinks
from twin.mocker.starts import Start
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency
from twin.worker_spec import WorkerSpec

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)
GRACE_S = 5.0


def add(decision_id: int) -> AddWorker:
    return AddWorker(reason="more", group="pool", role=Role.MIXED, decision_id=decision_id)


def cancel(worker_id: WorkerId, decision_id: int) -> CancelStart:
    return CancelStart(reason="enough", worker_id=worker_id, decision_id=decision_id)


def drain(worker_id: WorkerId, decision_id: int, deadline_s: float | None = None) -> DrainWorker:
    return DrainWorker(reason="less", worker_id=worker_id, decision_id=decision_id, deadline_s=deadline_s)


def recall(worker_id: WorkerId, decision_id: int) -> RecallWorker:
    return RecallWorker(reason="stay", worker_id=worker_id, decision_id=decision_id)


class Orders:
    """Orders what it was told to, when it was told to."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({WorkerUp, TimerFired})

    def __init__(self, orders: Sequence[tuple[float, Sequence[Action]]]) -> None:
        self._orders = orders
        self._begun = False

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if not self._begun:
            self._begun = True
            return [SetTimer(name=f"order {i}", due_s=at_s, reason="") for i, (at_s, _) in enumerate(self._orders)]
        if isinstance(event, TimerFired) and event.name.startswith("order "):
            return self._orders[int(event.name.split()[1])][1]
        return ()


class AnyOrders:
    """Orders drawn by chance: whatever is possible of the workers that it sees."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({WorkerUp, TimerFired})

    def __init__(self, seed: int, at_s: Sequence[float]) -> None:
        self._rng = random.Random(seed)
        self._at_s = at_s
        self._begun = False
        self._decisions = 0
        self._called: set[WorkerId] = set()

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if not self._begun:
            self._begun = True
            return [SetTimer(name=f"order {i}", due_s=at_s, reason="") for i, at_s in enumerate(self._at_s)]
        if not (isinstance(event, TimerFired) and event.name.startswith("order ")):
            return ()
        self._decisions += 1
        n, rng = self._decisions, self._rng
        ready = [w.worker_id for w in view.workers.values() if not w.draining]
        leaving = [w.worker_id for w in view.workers.values() if w.draining]
        starting = [one for one in view.starting if one not in self._called]
        kind = rng.randrange(4)
        if kind == 0 and len(ready) > 1:
            return [drain(rng.choice(ready), n, rng.choice([None, 0.05, 1.0]))]
        if kind == 1 and leaving:
            return [recall(rng.choice(leaving), n)]
        if kind == 2 and starting:
            one = rng.choice(starting)
            self._called.add(one)
            return [cancel(one, n)]
        return [add(n) for _ in range(rng.randint(1, 2))]


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.invariants = Invariants()

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.events.append(event)
        self.invariants.observe(event, actions)

    def told(self, *kinds: type[Event]) -> list[tuple[str, float]]:
        return [(type(event).__name__, round(event.at_s, 9)) for event in self.events if isinstance(event, kinds)]


class Pool:
    """Makes workers like the first one."""

    def __init__(self, first: WorkerSpec, startup_s: float) -> None:
        self._first, self._startup_s = first, startup_s

    def make(self, group: str, worker_id: WorkerId) -> WorkerSpec:
        return replace(self._first, worker_id=worker_id, name=f"{group}-{worker_id}", startup_s=self._startup_s)


class Fails:
    """Every start fails in the end."""

    def extra_s(self, worker_id: WorkerId) -> float:
        return 0.0

    def fails(self, worker_id: WorkerId) -> bool:
        return True

    def after_failure(self, start: Start) -> None:
        raise AssertionError("a start that somebody ordered is his affair")


class Listener:
    """Subscribes to all that a planner hears."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({TrafficWindow, ForwardPass})

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        return ()


class Ran:
    def __init__(self, world: MockWorld, log: Log, sinks: MemorySinks) -> None:
        self.world, self.log, self.sinks = world, log, sinks

    @property
    def rows(self) -> list[tuple[object, ...]]:
        return [row for _, row in sorted(self.sinks.requests.items())]

    @property
    def status(self) -> list[object]:
        return [row[6] for row in self.rows]

    def billed_s(self, worker_id: WorkerId, end_s: float) -> float:
        assert self.world.scaling is not None
        stay = self.world.scaling.stays[worker_id]
        return (end_s if stay.gone_s is None else stay.gone_s) - stay.ordered_s


def go(
    rows: Sequence[Row],
    orders: Sequence[tuple[float, Sequence[Action]]] | AnyOrders,
    *,
    workers: int = 1,
    startup_s: float = 120.0,
    migrations: int = 3,
    timeout_s: float = 900.0,
    fails: bool = False,
    hearing: HearingRules | None = None,
    leap: bool = True,
) -> Ran:
    settings = engine_settings(leap=leap)
    log, sinks = Log(), MemorySinks()
    specs = [
        WorkerSpec(worker_id=WorkerId(i), name=f"pool-{i}", settings=settings, latency=TOY) for i in range(workers)
    ]
    planner = orders if isinstance(orders, AnyOrders) else Orders(orders)
    router = build(router_settings("least-loaded", block_size=settings.block_size))
    policies = [router, Migration(MigrationSettings(limit=migrations, max_seq_len=None)), planner]
    if hearing is not None:
        policies.append(Listener())
    world = MockWorld(
        controller=Controller(policies, log),  # type: ignore[arg-type]
        workers=specs,
        demand=RowsDemand(rows),
        sinks=sinks,
        router="least-loaded",
        key_tokens=16,
    )
    world.scaling = Scaling(
        world,
        Pool(specs[0], startup_s),
        rules=DrainRules(grace_s=GRACE_S, timeout_s=timeout_s),
        cuts=migrations > 0,
    )
    if fails:
        world.starts.hinder(Fails())
    if hearing is not None:
        Hearing(world, hearing).start()
    world.run()
    world.audit()
    log.invariants.finish()
    log.invariants.audit(world.controller.view)
    return Ran(world, log, sinks)


def row(number: int, at_s: float, isl: int = 100, osl: int = 20) -> Row:
    return trace_row(number, at_s, isl, osl, [1000 * number + i for i in range(isl // 16 + 1)])


def test_w1_a_worker_is_billed_from_its_order_to_its_end() -> None:
    """Up at 0, ready at 120, drained from 300 on, gone when its grace is over."""
    ran = go([row(0, 400)], [(0.0, [add(1)]), (300.0, [drain(W1, 2)])])
    assert ran.billed_s(W1, 400) == 305
    assert ran.log.told(WorkerStarting, WorkerUp, WorkerDraining, WorkerLost, ScaleProgress, ScaleDone) == [
        ("WorkerUp", 0),
        ("WorkerStarting", 0),
        ("ScaleProgress", 0),
        ("WorkerUp", 120),
        ("ScaleDone", 120),
        ("WorkerDraining", 300),
        ("ScaleProgress", 300),
        ("WorkerLost", 305),
        ("ScaleDone", 305),
    ]


def test_w2_a_start_that_is_called_off_was_never_ready() -> None:
    ran = go([row(0, 200)], [(0.0, [add(1)]), (60.0, [cancel(W1, 2)])])
    assert ran.billed_s(W1, 200) == 60
    assert ran.log.told(WorkerStartCancelled, ScaleDone) == [
        ("WorkerStartCancelled", 60),
        ("ScaleDone", 60),
        ("ScaleDone", 60),
    ]
    assert W1 not in ran.world.workers


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_w3_what_is_left_at_the_end_of_a_drain_goes_on_elsewhere(leap: bool) -> None:
    """One answer of 1000 s on each worker; who drains has 50 s, and its answer is finished on the other one."""
    rows = [row(0, 0, 100, 10_000), row(1, 0, 100, 10_000)]
    ran = go(rows, [(1.0, [drain(W1, 1)])], workers=2, timeout_s=50.0, leap=leap)
    assert ran.status == ["completed", "completed"]
    assert [made[14] for made in ran.rows] == [10_000, 10_000]
    assert sorted(migrations for _, migrations in [(r[0], r[17]) for r in ran.rows]) == [0, 1]  # type: ignore[type-var]
    assert ran.log.told(WorkerLost) == [("WorkerLost", 56)]


def test_w3_without_migration_a_drain_takes_as_long_as_it_takes() -> None:
    rows = [row(0, 0, 100, 10_000), row(1, 0, 100, 10_000)]
    ran = go(rows, [(1.0, [drain(W1, 1)])], workers=2, timeout_s=50.0, migrations=0)
    assert ran.status == ["completed", "completed"]
    assert ran.log.told(RequestInterrupted) == []
    (lost,) = [at_s for _, at_s in ran.log.told(WorkerLost)]
    assert lost == pytest.approx(100.09)  # 100 ms of prompt, 9999 steps of 10 ms


def test_w4_who_starts_is_called_off_before_anybody_who_is_ready_drains() -> None:
    ran = go([row(0, 200)], [(0.0, [add(1), add(1)]), (100.0, [cancel(W2, 2)])])
    assert ran.billed_s(W2, 200) == 100
    assert ran.log.told(ScaleDone) == [("ScaleDone", 100), ("ScaleDone", 120)]


def test_w5_a_start_that_fails_is_billed_and_said() -> None:
    ran = go([row(0, 200)], [(0.0, [add(1)])], fails=True)
    assert ran.billed_s(W1, 200) == 120
    assert ran.log.told(WorkerStartFailed, ScaleFailed, ScaleDone) == [("WorkerStartFailed", 120), ("ScaleFailed", 120)]


def test_who_drains_may_be_asked_to_stay() -> None:
    rows = [row(0, 0, 100, 1000), row(1, 0, 100, 1000), row(2, 5), row(3, 5)]
    ran = go(rows, [(1.0, [drain(W1, 1)]), (3.0, [recall(W1, 2)])], workers=2)
    assert ran.log.told(WorkerRecalled) == [("WorkerRecalled", 3)]
    assert ran.log.told(ScaleDone) == [("ScaleDone", 3), ("ScaleDone", 3)]
    assert ran.status == ["completed"] * 4
    assert not ran.world.gone_s


def test_nobody_waits_for_starts_when_nobody_is_left() -> None:
    """A run ends with its last start, and no timer of a planner keeps it going."""
    ran = go([row(0, 0)], [(0.0, [add(1)])], hearing=HearingRules(window_s=10.0, pass_s=1.0))
    assert max(event.at_s for event in ran.log.events) == 120
    assert sum(isinstance(event, ForwardPass) for event in ran.log.events) < 5


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("migrations", [0, 5])
def test_nothing_is_lost_whatever_is_ordered(seed: int, migrations: int) -> None:
    """Every request completes with every token, and leaping changes no instant of any of them."""
    rng = random.Random(seed)
    rows = [row(i, 0.1 * rng.randrange(100), rng.randint(1, 300), rng.randint(1, 400)) for i in range(30)]
    rows = [replace_row(one, i) for i, one in enumerate(sorted(rows, key=lambda one: one.arrival_s or 0.0))]
    at_s = [0.25 * rng.randrange(1, 60) for _ in range(15)]
    hearing = HearingRules(window_s=2.0, pass_s=0.5)
    runs = [
        go(
            rows,
            AnyOrders(seed, at_s),
            workers=2,
            startup_s=1.5,
            migrations=migrations,
            timeout_s=0.5,
            hearing=hearing,
            leap=leap,
        )
        for leap in (True, False)
    ]
    for ran in runs:
        assert ran.status == ["completed"] * len(rows)
        assert [made[14] for made in ran.rows] == [one.osl for one in rows]
    assert runs[0].rows == runs[1].rows
    told = [[e for e in ran.log.events if isinstance(e, ForwardPass | TrafficWindow)] for ran in runs]
    assert told[0] == told[1]
    assert told[0]


def replace_row(one: Row, number: int) -> Row:
    return one._replace(row=number, request_id=str(number))


def test_what_is_heard_is_what_was() -> None:
    """Two windows of 10 s and the requests in them; the pass of a second is told in the next."""
    rows = [row(0, 0.5, 100, 30), row(1, 12.0, 300, 10), row(2, 13.0, 200, 10)]
    ran = go(rows, [(25.0, [])], hearing=HearingRules(window_s=10.0, pass_s=1.0))
    windows = [event for event in ran.log.events if isinstance(event, TrafficWindow)]
    assert [(w.t0_s, w.t1_s, w.num_req, w.isl, w.osl, w.completed) for w in windows[:2]] == [
        (0.0, 10.0, 1.0, 100.0, 30.0, 1),
        (10.0, 20.0, 2.0, 250.0, 10.0, 2),
    ]
    assert windows[0].ttft_s == pytest.approx(0.1)
    assert windows[0].itl_s == pytest.approx(0.01)
    assert windows[0].kv_hit_rate == 0.0
    passes = [event for event in ran.log.events if isinstance(event, ForwardPass)]
    assert [one.at_s for one in passes[:3]] == [2.0, 3.0, 4.0]
    assert [one.counter for one in passes] == list(range(1, len(passes) + 1))
    assert all(one.wall_time_s == 0.0 for one in passes[1:10])  # idle, and said so
    (busy,) = [one for one in passes if one.at_s == 14.0]  # of 13.0: a prompt of 200 tokens, alone
    assert busy.scheduled.sum_prefill_tokens == 200
    assert busy.wall_time_s == pytest.approx(0.2)


def test_nobody_who_plans_hears_of_nobody_before_its_time() -> None:
    ran = go([row(0, 0.5), row(1, 30.0)], [(31.0, [])], hearing=HearingRules(window_s=10.0, pass_s=1.0, lag_s=2.5))
    windows = [event for event in ran.log.events if isinstance(event, TrafficWindow)]
    assert [(w.t1_s, w.at_s) for w in windows[:2]] == [(10.0, 12.5), (20.0, 22.5)]
    assert next(event.at_s for event in ran.log.events if isinstance(event, ForwardPass)) == 4.5
