"""The world's clock: seconds since the start of a run, and what is to happen at an instant.

On a host it is the event loop's own (`WallClock`); under a virtual loop (`executors.virtual`) it jumps to whatever is
due next, in the order of the simulated world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from twin.engine.ticks import instant


class Order(IntEnum):
    """What comes first at one instant, where a clock can tell; the order of the simulated world."""

    COMMAND = 0
    STEP_END = 1
    ARRIVAL = 2
    LATE = 3
    TIMER = 4
    STEP_START = 5


class Timer(Protocol):
    """Something that is going to happen."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Never goes back."""

    def now(self) -> float: ...

    def call_at(self, at_s: float, order: int, what: Callable[[], None]) -> Timer:
        """Let something happen at an instant, or soon if that has passed."""
        ...


class WallClock:
    """Of a running loop; 0 is when it was made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._origin_s = loop.time()

    def now(self) -> float:
        return instant(max(0.0, self._loop.time() - self._origin_s))

    def call_at(self, at_s: float, order: int, what: Callable[[], None]) -> Timer:
        return self._loop.call_at(self._origin_s + at_s, what)
