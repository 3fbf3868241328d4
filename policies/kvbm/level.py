"""A tier below the device as one worker sees it: the tier itself, which workers may share, and its own way into it.

It keeps what belongs together and counts; what happens is decided in `manager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policies.cluster.blocks import Branch
from policies.cluster.ids import Tier
from policies.kvbm.batches import between
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.health import NegativeCache, TierHealth
from policies.kvbm.lane import BatchRules, Lane
from policies.kvbm.offload import OffloadFilter
from policies.kvbm.owners import Shares
from policies.kvbm.spans import Span, Spans
from policies.kvbm.store import TierStore
from policies.kvbm.tiers import TierSpec

ON_COMPLETE, ON_EVICT, ON_IDLE = TRIGGERS = ("on_complete", "on_evict", "on_idle")
"""When blocks go down: once they are complete (write-through), when they leave the tier above (write-back), or when the
lane has had nothing to do for a while."""
IDLE_S = 0.010
EVICT, DROP = WHEN_FULL = ("evict", "drop")
"""What a block that comes to a full tier does: others make room, or it is dropped."""


class TierBody:
    """One tier: its blocks, its health, what is on its way into it. `unlisted` are blocks that are here, and not on
    record in the registry: whoever wrote them could not reach it.

    `make_order` gives its eviction order; a tier that loses everything begins with a store of its own again, so that
    whoever still refers to the old one finds nothing of it in the new.
    """

    __slots__ = ("_make_order", "health", "negative", "refuses", "shares", "spec", "store", "underway", "unlisted")

    def __init__(
        self,
        spec: TierSpec,
        make_order: Callable[[], EvictionOrder],
        *,
        duplicates: str = "reject",
        shares: Shares | None = None,
    ) -> None:
        self.spec = spec
        self._make_order = make_order
        self.store = TierStore(spec.capacity_blocks, make_order(), duplicates=duplicates, name=spec.tier.value)
        self.health = TierHealth()
        self.negative = NegativeCache()
        self.underway = Spans()
        self.unlisted = Spans()
        self.shares = shares  # where tenants are told apart
        self.refuses = False  # takes no writes, for whatever reason

    def lose(self) -> None:
        """Everything in it is gone, and it does not answer."""
        if self.shares is not None:
            self.shares.clear()
        self.health.lost()
        self.unlisted.clear()
        old = self.store
        self.store = TierStore(
            self.spec.capacity_blocks, self._make_order(), duplicates=old.duplicates, name=self.spec.tier.value
        )

    @property
    def tier(self) -> Tier:
        return self.spec.tier

    @property
    def shown_tier(self) -> Tier:
        """What others are told: a tier that all share is remote to everybody."""
        return Tier.G4_REMOTE if self.spec.is_shared else self.spec.tier

    def absent(self, branch: Branch, lo: int, hi: int) -> Iterable[Span]:
        """The blocks of [lo, hi) that are neither here, or on record nowhere, nor on their way here."""
        return [gap for a, b in self._gaps(branch, lo, hi) for gap in self.underway.lacking(branch, a, b)]

    def listed(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """The blocks of [lo, hi) that are here and on record."""
        return between(lo, hi, self._gaps(branch, lo, hi))

    def _gaps(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        gaps = self.store.lacking(branch, lo, hi)
        if not self.unlisted.blocks:
            return gaps
        return sorted([*gaps, *self.unlisted.common(branch, lo, hi)])

    def blocks_of(self, tenant: str) -> int:
        """Blocks of one tenant that are here or on their way here; 0 where nobody's are told apart."""
        return self.shares.blocks_of(tenant, self.underway) if self.shares is not None else 0


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one edge has done, in blocks."""

    offered: int = 0
    filtered: int = 0  # a filter said no
    joined: int = 0  # were on their way already
    skipped: int = 0  # had left the tier above before they could be copied
    dropped: int = 0  # no room, or no writes
    stored: int = 0
    failed_writes: int = 0
    evicted: int = 0  # from the tier that the edge leads to
    loaded: int = 0
    failed_reads: int = 0
    batches: int = 0


class Level:
    """One worker's edge into a tier: filter, trigger, lane."""

    __slots__ = ("body", "counts", "idle_since_s", "lane", "left", "offload", "trigger", "when_full")

    def __init__(
        self,
        body: TierBody,
        offload: OffloadFilter,
        *,
        trigger: str = ON_COMPLETE,
        when_full: str = EVICT,
        batches: BatchRules | None = None,
    ) -> None:
        self.body = body
        self.offload = offload
        self.trigger = trigger
        self.when_full = when_full
        self.lane = Lane(batches if batches is not None else BatchRules())
        self.counts = Counts()
        self.left = Spans()  # for when the lane is idle
        self.idle_since_s = 0.0

    @property
    def due_s(self) -> float | None:
        """When it wants to be polled next."""
        if self.left.blocks and self.lane.empty:
            return self.idle_since_s + IDLE_S
        return self.lane.due_s
