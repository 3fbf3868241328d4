"""Mode kv: the worker where the request costs least, counting what is cached there and what is open there.

The index (`cached`) learns what workers hold from their block events, or it is guessed from what they were sent; the
books know what was sent where, so a decision sees every booking before it. No load is read from the view. What lies
below device memory counts by its tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from policies.cluster.actions import Action, Candidate
from policies.cluster.draws import draw
from policies.cluster.events import (
    ENDS,
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
from policies.cluster.ids import Place, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.errors import ConfigError
from policies.router import cost
from policies.router.base import Choice, Router
from policies.router.below import Beyond
from policies.router.books import Books, Load
from policies.router.cached import BLOCK_EVENTS, CacheIndex, SimulatedIndex
from policies.router.select import Ties, softmax
from policies.router.settings import RouterSettings

if TYPE_CHECKING:
    from policies.router.guesses import Guesses

_INDEX_EMPTY_AFTER = 100
"""Finished requests after which an index that never saw a block means that block events do not arrive."""

_BLOCK_NEWS = tuple(BLOCK_EVENTS)

_NOBODY: Mapping[Place, int] = {}


class Seen(NamedTuple):
    """The places of a decision, in order: prompt tokens not computed there, active blocks with this request added,
    requests open, leading blocks of the prompt cached. The columns of `cost.costs`. Places are the live workers by id.
    """

    prefill_tokens: list[float]
    decode_blocks: list[float]
    requests: list[int]
    device_blocks: list[int]


class _Counts:
    """What is counted for the report. Apart from the router: an object of more than 30 attributes is slow to read."""

    __slots__ = (
        "finished",
        "index_empty",
        "non_max_overlap",
        "overlap_differs",
        "overlap_lost_blocks",
    )

    def __init__(self) -> None:
        self.finished = self.index_empty = 0
        self.overlap_differs = self.non_max_overlap = self.overlap_lost_blocks = 0


class Kv(Router):
    """Cost-based routing over what workers have cached.

    Counters: `kv_index_empty` is 1 when 100 requests finished before any block was reported; `overlap_differs` counts
    decisions whose candidates differed in cached blocks; `non_max_overlap` those that went to a worker with less
    cached than another had, `overlap_lost_blocks` how much less, all as the decision saw it; the rest as in `books` and
    in the index. Where anything is guessed: `guessed_blocks` are held now, `pruned_guesses` were given up.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = Router.subscribes | {
        *BLOCK_EVENTS,
        PrefillDone,
        FirstToken,
        RequestInterrupted,
        *ENDS,
    }
    keeps_books = True
    timeless = True
    _books: Books

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        if not settings.use_kv_events:  # then nobody need make them
            self.subscribes = self.subscribes - BLOCK_EVENTS  # type: ignore[misc]
        self._block_size = settings.block_size
        self._temperature = settings.router_temperature
        self._counts_new = settings.track_active_blocks and settings.decode_basis == "potential"
        self._weights = cost.weights(settings)
        self._ties = Ties(settings.tie_break, settings.seed)
        self._credits_peers = bool(settings.peer_cache_hit_weight)
        self._index = self._new_index()
        self._guesses = _guesses(settings)
        self._likes = bool(settings.preferred_taints)
        self._seated: tuple[WorkerView, ...] = ()
        self._owners: Sequence[WorkerView] = ()
        self._ids: list[Place] = []
        self._loads: list[Load] = []
        self._counts = _Counts()

    def counters(self) -> dict[str, int]:
        books, guesses = self._books, self._guesses
        guessed = {} if guesses is None else {"guessed_blocks": len(guesses), "pruned_guesses": guesses.pruned_blocks}
        return (
            super().counters()
            | guessed
            | self._index.counters()
            | {
                "kv_index_empty": self._counts.index_empty,
                "overlap_differs": self._counts.overlap_differs,
                "non_max_overlap": self._counts.non_max_overlap,
                "overlap_lost_blocks": self._counts.overlap_lost_blocks,
                "open_bookings": len(books),
                "unknown_free": books.unknown_frees,
            }
        )

    @property
    def reads_time(self) -> bool:
        return super().reads_time or self._guesses is not None

    # ------------------------------------------------------------ what happened

    def _learn(self, event: Event) -> Sequence[Action] | None:
        if isinstance(event, _BLOCK_NEWS):
            self._index.on(event)
        elif isinstance(event, (PrefillDone, FirstToken)):
            self._books.prefill_done(event.request_id)
        elif isinstance(event, (RequestFinished, RequestRejected, RequestFailed, RequestCancelled)):
            self._on_end(event)
        elif isinstance(event, RequestInterrupted):
            self._books.interrupt(event.request_id)
        elif isinstance(event, WorkerUp):
            self._check_block_size(event)
            self._forget(event.worker_id)  # whoever had this id before: the new one holds nothing
            if self._guesses is not None:
                self._guesses.up(event, self._places(event.worker_id))
            return self._index.on(event)
        elif isinstance(event, WorkerLost):
            self._forget(event.worker_id)
            return self._index.on(event)
        return None

    def _on_end(self, event: RequestFinished | RequestRejected | RequestFailed | RequestCancelled) -> None:
        if event.request_id in self._books or event.worker_id is not None:  # else it was never sent
            self._books.free(event.request_id)
        if self._guesses is not None:
            self._guesses.expire(event.at_s)
        if isinstance(event, RequestFinished) and self.settings.use_kv_events:
            self._counts.finished += 1
            if self._counts.finished == _INDEX_EMPTY_AFTER and not self._index.stores:
                self._counts.index_empty = 1

    def _forget(self, worker_id: WorkerId) -> None:
        for place in self._places(worker_id):
            if self._guesses is not None:
                self._guesses.lose(place)
            self._books.lose(place)
            self._ties.forget(place)

    def _check_block_size(self, up: WorkerUp) -> None:
        if up.block_size != self._block_size:
            raise ConfigError(
                f"worker {up.worker_id} ({up.name}) has KV blocks of {up.block_size} tokens, the router counts in "
                f"blocks of {self.settings.block_size}: no prefix would ever match; give both the same block_size"
            )

    def lose_index(self, view: ClusterView, at_s: float) -> Sequence[Action]:
        """All that was known of caches is lost; what workers say from now on counts. What is to be asked of them."""
        self._index, self._guesses = self._new_index(), _guesses(self.settings)
        orders: list[Action] = []
        for worker in view.workers.values():
            if not self._fits(worker):
                continue
            orders += self._index.on(replace(worker.up, at_s=at_s))
            if self._guesses is not None:
                self._guesses.up(worker.up, self._places(worker.worker_id))
        return orders

    def _new_index(self) -> CacheIndex:
        """An index that nobody has told anything yet."""
        return SimulatedIndex(credits_peers=self._credits_peers)

    # ------------------------------------------------------------ one decision

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        seen = self._see(event, live)
        costs = self._costs(event, seen)
        if self._likes or event.hints is not None:
            costs = [c * factor for c, factor in zip(costs, self._likings(event), strict=True)]
        if self._temperature > 0:
            u = draw(self.settings.seed, "softmax", event.draw_id)
            at, rule = softmax(u, costs, self._temperature), "softmax"
        else:
            at, rule = self._ties.lowest(event.draw_id, costs, self._ids)
        overlap_blocks = seen.device_blocks[at]
        self._note_overlap(seen.device_blocks, overlap_blocks)
        cached = f"{overlap_blocks} blocks cached"
        if self._guesses is not None:
            counted_blocks, overlap_blocks = overlap_blocks, self._overlap_blocks(event, self._ids[at])
            cached = f"{counted_blocks} blocks {self._guesses.told(counted_blocks, overlap_blocks)}"
        if self._credits_peers:
            cached += self._at_peers(event, self._ids[at], seen.device_blocks[at])
        reason = f"cost {costs[at]:.2f}, {cached}, {seen.requests[at]} open"
        return Choice(at, rule, reason, overlap_blocks)

    def _at_peers(self, event: RequestArrived, place: Place, device_blocks: int) -> str:
        """What of a prompt a place can read of its peers, in words."""
        blocks = self._index.beyond(event.blocks, place, device_blocks, self._usable(event)).peer_blocks
        return f" and {blocks} at peers" if blocks else ""

    def _costs(self, event: RequestArrived, seen: Seen) -> list[float]:
        """What the request would cost at each place; the lowest wins. Another formula goes here."""
        if self._index.is_flat:
            return cost.costs(self._weights, event.isl, self._block_size, *seen)
        return [terms.cost_blocks for terms in self._terms(event, seen)]

    def _see(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Seen:
        """The live workers as the formula sees them for this request."""
        if live is not self._seated:  # the view hands out the same tuple until the workers change
            self._seat(live)
        ids, loads = self._ids, self._loads
        cached, (added, shared) = self._cached(event), self._added(event)
        return Seen(
            self._books.prefills(ids) if self._books.decays else [load.prefill_tokens for load in loads],
            [load.blocks + added - shared.get(load.place, 0) for load in loads]
            if shared
            else [load.blocks + added for load in loads],
            [load.requests for load in loads],
            [cached.get(place, 0) for place in ids] if cached else [0] * len(ids),
        )

    def _seat(self, live: tuple[WorkerView, ...]) -> None:
        """From now on these are the workers to choose from."""
        self._owners = live
        self._ids = [worker.up.worker_id for worker in live]
        self._loads = [self._books.load(place) for place in self._ids]
        self._seated = live

    def _cached(self, event: RequestArrived) -> Mapping[Place, int]:
        """Leading blocks that each place has cached, for choosing: what is on its way there may count too."""
        known, guesses, path = self._known(event), self._guesses, event.blocks
        if guesses is None or guesses.alone or path is None:
            return known
        return guesses.raised(known, path, event.at_s, self._usable(event))

    def _known(self, event: RequestArrived) -> Mapping[Place, int]:
        """Leading blocks that each place has cached by its events, or with these off by guess, but never the whole
        prompt: its last token is always computed."""
        path, guesses = event.blocks, self._guesses
        if path is None:
            return _NOBODY
        usable = self._usable(event)
        if guesses is not None and guesses.alone:
            return guesses.depths(path, event.at_s, usable)
        return self._index.depths(path, usable)

    def _usable(self, event: RequestArrived) -> int:
        """Blocks of a prompt that need not be computed if they are there."""
        return (event.isl - 1) // self._block_size

    def _terms(self, event: RequestArrived, seen: Seen) -> list[cost.Terms]:
        """The cost of each candidate term by term, what lies below its device included."""
        least = min(seen.prefill_tokens)
        told = []
        for (prefill_tokens, decode_blocks, requests, device), below in zip(
            zip(*seen, strict=True), self._beyond(event, seen), strict=True
        ):
            load = cost.Load(prefill_tokens, decode_blocks, requests, device, *below)
            told.append(cost.terms(self._weights, event.isl, self._block_size, load, least))
        return told

    def _beyond(self, event: RequestArrived, seen: Seen) -> list[Beyond]:
        usable, index = self._usable(event), self._index
        return [
            index.beyond(event.blocks, place, device_blocks, usable)
            for place, device_blocks in zip(self._ids, seen.device_blocks, strict=True)
        ]

    def _added(self, event: RequestArrived) -> tuple[int, Mapping[Place, int]]:
        """Blocks that the request brings, and how many of them each place has active already."""
        if not self._counts_new:
            return 0, _NOBODY
        path = self._shared_path(event)
        if path is None:
            return event.isl // self._block_size, _NOBODY
        return path.blocks, self._books.depths(path)

    def _likings(self, event: RequestArrived) -> list[float]:
        """The factor on the cost of each place for the taints that the request would like, or not."""
        wanted = (*self.settings.preferred_taints, *(event.hints.preferred_taints if event.hints is not None else ()))
        return [cost.taint_factor([one.weight for one in wanted if one.taint in w.up.taints]) for w in self._owners]

    def _note_overlap(self, device_blocks: list[int], chosen_blocks: int) -> None:
        best = max(device_blocks)
        if min(device_blocks) < best:
            self._counts.overlap_differs += 1
            if chosen_blocks < best:
                self._counts.non_max_overlap += 1
                self._counts.overlap_lost_blocks += best - chosen_blocks

    def _overlap_blocks(self, event: RequestArrived, place: Place) -> int:
        return self._known(event).get(place, 0)

    def _sent(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        if not self._index.is_flat:  # what lies below the device comes up, and is not computed
            usable = self._usable(event)
            overlap_blocks += sum(self._index.beyond(event.blocks, place, overlap_blocks, usable))
        self._book(event, place, overlap_blocks)
        self._ties.note(place)
        if self._guesses is not None and event.blocks is not None:
            self._guesses.sent(place, event.blocks, event.at_s)

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        seen = self._see(event, live)
        told = []
        costs = zip(self._costs(event, seen), self._likings(event), strict=True)
        rows = zip(self._owners, costs, self._terms(event, seen), self._beyond(event, seen), *seen, strict=True)
        for worker, (blocks, liking), terms, below, *load in rows:
            told.append(
                Candidate(
                    worker_id=worker.worker_id,
                    in_flight=worker.in_flight,
                    cost=blocks * liking,
                    overlap_blocks=load[3],
                    prefill_blocks=terms.raw_prefill_blocks,
                    credit_blocks=terms.credit_blocks,
                    decode_blocks=terms.decode_blocks,
                    active_prefill_tokens=load[0],
                    active_requests=load[2],
                    peer_blocks=below.peer_blocks,
                )
            )
        return told


class KvOutput(Kv):
    """Mode kv with `track_output_blocks`: generated tokens count as blocks too, a block at each full one."""

    subscribes: ClassVar[frozenset[type[Event]]] = Kv.subscribes | {TokensEmitted}
    timeless = True

    def _book(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        super()._book(event, place, overlap_blocks)
        if event.hints is not None:
            self._books.expect(event.request_id, event.hints.osl_tokens)

    def _see(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Seen:
        seen = super()._see(event, live)
        spared = [blocks - load.spared_blocks for blocks, load in zip(seen.decode_blocks, self._loads, strict=True)]
        return seen._replace(decode_blocks=spared)

    def _learn(self, event: Event) -> Sequence[Action] | None:
        orders = super()._learn(event)
        if isinstance(event, FirstToken):
            self._books.emit(event.request_id, 1)
        elif isinstance(event, TokensEmitted):
            self._books.emit(event.request_id, event.n)
        return orders


def _guesses(settings: RouterSettings) -> Guesses | None:
    if settings.use_kv_events and settings.predicted_ttl_s is None:
        return None
    from policies.router.guesses import guesses

    return guesses(settings)
