"""Workers on their way up: boot, weights, engine warm-up; what a start takes by a formula, or its weights over links.

Over links a start shares with hand-offs and other starts, and a fault of a link reaches it. It says when a worker is
there and never brings it up itself; a start that is broken off says nothing, and nothing of it moves any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from policies.cluster.ids import WorkerId
from policies.frozen import frozen
from twin.engine.ticks import instant
from twin.mocker.clock import Clock, Order
from twin.perf.cargo import WEIGHTS

if TYPE_CHECKING:
    from twin.mocker.links import Network, Transfer, Way


@frozen
class WeightLoad:
    """How the weights of a worker come in over links: `rank_bytes` over `way`, after `boot_s` and before `warmup_s`.

    `peers`: the workers of its group; each rank is sent its weights by its counterpart in one of them that is up. None:
    they are read from what lies at the far end of the way.
    """

    rank_bytes: tuple[int, ...]
    way: Way
    boot_s: float
    warmup_s: float
    peers: tuple[WorkerId, ...] | None = None


class Start:
    """One start, with the instants of its stages (None where it has not come to that)."""

    __slots__ = (
        "load",
        "load_s",
        "loaded_s",
        "on_failed",
        "on_up",
        "ordered_s",
        "peer",
        "transfer",
        "up_s",
        "worker_id",
    )

    def __init__(
        self,
        worker_id: WorkerId,
        load: WeightLoad | None,
        ordered_s: float,
        on_up: Callable[[], None],
        on_failed: Callable[[], None] | None,
    ) -> None:
        self.worker_id = worker_id
        self.load = load  # None: its time is by a formula
        self.on_up = on_up
        self.on_failed = on_failed  # None: whoever makes it fail sees to what follows
        self.ordered_s = ordered_s
        self.load_s: float | None = None
        self.loaded_s: float | None = None
        self.up_s: float | None = None
        self.peer: WorkerId | None = None  # who sends the weights, or sent them
        self.transfer: Transfer | None = None


class Hindrance(Protocol):
    """What a scenario does to starts while it lasts."""

    def extra_s(self, worker_id: WorkerId) -> float:
        """How much longer a start that begins now takes."""

    def fails(self, worker_id: WorkerId) -> bool:
        """Whether a start that would be over now has failed; asked once for each."""

    def after_failure(self, start: Start) -> None:
        """A start has failed: let it begin again, or not."""


class Starts:
    """All starts of a run; `log` has them in order. `is_up`: whether a worker can send its weights now."""

    def __init__(
        self,
        clock: Clock,
        network: Network | None,
        loads: dict[WorkerId, WeightLoad],
        *,
        is_up: Callable[[WorkerId], bool],
    ) -> None:
        self._clock = clock
        self._network = network
        self._loads = loads
        self._is_up = is_up
        self._under_way: dict[WorkerId, Start] = {}
        self._timers = 0
        self._hindrances: list[Hindrance] = []
        self.log: list[Start] = []

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._under_way

    @property
    def events(self) -> int:
        """How many events on the clock are there for starts alone."""
        return self._timers + (self._network.events_of(WEIGHTS) if self._network is not None else 0)

    @property
    def is_hindered(self) -> bool:
        """Whether starts may take longer or fail now."""
        return bool(self._hindrances)

    def hinder(self, how: Hindrance) -> None:
        """Starts may take longer or fail from now on, as this says of each."""
        self._hindrances.append(how)

    def unhinder(self, how: Hindrance) -> None:
        """That is over."""
        self._hindrances.remove(how)

    def know(self, worker_id: WorkerId, load: WeightLoad | None) -> None:
        """A worker that nobody knew of before may be started."""
        if load is not None:
            self._loads[worker_id] = load

    def begin(
        self,
        worker_id: WorkerId,
        formula_s: float,
        on_up: Callable[[], None],
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        """A worker begins to come up now; `on_up` is called when it is there, `on_failed` when it has failed to be.
        Without links of the run for its weights it takes `formula_s`."""
        load = self._loads.get(worker_id)
        start = self._under_way[worker_id] = Start(worker_id, load, self._clock.now, on_up, on_failed)
        self.log.append(start)
        extra_s = sum(how.extra_s(worker_id) for how in self._hindrances)
        if load is None:
            self._after(formula_s + extra_s, start, self._on_up)
        else:
            self._after(load.boot_s + extra_s, start, self._on_booted)

    def break_off(self, worker_id: WorkerId) -> None:
        """The worker dies on its way up."""
        start = self._under_way.pop(worker_id)
        if start.transfer is not None:
            start.transfer.cancel()

    def on_gone(self, worker_id: WorkerId) -> None:
        """A worker is not there any more: whoever was being sent its weights is sent all of them by another one."""
        for start in list(self._under_way.values()):
            if start.transfer is not None and start.peer == worker_id:
                start.transfer.cancel()
                self._on_booted(start)

    def _on_booted(self, start: Start) -> None:
        from twin.mocker.links import Part

        network, load = self._network, start.load
        assert network is not None
        assert load is not None
        if start.load_s is None:
            start.load_s = self._clock.now
        start.peer = self._peer_of(start, load)
        lanes: tuple[tuple[str, ...], ...] = load.way.into
        if start.peer is not None:
            sender = self._loads[start.peer].way
            lanes = tuple(sender.to(rank, load.way, rank) for rank in range(len(lanes)))
        parts = [Part(path, size) for path, size in zip(lanes, load.rank_bytes, strict=True)]
        start.transfer = network.start_all(parts, on_done=lambda: self._on_loaded(start, load), cargo=WEIGHTS)

    def _peer_of(self, start: Start, load: WeightLoad) -> WorkerId | None:
        """Who sends least now, of those who are up; None: a store does, or somebody outside the run."""
        sending = [other.peer for other in self._under_way.values() if other.transfer is not None]
        fits = [peer for peer in load.peers or () if peer != start.worker_id and self._is_up(peer)]
        return min(fits, key=lambda peer: (sending.count(peer), peer), default=None)

    def _on_loaded(self, start: Start, load: WeightLoad) -> None:
        start.transfer = None
        start.loaded_s = self._clock.now
        self._after(load.warmup_s, start, self._on_up)

    def _on_up(self, start: Start) -> None:
        del self._under_way[start.worker_id]
        failed = [how for how in self._hindrances if how.fails(start.worker_id)]
        if failed:
            if start.on_failed is not None:
                start.on_failed()
            else:
                failed[0].after_failure(start)
            return
        start.up_s = self._clock.now
        start.on_up()

    def _after(self, seconds: float, start: Start, what: Callable[[Start], None]) -> None:
        """Go on so much later, if nobody has broken the start off by then."""
        self._timers += 1

        def go_on() -> None:
            self._timers -= 1
            if self._under_way.get(start.worker_id) is start:
                what(start)

        self._clock.call(instant(self._clock.now + seconds), int(Order.FAULT), go_on)
