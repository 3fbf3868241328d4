"""Moves blocks between the tiers of simulated workers, over links, as their block managers say.

A manager decides, this carries out: transfers begin and end at instants of the run's clock, what changed in a tier is
told to whoever listens, and scripted faults make tiers vanish, refuse writes or hand out bad blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from policies.cluster.blocks import BlockRun
from policies.cluster.draws import draw
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.accounting import HitCount
from policies.kvbm.build import NO_PLUGINS, KvSettings, build_eviction, build_offload
from policies.kvbm.consolidate import Change
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import Level, TierBody
from policies.kvbm.look_up import Lacking, Rule
from policies.kvbm.manager import BlockManager, Offload, PublishKv
from policies.kvbm.sketch import Sketch
from policies.kvbm.spread import Spread
from policies.kvbm.store import UNLIMITED_BLOCKS
from policies.kvbm.tiers import TierSpec
from twin.engine.offload import HostLoad
from twin.engine.ticks import instant
from twin.engine.tiered import TieredEngine, TierLoad
from twin.mocker.clock import Clock, Order
from twin.mocker.links import Network, Transfer, side_by_side
from twin.perf.cargo import TIER_LOADS, TIER_STORES

Lanes = tuple[tuple[str, ...], ...]
"""By rank, the lanes that its share of the bytes crosses."""

DEADLINE_S, REMOTE_DEADLINE_S = 10.0, 30.0
"""A load that takes longer has failed; longer where a remote store has part in it."""
_SKETCH_BLOCKS = 1 << 20
"""A sketch is never made for more: 64 MiB of counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """One tier of one worker: sizes, policies by name, and the lanes that blocks cross. `hops` are the ways up, one
    after another; a shared tier is the same one for all whose plan has that `shared_key`."""

    spec: TierSpec
    offload: str
    trigger: str
    eviction: str
    when_full: str
    down: Lanes
    hops: tuple[Lanes, ...]
    shared_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """The tiers below one worker's device, fastest first."""

    levels: tuple[LevelPlan, ...]
    rule: Rule
    batches: BatchRules
    min_lfu_count: int
    decay_s: float
    plugins: Mapping[str, Callable[[KvSettings], object]] = field(default_factory=lambda: NO_PLUGINS)


class Listener(Protocol):
    """Who is told what has changed in the tiers of a worker."""

    def tier_changed(self, worker_id: WorkerId, change: Change) -> None: ...

    def tier_cleared(self, worker_id: WorkerId, tier: Tier) -> None: ...


class Tiers:
    """The tiers of a run: one `TierLane` for each worker that has any, and what they share. `seed` is the run's."""

    def __init__(self, clock: Clock, network: Network, listener: Listener, *, seed: int = 0) -> None:
        self.clock = clock
        self.network = network
        self.listener = listener
        self.lanes: dict[WorkerId, TierLane] = {}
        self.seed = seed
        self._shared: dict[str, TierBody] = {}
        self._past: list[TierLane] = []  # of workers that are gone

    def lane(self, worker_id: WorkerId, plan: TierPlan, engine: TieredEngine) -> TierLane:
        """The tiers of a worker that comes up; those that only it had before are empty again."""
        old = self.lanes.get(worker_id)
        if old is not None:
            self._past.append(old)
        lane = self.lanes[worker_id] = TierLane(self, worker_id, plan, engine)
        return lane

    def body(
        self, plan: LevelPlan, settings: KvSettings, plugins: Mapping[str, Callable[[KvSettings], object]]
    ) -> TierBody:
        """The tier of a plan: one of the worker's own, or the one that all share."""
        shared = self._shared.get(plan.shared_key) if plan.shared_key is not None else None
        if shared is not None:
            return shared
        body = TierBody(plan.spec, lambda: build_eviction(plan.eviction, settings, plugins))
        if plan.shared_key is not None:
            self._shared[plan.shared_key] = body
        return body

    @property
    def up(self) -> dict[WorkerId, TierLane]:
        """The tiers of workers that are there, by worker."""
        return {worker_id: lane for worker_id, lane in sorted(self.lanes.items()) if not lane.closed}

    @property
    def idle_timers(self) -> int:
        """Deadlines on the clock that wait for no load any more."""
        return sum(lane.has_idle_deadline for lane in (*self._past, *self.lanes.values()))

    def tell_all(self, worker_id: WorkerId) -> None:
        """Say what the tiers of a worker hold."""
        lane = self.lanes.get(worker_id)
        for change in lane.manager.contents() if lane is not None else ():
            self.listener.tier_changed(worker_id, change)

    def audit(self) -> None:
        """Blocks add up in every tier. Raises InvariantError."""
        for lane in self.lanes.values():
            lane.manager.audit()

    def hit_blocks(self) -> dict[str, int]:
        """Full prompt blocks at first admissions, by the tier where they were found, and blocks that came up."""
        lanes = [*self._past, *self.lanes.values()]
        found = {"lookup_blocks": sum(lane.engine.hits.lookups for lane in lanes)}
        for tier in Tier:
            found[f"{tier.value}_hit_blocks"] = sum(lane.engine.hits.hits[tier] for lane in lanes)
        loaded = (level.counts.loaded for lane in lanes for level in lane.manager.levels)
        return found | {"loaded_blocks": sum(loaded)}

    def figures(self) -> dict[str, Any]:
        """What the report says of tiers, over all workers: hits by class, what each edge did, ages of blocks."""
        lanes = [*self._past, *self.lanes.values()]
        return figures([lane.engine.hits for lane in lanes], [lane.manager for lane in lanes])


class _Loading:
    """A load that is under way: which legs are, and what became of them. It fails at `due_s`."""

    __slots__ = ("due_s", "lane", "left", "load", "on_done", "over", "transfers")

    def __init__(self, lane: TierLane, load: TierLoad, on_done: Callable[[], None]) -> None:
        self.lane = lane
        self.load = load
        self.on_done = on_done
        self.left = len(load.onboard.legs)
        is_remote = any(leg.tier is Tier.G4_REMOTE for leg in load.onboard.legs)
        self.due_s = lane.now_s + (REMOTE_DEADLINE_S if is_remote else DEADLINE_S)
        self.transfers: dict[int, Transfer] = {}
        self.over = False

    def cancel(self) -> bool:
        """Nobody wants it any more."""
        if self.over:
            return False
        self.over = True
        for transfer in self.transfers.values():
            transfer.cancel()
        self.lane.dropped(self)
        return True


class TierLane:
    """What crosses the links for one worker: loads that its engine begins, batches that its manager sends down."""

    def __init__(self, tiers: Tiers, worker_id: WorkerId, plan: TierPlan, engine: TieredEngine) -> None:
        self._tiers = tiers
        self._worker_id = worker_id
        self._plan = plan
        self._by_tier = {level.spec.tier: level for level in plan.levels}
        self._loading: dict[_Loading, None] = {}
        self._moving: dict[int, Transfer] = {}
        self._armed_s: float | None = None
        self._deadline = False  # one is on the clock
        self.closed = False
        self.late_loads = 0
        self.bad_rate: dict[Tier, float] = {}  # share of blocks that a tier hands out damaged
        self.engine = engine
        self.manager = engine.attach(self._make)

    def _make(self, lacking: Lacking) -> BlockManager:
        plan = self._plan
        made: list[Sketch] = []

        def sketch() -> Sketch:
            if not made:
                blocks = [level.spec.capacity_blocks for level in plan.levels]
                limited = [n for n in blocks if n != UNLIMITED_BLOCKS]
                made.append(Sketch(min(sum(limited) + self.engine.settings.blocks, _SKETCH_BLOCKS)))
            return made[0]

        settings = KvSettings(sketch=sketch, min_lfu_count=plan.min_lfu_count, decay_s=plan.decay_s)
        levels = [
            Level(
                self._tiers.body(level, settings, plan.plugins),
                build_offload(level.offload, settings, plan.plugins),
                trigger=level.trigger,
                when_full=level.when_full,
                batches=plan.batches,
            )
            for level in plan.levels
        ]
        return BlockManager(levels, lacking, rule=plan.rule, sketch=made[0] if made else None)

    # ------------------------------------------------------------ up

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> _Loading:
        """Bring the blocks of a load up; `on_done` is called when all of them have come, or none will any more."""
        assert isinstance(load, TierLoad)
        loading = _Loading(self, load, on_done)
        self._loading[loading] = None
        self._watch()
        for at, leg in enumerate(load.onboard.legs):
            self._hop(loading, at, leg.tier, leg.bytes, 0)
        return loading

    def _hop(self, loading: _Loading, at: int, tier: Tier, bytes_: int, hop: int) -> None:
        level = self._by_tier[tier]
        if hop == len(level.hops):
            loading.left -= 1
            if not loading.left:
                self._came_up(loading)
            return
        loading.transfers[at] = self._tiers.network.start_all(
            side_by_side(level.hops[hop], bytes_),
            setup_s=level.spec.latency_s if not hop else 0.0,
            on_done=partial(self._hop, loading, at, tier, bytes_, hop + 1),
            cargo=TIER_LOADS,
        )

    def _came_up(self, loading: _Loading, lost: Sequence[BlockRun] = ()) -> None:
        """A load is over; `lost` are blocks that never came."""
        del self._loading[loading]
        load, now_s = loading.load, self._tiers.clock.now
        load.good = self.manager.loaded(load.onboard, now_s, [*lost, *self._bad(load)])
        load.landed_s = now_s
        loading.over = True
        loading.on_done()
        self.attend()

    @property
    def now_s(self) -> float:
        return self._tiers.clock.now

    @property
    def has_idle_deadline(self) -> bool:
        return self._deadline and not self._loading

    def _watch(self) -> None:
        """See to it that the load which is due first fails in time."""
        if not self._deadline and self._loading:
            self._deadline = True
            due_s = min(loading.due_s for loading in self._loading)
            self._tiers.clock.call(instant(due_s), int(Order.COMMAND), self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = False
        for loading in [loading for loading in self._loading if instant(loading.due_s) <= self.now_s]:
            lost = []
            for at, run in enumerate(loading.load.onboard.plan.runs):
                transfer = loading.transfers[at]
                if not transfer.done:
                    transfer.cancel()
                    lost += [BlockRun(part.stretch.branch, part.lo, part.hi) for part in run.found]
            self.late_loads += 1
            self._came_up(loading, lost)
        self._watch()

    def dropped(self, loading: _Loading) -> None:
        """A load was called off: its sources may be evicted again."""
        del self._loading[loading]
        self.manager.dropped(loading.load.onboard)

    def _bad(self, load: TierLoad) -> list[BlockRun]:
        """The blocks of a load that were read damaged."""
        bad = []
        for run in load.onboard.plan.runs if self.bad_rate else ():
            rate = self.bad_rate.get(run.tier, 0.0)
            for part in run.found if rate else ():
                for block in range(part.lo, part.hi):
                    if draw(self._tiers.seed, f"tier_corrupt.{run.tier.value}", load.seq.request_id, block) < rate:
                        bad.append(BlockRun(part.stretch.branch, block, block + 1))
        return bad

    # ------------------------------------------------------------ down

    def attend(self) -> None:
        """See to what the manager wants now, and come back when it wants to be seen to."""
        if self.closed:
            return
        now_s = self._tiers.clock.now
        for order in self.manager.poll(now_s):
            if isinstance(order, Offload):
                level = self._by_tier[order.target]
                self._moving[order.batch_id] = self._tiers.network.start_all(
                    side_by_side(level.down, order.bytes),
                    setup_s=level.spec.latency_s,
                    on_done=partial(self._moved, order.batch_id),
                    cargo=TIER_STORES,
                )
            elif isinstance(order, PublishKv):
                self._tiers.listener.tier_changed(self._worker_id, order.change)
            else:
                self._tiers.listener.tier_cleared(self._worker_id, order.tier)
        due_s = self.manager.due_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        at_s = instant(due_s)
        if at_s < due_s:
            at_s = instant(due_s + 1e-9)
        self._armed_s = due_s
        self._tiers.clock.call(max(at_s, self._tiers.clock.now), int(Order.COMMAND), partial(self._on_timer, due_s))

    def _on_timer(self, due_s: float) -> None:
        if self._armed_s == due_s:
            self._armed_s = None
        self.attend()

    def _moved(self, batch_id: int) -> None:
        del self._moving[batch_id]
        self.manager.moved(batch_id, self._tiers.clock.now)
        self.attend()

    # ------------------------------------------------------------ faults

    def close(self) -> None:
        """The worker is gone, and what was only its own with it."""
        if self.closed:
            return
        self.closed = True
        for transfer in self._moving.values():
            transfer.cancel()
        for loading in list(self._loading):
            loading.cancel()
        self.manager.close(self._tiers.clock.now)

    def break_tier(self, tier: Tier, how: str, rate: float | None) -> None:
        """A tier vanishes (tier_down), takes no writes (tier_full), or hands out a share of damaged blocks."""
        if how == "tier_full":
            self.manager.refuse(tier, True)
        elif how == "tier_corrupt":
            self.bad_rate[tier] = rate or 0.0
        else:
            self._lose(tier)

    def mend_tier(self, tier: Tier, how: str) -> None:
        """It is over; a tier that was down is empty."""
        if how == "tier_full":
            self.manager.refuse(tier, False)
        elif how == "tier_corrupt":
            self.bad_rate.pop(tier, None)
        else:
            self.manager.restored(tier)

    def _lose(self, tier: Tier) -> None:
        """A tier is gone: what comes up from it fails now."""
        self.manager.lost(tier)
        for loading in list(self._loading):
            for at, leg in enumerate(loading.load.onboard.legs):
                if leg.tier is tier and loading.transfers[at].cancel():
                    loading.left -= 1
            if not loading.left:
                self._came_up(loading)
        self.attend()

    def has(self, tier: Tier) -> bool:
        return tier in self._by_tier


def figures(hits: Sequence[HitCount], managers: Sequence[BlockManager]) -> dict[str, Any]:
    """Sums over workers, as plain values."""
    found: dict[str, int] = {"lookups": 0}
    for each in hits:
        found["lookups"] += each.lookups
        for tier, blocks in each.hits.items():
            found[tier.value] = found.get(tier.value, 0) + blocks
        for why, blocks in each.misses.items():
            found[f"miss_{why.value}"] = found.get(f"miss_{why.value}", 0) + blocks
        for name in ("prompt_tokens", "cached_tokens", "reused_tokens", "recomputed_tokens"):
            found[name] = found.get(name, 0) + getattr(each, name)
    edges: dict[str, dict[str, int]] = {}
    for manager in managers:
        for level in manager.levels:
            edge = edges.setdefault(level.body.tier.value, {})
            done = asdict(level.counts)
            size = level.body.spec.block_bytes
            done |= {"stored_bytes": level.counts.stored * size, "loaded_bytes": level.counts.loaded * size}
            for name, count in done.items():
                edge[name] = edge.get(name, 0) + count
    spreads = {
        name: _spread([getattr(manager, name) for manager in managers])
        for name in ("age_at_hit", "age_at_evict", "reuse_at_evict")
    }
    return {"hits": found, "edges": edges, "spreads": spreads}


def _spread(parts: Sequence[Spread]) -> dict[str, Any]:
    blocks = sum(part.blocks for part in parts)
    total = sum(part.total for part in parts)
    counts = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    return {"blocks": blocks, "mean": total / blocks if blocks else None, "counts": counts}
