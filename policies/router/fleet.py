"""Several routers in one simulated cluster: who gets which arrival, and what each of them hears of, when.

Workers come and go for all of them at once; a request is seen by the one alone that it arrived at, a timer by the one
that set it. It decides nothing about workers, and knows nothing of what routers tell each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import xxhash

from policies.cluster.actions import Action, Dispatch, RequestIndexDump, RequestIndexReplay, SetTimer
from policies.cluster.draws import draw, pick
from policies.cluster.events import (
    ENDS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    IndexLost,
    PeerBooking,
    RequestArrived,
    RequestEvent,
    RouterRestarted,
    TimerFired,
    WorkerDraining,
    WorkerEvent,
    WorkerFenced,
    WorkerLost,
    WorkerRecalled,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import RequestId
from policies.cluster.kv_events import IndexAnswer, KvEvent
from policies.cluster.state import Cluster, ClusterView
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.router.replicas import Peered, Replica

Spread = Literal["round-robin", "random", "session"]


@frozen
class ReplicaSettings:
    """`count` routers share the arrivals as `spread` says. `sync`: whether they tell each other of their bookings,
    `batch_s` how long news wait for company. `kv_lag_s`: KV events reach router i later by i times this.
    """

    count: int
    spread: Spread
    seed: int
    sync: bool
    batch_s: float
    kv_lag_s: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"replicas.count is {self.count}, it must be 1 or more")
        for key in ("batch_s", "kv_lag_s"):
            if getattr(self, key) < 0:
                raise ConfigError(f"replicas.{key} is {getattr(self, key)}, it must be 0 or more")


class Fleet:
    """Several replicas in one controller, with the arrivals spread over them.

    Each replica has a view of its own. KV events reach router i later by i times the lag of the settings.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {WorkerUp, WorkerDraining, WorkerRecalled, WorkerFenced, WorkerUnfenced, WorkerLost, *Replica.subscribes}
    )

    def __init__(self, routers: Sequence[Peered], settings: ReplicaSettings) -> None:
        if len(routers) != settings.count:
            raise ConfigError(f"replicas.count is {settings.count}, and {len(routers)} routers were made")
        self._settings = settings
        self._replicas = tuple(
            Replica(router, me, sync=settings.sync and settings.count > 1, batch_s=settings.batch_s)
            for me, router in enumerate(routers)
        )
        self.subscribes = Fleet.subscribes.union(*(replica.subscribes for replica in self._replicas))  # type: ignore[misc]
        self._views = tuple(Cluster() for _ in routers)
        self._late: list[deque[tuple[float, WorkerEvent]]] = [deque() for _ in routers]
        self._home: dict[RequestId, int] = {}
        self._arrived = 0

    @property
    def replicas(self) -> Sequence[Replica]:
        return self._replicas

    def counters(self) -> dict[str, int]:
        """The counters of all replicas, added up."""
        told: dict[str, int] = {}
        for replica in self._replicas:
            for name, count in replica.counters().items():
                told[name] = told.get(name, 0) + count
        return told

    def decide(self, event: Event, view: ClusterView) -> Iterator[Action]:
        if isinstance(event, RequestEvent):
            yield from self._request(event)
        elif isinstance(event, RouterRestarted | IndexLost):
            yield from self._ask(event.router, event)
        elif isinstance(event, PeerBooking):
            yield from self._ask(event.dest, event)
        elif isinstance(event, TimerFired):
            yield from self._timer(event)
        elif isinstance(event, IndexAnswer):
            yield from self._ask(event.origin, event)
        elif isinstance(event, (BlocksStored, BlocksRemoved, BlocksCleared, KvEvent)):
            for i in range(len(self._replicas)):
                yield from self._blocks(i, event)
        else:
            if isinstance(event, WorkerEvent):
                self._see(event)
            for i in range(len(self._replicas)):
                yield from self._ask(i, event)

    # ------------------------------------------------------------ who hears what

    def _see(self, event: WorkerEvent) -> None:
        """Every view takes in what became of a worker; what was late of one that came or went is news no more."""
        for i, one in enumerate(self._views):
            one.fold(event)
            if isinstance(event, (WorkerUp, WorkerLost)):
                self._late[i] = deque(late for late in self._late[i] if late[1].worker_id != event.worker_id)

    def _request(self, event: RequestEvent) -> Iterator[Action]:
        home = self._home.get(event.request_id)
        if home is None:
            assert isinstance(event, RequestArrived)
            home = self._home[event.request_id] = self._choose(event)
        self._views[home].fold(event)
        yield from self._ask(home, event)
        if type(event) in ENDS:
            del self._home[event.request_id]

    def _choose(self, event: RequestArrived) -> int:
        """The router that a request arrives at."""
        settings, turn = self._settings, self._arrived
        self._arrived += 1
        if settings.spread == "random":
            return pick(draw(settings.seed, "replica", event.request_id), settings.count)
        if settings.spread == "session" and event.session_id is not None:
            return xxhash.xxh3_64_intdigest(event.session_id.encode()) % settings.count
        return turn % settings.count

    def _timer(self, event: TimerFired) -> Iterator[Action]:
        """A timer is heard by the router that set it, under the name that it gave it."""
        for i in range(len(self._replicas)):
            own = _timer_of(i)
            if event.name.startswith(own):
                yield from self._ask(i, replace(event, name=event.name.removeprefix(own)))

    def _ask(self, i: int, event: Event) -> Iterator[Action]:
        """The orders of one router. Its view takes in each of them before it is asked for the next."""
        replica, view = self._replicas[i], self._views[i]
        if type(event) not in replica.subscribes:
            return
        late = self._late[i]
        while late and late[0][0] <= event.at_s:
            due_s, before = late.popleft()
            for action in replica.decide(replace(before, at_s=due_s), view):
                view.apply(action)
                yield self._named(i, action)
        for action in replica.decide(event, view):
            view.apply(action)
            yield self._named(i, action)

    @staticmethod
    def _named(i: int, action: Action) -> Action:
        """An order as the world gets it: decisions say whose they are, and no timer replaces that of another router."""
        if isinstance(action, Dispatch):
            return replace(action, reason=f"router {i}: {action.reason}")
        if isinstance(action, SetTimer):
            return replace(action, name=_timer_of(i) + action.name)
        if isinstance(action, RequestIndexReplay | RequestIndexDump):
            return replace(action, origin=i)
        return action

    def _blocks(self, i: int, event: BlocksStored | BlocksRemoved | BlocksCleared | KvEvent) -> Iterator[Action]:
        """KV events of a worker, now or later; later ones are taken in before whatever this router is asked next."""
        lag_s = i * self._settings.kv_lag_s
        if lag_s <= 0.0:
            yield from self._ask(i, event)
        elif type(event) in self._replicas[i].subscribes:
            self._late[i].append((event.at_s + lag_s, event))


def _timer_of(i: int) -> str:
    """How the names of one router's timers begin."""
    return f"router {i}/"
