"""Moving blocks nearer while a request waits: from disk or remote into host memory, within limits.

Only for blocks that a waiting request wants, over at most a quarter of the link, into at most a tenth of the host tier;
given up when nobody waits for them any more. Off unless asked for.
"""

from __future__ import annotations

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import RequestId
from policies.frozen import frozen
from policies.kvbm.spans import Spans


@frozen
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
            self._fetched.setdefault(request_id, Spans())

    @property
    def waiting(self) -> bool:
        """Whether anything is still to be fetched for anybody."""
        return bool(self._wanted)

    @property
    def due_s(self) -> float | None:
        """When `next` may have something: None while nobody waits, or what may be held is held."""
        return self._link_s if self._wanted and self._room_blocks > self.held_blocks else None

    def next(self, now_s: float, most_blocks: int | None = None) -> tuple[RequestId, BlockRun] | None:
        """What to fetch now, for whom waits longest; None when nobody does or a limit is reached. It counts as fetched
        for that request from now on."""
        room = self._room_blocks - self.held_blocks
        if not self._wanted or room <= 0 or now_s < self._link_s:
            return None
        most = room if most_blocks is None else min(room, most_blocks)
        request_id, runs = next(iter(self._wanted.items()))
        branch, lo, hi = runs.pop(0)
        if hi - lo > most:
            runs.insert(0, BlockRun(branch, lo + most, hi))
            hi = lo + most
        if not runs:
            del self._wanted[request_id]
        self._fetched.setdefault(request_id, Spans()).add(branch, lo, hi)
        return request_id, BlockRun(branch, lo, hi)

    def begins(self, now_s: float, alone_s: float) -> None:
        """Something is fetched that takes the link so long when it is alone: it has had its share for a while then."""
        self._link_s = now_s + alone_s / self._share

    def not_fetched(self, request_id: RequestId, run: BlockRun) -> None:
        """These blocks did not have to be fetched, or could not be."""
        spans = self._fetched.get(request_id)
        if spans is not None:
            spans.remove(*run)

    def enough(self, request_id: RequestId) -> None:
        """Nothing more is fetched for a request; what was is still held for it."""
        self._wanted.pop(request_id, None)

    def waits_still(self, request_id: RequestId) -> bool:
        """Whether a request for which something was fetched may still take it."""
        return request_id in self._fetched

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
