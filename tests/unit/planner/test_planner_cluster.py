"""What the abstract cluster knows of scaling: who is pending, and that every order of a decision ends once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from builders import worker

from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker
from policies.cluster.events import (
    Event,
    WorkerLost,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
)
from policies.cluster.ids import Role, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.scaling import RoleProgress, ScaleDone, ScaleFailed, ScaleProgress
from policies.cluster.state import Cluster
from policies.cluster.twin_asks import AskTwin, Snapshot, TwinAnswered
from policies.errors import InvariantError

W0 = WorkerId(0)
ADD = AddWorker(group="pool", reason="x", role=Role.MIXED, decision_id=1)
CANCEL = CancelStart(worker_id=W0, reason="x", decision_id=1)


def starting(worker_id: int = 0, decision_id: int = 1) -> WorkerStarting:
    return WorkerStarting(
        at_s=1.0, worker_id=WorkerId(worker_id), name="w", role=Role.MIXED, group="pool", decision_id=decision_id
    )


def failed(worker_id: int = 0) -> WorkerStartFailed:
    return WorkerStartFailed(at_s=2.0, worker_id=WorkerId(worker_id), reason="no GPU")


def cancelled(worker_id: int = 0) -> WorkerStartCancelled:
    return WorkerStartCancelled(at_s=2.0, worker_id=WorkerId(worker_id))


# ---------------------------------------------------------------- the view


def folded(*things: Event | Action) -> Cluster:
    cluster = Cluster()
    for thing in things:
        if isinstance(thing, Event):
            cluster.fold(thing)
        else:
            cluster.apply(thing)
    return cluster


@pytest.mark.parametrize(
    ("things", "pending", "up"),
    [
        ((ADD,), 1, 0),
        ((ADD, ADD), 2, 0),
        ((ADD, starting()), 1, 0),
        ((ADD, ADD, starting()), 2, 0),
        ((ADD, starting(), worker(0, at_s=3.0)), 0, 1),
        ((ADD, starting(), failed()), 0, 0),
        ((ADD, starting(), cancelled()), 0, 0),
        ((AddWorker(group="pool", reason="x"),), 0, 0),
        ((AddWorker(group="pool", reason="x"), worker(0)), 0, 1),
    ],
)
def test_a_worker_is_pending_from_the_order_until_its_start_ends(
    things: Sequence[Event | Action], pending: int, up: int
) -> None:
    view = folded(*things)
    assert view.pending(Role.MIXED) == pending
    assert view.pending(Role.DECODE) == 0
    assert len(view.workers) == up


@pytest.mark.parametrize(
    "things",
    [
        (starting(),),
        (ADD, starting(decision_id=2)),
        (ADD, starting(), starting(1)),
        (ADD, failed()),
        (ADD, starting(), cancelled(), failed()),
        (AddWorker(group="pool", reason="x", decision_id=1),),
    ],
)
def test_a_start_that_nobody_asked_for_is_refused(things: Sequence[Event | Action]) -> None:
    with pytest.raises(InvariantError):
        folded(*things)


# ---------------------------------------------------------------- every order ends once

Pair = tuple[Event, list[Action]]
SNAPSHOT = Snapshot(taken_s=0.0, roles=(), hit_rate=0.0, accept_length=1.0, isl=1.0, osl=1.0)
ASK = AskTwin(
    reason="x",
    query_id=1,
    key="k",
    snapshot=SNAPSHOT,
    plans=(),
    scenarios=(),
    seeds=(),
    horizon_s=1.0,
    deadline_s=9.0,
)
ANSWER = TwinAnswered(at_s=2.0, query_id=1, outcomes=())
DONE = ScaleDone(at_s=5.0, decision_id=1)
UP = (worker(0), [])
DRAIN = DrainWorker(worker_id=W0, reason="x", decision_id=1)

HALF_WAY = RoleProgress(role=Role.MIXED, ready=1, pending=0, draining=1)

RIGHT: dict[str, tuple[Pair, ...]] = {
    "comes up": ((worker(9), [ADD]), (starting(), []), (worker(0, at_s=3.0), []), (DONE, [])),
    "called off": ((worker(9), [ADD]), (starting(), [CANCEL]), (cancelled(), [])),
    "too late to call off": ((worker(9), [ADD]), (starting(), [CANCEL]), (worker(0, at_s=3.0), [])),
    "fails": (
        (worker(9), [ADD]),
        (starting(), []),
        (failed(), []),
        (ScaleFailed(at_s=5.0, decision_id=1, reason="x"), []),
    ),
    "still under way": ((worker(9), [ADD, ADD]), (starting(), [])),
    "asked and answered": ((worker(9), [ASK]), (ANSWER, [])),
    "in progress": (
        UP,
        (worker(9), [DRAIN]),
        (ScaleProgress(at_s=1.0, decision_id=1, roles=(HALF_WAY,)), []),
        (WorkerLost(at_s=2.0, worker_id=W0), []),
        (DONE, []),
    ),
}  # fmt: skip


def watched(pairs: Sequence[Pair]) -> Invariants:
    invariants = Invariants()
    for event, actions in pairs:
        invariants.observe(event, actions)
    return invariants


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_of_scaling_passes(name: str) -> None:
    watched(RIGHT[name]).finish()


WRONG: dict[str, tuple[Pair, ...]] = {
    "more starts than asked for": ((worker(9), [ADD]), (starting(), []), (starting(1), [])),
    "ends twice": ((worker(9), [ADD]), (starting(), []), (failed(), []), (cancelled(), [])),
    "lost before it was up": ((worker(9), [ADD]), (starting(), []), (WorkerLost(at_s=2.0, worker_id=W0), [])),
    "calls off what does not start": ((worker(9), [CANCEL]),),
    "calls off twice": ((worker(9), [ADD]), (starting(), [CANCEL, CANCEL])),
    "answer without a question": ((ANSWER, []),),
    "two answers": ((worker(9), [ASK]), (ANSWER, []), (ANSWER, [])),
    "two ends of a decision": ((worker(9), [ADD]), (DONE, []), (DONE, [])),
    "an order after its decision ended": ((worker(9), [ADD]), (DONE, [ADD])),
    "the end of no decision": ((DONE, []),),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_of_scaling_is_caught(name: str) -> None:
    with pytest.raises(InvariantError, match="I7"):
        watched(WRONG[name])
