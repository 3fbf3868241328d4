"""Laws of several routers: news without delay make them one router, and nothing that a peer said lasts for ever."""

from __future__ import annotations

from collections.abc import Sequence

from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import RowsDemand, engine_settings, trace_row

from policies.cluster.actions import Action
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import Event
from policies.cluster.ids import WorkerId
from policies.cluster.invariants import Invariants
from policies.router.fleet import Fleet, ReplicaSettings
from policies.router.kv import Kv
from twin.mocker.routersync import SyncPlan
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency
from twin.worker_spec import WorkerSpec


class Watch:
    """Checks the invariants at each event."""

    def __init__(self) -> None:
        self.invariants = Invariants()

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.invariants.observe(event, actions)


ROWS = st.lists(
    st.tuples(
        st.integers(0, 400),  # ms after the one before
        st.integers(1, 12),  # blocks
        st.integers(1, 20),  # output tokens
        st.integers(0, 3),  # which conversation
    ),
    min_size=1,
    max_size=25,
)


def _kv() -> Kv:
    return Kv(router_settings("kv", block_size=16, tie_break="lowest_id"))


def _play(
    rows: list[tuple[int, int, int, int]], policy: Policy, plan: SyncPlan | None, *, leaps: bool = True
) -> list[tuple[object, ...]]:
    at_s = 0.0
    demand = []
    for n, (after_ms, blocks, osl, group) in enumerate(rows):
        at_s += after_ms / 1e3
        demand.append(trace_row(n, at_s, 16 * blocks, osl, [100 * group + i for i in range(blocks)]))
    watch, sinks = Watch(), MemorySinks()
    world = MockWorld(
        controller=Controller([policy], watch),
        workers=[
            WorkerSpec(
                worker_id=WorkerId(i),
                name=f"w{i}",
                settings=engine_settings(blocks=200, leap=leaps),
                latency=FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01),
            )
            for i in range(3)
        ],
        demand=RowsDemand(demand),
        sinks=sinks,
        router="kv",
        key_tokens=16,
        sync=plan,
    )
    world.run()
    world.audit()
    watch.invariants.finish()
    return [(row[0], row[1], row[3]) for row in sinks.decisions]


def _fleet(count: int, spread: str, batch_s: float = 0.0) -> Fleet:
    settings = ReplicaSettings(count=count, spread=spread, seed=1, sync=True, batch_s=batch_s, kv_lag_s=0.0)  # type: ignore[arg-type]
    return Fleet([_kv() for _ in range(count)], settings)


@examples(100)
@given(ROWS, st.integers(2, 4), st.sampled_from(["round-robin", "random"]))
def test_news_without_delay_or_loss_make_several_routers_one(
    rows: list[tuple[int, int, int, int]], count: int, spread: str
) -> None:
    plan = SyncPlan(routers=count, delay_s=0.0, jitter_s=0.0, loss=0.0, seed=1)
    assert _play(rows, _fleet(count, spread), plan) == _play(rows, _kv(), None)


@examples(100)
@given(
    ROWS,
    st.integers(2, 4),
    st.sampled_from([0.0, 0.002, 0.3, 2.0]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.001]),
)
def test_nothing_that_a_peer_said_lasts(
    rows: list[tuple[int, int, int, int]], count: int, delay_s: float, jitter_s: float, loss: float, batch_s: float
) -> None:
    """A last request at each router, long after the others, finds the books of all of them empty but for peers' last
    words; and leaping changes nothing."""
    ends = [(100_000, 1, 1, 0), *[(0, 1, 1, 0)] * (count - 1)]
    plan = SyncPlan(routers=count, delay_s=delay_s, jitter_s=jitter_s, loss=loss, seed=1)
    fleet = _fleet(count, "round-robin", batch_s)
    turns = (-len(rows)) % count
    decisions = _play([*rows, *[(0, 1, 1, 0)] * turns, *ends], fleet, plan)
    for replica in fleet.replicas:
        assert replica.peer_bookings <= count - 1
    again = _play([*rows, *[(0, 1, 1, 0)] * turns, *ends], _fleet(count, "round-robin", batch_s), plan, leaps=False)
    assert again == decisions
