"""Host memory that workers of a node share, in random programs: leaping changes nothing, tokens are those of a run
without tiers, nothing is left over, and whoever listens knows of each worker what it can reach."""

from __future__ import annotations

from dataclasses import replace

from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, simulate
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import FIXED, Blow, blows, perform
from test_kvbm_faults import tier_blows
from test_kvbm_peers import wandering
from test_kvbm_prefetch import ENGINES, mostly
from test_kvbm_world import LATENCY, LINKS, nothing_is_left, returning, run, tiers, tight, widened

from policies.cluster.ids import Tier
from policies.router.build import build
from policies.router.kv import Kv
from twin.mocker.demand import Row
from twin.mocker.tierplan import TierPlan
from twin.mocker.world import MockWorld


def of_one_node(plans: list[TierPlan], workers: int = 2) -> list[TierPlan]:
    """The same with one host memory for the first so many workers."""
    return [
        replace(
            plan,
            levels=tuple(
                replace(level, shared_key="cpu") if level.spec.tier is Tier.G2_HOST and n < workers else level
                for level in plan.levels
            ),
        )
        for n, plan in enumerate(plans)
    ]


def _has_host(plans: list[TierPlan]) -> bool:
    return plans[0].levels[0].spec.tier is Tier.G2_HOST


NODES = st.one_of(tiers(3), tiers(3).map(widened)).filter(_has_host).map(of_one_node)


def from_others(world: MockWorld) -> int:
    """Blocks that came up to a worker that had not stored as many."""
    assert world.block_tiers is not None
    counts = [lane.manager.levels[0].counts for lane in world.block_tiers.lanes.values()]
    return sum(max(0, each.loaded - each.stored) for each in counts)


@examples(60)
@given(returning(), tight(), NODES)
def test_leaping_changes_nothing_and_neither_do_tiers(rows: list[Row], options: dict, plans: list[TierPlan]) -> None:
    leapt, stepped = (run(rows, options, plans, leap=leap) for leap in (True, False))
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.watcher.held == stepped.watcher.held
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    assert leapt.world.block_tiers.figures() == stepped.world.block_tiers.figures()
    nothing_is_left(leapt.world)
    settings = engine_settings(**options | {"prefix_caching": True})
    plain = simulate(rows, [(settings, LATENCY)] * 3, key_tokens=KEY_TOKENS)
    assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
        row: (status, request.made) for row, (request, status) in plain.ended.items()
    }


def test_much_comes_from_what_others_stored() -> None:
    blocks: list[int] = []

    @examples(25)
    @given(wandering(), ENGINES, tiers(3).filter(_has_host).map(widened).map(lambda plans: of_one_node(plans, 3)))
    def check(rows: list[Row], options: dict, plans: list[TierPlan]) -> None:
        router = build(router_settings("round-robin", block_size=options["block_size"]))
        settings = engine_settings(**options | {"prefix_caching": True}, tiers=True)
        seen = simulate(
            rows, [(settings, LATENCY)] * 3, key_tokens=KEY_TOKENS, policies=[router], tiers=plans, links=LINKS
        )
        blocks.append(from_others(seen.world))

    check()
    mostly(blocks, 0.5)


@examples(60)
@given(returning(), tight(), NODES, blows(ties=True), tier_blows(), st.sampled_from(["kv", "round-robin"]))
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow], mode: str
) -> None:
    engine = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    leapt, stepped = (
        perform(rows, program + more, replace(engine, leap=leap), FIXED, mode, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes


@examples(40)
@given(returning(), tight(), NODES)
def test_the_router_knows_what_each_worker_reaches(rows: list[Row], options: dict, plans: list[TierPlan]) -> None:
    """Blocks of the node count for each of its workers, the remote store once; both indexes decide the same."""
    settings = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    router = build(router_settings("kv", block_size=options["block_size"]))
    seen = simulate(rows, [(settings, LATENCY)] * 3, key_tokens=KEY_TOKENS, policies=[router], tiers=plans, links=LINKS)
    assert seen.world.block_tiers is not None
    own, shared = 0, set()
    for worker_id in seen.world.workers:
        for change in seen.world.block_tiers.contents(worker_id):
            if change.tier is Tier.G4_REMOTE:
                shared |= {(run.branch, block) for run in change.runs for block in range(run.lo, run.hi)}
            else:
                own += sum(hi - lo for _, lo, hi in change.runs)
    assert isinstance(router, Kv)
    assert router.counters()["lower_tier_blocks"] == own + len(shared)
    assert not router.counters()["unknown_removals"]
