"""Blocks and tiers for tests of the block manager: chains a1, a2, ... by name, stores that are filled, levels."""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier
from policies.kvbm.eviction.lru import Lru
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import Level, TierBody
from policies.kvbm.lifecycle import BlockState, Cause
from policies.kvbm.manager import BlockManager
from policies.kvbm.offload import OffloadFilter, Presence
from policies.kvbm.orders import Offload, Order
from policies.kvbm.spans import Spans
from policies.kvbm.store import Hold, TierStore
from policies.kvbm.tiers import TierSpec

BLOCK_BYTES = 8_388_608


class Chains:
    """Block `a1` is the first of chain a, `a2` continues it."""

    def __init__(self) -> None:
        self._branches: dict[str, Branch] = {}

    def branch(self, name: str) -> Branch:
        known = self._branches
        if name not in known:
            known[name] = Branch(len(known) + 1, keys=[len(known) + 1])
        return known[name]

    def run(self, first: str, last: str | None = None) -> BlockRun:
        return BlockRun(self.branch(first[0]), int(first[1:]) - 1, int((last or first)[1:]))

    def names(self, run: BlockRun) -> list[str]:
        name = next(name for name, branch in self._branches.items() if branch is run.branch)
        return [f"{name}{block + 1}" for block in range(run.lo, run.hi)]


def put(store: TierStore, run: BlockRun, now_s: float = 0.0) -> list[Hold]:
    """Blocks come into a tier and stay in use until the holds are released."""
    lot = store.reserve(run.hi - run.lo)
    assert lot is not None
    store.advance(lot, Cause.LOAD)
    return store.register(lot, run, now_s)[0]


def fill(store: TierStore, *runs: BlockRun) -> None:
    """Blocks come into a tier and nobody uses them."""
    for run in runs:
        store.release(put(store, run))


def states(store: TierStore) -> dict[str, int]:
    return {state.value: store.gauges[state] for state in BlockState if store.gauges[state]}


def level(
    tier: Tier,
    capacity: int,
    *,
    offload: OffloadFilter | None = None,
    order: Callable[[], EvictionOrder] = Lru,
    rules: BatchRules | None = None,
    **options: str,
) -> Level:
    spec = TierSpec(
        tier=tier,
        capacity_bytes=capacity * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        latency_s=1e-5,
        bytes_per_s=32e9,
    )
    return Level(TierBody(spec, order), offload or Presence(), batches=rules, **options)


class Device:
    """A device pool in name only: what it holds is what a test says."""

    def __init__(self) -> None:
        self.held = Spans()

    def lacking(self, branch: Branch, lo: int, hi: int) -> list[tuple[int, int]]:
        return self.held.lacking(branch, lo, hi)


class Bench:
    """A block manager with a device, and batches that are moved when the test says so."""

    def __init__(self, *levels: Level, **options: object) -> None:
        self.device = Device()
        self.manager = BlockManager(levels, self.device.lacking, **options)  # type: ignore[arg-type]
        self.moving: list[Offload] = []
        self.published: list[Order] = []

    def poll(self, now_s: float) -> list[Offload]:
        """What begins to move now."""
        started = []
        for order in self.manager.poll(now_s):
            if isinstance(order, Offload):
                started.append(order)
            else:
                self.published.append(order)
        self.moving += started
        return started

    def complete(self, run: BlockRun, now_s: float) -> None:
        self.device.held.add(*run)
        self.manager.completed(*run, now_s)

    def evict(self, run: BlockRun, now_s: float) -> None:
        self.device.held.remove(*run)
        self.manager.evicted(*run, now_s)

    def land(self, now_s: float, *, ok: bool = True) -> None:
        """The oldest batch that moves is over."""
        self.manager.moved(self.moving.pop(0).batch_id, now_s, ok=ok)
        self.poll(now_s)

    def settle(self, now_s: float) -> float:
        """Let timers fire and batches land, a millisecond each, until nothing is left to do; returns when."""
        for _ in range(10_000):
            self.poll(now_s)
            if self.moving:
                now_s += 0.001
                self.land(now_s)
            elif (due_s := self.manager.due_s) is not None:
                now_s = max(now_s, due_s)
            else:
                return now_s
        raise AssertionError("it never comes to rest")
