"""Every invariant catches the history that breaks it, says its number, and lets a right history pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import Scene, router, worker

from policies.cluster.actions import Action, AddWorker, Cancel, Dispatch, DrainWorker, Reject, SetTimer
from policies.cluster.blocks import ContentTree
from policies.cluster.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TimerFired,
    WorkerDraining,
    WorkerLost,
    WorkerReported,
)
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.invariants import RULES, Invariants, check_blocks, check_conserved
from policies.errors import InvariantError

R1, W0, W1 = RequestId("r1"), WorkerId(0), WorkerId(1)

Pair = tuple[Event, list[Action]]


def arrived(at_s: float = 1.0, *actions: Action) -> Pair:
    return RequestArrived(at_s=at_s, request_id=R1, isl=16), list(actions)


def sent(worker_id: WorkerId = W0) -> Dispatch:
    return Dispatch(request_id=R1, worker_id=worker_id, rule="min", reason="test")


def refused() -> Reject:
    return Reject(request_id=R1, code="no_endpoints", reason="test")


def up(worker_id: int = 0, at_s: float = 0.0) -> Pair:
    return worker(worker_id, at_s=at_s), []


def finished(at_s: float = 2.0, worker_id: WorkerId = W0) -> Pair:
    return RequestFinished(at_s=at_s, request_id=R1, worker_id=worker_id, output_tokens=1), []


def timer(at_s: float, *actions: Action) -> Pair:
    return TimerFired(at_s=at_s, name="t"), list(actions)


def watched(*pairs: Pair) -> Invariants:
    invariants = Invariants()
    for event, actions in pairs:
        invariants.observe(event, actions)
    return invariants


RIGHT: dict[str, tuple[Pair, ...]] = {
    "served": (up(), arrived(1.0, sent()), finished()),
    "same instant": (up(), arrived(0.0, sent()), finished(0.0)),
    "refused": (arrived(1.0, refused()), (RequestRejected(at_s=1.0, request_id=R1, reason="x"), [])),
    "refused by the engine": (
        up(),
        arrived(1.0, sent()),
        (RequestRejected(at_s=1.0, request_id=R1, reason="x", worker_id=W0), []),
    ),
    "worker lost": (
        up(),
        arrived(1.0, sent()),
        (WorkerLost(at_s=2.0, worker_id=W0), []),
        (RequestFailed(at_s=2.0, request_id=R1, reason="lost", worker_id=W0), []),
    ),
    "back under the same id": (up(), (WorkerLost(at_s=1.0, worker_id=W0), []), up(0, 2.0)),
    "back after a drain": (
        up(),
        (WorkerDraining(at_s=1.0, worker_id=W0), []),
        (WorkerLost(at_s=1.0, worker_id=W0), []),
        up(0, 1.0),
        arrived(1.0, sent()),
        finished(),
    ),
    "registers again": (
        up(),
        arrived(1.0, sent()),
        (worker(0, at_s=1.0, epoch=1), []),
        (RequestFailed(at_s=2.0, request_id=R1, reason="restart", worker_id=W0), []),
    ),
    "cancelled": (
        up(),
        arrived(1.0, sent(), Cancel(request_id=R1, reason="x")),
        (RequestCancelled(at_s=2.0, request_id=R1, worker_id=W0), []),
    ),
    "drained": (
        up(),
        arrived(1.0, sent(), DrainWorker(worker_id=W0, reason="x")),
        (WorkerDraining(at_s=1.0, worker_id=W0), []),
        finished(),
        (WorkerLost(at_s=2.0, worker_id=W0, reason="drained"), []),
    ),
    "timer": (
        (worker(0), [SetTimer(name="t", due_s=1.0, reason="x"), SetTimer(name="t", due_s=3.0, reason="later")]),
        timer(3.0, SetTimer(name="t", due_s=6.0, reason="next"), AddWorker(group="pool", reason="x")),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_passes(name: str) -> None:
    watched(*RIGHT[name]).finish()


WRONG: dict[str, tuple[str, tuple[Pair, ...]]] = {
    "clock goes back": ("I1", (up(0, 1.0), up(1, 0.5))),
    "report from the future": (
        "I2",
        (
            up(),
            (
                WorkerReported(
                    at_s=1.0, worker_id=W0, measured_s=1.5, running=0, waiting=0, active_blocks=0, cached_blocks=0
                ),
                [],
            ),
        ),
    ),
    "arrives twice": ("I3", (arrived(), arrived())),
    "never arrived": ("I3", (up(), finished())),
    "ends twice": ("I3", (up(), arrived(1.0, sent()), finished(), finished())),
    "sent and not there": ("I3", (up(), (worker(1), [sent()]))),
    "refused after it was sent": ("I3", (up(), arrived(1.0, sent(), refused()))),
    "sent after it was refused": ("I3", (up(), arrived(1.0, refused(), sent()))),
    "cancelled and not there": ("I3", ((worker(0), [Cancel(request_id=R1, reason="x")]),)),
    "to a worker that never was": ("I5", (up(), arrived(1.0, sent(W1)))),
    "to a lost worker": ("I5", (up(), (WorkerLost(at_s=0.5, worker_id=W0), []), arrived(1.0, sent()))),
    "to a draining worker": ("I5", (up(), (WorkerDraining(at_s=0.5, worker_id=W0), []), arrived(1.0, sent()))),
    "up twice": ("I5", (up(), up(0, 1.0))),
    "drain twice": (
        "I5",
        ((worker(0), [DrainWorker(worker_id=W0, reason="x"), DrainWorker(worker_id=W0, reason="x")]),),
    ),
    "sent twice": ("I7", (up(), up(1), arrived(1.0, sent(), sent(W1)))),
    "refused twice": ("I7", (arrived(1.0, refused(), refused()),)),
    "a refusal that failed instead": (
        "I7",
        (arrived(1.0, refused()), (RequestFailed(at_s=1.0, request_id=R1, reason="x"), [])),
    ),
    "a timer nobody set": ("I7", (up(), timer(1.0))),
    "a timer twice": ("I7", ((worker(0), [SetTimer(name="t", due_s=1.0, reason="x")]), timer(1.0), timer(1.0))),
    "an action without an ending": ("I7", ((worker(0), [Action(reason="x")]),)),
    "tokens from elsewhere": (
        "I8",
        (up(), up(1), arrived(1.0, sent()), (FirstToken(at_s=2.0, request_id=R1, worker_id=W1), [])),
    ),
    "tokens of a lost worker": (
        "I8",
        (up(), arrived(1.0, sent()), (WorkerLost(at_s=1.5, worker_id=W0), []), finished()),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_caught_at_its_last_step(name: str) -> None:
    number, pairs = WRONG[name]
    invariants = watched(*pairs[:-1])
    event, actions = pairs[-1]
    with pytest.raises(InvariantError, match=f"^{number}: "):
        invariants.observe(event, actions)


def test_a_dispatch_to_a_worker_without_the_adapter_is_caught() -> None:
    event, actions = arrived(1.0, sent())
    wants = replace(event, lora="a")
    watched((worker(0, loras=("b", "a")), []), (wants, actions))
    watched((worker(0), []), (wants, actions))
    with pytest.raises(InvariantError, match=r"^I11: .*needs adapter 'a', and the worker serves \['b'\]"):
        watched((worker(0, loras=("b",)), []), (wants, actions))


UNFINISHED: dict[str, tuple[str, tuple[Pair, ...]]] = {
    "open request": ("I10", (up(), arrived(1.0, sent()))),
    "overdue timer": ("I7", ((worker(0), [SetTimer(name="t", due_s=1.0, reason="x")]), up(1, 2.0))),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_end_that_is_none(name: str) -> None:
    number, pairs = UNFINISHED[name]
    watched(*pairs).finish(partial=True)
    with pytest.raises(InvariantError, match=f"^{number}: "):
        watched(*pairs).finish()


def test_the_error_tells_the_story_of_the_request_only() -> None:
    other = RequestArrived(at_s=1.5, request_id=RequestId("other"), isl=16), []
    with pytest.raises(InvariantError) as caught:
        watched(up(), arrived(1.0, sent()), other, finished(), finished(3.0))
    text = str(caught.value)
    assert text.index("1.0 s: RequestArrived") < text.index("2.0 s: RequestFinished") < text.index("3.0 s: Request")
    assert "other" not in text


def test_rules_are_numbered_stated_and_evidenced() -> None:
    assert [rule.number for rule in RULES] == [f"I{n}" for n in range(1, len(RULES) + 1)]
    assert all(rule.statement.endswith(".") and rule.evidence for rule in RULES)


# ---------------------------------------------------------------- the view


def crooked(change: Callable[[Scene], None]) -> Scene:
    """A right history whose account has since been changed."""
    scene = Scene(router("round-robin"), workers=2)
    scene.send("r1")
    scene.invariants.audit(scene.view)
    change(scene)
    return scene


def missed_end(scene: Scene) -> None:
    scene.invariants.observe(
        RequestFailed(at_s=9.0, request_id=R1, reason="x", worker_id=WorkerId(scene.where["r1"])), []
    )


def missed_arrival(scene: Scene) -> None:
    scene.invariants.observe(RequestArrived(at_s=9.0, request_id=RequestId("r2"), isl=1), [])


def missed_drain(scene: Scene) -> None:
    scene.invariants.observe(WorkerDraining(at_s=9.0, worker_id=W1), [])


def other_request(scene: Scene) -> None:
    missed_end(scene)
    missed_arrival(scene)


@pytest.mark.parametrize(
    ("change", "number"), [(missed_end, "I4"), (missed_arrival, "I4"), (other_request, "I4"), (missed_drain, "I5")]
)
def test_a_view_that_differs_from_the_account_is_caught(change: Callable[[Scene], None], number: str) -> None:
    scene = crooked(change)
    with pytest.raises(InvariantError, match=f"^{number}: "):
        scene.invariants.audit(scene.view)


def test_in_flight_counts_are_compared() -> None:
    view_of_other = Scene(router("round-robin"), workers=2)
    mine = Scene(router("direct"), workers=2)
    view_of_other.send("r1")  # to worker 0
    mine.send("r1", hint=1)
    with pytest.raises(InvariantError, match=r"^I6: .*worker 0 shows 1 in flight, 0 are open"):
        mine.invariants.audit(view_of_other.view)


# ---------------------------------------------------------------- counts alone


def test_block_balance() -> None:
    check_blocks(free=3, private=2, active_cached=4, inactive=1, reserved=0, total=10)
    with pytest.raises(InvariantError, match=r"^I9: .* 3 free \+ 2 private .* = 9 of 10 blocks"):
        check_blocks(free=3, private=2, active_cached=4, inactive=0, reserved=0, total=10)
    with pytest.raises(InvariantError, match=r"^I9: "):
        check_blocks(free=-1, private=2, active_cached=4, inactive=5, reserved=0, total=10)


def test_conservation_from_counts() -> None:
    check_conserved(arrived=5, open_requests=2, ended=3)
    with pytest.raises(InvariantError, match=r"^I4: .*5 arrived, 2 open, 2 ended"):
        check_conserved(arrived=5, open_requests=2, ended=2)


def test_it_keeps_no_content_alive() -> None:
    """Content that nobody holds is forgotten and interned anew: a run that is checked must be the one that is not."""
    tree = ContentTree(16, 16)
    invariants = watched(up())
    path = tree.path([1, 2, 3], 48)
    for event in (
        RequestArrived(at_s=1.0, request_id=R1, isl=48, blocks=path),
        BlocksStored(at_s=1.0, worker_id=W0, runs=path.runs()),
        BlocksRemoved(at_s=1.0, worker_id=W0, runs=path.runs()),
    ):
        invariants.observe(event, [sent()] if isinstance(event, RequestArrived) else [])
    del path, event
    assert len(tree) == 0
    with pytest.raises(InvariantError, match="RequestArrived"):  # the story is told all the same
        invariants.observe(FirstToken(at_s=2.0, request_id=R1, worker_id=W1), [])
