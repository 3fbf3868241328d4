"""Who cannot reach whom now, and what waits for that to end.

A message between two that are cut off from each other waits, and arrives in order when they reach each other again. It
is never lost, never sent twice, and never delivered early; whether it is still believed then is its sender's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.cluster.ids import WorkerId

FRONTEND = None
"""The router, the clients and whatever else is no worker: always together."""

Node = WorkerId | None


class Part(NamedTuple):
    """Workers that cannot reach `rest`, nor these them; without `rest` they reach nobody, not even the frontend."""

    some: frozenset[WorkerId]
    rest: frozenset[WorkerId] | None

    def between(self, a: Node, b: Node) -> bool:
        if self.rest is None:
            return a in self.some or b in self.some
        return (a in self.some and b in self.rest) or (b in self.some and a in self.rest)


class _Message(NamedTuple):
    source: Node
    dest: Node
    news: bool
    what: Callable[[], None]


class Wires:
    """`parts`: the partitions of now, by name. `paths`: how long what the frontend tells a worker is on its way, where
    that is any time at all. Both are empty as a rule, and then nothing needs to be asked. `later` lets something happen
    after so many seconds.
    """

    __slots__ = ("_later", "_under_way", "_waiting", "parts", "paths")

    def __init__(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        self.parts: dict[str, Part] = {}
        self.paths: dict[WorkerId, float] = {}
        self._waiting: list[_Message] = []
        self._under_way: list[_Message] = []
        self._later = later

    def cut(self, a: Node, b: Node) -> bool:
        """Whether two cannot reach each other now."""
        return bool(self.parts) and any(part.between(a, b) for part in self.parts.values())

    def send(self, source: Node, dest: Node, what: Callable[[], None], *, news: bool = False) -> None:
        """Let something happen that one end tells the other: now, or when it can reach it. `news` (what a worker says
        of itself) goes its own way: of what has waited, it arrives first. The frontend's messages take their time."""
        if source is FRONTEND and dest is not None and dest in self.paths:
            message = _Message(source, dest, news, what)
            self._under_way.append(message)
            self._later(self.paths[dest], lambda: self._arrive(message))
        else:
            self._hand_over(source, dest, what, news=news)

    def _arrive(self, message: _Message) -> None:
        """What was on its way is there, unless its worker is gone."""
        if message in self._under_way:
            self._under_way.remove(message)
            self._hand_over(message.source, message.dest, message.what, news=message.news)

    def _hand_over(self, source: Node, dest: Node, what: Callable[[], None], *, news: bool) -> None:
        if self.parts and self.cut(source, dest):
            self._waiting.append(_Message(source, dest, news, what))
        else:
            what()

    def deliver(self) -> None:
        """What has waited and can arrive now arrives, in order."""
        ready = [message for message in self._waiting if not self.cut(message.source, message.dest)]
        self._waiting = [message for message in self._waiting if self.cut(message.source, message.dest)]
        for message in sorted(ready, key=lambda message: not message.news):
            message.what()

    def forget(self, worker_id: WorkerId) -> None:
        """What waits for a worker, or comes from it, is gone with it."""
        self._waiting, self._under_way = (
            [message for message in messages if worker_id not in (message.source, message.dest)]
            for messages in (self._waiting, self._under_way)
        )

    def owes(self, worker_id: WorkerId) -> bool:
        """Whether something waits for a worker."""
        return any(message.dest == worker_id for message in (*self._waiting, *self._under_way))
