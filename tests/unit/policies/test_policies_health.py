"""Canaries, breakers, readiness: the tables of resilience.md §4 and §5, told without a world."""

from __future__ import annotations

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Action, Dispatch, Fence, Probe, Reject, SetTimer, Unfence
from policies.cluster.controller import Controller
from policies.cluster.events import (
    Event,
    FirstToken,
    ProbeEnded,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TimerFired,
    WorkerDraining,
    WorkerFenced,
    WorkerHeard,
    WorkerLost,
    WorkerUnfenced,
)
from policies.cluster.ids import FenceCause, LossCause, ProbeResult, RequestId, Role, WorkerId
from policies.cluster.invariants import Invariants
from policies.errors import ConfigError
from policies.resilience.breaker import Breaker, BreakerSettings, BreakerState
from policies.resilience.health import Canaries, CanarySettings
from policies.resilience.readiness import readiness

A, B = WorkerId(0), WorkerId(1)


class Ward:
    """One worker under canaries; times in seconds. Timers are fired by `until`, in order."""

    def __init__(self, **up: object) -> None:
        self.policy = Canaries(CanarySettings(idle_s=10.0, timeout_s=3.0))
        self.due_s: float | None = None
        self.asked: list[float] = []
        self.ordered: list[Action] = []
        self.controller = Controller([self.policy])
        self.post(worker(0, **up))

    @property
    def ready(self) -> bool:
        return self.policy.is_ready(A)

    def post(self, event: Event) -> None:
        for action in self.controller.step(event):
            if isinstance(action, SetTimer):
                self.due_s = action.due_s
            elif isinstance(action, Probe):
                self.asked.append(event.at_s)
            else:
                self.ordered.append(action)

    def until(self, at_s: float) -> None:
        """The timer fires if it is due by then."""
        if self.due_s is not None and self.due_s <= at_s:
            due_s, self.due_s = self.due_s, None
            self.post(TimerFired(at_s=due_s, name="canary 0"))

    def answer(self, at_s: float, result: ProbeResult = ProbeResult.OK, epoch: int = 0) -> None:
        self.post(ProbeEnded(at_s=at_s, worker_id=A, epoch=epoch, result=result))

    def heard(self, at_s: float, last_s: float) -> None:
        self.post(WorkerHeard(at_s=at_s, worker_id=A, epoch=0, last_s=last_s))


def test_c1_a_canary_after_ten_seconds_of_silence() -> None:
    ward = Ward()
    ward.until(10)
    assert ward.asked == [10]
    ward.answer(11)
    assert (ward.ready, ward.due_s) == (True, 21)


def test_c2_no_answer_fences_it_and_it_is_asked_again() -> None:
    ward = Ward()
    ward.until(10)
    ward.answer(13, ProbeResult.SILENT)
    assert not ward.ready
    assert [type(action) for action in ward.ordered] == [Fence]
    assert ward.due_s == 23
    ward.until(23)
    ward.answer(26, ProbeResult.SILENT)
    assert len(ward.ordered) == 1, "fenced once"
    assert ward.due_s == 36


def test_c3_what_it_says_itself_counts_for_more_than_the_canary() -> None:
    ward = Ward()
    ward.until(10)
    ward.heard(13, last_s=12)
    assert (ward.ready, ward.due_s, ward.ordered) == (True, 22, [])


def test_c4_an_answer_lifts_the_fence() -> None:
    ward = Ward()
    ward.until(10)
    ward.answer(13, ProbeResult.SILENT)
    ward.until(23)
    ward.answer(23)
    assert ward.ready
    assert [type(action) for action in ward.ordered] == [Fence, Unfence]
    assert ward.due_s == 33


def test_c5_an_answer_of_another_epoch_is_ignored() -> None:
    ward = Ward()
    ward.until(10)
    ward.post(worker(0, at_s=11, epoch=1))
    ward.answer(12, epoch=0)
    ward.answer(13, ProbeResult.SILENT, epoch=0)
    assert (ward.ready, ward.due_s) == (True, 21)
    assert ward.policy.counters() == {"canary_stale": 2}


def test_c6_a_worker_that_streams_gets_none() -> None:
    ward = Ward()
    ward.until(10)  # asked, and the world says that it has been heard: no canary is sent
    ward.heard(10, last_s=9.99)
    assert ward.due_s == pytest.approx(19.99)
    assert ward.policy.counters() == {}


def test_c7_a_prefill_worker_is_asked_like_any_other() -> None:
    ward = Ward(role=Role.PREFILL)
    ward.until(10)
    ward.answer(10.1)
    assert ward.ready


def test_c8_a_worker_that_has_no_room_for_a_canary_lives() -> None:
    ward = Ward()
    ward.until(10)
    ward.answer(10.5, ProbeResult.OVERLOADED)
    assert ward.ready
    assert ward.policy.counters() == {"canary_overloaded": 1}


def test_a_lost_worker_is_not_asked() -> None:
    ward = Ward()
    ward.post(WorkerLost(at_s=5, worker_id=A))
    ward.until(10)
    assert ward.asked == []


def test_canary_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="canary_idle_s is 0"):
        CanarySettings(idle_s=0, timeout_s=3)
    with pytest.raises(ConfigError, match="canary_timeout_s is -1"):
        CanarySettings(idle_s=10, timeout_s=-1)


# ---------------------------------------------------------------- breaker


class Circuit:
    """Two workers under a least-loaded router and breakers; what is ordered is carried out as the world would."""

    def __init__(self, **changes: object) -> None:
        usual = {"failures": 5, "share": 0.5, "requests": 20, "window_s": 30.0, "open_s": 10.0} | changes
        self.breaker = Breaker(BreakerSettings(**usual))  # type: ignore[arg-type]
        self.invariants = Invariants()
        self.controller = Controller([router("least-loaded", tie_break="lowest_id"), self.breaker])
        self.due_s: dict[str, float] = {}
        self.where: dict[str, WorkerId] = {}
        for n in range(2):
            self.post(worker(n))

    def post(self, event: Event) -> None:
        actions = self.controller.step(event)
        self.invariants.observe(event, actions)
        for action in actions:
            if isinstance(action, SetTimer):
                self.due_s[action.name] = action.due_s
            elif isinstance(action, Fence):
                self.post(WorkerFenced(at_s=event.at_s, worker_id=action.worker_id, cause=action.cause))
            elif isinstance(action, Unfence):
                self.post(WorkerUnfenced(at_s=event.at_s, worker_id=action.worker_id, cause=action.cause))
            elif isinstance(action, Dispatch):
                self.where[action.request_id] = action.worker_id
        self.invariants.audit(self.controller.view)

    def send(self, name: str, at_s: float) -> WorkerId:
        self.post(RequestArrived(at_s=at_s, request_id=RequestId(name), isl=10))
        return self.where[name]

    def fail(self, name: str, at_s: float, cause: LossCause = LossCause.ENGINE_ERROR) -> None:
        worker_id = self.where[name]
        self.post(
            RequestInterrupted(
                at_s=at_s, request_id=RequestId(name), worker_id=worker_id, emitted_tokens=0, reason="x", cause=cause
            )
        )
        self.post(RequestFailed(at_s=at_s, request_id=RequestId(name), reason="x"))

    def answer(self, name: str, at_s: float) -> None:
        worker_id = self.where[name]
        self.post(FirstToken(at_s=at_s, request_id=RequestId(name), worker_id=worker_id))
        self.post(RequestFinished(at_s=at_s, request_id=RequestId(name), worker_id=worker_id, output_tokens=1))

    def tick(self, at_s: float) -> None:
        self.post(TimerFired(at_s=at_s, name="breaker 0"))

    def opened(self, at_s: float = 1.0) -> Circuit:
        """After five failures in a row on the first worker."""
        for n in range(5):
            assert self.send(f"f{n}", at_s) == A
            self.fail(f"f{n}", at_s)
        return self


def test_five_failures_in_a_row_open_it_and_nobody_goes_there() -> None:
    circuit = Circuit()
    for n in range(4):
        circuit.send(f"f{n}", 1.0)
        circuit.fail(f"f{n}", 1.0)
    assert circuit.breaker.state(A) is BreakerState.CLOSED
    circuit = Circuit().opened()
    assert circuit.breaker.state(A) is BreakerState.OPEN
    assert circuit.send("next", 2.0) == B
    assert circuit.breaker.retry_after_s(3.0) == 8.0
    assert circuit.due_s == {"breaker 0": 11.0}


def test_a_success_between_them_starts_the_row_anew() -> None:
    circuit = Circuit()
    for n in range(9):
        circuit.send(f"r{n}", 1.0)
        circuit.answer(f"r{n}", 1.0) if n == 4 else circuit.fail(f"r{n}", 1.0)
    assert circuit.breaker.state(A) is BreakerState.CLOSED


@pytest.mark.parametrize(("answers", "opens"), [(19, False), (20, True)])
def test_half_of_twenty_opens_it_too(answers: int, opens: bool) -> None:
    circuit = Circuit()
    for n in range(answers):
        circuit.send(f"r{n}", n * 0.1)
        circuit.fail(f"r{n}", n * 0.1) if n % 2 else circuit.answer(f"r{n}", n * 0.1)
    assert (circuit.breaker.state(A) is BreakerState.OPEN) is opens


def test_failures_of_before_the_window_are_forgotten() -> None:
    circuit = Circuit()
    for n in range(20):
        at_s = n * 0.1 if n < 18 else 60.0
        circuit.send(f"r{n}", at_s)
        circuit.fail(f"r{n}", at_s) if n % 2 else circuit.answer(f"r{n}", at_s)
    assert circuit.breaker.state(A) is BreakerState.CLOSED


@pytest.mark.parametrize("cause", [LossCause.SHUTDOWN, LossCause.OVERLOAD])
def test_what_says_nothing_against_a_worker_never_counts(cause: LossCause) -> None:
    circuit = Circuit()
    for n in range(10):
        circuit.send(f"r{n}", 1.0)
        circuit.fail(f"r{n}", 1.0, cause)
    for n in range(10):
        circuit.send(f"c{n}", 2.0)
        circuit.post(RequestCancelled(at_s=2.0, request_id=RequestId(f"c{n}"), worker_id=A))
    assert circuit.breaker.state(A) is BreakerState.CLOSED


def test_half_open_lets_one_request_through() -> None:
    circuit = Circuit().opened()
    circuit.tick(11.0)
    assert circuit.breaker.state(A) is BreakerState.HALF_OPEN
    assert circuit.send("probe", 12.0) == A
    assert circuit.send("other", 12.0) == B, "though it has more to do"
    assert circuit.send("third", 12.0) == B
    circuit.answer("probe", 12.5)
    assert circuit.breaker.state(A) is BreakerState.CLOSED
    assert circuit.send("fourth", 13.0) == A
    assert circuit.breaker.counters() == {"breaker_opened": 1, "breaker_closed": 1, "breaker_probes": 1}


def test_a_failed_probe_opens_it_again() -> None:
    circuit = Circuit().opened()
    circuit.tick(11.0)
    circuit.send("probe", 12.0)
    circuit.fail("probe", 12.5)
    assert circuit.breaker.state(A) is BreakerState.OPEN
    assert circuit.due_s == {"breaker 0": 22.5}
    assert circuit.send("next", 13.0) == B


def test_a_probe_whose_client_leaves_says_nothing() -> None:
    circuit = Circuit().opened()
    circuit.tick(11.0)
    circuit.send("probe", 12.0)
    circuit.post(RequestCancelled(at_s=12.1, request_id=RequestId("probe"), worker_id=A))
    assert circuit.breaker.state(A) is BreakerState.HALF_OPEN
    assert circuit.send("again", 12.2) == A


def test_another_worker_under_the_same_id_has_a_breaker_of_its_own() -> None:
    circuit = Circuit().opened()
    circuit.post(WorkerLost(at_s=2.0, worker_id=A))
    circuit.post(worker(0, at_s=3.0, epoch=1))
    assert circuit.send("next", 3.5) == A
    circuit.tick(11.0)
    assert circuit.breaker.state(A) is BreakerState.CLOSED


def test_with_every_breaker_open_an_arrival_is_rejected() -> None:
    circuit = Circuit().opened()
    for n in range(5):
        circuit.send(f"g{n}", 2.0)
        circuit.fail(f"g{n}", 2.0)
    arrived = RequestArrived(at_s=3.0, request_id=RequestId("r"), isl=10)
    (action,) = circuit.controller.step(arrived)
    assert isinstance(action, Reject)
    assert (action.code, action.reason) == ("all_fenced", "no worker that could takes new work: 2 fenced")
    assert circuit.breaker.retry_after_s(3.0) == 8.0


@pytest.mark.parametrize(
    ("key", "value"),
    [("failures", 0), ("requests", 0), ("share", 0.0), ("share", 1.5), ("window_s", 0), ("open_s", -1)],
)
def test_breaker_settings_are_checked(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"breaker_{key} is {value}"):
        Circuit(**{key: value})


# ---------------------------------------------------------------- readiness


def test_ready_is_one_rule() -> None:
    scene = Scene(router(), [worker(0, role=Role.PREFILL), worker(1, role=Role.DECODE), worker(2, role=Role.DECODE)])
    needs = (Role.PREFILL, Role.DECODE)
    assert readiness(scene.view, needs).ready
    scene.post(WorkerDraining(at_s=1.0, worker_id=B))
    assert readiness(scene.view, needs).ready, "one is enough"
    scene.post(WorkerFenced(at_s=2.0, worker_id=WorkerId(2), cause=FenceCause.CANARY))
    found = readiness(scene.view, needs)
    assert (found.ready, found.missing) == (False, (Role.DECODE,))
    assert found.text == "no decode worker takes new work: 1 draining, 1 fenced"
    scene.post(WorkerUnfenced(at_s=3.0, worker_id=WorkerId(2), cause=FenceCause.CANARY))
    assert readiness(scene.view, needs).ready
    scene.post(WorkerLost(at_s=4.0, worker_id=A))
    assert readiness(scene.view, needs).text == "no prefill worker is registered"


def test_a_cluster_without_workers_is_not_ready_and_says_so() -> None:
    scene = Scene(router(), [])
    assert readiness(scene.view, (Role.MIXED,)).text == "no mixed worker is registered"


def test_a_model_that_no_worker_serves_is_not_ready() -> None:
    scene = Scene(router(), [worker(0, loras=("de",))])
    assert readiness(scene.view, (Role.MIXED,), "de").ready
    assert readiness(scene.view, (Role.MIXED,), "fr").text == "no mixed worker takes new work: 1 without adapter 'fr'"


def test_two_fences_are_lifted_one_by_one() -> None:
    scene = Scene(router(), [worker(0)])
    for cause in FenceCause:
        scene.post(WorkerFenced(at_s=1.0, worker_id=A, cause=cause))
    scene.post(WorkerUnfenced(at_s=2.0, worker_id=A, cause=FenceCause.CANARY))
    assert scene.view.live == ()
    scene.post(WorkerUnfenced(at_s=3.0, worker_id=A, cause=FenceCause.BREAKER))
    assert [found.worker_id for found in scene.view.live] == [A]
