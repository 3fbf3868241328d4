"""What workers hold below device memory, as their events say: host memory and disk of their own, and what all share.
Where workers read host memory of each other, what peers have counts too.

It answers how a prompt goes on below where a worker's device ends. Like the prefix index it never raises for odd
reports, and what nobody holds leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.cluster.blocks import BlockPath, BlockRun, Branch
from policies.cluster.ids import Place, Tier
from policies.kvbm.spans import Spans, along, reach_together

_OWN = (Tier.G2_HOST, Tier.G3_DISK)


class Beyond(NamedTuple):
    """Blocks of a prompt behind those on the device, by where they lie."""

    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0
    peer_blocks: int = 0


NOTHING = Beyond()


class LowerTiers:
    """Blocks by worker and tier; those of the remote tier are everybody's, whoever reports them."""

    __slots__ = ("_own", "_peers", "_reached", "_shared")

    def __init__(self) -> None:
        self._own: dict[Place, dict[Tier, Spans]] = {}
        self._shared = Spans()
        self._peers: dict[Place, str] = {}
        self._reached: dict[tuple[str, Branch, int], int] = {}  # of all peers together, as long as nothing changes

    def __len__(self) -> int:
        """Blocks held, over all workers and tiers."""
        own = sum(spans.blocks for tiers in self._own.values() for spans in tiers.values())
        return own + self._shared.blocks

    @property
    def is_empty(self) -> bool:
        return not self._own and not self._shared.blocks

    def reads_peers(self, place: Place, layout: str | None) -> None:
        """A worker is there that reads host memory of all that have this layout, and lets them read its own (None: it
        reads nobody's)."""
        self._reached.clear()
        self._peers.pop(place, None)
        if layout is not None:
            self._peers[place] = layout

    def store(self, place: Place, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks now."""
        if tier is Tier.G4_REMOTE:
            spans = self._shared
        else:
            spans = self._own.setdefault(place, {}).setdefault(tier, Spans())
            self._reached.clear()
        for run in runs:
            spans.add(*run)

    def remove(self, place: Place, tier: Tier, runs: Iterable[BlockRun]) -> None:
        """A tier holds these blocks no longer."""
        spans = self._shared if tier is Tier.G4_REMOTE else self._own.get(place, {}).get(tier)
        if spans is not None:
            self._reached.clear()
            for run in runs:
                spans.remove(*run)

    def clear(self, place: Place, tier: Tier | None = None) -> None:
        """A tier is empty; without one, all that is the worker's own."""
        self._reached.clear()
        if tier is None:
            self._own.pop(place, None)
        elif tier is Tier.G4_REMOTE:
            self._shared.clear()
        else:
            self._own.get(place, {}).pop(tier, None)

    def beyond(self, path: BlockPath | None, place: Place, device_blocks: int, usable: int) -> Beyond:
        """How a prompt goes on below `device_blocks`, up to block `usable`: in host memory as far as that has it, from
        there in that of peers, on disk, in the shared tier. What is behind a gap does not count."""
        own, layout = self._own.get(place), self._peers.get(place)
        if path is None or (own is None and layout is None and not self._shared.blocks):
            return NOTHING
        host, disk = (own.get(tier) if own is not None else None for tier in _OWN)
        ways = (
            host.reach if host is not None else None,
            (lambda branch, at: self._peers_reach(layout, branch, at)) if layout is not None else None,
            disk.reach if disk is not None else None,
            self._shared.reach,
        )
        found = [0, 0, 0, 0]
        at = device_blocks
        for n, reach in enumerate(ways):
            upto = along(path.pieces, at, usable, reach) if reach is not None else at
            found[n] = upto - at
            at = upto
        return Beyond(found[0], found[2], found[3], found[1])

    def _peers_reach(self, layout: str, branch: Branch, at: int) -> int:
        """How far a branch goes on from block `at` in host memory of workers of a layout, of several together."""
        key = (layout, branch, at)
        known = self._reached.get(key)
        if known is not None:
            return known
        there = [
            self._own[place].get(Tier.G2_HOST)
            for place, one in self._peers.items()
            if one == layout and place in self._own
        ]
        end = self._reached[key] = reach_together([each for each in there if each is not None], branch, at)
        return end
