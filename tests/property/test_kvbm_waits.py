"""Loads that meet running stores: leaping changes nothing, answers are those of a run without tiers, every block is in
one class, and nobody is left waiting."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_kvbm_world import BLOCK_BYTES, LATENCY, nothing_is_left, run

from policies.cluster.ids import Tier
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.tiers import TierSpec
from twin.mocker.demand import Row
from twin.mocker.tierplan import LevelPlan, TierPlan

WAITED: list[int] = []


@st.composite
def returning_soon(draw: st.DrawFn) -> tuple[list[Row], dict]:
    """Prompts in turn on devices that hold hardly more than one: what was pushed down is asked for again at once."""
    size = draw(st.sampled_from([2, 3]))
    rows = []
    at_ms = 0
    for n in range(draw(st.integers(6, 18))):
        at_ms += draw(st.sampled_from([0, 5, 20, 35, 60]))
        family = 100 * draw(st.integers(0, 2))
        keys = [family + i for i in range(draw(st.integers(3, 5)))]
        rows.append(trace_row(n, at_ms / 1e3, len(keys) * KEY_TOKENS, draw(st.integers(1, 4)), keys))
    options = {
        "block_size": size,
        "blocks": 6 * KEY_TOKENS // size + draw(st.integers(0, 6)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4])),
    }
    return rows, options


@st.composite
def slow_stores(draw: st.DrawFn) -> list[TierPlan]:
    """Host memory that blocks take long to reach, and come from."""
    rule = draw(st.sampled_from([Rule(), Rule(), Rule("faster"), Rule("deadline", 0.1)]))
    batches = BatchRules(
        max_blocks=draw(st.integers(2, 20)), min_blocks=1, flush_s=0.0, at_once=draw(st.integers(1, 3))
    )
    spec = TierSpec(
        tier=Tier.G2_HOST,
        capacity_bytes=draw(st.sampled_from([20, 60])) * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        latency_s=draw(st.sampled_from([0.02, 0.05])),
        bytes_per_s=4e6,
    )
    return [
        TierPlan(
            levels=(
                LevelPlan(
                    spec=spec,
                    offload="presence",
                    trigger="on_evict",
                    eviction="lineage",
                    when_full="evict",
                    down=((f"cpu:w{n}/tx",),),
                    hops=(((f"cpu:w{n}/rx",),),),
                ),
            ),
            rule=rule,
            batches=batches,
            min_lfu_count=1,
            decay_s=0.1,
        )
        for n in range(2)
    ]


@examples(300)
@given(returning_soon(), slow_stores())
def test_who_waits_for_a_store_gets_what_it_would_have_computed(
    demand: tuple[list[Row], dict], plans: list[TierPlan]
) -> None:
    rows, options = demand
    leapt, stepped = (run(rows, options, plans, leap=leap) for leap in (True, False))
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.held == stepped.watcher.held
    tiers = leapt.world.block_tiers
    assert tiers is not None
    assert stepped.world.block_tiers is not None
    assert tiers.figures() == stepped.world.block_tiers.figures()
    nothing_is_left(leapt.world)
    WAITED.append(sum(lane.loads.waits for lane in tiers.lanes.values()))
    hits = tiers.figures()["hits"]
    assert hits["lookups"] == sum(row.isl // options["block_size"] for row in rows)
    settings = engine_settings(**options | {"prefix_caching": True})
    plain = simulate(rows, [(settings, LATENCY)] * 2, key_tokens=KEY_TOKENS)
    assert {row: (request.made, status) for row, (request, status) in leapt.ended.items()} == {
        row: (request.made, status) for row, (request, status) in plain.ended.items()
    }


def test_they_did_wait() -> None:
    """Of the runs above, which this one comes after."""
    if WAITED:
        assert sum(1 for n in WAITED if n) > len(WAITED) / 10
