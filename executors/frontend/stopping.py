"""How a frontend stops: leave, drain, tear down; and what each phase still takes.

After the signal it is not ready, but takes requests for a time of grace (routers in front may not know yet). Then it
refuses new ones and lets the open ones finish, up to a bound, at which they are cut. A second signal cuts at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

from executors.frontend.errors import UNAVAILABLE, ApiError

Sleep = Callable[[float], Awaitable[None]]


class Phase(IntEnum):
    SERVING = 0
    LEAVING = 1
    DRAINING = 2
    CUTTING = 3
    CLOSED = 4


def shut_down() -> ApiError:
    """For requests that are not let finish."""
    return ApiError(UNAVAILABLE, "the server is shutting down", code="engine_shutdown", close=True)


class Stopping:
    """The phase, and the way through them. `sleep` waits so many seconds."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self._sleep = sleep
        self.phase = Phase.SERVING
        self.cut = 0
        """Requests that were not let finish."""
        self._hurry = asyncio.Event()

    @property
    def leaving(self) -> bool:
        return self.phase >= Phase.LEAVING

    def check(self) -> None:
        """Raises ApiError where new work is no longer taken."""
        if self.phase >= Phase.DRAINING:
            raise ApiError(UNAVAILABLE, "this server is shutting down", code="draining", close=True)

    def check_begun(self) -> None:
        """Raises ApiError where work that was taken must not begin any more."""
        if self.phase >= Phase.CUTTING:
            raise shut_down()

    def hurry(self) -> None:
        """A second signal: no more waiting."""
        self._hurry.set()

    async def go(
        self, grace_s: float, drain_s: float, idle: Callable[[], Awaitable[None]], cut: Callable[[], int]
    ) -> None:
        """All phases. `idle` returns when nothing is open; `cut` ends what is, and says how many."""
        self.phase = Phase.LEAVING
        await self._either(self._sleep(grace_s))
        self.phase = Phase.DRAINING
        await self._either(self._sleep(drain_s), idle())
        self.phase = Phase.CUTTING
        self.cut = cut()
        await idle()
        self.phase = Phase.CLOSED

    async def _either(self, *waits: Awaitable[None]) -> None:
        """Until one of `waits` is over, or there is a hurry."""
        tasks = [asyncio.ensure_future(wait) for wait in (*waits, self._hurry.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
