"""What workers hold below device memory, as their events say: host memory and disk of their own, and what all share.

It answers how a prompt goes on below where a worker's device ends. Like the prefix index it never raises for odd
reports, and what nobody holds leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.cluster.blocks import BlockPath, BlockRun
from policies.cluster.ids import Place, Tier
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
        self._own: dict[Place, dict[Tier, Spans]] = {}
        self._shared = Spans()

    def __len__(self) -> int:
        """Blocks held, over all workers and tiers."""
        own = sum(spans.blocks for tiers in self._own.values() for spans in tiers.values())
        return own + self._shared.blocks

    @property
    def is_empty(self) -> bool:
        return not self._own and not self._shared.blocks

    def store(self, place: Place, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks now."""
        if tier is Tier.G4_REMOTE:
            spans = self._shared
        else:
            spans = self._own.setdefault(place, {}).setdefault(tier, Spans())
        for run in runs:
            spans.add(*run)

    def remove(self, place: Place, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks no longer."""
        spans = self._shared if tier is Tier.G4_REMOTE else self._own.get(place, {}).get(tier)
        if spans is not None:
            for run in runs:
                spans.remove(*run)

    def clear(self, place: Place, tier: Tier | None = None) -> None:
        """A tier is empty; without one, all that is the worker's own."""
        if tier is None:
            self._own.pop(place, None)
        elif tier is Tier.G4_REMOTE:
            self._shared.clear()
        else:
            self._own.get(place, {}).pop(tier, None)

    def beyond(self, path: BlockPath | None, place: Place, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below `device_blocks`, up to block `usable`: in host memory as far as that has it, from
        there on disk, from there in the shared tier. What is behind a gap does not count."""
        own = self._own.get(place)
        if path is None or (own is None and not self._shared.blocks):
            return NOTHING
        found = [0, 0, 0]
        at = device_blocks
        for n, spans in enumerate((*(own.get(tier) if own is not None else None for tier in _OWN), self._shared)):
            upto = _along(spans, path, at, usable) if spans is not None else at
            found[n] = upto - at
            at = upto
        return Beyond(*found)


def _along(spans: Spans, path: BlockPath, at: int, usable: int) -> int:
    """How far a path is in a set from block `at` on without a gap."""
    for branch, end in path.pieces:
        end = min(end, usable)
        if at < end:
            at = min(spans.reach(branch, at), end)
            if at < end:
                break
    return at
