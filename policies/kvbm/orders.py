"""What a block manager wants done, and what it has begun: batches down, loads up, news for others."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.frozen import frozen
from policies.kvbm.consolidate import Change
from policies.kvbm.look_up import Plan
from policies.kvbm.store import Hold, TierStore


@frozen
class Offload:
    """Move the blocks of a batch from one tier to the next; ends with `moved`. They may not be touched meanwhile."""

    batch_id: int
    source: Tier
    target: Tier
    blocks: int
    bytes: int
    why: str


@frozen
class Prefetch:
    """Copy these blocks from a tier up into host memory, for a request that waits; ends with `fetched`."""

    fetch_id: int
    request_id: RequestId
    source: Tier
    runs: tuple[BlockRun, ...]
    blocks: int
    bytes: int


@frozen
class PublishKv:
    """Tell whoever listens that a tier holds these blocks now, or no longer."""

    change: Change


@frozen
class ClearKv:
    """Tell whoever listens that a tier has lost everything."""

    tier: Tier


Order: TypeAlias = Offload | Prefetch | PublishKv | ClearKv


class Leg(NamedTuple):
    """What one tier sends up for a request: of another worker, `owner`, where there is one."""

    tier: Tier
    blocks: int
    bytes: int
    owner: WorkerId | None = None


class Onboard:
    """Blocks on their way up to the device for one request: `legs` side by side. Ends with `loaded` or `dropped`; until
    then `holds`, by leg, keep their sources in their `stores`."""

    __slots__ = ("holds", "legs", "plan", "stores")

    def __init__(self, plan: Plan, legs: tuple[Leg, ...], holds: list[list[Hold]], stores: list[TierStore]) -> None:
        self.plan = plan
        self.legs = legs
        self.holds = holds
        self.stores = stores
