"""A deployment (or one rank of it) from idle to saturated, as points in order of load; and which point a load is.

Points are computed when they are asked for, and once. Between two of them figures are taken as linear; a load beyond
the last waits in a queue, by Little's law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class Point(NamedTuple):
    """Means at one load: `users` in a closed loop are the same as `rps` arriving by themselves."""

    users: float
    rps: float
    ttft_s: float
    tpot_s: float
    gaps: float  # output tokens behind the first one, per request

    @property
    def e2e_s(self) -> float:
        """A request, from arrival to its last token."""
        return self.ttft_s + self.tpot_s * self.gaps

    def times(self, count: int) -> Point:
        """So many of them, each under this load."""
        return self._replace(users=self.users * count, rps=self.rps * count)


_Key = Callable[[Point], float]


class Curve(ABC):
    """`nodes` points of rising load. `limit` says what ends them: "kv", "sequences", "prefill" or "transfer"."""

    nodes: int
    limit: str

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}

    @abstractmethod
    def idle(self) -> Point:
        """One request alone; `rps` and `users` are those of a single user."""

    @abstractmethod
    def _point(self, node: int) -> Point: ...

    def point(self, node: int) -> Point:
        """Point 0 is idle, point `nodes` the largest load that is served without a queue."""
        found = self._points.get(node)
        if found is None:
            found = self._points[node] = self._point(node) if node else self.idle()
        return found

    @property
    def top(self) -> Point:
        """The largest load that is served without a queue."""
        return self.point(self.nodes)

    def at_users(self, users: float) -> Point:
        """With so many users in a closed loop (on average, if one of several is looked at)."""
        idle = self.point(0)
        if users <= idle.users:
            return idle._replace(users=users, rps=users / idle.e2e_s)
        low = self._below(lambda point: point.users, users)
        if low == self.nodes:
            return _queued(self.top, users)
        between = _between(self.point(low), self.point(low + 1), users, lambda point: point.users)
        return between._replace(users=users, rps=users / between.e2e_s)

    def at_rate(self, rps: float) -> Point | None:
        """With so many requests a second; None if its queue would grow for ever."""
        idle = self.point(0)
        if rps >= self.top.rps:
            return None
        if rps <= idle.rps * 1e-6:
            return idle._replace(users=rps * idle.e2e_s, rps=rps)
        low = self._below(lambda point: point.rps, rps)
        start = self.point(low) if low else idle._replace(rps=0.0, users=0.0)
        between = _between(start, self.point(low + 1), rps, lambda point: point.rps)
        return between._replace(users=rps * between.e2e_s, rps=rps)

    def _below(self, key: _Key, value: float) -> int:
        """The last point that is not beyond `value`, by bisection; 0 if the first one is."""
        low, high = 0, self.nodes + 1
        while high - low > 1:
            middle = (low + high) // 2
            if key(self.point(middle)) <= value:
                low = middle
            else:
                high = middle
        return low


def _between(low: Point, high: Point, value: float, key: _Key) -> Point:
    width = key(high) - key(low)
    share = min(1.0, max(0.0, (value - key(low)) / width)) if width > 0.0 else 1.0
    return low._replace(
        ttft_s=low.ttft_s + share * (high.ttft_s - low.ttft_s), tpot_s=low.tpot_s + share * (high.tpot_s - low.tpot_s)
    )


def _queued(top: Point, users: float) -> Point:
    """More users than are served at once: the others wait for their first token."""
    return top._replace(users=users, ttft_s=max(top.ttft_s, users / top.rps - top.tpot_s * top.gaps))


def wait_s(service_s: float, load: float, servers: float) -> float:
    """Mean wait for one of `servers` that each take `service_s`, all together busy `load` of the time, requests coming
    at random: half of Sakasegawa's approximation of M/M/c (1977), since service times are nearly fixed. For one server
    it is that of M/D/1."""
    servers = max(1.0, servers)
    load = min(load, 0.999)
    return 0.5 * service_s * float(load ** ((2.0 * (servers + 1.0)) ** 0.5 - 1.0)) / (servers * (1.0 - load))
