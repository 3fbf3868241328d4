"""Workers that die, hang, slow down, drain and come back: figures that a person can check by hand.

The engine is the TOY: 1 ms per prompt token, 10 ms per decode step, a step is one or the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from builders import router_settings
from simulate import CacheWatcher, RowsDemand, engine_settings, trace_row

from policies.cluster.actions import Action
from policies.cluster.controller import Controller
from policies.cluster.events import (
    BlocksStored,
    Event,
    RequestArrived,
    RequestInterrupted,
    RequestMigrated,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.state import ClusterView
from policies.resilience.drain import DrainRules
from policies.resilience.migration import Migration, MigrationSettings
from policies.router.build import build
from twin.mocker.churn import Churn
from twin.mocker.clock import Order
from twin.mocker.demand import Row
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld, Observation
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel
from twin.perf.slowed import Slowed
from twin.worker_spec import WorkerSpec

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
W0, W1 = WorkerId(0), WorkerId(1)


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.invariants = Invariants()

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.events.append(event)
        self.invariants.observe(event, actions)

    def times(self, *kinds: type[Event]) -> list[tuple[str, float]]:
        return [(type(event).__name__, event.at_s) for event in self.events if isinstance(event, kinds)]


class Done:
    """A finished run: rows of the record, steps, events."""

    def __init__(self, sinks: MemorySinks, log: Log, world: MockWorld) -> None:
        self.sinks, self.log, self.world = sinks, log, world

    def status(self) -> list[object]:
        return [row[6] for _, row in sorted(self.sinks.requests.items())]

    def ms(self, column: int) -> list[float | None]:
        found = [row[column] for _, row in sorted(self.sinks.requests.items())]
        return [None if at_s is None else round(float(at_s) * 1e3, 6) for at_s in found]  # type: ignore[arg-type]


FIRST, LAST = 12, 13


def go(
    rows: Sequence[Row],
    acts: Sequence[tuple[float, Any]],
    *,
    workers: int = 2,
    limit: int = 1,
    mode: str = "round-robin",
    latency: LatencyModel = TOY,
    startup_s: float = 0.0,
    observe: Observation = Observation(),  # noqa: B008
    listen: Sequence[Any] = (),
    key_tokens: int = 16,
    **engine: object,
) -> Done:
    """Run to the end with `acts`: (ms, what to do with the churn), audited."""
    options = {"chunked_prefill": False, "exclusive_prefill": True} | engine
    settings = engine_settings(**options)
    log, sinks = Log(), MemorySinks()
    router = build(router_settings(mode, block_size=settings.block_size))
    migration = Migration(MigrationSettings(limit=limit, max_seq_len=None))
    world = MockWorld(
        controller=Controller([*listen, router, migration], log),
        workers=[
            WorkerSpec(worker_id=WorkerId(i), name=f"w{i}", settings=settings, latency=latency, startup_s=startup_s)
            for i in range(workers)
        ],
        demand=RowsDemand(rows),
        sinks=sinks,
        router=mode,
        key_tokens=key_tokens,
        observe=observe,
    )
    for at_ms, act in acts:
        world.call(at_ms / 1e3, Order.FAULT, lambda act=act: act(world.churn))  # type: ignore[misc]
    world.run()
    world.audit()
    log.invariants.finish()
    log.invariants.audit(world.controller.view)
    return Done(sinks, log, world)


def row(number: int, at_ms: float, isl: int = 100, osl: int = 20) -> Row:
    return trace_row(number, at_ms / 1e3, isl, osl, [1000 * number + i for i in range(isl // 16 + 1)])


BOTH = pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])


# ---------------------------------------------------------------- slow, hanging


@BOTH
def test_a_slow_worker_takes_longer_from_the_next_step_on(leap: bool) -> None:
    """Tokens at 100, 110, ..., 160; the step that runs at 165 ends at 170; then 13 left, 3 of them to 245 at 25 ms."""

    def slow(churn: Churn) -> None:
        churn.pace(churn._world.workers[W0], Slowed(TOY, 2.5))

    def usual(churn: Churn) -> None:
        churn.pace(churn._world.workers[W0], TOY)

    done = go([row(0, 0)], [(165, slow), (240, usual)], leap=leap)
    assert done.ms(FIRST) == [100]
    # 8 tokens by 170, steps of 25 ms: 195, 220, 245 (begun before 240), then 9 of 10 ms
    assert done.ms(LAST) == [335]


@BOTH
def test_a_slow_worker_slows_prompts_too(leap: bool) -> None:
    def slow(churn: Churn) -> None:
        churn.pace(churn._world.workers[W0], Slowed(TOY, 3.0))

    done = go([row(0, 50)], [(10, slow)], leap=leap, workers=1)
    assert done.ms(FIRST) == [350]
    assert done.ms(LAST) == [350 + 19 * 30]


@BOTH
def test_a_worker_that_hung_goes_on_where_it_was(leap: bool) -> None:
    """The step that runs at 165 would end at 170; nobody hears of it before 400."""

    def resume(churn: Churn) -> None:
        churn._world.workers[W0].resume()

    done = go([row(0, 0)], [(165, lambda c: c.hang(c._world.workers[W0])), (400, resume)], leap=leap)
    assert done.ms(LAST) == [400 + 12 * 10]
    short = go([row(0, 0)], [(161, lambda c: c.hang(c._world.workers[W0])), (165, resume)], leap=leap)
    assert short.ms(LAST) == [290], "it was over before the step was: nothing is late"


@BOTH
def test_a_hanging_worker_takes_requests_and_answers_later(leap: bool) -> None:
    def resume(churn: Churn) -> None:
        churn._world.workers[W0].resume()

    acts = [(10, lambda c: c.hang(c._world.workers[W0])), (70, resume)]
    done = go([row(0, 20), row(1, 30)], acts, workers=1, leap=leap)
    assert done.ms(FIRST) == [170, 270]


def test_a_worker_that_never_answers_is_taken_for_lost() -> None:
    acts = [(165, lambda c: c.hang(c._world.workers[W0])), (500, lambda c: c.lose(W0, "no answer"))]
    done = go([row(0, 0)], acts)
    assert done.status() == ["completed"]
    assert done.ms(LAST) == [500 + 107 + 120], "7 tokens by 160; W1 computes 107"


# ---------------------------------------------------------------- losses and returns


def test_a_worker_comes_back_empty_under_a_new_epoch() -> None:
    acts = [(165, lambda c: c.lose(W0, "x")), (300, lambda c: c.restore(W0))]
    done = go([row(0, 0), row(1, 400)], acts, mode="least-loaded")
    told = done.log.times(WorkerUp, WorkerLost)
    assert told == [("WorkerUp", 0), ("WorkerUp", 0), ("WorkerLost", 0.165), ("WorkerUp", 0.3)]
    assert [event.epoch for event in done.log.events if isinstance(event, WorkerUp)] == [0, 0, 1]
    assert done.status() == ["completed", "completed"]


def test_a_return_before_anybody_noticed_still_interrupts() -> None:
    """The lease would have run out at 10 165 ms; the new epoch at 300 says it all."""
    acts = [(165, lambda c: c.lose(W0, "x", 10.0)), (300, lambda c: c.restore(W0))]
    done = go([row(0, 0)], acts)
    assert done.log.times(WorkerLost, RequestInterrupted) == [("WorkerLost", 0.3), ("RequestInterrupted", 0.3)]
    assert done.ms(LAST) == [300 + 107 + 120]


def test_requests_sent_to_a_dead_worker_before_it_is_known_are_sent_again() -> None:
    acts = [(10, lambda c: c.lose(W0, "x", 0.09))]
    done = go([row(0, 50)], acts)
    assert done.log.times(RequestArrived, RequestInterrupted)[:2] == [
        ("RequestArrived", 0.05),
        ("RequestInterrupted", 0.1),
    ]
    assert done.ms(FIRST) == [200], "nothing was delivered: a new request for W1"
    assert done.sinks.requests[0][17] == 1


def test_no_worker_left_is_a_failure_of_what_was_promised() -> None:
    done = go([row(0, 0), row(1, 300)], [(165, lambda c: c.lose(W0, "x"))], workers=1)
    assert done.status() == ["failed", "rejected"]
    assert str(done.sinks.requests[0][7]).startswith("no_endpoints")
    assert done.sinks.requests[0][14] == 7


def test_late_news_of_a_worker_that_is_lost_is_not_believed() -> None:
    done = go([row(0, 0)], [(105, lambda c: c.lose(W0, "x"))], mode="kv", observe=Observation(kv_event_lag_s=0.05))
    told = [event for event in done.log.events if isinstance(event, BlocksStored)]
    assert all(event.worker_id == W1 for event in told), "W0's blocks of 100 ms were on their way when it was lost"
    assert told


# ---------------------------------------------------------------- drains


def test_a_draining_worker_finishes_what_it_has_and_leaves() -> None:
    done = go([row(0, 0), row(1, 200)], [(165, lambda c: c.drain(W0))])
    assert done.log.times(WorkerDraining, WorkerLost) == [("WorkerDraining", 0.165), ("WorkerLost", 0.29)]
    assert [decision[3] for decision in done.sinks.decisions] == [W0, W1]
    assert done.status() == ["completed", "completed"]
    assert done.ms(LAST) == [290, 490]


def test_an_idle_worker_leaves_at_once() -> None:
    done = go([row(0, 200)], [(165, lambda c: c.drain(W0))])
    assert done.log.times(WorkerDraining, WorkerLost) == [("WorkerDraining", 0.165), ("WorkerLost", 0.165)]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_drain_that_takes_too_long_cuts_what_is_left(limit: int) -> None:
    done = go([row(0, 0)], [(165, lambda c: c.drain(W0, DrainRules(grace_s=0.0, timeout_s=0.05)))], limit=limit)
    assert done.log.times(WorkerLost) == [("WorkerLost", 0.215)]
    assert done.status() == ["completed" if limit else "failed"]
    if limit:
        assert done.ms(LAST) == [215 + 112 + 7 * 10], "12 tokens by 210: 112 to compute, the 13th at 327"
    else:
        assert "engine shutdown" in str(done.sinks.requests[0][7])


def test_a_cancelled_request_lets_a_draining_worker_go_at_the_end_of_its_step() -> None:
    acts = [(165, lambda c: c.drain(W0)), (204, lambda c: c.cancel(RequestId("0")))]
    done = go([row(0, 0)], acts)
    assert done.log.times(WorkerLost) == [("WorkerLost", 0.21)]


def test_the_world_says_who_left_for_good_and_when() -> None:
    rows = [row(0, 0), row(1, 200)]
    assert go(rows, []).world.gone_s == {}
    assert go(rows, [(165, lambda c: c.drain(W0))]).world.gone_s == {W0: 0.29}, "the end of its drain"
    lose = (165, lambda c: c.lose(W0, "x", 0.05))
    assert go(rows, [lose]).world.gone_s == {W0: 0.165}, "when it was lost, not when that was known"
    assert go(rows, [lose, (300, lambda c: c.restore(W0))]).world.gone_s == {}, "it came back"
    again = (400, lambda c: c.lose(W0, "y"))
    assert go(rows, [lose, (300, lambda c: c.restore(W0)), again]).world.gone_s == {W0: 0.4}


# ---------------------------------------------------------------- what a router knows then


class Caches(CacheWatcher):
    subscribes = CacheWatcher.subscribes | {RequestMigrated, WorkerLost}

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, WorkerLost):
            self.held.pop(event.worker_id, None)
            return ()
        return super().decide(event, view)


@BOTH
def test_what_a_leap_has_evicted_is_known_when_a_request_is_sent_again(leap: bool) -> None:
    """w1 holds 6 blocks of row 1 and computes row 3, whose answer takes a block at each 16th token.

    Two are free when it starts; its third, at about 296 ms, evicts one of the six, its fourth would at 456.
    """
    rows = [row(0, 0, 16, 60), row(1, 0, 96, 1), row(2, 100, 16, 1), row(3, 120, 16, 100)]
    caches = Caches()
    done = go(rows, [(450, lambda c: c.lose(W0, "x"))], listen=[caches], blocks=8, leap=leap)
    assert done.status() == ["completed"] * 4
    assert len(caches.notes) == 5, "four arrivals and a migration"
    assert len(caches.notes[3][W1]) == 6
    assert len(caches.notes[4][W1]) == 6 - 1 + 1, "one evicted, and the prompt of row 3"


@BOTH
def test_context_dependent_steps_are_cut_where_they_are_slowed(leap: bool) -> None:
    """Leaping and stepping agree to the nanosecond where a step costs more with every token."""
    latency = PolynomialLatency(16_000)

    def slow(churn: Churn) -> None:
        churn.pace(churn._world.workers[W0], Slowed(latency, 1.7))

    def run(leap: bool) -> dict[int, Any]:
        rows = [row(0, 0, 500, 200), row(1, 3, 400, 150)]
        return go(rows, [(333.3, slow)], workers=1, latency=latency, leap=leap, chunked_prefill=True,
                  exclusive_prefill=False).sinks.requests  # fmt: skip

    assert run(leap) == run(not leap)
    assert run(leap)[0][LAST] > run_usual(latency)


def run_usual(latency: LatencyModel) -> float:
    rows = [row(0, 0, 500, 200), row(1, 3, 400, 150)]
    done = go(rows, [], workers=1, latency=latency, chunked_prefill=True, exclusive_prefill=False)
    last_s = done.sinks.requests[0][LAST]
    assert isinstance(last_s, float)
    return last_s
