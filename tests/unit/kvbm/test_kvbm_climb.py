"""Prefetching for requests that wait in the router: what climbs, within which limits, and who may not be evicted."""

from __future__ import annotations

from kvbm_builders import Bench, Chains, fill, level, put, states

from policies.cluster.ids import RequestId, Tier
from policies.kvbm.climb import Climb
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Plan
from policies.kvbm.orders import Prefetch
from policies.kvbm.prefetch import PrefetchLimits

G2, G3, G4 = Tier.G2_HOST, Tier.G3_DISK, Tier.G4_REMOTE
A, B = RequestId("a"), RequestId("b")
FETCH_S = (1e-5 + 4 * 8_388_608 / 32e9) / 0.25
"""Four blocks over the link of these tests, and the pause after them."""


class Fetching(Bench):
    """A bench whose fetches are moved when the test says so."""

    def __init__(self, host: int = 100, *, limits: PrefetchLimits | None = None, most: int = 64) -> None:
        super().__init__(
            level(G2, host, rules=BatchRules(max_blocks=most, min_blocks=min(8, most))),
            level(G3, 1000),
            level(G4, 1000),
            prefetch=limits or PrefetchLimits(),
        )
        self.chains = Chains()
        assert self.manager.climb is not None
        self.climb: Climb = self.manager.climb

    def waits(self, request_id: RequestId, name: str, blocks: int) -> None:
        pieces = [(self.chains.branch(name), blocks)]
        self.climb.waits(request_id, pieces, blocks, self.climb.reach(pieces, blocks).runs)

    def begun(self, now_s: float) -> list[Prefetch]:
        return [order for order in self.manager.poll(now_s) if isinstance(order, Prefetch)]

    def look_up(self, name: str, blocks: int) -> Plan:
        pieces = [(self.chains.branch(name), blocks)]
        return self.manager.look_up(pieces, blocks=blocks, usable=blocks, device_blocks=0, now_s=0.0)

    @property
    def host(self) -> dict[str, int]:
        return states(self.manager.levels[0].body.store)


def test_how_far_a_prompt_reaches_and_what_of_it_could_climb() -> None:
    bench = Fetching()
    run, levels = bench.chains.run, bench.manager.levels
    bench.device.held.add(*run("a1", "a2"))
    fill(levels[0].body.store, run("a3"), run("a6"))
    fill(levels[1].body.store, run("a4", "a5"))
    fill(levels[2].body.store, run("a7"), run("a9"))
    pieces = [(bench.chains.branch("a"), 10)]
    reach = bench.climb.reach(pieces, 10)
    assert (reach.near, reach.blocks) == (4, 7)
    assert reach.runs == [run("a4", "a5"), run("a7")]
    assert bench.climb.reach(pieces, 5).blocks == 5


def test_a_fetch_lands_in_host_memory_and_is_held_until_its_request_is_gone() -> None:
    bench = Fetching()
    run = bench.chains.run
    fill(bench.manager.levels[1].body.store, run("a1", "a4"))
    bench.waits(A, "a", 4)
    (order,) = bench.begun(0.0)
    assert (order.source, order.runs, order.bytes) == (G3, (run("a1", "a4"),), 4 * 8_388_608)
    assert bench.host == {"free": 96, "loading": 4}
    assert (
        bench.manager.look_up([(run("a1").branch, 4)], blocks=4, usable=4, device_blocks=0, now_s=0.0).runs[0].tier
        is G3
    )
    bench.manager.fetched(order.fetch_id, 0.002)
    assert bench.host == {"free": 96, "registered": 4}, "in use: nothing evicts them"
    bench.climb.comes(A)
    plan = bench.look_up("a", 4)
    assert plan.runs[0].tier is G2
    load = bench.manager.begin(plan, 0.1, A)
    bench.climb.gone(A)
    bench.manager.loaded(load, 0.2)
    assert bench.host == {"free": 96, "inactive": 4}
    assert (bench.climb.fetched_blocks, bench.climb.used_blocks, bench.climb.wasted_blocks) == (4, 4, 0)
    assert bench.climb.idle


def test_a_fetch_takes_a_quarter_of_the_link_and_a_tenth_of_the_tier() -> None:
    bench = Fetching(most=4)
    fill(bench.manager.levels[1].body.store, bench.chains.run("a1", "a40"))
    bench.waits(A, "a", 40)
    at_s, blocks = 0.0, 0
    for _ in range(2):
        (order,) = bench.begun(at_s)
        assert order.blocks == 4
        blocks += order.blocks
        assert not bench.begun(at_s + FETCH_S), "one at a time"
        bench.manager.fetched(order.fetch_id, at_s + 0.001)
        assert bench.manager.due_s == at_s + FETCH_S
        assert not bench.begun(at_s + FETCH_S * 0.999)
        at_s += FETCH_S
    (order,) = bench.begun(at_s)
    assert blocks + order.blocks == 10, "a tenth of 100"
    bench.manager.fetched(order.fetch_id, at_s + 0.001)
    assert not bench.begun(99.0)
    assert bench.climb.due_s is None
    bench.climb.gone(A)
    assert bench.climb.wasted_blocks == 10
    assert bench.climb.idle


def test_what_a_waiting_request_wants_is_not_evicted_for_a_fetch() -> None:
    bench = Fetching(20, limits=PrefetchLimits(tier_share=0.5))
    run, host = bench.chains.run, bench.manager.levels[0].body.store
    fill(host, run("b1", "b8"))
    fill(host, run("c1", "c4"))
    held = put(host, run("d1", "d8"))
    fill(bench.manager.levels[1].body.store, run("a1", "a8"), run("b9"))
    bench.waits(B, "b", 9)
    bench.begun(0.0)  # b9 itself
    bench.manager.fetched(1, 0.001)
    bench.waits(A, "a", 8)
    (order,) = bench.begun(1.0)
    assert order.blocks == 3, "of c, not of b, nor of d"
    assert not host.lacking(*run("b1", "b9"))
    host.release(held)


def test_who_waits_for_blocks_that_are_there_or_coming_fetches_none() -> None:
    bench = Fetching()
    run = bench.chains.run
    fill(bench.manager.levels[1].body.store, run("a1", "a8"))
    pieces = [(bench.chains.branch("a"), 8)]
    runs = bench.climb.reach(pieces, 8).runs
    bench.climb.waits(A, pieces, 8, runs)
    bench.climb.waits(B, pieces, 8, runs)
    (order,) = bench.begun(0.0)
    bench.manager.fetched(order.fetch_id, 0.001)
    assert not bench.begun(10.0)
    bench.climb.gone(A)
    bench.climb.gone(B)
    assert bench.climb.wasted_blocks == 8, "once"


def test_a_request_that_leaves_while_its_blocks_climb_leaves_them_to_others() -> None:
    bench = Fetching()
    fill(bench.manager.levels[1].body.store, bench.chains.run("a1", "a8"))
    bench.waits(A, "a", 8)
    (order,) = bench.begun(0.0)
    bench.climb.gone(A)
    bench.manager.fetched(order.fetch_id, 0.001)
    assert bench.host == {"free": 92, "inactive": 8}
    assert (bench.climb.used_blocks, bench.climb.wasted_blocks) == (0, 8)


def test_tiers_that_are_lost_bring_nothing() -> None:
    for lost in (G2, G3):
        bench = Fetching()
        fill(bench.manager.levels[1].body.store, bench.chains.run("a1", "a8"))
        bench.waits(A, "a", 8)
        (order,) = bench.begun(0.0)
        bench.manager.lost(lost)
        bench.manager.restored(lost)
        bench.manager.fetched(order.fetch_id, 0.001)
        assert bench.host == {"free": 100}
        bench.climb.gone(A)
        assert bench.climb.wasted_blocks == bench.climb.fetched_blocks == 0
        bench.manager.audit()
