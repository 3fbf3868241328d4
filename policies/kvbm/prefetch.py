"""Moving blocks nearer while a request waits: from disk or remote into host memory, within limits.

Only for blocks that a waiting request wants, over at most a quarter of the link, into at most a tenth of the host tier;
given up when nobody waits for them any more. Off unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import RequestId
from policies.kvbm.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimits:
    """Shares of the link and of the target tier that prefetching may take."""

    link_share: float = 0.25
    tier_share: float = 0.10


class Prefetcher:
    """Who waits for which blocks, what was fetched for whom. `used_blocks` were found by a request that waited;
    `wasted_blocks` were fetched for requests that never took them."""

    __slots__ = ("_fetched", "_link_s", "_room_blocks", "_share", "_wanted", "used_blocks", "wasted_blocks")

    def __init__(self, limits: PrefetchLimits, tier_blocks: int) -> None:
        self._share = limits.link_share
        self._room_blocks = int(tier_blocks * limits.tier_share)
        self._wanted: dict[RequestId, list[BlockRun]] = {}  # not fetched yet
        self._fetched: dict[RequestId, Spans] = {}
        self._link_s = 0.0  # until when the link has done its share
        self.used_blocks = 0
        self.wasted_blocks = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that were fetched and whose request still waits."""
        return sum(spans.blocks for spans in self._fetched.values())

    def waits(self, request_id: RequestId, runs: list[BlockRun]) -> None:
        """A request waits that will want these blocks, which lie further down."""
        if runs:
            self._wanted[request_id] = list(runs)

    def next(self, now_s: float, run_s: float = 0.0) -> tuple[RequestId, BlockRun] | None:
        """What to fetch now, for whom waits longest; None when nobody does or a limit is reached.

        `run_s` is how long the link takes for it alone; the next one may go when the share allows.
        """
        room = self._room_blocks - self.held_blocks
        if not self._wanted or room <= 0 or now_s < self._link_s:
            return None
        request_id, runs = next(iter(self._wanted.items()))
        branch, lo, hi = runs.pop(0)
        if hi - lo > room:
            runs.insert(0, BlockRun(branch, lo + room, hi))
            hi = lo + room
        if not runs:
            del self._wanted[request_id]
        self._link_s = now_s + run_s / self._share
        self._fetched.setdefault(request_id, Spans()).add(branch, lo, hi)
        return request_id, BlockRun(branch, lo, hi)

    def is_wanted(self, run: BlockRun) -> bool:
        """Whether a waiting request has had any of these blocks fetched: they must not be evicted for another fetch."""
        return any(spans.common(*run) for spans in self._fetched.values())

    def taken(self, request_id: RequestId, run: BlockRun) -> None:
        """The request has found blocks; those that were fetched for it were worth it."""
        spans = self._fetched.get(request_id)
        if spans is not None:
            self.used_blocks += sum(hi - lo for lo, hi in spans.remove(*run))

    def gone(self, request_id: RequestId) -> None:
        """The request does not wait any more: admitted, or cancelled."""
        self._wanted.pop(request_id, None)
        spans = self._fetched.pop(request_id, None)
        if spans is not None:
            self.wasted_blocks += spans.blocks
