"""The tiers of one simulated worker, or of one of its ranks: its block manager, the batches that go down over links,
what faults do to it.

The manager decides, this carries out; what comes up is in `tierloads`. It calls the manager with the run's time, and
comes back when the manager wants to be seen to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.build import KvSettings, build_offload
from policies.kvbm.level import Level
from policies.kvbm.look_up import Lacking
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Offload, Prefetch, PublishKv
from policies.kvbm.registry import Lease, RegistryView
from policies.kvbm.sketch import Sketch
from policies.kvbm.store import UNLIMITED_BLOCKS
from twin.engine.below import StoreWait, Tiered, TierLoad
from twin.engine.loading import HostLoad
from twin.engine.sequence import Sequence
from twin.engine.ticks import not_before
from twin.mocker.clock import Order
from twin.mocker.links import Transfer, side_by_side
from twin.mocker.tierloads import Landings, Loading, Loads
from twin.mocker.tierways import Ways
from twin.perf.cargo import TIER_FETCHES, TIER_STORES

if TYPE_CHECKING:
    from twin.mocker.tierplan import TierPlan
    from twin.mocker.tiers import Tiers

_SKETCH_BLOCKS = 1 << 20
"""A sketch is never made for more: 64 MiB of counters."""


class TierLane:
    """What crosses the links for one worker: loads that its engine begins, batches that its manager sends down.

    Of a worker with several ranks each has one, over tiers that they have in common; `first` is that of rank 0.
    """

    def __init__(
        self, tiers: Tiers, worker_id: WorkerId, plan: TierPlan, engine: Tiered, *, first: TierLane | None = None
    ) -> None:
        self._tiers = tiers
        self.worker_id = worker_id
        self._plan = plan
        self._first = first
        self.ranks: list[TierLane] = [] if first is None else first.ranks
        rank = len(self.ranks)
        self.ranks.append(self)
        self._by_tier = {level.spec.tier: level for level in plan.levels}
        self._moving: dict[int, Transfer] = {}
        self._fetching: dict[int, Transfer] = {}
        self._armed_s: float | None = None
        self.closed = False
        self.engine = engine
        self._ways = Ways(tiers.network, self._by_tier, tiers.peers, worker_id, rank=rank, ranks=engine.settings.ranks)
        self.manager = engine.attach(self._make)
        host = self._by_tier.get(Tier.G2_HOST)
        self.host_key = host.shared_key if host is not None else None
        tiers.came_up(self)
        self.loads = Loads(tiers, worker_id, self.manager, self._ways, self.attend)
        if self.manager.climb is not None or plan.quota_blocks is not None:
            engine.below.on_submit = self._on_submit

    def _make(self, lacking: Lacking) -> BlockManager:
        if self._first is not None:
            return self._first.manager.beside(lacking, load_s=self._ways.alone_s)
        plan = self._plan
        made: list[Sketch] = []

        def sketch() -> Sketch:
            if not made:
                blocks = [level.spec.capacity_blocks for level in plan.levels]
                limited = [n for n in blocks if n != UNLIMITED_BLOCKS]
                own = self.engine.settings.blocks * self.engine.settings.ranks
                made.append(Sketch(min(sum(limited) + own, _SKETCH_BLOCKS)))
            return made[0]

        settings = KvSettings(
            sketch=sketch,
            min_lfu_count=plan.min_lfu_count,
            decay_s=plan.decay_s,
            quota_blocks=plan.quota_blocks,
        )
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
        return BlockManager(
            levels,
            lacking,
            rule=plan.rule,
            sketch=made[0] if made else None,
            prefetch=plan.prefetch,
            owners=self._tiers.owners if plan.quota_blocks is not None else None,
            peers=self._tiers.peers.view(self.worker_id, plan.peers, levels[0].body, self._lease(), self._reaches)
            if plan.peers is not None
            else None,
            load_s=self._ways.alone_s,
            registry=RegistryView(plan.registry) if plan.registry is not None else None,
        )

    def _lease(self) -> Lease:
        """What it has on record is forgotten a lease after it was last heard of; at once where all is known at once."""
        rules = self._plan.registry
        return Lease(rules.lease_s if rules is not None else 0.0, self._tiers.clock.now)

    def _reaches(self, other: WorkerId) -> bool:
        return not self._tiers.reach.is_cut(self.worker_id, other)

    def _on_submit(self, seq: Sequence) -> None:
        """A request has been sent to the worker."""
        self._tiers.sent(self.worker_id, seq.request_id)
        tenant = self._tiers.tenant_of(seq.request_id)
        if tenant is not None:
            self._tiers.owners.brings(tenant, (seq.own, *(branch for branch, _ in seq.path.pieces)))

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> Loading | Landings:
        """Bring the blocks of a load up; `on_done` is called when all of them have come, or none will any more. Or wait
        for stores that are running."""
        if isinstance(load, StoreWait):
            return self.loads.wait(load, on_done)
        assert isinstance(load, TierLoad)
        return self.loads.begin(load, on_done)

    # ------------------------------------------------------------ down

    def attend(self) -> None:
        """See to what managers want now, and come back when they want to be seen to: ranks in their order, whichever it
        was that something happened to, so that it does not matter which of several timers of an instant comes first."""
        for lane in self.ranks:
            lane._attend()

    def _attend(self) -> None:
        if self.closed:
            return
        now_s = self._tiers.clock.now
        if self._armed_s is not None and not_before(self._armed_s) == now_s:
            return  # its timer comes at this very instant: it must not matter whether a step ends here too
        for order in self.manager.poll(now_s):
            if isinstance(order, Offload):
                level = self._by_tier[order.target]
                self._moving[order.batch_id] = self._tiers.network.start_all(
                    side_by_side(level.down, order.bytes),
                    setup_s=level.spec.latency_s,
                    on_done=partial(self._moved, order.batch_id),
                    cargo=TIER_STORES,
                )
            elif isinstance(order, Prefetch):
                self._fetch(order)
            elif isinstance(order, PublishKv):
                for worker_id in self._tiers.owners_of(self, order.change.tier):
                    self._tiers.listener.tier_changed(worker_id, order.change)
            else:
                for worker_id in self._tiers.owners_of(self, order.tier):
                    self._tiers.listener.tier_cleared(worker_id, order.tier)
        due_s = self.manager.due_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._arm(due_s)

    def _fetch(self, order: Prefetch) -> None:
        level = self._by_tier[order.source]
        self._fetching[order.fetch_id] = self._tiers.network.start_all(
            side_by_side(level.down, order.bytes),
            setup_s=level.spec.latency_s,
            on_done=partial(self._fetched, order),
            cargo=TIER_FETCHES,
        )

    def _fetched(self, order: Prefetch) -> None:
        del self._fetching[order.fetch_id]
        bad = self.loads.damaged(order.source, order.request_id, order.runs)
        self.manager.fetched(order.fetch_id, self._tiers.clock.now, bad)
        self.attend()

    def _arm(self, due_s: float) -> None:
        self._armed_s = due_s
        at_s = max(not_before(due_s), self._tiers.clock.now)
        self._tiers.clock.call(at_s, int(Order.COMMAND), partial(self._on_timer, due_s))

    def _on_timer(self, due_s: float) -> None:
        if self._armed_s == due_s:
            self._armed_s = None
        self.attend()

    def _moved(self, batch_id: int) -> None:
        del self._moving[batch_id]
        self.manager.moved(batch_id, self._tiers.clock.now)
        self.attend()
        for lane in self.ranks:
            lane.loads.landed()

    # ------------------------------------------------------------ faults

    def close(self) -> None:
        """The worker is gone, and what was only its own with it."""
        if self.closed:
            return
        self.closed = True
        for transfer in (*self._moving.values(), *self._fetching.values()):
            transfer.cancel()
        self.loads.close()
        self.manager.close(self._tiers.clock.now)
        self._tiers.closed(self)
        self._tiers.peer_lost(self.worker_id)

    def break_tier(self, tier: Tier, how: str, rate: float | None) -> None:
        """A tier vanishes (tier_down), takes no writes (tier_full), or hands out a share of damaged blocks."""
        if how == "tier_full":
            self.manager.refuse(tier, True)
        elif how == "tier_corrupt":
            self.loads.bad_rate[tier] = rate or 0.0
        else:
            sharing = self._tiers.sharing(self, tier)
            for lane in sharing:
                lane.manager.lost(tier)
                lane.loads.lose(tier)
            if tier is Tier.G2_HOST:
                self._tiers.peer_lost(self.worker_id)
            for lane in sharing:
                lane.attend()

    def mend_tier(self, tier: Tier, how: str) -> None:
        """It is over; a tier that was down is empty."""
        if how == "tier_full":
            self.manager.refuse(tier, False)
        elif how == "tier_corrupt":
            self.loads.bad_rate.pop(tier, None)
        else:
            self.manager.restored(tier)

    @property
    def has_quota(self) -> bool:
        """Whether a tenant may have only so much of its tiers."""
        return self._plan.quota_blocks is not None

    def has(self, tier: Tier) -> bool:
        return tier in self._by_tier
