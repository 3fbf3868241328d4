"""The tiers of one simulated worker with several ranks: a lane for each rank, over tiers that belong to the worker.

What one rank has sent down another one may bring up. It decides nothing: the block manager of each rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.manager import BlockManager
from twin.engine.below import Tiered
from twin.engine.loading import HostLoad
from twin.engine.tiered_ranks import TieredRankedEngine
from twin.mocker.tierlane import TierLane
from twin.mocker.tierloads import Landings, Loading, Loads
from twin.mocker.tierplan import TierPlan, of_rank

if TYPE_CHECKING:
    from twin.mocker.tiers import Tiers


class RankLanes:
    """It stands where a worker with one rank has a `TierLane`; of what ranks have in common, that of rank 0 speaks."""

    def __init__(self, tiers: Tiers, worker_id: WorkerId, plan: TierPlan, engine: TieredRankedEngine) -> None:
        self.worker_id = worker_id
        self._engine = engine
        first: TierLane | None = None
        for n, rank in enumerate(engine.tiered):
            lane = TierLane(tiers, worker_id, of_rank(plan, n, len(engine.tiered)), rank, first=first)
            first = first or lane
        assert first is not None
        self._first = first
        self.ranks = first.ranks

    @property
    def engine(self) -> Tiered:
        return self._first.engine

    @property
    def manager(self) -> BlockManager:
        return self._first.manager

    @property
    def loads(self) -> Loads:
        return self._first.loads

    @property
    def closed(self) -> bool:
        return self._first.closed

    @property
    def has_quota(self) -> bool:
        return self._first.has_quota

    def has(self, tier: Tier) -> bool:
        return self._first.has(tier)

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> Loading | Landings:
        """Bring the blocks of a load up to the rank of its request."""
        return self.ranks[self._engine.rank_of(load.seq)].load(load, on_done)

    def attend(self) -> None:
        self._first.attend()

    def close(self) -> None:
        for lane in self.ranks:
            lane.close()

    def break_tier(self, tier: Tier, how: str, rate: float | None) -> None:
        for lane in self.ranks:
            lane.break_tier(tier, how, rate)

    def mend_tier(self, tier: Tier, how: str) -> None:
        for lane in self.ranks:
            lane.mend_tier(tier, how)
