"""Tenants with a quota of a tier: none ever has more of it, in tiers of their own workers and in those that all share;
leaping changes nothing, and hits add up."""

from __future__ import annotations

from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_kvbm_world import returning, run, tiers, tight

from policies.kvbm.level import TRIGGERS
from twin.mocker.demand import Row
from twin.mocker.tierplan import TierPlan

TENANTS = ("a", "b", "c")


@examples(200)
@given(
    returning(),
    tight(),
    tiers(),
    st.integers(1, 30),
    st.sampled_from(TRIGGERS),
    st.lists(st.sampled_from(TENANTS), min_size=20, max_size=20),
)
def test_no_tenant_has_more_than_its_quota(
    rows: list[Row], options: dict, plans: list[TierPlan], quota: int, trigger: str, names: list[str]
) -> None:
    rows = [row._replace(tenant=names[n % len(names)]) for n, row in enumerate(rows)]
    limited = [
        replace(
            plan,
            quota_blocks=quota,
            levels=tuple(replace(level, offload="presence+tenant_quota", trigger=trigger) for level in plan.levels),
        )
        for plan in plans
    ]
    leapt, stepped = (run(rows, options, limited, leap=leap) for leap in (True, False))
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    figures = leapt.world.block_tiers.figures()
    assert figures == stepped.world.block_tiers.figures()
    owners = leapt.world.block_tiers.owners
    for lane in leapt.world.block_tiers.lanes.values():
        for level in lane.manager.levels:
            held = dict.fromkeys(TENANTS, 0)
            for branch, lo, hi in level.body.store.findable():
                who = owners.of(branch)
                assert who is not None, "content that nobody brought"
                held[who] += hi - lo
            assert max(held.values()) <= quota
            assert level.body.shares is not None
            assert level.body.shares.all() == {who: blocks for who, blocks in held.items() if blocks}
