"""Workers with tiers under random losses of workers and tiers, cancellations, damage: nothing leaks, no request is
lost, and leaping changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import engine_settings, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import FIXED, Blow, blows, perform
from test_kvbm_world import BLOCK_BYTES, LINKS, returning, tiers, tight

from policies.cluster.ids import Tier
from policies.kvbm.look_up import Rule
from twin.mocker.demand import Row
from twin.mocker.tierplan import TierPlan
from twin.mocker.world import MockWorld


@dataclass(frozen=True)
class TierBlow(Blow):
    """Something that happens to a tier of a worker, or stops happening."""

    pick: int = 0

    def act(self, world: MockWorld) -> None:
        assert world.block_tiers is not None
        lanes = list(world.block_tiers.up.values())
        lane = lanes[self.target % len(lanes)] if lanes else None
        if lane is None:
            return
        there = [tier for tier in Tier if lane.has(tier)]
        tier = there[self.pick % len(there)]
        how, _, mended = self.kind.partition(" ")
        if mended:
            lane.mend_tier(tier, how)
        else:
            lane.break_tier(tier, how, 0.3)


@st.composite
def tier_blows(draw: st.DrawFn) -> list[Blow]:
    kinds = [f"{how}{over}" for how in ("tier_down", "tier_full", "tier_corrupt") for over in ("", " over", " over")]
    return [
        TierBlow(
            draw(st.integers(0, 150)) * 5.0,
            draw(st.sampled_from(kinds)),
            draw(st.integers(0, 1)),
            pick=draw(st.integers(0, 2)),
        )
        for _ in range(draw(st.integers(1, 10)))
    ]


@st.composite
def busy(draw: st.DrawFn) -> tuple[list[Row], dict, list[TierPlan], list[Blow]]:
    """Two workers that load most of the time: three prompts in turn, a device that holds one, wide tiers far away."""
    size = draw(st.sampled_from([2, 4]))
    rows = []
    for n in range(draw(st.integers(8, 24))):
        keys = [100 * (n // 2 % 3) + i for i in range(5)]
        rows.append(trace_row(n, n * 0.035, 5 * KEY_TOKENS, draw(st.integers(1, 4)), keys))
    options = {"block_size": size, "blocks": 6 * KEY_TOKENS // size, "max_num_seqs": draw(st.sampled_from([1, 2]))}
    trigger = draw(st.sampled_from(["on_complete", "on_evict", "on_evict"]))  # with the latter, loads meet stores
    plans = [
        replace(
            plan,
            rule=Rule(),
            levels=tuple(
                replace(
                    level,
                    spec=replace(level.spec, capacity_bytes=200 * BLOCK_BYTES, latency_s=0.02),
                    offload="presence",
                    trigger=trigger,
                )
                for level in plan.levels
            ),
        )
        for plan in draw(tiers())
    ]
    program = [
        blow
        for blow in (*draw(blows(ties=True)), *draw(tier_blows()))
        if blow.kind in ("kill", "restore", "cancel", "drain") or isinstance(blow, TierBlow)
    ]
    return rows, options, plans, program


@examples(150)
@given(busy(), st.sampled_from(["kv", "round-robin"]))
def test_loads_that_break_off_lose_no_request(demand: tuple, mode: str) -> None:
    rows, options, plans, program = demand
    _same(rows, options, plans, program, mode, 0.0)


@examples(150)
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
    _same(rows, options, plans, program + more, mode, lag_s)


def _same(
    rows: list[Row], options: dict, plans: Sequence[TierPlan], program: list[Blow], mode: str, lag_s: float
) -> None:
    engine = engine_settings(**options | {"prefix_caching": True}, tiers=True)
    leapt, stepped = (
        perform(
            rows, program, replace(engine, leap=leap), FIXED, mode, workers=2, lag_s=lag_s, tiers=plans, links=LINKS
        )
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes
