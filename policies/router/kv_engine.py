"""Mode kv over what engines say themselves: the same costs, books and ties, on an index that has to be kept up.

Prompts are known by their local hashes, gaps in what was heard are asked for again, and a worker with several
data-parallel ranks may be as many places (`route_ranks`), each with its own cache and books. Decisions are those of
`kv.Kv` wherever both have heard the same. It never holds a request back for want of news.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import ClassVar

from policies.cluster.actions import Action, Candidate, Dispatch, Reject
from policies.cluster.events import Event, RequestArrived, WorkerUp
from policies.cluster.ids import Leg, Place, RankId, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.router.base import NOBODY, Choice
from policies.router.cached import BLOCK_EVENTS, CacheIndex
from policies.router.chains.feed import FeedMode
from policies.router.engine_index import ENGINE_EVENTS, EngineIndex
from policies.router.kv import Kv, KvOutput, Seen
from policies.router.select import Bar, Refusal
from policies.router.settings import RouterSettings


class KvEngine(Kv):
    """Counters of the index are those of `chains.live`, among them `gaps`, `replays_done` and `ranks_degraded`."""

    subscribes: ClassVar[frozenset[type[Event]]] = (Kv.subscribes - BLOCK_EVENTS) | ENGINE_EVENTS
    _told: EngineIndex | None = None

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        if not settings.use_kv_events:
            self.subscribes = self.subscribes - ENGINE_EVENTS  # type: ignore[misc]
        self._ranks: dict[WorkerId, tuple[Place, ...]] = {}  # of workers that are several places
        self._at: list[int] = []  # of each place, where its worker is among the live ones

    def _new_index(self) -> CacheIndex:
        if not self.settings.use_kv_events:
            return super()._new_index()
        self._told = EngineIndex(
            self.settings.block_size, by_rank=self.settings.route_ranks, credits_peers=self._credits_peers
        )
        return self._told

    @property
    def engine_index(self) -> EngineIndex | None:
        """What engines have told; None where they are not listened to."""
        return self._told

    def _learn(self, event: Event) -> Sequence[Action] | None:
        if type(event) in ENGINE_EVENTS:
            return self._index.on(event)
        if isinstance(event, WorkerUp):
            self._forget(event.worker_id)
            self._ranks.pop(event.worker_id, None)
            if self.settings.route_ranks and event.dp_ranks > 1:
                self._ranks[event.worker_id] = tuple(RankId(event.worker_id, n) for n in range(event.dp_ranks))
        return super()._learn(event)

    # ------------------------------------------------------------ prompts by their local hashes

    def _route(self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY) -> Dispatch | Reject:
        return super()._route(self._named(event), view, busy)

    def best_of(self, event: RequestArrived, workers: Iterable[WorkerView]) -> tuple[WorkerId | None, int]:
        """The one of `workers` that has most leading blocks of the prompt (of several the first), and how many."""
        return super().best_of(self._named(event), workers)

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg = Leg.AGG) -> None:
        """Another router sent a request to a worker: it is booked as if this one had. Its end comes like any other."""
        super().peer_sent(self._named(event), place, overlap_blocks, leg)

    def _named(self, event: RequestArrived) -> RequestArrived:
        return event if self._told is None else self._told.named(event)

    # ------------------------------------------------------------ ranks

    def prefill_tokens(self, worker_id: WorkerId, at_s: float) -> float:
        """Prompt tokens that were dispatched to a worker and are not computed, where it has several ranks to the one
        with fewest."""
        return min(self._tokens(place, at_s) for place in self._places(worker_id))

    def _tokens(self, place: Place, at_s: float) -> float:
        self._now(at_s)
        return self._books.prefill_tokens(place)

    def _places(self, worker_id: WorkerId) -> Sequence[Place]:
        return self._ranks.get(worker_id) or (worker_id,)

    def _overloaded(self, worker: WorkerView, at_s: float) -> Bar | None:
        """A worker of several places is overloaded when all of them are."""
        bars = [self._place_overloaded(worker, place, at_s) for place in self._places(worker.worker_id)]
        return bars[0] if all(bars) else None

    def _place_overloaded(self, worker: WorkerView, place: Place, at_s: float) -> Bar | None:
        if self._overload is None:
            return None
        load = self._books.loads.get(place)
        blocks, tokens = (load.blocks, self._tokens(place, at_s)) if load is not None else (0, 0.0)
        return self._overload.of(worker, blocks, tokens, self.ranks_of(worker))

    def _see(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Seen:
        if self._overload is not None and self._ranks:
            self._seat(live, event.at_s)  # which ranks may have it changes with their load
        return super()._see(event, live)

    def _seat(self, live: tuple[WorkerView, ...], at_s: float | None = None) -> None:
        """From now on these are the workers to choose from: all their places, but for those overloaded by then."""
        seats = [(at, place) for at, worker in enumerate(live) for place in self._places(worker.worker_id)]
        if at_s is not None:
            seats = [(at, place) for at, place in seats if self._place_overloaded(live[at], place, at_s) is None]
        self._at = [at for at, _ in seats]
        self._owners = [live[at] for at in self._at]
        self._ids = [place for _, place in seats]
        self._loads = [self._books.load(place) for place in self._ids]
        self._seated = live

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        choice = super()._choose(event, live)
        place = self._ids[choice.at]
        reason, rank = choice.reason, None
        if isinstance(place, RankId):
            rank = place.dp_rank
            reason = f"rank {rank}: {reason}"
        if self._told is not None and (mode := self._told.mode(place)) is not FeedMode.LIVE:
            reason = f"{reason}, index {mode.value}"
        return choice._replace(at=self._at[choice.at], reason=reason, dp_rank=rank)

    def _pinned(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        return self._on_some_rank(event, live, super()._pinned(event, live, view))

    def _preferring(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        return self._on_some_rank(event, live, super()._preferring(event, live, view))

    def _on_some_rank(
        self, event: RequestArrived, live: tuple[WorkerView, ...], choice: Choice | Refusal
    ) -> Choice | Refusal:
        """A worker is chosen; of its ranks, where they are told apart, the one where the request costs least."""
        if isinstance(choice, Refusal) or choice.dp_rank is not None or live[choice.at].worker_id not in self._ranks:
            return choice
        rank = self._choose(event, (live[choice.at],))
        return rank._replace(at=choice.at, rule=choice.rule, reason=f"{choice.reason}; {rank.reason}")

    def _overlap_blocks(self, event: RequestArrived, place: Place) -> int:
        """Of a place, or of a worker: where it has several, the one with most."""
        known = self._known(event)
        places = (place,) if isinstance(place, RankId) else self._places(place)
        return max(known.get(one, 0) for one in places)

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        rows = super()._explain(event, live)
        return [
            replace(
                row,
                dp_rank=place.dp_rank if isinstance(place, RankId) else None,
                index_mode=self._told.mode(place).value if self._told is not None else None,
            )
            for row, place in zip(rows, self._ids, strict=True)
        ]


class KvEngineOutput(KvEngine, KvOutput):
    """The same with `track_output_blocks`."""

    subscribes: ClassVar[frozenset[type[Event]]] = KvEngine.subscribes | KvOutput.subscribes - BLOCK_EVENTS
