"""What one router makes of the news of another: late, lost, out of turn, or none at all (router.md §12)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import router_settings, worker

from policies.cluster.actions import Action, Dispatch, PublishBooking, SetTimer
from policies.cluster.bookings import BookingOp, BookingStep, SyncKind
from policies.cluster.events import (
    Event,
    PeerBooking,
    PrefillDone,
    RequestArrived,
    RequestFinished,
    RequestInterrupted,
    TimerFired,
    WorkerLost,
)
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.state import Cluster
from policies.errors import ConfigError
from policies.router.fleet import Fleet, ReplicaSettings
from policies.router.kv import Kv
from policies.router.replicas import BATCH_OPS, SILENCE_S, TOMBSTONE_S, Replica

A, B = WorkerId(0), WorkerId(1)


class Box:
    """One router with a view of its own, as a live process would have; what it publishes is kept in `out`."""

    def __init__(self, me: int, *, batch_s: float = 0.0, workers: int = 2) -> None:
        self.router = Kv(router_settings("kv", tie_break="lowest_id"))
        self.replica = Replica(self.router, me, sync=True, batch_s=batch_s)
        self.view = Cluster()
        self.out: list[PublishBooking] = []
        self.timers: list[SetTimer] = []
        for n in range(workers):
            self.post(worker(n))

    def post(self, event: Event) -> list[Action]:
        self.view.fold(event)
        actions = list(self.replica.decide(event, self.view)) if type(event) in self.replica.subscribes else []
        for action in actions:
            self.view.apply(action)
        self.out += [action for action in actions if isinstance(action, PublishBooking)]
        self.timers += [action for action in actions if isinstance(action, SetTimer)]
        return actions

    def send(self, name: str, at_s: float, isl: int = 640) -> WorkerId:
        actions = self.post(RequestArrived(at_s=at_s, request_id=RequestId(name), isl=isl))
        return next(action.worker_id for action in actions if isinstance(action, Dispatch))

    def finish(self, name: str, at_s: float, worker_id: WorkerId = A) -> None:
        self.post(RequestFinished(at_s=at_s, request_id=RequestId(name), worker_id=worker_id, output_tokens=1))

    def hear(self, message: PublishBooking, at_s: float) -> None:
        self.post(
            PeerBooking(
                at_s=at_s,
                origin=message.origin,
                dest=self.replica.me,
                seq=message.seq,
                kind=message.kind,
                ops=message.ops,
            )
        )

    def charged(self, worker_id: WorkerId) -> tuple[int, int, int]:
        """Prompt tokens, blocks and requests that a worker is charged with."""
        load = self.router._books.load(worker_id)
        return load.prefill_tokens, load.blocks, load.requests


def _pair() -> tuple[Box, Box]:
    return Box(1), Box(2)


def test_a_booking_of_a_peer_is_charged_until_its_end() -> None:
    one, two = _pair()
    assert one.send("r", 0.0) == A
    two.hear(one.out[-1], 0.005)
    assert two.charged(A) == (640, 10, 1)
    one.post(PrefillDone(at_s=0.6, request_id=RequestId("r"), worker_id=A))
    two.hear(one.out[-1], 0.605)
    assert two.charged(A) == (0, 10, 1)
    one.finish("r", 1.0)
    two.hear(one.out[-1], 1.005)
    assert two.charged(A) == (0, 0, 0)
    assert two.replica.peer_bookings == 0
    assert [message.seq for message in one.out] == [1, 2, 3]


def test_s4_a_lost_end_is_charged_until_thirty_seconds_of_silence() -> None:
    one, two = _pair()
    one.send("r1", 0.0)
    two.hear(one.out[-1], 0.005)
    one.finish("r1", 0.008)  # and nobody hears of it
    assert two.send("r2", 0.010) == B, "the first worker is charged still"
    two.finish("r2", 1.0, B)
    assert two.send("r3", 0.005 + SILENCE_S - 0.001) == B
    two.finish("r3", 30.0, B)
    assert two.send("r4", 0.005 + SILENCE_S) == A, "the silent peer's bookings are gone"
    assert two.replica.counters()["sync_silent"] == 1


def test_s4_or_until_it_is_told_all() -> None:
    """The message after the lost one shows the gap; the peer is asked, and tells all that it has open."""
    one, two = _pair()
    one.send("r1", 0.0)
    two.hear(one.out[-1], 0.005)
    one.finish("r1", 0.008)
    one.send("r2", 0.020)
    two.hear(one.out[-1], 0.025)
    assert two.charged(A)[2] == 2, "one of them has ended"
    asked = two.out[-1]
    assert (asked.kind, asked.dest) == (SyncKind.ASK, 1)
    one.hear(asked, 0.030)
    told = one.out[-1]
    assert (told.kind, told.dest) == (SyncKind.RESYNC, 2)
    two.hear(told, 0.035)
    assert two.charged(A) == (640, 10, 1)
    assert two.replica.counters()["sync_gaps"] == 1


def test_a_question_that_is_lost_is_asked_again_a_second_later() -> None:
    one, two = _pair()
    for n in range(4):
        one.send(f"r{n}", n * 0.4)
    two.hear(one.out[1], 0.4)  # the first is lost: a gap
    two.hear(one.out[2], 0.8)
    two.hear(one.out[3], 1.4)
    assert [(message.kind, message.dest) for message in two.out] == [(SyncKind.ASK, 1)] * 2


def test_an_end_that_comes_before_its_beginning_leaves_a_tombstone_for_a_minute() -> None:
    one, two = _pair()
    one.send("r", 0.0)
    add = one.out[-1]
    one.finish("r", 0.1)
    two.hear(one.out[-1], 0.2)
    two.hear(replace(add, seq=3), 0.2 + TOMBSTONE_S - 1)
    assert two.charged(A) == (0, 0, 0)
    two.hear(replace(add, seq=4), 0.2 + TOMBSTONE_S)
    assert two.charged(A) == (640, 10, 1), "forgotten by then"


def test_what_is_said_twice_counts_once() -> None:
    one, two = _pair()
    one.send("r", 0.0)
    two.hear(one.out[-1], 0.005)
    two.hear(one.out[-1], 0.006)
    assert two.charged(A) == (640, 10, 1)


def test_an_echo_of_its_own_changes_nothing() -> None:
    one = Box(1)
    one.send("r", 0.0)
    before = one.charged(A)
    message = one.out[-1]
    event = PeerBooking(at_s=0.1, origin=1, dest=1, seq=message.seq, kind=message.kind, ops=message.ops)
    assert one.post(event) == []
    assert one.charged(A) == before


def test_bookings_on_a_worker_that_is_gone_are_not_taken_in() -> None:
    one, two = _pair()
    one.send("r", 0.0)
    two.post(WorkerLost(at_s=0.001, worker_id=A))
    two.hear(one.out[-1], 0.005)
    assert two.replica.peer_bookings == 0
    one.finish("r", 0.1)
    two.hear(one.out[-1], 0.105)
    assert two.replica.counters()["unknown_free"] == 0


def test_an_interrupted_request_is_free_and_booked_anew_under_another_name() -> None:
    one, two = _pair()
    one.send("r", 0.0)
    one.post(RequestInterrupted(at_s=0.1, request_id=RequestId("r"), worker_id=A, emitted_tokens=0, reason="lost"))
    (free,) = one.out[-1].ops
    assert free == BookingOp(step=BookingStep.FREE, booking="r")
    for message in one.out:
        two.hear(message, 0.2)
    assert two.charged(A) == (0, 0, 0)


def test_news_wait_for_company_but_not_for_long() -> None:
    one = Box(1, batch_s=0.001)
    one.send("r0", 0.0)
    one.send("r1", 0.0005)
    assert (one.out, [timer.due_s for timer in one.timers]) == ([], [0.001])
    one.post(TimerFired(at_s=0.001, name="sync"))
    (message,) = one.out
    assert [op.booking for op in message.ops] == ["r0", "r1"]
    one.send("r2", 0.002)
    assert one.timers[-1].due_s == 0.003


def test_a_message_is_of_bounded_size() -> None:
    one = Box(1, batch_s=1.0)
    for n in range(BATCH_OPS + 1):
        one.send(f"r{n}", 0.001)
    assert [len(message.ops) for message in one.out] == [BATCH_OPS]


def test_who_joins_later_is_told_all_when_it_misses_the_beginning() -> None:
    one = Box(1)
    for n in range(3):
        one.send(f"r{n}", 0.0)
    two = Box(2)
    two.hear(one.out[-1], 0.1)
    one.hear(two.out[-1], 0.2)
    two.hear(one.out[-1], 0.3)
    assert sum(two.charged(worker_id)[2] for worker_id in (A, B)) == 3


def test_settings_are_checked() -> None:
    usual = ReplicaSettings(count=2, spread="round-robin", seed=0, sync=True, batch_s=0.0, kv_lag_s=0.0)
    with pytest.raises(ConfigError, match=r"replicas.count is 0"):
        replace(usual, count=0)
    with pytest.raises(ConfigError, match=r"replicas.kv_lag_s is -1"):
        replace(usual, kv_lag_s=-1.0)
    with pytest.raises(ConfigError, match=r"count is 2, and 1 routers"):
        Fleet([Kv(router_settings("kv"))], usual)
