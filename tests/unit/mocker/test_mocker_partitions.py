"""Workers that are cut off and reached again: figures that a person can check by hand.

The engine is the TOY: 1 ms per prompt token, 10 ms per decode step, a step is one or the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_mocker_churn import BOTH, FIRST, LAST, W0, W1, Caches, Done, go, row

from policies.cluster.events import (
    BlocksStored,
    FirstToken,
    PrefillDone,
    RequestFinished,
    RequestInterrupted,
    WorkerLost,
    WorkerReported,
    WorkerUp,
)
from policies.cluster.ids import RequestId, WorkerId
from twin.mocker.churn import Churn, Loss
from twin.mocker.clock import Order
from twin.mocker.wires import FRONTEND, Part, Wires
from twin.mocker.world import Observation

Act = tuple[float, Callable[[Churn], None]]


def cut(at_ms: float, worker_id: WorkerId = W0) -> Act:
    def act(churn: Churn) -> None:
        churn._world.partitions.cut_off(f"cut {worker_id}", churn._world.workers[worker_id])

    return at_ms, act


def heal(at_ms: float, worker_id: WorkerId = W0) -> Act:
    """On the clock from the beginning, behind the steps that end at that instant."""

    def act(churn: Churn) -> None:
        world = churn._world
        world.call(at_ms / 1e3, Order.TRANSFER_DONE, lambda: world.partitions.reconnect(f"cut {worker_id}", worker_id))

    return 0, act


def lost(at_ms: float, worker_id: WorkerId = W0) -> Act:
    return at_ms, lambda churn: churn.take_for_lost(churn._world.workers[worker_id], "not heard of", Loss())


def gaps_ms(done: Done) -> list[float]:
    """Every gap of the record, by length."""
    found: list[float] = []
    for cells in done.sinks.steps:
        steps, tokens, gap0, gap1, gap2 = cells[4], cells[14], *cells[15:18]
        assert isinstance(steps, int)
        assert isinstance(tokens, int)
        if tokens:
            found += [
                round((gap0 + gap1 * j + gap2 * j * j) * 1e3, 6)  # type: ignore[operator]
                for j in range(steps)
                for _ in range(tokens)
            ]
    return sorted(found)


# ---------------------------------------------------------------- reached again in time


@BOTH
def test_what_was_made_meanwhile_arrives_at_once(leap: bool) -> None:
    """Tokens at 100 .. 160 arrive; those of 170 .. 250 arrive at 255, the next at 260, the last at 290 as ever."""
    done = go([row(0, 0)], [cut(165), heal(255)], leap=leap)
    assert done.status() == ["completed"]
    assert done.ms(FIRST) == [100]
    assert done.ms(LAST) == [290]
    assert gaps_ms(done) == [0] * 8 + [5] + [10] * 9 + [95]
    assert sum(gaps_ms(done)) == 190, "the gaps of a request add up to the time from its first token to its last"
    assert done.log.times(RequestInterrupted, WorkerLost) == []


@BOTH
def test_a_step_that_ends_as_the_partition_does_is_delivered_with_the_rest(leap: bool) -> None:
    done = go([row(0, 0)], [cut(170), heal(250)], leap=leap)
    assert done.ms(LAST) == [290]
    assert gaps_ms(done) == [0] * 8 + [10] * 10 + [90], "the step that ends at 170 is withheld, that of 250 arrives"


@BOTH
def test_a_first_token_made_meanwhile_comes_late(leap: bool) -> None:
    done = go([row(0, 0)], [cut(50), heal(145)], leap=leap)
    assert done.ms(FIRST) == [145], "made at 100"
    assert done.ms(LAST) == [290]
    assert gaps_ms(done) == [0] * 4 + [5] + [10] * 14
    assert done.log.times(FirstToken) == [("FirstToken", 0.145)]


@BOTH
def test_an_answer_that_was_finished_meanwhile_comes_late(leap: bool) -> None:
    done = go([row(0, 0), row(1, 0)], [cut(165), heal(1000)], leap=leap)
    assert done.status() == ["completed", "completed"]
    assert done.ms(LAST) == [1000, 290]
    assert done.log.times(RequestFinished) == [("RequestFinished", 0.29), ("RequestFinished", 1.0)]
    assert gaps_ms(done) == [0] * 12 + [10] * 6 + [10] * 19 + [840]


@BOTH
def test_requests_sent_meanwhile_reach_the_worker_in_order_when_it_is_reached(leap: bool) -> None:
    done = go([row(0, 20), row(1, 30)], [cut(10), heal(70)], workers=1, leap=leap)
    assert done.ms(FIRST) == [170, 270]
    assert done.sinks.requests[0][11] == 0.07, "admitted when it arrived there"


@BOTH
def test_a_client_that_leaves_meanwhile_has_what_it_had(leap: bool) -> None:
    """The worker hears of it at 255, in the step that ends at 260; the second request could not start before."""
    acts = [cut(165), (200, lambda churn: churn.cancel(RequestId("0"))), heal(255)]
    done = go([row(0, 0), row(1, 210)], acts, workers=1, leap=leap, max_num_seqs=1)
    assert done.status() == ["cancelled", "completed"]
    assert done.sinks.requests[0][14] == 7
    assert done.ms(LAST)[0] == 160
    assert done.ms(FIRST)[1] == 360


def test_a_client_that_leaves_before_its_request_arrived_costs_nothing() -> None:
    acts = [cut(10), (40, lambda churn: churn.cancel(RequestId("0"))), heal(70)]
    done = go([row(0, 20), row(1, 30)], acts, workers=1)
    assert done.status() == ["cancelled", "completed"]
    assert done.ms(FIRST) == [None, 170]


def test_a_request_that_the_worker_refuses_is_refused_when_it_gets_there() -> None:
    done = go([row(0, 20, 5000), row(1, 30)], [cut(10), heal(70)], workers=1, blocks=100)
    assert done.status() == ["rejected", "completed"]
    assert done.sinks.requests[0][7] is not None
    assert done.ms(FIRST)[1] == 170


@BOTH
def test_kv_events_are_late_and_in_order(leap: bool) -> None:
    rows = [row(0, 0, 96, 1), row(1, 100, 96, 1), row(2, 100, 96, 1), row(3, 900, 16, 1)]
    caches = Caches()
    done = go(rows, [cut(210), heal(800)], workers=1, listen=[caches], blocks=14, leap=leap)
    assert done.status() == ["completed"] * 4
    told = [event.at_s for event in done.log.events if isinstance(event, BlocksStored)]
    assert told[:3] == [0.096, 0.196, 0.8], "the third was stored at 292"
    assert [len(note[W0]) for note in caches.notes[1:]] == [6, 6, 14], "four of row 0 made room for row 2"


# ---------------------------------------------------------------- taken for lost


@BOTH
def test_what_a_worker_makes_after_it_was_taken_for_lost_is_not_believed(leap: bool) -> None:
    """7 tokens by 160; W1 computes 107 from 200 on: the 8th token at 307, 12 more."""
    done = go([row(0, 0)], [cut(165), lost(200), heal(400)], leap=leap)
    assert done.status() == ["completed"]
    assert done.ms(LAST) == [307 + 120]
    assert done.sinks.requests[0][14] == 20
    assert gaps_ms(done) == [10] * 18 + [147]
    told = done.log.times(WorkerUp, WorkerLost, RequestFinished)
    assert told[2:] == [("WorkerLost", 0.2), ("WorkerUp", 0.4), ("RequestFinished", 0.427)]
    assert [event.epoch for event in done.log.events if isinstance(event, WorkerUp)] == [0, 0, 1]


@pytest.mark.parametrize("back_ms", [230, 5000])
def test_without_migration_its_requests_fail(back_ms: float) -> None:
    done = go([row(0, 0), row(1, 0), row(2, 6000)], [cut(165), lost(200), heal(back_ms)], limit=0)
    assert done.status() == ["failed", "completed", "completed"]
    assert done.sinks.requests[0][14] == 7, "the client has what it had, whatever else was made"
    assert "not heard of" in str(done.sinks.requests[0][7])


@BOTH
def test_it_comes_back_with_what_it_has_cached(leap: bool) -> None:
    """Six blocks of row 0; the index is told of them again when the worker is back."""
    caches = Caches()
    done = go(
        [row(0, 0, 96, 1), row(1, 500, 96, 1)], [cut(165), lost(200), heal(400)], workers=1, listen=[caches], leap=leap
    )
    assert done.status() == ["completed", "completed"]
    assert len(caches.notes[1][W0]) == 6
    stored = [event.at_s for event in done.log.events if isinstance(event, BlocksStored)]
    assert stored[:2] == [0.096, 0.4]


def test_its_old_requests_are_let_go_at_the_end_of_its_step() -> None:
    """Row 0 still runs there at 185; what comes meanwhile starts at 190, when that step is over."""
    rows = [row(0, 0, 100, 200), row(1, 182)]
    done = go(rows, [cut(165), lost(170), heal(185)], max_num_seqs=1)
    assert [decision[3] for decision in done.sinks.decisions] == [W0, W1, W1]
    again = go([row(0, 0, 100, 200), row(1, 187)], [cut(165), lost(170), heal(185)], max_num_seqs=1)
    assert [decision[3] for decision in again.sinks.decisions] == [W0, W1, W0]
    assert again.sinks.requests[1][11] == 0.19


def test_a_worker_that_dies_while_it_is_cut_off_takes_all_with_it() -> None:
    acts = [cut(165), (200, lambda churn: churn.lose(W0, "killed", 0.05)), (230, lambda churn: churn.restore(W0))]
    done = go([row(0, 0), row(1, 600)], [*acts, heal(500)])
    assert done.status() == ["completed", "completed"]
    assert done.ms(LAST)[0] == 250 + 107 + 120, "nothing of what it made after 165 was ever heard"
    told = done.log.times(WorkerUp, WorkerLost)
    assert told[2:] == [("WorkerLost", 0.25), ("WorkerUp", 0.5)], "restored at 230, reached at 500"


def test_a_draining_worker_is_not_let_go_while_nobody_can_hear_it() -> None:
    acts = [(165, lambda churn: churn.drain(W0)), cut(200), heal(600)]
    done = go([row(0, 0)], acts)
    assert done.ms(LAST) == [600]
    assert done.log.times(WorkerLost) == [("WorkerLost", 0.6)]


def test_it_may_stay_cut_off_to_the_end() -> None:
    done = go([row(0, 0), row(1, 10)], [cut(165), lost(200)])
    assert done.status() == ["completed", "completed"]
    assert done.world.partitions.is_cut_off(W0)


# ---------------------------------------------------------------- reports


def test_reports_of_a_worker_that_is_cut_off_come_late() -> None:
    class Reports:
        subscribes = frozenset({WorkerReported})

        def __init__(self) -> None:
            self.seen: list[tuple[int, float, float]] = []

        def decide(self, event: Any, view: object) -> tuple[()]:
            self.seen.append((event.worker_id, event.measured_s, event.at_s))
            return ()

    reports = Reports()
    go([row(0, 0), row(1, 0)], [cut(115), heal(255)], listen=[reports], observe=Observation(report_every_s=0.1))
    assert reports.seen == [(0, 0.1, 0.1), (1, 0.1, 0.1), (1, 0.2, 0.2), (0, 0.2, 0.255), (0, 0.3, 0.3), (1, 0.3, 0.3)]


# ---------------------------------------------------------------- wires


def test_wires_hold_what_cannot_arrive_and_deliver_it_in_order() -> None:
    a, b = WorkerId(0), WorkerId(1)
    wires, heard = Wires(lambda delay_s, what: what()), []
    wires.parts["x"] = Part(frozenset((a,)), None)
    wires.parts["y"] = Part(frozenset((a,)), frozenset((b,)))
    assert [wires.cut(a, FRONTEND), wires.cut(a, b), wires.cut(FRONTEND, b)] == [True, True, False]
    for n, (source, dest, news) in enumerate([(FRONTEND, a, False), (a, b, False), (a, FRONTEND, True), (b, a, False)]):
        wires.send(source, dest, lambda n=n: heard.append(n), news=news)  # type: ignore[misc]
    wires.send(FRONTEND, b, lambda: heard.append(9))
    assert heard == [9]
    assert wires.owes(a)
    del wires.parts["x"]
    wires.deliver()
    assert heard == [9, 2, 0], "news first; a and b are still apart"
    wires.forget(b)
    del wires.parts["y"]
    wires.deliver()
    assert heard == [9, 2, 0], "gone with b"


def test_the_cluster_hears_of_a_computed_prompt_when_it_can() -> None:
    """A request that was sent again tells when its prompt is computed; here that is while nobody can hear it."""
    acts = [(165, lambda churn: churn.lose(W0, "x")), cut(200, W1), heal(400, W1)]
    done = go([row(0, 0)], acts)
    assert done.log.times(PrefillDone) == [("PrefillDone", 0.4)]
    assert done.ms(LAST) == [400], "made at 392"
    assert gaps_ms(done) == [0] * 12 + [10] * 6 + [240]
