"""A router whose process may be restarted, or lose its index: all that it kept is gone, and what it sent out goes on.

A new router is made in the place of the old one and told which workers are there; requests that waited in the old one
are asked of it again, in order, by those who hold their streams. It never sends again what runs somewhere: open
requests end as they would have, unknown to its books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from policies.cluster.actions import Action, Dispatch, Enqueue, Reject
from policies.cluster.controller import Policy
from policies.cluster.events import (
    ENDS,
    Event,
    IndexLost,
    RequestArrived,
    RequestEvent,
    RequestInterrupted,
    RouterRestarted,
)
from policies.cluster.ids import Leg, Place, RequestId
from policies.cluster.state import ClusterView

RESTARTS: frozenset[type[Event]] = frozenset({RouterRestarted, IndexLost})


class Restartable:
    """Stands for the router that `make` makes, and makes another one when it is restarted.

    Counters are those of all its lives together, and `restarts`.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = RESTARTS

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._router: Any = make()
        self.subscribes = self._router.subscribes | RESTARTS | {RequestInterrupted, *ENDS}  # type: ignore[misc]
        self._waiting: dict[RequestId, Event] = {}  # what each request that waits was asked for with
        self._past: dict[str, int] = {"restarts": 0}

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        found = dict(self._past)
        for name, count in getattr(self._router, "counters", dict)().items():
            found[name] = found.get(name, 0) + count
        return found

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg = Leg.AGG) -> None:
        """As the router takes it."""
        self._router.peer_sent(event, place, overlap_blocks, leg)

    def decide(self, event: Event, view: ClusterView) -> Iterator[Action]:
        if isinstance(event, RouterRestarted):
            yield from self._restart(event, view)
            return
        if isinstance(event, IndexLost):
            lose = getattr(self._router, "lose_index", None)
            yield from lose(view, event.at_s) if lose is not None else ()
            return
        if isinstance(event, RequestInterrupted) or type(event) in ENDS:
            self._waiting.pop(event.request_id, None)  # type: ignore[attr-defined]
        if type(event) in self._router.subscribes:
            yield from self._noted(event, view)

    def _noted(self, event: Event, view: ClusterView) -> Iterator[Action]:
        """The orders of the router, and who waits for what after them."""
        for action in self._router.decide(event, view):
            if isinstance(action, Enqueue):
                self._waiting[action.request_id] = event
            elif isinstance(action, Dispatch | Reject):
                self._waiting.pop(action.request_id, None)
            yield action

    def _restart(self, event: RouterRestarted, view: ClusterView) -> Iterator[Action]:
        self._past = {name: n for name, n in self.counters().items() if name not in _NOW}
        self._past["restarts"] += 1
        self._router = self._make()
        for _, worker in sorted(view.workers.items()):
            if type(worker.up) in self._router.subscribes:
                yield from self._router.decide(replace(worker.up, at_s=event.at_s), view)
        resume = getattr(self._router, "resume", None)
        if resume is not None:
            resume(view)
        waiting, self._waiting = self._waiting, {}
        for request_id, asked in waiting.items():
            assert isinstance(asked, RequestEvent)
            if request_id in view.requests:
                yield from self._noted(replace(asked, at_s=event.at_s), view)


_NOW = frozenset({"index_blocks", "lower_tier_blocks", "open_bookings", "guessed_blocks"})
"""Counters of what a router holds now: those of earlier lives are gone."""
