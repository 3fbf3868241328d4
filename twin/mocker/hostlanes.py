"""What loads from host memory cross: links of the run that they share with whatever else crosses these, or a lane of
the worker's own, one load after another. It moves bytes and knows no blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from twin.engine.ticks import instant
from twin.mocker.clock import Clock, Order
from twin.perf.cargo import HOST

if TYPE_CHECKING:
    from twin.mocker.links import Network, Transfer


class HostLane(Protocol):
    """Brings bytes up to the GPUs of one worker and says when they are there, never at once. What comes back can be
    called off, where that changes anything for others."""

    def load(self, bytes_: int, on_done: Callable[[], None]) -> Transfer | None: ...


class OwnLane:
    """One load after another at `bytes_per_s`; it goes on to its end whether anybody wants it or not."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def load(self, bytes_: int, on_done: Callable[[], None]) -> Transfer | None:
        begin_s = max(self._clock.now, self._free_s)
        self._free_s = instant(begin_s + bytes_ / self._bytes_per_s)
        self._clock.at(self._free_s, int(Order.TRANSFER_DONE)).callbacks.append(lambda _: on_done())
        return None


class LinkLane:
    """An even share of the bytes for each rank, over `lanes` by rank."""

    def __init__(self, network: Network, lanes: tuple[tuple[str, ...], ...]) -> None:
        self._network = network
        self._lanes = lanes

    def load(self, bytes_: int, on_done: Callable[[], None]) -> Transfer | None:
        from twin.mocker.links import side_by_side

        return self._network.start_all(side_by_side(self._lanes, bytes_), on_done=on_done, cargo=HOST)
