"""Several who look on at one world: each is told everything, in order."""

from __future__ import annotations

from collections.abc import Sequence

from executors.backend import End
from executors.requests import OpenRequest
from executors.world import Watch
from policies.cluster.actions import Action, Dispatch, Enqueue, Reject
from policies.cluster.controller import JournalSink
from policies.cluster.events import Event
from policies.cluster.ids import WorkerId


class Watches(Watch):
    """Those who want to know of requests."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = tuple(watches)

    def arrived(self, request: OpenRequest) -> None:
        for one in self._watches:
            one.arrived(request)

    def ordered(self, request: OpenRequest, action: Dispatch | Reject | Enqueue, at_s: float) -> None:
        for one in self._watches:
            one.ordered(request, action, at_s)

    def tokens(self, request: OpenRequest, worker_id: WorkerId, count: int, at_s: float) -> None:
        for one in self._watches:
            one.tokens(request, worker_id, count, at_s)

    def ended(self, request: OpenRequest, end: End) -> None:
        for one in self._watches:
            one.ended(request, end)


class Sinks:
    """Those who want to know of events."""

    def __init__(self, sinks: Sequence[JournalSink]) -> None:
        self._sinks = tuple(sinks)

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        for one in self._sinks:
            one.note(event, actions)
