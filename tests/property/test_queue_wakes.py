"""A queue in front of a router wakes on whatever makes room: nobody waits at the end of an instant for what is there.

The test keeps an account of its own (what was sent where and is not computed, who may get work, which limits hold) and
asks nothing of the router but its orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import Scene, router_settings, worker
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.actions import Action, Dispatch, Enqueue, SetTimer
from policies.cluster.events import (
    ENDS,
    BusyThresholdsChanged,
    Event,
    FirstToken,
    Hints,
    RequestArrived,
    Threshold,
    WorkerFenced,
    WorkerLost,
    WorkerRecalled,
    WorkerUnfenced,
)
from policies.cluster.ids import FenceCause, RequestId, WorkerId
from policies.router.build import build
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings
from policies.router.queued import CALM

ONE = QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=1000, order="fcfs", waits=True)
QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=800,
    busy_worker_share=1.0,
    requests_per_worker=None,
    tokens_per_worker=None,
    max_wait_s=None,
    classes=(ONE,),
)
BUSY = BusySettings(prefill_tokens=1200)

KINDS = ["ask"] * 8 + ["first", "end", "leave", "drain", "recall", "recall", "fence", "unfence", "unfence"]
MOVES = st.lists(
    st.tuples(st.sampled_from([*KINDS, "lose", "up", "fail", "limit", "wait", "wait"]), st.integers(0, 2**16)),
    min_size=8,
    max_size=60,
)


class Account:
    """What the test knows, as a journal: per worker the prompt tokens sent there and not computed, in order."""

    def __init__(self) -> None:
        self.isl: dict[str, int] = {}
        self.prompts: dict[int, dict[str, int]] = {}
        self.begun_s: dict[int, float] = {}  # since when the first of them is computed

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, FirstToken) or type(event) in ENDS:
            self._computed(event.request_id, event.at_s)  # type: ignore[attr-defined]
        elif isinstance(event, RequestArrived):
            self.isl[event.request_id] = event.isl
        elif isinstance(event, WorkerLost):
            self.prompts.pop(event.worker_id, None)
        for action in actions:
            if isinstance(action, Dispatch):
                line = self.prompts.setdefault(action.worker_id, {})
                if not line:
                    self.begun_s[action.worker_id] = event.at_s
                line[action.request_id] = self.isl[action.request_id]

    def _computed(self, name: str, now_s: float) -> None:
        for at, line in self.prompts.items():
            if name in line:
                if next(iter(line)) == name:
                    self.begun_s[at] = now_s
                del line[name]

    def tokens(self, at: int, now_s: float, rate: float | None) -> float:
        line = self.prompts.get(at)
        if not line:
            return 0.0
        gone = 0.0 if rate is None else min(next(iter(line.values())), rate * (now_s - self.begun_s[at]))
        return sum(line.values()) - gone


class Wake:
    """One program: a scene, and the account beside it."""

    def __init__(self, mode: str, *, busy: bool, rate: float | None) -> None:
        more: dict = {"queue": QUEUE, "prefill_tokens_per_s": rate}
        if busy:
            more["busy"] = BUSY
        self.rate = rate
        self.limit_tokens = BUSY.prefill_tokens if busy else None
        self.account = Account()
        policy = build(router_settings(mode, tie_break="lowest_id", **more))
        self.scene = Scene(policy, [worker(n) for n in range(2)], journal=self.account)

    def idle_for_whom(self) -> list[str]:
        """Who waits although a worker could take it now."""
        view, now_s = self.scene.view, self.scene.now_s
        limits = [800.0, *([self.limit_tokens] if self.limit_tokens is not None else [])]
        loads = {w.worker_id: self.account.tokens(w.worker_id, now_s, self.rate) for w in view.live}
        free = [at for at, load in loads.items() if load < min(limits) - 0.1]  # a tenth of a token: looked at in time
        return waiting(self.scene) if free else []


def waiting(scene: Scene) -> list[str]:
    return [name for name, seen in scene.view.requests.items() if seen.state.value == "queued"]


def move(wake: Wake, kind: str, drawn: int, n: int) -> None:
    scene = wake.scene
    requests = scene.view.requests
    sent = [name for name, seen in requests.items() if seen.worker_id is not None]
    if kind == "ask":
        scene.arrive(f"r{n}", 600 + drawn % 1500)
    elif kind == "first":
        fresh = [name for name in sent if requests[RequestId(name)].state.value == "dispatched"]
        if fresh:
            scene.first_token(fresh[drawn % len(fresh)])
    elif kind in ("end", "fail") and sent:
        (scene.finish if kind == "end" else scene.fail)(sent[drawn % len(sent)])
    elif kind == "leave" and requests:
        name = list(requests)[drawn % len(requests)]
        (scene.cancel if name in sent else scene.cancel_waiting)(name)
    elif kind == "limit" and wake.limit_tokens is not None:
        wake.limit_tokens = float(400 + drawn % 2000)
        change = Threshold(name="prefill_tokens", limit=wake.limit_tokens)
        scene.post(BusyThresholdsChanged(at_s=scene.next_s, changes=(change,)))
    elif kind == "wait":
        scene.wait((drawn % 900) / 1000)
    else:
        of_worker(scene, kind, WorkerId(drawn % 2), n)


def of_worker(scene: Scene, kind: str, worker_id: WorkerId, n: int) -> None:
    view = scene.view.workers.get(worker_id)
    if view is None:
        if kind == "up":
            scene.up(worker_id, epoch=n + 1)
    elif kind == "drain" and not view.draining:
        scene.draining(worker_id)
    elif kind == "recall" and view.draining:
        scene.post(WorkerRecalled(at_s=scene.next_s, worker_id=worker_id))
    elif kind == "fence":
        scene.post(WorkerFenced(at_s=scene.next_s, worker_id=worker_id, cause=FenceCause.CANARY))
    elif kind == "unfence" and view.fences:
        scene.post(WorkerUnfenced(at_s=scene.next_s, worker_id=worker_id, cause=FenceCause.CANARY))
    elif kind == "lose":
        for name in [name for name, request in scene.view.requests.items() if request.worker_id == worker_id]:
            scene.fail(name)
        if view.in_flight == 0:
            scene.lost(worker_id)


@pytest.mark.parametrize("rate", [None, 2000.0], ids=["whole", "decaying"])
@examples(300)
@given(st.sampled_from(["kv", "round-robin", "least-loaded"]), st.booleans(), MOVES)
def test_nobody_waits_while_a_worker_that_is_not_busy_could_take_it(
    rate: float | None, mode: str, busy: bool, moves: list[tuple[str, int]]
) -> None:
    wake = Wake(mode, busy=busy, rate=rate)
    for n, (kind, drawn) in enumerate(moves):
        move(wake, kind, drawn, n)
        assert wake.idle_for_whom() == []


def test_a_fence_that_is_lifted_lets_the_next_one_go() -> None:
    """Both workers are busy with 900 tokens; the first of them fences, computes its prompt, and comes back."""
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE)), 3)
    scene.post(WorkerFenced(at_s=scene.next_s, worker_id=WorkerId(2), cause=FenceCause.BREAKER))
    for name in ("a", "b"):
        scene.send(name, 900)
    assert isinstance(scene.arrive("c", 900), Enqueue)
    scene.post(WorkerUnfenced(at_s=scene.next_s, worker_id=WorkerId(2), cause=FenceCause.BREAKER))
    assert scene.where["c"] == 2


def test_a_recalled_worker_takes_who_waits() -> None:
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE)), 2)
    scene.draining(1)
    scene.send("a", 900)
    assert isinstance(scene.arrive("b", 900), Enqueue)
    scene.post(WorkerRecalled(at_s=scene.next_s, worker_id=WorkerId(1)))
    assert scene.where["b"] == 1


def test_when_the_last_worker_is_fenced_nobody_is_kept() -> None:
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE)), 1)
    scene.send("a", 900)
    scene.arrive("b", 900)
    scene.post(WorkerFenced(at_s=scene.next_s, worker_id=WorkerId(0), cause=FenceCause.CANARY))
    assert waiting(scene) == []
    assert list(scene.view.requests) == ["a"]


def test_a_prompt_that_counts_less_with_time_lets_the_next_one_go() -> None:
    """900 tokens at 2000 a second are 800 after 50 ms: the next one goes then, not when the prompt is computed."""
    scene = Scene(build(router_settings("least-loaded", queue=QUEUE, prefill_tokens_per_s=2000.0)), 1)
    scene.send("a", 900)
    began_s = scene.now_s
    orders = scene.post(
        replace(scene.view.requests[RequestId("a")].arrived, request_id=RequestId("b"), at_s=scene.next_s)
    )
    (calm,) = [order for order in orders if isinstance(order, SetTimer)]
    assert (calm.name, calm.due_s) == (CALM, pytest.approx(began_s + 0.05, abs=2e-6))
    scene.wait(0.045)
    assert waiting(scene) == ["b"]
    scene.wait(0.01)
    assert waiting(scene) == []


def test_a_limit_that_is_cleared_lets_the_next_one_go() -> None:
    """With 500 tokens left the worker is not busy for the queue, but above a limit of 400; null clears that."""
    classes = (ONE, replace(ONE, name="now", family="now", waits=False))
    queue = replace(QUEUE, classes=classes)
    policy = build(router_settings("least-loaded", queue=queue, busy=BusySettings(prefill_tokens=2000)))
    scene = Scene(policy, 1)
    scene.send("a", 900)
    scene.send("b", 500, hints=Hints(family="now"))
    assert isinstance(scene.arrive("c", 10), Enqueue)
    _limit(scene, 400.0)
    scene.first_token("a")
    assert waiting(scene) == ["c"]
    _limit(scene, None)
    assert scene.where["c"] == 0


def _limit(scene: Scene, limit: float | None) -> None:
    change = Threshold(name="prefill_tokens", limit=limit)
    scene.post(BusyThresholdsChanged(at_s=scene.next_s, changes=(change,)))
