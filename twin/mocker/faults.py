"""Performs a scenario on a simulated world: each fault at its instant, before everything else that happens then.

It keeps the timeline: what was done to whom, when the cluster knew, when it was over, which requests it touched and how
these ended. It decides nothing about requests; a fault that finds nothing to act on is noted, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from policies.cluster.draws import draw
from policies.cluster.ids import LossCause, RequestId, Tier, WorkerId
from policies.errors import CapabilityError, ConfigError
from policies.resilience.discovery import Leases
from policies.resilience.drain import DrainRules
from twin.engine.ticks import instant
from twin.mocker.churn import Loss
from twin.mocker.clock import Order
from twin.mocker.links import ALL_LINKS
from twin.mocker.worker import MockWorker
from twin.perf.slowed import Slowed
from twin.scenario import ANY, Fault, Occurrence, Scenario, chosen, occurrences

if TYPE_CHECKING:
    from twin.mocker.links import Network
    from twin.mocker.requests import OpenRequest
    from twin.mocker.world import MockWorld, WorkerSpec

TCP_SHARE = 1 / 350
"""Of what RDMA carries, when transfers fall back to TCP: vendors say 200 to 500 times slower."""

_FAULT, _TRANSFER_DONE = int(Order.FAULT), int(Order.TRANSFER_DONE)


@dataclass(slots=True, kw_only=True)
class Entry:
    """One line of the timeline. `why_not` says why nothing was done; times are None where it never came to that."""

    fault: str
    kind: str
    at_s: float
    target: str | None = None
    why_not: str | None = None
    over_s: float | None = None
    loss: Loss = field(default_factory=Loss)

    def plain(self) -> dict[str, object]:
        """As a flat table."""
        found: dict[str, object] = asdict(self)
        del found["loss"]
        return found | asdict(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How long it takes to know: of a broken connection, of a lease that ran out, of a worker that says nothing."""

    disconnect_s: float
    lease_s: float
    inactivity_s: float


class Faults:
    """One scenario on one world. `start` before the world runs; `timeline` and `never_applied` when it is over."""

    def __init__(
        self,
        world: MockWorld,
        scenario: Scenario,
        *,
        seed: int,
        detection: Detection,
        network: Network | None = None,
        no_links: str = "this run has no links; give it a topology, or leave the fault out",
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._seed = scenario.seed if scenario.seed is not None else seed
        self._detection = detection
        self._network = network
        self._leases: Leases[WorkerId] = Leases(detection.lease_s)
        self._ids = worker_ids(scenario, world.specs)
        self._names = {worker_id: name for name, worker_id in self._ids.items()}
        self._pending = 0  # events of ours on the clock
        self._rows: dict[int, RequestId] = {}
        self.timeline: list[Entry] = []
        for fault in scenario.faults:
            if network is None and (fault.link is not None or fault.kind == "tcp_fallback"):
                raise CapabilityError(f"{fault.where}: {no_links}")
            roles = sorted({spec.role.value for spec in world.specs.values()})
            if fault.role is not None and fault.role not in roles:
                raise ConfigError(
                    f"{fault.where}: role = {fault.role!r}: no worker has it; there are {', '.join(roles)}"
                )
            if network is not None and fault.link is not None:
                _check_link(network, fault.link, fault.where)
            if fault.between is not None:
                self._two_sets(fault)
        for fault in scenario.faults if world.block_tiers is None else ():
            if fault.tier is not None:
                raise CapabilityError(
                    f"{fault.where}: no worker of this run has tiers below its device; give it some ([workers.kvbm]), "
                    "or leave the fault out"
                )

    def start(self) -> None:
        """Put the first occurrence of every fault on the clock."""
        world = self._world
        world.stuck = self._stuck
        for fault in self._scenario.faults:
            if fault.rate is not None and fault.kind == "client_disconnect":
                world.churn.on_arrival.append(self._leaver(fault))
                continue
            self._next(fault, occurrences(fault, self._seed))
        if any(fault.row is not None for fault in self._scenario.faults):
            world.churn.on_arrival.append(self._note_row)
        first = self._scenario.first_worker
        if first is not None:
            world.churn.pins[0] = self._ids[first]

    def _stuck(self) -> tuple[str, list[OpenRequest]] | None:
        """Nothing is left to happen: which open requests are held up for good, and by what. Those whose transfer
        stands still, or whose worker is gone, come first: without them the others may go on."""
        found = [(why, requests) for why, requests in self._held_up() if why]
        for why, requests in found:
            if requests:
                return f"stuck: {why}", requests
        return (f"stuck: {'; '.join(why for why, _ in found)}", list(self._world.open.values())) if found else None

    def _held_up(self) -> Iterator[tuple[str, list[OpenRequest]]]:
        """What stays broken to the end (a text, empty where nothing is), and which open requests it stops."""
        world = self._world
        moving = [r for r in world.open.values() if r.moving]
        yield _to_the_end("link", self._links_down(), "is down", "are down"), moving
        apart = [fault for fault in self._scenario.faults if fault.between and self._lasts(fault)]
        stalled = world.handoffs.held_up if world.handoffs is not None else []
        yield _to_the_end("partition between", tuple(_two_sides(fault) for fault in apart), "lasts", "last"), stalled
        there = sorted(world.workers.items())
        gone = [worker_id for worker_id, worker in there if worker.down or worker.hung]
        yield self._workers_to_the_end(gone, "is down", "are down")
        lone = [worker_id for worker_id, _ in there if world.partitions.is_cut_off(worker_id)]
        yield self._workers_to_the_end(lone, "is cut off", "are cut off")

    def _lasts(self, fault: Fault) -> bool:
        """Whether a partition is there now."""
        return any(name.startswith(f"{fault.index}.") for name in self._world.wires.parts)

    def _workers_to_the_end(self, ids: list[WorkerId], one: str, several: str) -> tuple[str, list[OpenRequest]]:
        requests = {r.request_id: r for worker_id in ids for r in self._world.churn.requests_of(worker_id)}
        names = tuple(self._names[worker_id] for worker_id in ids)
        return _to_the_end("worker", names, one, several), list(requests.values())

    def _links_down(self) -> tuple[str, ...]:
        """The links that are down now, by the names that the scenario gives them."""
        down = self._network.down if self._network is not None else ()
        named = [fault.link for fault in self._scenario.faults if fault.kind == "link_down" and fault.link]
        found = {
            next((link for link in named if name == link or name.startswith(f"{link}:")), name): None for name in down
        }
        return tuple(found)

    def never_applied(self, end_s: float) -> list[str]:
        """Faults that did nothing in the whole run, or only after its last request had ended at `end_s`."""
        found = []
        for fault in self._scenario.faults:
            if fault.kind == "client_disconnect" and fault.rate is not None:
                continue
            entries = [entry for entry in self.timeline if entry.fault == fault.name]
            if any(entry.why_not is None and entry.at_s <= end_s for entry in entries):
                continue
            if fault.recurs and not entries:
                continue  # none was drawn before the end
            at_s = entries[0].at_s if entries else fault.at_s
            if fault.row is not None and fault.row not in self._rows:
                found.append(f"{fault.name}: there is no row {fault.row}: the run had {len(self._rows)} requests")
                continue
            why = entries[0].why_not if entries and entries[0].why_not else f"the run ended at {end_s:g} s"
            found.append(f"{fault.name}: {fault.kind} at {at_s:g} s was never applied: {why}")
        return found

    def without_effect(self) -> list[str]:
        """Faults that can change nothing in this run: what they upset is not said, or nobody listens."""
        world, found = self._world, []
        for fault in self._scenario.faults:
            if fault.kind in ("event_loss", "event_delay"):
                what, tells = "KV events", world.news.tells_blocks
            elif fault.kind == "report_stale":
                what, tells = "load reports", world.news.tells_load
            else:
                continue
            specs = [spec for spec in world.specs.values() if self._is_meant(fault, spec)]
            if specs and not any(tells(spec) for spec in specs):
                found.append(f"{fault.name}: {fault.kind} has no effect: nobody listens to {what} of {_whom(fault)}")
        return found

    def _is_meant(self, fault: Fault, spec: WorkerSpec) -> bool:
        """Whether a fault may happen to a worker."""
        named = fault.worker in (None, ANY) or self._names[spec.worker_id] == fault.worker
        return named and fault.role in (None, spec.role.value)

    # ------------------------------------------------------------ when

    def _next(self, fault: Fault, times: Iterator[Occurrence]) -> None:
        occurrence = next(times, None)
        if occurrence is None:
            return
        at_s = max(occurrence.at_s, self._world.clock.now)
        if fault.recurs:
            self._world.clock.watch(instant(at_s), _FAULT, lambda: self._occur(fault, occurrence, times))
        else:
            self._call(at_s, lambda: self._occur(fault, occurrence, times))

    def _call(self, at_s: float, what: Callable[[], None], order: int = _FAULT) -> None:
        self._pending += 1

        def act() -> None:
            self._pending -= 1
            what()

        self._world.call(instant(at_s), order, act)

    def _occur(self, fault: Fault, occurrence: Occurrence, times: Iterator[Occurrence]) -> None:
        world = self._world
        entry = Entry(fault=fault.name, kind=fault.kind, at_s=world.clock.now)
        if fault.recurs and world.clock.waiting <= self._pending + world.starts.events + world.idle_timers:
            return  # nothing else is going to happen: the run is over
        self.timeline.append(entry)
        entry.why_not = self._perform(fault, occurrence, entry)
        if fault.recurs:
            self._next(fault, times)

    def _until(self, occurrence: Occurrence, entry: Entry, what: Callable[[], None], order: int = _FAULT) -> None:
        """Undo at the end of the fault, if it has one."""

        def over() -> None:
            entry.over_s = self._world.clock.now
            what()

        if occurrence.until_s is not None:
            self._call(occurrence.until_s, over, order)

    def _until_steps_end(self, occurrence: Occurrence, entry: Entry, what: Callable[[], None]) -> None:
        """The same for a partition: steps that end at that instant are still withheld, and all arrives behind them."""
        self._until(occurrence, entry, what, _TRANSFER_DONE)

    # ------------------------------------------------------------ what

    def _perform(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        """Do it; returns why not where there is nothing to do it to."""
        if fault.kind == "client_disconnect":
            return self._disconnect(fault, entry)
        if fault.kind == "load_surge":
            self._until(occurrence, entry, lambda: None)
            return None  # the demand has it already
        if fault.kind == "discovery_down":
            return self._store_down(fault, occurrence, entry)
        if fault.link is not None or fault.kind == "tcp_fallback":
            return self._slow_link(fault, occurrence, entry)
        if fault.between is not None:
            return self._part(fault, occurrence, entry)
        if fault.tier is not None:
            return self._tier(fault, occurrence, entry)
        worker = self._target(fault, occurrence)
        if worker is None:
            wanted = "is down" if fault.kind == "worker_up" else "is up"
            return f"no worker of {fault.worker or fault.role!r} {wanted}"
        entry.target = self._names[worker.worker_id]
        _PERFORM[fault.kind](self, fault, occurrence, entry, worker)
        return None

    def _target(self, fault: Fault, occurrence: Occurrence) -> MockWorker | None:
        """The worker that it happens to: by name, or drawn among those that it can happen to."""
        world = self._world
        fits = [
            worker
            for _, worker in sorted(world.workers.items())
            if self._can(fault, worker) and self._is_meant(fault, world.specs[worker.worker_id])
        ]
        if not fits:
            return None
        by_name = {self._names[worker.worker_id]: worker for worker in fits}
        return by_name[chosen(occurrence, list(by_name))]

    def _can(self, fault: Fault, worker: MockWorker) -> bool:
        kind, starts = fault.kind, worker.worker_id in self._world.starts
        if kind == "worker_up":
            return worker.down and not starts
        if kind == "worker_down" and starts:
            return fault.worker == self._names[worker.worker_id]  # on its way up: only if it is meant by name
        stays = kind not in ("drain", "worker_hang", "partition")
        if kind == "undrain":
            return worker.worker_id in self._world.churn.draining and not worker.down
        if kind == "drain" and worker.worker_id in self._world.churn.draining:
            return fault.worker == self._names[worker.worker_id]  # a second signal is meant for one by name
        churn, lone = self._world.churn, self._world.partitions.is_cut_off(worker.worker_id)
        if not stays and (worker.hung or lone or worker.worker_id in churn.draining):
            return False
        return not worker.down

    def _down(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        self._expect(occurrence, worker, self._world.specs[worker.worker_id].startup_s)
        if worker.worker_id in self._world.starts:
            self._world.starts.break_off(worker.worker_id)
        else:
            by_lease = fault.detection_delay_s is None and fault.detect == "lease"
            delay_s = None if by_lease else self._delay_s(fault)
            self._world.churn.lose(worker.worker_id, "disconnected", delay_s, entry.loss)
            if by_lease:
                self._until_lease_ends(worker, lambda: self._world.churn.detect(worker, "its lease ended"))
        if occurrence.until_s is not None:
            self._call(occurrence.until_s, lambda: self._start(entry, worker))

    def _until_lease_ends(self, worker: MockWorker, then: Callable[[], None]) -> None:
        """A worker is not heard of from now on: something happens when its lease ends, which it does not while the
        store of leases is down."""
        leases, worker_id = self._leases, worker.worker_id
        leases.beat(worker_id, self._world.clock.now)

        def judge() -> None:
            if self._world.workers[worker_id] is not worker or worker.fenced:
                return  # somebody else is there, or it is known already
            ends_s = leases.ends_s(worker_id)
            if ends_s is None:
                assert self._world.churn.outage is not None
                self._world.churn.outage.append(judge)
            elif instant(ends_s) > self._world.clock.now:
                self._call(ends_s, judge)
            else:
                then()

        judge()

    def _store_down(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        """The store of leases is down: nobody is removed, and nobody is added."""
        churn = self._world.churn
        if churn.outage is not None:
            return "the store is down already"
        churn.outage = []
        self._leases.store_down()

        def back() -> None:
            waiting, churn.outage = churn.outage or [], None
            self._leases.store_up(self._world.clock.now)
            for what in waiting:
                what()

        self._until(occurrence, entry, back)
        return None

    def _delay_s(self, fault: Fault) -> float | None:
        if fault.detection_delay_s is not None:
            return fault.detection_delay_s
        if fault.detect == "silent":
            return None
        return self._detection.lease_s if fault.detect == "lease" else self._detection.disconnect_s

    def _start(self, entry: Entry, worker: MockWorker) -> None:
        """A worker that is down starts again, and is there when that is over."""
        world, worker_id = self._world, worker.worker_id
        spec = world.specs[worker_id]

        def back() -> None:
            entry.over_s = world.clock.now
            world.churn.restore(worker_id)

        if world.workers[worker_id] is worker and worker.down and worker_id not in world.starts:
            world.starts.begin(worker_id, spec.startup_s, back)
        else:
            entry.over_s = world.clock.now  # somebody else has seen to it

    def _up(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        spec = self._world.specs[worker.worker_id]
        if spec.startup_s or spec.weights is not None:
            self._world.churn.expect(worker.worker_id, instant(self._world.clock.now + spec.startup_s))
            self._start(entry, worker)
        else:
            entry.over_s = self._world.clock.now
            self._world.churn.restore(worker.worker_id)

    def _hang(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        """It stops where it is; who waits too long for an answer takes it for lost, and it comes back empty."""
        churn = self._world.churn
        delay_s = fault.detection_delay_s if fault.detection_delay_s is not None else self._detection.inactivity_s
        churn.hang(worker)

        def give_up() -> None:
            if worker.hung and not worker.down:
                why = f"no answer for {delay_s:g} s"
                churn.lose(worker.worker_id, why, 0.0, entry.loss, LossCause.RESPONSE_TIMEOUT)

        def over() -> None:
            if worker.down:
                if self._world.workers[worker.worker_id] is worker:
                    churn.restore(worker.worker_id)
            elif worker.hung:
                worker.resume()

        self._call(self._world.clock.now + delay_s, give_up)
        self._expect(occurrence, worker)
        self._until(occurrence, entry, over)

    def _cut_off(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        """Nothing reaches it and nothing comes from it; it works on. Who does not hear of it takes it for lost."""
        world, name = self._world, f"{fault.index}.{occurrence.n}"
        delay_s, since_s = self._delay_s(fault), world.clock.now
        world.partitions.cut_off(name, worker)

        def give_up() -> None:
            if name in world.wires.parts and not worker.down:
                silent_s = world.clock.now - since_s
                world.churn.take_for_lost(worker, f"cut off, and not heard of for {silent_s:g} s", entry.loss)

        if fault.detection_delay_s is None and fault.detect == "lease":
            self._until_lease_ends(worker, give_up)
        elif delay_s is not None:
            self._call(world.clock.now + delay_s, give_up)
        self._expect(occurrence, worker)
        self._until_steps_end(occurrence, entry, lambda: world.partitions.reconnect(name, worker.worker_id))

    def _part(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        """Two sets of workers do not reach each other for a while."""
        partitions, name = self._world.partitions, f"{fault.index}.{occurrence.n}"
        some, rest = self._two_sets(fault)
        entry.target = _two_sides(fault)
        partitions.part(name, some, rest)
        self._until_steps_end(occurrence, entry, lambda: partitions.join(name))
        return None

    def _two_sets(self, fault: Fault) -> tuple[frozenset[WorkerId], frozenset[WorkerId]]:
        """The two sets of workers of a partition between workers."""
        assert fault.between is not None
        if self._world.handoffs is None:
            raise ConfigError(
                f"{fault.where}: between has no effect: no worker of this run sends anything to another one; "
                "cut workers off from all with worker = or role ="
            )
        some, rest = (self._members(fault, names) for names in fault.between)
        if some & rest:
            both = ", ".join(self._names[worker_id] for worker_id in sorted(some & rest))
            raise ConfigError(f"{fault.where}: between: {both} is on both sides")
        return some, rest

    def _members(self, fault: Fault, names: tuple[str, ...]) -> frozenset[WorkerId]:
        found: set[WorkerId] = set()
        for name in names:
            ids = {worker_id for worker_id, spec in self._world.specs.items() if spec.role.value == name}
            if name in self._ids:
                ids = {self._ids[name]}
            if not ids:
                some = ", ".join(list(self._ids)[:8])
                raise ConfigError(f"{fault.where}: between: no worker has the name or role {name!r}; there are {some}")
            found |= ids
        return frozenset(found)

    def _slow(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        world = self._world
        usual = world.specs[worker.worker_id].latency
        world.churn.pace(worker, Slowed(usual, fault.factor))
        self._until(occurrence, entry, lambda: None if worker.down else world.churn.pace(worker, usual))

    def _drain(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        churn = self._world.churn
        usual = churn.rules or DrainRules(grace_s=0.0, timeout_s=None)
        self._expect(occurrence, worker, self._world.specs[worker.worker_id].startup_s)
        rules = DrainRules(
            grace_s=usual.grace_s if fault.grace_s is None else fault.grace_s,
            timeout_s=usual.timeout_s if fault.timeout_s is None else fault.timeout_s,
        )
        churn.drain(worker.worker_id, rules, entry.loss, fault.known_after_s)
        self._return_when_gone(occurrence, entry, worker)

    def _undrain(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        self._world.churn.recall(worker.worker_id)
        entry.over_s = self._world.clock.now

    def _return_when_gone(self, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        """A drained worker comes back at its time, or when it has left, whichever is later."""

        def begin() -> None:
            if worker.down:
                self._start(entry, worker)
            else:
                self._world.churn.when_gone[worker.worker_id] = begin

        if occurrence.until_s is not None:
            self._call(occurrence.until_s, begin)

    def _expect(self, occurrence: Occurrence, worker: MockWorker, startup_s: float = 0.0) -> None:
        """It takes new work again so long after the end of the fault, at the earliest."""
        if occurrence.until_s is not None:
            self._world.churn.expect(worker.worker_id, instant(occurrence.until_s + startup_s))

    def _events(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        """KV events of a worker are lost or late for a while; draws count its messages."""
        upset, name = self._world.churn.upset(worker.worker_id), f"{fault.index}.{occurrence.n}"
        if fault.kind == "event_loss":
            rate = fault.rate or 0.0
            sent = iter(range(2**62))
            upset.losses[name] = lambda: draw(self._seed, "event_loss", name, next(sent)) < rate
        else:
            upset.delays_s[name] = fault.delay_s
        self._until(occurrence, entry, lambda: upset.over(name))

    def _stale(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        upset, name = self._world.churn.upset(worker.worker_id), f"{fault.index}.{occurrence.n}"
        upset.silent.add(name)
        self._until(occurrence, entry, lambda: upset.over(name))

    def _errors(self, fault: Fault, occurrence: Occurrence, entry: Entry, worker: MockWorker) -> None:
        """A worker fails a share of what reaches it; draws belong to the request and its attempt."""
        failing, name = self._world.churn.failing, f"{fault.index}.{occurrence.n}"
        rate = 1.0 if fault.rate is None else fault.rate
        worker_id = worker.worker_id

        def fails(request: OpenRequest) -> bool:
            return draw(self._seed, f"engine_error {name}", request.request_id, request.migrations) < rate

        failing.setdefault(worker_id, {})[name] = fails

        def over() -> None:
            failing[worker_id].pop(name, None)
            if not failing[worker_id]:
                del failing[worker_id]

        self._until(occurrence, entry, over)

    def _slow_link(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        network, link = self._network, fault.link or ALL_LINKS
        assert network is not None
        entry.target = link
        factor = {"link_down": 0.0, "tcp_fallback": TCP_SHARE}.get(fault.kind, fault.factor)
        network.slow(link, factor)
        self._until(occurrence, entry, lambda: network.slow(link, 1.0))
        return None

    def _tier(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        """A tier of one worker, or of all of them, vanishes, takes no writes, or hands out damaged blocks."""
        tiers, tier = self._world.block_tiers, Tier(fault.tier)
        assert tiers is not None
        lanes = {self._names[worker_id]: lane for worker_id, lane in tiers.up.items() if lane.has(tier)}
        name = chosen(occurrence, list(lanes)) if fault.worker == ANY and lanes else fault.worker
        entry.target = tier.value if name is None else f"{tier.value} of {name}"
        hit = [lane for known, lane in lanes.items() if name in (None, known)]
        if not hit:
            return f"no worker{'' if name is None else f' {name}'} that is up has a tier {tier.value}"
        for lane in hit:
            lane.break_tier(tier, fault.kind, fault.rate)

        def mend() -> None:
            for lane in hit:
                lane.mend_tier(tier, fault.kind)

        self._until(occurrence, entry, mend)
        return None

    # ------------------------------------------------------------ clients

    def _disconnect(self, fault: Fault, entry: Entry) -> str | None:
        assert fault.row is not None
        entry.target = f"row {fault.row}"
        request_id = self._rows.get(fault.row)
        if request_id is None:
            return "the request had not arrived"
        if not self._world.churn.cancel(request_id):
            return "the request had ended"
        return None

    def _note_row(self, row: int, request_id: RequestId) -> None:
        self._rows[row] = request_id

    def _leaver(self, fault: Fault) -> Callable[[int, RequestId], None]:
        """A share of all clients leaves, each within a drawn time after its arrival."""
        assert fault.rate is not None
        rate, name = fault.rate, f"leave {fault.index}"

        def arrived(row: int, request_id: RequestId) -> None:
            if draw(self._seed, name, str(row), 0) < rate:
                wait_s = fault.within_s * draw(self._seed, name, str(row), 1)
                self._call(self._world.clock.now + wait_s, lambda: self._leave(fault, row, request_id))

        return arrived

    def _leave(self, fault: Fault, row: int, request_id: RequestId) -> None:
        entry = Entry(fault=fault.name, kind=fault.kind, at_s=self._world.clock.now, target=f"row {row}")
        request = self._world.open.get(request_id)
        if request is not None and request.row.row == row:
            self._world.churn.cancel(request_id)
            self.timeline.append(entry)


def _check_link(network: Network, link: str, where: str) -> None:
    """Refuse a link that is not there before anything runs."""
    try:
        network.lanes_of(link)
    except ConfigError as why:
        raise ConfigError(f"{where}: {why}") from None


def _whom(fault: Fault) -> str:
    """The workers that a fault may happen to, in words."""
    if fault.role is not None:
        return f"{fault.role} workers"
    return "the workers" if fault.worker == ANY else str(fault.worker)


def _two_sides(fault: Fault) -> str:
    """Who is cut off from whom, as a line says it."""
    assert fault.between is not None
    return " and ".join(", ".join(names) for names in fault.between)


def _to_the_end(what: str, names: tuple[str, ...], one: str, several: str) -> str:
    """Names of what stays broken, three at most; empty where there are none."""
    if not names:
        return ""
    if len(names) == 1:
        return f"{what} {names[0]} {one} to the end of the run"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}s {', '.join(names[:3])}{more} {several} to the end of the run"


_Performer = Callable[[Faults, Fault, Occurrence, Entry, MockWorker], None]
_PERFORM: Mapping[str, _Performer] = {
    "worker_down": Faults._down,
    "worker_up": Faults._up,
    "worker_hang": Faults._hang,
    "partition": Faults._cut_off,
    "worker_slow": Faults._slow,
    "drain": Faults._drain,
    "undrain": Faults._undrain,
    "engine_error": Faults._errors,
    "event_loss": Faults._events,
    "event_delay": Faults._events,
    "report_stale": Faults._stale,
}


def worker_ids(scenario: Scenario, specs: Mapping[WorkerId, WorkerSpec]) -> dict[str, WorkerId]:
    """The scenario's names of workers: its own list in order of id, else the names that workers have."""
    if scenario.workers is None:
        named = {spec.name: worker_id for worker_id, spec in specs.items()}
    elif len(scenario.workers) != len(specs):
        raise ConfigError(
            f"{scenario.path}: names {len(scenario.workers)} workers, the run has {len(specs)}; "
            "let both be the same, or leave workers out and use the names that they have"
        )
    else:
        named = dict(zip(scenario.workers, sorted(specs), strict=True))
    for fault in scenario.faults:
        if fault.worker not in (None, ANY) and fault.worker not in named:
            some = ", ".join(list(named)[:8])
            raise ConfigError(f"{fault.where}: worker = {fault.worker!r}: no such worker; there are {some}")
    return named
