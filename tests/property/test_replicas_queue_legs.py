"""Several routers with queues, and several that place prefill and decode legs: what holds for one holds for all.

Without delay or loss, routers that place legs decide exactly as one. Queues are each router's own: who waits where is
another matter than in one queue, but nobody waits anywhere for a worker that is not busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import RowsDemand, engine_settings, trace_row
from test_faults_programs import Blow, blows
from test_legs_programs import Program, carry_out, legs_policy, programs
from test_queue_wakes import QUEUE, Account

from policies.cluster.actions import Action, Enqueue
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import ENDS, Event, RequestEvent
from policies.cluster.ids import WorkerId
from policies.cluster.invariants import Invariants
from policies.router.build import build
from policies.router.fleet import Fleet, ReplicaSettings
from policies.router.replicas import Peered
from twin.mocker.demand import Row
from twin.mocker.routersync import SyncPlan
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency
from twin.worker_spec import WorkerSpec

LIMIT_TOKENS = QUEUE.prefill_busy_tokens or 0


def fleet(routers: Sequence[object], spread: str = "round-robin", *, sync: bool = True) -> Fleet:
    settings = ReplicaSettings(
        count=len(routers),
        spread=spread,
        seed=1,
        sync=sync,
        batch_s=0.0,
        kv_lag_s=0.0,  # type: ignore[arg-type]
    )
    return Fleet(routers, settings)  # type: ignore[arg-type]


def plan(count: int, delay_s: float = 0.0, loss: float = 0.0) -> SyncPlan:
    return SyncPlan(routers=count, delay_s=delay_s, jitter_s=0.0, loss=loss, seed=1)


# ---------------------------------------------------------------- prefill and decode legs


@examples(200)
@given(programs(), st.integers(2, 3), st.sampled_from(["round-robin", "random"]))
def test_routers_that_place_legs_decide_as_one(program: Program, count: int, spread: str) -> None:
    program = replace(program, router="kv")
    several = fleet([legs_policy(program) for _ in range(count)], spread)
    alone, *_ = carry_out(program, leap=True)
    shared, *_ = carry_out(program, leap=True, policy=several, sync=plan(count))
    assert shared.requests == alone.requests
    assert [row[:7] for row in shared.decisions] == [row[:7] for row in alone.decisions]
    assert [replica.peer_bookings for replica in several.replicas] == [0] * count


@examples(200)
@given(programs(), blows(ties=True), st.sampled_from([0.0, 0.004, 0.05]), st.sampled_from([0.0, 0.3, 1.0]))
def test_faults_lost_news_and_legs_keep_every_promise(
    program: Program, blown: list[Blow], delay_s: float, loss: float
) -> None:
    """Invariants at each event, and leaping changes nothing, whatever gets lost on the way between routers."""
    acts = [(blow.later_s(), blow.act) for blow in blown]
    runs = [
        carry_out(
            program,
            leap=leap,
            acts=acts,
            policy=fleet([legs_policy(program) for _ in range(2)]),
            sync=plan(2, delay_s, loss),
        )[0]
        for leap in (True, False)
    ]
    assert runs[0].requests == runs[1].requests
    assert runs[0].decisions == runs[1].decisions


# ---------------------------------------------------------------- queues


class Watch(Account):
    """Every invariant at each event; and when an instant is over, that nobody waits for a worker that is not busy."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.invariants = Invariants()
        self._workers = range(workers)
        self._waiting: set[str] = set()
        self._last_s = 0.0

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        if event.at_s > self._last_s:
            free = [at for at in self._workers if self.tokens(at, self._last_s, None) <= LIMIT_TOKENS]
            assert not (free and self._waiting), f"{self._waiting} waited at {self._last_s} s for {free}"
            self._last_s = event.at_s
        self.invariants.observe(event, actions)
        super().note(event, actions)
        if isinstance(event, RequestEvent) and type(event) in ENDS:
            self._waiting.discard(event.request_id)
        for action in actions:
            if isinstance(action, Enqueue):
                self._waiting.add(action.request_id)
            elif hasattr(action, "worker_id") and hasattr(action, "request_id"):
                self._waiting.discard(action.request_id)


def play(rows: Sequence[Row], policy: Policy, sync: SyncPlan | None, *, leap: bool = True) -> MemorySinks:
    watch, sinks = Watch(2), MemorySinks()
    world = MockWorld(
        controller=Controller([policy], watch),
        workers=[
            WorkerSpec(
                worker_id=WorkerId(i),
                name=f"w{i}",
                settings=engine_settings(chunked_prefill=False, exclusive_prefill=True, leap=leap),
                latency=FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01),
            )
            for i in range(2)
        ],
        demand=RowsDemand(rows),
        sinks=sinks,
        router="queued",
        key_tokens=16,
        sync=sync,
    )
    world.run()
    world.audit()
    watch.invariants.finish()
    return sinks


def queued(mode: str) -> Peered:
    found = build(router_settings(mode, block_size=16, tie_break="lowest_id", queue=QUEUE))
    assert hasattr(found, "peer_sent")
    return found  # type: ignore[return-value]


@st.composite
def demand(draw: st.DrawFn, isl: int | None = None, session: str | None = None) -> list[Row]:
    at_s, rows = 0.0, []
    for n in range(draw(st.integers(4, 20))):
        at_s += draw(st.integers(0, 400)) / 1e3
        length, group = isl or draw(st.integers(200, 1500)), draw(st.integers(0, 3))
        keys = [1000 * group + i for i in range(-(-length // 16))]
        rows.append(trace_row(n, at_s, length, draw(st.integers(1, 20)), keys, session_id=session))
    return rows


MODES = st.sampled_from(["kv", "least-loaded", "round-robin"])


@examples(150)
@given(demand(), MODES, st.integers(2, 4), st.sampled_from(["round-robin", "random"]))
def test_nobody_waits_at_any_router_for_a_worker_that_is_not_busy(
    rows: list[Row], mode: str, count: int, spread: str
) -> None:
    """News without delay: each router knows what all have sent, and wakes when a booking of a peer ends."""
    leapt, stepped = (
        play(rows, fleet([queued(mode) for _ in range(count)], spread), plan(count), leap=leap)
        for leap in (True, False)
    )
    assert leapt.requests == stepped.requests
    assert leapt.decisions == stepped.decisions


@examples(100)
@given(demand(session="s"), st.sampled_from(["kv", "least-loaded"]), st.integers(2, 4))
def test_one_session_at_one_of_several_routers_waits_as_at_one(rows: list[Row], mode: str, count: int) -> None:
    several = play(rows, fleet([queued(mode) for _ in range(count)], "session"), plan(count))
    assert several.requests == play(rows, queued(mode), None).requests


@examples(100)
@given(demand(isl=500), st.integers(2, 4))
def test_prompts_that_are_alike_go_at_the_same_instants_as_with_one_router(rows: list[Row], count: int) -> None:
    """Who of them goes first is another matter: routers look one after the other."""
    rows = [row._replace(keys=None, osl=rows[0].osl) for row in rows]
    several = play(rows, fleet([queued("kv") for _ in range(count)]), plan(count))
    alone = play(rows, queued("kv"), None)
    sent = [sorted(row[0] for row in sinks.decisions if row[3] is not None) for sinks in (several, alone)]
    assert sent[0] == sent[1]


def test_without_news_of_its_peers_a_router_sends_to_a_busy_worker() -> None:
    """Two prompts of 1 s at each of two routers, two workers: alone each router sees its own prompts and
    sends the fourth to a worker that computes already; told of the others, it lets that one wait."""
    rows = [trace_row(n, 0.01 * n, 1000, 2) for n in range(4)]
    for sync, waits in ((plan(2), 1), (None, 0)):
        routers = fleet([queued("least-loaded") for _ in range(2)], sync=sync is not None)
        watch = Watch(0)
        sinks = MemorySinks()
        world = MockWorld(
            controller=Controller([routers], watch),
            workers=[
                WorkerSpec(
                    worker_id=WorkerId(i),
                    name=f"w{i}",
                    settings=engine_settings(chunked_prefill=False, exclusive_prefill=True),
                    latency=FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01),
                )
                for i in range(2)
            ],
            demand=RowsDemand(rows),
            sinks=sinks,
            router="queued",
            sync=sync,
        )
        world.run()
        assert sum(row[5] == "queue" for row in sinks.decisions) == waits
