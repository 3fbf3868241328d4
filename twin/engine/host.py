"""A host-memory tier of one engine: blocks that left the device, and the time it takes to load them back.

Plain engine offload: complete blocks go down when they are evicted from the device (or as soon as they are complete),
in the background and at no cost to the engine; what the host holds beyond the device's hit is loaded before the request
is admitted, one load after another. Policies over several tiers come with the block manager.
"""

from __future__ import annotations

from policies.cluster.blocks import Branch
from twin.engine.pool import BlockPool, Hold, Match
from twin.engine.ticks import instant


class HostTier:
    """`capacity` blocks of `block_bytes`, loaded at `bytes_per_s` over one lane, least recently used out first."""

    __slots__ = ("_lane_free_s", "_pool", "block_bytes", "bytes_per_s", "loaded_blocks", "stored_blocks")

    def __init__(self, capacity: int, block_bytes: int, bytes_per_s: float) -> None:
        self._pool = BlockPool(capacity)
        self.block_bytes = block_bytes
        self.bytes_per_s = bytes_per_s
        self.loaded_blocks = 0
        self.stored_blocks = 0
        self._lane_free_s = 0.0

    def put(self, branch: Branch, lo: int, hi: int) -> None:
        """Keep these blocks too; what is here already stays where it is."""
        pool = self._pool
        for a, b in pool.lacking(branch, [(lo, hi)]):
            blocks = min(b - a, pool.free + pool.inactive)
            if blocks > 0:
                holds: list[Hold] = []
                pool.take(blocks)
                pool.publish(holds, branch, a, a + blocks)
                pool.release(holds, 0)
                self.stored_blocks += blocks

    def match(self, pieces: tuple[tuple[Branch, int], ...], limit: int, start: int) -> Match:
        """The run of blocks from `start` on that are here; `blocks` counts from the start of the prompt."""
        return self._pool.match(pieces, limit, start)

    def pin(self, match: Match) -> list[Hold]:
        """Keep what is being loaded."""
        return self._pool.pin(match)

    def unpin(self, holds: list[Hold]) -> None:
        """The load is over; its blocks are the most recently used."""
        self._pool.release(holds, 0)

    def load_end_s(self, now_s: float, blocks: int) -> float:
        """When a load of `blocks` that is asked for now has come up."""
        begin_s = max(now_s, self._lane_free_s)
        self._lane_free_s = instant(begin_s + blocks * self.block_bytes / self.bytes_per_s)
        self.loaded_blocks += blocks
        return self._lane_free_s

    def audit(self) -> None:
        self._pool.audit()
