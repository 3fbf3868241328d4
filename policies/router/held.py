"""A router that lets requests wait while there is nobody to send them to, instead of refusing them.

For clusters that may have no worker at all: who plans them hears of the arrival and starts one. Requests go on in the
order in which they came, when a worker of every role that serves them is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from policies.cluster.actions import Action, Enqueue
from policies.cluster.controller import Policy
from policies.cluster.events import Event, RequestArrived, WorkerRecalled, WorkerUnfenced, WorkerUp
from policies.cluster.ids import RequestId, Role
from policies.cluster.state import ClusterView


class Held:
    """Stands before a router; `roles` are those of which a request needs a worker each."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, WorkerUp, WorkerRecalled, WorkerUnfenced})

    def __init__(self, router: Policy, roles: Iterable[Role]) -> None:
        self.subscribes = type(self).subscribes | router.subscribes  # type: ignore[misc]
        self._router = router
        self._roles = tuple(roles)
        self._held: dict[RequestId, RequestArrived] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker to come."""
        return len(self._held)

    def decide(self, event: Event, view: ClusterView) -> Iterator[Action]:
        if isinstance(event, RequestArrived) and not self._served(view):
            self._held[event.request_id] = event
            yield Enqueue(
                request_id=event.request_id,
                policy_class="no worker",
                strict_priority=0,
                score=-event.at_s,
                uncached_tokens=event.isl,
                reason="no worker is there: it waits for one",
            )
            return
        if type(event) in self._router.subscribes:
            yield from self._router.decide(event, view)
        if self._held and self._served(view):
            held, self._held = self._held, {}
            for request_id, arrived in held.items():
                if request_id in view.requests:
                    yield from self._router.decide(replace(arrived, at_s=event.at_s), view)

    def _served(self, view: ClusterView) -> bool:
        return all(view.live_of(role) for role in self._roles)
