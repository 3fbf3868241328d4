"""Tiers below workers with several ranks: leaping changes nothing, tokens are those of a run without tiers, each block
is looked up once, and nothing is left over. Host memory and all below it belongs to the worker, whichever rank asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import router, router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import Blow, blows, perform
from test_kv_ranks import kv
from test_kvbm_faults import tier_blows
from test_kvbm_kinds import KINDS as OTHERS
from test_kvbm_kinds import TIERS, Kind, sized, trtllm
from test_kvbm_legs import same, tiered_programs
from test_kvbm_prefetch import ENGINES, QUEUE, crowds, fetching, mostly
from test_kvbm_world import LATENCY, LINKS, belows, nothing_is_left, returning, tiers, tight, widened
from test_legs_programs import Below, Program, carry_out

from policies.cluster.ids import RankId, Tier
from policies.router.build import build
from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.kvstreams import EngineNews
from twin.mocker.tierplan import TierPlan
from twin.mocker.world import Observation

MODES = st.sampled_from(["kv", "round-robin"])
KINDS = [
    Kind("vllm", lambda options: engine_settings(**options)),
    *OTHERS,
    Kind("trtllm, balanced", trtllm("guaranteed_no_evict", balance_wait=4)),
]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
RANKS = st.tuples(st.sampled_from([2, 3]), st.sampled_from([1, 1, 3]))


def ranked(kind: Kind, options: dict, ranks: tuple[int, int]) -> EngineSettings:
    return replace(sized(kind, options), ranks=ranks[0], prefill_interval=ranks[1])


def run(rows: list[Row], settings: EngineSettings, plans: Sequence[TierPlan] | None, *, leap: bool = True) -> Seen:
    settings = replace(settings, leap=leap, tiers=plans is not None)
    return simulate(
        rows,
        [(settings, LATENCY)] * 2,
        key_tokens=KEY_TOKENS,
        kv_events=True,
        tiers=plans,
        links=LINKS if plans is not None else (),
    )


@EACH
@examples(15)
@given(returning(), tight(), TIERS, RANKS, st.data())
def test_leaping_changes_nothing_and_tokens_are_the_same(
    kind: Kind, rows: list[Row], options: dict, plans: list[TierPlan], ranks: tuple[int, int], data: st.DataObject
) -> None:
    rows, settings = kind.rows(rows, data), ranked(kind, options, ranks)
    leapt, stepped = run(rows, settings, plans), run(rows, settings, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.watcher.held == stepped.watcher.held
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    figures = leapt.world.block_tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    assert len(leapt.ended) == len(rows)
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert figures["hits"]["lookups"] == sum(seq.prompt // settings.block_size for seq in admitted)
    nothing_is_left(leapt.world)
    plain = run(rows, settings, None)
    assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
        row: (status, request.made) for row, (request, status) in plain.ended.items()
    }


@EACH
@examples(15)
@given(
    returning(),
    tight(),
    TIERS,
    RANKS,
    blows(ties=True),
    tier_blows(),
    st.sampled_from(["kv", "round-robin"]),
    st.data(),
)
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    kind: Kind,
    rows: list[Row],
    options: dict,
    plans: list[TierPlan],
    ranks: tuple[int, int],
    program: list[Blow],
    more: list[Blow],
    mode: str,
    data: st.DataObject,
) -> None:
    rows, settings = kind.rows(rows, data), replace(ranked(kind, options, ranks), tiers=True)
    leapt, stepped = (
        perform(rows, program + more, replace(settings, leap=leap), LATENCY, mode, workers=2, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[6]], ids=lambda kind: kind.name)
@examples(15)
@given(tiered_programs(), RANKS, blows(ties=True), tier_blows(), st.booleans(), st.data())
def test_hand_offs_between_workers_with_ranks(
    kind: Kind,
    case: tuple[Program, Below],
    ranks: tuple[int, int],
    blown: list[Blow],
    more: list[Blow],
    calm: bool,
    data: st.DataObject,
) -> None:
    program, below = case
    prefill, decode = (
        replace(kind.of(side), tiers=True, ranks=ranks[0], prefill_interval=ranks[1])
        for side in (program.prefill, program.decode)
    )
    program = replace(program, rows=tuple(kind.rows(program.rows, data)), prefill=prefill, decode=decode)
    if not calm:
        same((program, below), [*blown, *more])
        return
    _, tiered, world = same((program, below))
    nothing_is_left(world)
    bare = replace(program, prefill=replace(prefill, tiers=False), decode=replace(decode, tiers=False))
    _, plain, _ = carry_out(bare, leap=True)
    assert {row: request.made for row, (request, _) in tiered.items()} == {
        row: request.made for row, (request, _) in plain.items()
    }


def test_what_is_fetched_for_those_who_wait_is_the_workers() -> None:
    """It waits in host memory for its request, whichever rank that goes to."""
    fetched: list[int] = []

    @examples(15)
    @given(crowds((10, 14)), ENGINES, fetching(), RANKS, MODES)
    def check(rows: list[Row], options: dict, plans: list[TierPlan], ranks: tuple[int, int], mode: str) -> None:
        settings = ranked(KINDS[0], options, ranks)

        def ran(leap: bool) -> Seen:
            policy = build(router_settings(mode, block_size=options["block_size"], queue=QUEUE))
            engines = [(replace(settings, leap=leap, tiers=True), LATENCY)] * 2
            return simulate(
                rows, engines, key_tokens=KEY_TOKENS, kv_events=True, policies=[policy], tiers=plans, links=LINKS
            )

        leapt, stepped = ran(True), ran(False)
        assert leapt.sinks.requests == stepped.sinks.requests
        assert leapt.sinks.decisions == stepped.sinks.decisions
        assert leapt.watcher.notes == stepped.watcher.notes
        assert leapt.world.block_tiers is not None
        assert stepped.world.block_tiers is not None
        ahead = leapt.world.block_tiers.figures()["prefetch"]
        assert ahead == stepped.world.block_tiers.figures()["prefetch"]
        assert ahead["fetched"] == ahead["used"] + ahead["wasted"]
        assert not leapt.world.block_tiers._fetching
        nothing_is_left(leapt.world)
        fetched.append(ahead["fetched"])

    check()
    mostly(fetched, 0.1)


@examples(15)
@given(returning(), tight(), st.one_of(tiers(), tiers().map(widened)), st.sampled_from([2, 3]))
def test_a_router_that_chooses_ranks_knows_what_each_can_reach(
    rows: list[Row], options: dict, plans: list[TierPlan], ranks: int
) -> None:
    """When the run is over, its account of a rank is what that rank has on its device, and its worker below."""
    settings = engine_settings(**options | {"prefix_caching": True}, ranks=ranks, tiers=True)

    def ran(leap: bool) -> Seen:
        policy = kv(options, route_ranks=True)
        seen = simulate(
            rows,
            [(replace(settings, leap=leap), LATENCY)] * 2,
            key_tokens=KEY_TOKENS,
            policies=[policy],
            observe=Observation(engine_events=True, ranks_apart=True),
            tiers=plans,
            links=LINKS,
            strict=True,
        )
        seen.policy = policy  # type: ignore[attr-defined]
        return seen

    leapt, stepped = ran(True), ran(False)
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.sinks.decisions == stepped.sinks.decisions
    told = leapt.policy.engine_index  # type: ignore[attr-defined]
    world = leapt.world
    assert isinstance(world.news, EngineNews)
    assert world.block_tiers is not None
    for worker_id, worker in world.workers.items():
        shown = world.block_tiers.contents(worker_id)
        own = sum(hi - lo for change in shown if change.tier is not Tier.G4_REMOTE for _, lo, hi in change.runs)
        for n, below in enumerate(belows(worker)):
            assert not below.manager.peers
            entries = told.dump(RankId(worker_id, n), 0, world.clock.now).entries
            known = sum(
                len(entry.exts) for entry in entries for tier in entry.tiers if tier in (Tier.G2_HOST, Tier.G3_DISK)
            )
            assert known == own
    assert not leapt.policy.counters()["gaps"]  # type: ignore[attr-defined]


@examples(15)
@given(returning(), tight(), st.one_of(tiers(), tiers().map(widened)), st.sampled_from([0.0, 0.004]))
def test_without_routed_ranks_both_indexes_decide_the_same(
    rows: list[Row], options: dict, plans: list[TierPlan], lag_s: float
) -> None:
    settings = engine_settings(**options | {"prefix_caching": True}, ranks=2, tiers=True)
    engine, told = (
        simulate(
            rows,
            [(settings, LATENCY)] * 2,
            key_tokens=KEY_TOKENS,
            policies=[router("kv", block_size=options["block_size"], index=index)],
            observe=Observation(kv_event_lag_s=lag_s, engine_events=index == "engine"),
            tiers=plans,
            links=LINKS,
            strict=True,
        )
        for index in ("engine", "simulated")
    )
    assert engine.sinks.decisions == told.sinks.decisions
    assert engine.sinks.requests == told.sinks.requests
