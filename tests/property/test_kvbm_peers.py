"""Workers that read host memory of each other: leaping changes nothing, tokens are the same as without, each block is
counted once, and nothing is left over."""

from __future__ import annotations

from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_kvbm_world import BLOCK_BYTES, DEMANDS, nothing_is_left, run, tiers, widened

from policies.cluster.ids import Tier
from policies.kvbm.tiers import TierSpec
from twin.mocker.demand import Row
from twin.mocker.tierplan import PeerPlan, TierPlan


@st.composite
def reading(draw: st.DrawFn) -> list[TierPlan]:
    """Three workers with host memory, some of them with another layout; reads cross the wires of both."""
    plans = draw(tiers(workers=3).filter(lambda plans: plans[0].levels[0].spec.tier is Tier.G2_HOST))
    if draw(st.booleans()):
        plans = widened(plans)
    latency_s = draw(st.sampled_from([0.0, 0.004, 0.05]))
    spec = TierSpec(
        tier=Tier.G2_HOST, capacity_bytes=None, block_bytes=BLOCK_BYTES, latency_s=latency_s, bytes_per_s=1e6
    )
    return [
        replace(
            plan,
            peers=PeerPlan(
                spec=spec,
                layout=draw(st.sampled_from(["a", "a", "b"])),
                out=((f"disk:w{n}",),),
                into=((f"disk:w{n}",),),
                up=((f"cpu:w{n}/rx",),),
            ),
        )
        for n, plan in enumerate(plans)
    ]


@examples(300)
@given(DEMANDS, reading())
def test_reading_from_peers(demand: tuple[list[Row], dict], plans: list[TierPlan]) -> None:
    rows, options = demand
    leapt = run(rows, options, plans, leap=True)
    stepped = run(rows, options, plans, leap=False)
    assert leapt.sinks.requests == stepped.sinks.requests
    block_tiers = leapt.world.block_tiers
    assert block_tiers is not None
    assert stepped.world.block_tiers is not None
    figures = block_tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    alone = run(rows, options, [replace(plan, peers=None) for plan in plans], leap=True)
    assert {row: (status, request.made) for row, (request, status) in leapt.ended.items()} == {
        row: (status, request.made) for row, (request, status) in alone.ended.items()
    }
    seqs = [request.admitted for request, _ in leapt.ended.values()]
    admitted = [seq for seq in seqs if seq is not None and seq.admit_s is not None]
    assert figures["hits"]["lookups"] == sum(seq.prompt // options["block_size"] for seq in admitted)
    nothing_is_left(leapt.world)
    block_tiers.audit()
    held = sum(
        hi - lo for lane in block_tiers.lanes.values() for _, lo, hi in lane.manager.levels[0].body.store.findable()
    )
    assert len(block_tiers.peers.memory) == held, "on record is what is there"
