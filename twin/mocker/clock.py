"""The virtual clock and the order of things that happen at one instant.

Everything is ordered by (time, order, sequence). `Order` says what comes first at equal times. Step ends and step
starts of different workers come in order of worker id (`Order.STEP_END + worker_id`): when they were scheduled depends
on leaping and must not matter. SimPy's own counter breaks the rest, in order of scheduling. Times are absolute: now +
(t - now) need not be t in floating point, so events are put at t itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final

from simpy import Environment
from simpy.events import PENDING, Event

from twin.engine.ticks import LAST_S, before, beyond

NOBODY: Final[Any] = ()
"""Who waits for an event that was called off, and is on the clock still."""

Callback = Callable[[Event], None]


class Due(Event):
    """An event that is on the clock already: who waits for it is all that one differs in from another."""

    _ok = True
    _value = None


class Order(IntEnum):
    """What comes first at one instant (ARCHITECTURE: first decisions)."""

    FAULT = 0 << 32
    STEP_END = 1 << 32
    WORKER_READY = 2 << 32
    COMMAND = 3 << 32
    TRANSFER_DONE = 4 << 32
    ARRIVAL = 5 << 32
    LATE = 6 << 32
    TIMER = 7 << 32
    STEP_START = 8 << 32
    LOOK = 9 << 32


_STEP_END = int(Order.STEP_END)
_NEW = object.__new__


class Clock(Environment):
    """SimPy's environment with events at absolute times and a stated order.

    `early`: what is happening comes before the step ends of this instant. `watching` of the events that have not
    happened yet only look on, or would come again for ever: when nothing else is left, nothing will change. `coming`:
    whether more may be put on the clock from outside, at instants that nobody knows yet.
    """

    early = False
    coming = False
    watching = 0
    passed_over = 0  # events on the clock that happen to nobody any more

    @property
    def over_s(self) -> float:
        """Steps that end by then are over."""
        return before(self.now) if self.early else self.now

    @property
    def waiting(self) -> int:
        """Events that have not happened yet, happen to somebody and do not only look on."""
        return len(self._queue) - self.watching - self.passed_over + self.coming

    def run_out(self) -> None:
        """Until nothing is left to happen. What happens to nobody takes no time: the end of a leap that was cut short,
        or of a worker that was lost, must not be where the run ends.
        """
        queue, pop = self._queue, heappop
        while queue:  # SimPy's own step, written out: hot
            at_s, _, _, event = pop(queue)
            callbacks = event.callbacks
            if callbacks is NOBODY:
                self.passed_over -= 1
                continue
            self._now = at_s
            event.callbacks = None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value  # a process of ours has failed

    def run_before(self, at_s: float) -> None:
        """Let everything happen that happens before `at_s`; the clock stays at the last of it."""
        queue = self._queue
        while queue and queue[0][0] < at_s:
            event = queue[0][3]
            if event.callbacks is NOBODY:
                heappop(queue)
                self.passed_over -= 1
            else:
                self.step()

    def watch(self, at_s: float, order: int, what: Callable[[], None]) -> None:
        """Let something happen that only looks on, or comes again for ever."""
        self.watching += 1

        def act() -> None:
            self.watching -= 1
            what()

        self.call(at_s, order, act)

    def put(self, event: Event, at_s: float, order: int) -> None:
        """Let a pending event happen at `at_s`."""
        if at_s > LAST_S:
            raise beyond(at_s)
        event._ok = True
        event._value = None
        heappush(self._queue, (at_s, order, next(self._eid), event))  # type: ignore[misc]

    def at(self, at_s: float, order: int, callbacks: Sequence[Callback]) -> Due:
        """A new event that happens at `at_s`, to those who wait for it: nobody can join them later."""
        if at_s > LAST_S:
            raise beyond(at_s)
        event = _NEW(Due)  # without SimPy's __init__: hot
        event.callbacks = callbacks  # type: ignore[assignment]
        heappush(self._queue, (at_s, order, next(self._eid), event))  # type: ignore[misc]
        return event

    def call(self, at_s: float, order: int, what: Callable[[], None]) -> None:
        """Let something happen at an instant, in its place among what happens then."""
        self.at(at_s, order, (partial(self._call_early, what) if order < _STEP_END else lambda _: what(),))

    def _call_early(self, what: Callable[[], None], _: Event) -> None:
        self.early = True
        what()
        self.early = False

    def move(self, event: Event, at_s: float, order: int) -> Event:
        """A new event at `at_s` that wakes whoever waits for `event`; the old one happens to nobody."""
        moved = self.at(at_s, order, event.callbacks)
        event.callbacks = NOBODY
        self.passed_over += 1
        return moved

    def drop(self, event: Event) -> None:
        """Let an event happen to nobody, whether it is on the clock or waits to be put there."""
        if event.callbacks is None or event.callbacks is NOBODY:
            return  # it has happened, or does so to nobody already
        on_clock = not is_pending(event)
        event.callbacks = NOBODY if on_clock else []
        self.passed_over += on_clock


def is_pending(event: Event) -> bool:
    """Whether an event has not been put on the clock yet."""
    return event._value is PENDING
