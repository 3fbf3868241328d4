"""Mode kv: the worker where the request costs least, counting what is cached there and what is open there.

The index learns what workers hold from their block events; the books know what was sent where, so a decision sees every
booking before it. No load is read from the view. What lies below device memory counts by its tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from policies.cluster.actions import Candidate
from policies.cluster.blocks import BlockPath
from policies.cluster.draws import draw
from policies.cluster.events import (
    ENDS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestRejected,
    TokensEmitted,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.cluster.state import WorkerView
from policies.errors import CapabilityError, ConfigError
from policies.router import cost
from policies.router.base import Choice, Router
from policies.router.below import Beyond, LowerTiers
from policies.router.books import Books, Load
from policies.router.index import PrefixIndex
from policies.router.select import Ties, softmax
from policies.router.settings import RouterSettings

_INDEX_EMPTY_AFTER = 100
"""Finished requests after which an index that never saw a block means that block events do not arrive."""

_NOBODY: Mapping[WorkerId, int] = {}


class _Seen(NamedTuple):
    """The live workers in a decision, by id: the columns of `cost.costs`."""

    prefill_tokens: list[int]
    decode_blocks: list[int]
    requests: list[int]
    device_blocks: list[int]


class Kv(Router):
    """Cost-based routing over what workers have cached.

    Counters: `kv_index_empty` is 1 when 100 requests finished before any block was reported; `overlap_differs` counts
    decisions whose candidates differed in cached blocks; `non_max_overlap` those that went to a worker with less
    cached than another had, `overlap_lost_blocks` how much less; the rest as in `index` and `books`.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = Router.subscribes | {
        WorkerUp,
        BlocksStored,
        BlocksRemoved,
        BlocksCleared,
        PrefillDone,
        FirstToken,
        RequestInterrupted,
        *ENDS,
    }

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        if not settings.use_kv_events:
            raise CapabilityError(
                "router.use_kv_events is off: an index built from dispatches alone is not available yet; "
                "leave it on, or use mode least-loaded"
            )
        self._block_size = settings.block_size
        self._temperature = settings.router_temperature
        self._counts_new = settings.track_active_blocks and settings.decode_basis == "potential"
        self._weights = cost.weights(settings)
        self._ties = Ties(settings.tie_break, settings.seed)
        self._index = PrefixIndex()
        self._below = LowerTiers()
        self._books = Books(settings.block_size)
        self._up: set[WorkerId] = set()
        self._seated: tuple[WorkerView, ...] = ()
        self._ids: list[WorkerId] = []
        self._loads: list[Load] = []
        self._finished = 0
        self._stores = 0
        self._index_empty = 0
        self._stale_events = 0
        self._overlap_differs = 0
        self._non_max_overlap = 0
        self._overlap_lost_blocks = 0

    def counters(self) -> dict[str, int]:
        index, books = self._index, self._books
        return super().counters() | {
            "kv_index_empty": self._index_empty,
            "overlap_differs": self._overlap_differs,
            "non_max_overlap": self._non_max_overlap,
            "overlap_lost_blocks": self._overlap_lost_blocks,
            "index_blocks": len(index),
            "duplicate_stores": index.duplicate_stores,
            "orphan_stores": index.orphan_stores,
            "unknown_removals": index.unknown_removals,
            "lower_tier_blocks": len(self._below),
            "stale_events": self._stale_events,
            "open_bookings": len(books),
            "unknown_free": books.unknown_frees,
        }

    def leg_over(self, request_id: RequestId) -> None:
        self._books.free(request_id)

    # ------------------------------------------------------------ what happened

    def _learn(self, event: Event) -> None:
        if isinstance(event, (BlocksStored, BlocksRemoved)):
            self._on_blocks(event)
        elif isinstance(event, (PrefillDone, FirstToken)):
            self._books.prefill_done(event.request_id)
        elif isinstance(event, (RequestFinished, RequestRejected, RequestFailed, RequestCancelled)):
            self._on_end(event)
        elif isinstance(event, RequestInterrupted):
            self._books.interrupt(event.request_id)
        elif isinstance(event, BlocksCleared):
            if event.tier in (None, Tier.G1_DEVICE):
                self._index.clear(event.worker_id)
            if event.tier is not Tier.G1_DEVICE:
                self._below.clear(event.worker_id, event.tier)
        elif isinstance(event, WorkerUp):
            self._check_block_size(event)
            self._forget(event.worker_id)  # whoever had this id before: the new one holds nothing
            self._up.add(event.worker_id)
        elif isinstance(event, WorkerLost):
            self._forget(event.worker_id)
            self._up.discard(event.worker_id)

    def _on_blocks(self, event: BlocksStored | BlocksRemoved) -> None:
        if event.worker_id not in self._up:
            self._stale_events += 1  # late news of a worker that is gone must not bring its blocks back
        elif event.tier is not Tier.G1_DEVICE:
            if isinstance(event, BlocksStored):
                self._below.store(event.worker_id, event.tier, event.runs)
            else:
                self._below.remove(event.worker_id, event.tier, event.runs)
        elif isinstance(event, BlocksStored):
            self._stores += 1
            self._index.store(event.worker_id, event.runs)
        else:
            self._index.remove(event.worker_id, event.runs)

    def _on_end(self, event: RequestFinished | RequestRejected | RequestFailed | RequestCancelled) -> None:
        if event.request_id in self._books or event.worker_id is not None:  # else it was never sent
            self._books.free(event.request_id)
        if isinstance(event, RequestFinished):
            self._finished += 1
            if self._finished == _INDEX_EMPTY_AFTER and not self._stores:
                self._index_empty = 1

    def _forget(self, worker_id: WorkerId) -> None:
        self._index.clear(worker_id)
        self._below.clear(worker_id)
        self._books.lose(worker_id)
        self._ties.forget(worker_id)

    def _check_block_size(self, up: WorkerUp) -> None:
        if up.block_size != self._block_size:
            raise ConfigError(
                f"worker {up.worker_id} ({up.name}) has KV blocks of {up.block_size} tokens, the router counts in "
                f"blocks of {self.settings.block_size}: no prefix would ever match; give both the same block_size"
            )

    # ------------------------------------------------------------ one decision

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        seen = self._see(event, live)
        if self._below.is_empty:
            costs = cost.costs(self._weights, event.isl, self._block_size, *seen)
        else:
            costs = [terms.cost_blocks for terms in self._terms(event, seen)]
        if self._temperature > 0:
            u = draw(self.settings.seed, "softmax", event.draw_id)
            at, rule = softmax(u, costs, self._temperature), "softmax"
        else:
            at, rule = self._ties.lowest(event.draw_id, costs, self._ids)
        overlap_blocks = seen.device_blocks[at]
        self._note_overlap(seen.device_blocks, overlap_blocks)
        reason = f"cost {costs[at]:.2f}, {overlap_blocks} blocks cached, {seen.requests[at]} open"
        return Choice(at, rule, reason, overlap_blocks)

    def _see(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> _Seen:
        """The live workers as the formula sees them for this request."""
        if live is not self._seated:  # the view hands out the same tuple until the workers change
            self._ids = [worker.up.worker_id for worker in live]
            self._loads = [self._books.load(worker_id) for worker_id in self._ids]
            self._seated = live
        ids, loads = self._ids, self._loads
        cached = self._cached(event).get
        added, active = self._added(event)
        shared = active.get
        return _Seen(
            [load.prefill_tokens for load in loads],
            [load.blocks + added - shared(load.worker_id, 0) for load in loads],
            [load.requests for load in loads],
            [cached(worker_id, 0) for worker_id in ids],
        )

    def _cached(self, event: RequestArrived) -> Mapping[WorkerId, int]:
        """Leading blocks that each worker has cached, but never the whole prompt: its last token is always computed."""
        path = event.blocks
        if path is None:
            return _NOBODY
        depths = self._index.depths(path)
        usable = (event.isl - 1) // self._block_size
        if usable < path.blocks:
            return {worker_id: min(depth, usable) for worker_id, depth in depths.items()}
        return depths

    def _terms(self, event: RequestArrived, seen: _Seen) -> list[cost.Terms]:
        """The cost of each candidate term by term, what lies below its device included."""
        least = min(seen.prefill_tokens)
        told = []
        for (prefill_tokens, decode_blocks, requests, device), below in zip(
            zip(*seen, strict=True), self._beyond(event, seen), strict=True
        ):
            load = cost.Load(prefill_tokens, decode_blocks, requests, device, *below)
            told.append(cost.terms(self._weights, event.isl, self._block_size, load, least))
        return told

    def _beyond(self, event: RequestArrived, seen: _Seen) -> list[Beyond]:
        usable, below = (event.isl - 1) // self._block_size, self._below
        return [
            below.beyond(event.blocks, worker_id, device_blocks, usable)
            for worker_id, device_blocks in zip(self._ids, seen.device_blocks, strict=True)
        ]

    def _added(self, event: RequestArrived) -> tuple[int, Mapping[WorkerId, int]]:
        """Blocks that the request brings, and how many of them each worker has active already."""
        if not self._counts_new:
            return 0, _NOBODY
        path = self._path(event)
        if path is None:
            return event.isl // self._block_size, _NOBODY
        return path.blocks, self._books.depths(path)

    def _path(self, event: RequestArrived) -> BlockPath | None:
        """The blocks that open requests can share with this one; None when there is no telling, or no sharing."""
        return event.blocks if self.settings.assume_kv_reuse else None

    def _note_overlap(self, device_blocks: list[int], chosen_blocks: int) -> None:
        best = max(device_blocks)
        if min(device_blocks) < best:
            self._overlap_differs += 1
            if chosen_blocks < best:
                self._non_max_overlap += 1
                self._overlap_lost_blocks += best - chosen_blocks

    def _overlap_blocks(self, event: RequestArrived, worker_id: WorkerId) -> int:
        return self._cached(event).get(worker_id, 0)

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        path, own_blocks = None, 0
        if self.settings.track_active_blocks:
            path = self._path(event)
            own_blocks = event.isl // self._block_size if path is None else 0
        found_blocks = overlap_blocks
        if not self._below.is_empty:  # those come up, and are not computed
            usable = (event.isl - 1) // self._block_size
            found_blocks += sum(self._below.beyond(event.blocks, worker_id, overlap_blocks, usable))
        prefill_tokens = event.isl - found_blocks * self._block_size
        self._books.book(event.request_id, worker_id, path, own_blocks, prefill_tokens)
        self._ties.note(worker_id)

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        seen = self._see(event, live)
        told = []
        for worker, terms, *load in zip(live, self._terms(event, seen), *seen, strict=True):
            told.append(
                Candidate(
                    worker_id=worker.worker_id,
                    in_flight=worker.in_flight,
                    cost=terms.cost_blocks,
                    overlap_blocks=load[3],
                    prefill_blocks=terms.raw_prefill_blocks,
                    credit_blocks=terms.credit_blocks,
                    decode_blocks=terms.decode_blocks,
                    active_prefill_tokens=load[0],
                    active_requests=load[2],
                )
            )
        return told


class KvOutput(Kv):
    """Mode kv with `track_output_blocks`: generated tokens count as blocks too, a block at each full one."""

    subscribes: ClassVar[frozenset[type[Event]]] = Kv.subscribes | {TokensEmitted}

    def _learn(self, event: Event) -> None:
        super()._learn(event)
        if isinstance(event, FirstToken):
            self._books.emit(event.request_id, 1)
        elif isinstance(event, TokensEmitted):
            self._books.emit(event.request_id, event.n)
