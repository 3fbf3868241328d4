"""What a simulated worker is to have below its device: sizes, policies by name, and the lanes that blocks cross.

Plain values that a configuration or a test makes; nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace

from policies.cluster.ids import Tier
from policies.frozen import frozen
from policies.kvbm.build import NO_PLUGINS, KvSettings
from policies.kvbm.consolidate import PER_TIER
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.prefetch import PrefetchLimits
from policies.kvbm.registry import RegistryRules
from policies.kvbm.tiers import TierSpec

Lanes = tuple[tuple[str, ...], ...]
"""By rank, the lanes that its share of the bytes crosses."""


@frozen
class LevelPlan:
    """One tier of one worker: sizes, policies by name, and the lanes that blocks cross. `hops` are the ways up, one
    after another, or `piped`: one block on the second while the next is on the first. A shared tier is the same one for
    all whose plan has that `shared_key`; host memory with one is that of a node, and as long there as any of them."""

    spec: TierSpec
    offload: str
    trigger: str
    eviction: str
    when_full: str
    down: Lanes
    hops: tuple[Lanes, ...]
    shared_key: str | None = None
    piped: bool = False


@frozen
class PeerPlan:
    """A worker that reads host memory of others, and lets them read its own where the `layout` is the same: by rank the
    lanes that bytes cross `out` of it, `into` it, and `up` to its device."""

    spec: TierSpec
    layout: str
    out: Lanes
    into: Lanes
    up: Lanes


@frozen
class TierPlan:
    """The tiers below one worker's device, fastest first. `events` says what is told of them: `per_tier`, or `dedupe`
    (one account of the device and all tiers of its own)."""

    levels: tuple[LevelPlan, ...]
    rule: Rule
    batches: BatchRules
    min_lfu_count: int
    decay_s: float
    prefetch: PrefetchLimits | None = None
    quota_blocks: int | None = None  # of one tenant in a tier
    peers: PeerPlan | None = None
    events: str = PER_TIER
    registry: RegistryRules | None = None  # None: what lies outside a worker is known at once
    plugins: Mapping[str, Callable[[KvSettings], object]] = field(default_factory=lambda: NO_PLUGINS)

    @property
    def shares_host(self) -> bool:
        """Whether its host memory is that of a node."""
        return any(level.spec.tier is Tier.G2_HOST and level.shared_key is not None for level in self.levels)


def of_rank(plan: TierPlan, rank: int, ranks: int) -> TierPlan:
    """The plan of one of several ranks of a worker: the same tiers, over the lanes of its own GPUs."""
    levels = tuple(
        replace(
            level,
            down=share(level.down, rank, ranks),
            hops=tuple(share(hop, rank, ranks) for hop in level.hops),
        )
        for level in plan.levels
    )
    return replace(plan, levels=levels)


def share(lanes: Lanes, rank: int, ranks: int) -> Lanes:
    """The lanes of one of several ranks, each of which has as many GPUs; all of them where ranks have none of their
    own."""
    size, rest = divmod(len(lanes), ranks)
    return lanes if rest else lanes[rank * size : (rank + 1) * size]


def joined(one: Lanes, many: Lanes) -> Lanes:
    """What the bytes of each rank cross when they cross both at once; a lane of both is crossed once."""
    wide, narrow = (many, one) if len(many) >= len(one) else (one, many)
    return tuple(tuple(dict.fromkeys((*narrow[rank % len(narrow)], *lanes))) for rank, lanes in enumerate(wide))
