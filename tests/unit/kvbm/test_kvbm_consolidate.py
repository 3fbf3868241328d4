"""One account of two sources (C1 to C6)."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kvbm_builders import Bench, Chains, level

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier
from policies.kvbm.consolidate import Residency
from policies.kvbm.orders import ClearKv

G1, G2, G3, G4 = Tier

RUN = Chains().run("x1", "x4")


def part(lo: int, hi: int) -> BlockRun:
    return BlockRun(RUN.branch, lo, hi)


def test_c1_to_c3_a_block_is_there_from_its_first_tier_to_its_last() -> None:
    one = Residency()
    assert one.stored(G1, [RUN]) == [RUN]
    assert one.stored(G2, [RUN]) == []
    assert one.removed(G1, [RUN]) == []
    assert one.held() == [RUN]
    assert one.removed(G2, [RUN]) == [RUN]
    assert one.held() == []


def test_c4_moving_between_tiers_is_no_news() -> None:
    one = Residency()
    one.stored(G2, [RUN])
    assert one.stored(G3, [RUN]) == []
    assert one.removed(G2, [RUN]) == []


def test_c5_a_worker_that_starts_again_has_nothing() -> None:
    one = Residency()
    one.stored(G1, [RUN])
    one.clear()
    assert one.held() == []
    assert one.stored(G2, [RUN]) == [RUN]


def test_only_what_no_other_tier_has_is_news() -> None:
    one = Residency()
    one.stored(G1, [part(1, 3)])
    assert one.stored(G2, [RUN]) == [part(0, 1), part(3, 4)]
    assert one.removed(G2, [part(0, 2)]) == [part(0, 1)]
    assert one.held() == [part(1, 4)]


def test_a_tier_that_is_lost_takes_along_what_no_other_has() -> None:
    one = Residency()
    one.stored(G1, [part(0, 2)])
    one.stored(G2, [part(1, 4)])
    assert one.lost(G2) == [part(2, 4)]
    assert one.lost(G2) == one.lost(G3) == []
    assert one.held() == [part(0, 2)]


def test_what_all_workers_share_is_no_residency() -> None:
    one = Residency()
    assert one.stored(G4, [RUN]) == one.removed(G4, [RUN]) == one.lost(G4) == one.held() == []
    assert one.stored(G1, [RUN]) == [RUN]


def test_what_was_never_there_is_not_removed() -> None:
    one = Residency()
    one.stored(G1, [part(0, 2)])
    assert one.removed(G2, [RUN]) == []
    assert one.removed(G1, [RUN, RUN]) == [part(0, 2)]


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "lost"]),
        st.sampled_from(list(Tier)),
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8), st.integers(1, 5)), min_size=1, max_size=3),
    ),
    max_size=25,
)


@examples(300)
@given(CHANGES)
def test_what_is_published_adds_up_to_the_union_of_own_tiers(changes: list) -> None:
    """Nothing is published twice, or taken back without having been published."""
    chains = Chains()
    branches = [chains.branch("x"), chains.branch("y")]
    one, published = Residency(), set()
    tiers: dict[Tier, set] = {tier: set() for tier in Tier}
    for what, tier, spans in changes:
        runs = [BlockRun(branches[n], lo, lo + length) for n, lo, length in spans]
        blocks = {(run.branch, at) for run in runs for at in range(run.lo, run.hi)}
        if what == "lost":
            told, tiers[tier] = one.lost(tier), set()
        elif what == "stored":
            told, tiers[tier] = one.stored(tier, runs), tiers[tier] | blocks
        else:
            told, tiers[tier] = one.removed(tier, runs), tiers[tier] - blocks
        named = [(run.branch, at) for run in told for at in range(run.lo, run.hi)]
        assert len(named) == len(set(named))
        assert published.isdisjoint(named) if what == "stored" else published.issuperset(named)
        published ^= set(named)
        assert published == tiers[G1] | tiers[G2] | tiers[G3]
        assert published == {(run.branch, at) for run in one.held() for at in range(run.lo, run.hi)}


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
