"""Simulated workers with tiers below their devices: leaping changes nothing, every request ends, blocks add up, and
each full block of a prompt is in one class."""

from __future__ import annotations

from dataclasses import replace

from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS, engines, traces

from policies.cluster.ids import Tier
from policies.kvbm.build import EVICTIONS
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import TRIGGERS, WHEN_FULL
from policies.kvbm.look_up import Rule
from policies.kvbm.registry import RegistryRules
from policies.kvbm.tiers import TierSpec
from policies.router.build import build
from policies.router.kv import Kv
from twin.engine.below import Below
from twin.engine.tiered import TieredEngine
from twin.engine.tiered_ranks import TieredRankedEngine
from twin.mocker.demand import Row
from twin.mocker.tierplan import LevelPlan, TierPlan
from twin.mocker.worker import MockWorker
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency
from twin.perf.links import FAIR, FIFO, Link

BLOCK_BYTES = 1000
LINKS = (
    *(Link(name=f"cpu:w{n}", bytes_per_s=4e6, discipline=FIFO, duplex=True) for n in range(4)),
    *(Link(name=f"disk:w{n}", bytes_per_s=5e5, discipline=FAIR, duplex=False) for n in range(4)),
    Link(name="remote", bytes_per_s=2e5, discipline=FAIR, duplex=False),
)
FILTERS = ["presence", "pass_all", "presence_lfu", "presence+frequency_filter"]
LATENCY = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)


@st.composite
def returning(draw: st.DrawFn) -> list[Row]:
    """Prompts of four families that come again and again, some of them at one instant, with ends of their own."""
    rows = []
    at_ms = 0
    for n in range(draw(st.integers(6, 20))):
        at_ms += draw(st.sampled_from([0, 0, 1, 5, 40, 150]))
        family = draw(st.integers(0, 3))
        keys = [family * 100 + i for i in range(draw(st.integers(3, 6)))]
        keys += [1000 + n] * draw(st.integers(0, 1))
        short = draw(st.integers(0, KEY_TOKENS - 1))
        rows.append(trace_row(n, at_ms / 1e3, len(keys) * KEY_TOKENS - short, draw(st.integers(1, 6)), keys))
    return rows


@st.composite
def tight(draw: st.DrawFn) -> dict:
    """Engines whose device holds hardly more than one prompt."""
    size = draw(st.sampled_from([1, 2, 4]))
    return draw(engines()) | {
        "block_size": size,
        "blocks": 7 * KEY_TOKENS // size + draw(st.integers(2, 20)),
        "max_num_batched_tokens": draw(st.sampled_from([8, 64, 4096])),
    }


DEMANDS = st.one_of(st.tuples(returning(), tight()), st.tuples(returning(), tight()), st.tuples(traces(), engines()))


REGISTRIES = st.builds(
    RegistryRules,
    lookup_s=st.sampled_from([0.001, 0.005, 0.0137, 0.02, 0.05]),
    lease_s=st.sampled_from([0.03, 0.09, 60.0]),
    negative_s=st.sampled_from([0.0, 0.05, 1.0]),
)


@st.composite
def tiers(draw: st.DrawFn, workers: int = 2) -> list[TierPlan]:
    """The same tiers for each worker; the remote one is common to all."""
    wanted = draw(st.lists(st.sampled_from(list(Tier)[1:]), min_size=1, max_size=3, unique=True))
    rule = draw(st.sampled_from([Rule(), Rule(), Rule("faster"), Rule("deadline", 0.01)]))
    rules = BatchRules(
        max_blocks=draw(st.integers(2, 9)), min_blocks=2, flush_s=draw(st.sampled_from([0.0, 0.01, 0.05]))
    )
    bounce = draw(st.booleans())
    registry = draw(st.none() | REGISTRIES)
    latency_s = draw(st.sampled_from([0.0005, 0.02, 0.06]))
    options = {
        tier: {
            "offload": draw(st.sampled_from(FILTERS)),
            "trigger": draw(st.sampled_from(TRIGGERS)),
            "eviction": draw(st.sampled_from(sorted(EVICTIONS))),
            "when_full": draw(st.sampled_from(WHEN_FULL)),
        }
        for tier in wanted
    }
    sizes = {tier: draw(st.sampled_from([3, 20, 60, 200])) for tier in wanted}
    plans = []
    for n in range(workers):
        up, down = ((f"cpu:w{n}/rx",),), ((f"cpu:w{n}/tx",),)
        own = {Tier.G2_HOST: down, Tier.G3_DISK: ((f"disk:w{n}",),), Tier.G4_REMOTE: (("remote",),)}
        hops = {tier: (lanes, up) if bounce else ((lanes[0] + up[0],),) for tier, lanes in own.items()}
        hops[Tier.G2_HOST] = (up,)
        levels = tuple(
            LevelPlan(
                spec=TierSpec(
                    tier=tier,
                    capacity_bytes=sizes[tier] * BLOCK_BYTES,
                    block_bytes=BLOCK_BYTES,
                    latency_s=latency_s,
                    bytes_per_s=1e6,
                    is_shared=tier is Tier.G4_REMOTE,
                ),
                down=own[tier],
                hops=(up,)
                if tier is Tier.G2_HOST
                else (own[tier], up)
                if bounce
                else (((own[tier][0][0], up[0][0]),),),
                shared_key="remote" if tier is Tier.G4_REMOTE else None,
                **options[tier],
            )
            for tier in Tier
            if tier in wanted
        )
        plans.append(TierPlan(levels=levels, rule=rule, batches=rules, min_lfu_count=1, decay_s=0.1, registry=registry))
    return plans


def widened(plans: list[TierPlan]) -> list[TierPlan]:
    """Wide tiers that take everything at once, and load all that they have: much comes up."""

    def wide(level: LevelPlan) -> LevelPlan:
        spec = replace(level.spec, capacity_bytes=400 * BLOCK_BYTES)
        return replace(level, spec=spec, offload="presence", trigger="on_complete")

    return [replace(plan, rule=Rule(), levels=tuple(map(wide, plan.levels))) for plan in plans]


def run(rows: list[Row], options: dict, plans: list[TierPlan], *, leap: bool) -> Seen:
    settings = engine_settings(**options | {"prefix_caching": True}, leap=leap, tiers=True)
    engines = [(settings, LATENCY)] * len(plans)
    return simulate(rows, engines, key_tokens=KEY_TOKENS, kv_events=True, tiers=plans, links=LINKS)


@examples(150)
@given(DEMANDS, tiers())
def test_leaping_changes_nothing_and_every_request_ends(demand: tuple[list[Row], dict], plans: list[TierPlan]) -> None:
    rows, options = demand
    leapt = run(rows, options, plans, leap=True)
    stepped = run(rows, options, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.watcher.held == stepped.watcher.held
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    assert leapt.world.block_tiers.figures() == stepped.world.block_tiers.figures()
    assert len(leapt.ended) == len(rows)
    hits = leapt.world.block_tiers.figures()["hits"]
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert hits["lookups"] == sum(seq.prompt // options["block_size"] for seq in admitted)
    nothing_is_left(leapt.world)


def nothing_is_left(world: MockWorld) -> None:
    """Whatever was to come up or go down on a worker that is there has done so."""
    for worker in world.workers.values():
        if worker.down:
            continue
        for below in belows(worker):
            assert below.is_quiet, "something was begun and never taken up"
            assert below.manager.idle, "everything that was to move has moved"
            for level in below.manager.levels:
                assert not level.body.underway.blocks


def belows(worker: MockWorker) -> list[Below]:
    """What lies below the device of each rank."""
    engine = worker.engine
    if isinstance(engine, TieredRankedEngine):
        return [rank.below for rank in engine.tiered]
    return [engine.below]  # type: ignore[attr-defined]


@examples(150)
@given(DEMANDS, tiers())
def test_tiers_change_when_things_happen_and_not_what(demand: tuple[list[Row], dict], plans: list[TierPlan]) -> None:
    """Tokens are the same with tiers and without; nobody who ran before fails now."""
    rows, options = demand
    with_tiers = run(rows, options, plans, leap=True)
    settings = engine_settings(**options | {"prefix_caching": True})
    plain = simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS)
    assert {row: status for row, (_, status) in with_tiers.ended.items()} == {
        row: status for row, (_, status) in plain.ended.items()
    }
    assert {row: request.made for row, (request, _) in with_tiers.ended.items()} == {
        row: request.made for row, (request, _) in plain.ended.items()
    }


@examples(100)
@given(st.tuples(returning(), tight()), tiers())
def test_the_router_knows_what_lies_in_tiers(demand: tuple[list[Row], dict], plans: list[TierPlan]) -> None:
    """When the run is over, its account of lower tiers is what the tiers hold; the remote one counts once."""
    rows, options = demand
    router = build(router_settings("kv", block_size=options["block_size"]))
    settings = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    seen = simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS, policies=[router], tiers=plans, links=LINKS)
    bodies = {
        level.body
        for worker in seen.world.workers.values()
        if isinstance(worker.engine, TieredEngine)
        for level in worker.engine.below.manager.levels
    }
    held = sum(run.hi - run.lo for body in bodies for run in body.store.findable() if run.branch.shareable)
    assert isinstance(router, Kv)
    assert router.counters()["lower_tier_blocks"] == held
    assert not router.counters()["unknown_removals"]
