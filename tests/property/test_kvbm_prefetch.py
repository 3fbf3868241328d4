"""Prefetching for requests that wait in the router: leaping changes nothing, answers neither; what was fetched was used
or wasted, and nothing is held for anybody who is gone."""

from __future__ import annotations

from dataclasses import replace

from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import FIXED, Blow, blows, perform
from test_kvbm_faults import busy, tier_blows
from test_kvbm_world import LATENCY, LINKS, returning, tiers, tight

from policies.cluster.ids import Tier
from policies.kvbm.prefetch import PrefetchLimits
from policies.router.build import build
from policies.router.queue import QueueClass, QueueSettings
from twin.mocker.demand import Row
from twin.mocker.tierplan import LevelPlan, TierPlan
from twin.mocker.world import MockWorld

QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=0,
    busy_worker_share=1.0,
    requests_per_worker=None,
    tokens_per_worker=None,
    max_wait_s=None,
    classes=(QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=100, order="fcfs", waits=True),),
)


@st.composite
def in_turn(draw: st.DrawFn) -> list[Row]:
    """Prompts of a few families, more than host memory holds: one by one at first, then faster than they are
    computed."""
    families = draw(st.integers(2, 4))
    calm = draw(st.integers(families, 2 * families))
    rows = []
    at_ms = 0
    for n in range(calm + draw(st.integers(4, 12))):
        at_ms += 150 if n < calm else draw(st.sampled_from([0, 5, 20]))
        keys = [100 * (n % families) + i for i in range(draw(st.integers(4, 5)))]
        rows.append(trace_row(n, at_ms / 1e3, len(keys) * KEY_TOKENS, draw(st.integers(1, 3)), keys))
    return rows


@st.composite
def crowds(draw: st.DrawFn, families: tuple[int, int] = (5, 8)) -> list[Row]:
    """Prompts of more families than devices and host memory hold, one by one at first, then all at once: most of those
    who wait have theirs on disk or in the remote store."""
    kinds = draw(st.integers(*families))
    rows = []
    at_ms = 0
    for n in range(kinds + draw(st.integers(8, 14))):
        at_ms += 150 if n < kinds else draw(st.sampled_from([0, 5, 20]))
        keys = [100 * (n % kinds) + i for i in range(draw(st.integers(4, 5)))]
        rows.append(trace_row(n, at_ms / 1e3, len(keys) * KEY_TOKENS, draw(st.integers(1, 3)), keys))
    return rows


def lets_in(options: dict) -> dict:
    """The same engine with a budget for a whole prompt, so that none is refused."""
    return options | {"max_num_batched_tokens": max(64, options["max_num_batched_tokens"])}


ENGINES = tight().map(lets_in)
ROUTERS = st.sampled_from(["kv", "round-robin", "least-loaded"])


def _deep(plans: list[TierPlan]) -> bool:
    there = [level.spec.tier for level in plans[0].levels]
    return Tier.G2_HOST in there and len(there) > 1


@st.composite
def fetching(draw: st.DrawFn) -> list[TierPlan]:
    """Tiers with host memory and something below it, that takes what it is offered."""
    limits = PrefetchLimits(
        link_share=draw(st.sampled_from([0.25, 1.0])), tier_share=draw(st.sampled_from([0.1, 0.5, 1.0]))
    )
    host_blocks = draw(st.sampled_from([10, 30]))

    def roomy(level: LevelPlan) -> LevelPlan:
        blocks = host_blocks if level.spec.tier is Tier.G2_HOST else 500
        spec = replace(level.spec, capacity_bytes=blocks * 100, block_bytes=100, latency_s=0.0005)
        return replace(level, spec=spec, offload="presence", trigger="on_complete")

    return [
        replace(plan, prefetch=limits, levels=tuple(roomy(level) for level in plan.levels))
        for plan in draw(tiers().filter(_deep))
    ]


def run(rows: list[Row], options: dict, plans: list[TierPlan], mode: str, *, leap: bool) -> Seen:
    settings = engine_settings(**options | {"prefix_caching": True}, leap=leap, tiers=True)
    router = build(router_settings(mode, block_size=options["block_size"], queue=QUEUE))
    return simulate(
        rows,
        [(settings, LATENCY)] * 2,
        key_tokens=KEY_TOKENS,
        kv_events=True,
        policies=[router],
        tiers=plans,
        links=LINKS,
    )


@examples(80)
@given(st.one_of(in_turn(), returning()), tight(), fetching(), ROUTERS)
def test_what_is_fetched_ahead_changes_when_things_happen_and_not_what(
    rows: list[Row], options: dict, plans: list[TierPlan], mode: str
) -> None:
    same_answers(rows, options, plans, mode)


def test_much_is_fetched_and_used() -> None:
    seen: list[tuple[int, int]] = []

    @examples(80)
    @given(crowds(), ENGINES, fetching(), ROUTERS)
    def check(rows: list[Row], options: dict, plans: list[TierPlan], mode: str) -> None:
        seen.append(same_answers(rows, options, plans, mode))

    check()
    mostly([fetched for fetched, _ in seen], 0.15)
    mostly([used for _, used in seen], 0.1)


def mostly(blocks: list[int], share: float) -> None:
    """In so many of the runs there were any."""
    done = sum(1 for n in blocks if n)
    assert done >= share * len(blocks), f"in {done} of {len(blocks)} runs"


def same_answers(rows: list[Row], options: dict, plans: list[TierPlan], mode: str) -> tuple[int, int]:
    """Leaping and fetching change no answer; returns the blocks that were fetched, and used."""
    leapt, stepped = (run(rows, options, plans, mode, leap=leap) for leap in (True, False))
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.sinks.decisions == stepped.sinks.decisions
    assert leapt.watcher.notes == stepped.watcher.notes
    tiers = leapt.world.block_tiers
    assert tiers is not None
    assert stepped.world.block_tiers is not None
    figures = tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert figures["hits"]["lookups"] == sum(seq.prompt // options["block_size"] for seq in admitted)
    assert not tiers._fetching
    assert all(lane.manager.idle for lane in tiers.lanes.values())
    ahead = figures["prefetch"]
    assert ahead["fetched"] == ahead["used"] + ahead["wasted"]
    without = run(rows, options, [replace(plan, prefetch=None) for plan in plans], mode, leap=True)
    assert {row: (request.made, status) for row, (request, status) in leapt.ended.items()} == {
        row: (request.made, status) for row, (request, status) in without.ended.items()
    }
    return ahead["fetched"], ahead["used"]


@examples(80)
@given(busy(), fetching(), st.sampled_from(["kv", "round-robin"]))
def test_nothing_is_held_for_the_lost_when_workers_and_tiers_break(
    demand: tuple, plans: list[TierPlan], mode: str
) -> None:
    rows, options, _, program = demand
    _same(rows, options, plans, program, mode)


def test_much_is_fetched_while_workers_and_tiers_break() -> None:
    fetched: list[int] = []

    @examples(80)
    @given(crowds(), ENGINES, fetching(), blows(ties=True), tier_blows(), st.sampled_from(["kv", "round-robin"]))
    def check(
        rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], more: list[Blow], mode: str
    ) -> None:
        late = [replace(blow, at_ms=blow.at_ms + 600) for blow in (*program, *more)]  # when many wait
        fetched.append(_same(rows, options, plans, late, mode))

    check()
    mostly(fetched, 0.1)


def _same(rows: list[Row], options: dict, plans: list[TierPlan], program: list[Blow], mode: str) -> int:
    worlds: list[MockWorld] = []
    engine = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    leapt, stepped = (
        perform(
            rows,
            program,
            replace(engine, leap=leap),
            FIXED,
            mode,
            workers=2,
            tiers=plans,
            links=LINKS,
            queue=QUEUE,
            before=lambda world, _: worlds.append(world),
        )
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    block_tiers = worlds[0].block_tiers
    assert block_tiers is not None
    return int(block_tiers.figures()["prefetch"]["fetched"])
