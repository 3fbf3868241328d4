"""Transfers over shared links on the virtual clock: the shell around `twin.perf.links`.

One event on the clock for the next thing that is due, moved at each change; nothing ticks. It never calls back from
inside `start`, `cancel` or `slow`: what finishes at an instant is told at that instant, among the transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from simpy.events import Event

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.engine.ticks import instant
from twin.mocker.clock import Clock, Order
from twin.perf.cargo import KV
from twin.perf.links import Flow, Fluid, Link

__all__ = ["Link", "Network", "Part", "Transfer", "Way", "side_by_side"]

ALL_LINKS = "all links"
"""What `Network.slow` takes for every link of the run."""

_TRANSFER_DONE = int(Order.TRANSFER_DONE)


class Part(NamedTuple):
    """One of several transfers that are over together: bytes over lanes."""

    links: tuple[str, ...]
    bytes: int
    descriptors: int = 0


class Use(NamedTuple):
    """What a lane has carried, and its bandwidth times the time."""

    moved_bytes: float
    offered_bytes: float


@frozen
class Way:
    """One path of a worker: by rank, the lanes that leave it and those that enter it, from the GPU outwards."""

    out: tuple[tuple[str, ...], ...]
    into: tuple[tuple[str, ...], ...]

    def to(self, rank: int, dest: Way, dest_rank: int) -> tuple[str, ...]:
        """Lanes from one rank to another's; a link that both sides cross is crossed once."""
        return tuple(dict.fromkeys((*self.out[rank], *reversed(dest.into[dest_rank]))))


def side_by_side(lanes: Sequence[tuple[str, ...]], bytes_: int) -> tuple[Part, ...]:
    """What ranks move together, in even shares: `lanes` by rank."""
    ranks = len(lanes)
    return tuple(Part(path, bytes_ * (rank + 1) // ranks - bytes_ * rank // ranks) for rank, path in enumerate(lanes))


class Transfer:
    """A transfer, or several that count as one. `on_done` is called once, when the last of them is over."""

    __slots__ = ("_flows", "_left", "_network", "_on_done", "bytes", "cancelled", "cargo", "done", "start_s")

    def __init__(
        self, network: Network, cargo: str, bytes_: int, parts: int, on_done: Callable[[], None], start_s: float
    ) -> None:
        self._network = network
        self.cargo = cargo
        self._on_done = on_done
        self._flows: list[Flow] = []
        self._left = parts
        self.bytes = bytes_
        self.start_s = start_s
        self.done = False
        self.cancelled = False

    @property
    def moving_s(self) -> float:
        """Since when bytes of all its parts move."""
        return max(flow.moving_s for flow in self._flows)

    def cancel(self) -> bool:
        """Stop it, and never call `on_done`. False if that has been called already."""
        if self.done or self.cancelled:
            return False
        self.cancelled = True
        self._network._cancel(self._flows)
        return True

    def _part_done(self) -> None:
        self._left -= 1
        if not self._left and not self.cancelled:
            self.done = True
            self._network._carried_bytes[self.cargo] += self.bytes
            self._on_done()


class Network:
    """The links of a simulated run.

    Lanes are named as `Link.lanes` says: a duplex link has NAME/tx and NAME/rx. A link's name may have parts,
    KIND:WORKER:RANK; `slow` takes a prefix of them too (`nic:pool-0` for all ranks of that worker). `cargo` says what a
    transfer moves, for the books alone.
    """

    def __init__(self, clock: Clock, links: Iterable[Link]) -> None:
        self.clock = clock
        self._clock = clock
        self._fluid = Fluid(links)
        self._carried_bytes: Counter[str] = Counter()
        self._events = 0  # of ours on the clock, out of date or not
        self._wake: Event | None = None
        self._wake_s = 0.0
        self._transfers: dict[int, Transfer] = {}

    def add(self, links: Iterable[Link]) -> None:
        """Links of workers that have come; those that are there already stay as they are."""
        for link in links:
            self._fluid.add(self._clock.now, link)

    @property
    def live(self) -> int:
        """Transfers under way, each part counted."""
        return self._fluid.live

    def live_of(self, cargo: str) -> int:
        """Of these, those that move this."""
        return sum(transfer.cargo == cargo for transfer in self._transfers.values())

    def events_of(self, cargo: str) -> int:
        """How many events on the clock are there for this alone; 0 while anything else moves."""
        return self._events if self.live_of(cargo) == len(self._transfers) else 0

    @property
    def carried_bytes(self) -> dict[str, int]:
        """What transfers that are over have moved, by cargo."""
        return dict(sorted(self._carried_bytes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all links."""
        return tuple(self._fluid.links)

    @property
    def down(self) -> tuple[str, ...]:
        """Names of the links that carry nothing now, in one direction at least."""
        fluid = self._fluid
        return tuple(
            name for name, link in fluid.links.items() if any(not fluid.lane(lane).bytes_per_s for lane in link.lanes())
        )

    def start(
        self,
        links: Sequence[str],
        bytes: int,
        *,
        setup_s: float = 0.0,
        descriptors: int = 0,
        on_done: Callable[[], None],
        cargo: str = KV,
    ) -> Transfer:
        """Move `bytes` over these lanes, all at once: the slowest share is the rate."""
        return self.start_all((Part(tuple(links), bytes, descriptors),), setup_s=setup_s, on_done=on_done, cargo=cargo)

    def start_all(
        self,
        parts: Sequence[Part],
        *,
        setup_s: float = 0.0,
        on_done: Callable[[], None],
        cargo: str = KV,
        copies: int = 1,
    ) -> Transfer:
        """Several transfers side by side; over when the last one is (a hand-off: one for each pair of ranks).

        `copies`: how many like them, on links of their own, these stand for.
        """
        now_s = self._clock.now
        parts = parts or (Part((), 0),)
        transfer = Transfer(self, cargo, copies * sum(part.bytes for part in parts), len(parts), on_done, now_s)
        for part in parts:
            flow = self._fluid.start(now_s, part.links, part.bytes, setup_s=setup_s, descriptors=part.descriptors)
            self._transfers[flow.seq] = transfer
            transfer._flows.append(flow)
        self._arm()
        return transfer

    def slow(self, link: str, factor: float) -> None:
        """Let a link (or all whose name begins with `link:`, or one lane) carry `factor` of its bandwidth from now on.

        1 restores it, 0 takes it down. A second call replaces the first.
        """
        if not 0.0 <= factor < float("inf"):
            raise ConfigError(f"link {link}: factor {factor:g}; it must be 0 or more and finite")
        for lane in self.lanes_of(link):
            usual = self._fluid.lane(lane).link.bytes_per_s
            self._fluid.set_bandwidth(self._clock.now, lane, usual * factor)
        self._arm()

    def estimate_s(self, links: Sequence[str], bytes: int, *, setup_s: float = 0.0, descriptors: int = 0) -> float:
        """How long such a transfer would take if it started now and shares stayed as they are then."""
        estimate_s = self._fluid.estimate_s(self._clock.now, links, bytes, setup_s=setup_s, descriptors=descriptors)
        self._arm()
        return estimate_s

    def bytes_per_s(self, lane: str) -> float:
        """The bandwidth of a lane as it is now; 0 while it is down."""
        return self._fluid.lane(lane).bytes_per_s

    def moved_bytes(self, lane: str) -> float:
        """What a lane has carried up to now."""
        self.audit()
        return self._fluid.lane(lane).moved_bytes

    def use(self) -> dict[str, Use]:
        """Of each lane, what it has carried up to now and what it could have."""
        self.audit()
        return {name: Use(lane.moved_bytes, lane.offered_bytes) for name, lane in self._fluid.lanes.items()}

    def audit(self) -> None:
        """No link moved more than its bandwidth times the time. Raises InvariantError."""
        self._fluid.audit(self._clock.now)
        self._arm()

    def lanes_of(self, link: str) -> list[str]:
        """The lanes that a name of `slow` means. Raises ConfigError where there are none."""
        if link in self._fluid.lanes:
            return [link]
        if link == ALL_LINKS:
            return list(self._fluid.lanes)
        known = self._fluid.links
        lanes = [lane for name in known if name == link or name.startswith(f"{link}:") for lane in known[name].lanes()]
        if not lanes:
            self._fluid.lane(link)  # says which there are
        return lanes

    def _cancel(self, flows: Iterable[Flow]) -> None:
        for flow in flows:
            if self._fluid.cancel(self._clock.now, flow):
                del self._transfers[flow.seq]
        self._arm()

    def _arm(self) -> None:
        """One event on the clock at the instant of what is due next."""
        due_s = self._fluid.next_s()
        if due_s is None:
            self._wake = None
            return
        at_s = max(instant(due_s), self._clock.now)
        if self._wake is None or self._wake_s != at_s:
            self._wake_s = at_s
            self._events += 1
            self._wake = self._clock.at(at_s, _TRANSFER_DONE, (self._on_wake,))

    def _on_wake(self, event: Event) -> None:
        self._events -= 1
        if event is not self._wake:
            return  # a change has moved what was due
        self._wake = None
        self._fluid.advance(self._clock.now)
        for flow in self._fluid.take_finished():
            self._transfers.pop(flow.seq)._part_done()
        self._arm()
