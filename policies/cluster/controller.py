"""One step of the cluster's brain: fold an event, ask the policies, check and note what they order.

The controller is synchronous and owns no clock: the world calls `step` with each event, in order, and carries out
what comes back, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from policies.cluster.actions import Action
from policies.cluster.events import Event
from policies.cluster.state import Cluster, ClusterView


class Policy(Protocol):
    """A decision maker. It may keep books of its own, built only from the events that it subscribes to."""

    subscribes: ClassVar[frozenset[type[Event]]]

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        """What to do about one event; nothing when there is nothing to order. Called for subscribed types only.

        The view takes in each action before the next one is asked for: who wraps a policy hands its actions on one by
        one, or the policy decides on a view that does not show what it has just ordered.
        """
        ...


class JournalSink(Protocol):
    """Where (event, actions) pairs go."""

    def note(self, event: Event, actions: Sequence[Action]) -> None: ...


class Controller:
    """Folds events into the cluster and asks the policies, in the order given.

    `wants(type)` tells a world which optional events are worth posting.
    """

    def __init__(self, policies: Sequence[Policy], journal: JournalSink | None = None) -> None:
        self._cluster = Cluster()
        self._policies = tuple(policies)
        self._journal = journal
        self._by_type: dict[type[Event], tuple[Policy, ...]] = {}

    @property
    def view(self) -> ClusterView:
        return self._cluster

    def wants(self, kind: type[Event]) -> bool:
        """Whether some policy subscribes to this type of event."""
        return bool(self._subscribers(kind))

    def step(self, event: Event) -> Sequence[Action]:
        """Fold one event, ask the policies that subscribe, return what the world must do.

        Raises InvariantError when the event or an order contradicts what went before.
        """
        cluster = self._cluster
        cluster.fold(event)
        kind = type(event)
        subscribers = self._by_type.get(kind)
        if subscribers is None:
            subscribers = self._subscribers(kind)
        actions: Sequence[Action] = ()
        if subscribers:
            ordered: list[Action] = []
            for policy in subscribers:
                for action in policy.decide(event, cluster):
                    cluster.apply(action)
                    ordered.append(action)
            actions = ordered
        if self._journal is not None:
            self._journal.note(event, actions)
        return actions

    def _subscribers(self, kind: type[Event]) -> tuple[Policy, ...]:
        found = self._by_type.get(kind)
        if found is None:
            found = tuple(p for p in self._policies if kind in p.subscribes)
            self._by_type[kind] = found
        return found
