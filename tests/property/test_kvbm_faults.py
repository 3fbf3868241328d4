"""Workers with tiers under random losses of workers and tiers, cancellations, damage: nothing leaks, no request is
lost, and leaping changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings
from test_faults_programs import FIXED, Blow, blows, perform
from test_kvbm_world import LINKS, returning, tiers, tight

from policies.cluster.ids import Tier
from twin.mocker.demand import Row
from twin.mocker.tiers import TierPlan
from twin.mocker.world import MockWorld


@dataclass(frozen=True)
class TierBlow(Blow):
    """Something that happens to a tier of a worker, or stops happening."""

    tier: Tier = Tier.G2_HOST

    def act(self, world: MockWorld) -> None:
        assert world.block_tiers is not None
        lanes = list(world.block_tiers.up.values())
        lane = lanes[self.target % len(lanes)] if lanes else None
        if lane is None or not lane.has(self.tier):
            return
        how, _, mended = self.kind.partition(" ")
        if mended:
            lane.mend_tier(self.tier, how)
        else:
            lane.break_tier(self.tier, how, 0.3)


@st.composite
def tier_blows(draw: st.DrawFn) -> list[Blow]:
    kinds = [f"{how}{over}" for how in ("tier_down", "tier_full", "tier_corrupt") for over in ("", " over")]
    return [
        TierBlow(
            draw(st.integers(0, 200)) * 5.0,
            draw(st.sampled_from(kinds)),
            draw(st.integers(0, 1)),
            tier=draw(st.sampled_from(list(Tier)[1:])),
        )
        for _ in range(draw(st.integers(0, 8)))
    ]


@examples(300)
@given(
    returning(), tight(), tiers(), blows(ties=True), tier_blows(), st.sampled_from(["kv", "round-robin"]),
    st.sampled_from([0.0, 0.004]),
)  # fmt: skip
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    rows: list[Row],
    options: dict,
    plans: Sequence[TierPlan],
    program: list[Blow],
    more: list[Blow],
    mode: str,
    lag_s: float,
) -> None:
    engine = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    leapt, stepped = (
        perform(
            rows,
            program + more,
            replace(engine, leap=leap),
            FIXED,
            mode,
            workers=2,
            lag_s=lag_s,
            tiers=plans,
            links=LINKS,
        )
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes
