"""What a worker says of its blocks, of which its engine has some on the device and its block manager some below.

`per_tier` passes every change on with its tier, as credits by tier need it. `dedupe` says that a block is there when
the first tier of the worker has it, and gone when the last one has dropped it: `Residency`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, merged_runs
from policies.cluster.ids import Tier
from policies.kvbm.spans import Spans

PER_TIER, DEDUPE = MODES = ("per_tier", "dedupe")


class Change(NamedTuple):
    """Blocks that were stored in a tier, or removed from it."""

    is_store: bool
    tier: Tier
    runs: tuple[BlockRun, ...]


class Residency:
    """Which blocks a worker has in any tier of its own, of which one account is published (`dedupe`).

    Each change returns the runs whose residency it began or ended, which is what there is to publish: at any time what
    was published so far is `held()`. What lies in a tier that all workers share (G4) is no worker's. It costs per run.
    """

    __slots__ = ("_tiers",)

    def __init__(self) -> None:
        self._tiers: dict[Tier, Spans] = {}

    def stored(self, tier: Tier, runs: Iterable[BlockRun]) -> list[BlockRun]:
        """A tier holds these blocks now; returns those that no tier had before."""
        if tier is Tier.G4_REMOTE:
            return []
        spans = self._tiers.setdefault(tier, Spans())
        fresh: list[BlockRun] = []
        for run in runs:
            fresh += self._nowhere(run)
            spans.add(*run)
        return fresh

    def removed(self, tier: Tier, runs: Iterable[BlockRun]) -> list[BlockRun]:
        """A tier holds these blocks no longer; returns those that no other has. What it did not hold is passed over."""
        spans = self._tiers.get(tier)
        gone: list[BlockRun] = []
        if spans is not None:
            for branch, lo, hi in runs:
                for a, b in spans.remove(branch, lo, hi):
                    gone += self._nowhere(BlockRun(branch, a, b))
        return gone

    def lost(self, tier: Tier) -> list[BlockRun]:
        """A tier has lost everything; returns the blocks that no other has."""
        spans = self._tiers.pop(tier, None)
        return [] if spans is None else [part for run in spans for part in self._nowhere(run)]

    def held(self) -> list[BlockRun]:
        """All blocks that are in some tier, each once, parents before children."""
        return merged_runs(run for spans in self._tiers.values() for run in spans)

    def clear(self) -> None:
        """The worker begins anew, with nothing."""
        self._tiers.clear()

    def _nowhere(self, run: BlockRun) -> list[BlockRun]:
        """The blocks of a run that no tier has."""
        left = [(run.lo, run.hi)]
        for spans in self._tiers.values():
            left = [gap for lo, hi in left for gap in spans.lacking(run.branch, lo, hi)]
        return [BlockRun(run.branch, lo, hi) for lo, hi in left]
