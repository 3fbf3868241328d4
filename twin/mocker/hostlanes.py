"""What loads from host memory cross: links of the run that they share with whatever else crosses these, or a lane of
the worker's own, one load after another. It moves bytes and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from twin.engine.ticks import instant
from twin.mocker.clock import Clock, Order
from twin.perf.cargo import HOST

if TYPE_CHECKING:
    from twin.engine.loading import HostLoad
    from twin.mocker.links import Network


class Loading(Protocol):
    """A load that is under way and can be called off."""

    def cancel(self) -> bool: ...


class HostLane(Protocol):
    """Brings loads up to the GPUs of one worker and says when they are there, never at once. What comes back can be
    called off, where that changes anything for others. `attend`: the engine has planned, or ended a step, and may have
    left something to do; `close`: the worker is gone."""

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> Loading | None: ...

    def attend(self) -> None: ...

    def close(self) -> None: ...


class OwnLane:
    """One load after another at `bytes_per_s`; it goes on to its end whether anybody wants it or not."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> None:
        begin_s = max(self._clock.now, self._free_s)
        self._free_s = instant(begin_s + load.bytes / self._bytes_per_s)
        self._clock.at(self._free_s, int(Order.TRANSFER_DONE), (lambda _: on_done(),))

    def attend(self) -> None:
        pass

    def close(self) -> None:
        pass


class LinkLane:
    """An even share of the bytes for each rank, over `lanes` by rank."""

    def __init__(self, network: Network, lanes: tuple[tuple[str, ...], ...]) -> None:
        self._network = network
        self._lanes = lanes

    def load(self, load: HostLoad, on_done: Callable[[], None]) -> Loading:
        from twin.mocker.links import side_by_side

        return self._network.start_all(side_by_side(self._lanes, load.bytes), on_done=on_done, cargo=HOST)

    def attend(self) -> None:
        pass

    def close(self) -> None:
        pass
