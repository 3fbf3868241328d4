"""One account of what a worker holds, from two sources: its engine speaks for the device, the block manager for the
tiers below.

`per_tier` passes every change on with its tier, as credits by tier need it. `dedupe` says a block is stored when the
first source has it, and removed when the last one has dropped it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier
from policies.errors import ConfigError
from policies.kvbm.spans import Spans

MODES = ("per_tier", "dedupe")


class Change(NamedTuple):
    """Blocks that were stored in a tier, or removed from it."""

    is_store: bool
    tier: Tier
    runs: tuple[BlockRun, ...]


class Consolidator:
    """What to publish of what the two sources say."""

    __slots__ = ("_below", "_device", "_mode")

    def __init__(self, mode: str = "per_tier") -> None:
        if mode not in MODES:
            raise ConfigError(f"consolidation {mode!r} is not known; known are {', '.join(MODES)}")
        self._mode = mode
        self._device = Spans()
        self._below: dict[Tier, Spans] = {}

    def tell(self, change: Change) -> list[Change]:
        """A source says that something has changed; returns what is to be published."""
        if not change.runs:
            return []
        if self._mode == "per_tier":
            return [change]
        shown = []
        for run in change.runs:
            shown += self._stored(change.tier, run) if change.is_store else self._removed(change.tier, run)
        return [Change(change.is_store, change.tier, tuple(shown))] if shown else []

    def clear(self) -> None:
        """The worker begins anew, with nothing."""
        self._device.clear()
        self._below.clear()

    def _stored(self, tier: Tier, run: BlockRun) -> list[BlockRun]:
        fresh = self._nowhere(run, self._all())
        self._of(tier).add(*run)
        return fresh

    def _removed(self, tier: Tier, run: BlockRun) -> list[BlockRun]:
        gone = [BlockRun(run.branch, lo, hi) for lo, hi in self._of(tier).remove(*run)]
        return [left for part in gone for left in self._nowhere(part, self._all())]

    def _of(self, tier: Tier) -> Spans:
        return self._device if tier is Tier.G1_DEVICE else self._below.setdefault(tier, Spans())

    def _all(self) -> Sequence[Spans]:
        return (self._device, *self._below.values())

    @staticmethod
    def _nowhere(run: BlockRun, sources: Sequence[Spans]) -> list[BlockRun]:
        """The blocks of a run that no source has."""
        spans = [(run.lo, run.hi)]
        for source in sources:
            spans = [gap for lo, hi in spans for gap in source.lacking(run.branch, lo, hi)]
        return [BlockRun(run.branch, lo, hi) for lo, hi in spans]
