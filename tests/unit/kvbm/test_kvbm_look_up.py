"""Where blocks lie and which are loaded: L5 to L8, holes, room, and reads that failed lately."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvbm_builders import BLOCK_BYTES, Chains, fill

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier
from policies.errors import ConfigError
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.look_up import Costs, Miss, Plan, Rule, TierRun, look_up, usable_blocks, without
from policies.kvbm.spans import Spans
from policies.kvbm.store import TierStore
from policies.kvbm.tiers import TierSpec

G2, G3, G4 = Tier.G2_HOST, Tier.G3_DISK, Tier.G4_REMOTE


def stores(**held: list[tuple[int, int]]) -> tuple[Chains, list[tuple[Tier, TierStore]]]:
    """Tiers that hold these blocks [lo, hi) of chain a."""
    chains = Chains()
    found = []
    for name, spans in held.items():
        store = TierStore(100, Lru())
        fill(store, *(BlockRun(chains.branch("a"), lo, hi) for lo, hi in spans))
        found.append((Tier(name), store))
    return chains, found


def plan(
    chains: Chains, tiers: list[tuple[Tier, TierStore]], *, blocks: int, device: int = 0, **options: object
) -> Plan:
    base: dict = {"usable": blocks} | options
    return look_up([(chains.branch("a"), blocks)], blocks=blocks, device_blocks=device, stores=tiers, **base)


def shape(found: Plan) -> list[tuple[str, int, int]]:
    return [(run.tier.value, run.lo, run.hi) for run in found.runs]


def test_l7_the_plan_ends_at_the_first_hole() -> None:
    chains, tiers = stores(g2=[(2, 5)], g3=[(5, 6), (7, 9)])
    found = plan(chains, tiers, blocks=20, device=2)
    assert shape(found) == [("g2", 2, 5), ("g3", 5, 6)]
    assert found.end == 6
    assert found.misses == {Miss.HOLE: 2, Miss.ABSENT: 12}


def test_l8_the_last_token_is_always_computed() -> None:
    chains, tiers = stores(g2=[(0, 2)])
    found = plan(chains, tiers, blocks=2, usable=usable_blocks(128, 64))
    assert shape(found) == [("g2", 0, 1)]
    assert found.misses == {Miss.LAST_TOKEN: 1}


def test_every_block_comes_from_the_fastest_tier_that_has_it() -> None:
    chains, tiers = stores(g2=[(1, 2), (4, 5)], g3=[(0, 6)], g4=[(0, 8)])
    found = plan(chains, tiers, blocks=8)
    assert shape(found) == [("g3", 0, 1), ("g2", 1, 2), ("g3", 2, 4), ("g2", 4, 5), ("g3", 5, 6), ("g4", 6, 8)]


def test_a7_what_the_device_has_behind_a_hole_is_told_apart_from_what_nobody_has() -> None:
    chains, tiers = stores(g2=[])
    device = Spans()
    device.add(chains.branch("a"), 0, 1)
    device.add(chains.branch("a"), 2, 3)
    found = plan(chains, tiers, blocks=3, device=1, device_lacking=device.lacking)
    assert found.misses == {Miss.HOLE: 1, Miss.ABSENT: 1}


def test_the_longest_prefix_that_fits_is_loaded() -> None:
    chains, tiers = stores(g2=[(1, 4)], g3=[(4, 8)])
    found = plan(chains, tiers, blocks=10, device=1, room_blocks=5)
    assert shape(found) == [("g2", 1, 4), ("g3", 4, 6)]
    assert found.misses == {Miss.NO_ROOM: 2, Miss.ABSENT: 2}


# ---------------------------------------------------------------- load or compute

S1 = TierSpec(tier=G4, capacity_bytes=None, block_bytes=BLOCK_BYTES, latency_s=5e-3, bytes_per_s=5e9)


def costs(compute_s: dict[int, float], load_s: dict[Tier, float]) -> Costs:
    """Prefill seconds by blocks, load seconds per block of each tier (longest of all tiers counts)."""

    def load(runs: Sequence[TierRun]) -> float:
        return max(sum(run.hi - run.lo for run in runs if run.tier is tier) * s for tier, s in load_s.items())

    return Costs(load, lambda lo, hi: compute_s[hi - lo])


def test_l5_what_is_computed_faster_is_not_loaded() -> None:
    chains, tiers = stores(g4=[(0, 64)])
    prefill = Costs(lambda runs: S1.alone_s(sum(run.hi - run.lo for run in runs)), lambda lo, hi: 0.085756)
    found = plan(chains, tiers, blocks=64, rule=Rule("faster"), costs=prefill)
    assert shape(found) == []
    assert found.misses == {Miss.SLOWER: 64}
    slow_prefill = prefill._replace(compute_s=lambda lo, hi: 0.2 if hi > lo else 0.0)
    assert shape(plan(chains, tiers, blocks=64, rule=Rule("faster"), costs=slow_prefill)) == [("g4", 0, 64)]
    assert shape(plan(chains, tiers, blocks=64)) == [("g4", 0, 64)], "always: the default"


def test_a_slow_tail_is_cut_from_the_far_end() -> None:
    chains, tiers = stores(g2=[(0, 4)], g4=[(4, 6)])
    compute = {0: 0.0, 2: 0.5, 6: 9.0}
    found = plan(chains, tiers, blocks=6, rule=Rule("faster"), costs=costs(compute, {G2: 0.1, G4: 1.0}))
    assert shape(found) == [("g2", 0, 4)]
    assert found.misses == {Miss.SLOWER: 2}


def test_a_deadline_keeps_what_comes_in_time() -> None:
    chains, tiers = stores(g2=[(0, 4)], g4=[(4, 6)])
    times = costs({}, {G2: 0.1, G4: 1.0})
    assert shape(plan(chains, tiers, blocks=6, rule=Rule("deadline", 0.5), costs=times)) == [("g2", 0, 4)]
    assert shape(plan(chains, tiers, blocks=6, rule=Rule("deadline", 0.2), costs=times)) == []


@pytest.mark.parametrize("rule", [Rule("faster"), Rule("deadline"), Rule("soon")])
def test_a_rule_without_what_it_needs_is_refused(rule: Rule) -> None:
    chains, tiers = stores(g2=[(0, 4)])
    with pytest.raises(ConfigError, match="onboard rule"):
        plan(chains, tiers, blocks=4, rule=rule, costs=None if rule.name == "faster" else costs({}, {G2: 1.0}))


# ---------------------------------------------------------------- what lately failed


def test_r8_what_failed_lately_is_not_asked_for_and_ends_the_plan() -> None:
    chains, tiers = stores(g2=[(0, 3)], g3=[(3, 6)])
    found = plan(chains, tiers, blocks=8)
    cut = without(found, lambda tier_run, run: 4 if tier_run.tier is G3 and run.lo <= 4 < run.hi else None)
    assert shape(cut) == [("g2", 0, 3), ("g3", 3, 4)]
    assert cut.misses == {Miss.FAILED: 2, Miss.ABSENT: 2}
    assert without(found, lambda tier_run, run: None) is found
