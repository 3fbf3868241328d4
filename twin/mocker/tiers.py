"""The tiers of a simulated run: those of each worker, and what workers have in common.

What changed in a tier is told to whoever listens; sums over workers that are there and that are gone are the report's.
It decides nothing: each worker's block manager does (`tierlane`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from policies.cluster.blocks import BlockPath
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.kvbm import climb
from policies.kvbm.build import KvSettings, build_eviction
from policies.kvbm.consolidate import Change
from policies.kvbm.level import TierBody
from policies.kvbm.owners import Owners, Shares
from twin.engine.below import Tiered
from twin.engine.tiered_ranks import TieredRankedEngine
from twin.mocker.clock import Clock
from twin.mocker.links import Network
from twin.mocker.ranklanes import RankLanes
from twin.mocker.tierfigures import figures
from twin.mocker.tierlane import TierLane
from twin.mocker.tierpeers import TierPeers
from twin.mocker.tierplan import LevelPlan, TierPlan

WorkerLanes: TypeAlias = TierLane | RankLanes
"""What a worker has, of one rank or of several."""


class Listener(Protocol):
    """Who is told what has changed in the tiers of a worker."""

    def tier_changed(self, worker_id: WorkerId, change: Change) -> None: ...

    def tier_cleared(self, worker_id: WorkerId, tier: Tier) -> None: ...


class Reach(Protocol):
    """Who reaches whom now, and whether the store of leases, which the registry is part of, is out."""

    @property
    def is_out(self) -> bool: ...

    def is_cut(self, a: WorkerId, b: WorkerId | None) -> bool:
        """Whether a worker does not reach another one, or (None) the registry."""
        ...


class Tiers:
    """The tiers of a run: the lanes of each worker that has any, and what they share. `seed` is the run's."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        listener: Listener,
        reach: Reach,
        *,
        seed: int = 0,
        tenant_of: Callable[[RequestId], str | None] = lambda _: None,
    ) -> None:
        self.clock = clock
        self.network = network
        self.listener = listener
        self.reach = reach
        self.lanes: dict[WorkerId, WorkerLanes] = {}
        self.seed = seed
        self.tenant_of = tenant_of
        self.owners = Owners()
        self.peers = TierPeers()
        self._shared: dict[str, TierBody] = {}
        self._nodes: dict[str, dict[TierLane, None]] = {}  # lanes that have host memory in common
        self._past: list[TierLane] = []  # of workers that are gone
        self._fetching: dict[RequestId, WorkerLanes] = {}  # where blocks are fetched for requests that wait

    def lane(self, worker_id: WorkerId, plan: TierPlan, engine: Tiered | TieredRankedEngine) -> WorkerLanes:
        """The tiers of a worker that comes up; those that only it had before are empty again."""
        old = self.lanes.get(worker_id)
        if old is not None:
            self._past += old.ranks
        if isinstance(engine, TieredRankedEngine):
            self.lanes[worker_id] = RankLanes(self, worker_id, plan, engine)
        else:
            self.lanes[worker_id] = TierLane(self, worker_id, plan, engine)
        lanes = self.lanes[worker_id]
        self._cut_off(lanes)
        return lanes

    def body(
        self, plan: LevelPlan, settings: KvSettings, plugins: Mapping[str, Callable[[KvSettings], object]]
    ) -> TierBody:
        """The tier of a plan: one of the worker's own, or the one that all share."""
        shared = self._shared.get(plan.shared_key) if plan.shared_key is not None else None
        if shared is not None:
            return shared
        shares = Shares(self.owners) if settings.quota_blocks is not None else None
        body = TierBody(plan.spec, lambda: build_eviction(plan.eviction, settings, plugins), shares=shares)
        if plan.shared_key is not None:
            self._shared[plan.shared_key] = body
        return body

    # ------------------------------------------------------------ host memory of a node

    def came_up(self, lane: TierLane) -> None:
        """A lane is there; others may have its host memory in common."""
        if lane.host_key is not None:
            self._nodes.setdefault(lane.host_key, {})[lane] = None

    def closed(self, lane: TierLane) -> None:
        """A lane is there no longer, and the memory of its node neither when it was the last one."""
        if lane.host_key is not None:
            lanes = self._nodes[lane.host_key]
            del lanes[lane]
            if not lanes:
                del self._nodes[lane.host_key]
                del self._shared[lane.host_key]

    def sharing(self, lane: TierLane, tier: Tier) -> list[TierLane]:
        """The lanes that have a lane's own tier in common, which is one of them."""
        is_nodes = tier is Tier.G2_HOST and lane.host_key is not None
        return list(self._nodes[lane.host_key]) if is_nodes and lane.host_key is not None else [lane]

    def owners_of(self, lane: TierLane, tier: Tier) -> list[WorkerId]:
        """The workers that have such a tier in common: each tells of it."""
        return list(dict.fromkeys(each.worker_id for each in self.sharing(lane, tier)))

    @property
    def up(self) -> dict[WorkerId, WorkerLanes]:
        """The tiers of workers that are there, by worker."""
        return {worker_id: lane for worker_id, lane in sorted(self.lanes.items()) if not lane.closed}

    @property
    def idle_timers(self) -> int:
        """Deadlines on the clock that wait for no load any more."""
        return sum(lane.loads.has_idle_deadline for lane in self._all)

    @property
    def _all(self) -> list[TierLane]:
        """Every lane there has been, rank by rank."""
        return [*self._past, *(each for lane in self.lanes.values() for each in lane.ranks)]

    def tell_all(self, worker_id: WorkerId) -> None:
        """Say what the tiers of a worker hold."""
        for change in self.contents(worker_id):
            self.listener.tier_changed(worker_id, change)

    def contents(self, worker_id: WorkerId) -> Sequence[Change]:
        """What the tiers of a worker hold, as stores."""
        lane = self.lanes.get(worker_id)
        return lane.manager.contents() if lane is not None else ()

    def peer_lost(self, worker_id: WorkerId) -> None:
        """The host memory of a worker is gone: who reads it reads nothing more."""
        for lane in self.up.values() if len(self.lanes) > 1 else ():
            for each in lane.ranks:
                each.loads.lose_peer(worker_id)

    def break_reads(self) -> None:
        """Some workers do not reach each other any more, or the registry: reads of each other stall."""
        for lanes in self.up.values():
            self._cut_off(lanes)
            for lane in lanes.ranks:
                lane.loads.stall()

    def read_again(self) -> None:
        """Some workers reach each other again, or the registry."""
        for lanes in self.up.values():
            reached = not self.reach.is_cut(lanes.worker_id, None)
            for lane in lanes.ranks:
                if reached:
                    lane.manager.outside.reached(self.clock.now)
                lane.loads.go_on()

    def _cut_off(self, lanes: WorkerLanes) -> None:
        if self.reach.is_cut(lanes.worker_id, None):
            for lane in lanes.ranks:
                lane.manager.outside.cut_off(self.clock.now)

    # ------------------------------------------------------------ requests that wait in the router

    def queued(self, request_id: RequestId, path: BlockPath | None, isl: int, block_size: int) -> None:
        """A request waits in the router. The worker that has most of its prompt, most of it near, fetches the rest that
        it can reach: that is where the request will most likely go."""
        self.left(request_id)
        if path is None:
            return
        usable = (isl - 1) // block_size
        reaches = [
            (lane, lane.manager.climb.reach(path.pieces, usable))
            for lane in self.up.values()
            if lane.manager.climb is not None and lane.engine.settings.block_size == block_size
        ]
        if not reaches:
            return
        lane, reach = max(reaches, key=_by_reach)
        if reach.runs and lane.manager.climb is not None:
            lane.manager.climb.waits(request_id, path.pieces, usable, reach.runs)
            self._fetching[request_id] = lane
            lane.attend()

    def left(self, request_id: RequestId) -> None:
        """A request does not wait any more, and goes nowhere."""
        lane = self._fetching.pop(request_id, None)
        if lane is not None and lane.manager.climb is not None:
            lane.manager.climb.gone(request_id)
            lane.attend()

    def sent(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """A request has been sent to a worker: what was fetched for it is held there till it is admitted."""
        lane = self._fetching.get(request_id)
        if lane is None or lane.manager.climb is None:
            return
        if lane is self.lanes[worker_id]:
            del self._fetching[request_id]
            lane.manager.climb.comes(request_id)
        else:
            self.left(request_id)

    # ------------------------------------------------------------ sums

    def without_effect(self) -> Iterator[str]:
        """Settings that changed nothing in this run."""
        if any(lane.has_quota for lane in self._all) and not self.owners.known:
            yield "workers.kvbm.tenant_quota_tokens has no effect: no row of the trace names its tenant"

    def audit(self) -> None:
        """Blocks add up in every tier. Raises InvariantError."""
        for lane in self.lanes.values():
            lane.manager.audit()  # ranks have their tiers in common

    def hit_blocks(self) -> dict[str, int]:
        """Full prompt blocks at first admissions, by the tier where they were found, and blocks that came up."""
        lanes = self._all
        found = {"lookup_blocks": sum(lane.engine.hits.lookups for lane in lanes)}
        for tier in Tier:
            found[f"{tier.value}_hit_blocks"] = sum(lane.engine.hits.hits[tier] for lane in lanes)
        loaded = (level.counts.loaded for lane in lanes for level in lane.manager.levels)
        views = dict.fromkeys(lane.manager.peers for lane in lanes)  # ranks share one
        return found | {"loaded_blocks": sum(loaded) + sum(view.loaded for view in views if view is not None)}

    def figures(self) -> dict[str, Any]:
        """What the report says of tiers, over all workers: hits by class, what each edge did, ages of blocks."""
        lanes = self._all
        overlaps = [lane.engine.below.overlap for lane in lanes]
        return figures(
            [lane.engine.hits for lane in lanes],
            [lane.manager for lane in lanes],
            [overlap for overlap in overlaps if overlap is not None],
        )


def _by_reach(found: tuple[WorkerLanes, climb.Reach]) -> tuple[int, int]:
    return found[1].blocks, found[1].near
