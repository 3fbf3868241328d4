"""One definition of a hit (A1 to A8), failures that become recomputation (R1 to R8), tiers that fail, prefetching."""

from __future__ import annotations

import pytest
from kvbm_builders import Bench, Chains, fill, level, states

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import RequestId, Tier
from policies.errors import InvariantError
from policies.kvbm.accounting import HitCount, Looked
from policies.kvbm.health import DEGRADED_AFTER, PROBE_S, Health, TierHealth
from policies.kvbm.look_up import Miss, usable_blocks
from policies.kvbm.prefetch import Prefetcher, PrefetchLimits
from policies.kvbm.spread import Spread

G1, G2, G3, G4 = Tier


def looked(isl: int, bs: int, *, g1: int = 0, g2: int = 0, **misses: int) -> tuple[int, int, Looked]:
    left = isl // bs - g1 - g2 - sum(misses.values())
    return isl, bs, Looked({G1: g1, G2: g2}, {Miss(name): n for name, n in misses.items()} | {Miss.ABSENT: left})


@pytest.mark.parametrize(
    ("case", "requests", "counts", "block_rate", "tokens"),
    [
        ("A1", [looked(130, 64)] * 3 + [looked(130, 64, g2=2)], (8, 0, 2, 6), 0.25, (128, 520)),
        ("A2", [looked(128, 64), looked(128, 64, g1=1, last_token=1)], (4, 1, 0, 3), 0.25, (64, 256)),
        ("A3", [looked(1024, 64), looked(1536, 64, g1=16)], (40, 16, 0, 24), 0.40, (1024, 2560)),
        ("A4", [looked(130, 64)] * 3 + [looked(130, 64, failed=2)], (8, 0, 0, 8), 0.0, (0, 520)),
        ("A6", [looked(40, 64)], (0, 0, 0, 0), None, (0, 40)),
        ("A7", [looked(192, 64, g1=1, hole=1)], (3, 1, 0, 2), 1 / 3, (64, 192)),
    ],
)
def test_a1_to_a7_every_full_block_is_in_one_class(
    case: str,
    requests: list[tuple[int, int, Looked]],
    counts: tuple[int, int, int, int],
    block_rate: float | None,
    tokens: tuple[int, int],
) -> None:
    hits = HitCount()
    for isl, bs, each in requests:
        hits.first_admission(isl, bs, each)
    assert (hits.lookups, hits.hits[G1], hits.hits[G2], sum(hits.misses.values())) == counts, case
    assert hits.block_rate == block_rate
    assert (hits.cached_tokens, hits.prompt_tokens) == tokens
    assert hits.recent_rate == block_rate


def test_a5_a_readmission_is_never_a_hit() -> None:
    hits = HitCount()
    hits.first_admission(*looked(128, 64, g1=1))
    hits.readmission(reused_tokens=128, recomputed_tokens=3)
    assert (hits.lookups, hits.hits[G1], hits.cached_tokens) == (2, 1, 64)
    assert (hits.reused_tokens, hits.recomputed_tokens) == (128, 3)


def test_a_look_up_that_does_not_add_up_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="has 2 full blocks of 64, and 3 were looked up"):
        HitCount().first_admission(130, 64, Looked({G1: 1}, {Miss.ABSENT: 2}))


def test_the_windowed_rate_is_over_the_last_thousand_blocks() -> None:
    hits = HitCount()
    for n in range(100):
        hits.first_admission(*looked(64 * 20, 64, g1=20 if n >= 50 else 0))
    assert hits.block_rate == 0.5
    assert hits.recent_rate == 1.0


def test_a8_ages_and_uses_are_spread() -> None:
    spread = Spread()
    for value, blocks in ((0.0, 2), (0.5, 1), (5000.0, 3)):
        spread.add(value, blocks)
    assert spread.counts == [2, 0, 1, 0, 0, 0, 3]
    assert spread.mean == pytest.approx(15000.5 / 6)
    chains = Chains()
    bench = Bench(level(G2, 2, trigger="on_evict"))
    bench.evict(chains.run("a1", "a2"), 0.0)
    bench.settle(0.0)
    load(bench, chains, 2, 3.0)
    bench.evict(chains.run("b1", "b2"), 5.0)
    bench.settle(5.0)
    manager = bench.manager
    assert (manager.age_at_hit.blocks, manager.age_at_evict.blocks) == (2, 2)
    assert manager.age_at_hit.mean == pytest.approx(2.989, abs=1e-3), "it landed after 10 ms of waiting and 1 of moving"
    assert manager.reuse_at_evict.mean == 1.0


# ---------------------------------------------------------------- failures

BS, ISL = 64, 300


def load(bench: Bench, chains: Chains, blocks: int, now_s: float, failed: tuple[str, ...] = ()) -> int:
    """Load the first blocks of chain a; returns how many are on the device."""
    plan = bench.manager.look_up(
        [(chains.branch("a"), blocks)], blocks=blocks, usable=blocks, device_blocks=0, now_s=now_s
    )
    onboard = bench.manager.begin(plan, now_s)
    return bench.manager.loaded(onboard, now_s, [chains.run(name) for name in failed])


def four_on_host() -> tuple[Bench, Chains]:
    chains = Chains()
    bench = Bench(level(G2, 9))
    fill(bench.manager.levels[0].body.store, chains.run("a1", "a4"))
    return bench, chains


@pytest.mark.parametrize(
    ("case", "failed", "cached", "computed"),
    [("R1", (), 256, 44), ("R2", ("a3",), 128, 172), ("R3", ("a1",), 0, 300), ("R4", ("a3", "a4"), 128, 172)],
)
def test_r1_to_r4_nothing_behind_a_bad_block_counts(
    case: str, failed: tuple[str, ...], cached: int, computed: int
) -> None:
    bench, chains = four_on_host()
    assert usable_blocks(ISL, BS) == 4
    good = load(bench, chains, 4, 0.0, failed)
    assert (good * BS, ISL - good * BS) == (cached, computed), case
    store = bench.manager.levels[0].body.store
    assert store.resident == 4 - len(failed), "a bad entry is forgotten"
    assert bench.manager.levels[0].counts.failed_reads == (0 if not failed else 4 - good)
    store.audit()


def test_r6_a_load_that_nobody_wants_leaves_the_blocks_where_they_are() -> None:
    bench, chains = four_on_host()
    plan = bench.manager.look_up([(chains.branch("a"), 4)], blocks=4, usable=4, device_blocks=0, now_s=0.0)
    onboard = bench.manager.begin(plan, 0.0)
    assert states(bench.manager.levels[0].body.store) == {"free": 5, "registered": 4}
    bench.manager.dropped(onboard)
    assert states(bench.manager.levels[0].body.store) == {"free": 5, "inactive": 4}
    assert bench.manager.idle


def test_r7_a_tier_that_is_down_is_not_waited_for() -> None:
    bench, chains = four_on_host()
    bench.manager.lost(G2)
    plan = bench.manager.look_up([(chains.branch("a"), 4)], blocks=4, usable=4, device_blocks=0, now_s=0.0)
    assert (plan.load_blocks, plan.misses) == (0, {Miss.ABSENT: 4})
    bench.complete(chains.run("a1"), 0.0)
    assert bench.settle(0.0) == 0.0, "nothing is written to it either"


def test_a_tier_that_is_lost_while_blocks_come_up_fails_the_load() -> None:
    bench, chains = four_on_host()
    plan = bench.manager.look_up([(chains.branch("a"), 4)], blocks=4, usable=4, device_blocks=0, now_s=0.0)
    onboard = bench.manager.begin(plan, 0.0)
    bench.manager.lost(G2)
    bench.manager.restored(G2)
    assert bench.manager.loaded(onboard, 1.0) == 0
    assert states(bench.manager.levels[0].body.store) == {"free": 9}, "what came back is empty"


def test_r8_what_failed_is_not_asked_for_again_within_a_second() -> None:
    bench, chains = four_on_host()
    assert load(bench, chains, 4, 0.0, ("a3",)) == 2
    fill(bench.manager.levels[0].body.store, chains.run("a3"))
    pieces = [(chains.branch("a"), 4)]
    again = bench.manager.look_up(pieces, blocks=4, usable=4, device_blocks=0, now_s=0.9)
    assert (again.load_blocks, again.misses) == (2, {Miss.FAILED: 2})
    assert bench.manager.look_up(pieces, blocks=4, usable=4, device_blocks=0, now_s=1.0).load_blocks == 4


def test_five_failed_writes_in_a_row_degrade_a_tier_and_a_probe_finds_it_well() -> None:
    chains = Chains()
    bench = Bench(level(G2, 100))
    fill(bench.manager.levels[0].body.store, chains.run("z1"))
    health = bench.manager.levels[0].body.health
    bench.manager.refuse(G2, True)
    now_s = 0.0
    for n in range(DEGRADED_AFTER):
        assert health.state is Health.UP
        bench.complete(chains.run(f"a{n + 1}"), now_s)
        now_s = bench.settle(now_s)
    assert health.state is Health.DEGRADED
    bench.complete(chains.run("b1"), now_s)
    assert bench.manager.levels[0].counts.dropped == 1, "no new writes"
    pieces = [(chains.branch("z"), 1)]
    found = bench.manager.look_up(pieces, blocks=1, usable=1, device_blocks=0, now_s=now_s)
    assert found.load_blocks == 1, "reads go on"
    bench.manager.refuse(G2, False)
    now_s += PROBE_S
    bench.complete(chains.run("c1"), now_s)
    bench.settle(now_s)
    assert health.state is Health.UP


def test_a_probe_that_fails_waits_for_the_next_one() -> None:
    health = TierHealth()
    for _ in range(DEGRADED_AFTER):
        health.write_failed(0.0)
    assert not health.may_write(PROBE_S - 1)
    assert health.may_write(PROBE_S)
    health.write_failed(PROBE_S)
    assert not health.may_write(PROBE_S + 1)
    assert health.may_write(2 * PROBE_S)


# ---------------------------------------------------------------- prefetch

A, B = RequestId("a"), RequestId("b")


def test_prefetching_keeps_to_its_share_of_tier_and_link() -> None:
    chains = Chains()
    fetch = Prefetcher(PrefetchLimits(), tier_blocks=100)
    fetch.waits(A, [chains.run("a1", "a8")])
    fetch.waits(B, [chains.run("b1", "b8")])
    assert fetch.next(0.0, most_blocks=5) == (A, chains.run("a1", "a5"))
    assert fetch.next(0.0) == (A, chains.run("a6", "a8"))
    fetch.begins(0.0, 1.0)
    assert fetch.next(3.9) is None, "a second of the link, a quarter of the time"
    assert fetch.next(4.0) == (B, chains.run("b1", "b2")), "ten blocks are a tenth of the tier"
    assert fetch.next(99.0) is None
    assert fetch.due_s is None
    assert fetch.is_wanted(chains.run("a5"))


def test_what_was_fetched_for_nobody_is_counted_as_wasted() -> None:
    chains = Chains()
    fetch = Prefetcher(PrefetchLimits(), tier_blocks=100)
    fetch.waits(A, [chains.run("a1", "a4")])
    fetch.next(0.0)
    fetch.taken(A, BlockRun(chains.branch("a"), 0, 3))
    fetch.gone(A)
    assert (fetch.used_blocks, fetch.wasted_blocks, fetch.held_blocks) == (3, 1, 0)
    fetch.waits(B, [chains.run("b1")])
    fetch.gone(B)
    assert fetch.next(1.0) is None, "given up with its request"
