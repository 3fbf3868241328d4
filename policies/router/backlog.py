"""When a client that was refused for overload may come again: what is ahead of it, over how fast such work has gone.

    retry_after_s = ceil(ahead / rate), at least 1 s and at most 60 s

Where prompts are what is too much (limits on prompt tokens, a full queue), `ahead` counts prompt tokens that were sent
and are not computed, and those that wait; elsewhere (blocks, an engine's cap) requests that are open or wait. `rate` is
what went of the same kind in the last 10 s, per second; nothing went: 60 s. It promises no room, and reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from policies.cluster.events import ENDS, Event, FirstToken, PrefillDone, RequestEvent, RequestInterrupted
from policies.cluster.ids import RequestId
from policies.router.books import Books

WINDOW_S = 10.0
"""How far back the rate looks."""
SHORTEST_S, LONGEST_S = 1.0, 60.0
"""Whole seconds, as HTTP counts them: no sooner than the next one, and no longer than a minute on a guess."""


_OVER: frozenset[type[Event]] = frozenset({RequestInterrupted, *ENDS})


class Work(NamedTuple):
    """Prompt tokens and requests."""

    tokens: float
    requests: float


class _Second(NamedTuple):
    second: int
    tokens: int
    requests: int


class Pace:
    """What has gone of late, by whole second: prompts computed or given up, requests that ended or broke off.

    `waiting` says what waits in front of the router, where there is a queue.
    """

    __slots__ = ("_began_s", "_seconds", "waiting")

    def __init__(self) -> None:
        self.waiting: Callable[[], Work] = lambda: Work(0, 0)
        self._began_s: float | None = None
        self._seconds: deque[_Second] = deque()

    def begin(self, at_s: float) -> None:
        """Work was sent: from the first time on there is a rate."""
        if self._began_s is None:
            self._began_s = at_s

    def gone(self, at_s: float, tokens: int, requests: int) -> None:
        """So much work is gone now."""
        last = self._seconds[-1] if self._seconds else None
        if last is not None and last.second == int(at_s):
            self._seconds[-1] = _Second(last.second, last.tokens + tokens, last.requests + requests)
        else:
            self._seconds.append(_Second(int(at_s), tokens, requests))
            self._forget(at_s)

    def over(self, request_id: RequestId, at_s: float, books: Books) -> None:
        """A request, or a leg of it, is on its worker no longer; the books still have it."""
        self.gone(at_s, books.prompt_tokens_of(request_id), 1)

    def note(self, event: Event, books: Books) -> None:
        """Work that an event says is gone, before the books take it in."""
        if isinstance(event, PrefillDone | FirstToken):
            tokens = books.prompt_tokens_of(event.request_id)
            if tokens:
                self.gone(event.at_s, tokens, 0)
        elif isinstance(event, RequestEvent) and type(event) in _OVER and event.request_id in books:
            self.over(event.request_id, event.at_s, books)

    def retry_after_s(self, at_s: float, books: Books, *, by_prompts: bool) -> float:
        """When what is ahead of a client now has gone, if it goes on as fast as of late."""
        waiting, rate, loads = self.waiting(), self.rate(at_s), books.loads.values()
        if by_prompts:
            return retry_after_s(waiting.tokens + sum(load.prefill_tokens for load in loads), rate.tokens)
        return retry_after_s(waiting.requests + sum(load.requests for load in loads), rate.requests)

    def rate(self, at_s: float) -> Work:
        """Work that goes per second, over the window or since the first was sent."""
        self._forget(at_s)
        since_s = max(int(at_s) - WINDOW_S, self._began_s or 0.0)
        span_s = max(at_s - since_s, 1.0)
        return Work(
            sum(one.tokens for one in self._seconds) / span_s, sum(one.requests for one in self._seconds) / span_s
        )

    def _forget(self, at_s: float) -> None:
        while self._seconds and self._seconds[0].second < int(at_s) - WINDOW_S:
            self._seconds.popleft()


def retry_after_s(ahead: float, rate: float) -> float:
    """Whole seconds until what is ahead has gone, if it goes on as fast."""
    if rate <= 0.0:
        return LONGEST_S
    return min(max(math.ceil(ahead / rate), SHORTEST_S), LONGEST_S)
