"""One account of two sources (C1 to C6), and the registry of what lies outside a worker."""

from __future__ import annotations

import pytest
from kvbm_builders import Bench, Chains, level

from policies.cluster.ids import Tier, WorkerId
from policies.errors import ConfigError
from policies.kvbm.consolidate import Change, Consolidator
from policies.kvbm.orders import ClearKv
from policies.kvbm.registry import Location, Registry

G1, G2, G3, G4 = Tier

SEQUENCE = [
    ("C1", [(True, G1), (True, G2)], ["+g1", "+g2"], ["+"]),
    ("C2", [(False, G1)], ["-g1"], []),
    ("C3", [(False, G2)], ["-g2"], ["-"]),
]


@pytest.mark.parametrize(("mode", "column"), [("per_tier", 2), ("dedupe", 3)])
def test_c1_to_c3_what_is_published(mode: str, column: int) -> None:
    run = Chains().run("x1")
    one = Consolidator(mode)
    for row in SEQUENCE:
        told = [change for is_store, tier in row[1] for change in one.tell(Change(is_store, tier, (run,)))]
        shown = [("+" if c.is_store else "-") + (c.tier.value if mode == "per_tier" else "") for c in told]
        assert shown == row[column], row[0]


def test_c4_moving_between_tiers_of_one_source_is_no_news_when_deduped() -> None:
    run = Chains().run("x1")
    moves = [(True, G3), (False, G2)]
    for mode, expected in (("per_tier", [(True, G3), (False, G2)]), ("dedupe", [])):
        one = Consolidator(mode)
        one.tell(Change(True, G2, (run,)))
        told = [c for is_store, tier in moves for c in one.tell(Change(is_store, tier, (run,)))]
        assert [(c.is_store, c.tier) for c in told] == expected


def test_c5_a_worker_that_starts_again_has_nothing() -> None:
    run = Chains().run("x1")
    one = Consolidator("dedupe")
    one.tell(Change(True, G1, (run,)))
    one.clear()
    assert one.tell(Change(True, G2, (run,))) == [Change(True, G2, (run,))]


def test_c6_a_store_that_failed_is_not_published() -> None:
    chains = Chains()
    bench = Bench(level(G2, 9))
    bench.complete(chains.run("a1"), 0.0)
    bench.poll(0.010)
    bench.land(0.011, ok=False)
    assert bench.published == []
    assert bench.manager.levels[0].counts.failed_writes == 1
    bench.manager.audit()


def test_a_tier_that_is_lost_is_cleared_once() -> None:
    bench = Bench(level(G2, 9))
    bench.manager.lost(G2)
    bench.manager.lost(G2)
    bench.poll(0.0)
    assert bench.published == [ClearKv(tier=G2)]


def test_an_unknown_consolidation_is_refused() -> None:
    with pytest.raises(ConfigError, match="known are per_tier, dedupe"):
        Consolidator("merge")


# ---------------------------------------------------------------- registry

SHARED = Location(G4)
PEER = Location(G2, WorkerId(1))


def test_the_longest_prefix_is_found_and_misses_are_remembered_for_a_second() -> None:
    registry = Registry()
    registry.put("a", SHARED, 10, 7, 0.0)
    registry.put("b", PEER, 10, 7, 0.0)
    assert registry.look_up(["a", "b", "c"], 7, 1.0) == [SHARED, PEER]
    registry.drop("b")
    registry.drop("b")
    assert registry.look_up(["a", "b", "c"], 7, 1.0) == [SHARED]
    assert registry.look_up(["b"], 7, 1.5) == []
    registry.put("b", PEER, 10, 7, 1.6)
    assert registry.look_up(["b"], 7, 1.7) == [PEER], "what is put again is asked for again"


def test_r5_another_fingerprint_is_another_content() -> None:
    registry = Registry()
    registry.put("a", SHARED, 10, 7, 0.0)
    assert registry.look_up(["a"], 8, 0.0) == []
    assert registry.look_up(["a"], 7, 0.0) == [SHARED]


def test_leases_end_unless_they_are_renewed_and_owners_take_theirs_along() -> None:
    registry = Registry()
    registry.put("a", SHARED, 10, 7, 0.0)
    registry.put("b", PEER, 10, 7, 0.0)
    assert registry.renew(WorkerId(1), 20.0) == 1
    assert registry.expire(60.0) == 1
    assert registry.look_up(["b"], 7, 60.0) == [PEER]
    registry.put("a", SHARED, 10, 7, 61.0)
    assert registry.owner_lost(WorkerId(1)) == 1
    assert registry.look_up(["a", "b"], 7, 61.0) == [SHARED]


def test_a_lease_that_is_shorter_than_a_hold_is_flagged() -> None:
    assert Registry(lease_s=5.0, holds_longest_s=10.0).lease_is_short
    assert not Registry(lease_s=60.0, holds_longest_s=10.0).lease_is_short
