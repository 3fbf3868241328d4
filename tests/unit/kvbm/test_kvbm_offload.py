"""What moves down: filters (O1 to O8), batches (B1 to B8), what is on its way already, targets that are full."""

from __future__ import annotations

import pytest
from kvbm_builders import BLOCK_BYTES, Bench, Chains, level, states

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier
from policies.errors import ConfigError
from policies.kvbm.build import KvSettings, build_offload
from policies.kvbm.consolidate import Change
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.lane import BatchRules, Lane
from policies.kvbm.level import Level, TierBody
from policies.kvbm.offload import Candidate, Chained, FrequencyFilter, Presence, TenantQuota
from policies.kvbm.orders import PublishKv
from policies.kvbm.owners import Owners, Shares
from policies.kvbm.sketch import Sketch, chain_of
from policies.kvbm.tiers import TierSpec

G2, G3 = Tier.G2_HOST, Tier.G3_DISK


class AskedFor:
    """A target that holds blocks, and to which blocks are on their way."""

    def __init__(self, *, held: bool = False, moving: bool = False, tenants: dict[str, int] | None = None) -> None:
        self._present = held or moving
        self._tenants = tenants or {}

    def absent(self, branch: Branch, lo: int, hi: int) -> list[tuple[int, int]]:
        return [] if self._present else [(lo, hi)]

    def blocks_of(self, tenant: str) -> int:
        return self._tenants.get(tenant, 0)


@pytest.mark.parametrize(
    ("case", "count", "target", "passed"),
    [
        ("O1", 1, AskedFor(), {"pass_all": True, "presence": True, "presence_lfu": False, "frequency_filter": False}),
        ("O2", 2, AskedFor(), {"pass_all": True, "presence": True, "presence_lfu": True, "frequency_filter": True}),
        ("O3", 5, AskedFor(held=True),
         {"pass_all": True, "presence": False, "presence_lfu": False, "frequency_filter": True}),
        ("O4", 5, AskedFor(moving=True),
         {"pass_all": True, "presence": False, "presence_lfu": False, "frequency_filter": True}),
    ],
)  # fmt: skip
def test_o1_to_o4_which_filter_passes_what(case: str, count: int, target: AskedFor, passed: dict[str, bool]) -> None:
    run = Chains().run("x1")
    sketch = Sketch(100)
    settings = KvSettings(sketch=lambda: sketch, min_lfu_count=1)
    for name, expected in passed.items():
        made = build_offload(name, settings)
        for _ in range(count):
            made.used(*run, 0.0)
        if name == "presence_lfu":
            for _ in range(count):
                sketch.touch(chain_of(run.branch, 0))
        assert bool(list(made.passes(Candidate(run), target, 0.0))) is expected, (case, name)


def test_o7_and_o8_frequency_doubles_with_use_and_decays() -> None:
    run = Chains().run("x1")
    once, thrice = FrequencyFilter(decay_s=10.0), FrequencyFilter(decay_s=10.0)
    once.used(*run, 0.0)
    once.used(*run, 1.0)
    assert once.passes(Candidate(run), AskedFor(), 2.0) == [(0, 1)]
    assert once.passes(Candidate(run), AskedFor(), 11.0) == [], "O7: 2, decayed once"
    for at_s in (0.0, 1.0, 2.0, 3.0):
        thrice.used(*run, at_s)
    assert thrice.passes(Candidate(run), AskedFor(), 51.0) == [(0, 1)], "O8: 8, decayed five times"
    assert thrice.passes(Candidate(run), AskedFor(), 71.0) == []


def test_a_quota_counts_each_part_of_what_another_filter_lets_through() -> None:
    """Of four blocks the second is there: of the two parts that are missing, a quota of 3 leaves room for one each."""
    chains, owners = Chains(), Owners()
    spec = TierSpec(tier=G2, capacity_bytes=9 * BLOCK_BYTES, block_bytes=BLOCK_BYTES, latency_s=1e-5, bytes_per_s=32e9)
    body = TierBody(spec, Lru, shares=Shares(owners))
    owners.brings("a", [chains.branch("a")])
    bench = Bench(Level(body, Chained((Presence(), TenantQuota(3)))), owners=owners)
    bench.complete(chains.run("a2"), 0.0)
    bench.settle(0.0)
    bench.complete(chains.run("a1", "a4"), 1.0)
    bench.settle(1.0)
    assert sorted(name for run in body.store.findable() for name in chains.names(run)) == ["a1", "a2", "a3"]
    assert bench.manager.levels[0].counts.filtered == 2, "a2, which is there, and a4"


def test_a_tenant_that_has_its_share_gets_no_more() -> None:
    run = Chains().run("x1", "x4")
    quota = TenantQuota(10)
    target = AskedFor(tenants={"a": 8, "b": 10})
    assert quota.passes(Candidate(run, tenant="a"), target, 0.0) == [(0, 2)]
    assert quota.passes(Candidate(run, tenant="b"), target, 0.0) == []
    assert quota.passes(Candidate(run), target, 0.0) == [(0, 4)]


def test_filters_joined_by_plus_must_all_pass() -> None:
    run = Chains().run("x1", "x3")
    made = build_offload("presence+frequency_filter", KvSettings(sketch=lambda: Sketch(1)))
    made.used(run.branch, 1, 3, 0.0)
    made.used(run.branch, 1, 3, 0.0)
    assert list(made.passes(Candidate(run), AskedFor(), 0.0)) == [(1, 3)]
    assert list(made.passes(Candidate(run), AskedFor(held=True), 0.0)) == []
    with pytest.raises(ConfigError, match="did you mean 'presence'"):
        build_offload("presense", KvSettings(sketch=lambda: Sketch(1)))


# ---------------------------------------------------------------- batches


def batches(arrivals: list[tuple[float, int]], *, busy: bool, flush_ms: float | None = None) -> list[tuple[float, int]]:
    """(ms, blocks) of the batches that a lane releases."""
    chains = Chains()
    lane = Lane(BatchRules())
    if busy:
        lane.offer(-1.0, chains.run("z1", "z64"))
        assert lane.start() is not None
    at, released = 0, []
    for at_ms, blocks in arrivals:
        for _ in range(blocks):
            at += 1
            lane.offer(at_ms / 1e3, chains.run(f"a{at}"))
    if flush_ms is not None:
        lane.flush(flush_ms / 1e3)
    lane.poll(10.0)
    while lane._released:
        batch = lane._released.popleft()
        released.append((round(batch.released_s * 1e3, 6), batch.blocks))
    return released


@pytest.mark.parametrize(
    ("case", "arrivals", "busy", "flush_ms", "expected"),
    [
        ("B1", [(0, 3)], True, None, [(10, 3)]),
        ("B2", [(0, 70)], True, None, [(0, 64), (10, 6)]),
        ("B3", [(ms, 1) for ms in range(25)], True, None, [(10, 10), (20, 10), (30, 5)]),
        ("B4", [(0, 1), (5, 63)], True, None, [(5, 64)]),
        ("B6", [(0, 5)], True, 2, [(2, 5)]),
    ],
)
def test_b1_to_b6_when_a_batch_goes(
    case: str,
    arrivals: list[tuple[float, int]],
    busy: bool,
    flush_ms: float | None,
    expected: list[tuple[float, int]],
) -> None:
    assert batches(arrivals, busy=busy, flush_ms=flush_ms) == expected, case


def test_b5_an_idle_lane_waits_for_no_more_than_the_smallest_batch() -> None:
    assert batches([(ms, 1) for ms in range(9)], busy=False)[0] == (7, 8)


def test_b7_sources_that_have_gone_are_skipped_at_the_commit_point() -> None:
    chains = Chains()
    bench = Bench(level(G2, 100, rules=BatchRules(min_blocks=8)))
    bench.complete(chains.run("a1", "a4"), 0.0)
    bench.device.held.remove(*chains.run("a3", "a4"))  # evicted, and nobody copies what is evicted here
    bench.complete(chains.run("b1", "b4"), 0.0)
    (order,) = bench.poll(0.0)
    assert (order.blocks, order.bytes, order.why) == (6, 6 * BLOCK_BYTES, "idle")
    assert bench.manager.levels[0].counts.skipped == 2


def test_b8_and_o4_who_asks_again_joins_what_is_on_its_way() -> None:
    chains = Chains()
    bench = Bench(level(G2, 100, offload=build_offload("pass_all", KvSettings(sketch=lambda: Sketch(1)))))
    for _ in range(3):
        bench.complete(chains.run("a1"), 0.0)
    (order,) = bench.poll(0.010)
    assert order.blocks == 1
    counts = bench.manager.levels[0].counts
    assert (counts.offered, counts.joined) == (3, 2)
    bench.land(0.020)
    assert counts.stored == 1


def test_o5_and_o6_a_source_is_looked_up_by_content_when_the_batch_is_committed() -> None:
    chains = Chains()
    bench = Bench(level(G2, 100))
    run = chains.run("a1", "a2")
    bench.complete(run, 0.0)
    bench.device.held.remove(*run)
    bench.device.held.add(*chains.run("a1"))  # a1 came back, somewhere else in the pool
    (order,) = bench.poll(0.010)
    assert order.blocks == 1
    assert bench.manager.levels[0].counts.skipped == 1


def test_the_lowest_priority_is_dropped_when_the_queue_is_full() -> None:
    chains = Chains()
    lane = Lane(BatchRules(queue_blocks=4))
    lane.offer(-1.0, chains.run("z1", "z4"))
    lane.flush(-1.0)
    assert lane.start() is not None
    assert lane.offer(0.0, chains.run("a1", "a2"), priority=5) == []
    assert lane.offer(0.0, chains.run("b1", "b2"), priority=1) == []
    assert lane.offer(0.0, chains.run("c1"), priority=3) == [chains.run("a2")]
    lane.flush(0.0)
    lane.done(0.0)
    batch = lane.start()
    assert batch is not None
    assert [chains.names(part.run) for part in batch.parts] == [["b1", "b2"], ["c1"], ["a1"]]
    assert lane.dropped_blocks == 1


def test_a_cancel_is_free_before_the_commit_point_and_only_drops_interest_after_it() -> None:
    chains = Chains()
    lane = Lane(BatchRules())
    lane.offer(0.0, chains.run("a1", "a4"))
    assert lane.withdraw(chains.run("a2", "a3")) == 2
    lane.flush(0.0)
    batch = lane.start()
    assert batch is not None
    assert [part.run for part in batch.parts] == [chains.run("a1"), chains.run("a4")]
    assert lane.withdraw(chains.run("a1", "a4")) == 0


@pytest.mark.parametrize("rules", [{"min_blocks": 0}, {"min_blocks": 9, "max_blocks": 8}, {"at_once": 0}])
def test_rules_that_make_no_batch_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="batches of"):
        BatchRules(**rules)  # type: ignore[arg-type]


# ---------------------------------------------------------------- targets


def changes(bench: Bench) -> list[tuple[bool, str, list[BlockRun]]]:
    told: list[Change] = [order.change for order in bench.published if isinstance(order, PublishKv)]
    return [(change.is_store, change.tier.value, list(change.runs)) for change in told]


def test_a_full_target_makes_room_or_drops() -> None:
    chains = Chains()
    for when_full, held, dropped in (("evict", {"inactive": 2}, 0), ("drop", {"inactive": 2}, 1)):
        bench = Bench(level(G2, 2, when_full=when_full))
        bench.complete(chains.run("a1", "a2"), 0.0)
        bench.settle(0.0)
        bench.complete(chains.run("b1"), 1.0)
        bench.settle(1.0)
        assert states(bench.manager.levels[0].body.store) == held
        assert bench.manager.levels[0].counts.dropped == dropped
        there = bench.manager.levels[0].body.store.lacking(*chains.run("b1")) == []
        assert there is (when_full == "evict")
        if when_full == "evict":
            assert changes(bench) == [
                (True, "g2", [chains.run("a1", "a2")]),
                (False, "g2", [chains.run("a2")]),
                (True, "g2", [chains.run("b1")]),
            ]


def test_write_back_moves_what_is_evicted_and_the_cascade_goes_on() -> None:
    chains = Chains()
    bench = Bench(level(G2, 2, trigger="on_evict"), level(G3, 9, trigger="on_evict"))
    bench.complete(chains.run("a1", "a2"), 0.0)
    bench.settle(0.0)
    assert bench.manager.levels[0].body.store.resident == 0, "nothing goes down before it is evicted"
    bench.evict(chains.run("a1", "a2"), 1.0)
    bench.settle(1.0)
    bench.evict(chains.run("b1"), 2.0)
    bench.settle(2.0)
    host, disk = (each.body.store for each in bench.manager.levels)
    assert host.lacking(*chains.run("a1", "a2")) == [(1, 2)]
    assert disk.lacking(*chains.run("a1", "a2")) == [(0, 1)], "what the host gave up is on disk"
    assert host.lacking(*chains.run("b1")) == []


def test_write_through_feeds_one_tier_from_the_next_above() -> None:
    chains = Chains()
    bench = Bench(level(G2, 9), level(G3, 9))
    bench.complete(chains.run("a1", "a3"), 0.0)
    bench.settle(0.0)
    for each in bench.manager.levels:
        assert each.body.store.lacking(*chains.run("a1", "a3")) == []
        assert each.counts.stored == 3


def test_on_idle_waits_until_the_lane_has_been_idle() -> None:
    chains = Chains()
    bench = Bench(level(G2, 9, trigger="on_idle"))
    bench.complete(chains.run("a1"), 0.0)
    bench.complete(chains.run("b1"), 0.0)
    assert bench.poll(0.009) == []
    (order,) = bench.poll(0.010)
    assert order.blocks == 2
    bench.land(0.5)
    bench.complete(chains.run("c1"), 0.505)
    assert bench.manager.due_s == pytest.approx(0.510)
