"""A load that meets a running store of the same blocks waits on it: which stores, and when it does not."""

from __future__ import annotations

from kvbm_builders import Bench, fill, level
from kvbm_builders import Chains as ChainsOf

from policies.cluster.ids import Tier
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Costs, Plan, Rule
from policies.kvbm.manager import BlockManager

AT_ONCE = BatchRules(min_blocks=1)
G2, G3 = Tier.G2_HOST, Tier.G3_DISK


def storing(*, rule: Rule | None = None, **options: object) -> tuple[Bench, ChainsOf]:
    """Blocks a3..a6 are on their way to host memory, in one batch; a1 and a2 are on the device."""
    chains = ChainsOf()
    bench = Bench(level(G2, 100, rules=AT_ONCE, trigger="on_evict"), **({"rule": rule} if rule else {}), **options)
    bench.device.held.add(*chains.run("a1", "a6"))
    bench.evict(chains.run("a3", "a6"), 0.0)
    assert [order.blocks for order in bench.poll(0.0)] == [4]
    return bench, chains


def look(manager: BlockManager, chains: ChainsOf, **options: object) -> Plan:
    base: dict = {"blocks": 9, "usable": 8, "device_blocks": 2, "now_s": 0.0}
    return manager.look_up([(chains.branch("a"), 9)], **(base | options))


def test_it_waits_for_a_store_that_brings_the_next_block() -> None:
    bench, chains = storing()
    plan = look(bench.manager, chains)
    assert not plan.runs
    assert [landing.runs for landing in plan.awaits] == [(chains.run("a3", "a6"),)]
    bench.land(0.002)
    assert plan.awaits[0].is_over
    again = look(bench.manager, chains)
    assert not again.awaits
    assert again.load_blocks == 4, "they have landed: they are loaded"


def test_it_does_not_wait_for_what_is_not_next() -> None:
    bench, chains = storing()
    assert not look(bench.manager, chains, device_blocks=1).awaits, "a2 is nowhere below: nothing goes on from there"
    assert not look(bench.manager, chains, usable=2).awaits, "no block that it may use"
    assert not look(bench.manager, chains, may_wait=False).awaits
    assert not bench.manager.look_up(
        [(chains.branch("b"), 9)], blocks=9, usable=8, device_blocks=0, now_s=0.0
    ).awaits, "another prompt"


def test_it_waits_for_several_and_for_what_lies_between_them() -> None:
    chains = ChainsOf()
    two = BatchRules(max_blocks=2, min_blocks=1, at_once=4)
    host, disk = level(G2, 100, rules=two, trigger="on_evict"), level(G3, 100)
    bench = Bench(host, disk)
    fill(disk.body.store, chains.run("a3", "a4"))
    bench.evict(chains.run("a1", "a2"), 0.0)
    bench.evict(chains.run("a5", "a6"), 0.0)
    bench.poll(0.0)
    plan = look(bench.manager, chains, device_blocks=0)
    assert [landing.runs[0] for landing in plan.awaits] == [chains.run("a1", "a2"), chains.run("a5", "a6")]


def test_what_a_tier_has_already_is_loaded_from_there() -> None:
    chains = ChainsOf()
    host, disk = level(G2, 100, rules=AT_ONCE, trigger="on_evict"), level(G3, 100)
    bench = Bench(host, disk)
    fill(disk.body.store, chains.run("a1", "a4"))
    bench.evict(chains.run("a1", "a4"), 0.0)
    bench.poll(0.0)
    plan = look(bench.manager, chains, device_blocks=0)
    assert [(run.tier, run.lo, run.hi) for run in plan.runs] == [(G3, 0, 4)]
    assert not plan.awaits


def test_a_rule_that_compares_times_waits_only_if_that_is_sooner() -> None:
    """Four blocks of S1: 1.058576 ms until they have landed, as long again to load."""
    for rule, compute_s, waits in (
        (Rule("faster"), 0.0022, True),
        (Rule("faster"), 0.0021, False),
        (Rule("deadline", 0.0022), 1.0, True),
        (Rule("deadline", 0.0021), 1.0, False),
    ):
        bench, chains = storing(rule=rule)
        costs = Costs(bench.manager.alone_s, lambda lo, hi, cost=compute_s: cost * (hi - lo) / 4)  # type: ignore[misc]
        assert bool(look(bench.manager, chains, costs=costs).awaits) is waits, rule


def test_a_tier_that_is_lost_is_not_waited_for() -> None:
    bench, chains = storing()
    (landing,) = look(bench.manager, chains).awaits
    bench.manager.lost(G2)
    assert landing.is_over
    bench.manager.restored(G2)
    assert not look(bench.manager, chains).awaits, "the batch that is under way will not land in what is there now"
