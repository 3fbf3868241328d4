"""Block managers of several ranks of one worker: a device and lanes of its own for each, everything below in common."""

from __future__ import annotations

from kvbm_builders import Bench, Device, level
from kvbm_builders import Chains as ChainsOf

from policies.cluster.ids import Tier
from policies.kvbm.lane import BatchRules
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import ClearKv, Offload, PublishKv
from policies.kvbm.prefetch import PrefetchLimits
from policies.kvbm.sketch import Sketch, chain_of

G2, G3 = Tier.G2_HOST, Tier.G3_DISK
AT_ONCE = BatchRules(min_blocks=1)


def two(**options: object) -> tuple[Bench, BlockManager, Device, ChainsOf]:
    """Rank 0 on a bench, and rank 1 with its device."""
    bench = Bench(level(G2, 100, rules=AT_ONCE), level(G3, 100, rules=AT_ONCE), **options)
    device = Device()
    return bench, bench.manager.beside(device.lacking), device, ChainsOf()


def loads(manager: BlockManager, chains: ChainsOf, now_s: float = 0.0) -> tuple[int, int]:
    """Blocks that a prompt a1..a4 would load, and stores that it would wait for."""
    pieces = [(chains.branch("a"), 4)]
    plan = manager.look_up(pieces, blocks=4, usable=4, device_blocks=0, now_s=now_s)
    return plan.load_blocks, len(plan.awaits)


def test_one_finds_what_the_other_stored_and_waits_for_what_it_is_storing() -> None:
    bench, other, _, chains = two()
    bench.complete(chains.run("a1", "a4"), 0.0)
    assert loads(other, chains) == (0, 0)
    bench.poll(0.0)
    assert loads(other, chains) == (0, 1), "it waits for the batch of rank 0"
    bench.land(0.001)
    assert loads(other, chains) == (4, 0)


def test_a_block_is_under_way_once() -> None:
    bench, other, device, chains = two()
    bench.complete(chains.run("a1", "a4"), 0.0)
    bench.poll(0.0)
    device.held.add(*chains.run("a1", "a4"))
    other.completed(*chains.run("a1", "a4"), 0.0)
    assert not other.poll(0.0)
    assert (other.levels[0].counts.offered, other.levels[0].counts.filtered) == (4, 4)


def test_lanes_are_each_ranks_own() -> None:
    bench, other, device, chains = two()
    bench.complete(chains.run("a1", "a4"), 0.0)
    assert [order.blocks for order in bench.poll(0.0)] == [4]
    device.held.add(*chains.run("b1", "b2"))
    other.completed(*chains.run("b1", "b2"), 0.0)
    begun = [order for order in other.poll(0.0) if isinstance(order, Offload)]
    assert [order.blocks for order in begun] == [2], "beside the batch of rank 0, not after it"
    assert not other.idle
    other.moved(begun[0].batch_id, 0.001)
    told = [order for order in other.poll(0.001) if isinstance(order, PublishKv)]
    assert [order.change.runs for order in told] == [(chains.run("b1", "b2"),)]


def test_uses_are_counted_together() -> None:
    sketch = Sketch(1000)
    bench, other, device, chains = two(sketch=sketch)
    bench.complete(chains.run("a1"), 0.0)
    device.held.add(*chains.run("a1"))
    other.completed(*chains.run("a1"), 0.0)
    assert sketch.count(chain_of(chains.branch("a"), 0)) == 2


def test_a_tier_that_is_lost_is_lost_for_both_and_told_once() -> None:
    bench, other, device, chains = two()
    bench.complete(chains.run("a1", "a4"), 0.0)
    bench.poll(0.0)
    bench.land(0.001)
    device.held.add(*chains.run("b1"))
    other.completed(*chains.run("b1"), 0.001)
    (batch,) = (order for order in other.poll(0.001) if isinstance(order, Offload))
    waits = bench.manager.look_up([(chains.branch("b"), 1)], blocks=1, usable=1, device_blocks=0, now_s=0.001).awaits
    assert len(waits) == 1
    bench.manager.lost(G2)
    other.lost(G2)
    assert waits[0].is_over, "whoever waited for the batch of rank 1 goes on"
    bench.poll(0.001)
    assert [order.tier for order in (*bench.published, *other.poll(0.001)) if isinstance(order, ClearKv)] == [G2]
    other.moved(batch.batch_id, 0.002)
    bench.manager.restored(G2)
    assert loads(other, chains) == loads(bench.manager, chains)
    assert not bench.manager.levels[0].body.store.resident


def test_prefetches_are_the_workers_and_rank_0_sees_to_them() -> None:
    """A block is near when any device has it."""
    bench, other, device, chains = two(prefetch=PrefetchLimits())
    assert other.climb is bench.manager.climb
    assert other.climb is not None
    device.held.add(*chains.run("a1", "a2"))
    assert other.climb.reach([(chains.branch("a"), 4)], 4).near == 2
    assert other.due_s is None
