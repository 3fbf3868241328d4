"""How bytes share links: a fluid model whose completion times are recomputed at every change, and only then.

A transfer first spends its fixed part (set-up, latency of its links, cost of its descriptors), then flows over all its
lanes at once. A fair lane splits its bandwidth among the transfers that flow over it (max-min fair where they cross
several lanes), a FIFO lane serves one after another with the fixed part in its service, a private lane gives everybody
its full bandwidth. Nothing here knows a clock or ticks: who calls says what time it is, and asks when to call again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from policies.errors import ConfigError, InvariantError
from policies.frozen import frozen
from twin.engine.ticks import instant

FAIR, FIFO, PRIVATE = "fair", "fifo", "private"
DISCIPLINES = (FAIR, FIFO, PRIVATE)
TX, RX = "/tx", "/rx"
"""Behind a duplex link's name: the lane away from its owner, and the one towards it."""

DONE_BYTES = 1e-3
"""A transfer is over when no more than this is left: less than any rounding of a sum of shares."""
_STALE_ENTRIES = 64
_NANOSECOND = 1e-9


@frozen
class Link:
    """One link. `duplex`: `bytes_per_s` each way, in two lanes; else one lane for both directions."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    desc_cost_s: float = 0.0
    discipline: str = FAIR
    duplex: bool = False

    def __post_init__(self) -> None:
        if self.discipline not in DISCIPLINES:
            raise ConfigError(f"link {self.name}: discipline {self.discipline!r}; it is {', '.join(DISCIPLINES)}")
        if not (0.0 < self.bytes_per_s < math.inf):
            raise ConfigError(f"link {self.name}: {self.bytes_per_s:g} bytes/s; it must be more than 0 and finite")
        for name, value in (("latency_s", self.latency_s), ("desc_cost_s", self.desc_cost_s)):
            if not (0.0 <= value < math.inf):
                raise ConfigError(f"link {self.name}: {name} = {value:g}; it must be 0 or more and finite")

    def lanes(self) -> tuple[str, ...]:
        """Names of its lanes."""
        return (self.name + TX, self.name + RX) if self.duplex else (self.name,)


class Lane:
    """One direction of a link: who flows over it, who waits, and the books of its bytes."""

    __slots__ = (
        "bytes_per_s",
        "flowing",
        "index",
        "link",
        "moved_bytes",
        "name",
        "offered_bytes",
        "offered_until_s",
        "queue",
    )

    def __init__(self, index: int, name: str, link: Link) -> None:
        self.index = index
        self.name = name
        self.link = link
        self.bytes_per_s = link.bytes_per_s
        self.flowing: dict[int, Flow] = {}
        self.queue: dict[int, Flow] = {}  # FIFO: in order of arrival; the first one is served
        self.moved_bytes = 0.0
        self.offered_bytes = 0.0  # bandwidth x time, up to `offered_until_s`
        self.offered_until_s = 0.0

    def offer(self, now_s: float) -> None:
        """Bring `offered_bytes` up to `now_s`."""
        if now_s > self.offered_until_s:
            self.offered_bytes += self.bytes_per_s * (now_s - self.offered_until_s)
            self.offered_until_s = now_s


class Flow:
    """One transfer. `due_s`: when its fixed part, or the whole of it, ends if nothing changes (None: never); its
    bytes move since `moving_s`."""

    __slots__ = (
        "_version",
        "ahead_lanes",
        "bytes",
        "cancelled",
        "cap_bytes_per_s",
        "due_s",
        "finished",
        "fixed_s",
        "flows",
        "lanes",
        "left_bytes",
        "moving_s",
        "rate_bytes_per_s",
        "seq",
        "shared_lanes",
        "since_s",
    )

    def __init__(self, seq: int, lanes: tuple[Lane, ...], bytes_: float, fixed_s: float) -> None:
        self.seq = seq
        self.lanes = lanes
        self.shared_lanes = tuple(lane for lane in lanes if lane.link.discipline != PRIVATE)
        self.bytes = bytes_
        self.fixed_s = fixed_s
        self.left_bytes = bytes_
        self.rate_bytes_per_s = 0.0
        self.since_s = self.moving_s = 0.0
        self.due_s: float | None = None
        self.ahead_lanes = 0  # FIFO lanes where somebody else is served
        self.cap_bytes_per_s = math.inf  # what its private lanes give it
        self.flows = self.finished = self.cancelled = False
        self._version = 0

    @property
    def shares(self) -> bool:
        """Whether it can meet others."""
        return bool(self.shared_lanes)

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.finished or self.cancelled

    def settle(self, now_s: float) -> None:
        """Move the bytes of the time since the last change."""
        if now_s <= self.since_s:
            return
        moved = min(self.rate_bytes_per_s * (now_s - self.since_s), self.left_bytes)
        self._move(moved)
        self.since_s = now_s

    def complete(self) -> None:
        """Move whatever is left."""
        self._move(self.left_bytes)

    def _move(self, moved: float) -> None:
        self.left_bytes -= moved
        for lane in self.lanes:
            lane.moved_bytes += moved


class Fluid:
    """All links of a run and the transfers on them.

    Times given must not go back, and are instants; what happens in between happens at its exact time, and counts as
    due at the nearest instant. A change first lets happen what is due by then; it takes effect no earlier than that, so
    no bandwidth is given twice. What finished is fetched by `take_finished`.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self.lanes: dict[str, Lane] = {}
        self.links: dict[str, Link] = {}
        for link in links:
            if link.name in self.links:
                raise ConfigError(f"two links are named {link.name}; give each its own name")
            self._lay(link)
        self._due: list[tuple[float, int, int, Flow]] = []
        self._finished: list[Flow] = []
        self._now_s = 0.0
        self._exact_s = 0.0  # when shared bandwidth last changed hands; up to half a nanosecond after `_now_s`
        self._started = 0
        self._shares_later = False  # more is happening at this instant: rates change once, at its end
        self._newcomers: dict[int, Flow] = {}
        self._touched: dict[int, Lane] = {}
        self.live = 0

    def _lay(self, link: Link, since_s: float = 0.0) -> None:
        self.links[link.name] = link
        for name in link.lanes():
            lane = self.lanes[name] = Lane(len(self.lanes), name, link)
            lane.offered_until_s = since_s

    # ------------------------------------------------------------ changes

    def add(self, now_s: float, link: Link) -> None:
        """A link that there is from now on; one of that name that there is already stays."""
        if link.name not in self.links:
            self._lay(link, now_s)

    def start(
        self, now_s: float, lanes: Sequence[str], bytes_: float, *, setup_s: float = 0.0, descriptors: int = 0
    ) -> Flow:
        """Begin to move `bytes_` over `lanes`, all of them at once.

        The fixed part is `setup_s`, the sum of the lanes' latencies, and `descriptors` at the dearest lane's cost.
        """
        self.advance(now_s)
        path = self._path(lanes)
        flow = Flow(self._started, path, float(bytes_), fixed_s(path, setup_s, descriptors))
        if flow.shares:
            now_s = max(now_s, self._exact_s)
        self._started += 1
        self.live += 1
        for lane in path:
            if lane.link.discipline == FIFO:
                flow.ahead_lanes += bool(lane.queue)
                lane.queue[flow.seq] = flow
        if not flow.ahead_lanes:
            self._serve(flow, now_s)
        return flow

    def cancel(self, now_s: float, flow: Flow) -> bool:
        """Stop a transfer; what it has moved stays moved. False if it is over already."""
        self.advance(now_s)
        if flow.over:
            return False
        at_s = max(now_s, self._exact_s)
        flow.cancelled = True
        flow.settle(at_s)
        self._leave(flow, at_s)
        return True

    def set_bandwidth(self, now_s: float, lane_name: str, bytes_per_s: float) -> None:
        """Change what a lane carries, from now on; 0: nothing moves until it changes again."""
        self.advance(now_s)
        lane, at_s = self.lane(lane_name), max(now_s, self._exact_s)
        lane.offer(at_s)
        lane.bytes_per_s = bytes_per_s
        if lane.link.discipline == PRIVATE:
            for flow in lane.flowing.values():
                flow.cap_bytes_per_s = _cap(flow.lanes)
        self._rebalance((lane,), at_s)

    # ------------------------------------------------------------ time

    def next_s(self) -> float | None:
        """When something is due next, exactly; None if nothing is."""
        return self._now_s if self._finished else self._next_due_s()

    def advance(self, now_s: float) -> None:
        """Let everything happen that is due by `now_s`, each at its exact time."""
        while (due_s := self._next_due_s()) is not None and (due_s <= now_s or instant(due_s) <= now_s):
            flow = heappop(self._due)[3]
            flow._version += 1
            if flow.shares:
                self._exact_s = max(self._exact_s, due_s)
            self._shares_later = True
            if flow.flows:
                self._finish(flow, due_s)
            else:
                self._join(flow, due_s)
            if self._next_due_s() != due_s:
                self._shares_later = False
                self._share_out(due_s)
        self._now_s = max(self._now_s, now_s)

    def take_finished(self) -> list[Flow]:
        """What finished since the last call, in order of start."""
        finished, self._finished = self._finished, []
        finished.sort(key=lambda flow: flow.seq)
        return finished

    # ------------------------------------------------------------ questions

    def lane(self, name: str) -> Lane:
        """The lane of that name; ConfigError names the lanes there are."""
        found = self.lanes.get(name)
        if found is None:
            duplex = name in self.links
            hint = f"it is duplex: name {name}{TX} or {name}{RX}" if duplex else f"there are {_some(self.lanes)}"
            raise ConfigError(f"link {name}: no such lane; {hint}")
        return found

    def estimate_s(
        self, now_s: float, lanes: Sequence[str], bytes_: float, *, setup_s: float = 0.0, descriptors: int = 0
    ) -> float:
        """How long such a transfer would take with today's shares: fixed part, whoever is ahead in FIFO lanes, and
        its bytes at the rate that it would get now. `inf` while a lane of it is down."""
        self.advance(now_s)
        path = self._path(lanes)
        rate = min((lane.bytes_per_s / _sharers(lane) for lane in path), default=math.inf)
        wait_s = max((_queued_s(lane, now_s) for lane in path), default=0.0)
        moving_s = 0.0 if not bytes_ else bytes_ / rate if rate else math.inf
        return wait_s + fixed_s(path, setup_s, descriptors) + moving_s

    def audit(self, now_s: float) -> None:
        """No lane moved more than bandwidth x time; every lane's flows are alive. Raises InvariantError."""
        self.advance(now_s)
        at_s = max(now_s, self._exact_s)
        for lane in self.lanes.values():
            lane.offer(at_s)
            for flow in lane.flowing.values():
                flow.settle(at_s)
                if flow.over:
                    raise InvariantError(f"link {lane.name}: transfer {flow.seq} is over and still flows")
            slack = 2 * lane.link.bytes_per_s * _NANOSECOND + 1e-9 * lane.offered_bytes + DONE_BYTES
            if lane.link.discipline != PRIVATE and lane.moved_bytes > lane.offered_bytes + slack:
                raise InvariantError(
                    f"link {lane.name} moved {lane.moved_bytes:.0f} bytes by {at_s:.9f} s, "
                    f"and could move {lane.offered_bytes:.0f}"
                )

    # ------------------------------------------------------------ the life of a transfer

    def _path(self, lanes: Iterable[str]) -> tuple[Lane, ...]:
        return tuple(self.lane(name) for name in dict.fromkeys(lanes))

    def _serve(self, flow: Flow, at_s: float) -> None:
        """It is first in every FIFO lane: its fixed part begins."""
        if flow.fixed_s > 0.0:
            flow.since_s = at_s
            self._schedule(flow, at_s + flow.fixed_s)
        else:
            self._join(flow, at_s)

    def _join(self, flow: Flow, at_s: float) -> None:
        """Its bytes begin to move."""
        flow.flows = True
        flow.since_s = flow.moving_s = at_s
        flow.due_s = None
        if flow.left_bytes <= DONE_BYTES or not flow.lanes:
            self._schedule(flow, at_s)
            return
        flow.cap_bytes_per_s = _cap(flow.lanes)
        for lane in flow.lanes:
            lane.flowing[flow.seq] = flow
        self._rebalance(flow.shared_lanes, at_s, flow)

    def _finish(self, flow: Flow, at_s: float) -> None:
        flow.settle(at_s)
        flow.complete()
        flow.finished = True
        self._finished.append(flow)
        self._leave(flow, at_s)

    def _leave(self, flow: Flow, at_s: float) -> None:
        """Free its place in every lane; whoever waited behind it may be served."""
        self.live -= 1
        flow._version += 1
        flow.due_s = None
        for lane in flow.lanes:
            lane.flowing.pop(flow.seq, None)
        if flow.flows:
            self._rebalance(flow.shared_lanes, at_s)
        for lane in flow.lanes:
            if flow.seq in lane.queue:
                was_first = next(iter(lane.queue)) == flow.seq
                del lane.queue[flow.seq]
                if was_first and lane.queue:
                    following = next(iter(lane.queue.values()))
                    following.ahead_lanes -= 1
                    if not following.ahead_lanes:
                        self._serve(following, at_s)

    def _rebalance(self, touched: Iterable[Lane], at_s: float, newcomer: Flow | None = None) -> None:
        """New max-min fair rates for everybody whom a change in `touched` can reach, at the end of this instant where
        more of it may follow."""
        for lane in touched:
            self._touched[lane.index] = lane
        if newcomer is not None:
            self._newcomers[newcomer.seq] = newcomer
        if not self._shares_later:
            self._share_out(at_s)

    def _share_out(self, at_s: float) -> None:
        """Rates for everybody whom the changes of this instant can reach."""
        if not self._touched and not self._newcomers:
            return
        flows = _reached(self._touched.values())
        flows.update(self._newcomers)
        self._touched, self._newcomers = {}, {}
        for flow, rate in _fair_rates(flows.values()):
            if rate != flow.rate_bytes_per_s:
                flow.settle(at_s)
                flow.rate_bytes_per_s = rate
                left_s = 0.0 if flow.left_bytes <= DONE_BYTES else flow.left_bytes / rate if rate else math.inf
                self._schedule(flow, max(at_s, flow.since_s) + left_s)

    def _schedule(self, flow: Flow, due_s: float) -> None:
        flow._version += 1
        flow.due_s = None if due_s == math.inf else due_s
        if flow.due_s is not None:
            heappush(self._due, (due_s, flow.seq, flow._version, flow))
            if len(self._due) > _STALE_ENTRIES + 4 * self.live:
                self._due = [entry for entry in self._due if entry[2] == entry[3]._version]
                heapify(self._due)

    def _next_due_s(self) -> float | None:
        due = self._due
        while due and due[0][2] != due[0][3]._version:
            heappop(due)
        return due[0][0] if due else None


def fixed_s(lanes: Iterable[Lane], setup_s: float, descriptors: int) -> float:
    """What a transfer costs before its bytes move: latencies add up, descriptors are posted once (the dearest lane)."""
    latency_s, desc_cost_s = 0.0, 0.0
    for lane in lanes:
        latency_s += lane.link.latency_s
        desc_cost_s = max(desc_cost_s, lane.link.desc_cost_s)
    return setup_s + latency_s + descriptors * desc_cost_s


def _cap(lanes: Iterable[Lane]) -> float:
    return min((lane.bytes_per_s for lane in lanes if lane.link.discipline == PRIVATE), default=math.inf)


def _reached(touched: Iterable[Lane]) -> dict[int, Flow]:
    """The flows that share a lane with somebody on `touched`, and those who share one with them, and so on. On private
    lanes nobody meets anybody."""
    flows: dict[int, Flow] = {}
    lanes = list(touched)
    seen = {lane.index for lane in lanes}
    while lanes:
        for flow in lanes.pop().flowing.values():
            if flow.seq not in flows:
                flows[flow.seq] = flow
                for lane in flow.shared_lanes:
                    if lane.index not in seen:
                        seen.add(lane.index)
                        lanes.append(lane)
    return flows


def _fair_rates(flows: Iterable[Flow]) -> list[tuple[Flow, float]]:
    """Max-min fair rates by filling: the lane that has least for each of its flows fixes theirs, and so on.

    A lane's share for those who are left never falls on the way, so a heap entry that is out of date is too low, and is
    put back with the share of now when it comes up.
    """
    unfixed = {flow.seq: flow for flow in flows}
    left: dict[int, float] = {}
    users: dict[int, list[Flow]] = {}
    for flow in unfixed.values():
        for lane in flow.shared_lanes:
            index = lane.index
            if index in left:
                users[index].append(flow)
            else:
                left[index] = lane.bytes_per_s
                users[index] = [flow]
    counts = {index: len(flowing) for index, flowing in users.items()}
    shares = [(left[index] / n, index) for index, n in counts.items()]
    heapify(shares)
    capped = sorted((f for f in unfixed.values() if f.cap_bytes_per_s < math.inf), key=_cap_then_seq, reverse=True)
    rates: list[tuple[Flow, float]] = []

    def fix(flow: Flow, rate: float) -> None:
        del unfixed[flow.seq]
        rates.append((flow, rate))
        for lane in flow.shared_lanes:
            left[lane.index] = max(0.0, left[lane.index] - rate)
            counts[lane.index] -= 1

    while unfixed:
        share, index = shares[0] if shares else (math.inf, -1)
        if shares and not counts[index]:
            heappop(shares)
        elif shares and (now := left[index] / counts[index]) > share:
            heapreplace(shares, (now, index))
        elif capped and capped[-1].cap_bytes_per_s <= share:
            flow = capped.pop()
            if flow.seq in unfixed:
                fix(flow, flow.cap_bytes_per_s)
        else:
            for flow in users[index]:
                if flow.seq in unfixed:
                    fix(flow, share)
    return rates


def _cap_then_seq(flow: Flow) -> tuple[float, int]:
    return flow.cap_bytes_per_s, flow.seq


def _sharers(lane: Lane) -> int:
    """Among how many a newcomer would share a lane."""
    return len(lane.flowing) + 1 if lane.link.discipline == FAIR else 1


def _queued_s(lane: Lane, now_s: float) -> float:
    """What is left of those in a FIFO lane, each alone on it."""
    waiting_s = 0.0
    for flow in lane.queue.values():
        left = flow.left_bytes
        if flow.flows:
            left = max(0.0, left - flow.rate_bytes_per_s * max(0.0, now_s - flow.since_s))
        elif flow.ahead_lanes:
            waiting_s += flow.fixed_s
        else:
            waiting_s += max(0.0, flow.since_s + flow.fixed_s - now_s)
        waiting_s += left / lane.bytes_per_s if lane.bytes_per_s else math.inf
    return waiting_s


def _some(names: Iterable[str]) -> str:
    known = sorted(names)
    return ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "") if known else "none"
