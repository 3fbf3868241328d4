"""Prefetching of one worker: blocks that a request will want which waits in the router's queue climb from disk or a
remote store into host memory, one transfer at a time.

What was fetched is held for its request until that is admitted here or gone. Nobody's blocks are evicted for it that a
waiting request wants, and it moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import RequestId
from policies.kvbm.batches import between
from policies.kvbm.level import Level, TierBody
from policies.kvbm.lifecycle import Cause
from policies.kvbm.look_up import Lacking, Pieces
from policies.kvbm.orders import Prefetch
from policies.kvbm.prefetch import Prefetcher, PrefetchLimits
from policies.kvbm.spans import Span
from policies.kvbm.store import Hold, Lot, TierStore

MakeRoom = Callable[[int, float], int]
"""Makes room for so many blocks in host memory; returns for how many there is."""
Told = Callable[[Level, list[BlockRun]], None]
"""These blocks are in a tier now."""


class Reach(NamedTuple):
    """How much of a prompt a worker has: `near` blocks on its device and in host memory, `blocks` with what lies below;
    `runs` could climb."""

    near: int
    blocks: int
    runs: list[BlockRun]


class _Fetch(NamedTuple):
    request_id: RequestId
    runs: list[BlockRun]
    lot: Lot
    store: TierStore
    source: Level
    source_store: TierStore
    holds: list[Hold]


class Climb:
    """`levels` are those of a worker, host memory first; `most_blocks` is the most that moves at once."""

    def __init__(
        self,
        levels: Sequence[Level],
        device_lacking: Lacking,
        limits: PrefetchLimits,
        *,
        make_room: MakeRoom,
        told: Told,
        most_blocks: int,
    ) -> None:
        self._host, *self._below = levels
        self._device_lacking = device_lacking
        self._make_room = make_room
        self._told = told
        self._most_blocks = most_blocks
        self._who = Prefetcher(limits, self._host.body.spec.capacity_blocks)
        self._wanted: dict[RequestId, list[BlockRun]] = {}  # all that a waiting request could use of host memory
        self._pins: dict[RequestId, list[tuple[TierStore, list[Hold]]]] = {}
        self._moving: dict[int, _Fetch] = {}
        self._fetches = 0
        self.fetched_blocks = 0

    @property
    def used_blocks(self) -> int:
        return self._who.used_blocks

    @property
    def wasted_blocks(self) -> int:
        return self._who.wasted_blocks

    @property
    def idle(self) -> bool:
        """Whether nothing moves, and nothing is held for anybody."""
        return not self._moving and not self._pins and not self._who.waiting

    @property
    def due_s(self) -> float | None:
        """When to call `poll` next."""
        return None if self._moving else self._who.due_s

    def reach(self, pieces: Pieces, usable: int) -> Reach:
        """How a prompt goes on, block after block, on the device, in host memory and below."""
        near = at = 0
        runs: list[BlockRun] = []
        host = self._host.body
        for branch, end in pieces:
            end = min(end, usable)
            while at < end:
                hi = _first(self._device_lacking(branch, at, end), end)
                if hi == at:
                    hi = _first(list(host.absent(branch, at, end)), end)
                if hi > at:
                    near += hi - at
                    at = hi
                    continue
                hi = max((_end(each.body.store, branch, at, end) for each in self._readable), default=at)
                if hi == at:
                    return Reach(near, at, runs)
                runs.append(BlockRun(branch, at, hi))
                at = hi
        return Reach(near, at, runs)

    def waits(self, request_id: RequestId, pieces: Pieces, usable: int, runs: list[BlockRun]) -> None:
        """A request waits in a queue that can use the first `usable` blocks of its prompt; `runs` are to climb."""
        self._who.waits(request_id, runs)
        wanted, at = [], 0
        for branch, end in pieces:
            end = min(end, usable)
            if end > at:
                wanted.append(BlockRun(branch, at, end))
                at = end
        self._wanted[request_id] = wanted

    def comes(self, request_id: RequestId) -> None:
        """The request has been sent here: it will look for itself, and takes what is there."""
        self._who.enough(request_id)

    def taken(self, request_id: RequestId, run: BlockRun) -> None:
        """The request has found blocks in host memory."""
        self._who.taken(request_id, run)

    def gone(self, request_id: RequestId) -> None:
        """The request was admitted, or will not come."""
        if self._wanted.pop(request_id, None) is None:
            return
        self._who.gone(request_id)
        for store, holds in self._pins.pop(request_id, ()):
            store.release(holds)

    def poll(self, now_s: float) -> list[Prefetch]:
        """The transfer that begins now, if any does."""
        while not self._moving and (step := self._who.next(now_s, self._most_blocks)) is not None:
            request_id, run = step
            fetch = self._begin(request_id, run, now_s)
            if fetch is None:
                continue
            self._fetches += 1
            self._moving[self._fetches] = fetch
            blocks, spec = fetch.lot.blocks, fetch.source.body.spec
            self._who.begins(now_s, spec.alone_s(blocks))
            return [
                Prefetch(
                    fetch_id=self._fetches,
                    request_id=request_id,
                    source=spec.tier,
                    runs=tuple(fetch.runs),
                    blocks=blocks,
                    bytes=blocks * spec.block_bytes,
                )
            ]
        return []

    def moved(self, fetch_id: int, now_s: float, *, bad: Sequence[BlockRun] = (), ok: bool = True) -> TierBody:
        """A transfer is over; `bad` blocks of it were no good. Returns where they came from."""
        fetch = self._moving.pop(fetch_id)
        host = self._host.body
        for run in fetch.runs:
            host.underway.remove(*run)
        fetch.source_store.release(fetch.holds)
        there = fetch.store is host.store and not host.refuses and fetch.source_store is fetch.source.body.store
        if ok and there:
            self._land(fetch, _without(fetch.runs, bad), now_s)
        if fetch.lot.blocks:
            fetch.store.free(fetch.lot, Cause.LOAD_FAILED)
        for run in bad if ok and there else fetch.runs:
            self._who.not_fetched(fetch.request_id, run)
        return fetch.source.body

    def close(self, now_s: float) -> None:
        """The worker is gone: nothing moves, nothing is held."""
        for fetch_id in list(self._moving):
            self.moved(fetch_id, now_s, ok=False)
        for request_id in list(self._wanted):
            self.gone(request_id)

    # ------------------------------------------------------------ inside

    @property
    def _readable(self) -> list[Level]:
        return [level for level in self._below if level.body.health.reads]

    def _begin(self, request_id: RequestId, run: BlockRun, now_s: float) -> _Fetch | None:
        """Reserve room, hold the sources; None where there is nothing to fetch or no room for it."""
        host = self._host.body
        source, gaps = self._source(run, now_s)
        kept: list[BlockRun] = []
        if source is not None and host.health.may_write(now_s) and not host.refuses:
            room = self._room(sum(hi - lo for lo, hi in gaps), now_s)
            for lo, hi in gaps:
                if room > 0:
                    kept.append(BlockRun(run.branch, lo, min(hi, lo + room)))
                    room -= hi - lo
        for lo, hi in between(run.lo, run.hi, [(part.lo, part.hi) for part in kept]):
            self._who.not_fetched(request_id, BlockRun(run.branch, lo, hi))
        blocks = sum(part.hi - part.lo for part in kept)
        lot = host.store.reserve(blocks) if blocks else None
        if source is None or lot is None:
            if gaps:
                self._who.enough(request_id)  # no room: given up, not tried again and again
            return None
        host.store.advance(lot, Cause.LOAD)
        store = source.body.store
        holds = [hold for part in kept for hold in store.upgrade(store.find(*part))]
        for part in kept:
            host.underway.add(*part)
        return _Fetch(request_id, kept, lot, host.store, source, store, holds)

    def _source(self, run: BlockRun, now_s: float) -> tuple[Level | None, list[Span]]:
        """The first tier below that has the first block which host memory lacks, and what it has of the others."""
        gaps = list(self._host.body.absent(*run))
        for level in self._readable if gaps else ():
            first = level.body.store.find(run.branch, *gaps[0])
            if first and level.body.negative.first_in(run, now_s) is None:
                found = [(lo, end) for lo, hi in gaps if (end := _end(level.body.store, run.branch, lo, hi)) > lo]
                return level, found
        return None, []

    def _room(self, blocks: int, now_s: float) -> int:
        """Room in host memory, without anything that a waiting request wants being evicted for it."""
        store = self._host.body.store
        kept = [
            hold
            for runs in self._wanted.values()
            for branch, lo, hi in runs
            for a, b in between(lo, hi, store.lacking(branch, lo, hi))
            for hold in store.upgrade(store.find(branch, a, b))
        ]
        room = self._make_room(blocks, now_s)
        store.release(kept)
        return room

    def _land(self, fetch: _Fetch, runs: list[BlockRun], now_s: float) -> None:
        holds: list[Hold] = []
        fresh: list[BlockRun] = []
        for run in runs:
            held, new = fetch.store.register(fetch.lot, run, now_s)
            holds += held
            fresh += [BlockRun(run.branch, lo, hi) for lo, hi in new]
            self.fetched_blocks += run.hi - run.lo
        if self._who.waits_still(fetch.request_id):
            self._pins.setdefault(fetch.request_id, []).append((fetch.store, holds))
        else:
            fetch.store.release(holds)
        self._told(self._host, fresh)


def _first(gaps: list[Span], end: int) -> int:
    """The first block of ascending `gaps`, or `end`."""
    return gaps[0][0] if gaps else end


def _end(store: TierStore, branch: Branch, lo: int, hi: int) -> int:
    """How far a store goes on without a gap from block `lo`."""
    found = store.find(branch, lo, hi)
    return found[-1].hi if found else lo


def _without(runs: Sequence[BlockRun], bad: Sequence[BlockRun]) -> list[BlockRun]:
    left = []
    for branch, lo, hi in runs:
        gaps = sorted((max(b.lo, lo), min(b.hi, hi)) for b in bad if b.branch is branch and b.lo < hi and lo < b.hi)
        left += [BlockRun(branch, a, b) for a, b in between(lo, hi, gaps)]
    return left
