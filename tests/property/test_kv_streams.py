"""Engines' events that are lost or late: what a router knows is what its workers hold, but for what it has not heard;
gaps are healed, and the hit rate comes back (specs: resilience I15, a share of events lost for minutes)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import KEY_TOKENS, Seen, engine_settings, simulate, trace_row
from test_kvbm_world import LATENCY, LINKS, returning, tiers, tight
from test_policies_guesses_world import POOL_BLOCKS, families

from policies.cluster.actions import Action
from policies.cluster.blocks import BlockRun
from policies.cluster.controller import Policy
from policies.cluster.draws import draw
from policies.cluster.events import Event, RequestArrived
from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.kv_events import KvEvent, KvRemoved
from policies.cluster.state import ClusterView
from policies.kvbm.consolidate import DEDUPE
from policies.router.chains.feed import Feed, FeedMode
from policies.router.kv_engine import KvEngine
from reports.record import GIVEN_COLUMNS
from twin.mocker.clock import Order
from twin.mocker.demand import Row
from twin.mocker.kvstreams import EngineNews
from twin.mocker.tierplan import TierPlan
from twin.mocker.world import MockWorld, Observation


def kv(block_size: int = 16, **changes: object) -> KvEngine:
    return KvEngine(router_settings("kv", block_size=block_size, index="engine", **changes))


def news_of(world: MockWorld) -> EngineNews:
    assert isinstance(world.news, EngineNews)
    return world.news


def feed_of(router: KvEngine, rank: RankId) -> Feed:
    assert router.engine_index is not None
    return router.engine_index.live._feeds[rank]


def known(router: KvEngine, rank: RankId) -> set[BlockHash]:
    """Ids of the blocks that a router thinks a rank has in device memory, those whose parents it does not know
    included."""
    assert router.engine_index is not None
    (index,) = router.engine_index.live._indexes.values()
    lineage = index._ranks[rank]
    return {ext for ext in lineage._where if lineage.holds(Tier.G1_DEVICE, ext)} | set(lineage._orphans.by_ext)


def names(news: EngineNews, runs: Iterable[BlockRun]) -> set[BlockHash]:
    """Ids of blocks; those that a step in progress evicts or completes are told at its end."""
    return {ext for run in runs for ext in news.names.of(*run).exts}


class Check:
    """A policy that orders nothing, and looks at every arrival at what the router knows."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived})

    def __init__(self, router: KvEngine) -> None:
        self._router = router
        self.world: MockWorld | None = None
        self.made: dict[RankId, list[KvEvent]] = {}
        self.looks = 0

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        self.look()
        return ()

    def watch(self, world: MockWorld) -> None:
        """Note every event that a worker makes, whatever becomes of it."""
        self.world = world
        news = news_of(world)
        note = news._note

        def noted(*what: Any, **more: Any) -> KvEvent:
            event = note(*what, **more)
            self.made.setdefault(event.rank, []).append(event)
            return event

        news._note = noted  # type: ignore[method-assign]

    def look(self) -> None:
        world = self.world
        assert world is not None
        news = news_of(world)
        self.looks += 1
        for worker in world.workers.values():
            for stream, pool in news._pools(worker):
                feed = feed_of(self._router, stream.rank)
                own = self.own_tiers(worker.worker_id)
                held, lost, new = (names(news, runs) for runs in ([*pool.findable(), *own], pool.removed, pool.stored))
                made = self.made.get(stream.rank, [])
                unheard = [one for one in made if feed.cursor is None or one.event_id > feed.cursor]
                missed = made if feed.mode is FeedMode.DEGRADED else unheard
                gone = {ext for one in missed if isinstance(one, KvRemoved) for ext in one.exts}
                knows = known(self._router, stream.rank)
                assert knows <= held | lost | gone
                if feed.exact and not unheard:
                    assert knows - lost - new == held - lost - new

    def own_tiers(self, worker_id: WorkerId) -> list[BlockRun]:
        """What a worker gives one account of, beside its device."""
        assert self.world is not None
        tiers = self.world.block_tiers
        changes = tiers.contents(worker_id) if tiers is not None else ()
        return [run for change in changes if change.tier is not Tier.G4_REMOTE for run in change.runs]


def run(
    rows: list[Row],
    router: KvEngine,
    upset: list[tuple[float, float, int, float, float]],
    *,
    settings: dict[str, object],
    workers: int,
    key_tokens: int,
    tiers: list[TierPlan] | None = None,
    **observe: object,
) -> tuple[Seen, Check]:
    """`upset`: from when until when which worker loses what share of its events, or sends them how late."""
    check = Check(router)

    def before(world: MockWorld) -> None:
        check.watch(world)
        for n, (start_s, end_s, worker_id, rate, delay_s) in enumerate(upset):
            world.call(start_s, int(Order.FAULT), lambda n=n, w=worker_id, r=rate, d=delay_s: begin(world, n, w, r, d))
            over = world.churn.upset(WorkerId(worker_id))
            world.call(end_s, int(Order.FAULT), lambda n=n, over=over: over.over(str(n)))

    policies: list[Policy] = [check, router]
    seen = simulate(
        rows,
        [(engine_settings(**settings), LATENCY)] * workers,
        key_tokens=key_tokens,
        policies=policies,
        observe=Observation(engine_events=True, **observe),  # type: ignore[arg-type]
        before=before,
        strict=True,
        tiers=tiers,
        links=LINKS if tiers is not None else (),
    )
    return seen, check


def begin(world: MockWorld, n: int, worker_id: int, rate: float, delay_s: float) -> None:
    upset, sent = world.churn.upset(WorkerId(worker_id)), iter(range(10**6))
    upset.losses[str(n)] = lambda: draw(7, "loss", str(n), next(sent)) < rate
    upset.delays_s[str(n)] = delay_s


# ---------------------------------------------------------------- minutes of loss


def hit_rate(seen: Seen, since_s: float) -> float:
    row, cached = GIVEN_COLUMNS.index("arrival_s"), GIVEN_COLUMNS.index("cached_tokens")
    late = [cells for cells in seen.sinks.requests.values() if cells[row] >= since_s]
    return sum(cells[cached] for cells in late) / (640 * len(late))


@pytest.mark.parametrize("replays", [10_000, 2], ids=["replays", "dumps"])
def test_the_hit_rate_comes_back_after_minutes_of_loss(replays: int) -> None:
    """A tenth of all events is lost for two minutes; gaps are told again, or all that a rank holds is."""
    lossless, router = kv(), kv()
    settings = {"blocks": POOL_BLOCKS}
    lost = [(60.0, 180.0, n, 0.1, 0.0) for n in range(4)]
    common = {"settings": settings, "workers": 4, "key_tokens": 16, "kv_replay_events": replays}
    well, _ = run(families(), lossless, [], **common)  # type: ignore[arg-type]
    seen, check = run(families(), router, lost, **common)  # type: ignore[arg-type]
    counters = router.counters()
    assert counters["gaps"] > 10
    assert counters["replays_done" if replays > 2 else "dumps_done"] > 10
    assert not counters["ranks_degraded"]
    assert check.looks == 600
    assert abs(hit_rate(seen, 190.0) - hit_rate(well, 190.0)) < 0.02
    assert not lossless.counters()["gaps"]


# ---------------------------------------------------------------- random disturbances

UPSETS = st.lists(
    st.tuples(
        st.floats(0.0, 0.5),
        st.floats(0.0, 1.0),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        st.sampled_from([0.0, 0.01, 0.2]),
    ).map(lambda u: (u[0], u[0] + u[1], *u[2:])),
    max_size=4,
)


@examples(200)
@given(
    st.tuples(returning(), tight()),
    UPSETS,
    st.sampled_from([0.0, 0.004]),
    st.sampled_from([1, 3, 10_000]),
    st.sampled_from([0.0, 20e-6, 0.02]),
    st.booleans(),
)
def test_what_is_known_is_what_is_held_but_for_what_was_not_heard(
    demand: tuple[list[Row], dict],
    upset: list[tuple[float, float, int, float, float]],
    lag_s: float,
    replays: int,
    block_s: float,
    leap: bool,
) -> None:
    rows, options = demand
    router = kv(options["block_size"])
    _, check = run(
        rows,
        router,
        upset,
        settings=options | {"prefix_caching": True, "leap": leap},
        workers=2,
        key_tokens=KEY_TOKENS,
        kv_event_lag_s=lag_s,
        kv_replay_events=10_000 if replays == 10_000 else replays,
        kv_dump_block_s=block_s,
    )
    assert check.looks == len(rows)


@examples(200)
@given(
    st.tuples(returning(), tight()),
    tiers(),
    UPSETS,
    st.sampled_from([0.0, 0.004]),
    st.sampled_from([1, 3, 10_000]),
    st.sampled_from([0.0, 20e-6, 0.02]),
)
def test_so_it_is_of_workers_that_give_one_account_of_all_their_tiers(
    demand: tuple[list[Row], dict],
    plans: list[TierPlan],
    upset: list[tuple[float, float, int, float, float]],
    lag_s: float,
    replays: int,
    block_s: float,
) -> None:
    rows, options = demand
    _, check = run(
        rows,
        kv(options["block_size"]),
        upset,
        settings=options | {"prefix_caching": True, "tiers": True},
        workers=2,
        key_tokens=KEY_TOKENS,
        tiers=[replace(plan, events=DEDUPE) for plan in plans],
        kv_event_lag_s=lag_s,
        kv_replay_events=replays,
        kv_dump_block_s=block_s,
    )
    assert check.looks == len(rows)


# ---------------------------------------------------------------- who cannot answer, or not in time


def modes_of_the_index(block_s: float, trouble: str) -> tuple[list[str], KvEngine]:
    """Worker 0 loses all events of the first 3 s, and then is in trouble from 4 to 16 s; what each decision says of how
    far the index knows it."""
    router = kv(explain=True)
    rows = [trace_row(n, n / 2, 640, 3, [100 * (n % 7) + k for k in range(40)]) for n in range(120)]

    def before(world: MockWorld) -> None:
        worker, fault = world.workers[WorkerId(0)], int(Order.FAULT)
        world.call(0.0, fault, lambda: begin(world, 0, 0, 1.0, 0.0))
        world.call(3.0, fault, lambda: world.churn.upset(WorkerId(0)).over("0"))
        if trouble == "hangs":
            world.call(4.0, fault, lambda: world.churn.hang(worker))
            world.call(16.0, fault, worker.resume)
        elif trouble == "cut off":
            world.call(4.0, fault, lambda: world.partitions.cut_off("p", worker))
            world.call(16.0, int(Order.TRANSFER_DONE), lambda: world.partitions.reconnect("p", WorkerId(0)))

    seen = simulate(
        rows,
        [(engine_settings(blocks=120), LATENCY)] * 2,
        key_tokens=16,
        policies=[router],
        observe=Observation(engine_events=True, kv_dump_block_s=block_s),
        before=before,
        strict=True,
    )
    return [json.loads(row[-1])[0]["index_mode"] for row in seen.sinks.decisions], router


@pytest.mark.parametrize(("block_s", "trouble"), [(0.1, "slow"), (0.1, "hangs"), (0.03, "cut off")])
def test_who_does_not_answer_in_time_is_used_on_what_is_known_and_asked_again(block_s: float, trouble: str) -> None:
    modes, router = modes_of_the_index(block_s, trouble)
    assert "degraded" in modes
    assert modes[-1] == "live"
    counters = router.counters()
    assert counters["replays_failed"] + counters["dumps_failed"] > 0
    assert counters["ranks_degraded"] == 0
