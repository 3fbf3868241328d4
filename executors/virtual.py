"""An event loop whose clock jumps to whatever is due next: the live world at the speed of the processor.

Nothing waits in real time. When no callback is ready, the next entry of the clock happens, one at a time and in the
order (instant, order, sequence), so what follows from one is over before the next begins. For tests and for the
comparison with the simulated world; sockets are served if they are ready, and never waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, TypeVar

from policies.errors import EngineError

T = TypeVar("T")


class _Entry:
    __slots__ = ("what",)

    def __init__(self, what: Callable[[], None]) -> None:
        self.what: Callable[[], None] | None = what

    def cancel(self) -> None:
        self.what = None


class VirtualClock:
    """`executors.clock.Clock` of a virtual loop."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[tuple[float, int, int, _Entry]] = []
        self._count = 0

    def now(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, order: int, what: Callable[[], None]) -> _Entry:
        entry = _Entry(what)
        self._count += 1
        heappush(self._queue, (max(at_s, self._now_s), order, self._count, entry))
        return entry

    def next_s(self) -> float | None:
        """When something is due next."""
        queue = self._queue
        while queue and queue[0][3].what is None:
            heappop(queue)
        return queue[0][0] if queue else None

    def advance(self, at_s: float) -> None:
        """It is `at_s` now, and nothing was due before."""
        self._now_s = max(self._now_s, at_s)

    def pop(self) -> Callable[[], None]:
        """Go to what is due next and take it off."""
        at_s, _, _, entry = heappop(self._queue)
        self._now_s = at_s
        assert entry.what is not None
        return entry.what


class _Jumping(selectors.BaseSelector):
    """A selector that is asked to wait only when no callback is ready: then the clock jumps."""

    def __init__(self, clock: VirtualClock) -> None:
        self._real = selectors.DefaultSelector()
        self._clock = clock
        self.loop: asyncio.AbstractEventLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or (timeout is not None and timeout <= 0.0):
            return ready
        due_s = self._clock.next_s()
        loops_s = None if timeout is None else self._clock.now() + timeout  # a timer of asyncio's own
        if due_s is not None and (loops_s is None or due_s <= loops_s):
            assert self.loop is not None
            self.loop.call_soon(self._clock.pop())
        elif loops_s is not None:
            self._clock.advance(loops_s)
        else:
            raise EngineError(f"nothing is left to happen at {self._clock.now():g} s, and somebody waits")
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        selector = _Jumping(clock)
        super().__init__(selector)
        selector.loop = self
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.now()


def run(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on a virtual loop of its own. Raises EngineError if everybody waits for ever."""
    clock = VirtualClock()
    with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        return runner.run(main(clock))
