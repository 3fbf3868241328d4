"""The simulated world: order at one instant, lags, start-up, closed loop, deadlock, and what stops a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pytest
from simulate import InTurn, engine_settings, simulate, trace_row

from policies.cluster.actions import Action, Dispatch, Reject, SetTimer
from policies.cluster.controller import Controller
from policies.cluster.events import (
    BlocksStored,
    Event,
    RequestArrived,
    TimerFired,
    WorkerReported,
    WorkerUp,
)
from policies.cluster.ids import WorkerId
from policies.cluster.state import ClusterView
from policies.errors import CapabilityError, EngineError, InvariantError
from twin.mocker.clock import Clock, Order
from twin.mocker.demand import Demand
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld, Observation
from twin.perf.fixed import FixedLatency
from twin.worker_spec import WorkerSpec

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)


def toy_settings(**changes: object):  # type: ignore[no-untyped-def]
    return engine_settings(**({"chunked_prefill": False, "exclusive_prefill": True} | changes))


class Recorder:
    """Notes the events of the given types, and dispatches nothing."""

    def __init__(self, *kinds: type[Event]) -> None:
        self.subscribes = frozenset(kinds)
        self.seen: list[Event] = []

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        self.seen.append(event)
        return ()


# ---------------------------------------------------------------- the clock


def test_what_comes_first_at_one_instant_is_stated() -> None:
    clock = Clock()
    seen: list[str] = []
    for order in (Order.STEP_START, Order.ARRIVAL, Order.STEP_END, Order.LATE, Order.FAULT, Order.ARRIVAL):
        clock.at(1.0, int(order), (lambda _, name=order.name: seen.append(name),))
    clock.run()
    assert seen == ["FAULT", "STEP_END", "ARRIVAL", "ARRIVAL", "LATE", "STEP_START"]


def test_an_arrival_at_the_end_of_a_step_joins_the_next_step() -> None:
    rows = [trace_row(0, 0.0, 100, 3), trace_row(1, 0.1, 100, 1)]
    seen = simulate(rows, [(toy_settings(), TOY)])
    assert seen.ms("admit_s") == [0, 0]
    assert seen.ms("first_token_s") == [100, 100]


# ---------------------------------------------------------------- lags


def test_kv_events_come_late_by_their_lag() -> None:
    watcher = Recorder(BlocksStored)
    rows = [trace_row(0, 0.0, 64, 2, [1, 2, 3, 4])]
    simulate(
        rows,
        [(toy_settings(), TOY)],
        key_tokens=16,
        policies=[InTurn(), watcher],
        observe=Observation(kv_event_lag_s=0.25),
    )
    assert [event.at_s for event in watcher.seen] == [pytest.approx(0.064 + 0.25)]


def test_load_reports_come_every_interval_late_by_their_lag_and_only_while_there_is_work() -> None:
    watcher = Recorder(WorkerReported)
    rows = [trace_row(0, 0.0, 100, 100), trace_row(1, 1000.0, 100, 1)]
    simulate(
        rows,
        [(toy_settings(), TOY)],
        policies=[InTurn(), watcher],
        observe=Observation(report_every_s=0.5, report_lag_s=0.2),
    )
    reports = [e for e in watcher.seen if isinstance(e, WorkerReported)]
    assert [(e.measured_s, e.at_s) for e in reports[:2]] == [(0.5, 0.7), (1.0, 1.2)]
    assert len(reports) < 10, "the quiet quarter of an hour must not tick"
    assert reports[0].running == 1
    # at 0.5 s: 100 ms of prefill, then 40 decode steps: 100 + 41 tokens need 9 blocks of 16
    assert reports[0].active_blocks == 9


def test_reports_are_the_same_with_leaping_off() -> None:
    def reports(leap: bool) -> list[Event]:
        watcher = Recorder(WorkerReported)
        rows = [trace_row(n, 0.013 * n, 50 + n, 40) for n in range(8)]
        settings = toy_settings(leap=leap, blocks=64)
        simulate(rows, [(settings, TOY)], policies=[InTurn(), watcher], observe=Observation(report_every_s=0.03))
        return watcher.seen

    assert reports(True) == reports(False)


# ---------------------------------------------------------------- workers, timers


def test_a_worker_that_starts_late_gets_work_when_it_is_up() -> None:
    class WhenUp(InTurn):
        subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, WorkerUp})
        held: list[RequestArrived]

        def __init__(self) -> None:
            super().__init__()
            self.held = []

        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            if isinstance(event, RequestArrived):
                self.held.append(event)
            if view.live:
                for request in self.held:
                    yield from super().decide(request, view)
                self.held = []

    ended = {}
    world = MockWorld(
        controller=Controller([WhenUp()]),
        workers=[
            WorkerSpec(worker_id=WorkerId(0), name="late", settings=toy_settings(), latency=TOY, ready_s=2.0),
        ],
        demand=_Rows([trace_row(0, 0.5, 100, 1)]),
        sinks=MemorySinks(),
        router="test",
        on_end=lambda request, status: ended.update({request.row.row: request}),
    )
    world.run()
    assert ended[0].dispatch_s == 2.0
    assert ended[0].sequence.first_token_s == pytest.approx(2.1)


def test_a_timer_fires_once_at_its_time_and_the_later_of_one_name_holds() -> None:
    class Alarms(InTurn):
        subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, TimerFired})

        def __init__(self) -> None:
            super().__init__()
            self.fired: list[tuple[str, float]] = []

        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            if isinstance(event, TimerFired):
                self.fired.append((event.name, event.at_s))
                return
            yield from super().decide(event, view)
            yield SetTimer(name="a", due_s=1.0, reason="first")
            yield SetTimer(name="a", due_s=3.0, reason="in its place")
            yield SetTimer(name="b", due_s=2.0, reason="another")

    alarms = Alarms()
    simulate([trace_row(0, 0.0, 10, 1)], [(toy_settings(), TOY)], policies=[alarms])
    assert alarms.fired == [("b", 2.0), ("a", 3.0)]


# ---------------------------------------------------------------- ends


def test_a_rejected_request_lets_the_next_turn_of_its_session_in() -> None:
    class RejectFirst(InTurn):
        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            assert isinstance(event, RequestArrived)
            if event.request_id == "0":
                return (Reject(request_id=event.request_id, code="all_busy", reason="test"),)
            return super().decide(event, view)

    rows = [
        trace_row(0, 0.0, 10, 1, session_id="s"),
        trace_row(1, None, 10, 1, session_id="s", delay_s=0.5),
    ]
    seen = simulate(rows, [(toy_settings(), TOY)], policies=[RejectFirst()])
    assert {row: status for row, (_, status) in seen.ended.items()} == {0: "rejected", 1: "completed"}
    assert seen.ended[1][0].arrival_s == 0.5


def test_a_run_in_which_nothing_can_move_stops_and_names_who_is_stuck() -> None:
    class Forgetful:
        subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived})

        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            return ()

    with pytest.raises(EngineError, match=r"deadlock at 0\.500000 s: 2 open requests .* '0' \(not dispatched\)"):
        simulate([trace_row(0, 0.0, 10, 1), trace_row(1, 0.5, 10, 1)], [(toy_settings(), TOY)], policies=[Forgetful()])


@pytest.mark.parametrize("report_lag_s", [0.0, 5.0])
def test_reports_do_not_keep_a_run_going_in_which_nothing_can_move(report_lag_s: float) -> None:
    """The first request is sent and answered, the second one waits for an order that never comes."""

    class Reader(InTurn):
        subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, WorkerReported})

        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            if isinstance(event, RequestArrived) and event.request_id == "0":
                return super().decide(event, view)
            return ()

    rows = [trace_row(0, 0.0, 10, 100), trace_row(1, 0.5, 10, 1)]
    observe = Observation(report_every_s=0.3, report_lag_s=report_lag_s)
    with pytest.raises(EngineError, match=r"deadlock at .* 1 open requests .* '1' \(not dispatched\)"):
        simulate(rows, [(toy_settings(), TOY)], policies=[Reader()], observe=observe)


def test_a_report_may_be_what_gets_a_run_going_again() -> None:
    """A policy waits for a worker to say that it is idle: the last report comes with nothing else on the clock."""

    class Patient(InTurn):
        subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, WorkerReported})
        held: RequestArrived | None = None

        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            if isinstance(event, RequestArrived) and event.request_id == "0":
                yield from super().decide(event, view)
            elif isinstance(event, RequestArrived):
                self.held = event
            elif isinstance(event, WorkerReported) and not event.running and self.held is not None:
                held, self.held = self.held, None
                yield from super().decide(held, view)

    rows = [trace_row(0, 0.0, 10, 100), trace_row(1, 0.5, 10, 1)]
    observe = Observation(report_every_s=0.3, report_lag_s=1.0)
    seen = simulate(rows, [(toy_settings(), TOY)], policies=[Patient()], observe=observe)
    assert {row: status for row, (_, status) in seen.ended.items()} == {0: "completed", 1: "completed"}


def test_dispatching_to_a_worker_that_is_not_there_is_a_broken_promise() -> None:
    class Lost(InTurn):
        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            assert isinstance(event, RequestArrived)
            return (Dispatch(request_id=event.request_id, worker_id=WorkerId(9), rule="x", reason="x"),)

    with pytest.raises(InvariantError, match="worker 9 is not there"):
        simulate([trace_row(0, 0.0, 10, 1)], [(toy_settings(), TOY)], policies=[Lost()])


def test_an_order_that_this_world_cannot_perform_is_refused_by_name() -> None:
    from policies.cluster.actions import AddWorker

    class Grow(InTurn):
        def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
            return (AddWorker(group="pool", reason="more"),)

    with pytest.raises(CapabilityError, match="AddWorker"):
        simulate([trace_row(0, 0.0, 10, 1)], [(toy_settings(), TOY)], policies=[Grow()])


def test_stopping_early_lists_who_is_open() -> None:
    sinks = MemorySinks()

    def stop(ended: object, status: str) -> None:
        raise KeyboardInterrupt

    world = MockWorld(
        controller=Controller([InTurn()]),
        workers=[WorkerSpec(worker_id=WorkerId(0), name="w", settings=toy_settings(), latency=TOY)],
        demand=_Rows([trace_row(n, 0.0, 10, 5) for n in range(3)]),
        sinks=sinks,
        router="test",
        on_end=stop,
    )
    with pytest.raises(KeyboardInterrupt):
        world.run()
    world._on_end = None
    world.abandon()
    assert [row[6] for _, row in sorted(sinks.requests.items())] == ["completed", "open", "open"]


class _Rows(Demand):
    def __init__(self, rows: list) -> None:
        super().__init__([])
        self._given = rows

    def rows(self):  # type: ignore[no-untyped-def]
        return iter(self._given)
