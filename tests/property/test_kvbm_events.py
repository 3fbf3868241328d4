"""Workers that give one account of all their tiers: what the router knows of each is, at any quiet moment, the union
of its device and its own tiers, whatever befalls workers, tiers and the index; and where nobody listens, the account
changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, simulate
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import FIXED, Blow, blows, perform
from test_kv_streams import known
from test_kvbm_faults import busy, tier_blows
from test_kvbm_kinds import DEMANDS, KINDS, TIERS, Kind, sized
from test_kvbm_world import LATENCY, LINKS, returning, tight

from policies.cluster.actions import Action
from policies.cluster.blocks import BlockRun
from policies.cluster.controller import Policy
from policies.cluster.events import Event, IndexLost, RequestArrived
from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.state import ClusterView
from policies.kvbm.consolidate import DEDUPE
from policies.router.cached import SimulatedIndex
from policies.router.kv import Kv
from policies.router.kv_engine import KvEngine
from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.kvstreams import EngineNews
from twin.mocker.tierplan import TierPlan
from twin.mocker.worker import MockWorker
from twin.mocker.world import MockWorld

Blocks = set[tuple[int, int]]
"""Blocks by the branch they are in and their number."""


def as_one(plans: Iterable[TierPlan]) -> list[TierPlan]:
    return [replace(plan, events=DEDUPE) for plan in plans]


def blocks_of(runs: Iterable[BlockRun]) -> Blocks:
    return {(run.branch.uid, block) for run in runs for block in range(run.lo, run.hi)}


def indexed(router: Policy, worker_id: WorkerId) -> Blocks:
    """What the simulated index has of a worker."""
    assert isinstance(router, Kv)
    index = router._index
    assert isinstance(index, SimulatedIndex)
    assert index.is_flat, "a tier was named"
    branches = index._branches.get(worker_id, set()) | set(index._stranded.get(worker_id, {}))
    return {(b.uid, block) for b in branches for lo, hi in index._held(worker_id, b) for block in range(lo, hi)}


def in_engine_words(router: KvEngine, rank: RankId) -> set[BlockHash]:
    """What the index of engines' events has of a rank, blocks whose parents it does not know included."""
    assert router.engine_index is not None
    (index,) = router.engine_index.live._indexes.values()
    lineage = index._ranks[rank]
    assert not any(lineage.holds_any(tier) for tier in Tier if tier is not Tier.G1_DEVICE), "a tier was named"
    return known(router, rank)


class Look:
    """Compares at every arrival, and when it is asked, what the router knows with what the workers have. Orders
    nothing."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived})

    def __init__(self, *, lag_s: float = 0.0) -> None:
        self._late = lag_s > 0.0
        self.looks = 0

    def watch(self, world: MockWorld, router: Policy) -> None:
        self.world, self.router = world, router

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if not self._late:
            self.look()
        return ()

    def look(self) -> None:
        world = self.world
        for worker in world.workers.values():
            away = worker.down or worker.fenced or world.partitions.is_cut_off(worker.worker_id)
            if not away and worker.worker_id in world.controller.view.workers:
                self._compare(worker)

    def _compare(self, worker: MockWorker) -> None:
        """What leaves or comes in the running step is told at its end."""
        pool, tiers = worker.engine.pool, self.world.block_tiers
        assert tiers is not None
        own = [run for change in tiers.contents(worker.worker_id) if change.tier is not Tier.G4_REMOTE
               for run in change.runs]  # fmt: skip
        runs = ([*pool.findable(), *own], pool.removed, pool.stored)
        if isinstance(self.router, KvEngine):
            news = self.world.news
            assert isinstance(news, EngineNews)
            knows: set = in_engine_words(self.router, RankId(worker.worker_id, 0))
            held, leaves, comes = ({ext for run in some for ext in news.names.of(*run).exts} for some in runs)
        else:
            knows = indexed(self.router, worker.worker_id)
            held, leaves, comes = map(blocks_of, runs)
        assert knows <= held | leaves
        assert held <= knows | comes
        self.looks += 1


@dataclass(frozen=True)
class IndexBlow(Blow):
    """The router loses its index, and every worker says again what it has."""

    def act(self, world: MockWorld) -> None:
        world.news.learn_evictions(world.clock.over_s)
        world.post(IndexLost(at_s=world.clock.now, router=0))
        for worker in world.workers.values():
            if not (worker.down or worker.fenced or world.partitions.is_cut_off(worker.worker_id)):
                world.news.on_changed(worker)
                world.news.tell_all(worker)


INDEX_BLOWS = st.lists(st.integers(0, 150).map(lambda at: IndexBlow(at * 5.0, "index", 0)), max_size=3)
LAGS = st.sampled_from([0.0, 0.0, 0.004])


def perform_as_one(
    rows: list[Row], program: list[Blow], settings: EngineSettings, plans: Sequence[TierPlan], lag_s: float, words: bool
) -> tuple[list, list, Look]:
    look = Look(lag_s=lag_s)
    sinks, _, caches = perform(
        rows, program, replace(settings, tiers=True), FIXED, "kv", workers=2, lag_s=lag_s, tiers=as_one(plans),
        links=LINKS, in_engine_words=words, listeners=[look], before=look.watch,
    )  # fmt: skip
    look.look()
    return sinks.decisions, caches.notes, look


@examples(100)
@given(returning(), tight(), TIERS, blows(ties=True), tier_blows(), INDEX_BLOWS, LAGS, st.booleans(), st.booleans())
def test_what_the_router_knows_is_the_union_of_a_workers_tiers(
    rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow], lost: list[Blow],
    lag_s: float, words: bool, leap: bool,
) -> None:  # fmt: skip
    settings = engine_settings(**options | {"prefix_caching": True}, leap=leap)
    perform_as_one(rows, [*program, *more, *lost], settings, plans, lag_s, words)


@examples(60)
@given(busy(), INDEX_BLOWS, LAGS, st.booleans())
def test_it_is_where_tiers_load_most_of_the_time(demand: tuple, lost: list[Blow], lag_s: float, words: bool) -> None:
    rows, options, plans, program = demand
    settings = engine_settings(**options | {"prefix_caching": True})
    _, _, look = perform_as_one(rows, [*program, *lost], settings, plans, lag_s, words)
    assert look.looks or lag_s or any(blow.kind in ("kill", "drain") for blow in program)


@examples(60)
@given(st.sampled_from(KINDS), returning(), tight(), TIERS, blows(ties=True), tier_blows(), st.booleans(), st.data())
def test_it_is_with_engines_of_every_kind(
    kind: Kind, rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow],
    words: bool, data: st.DataObject,
) -> None:  # fmt: skip
    program = [blow for blow in program if blow.kind != "errors"]
    perform_as_one(kind.rows(rows, data), [*program, *more], sized(kind, options), plans, 0.0, words)


@examples(60)
@given(returning(), tight(), TIERS, blows(ties=True), tier_blows(), st.sampled_from([0.0, 0.004]))
def test_leaping_and_the_words_of_events_change_no_decision(
    rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow], lag_s: float
) -> None:
    settings = engine_settings(**options | {"prefix_caching": True})
    both = [*program, *more]
    leapt, stepped = (
        perform_as_one(rows, both, replace(settings, leap=leap), plans, lag_s, False) for leap in (True, False)
    )
    assert leapt[:2] == stepped[:2]
    if not lag_s:
        assert perform_as_one(rows, both, settings, plans, lag_s, True)[0] == leapt[0]


@examples(40)
@given(DEMANDS, TIERS)
def test_what_is_published_changes_nothing_where_the_router_ignores_content(
    demand: tuple[list[Row], dict], plans: list[TierPlan]
) -> None:
    """And of a worker's own tiers it is the same blocks, whichever way they are told."""
    rows, options = demand
    settings = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    each, one = (
        simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS, kv_events=True, tiers=some, links=LINKS)
        for some in (plans, as_one(plans))
    )
    assert each.sinks.requests == one.sinks.requests
    assert each.sinks.steps == one.sinks.steps
    assert each.world.block_tiers is not None
    assert one.world.block_tiers is not None
    assert each.world.block_tiers.figures() == one.world.block_tiers.figures()
    for told, as_union in zip(each.watcher.notes, one.watcher.notes, strict=True):
        assert union(told) == {worker: blocks for worker, blocks in as_union.items() if blocks}


def union(note: dict) -> dict:
    """Blocks by worker, in any of its own tiers."""
    found: dict = {}
    for place, blocks in note.items():
        worker = place[0] if isinstance(place, tuple) else place
        if worker is not None and blocks:
            found[worker] = found.get(worker, frozenset()) | blocks
    return found
