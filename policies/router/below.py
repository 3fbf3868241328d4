"""What workers hold below device memory, as their events say: host memory and disk of their own, and what all share.

It answers how a prompt goes on below where a worker's device ends, each block in the fastest tier that has it. Like the
prefix index it never raises for odd reports, and what nobody holds leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.cluster.blocks import BlockPath, BlockRun, Branch
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.spans import Spans

_OWN = (Tier.G2_HOST, Tier.G3_DISK)


class Beyond(NamedTuple):
    """Blocks of a prompt behind those on the device, by where they lie."""

    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0


NOTHING = Beyond()


class LowerTiers:
    """Blocks by worker and tier; those of the remote tier are everybody's, whoever reports them."""

    __slots__ = ("_own", "_shared")

    def __init__(self) -> None:
        self._own: dict[WorkerId, dict[Tier, Spans]] = {}
        self._shared = Spans()

    def __len__(self) -> int:
        """Blocks held, over all workers and tiers."""
        own = sum(spans.blocks for tiers in self._own.values() for spans in tiers.values())
        return own + self._shared.blocks

    @property
    def is_empty(self) -> bool:
        return not self._own and not self._shared.blocks

    def store(self, worker_id: WorkerId, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks now."""
        if tier is Tier.G4_REMOTE:
            spans = self._shared
        else:
            spans = self._own.setdefault(worker_id, {}).setdefault(tier, Spans())
        for run in runs:
            spans.add(*run)

    def remove(self, worker_id: WorkerId, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks no longer."""
        spans = self._shared if tier is Tier.G4_REMOTE else self._own.get(worker_id, {}).get(tier)
        if spans is not None:
            for run in runs:
                spans.remove(*run)

    def clear(self, worker_id: WorkerId, tier: Tier | None = None) -> None:
        """A tier is empty; without one, all that is the worker's own."""
        if tier is None:
            self._own.pop(worker_id, None)
        elif tier is Tier.G4_REMOTE:
            self._shared.clear()
        else:
            self._own.get(worker_id, {}).pop(tier, None)

    def beyond(self, path: BlockPath | None, worker_id: WorkerId, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below `device_blocks`, up to block `usable`, without a gap."""
        own = self._own.get(worker_id)
        if path is None or (own is None and not self._shared.blocks):
            return NOTHING
        tiers = [own.get(tier) if own is not None else None for tier in _OWN]
        sources = [*tiers, self._shared]
        found = [0, 0, 0]
        at = device_blocks
        for branch, end in path.pieces:
            end = min(end, usable)
            while at < end:
                place, hi = _fastest(sources, branch, at, end)
                if place is None:
                    return Beyond(*found)
                found[place] += hi - at
                at = hi
        return Beyond(*found)


def _fastest(sources: list[Spans | None], branch: Branch, at: int, end: int) -> tuple[int | None, int]:
    """The first source that has block `at`, and how far it stays the first that has them."""
    for place, spans in enumerate(sources):
        hi = min(spans.reach(branch, at), end) if spans is not None else at
        if hi > at:
            for faster in sources[:place]:
                better = faster.common(branch, at, hi) if faster is not None else []
                if better:
                    hi = better[0][0]
            return place, hi
    return None, at
