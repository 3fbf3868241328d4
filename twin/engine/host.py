"""A host-memory tier of one engine: blocks that left the device, to be loaded back.

Plain engine offload: complete blocks go down when they are evicted from the device (or as soon as they are complete),
in the background and at no cost to the engine; what the host holds beyond the device's hit is loaded before the request
is admitted. How long that takes is not known here. Policies over several tiers come with the block manager.
"""

from __future__ import annotations

from policies.cluster.blocks import Branch
from twin.engine.pool import BlockPool, Hold, Match
from twin.engine.settings import HostTierSettings


class HostTier:
    """`capacity` blocks of `block_bytes`, least recently used out first."""

    __slots__ = ("_pool", "block_bytes", "loaded_blocks", "stored_blocks")

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self._pool = BlockPool(capacity)
        self.block_bytes = block_bytes
        self.loaded_blocks = 0
        self.stored_blocks = 0

    @staticmethod
    def of(tier: HostTierSettings) -> HostTier:
        """An empty tier of that size."""
        return HostTier(tier.blocks, tier.block_bytes)

    def put(self, branch: Branch, lo: int, hi: int) -> None:
        """Keep these blocks too, the last one first, as if they came one by one; what is here already stays where it is
        until newer ones need its place.
        """
        pool = self._pool
        while lo < hi and (spans := pool.lacking(branch, [(lo, hi)])):
            a, hi = max(spans)
            blocks = min(hi - a, pool.free + pool.inactive)
            if blocks > 0:
                holds: list[Hold] = []
                pool.take(blocks)
                pool.publish(holds, branch, a, a + blocks)
                pool.release(holds, 0)
                self.stored_blocks += blocks
            hi = a

    def match(self, pieces: tuple[tuple[Branch, int], ...], limit: int, start: int) -> Match:
        """The run of blocks from `start` on that are here; `blocks` counts from the start of the prompt."""
        return self._pool.match(pieces, limit, start)

    def pin(self, match: Match) -> list[Hold]:
        """Keep what is being loaded."""
        return self._pool.pin(match)

    def unpin(self, holds: list[Hold]) -> None:
        """The load is over; its blocks are the most recently used."""
        self._pool.release(holds, 0)

    def audit(self) -> None:
        self._pool.audit()
