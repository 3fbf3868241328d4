"""Performs a scenario on a simulated world: each fault at its instant, before everything else that happens then.

It keeps the timeline: what was done to whom, when the cluster knew, when it was over, which requests it touched and how
these ended. It decides nothing about requests; a fault that finds nothing to act on is noted, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from policies.cluster.ids import RequestId
from policies.errors import CapabilityError, ConfigError
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.faults import clients, held_up, links, messages, reach, routers, starts, store, workers
from twin.mocker.faults.stage import Detection, Entry, Stage
from twin.mocker.worker import MockWorker
from twin.scenario.kinds import CLIENTS
from twin.scenario.model import Fault, Occurrence, Scenario
from twin.scenario.times import chosen, occurrences

if TYPE_CHECKING:
    from twin.mocker.links import Network
    from twin.mocker.world import MockWorld

_FAULT = int(Order.FAULT)

ON_WORKER: Mapping[str, workers.OnWorker] = {
    **workers.ON_WORKER,
    **messages.ON_WORKER,
    "partition": reach.cut_off,
    "clock_skew": store.skew,
}
"""Kinds that happen to one worker."""

Performer = Callable[[Stage, Fault, Occurrence, Entry], str | None]


def _surge(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    stage.until(occurrence, entry, lambda: None)
    return None  # the demand has it already


AT_LARGE: Mapping[str, Performer] = {
    "load_surge": _surge,
    "discovery_down": store.down,
    "discovery_flap": store.flap,
    **dict.fromkeys(("start_fail", "start_slow"), starts.hinder),
    **dict.fromkeys(("index_restart", "router_restart"), routers.lose),
    "busy_thresholds": routers.set_limits,
    **dict.fromkeys(("link_slow", "link_down", "tcp_fallback"), links.slow),
    **dict.fromkeys(("tier_down", "tier_full", "tier_corrupt"), links.break_tier),
}
"""Kinds that happen to no single worker; each returns why nothing was done, where nothing was."""


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
        routers: int = 1,
        no_links: str = "this run has no links; give it a topology, or leave the fault out",
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._stage = stage = Stage(world, scenario, seed=seed, detection=detection, network=network, routers=routers)
        for fault in scenario.faults:
            _check(stage, fault, no_links)

    @property
    def timeline(self) -> list[Entry]:
        return self._stage.timeline

    def start(self) -> None:
        """Put the first occurrence of every fault on the clock."""
        world, stage = self._world, self._stage
        world.stuck = lambda: held_up.stuck(stage)
        for fault in self._scenario.faults:
            if fault.kind == "client_slow_reader":
                world.churn.on_arrival.append(clients.slow_reader(stage, fault))
                continue
            if fault.rate is not None and fault.kind == "client_disconnect":
                world.churn.on_arrival.append(clients.leaver(stage, fault))
                continue
            self._next(fault, occurrences(fault, stage.seed))
        if any(fault.row is not None for fault in self._scenario.faults):
            world.churn.on_arrival.append(self._note_row)
        first = self._scenario.first_worker
        if first is not None:
            world.churn.pins[0] = stage.ids[first]

    def _note_row(self, row: int, request_id: RequestId) -> None:
        self._stage.rows[row] = request_id

    def never_applied(self, end_s: float) -> list[str]:
        """Faults that did nothing in the whole run, or only after its last request had ended at `end_s`."""
        rows, found = self._stage.rows, []
        for fault in self._scenario.faults:
            if fault.kind in CLIENTS and fault.rate is not None:
                continue
            entries = [entry for entry in self.timeline if entry.fault == fault.name]
            if any(entry.why_not is None and entry.at_s <= end_s for entry in entries):
                continue
            if fault.recurs and not entries:
                continue  # none was drawn before the end
            at_s = entries[0].at_s if entries else fault.at_s
            if fault.row is not None and fault.row not in rows:
                found.append(f"{fault.name}: there is no row {fault.row}: the run had {len(rows)} requests")
                continue
            why = entries[0].why_not if entries and entries[0].why_not else f"the run ended at {end_s:g} s"
            found.append(f"{fault.name}: {fault.kind} at {at_s:g} s was never applied: {why}")
        return found

    def slow_links(self) -> list[str]:
        """Which link was the fullest while links were slow; called when the run is over."""
        for what in self._stage.at_end:
            what()
        return links.told(self.timeline)

    def without_effect(self) -> list[str]:
        """Faults that can change nothing in this run: what they upset is not said, or nobody listens."""
        found = []
        for fault in self._scenario.faults:
            why = messages.without_effect(self._stage, fault)
            if why is not None:
                found.append(f"{fault.name}: {fault.kind} has no effect: {why}")
        return found

    # ------------------------------------------------------------ when

    def _next(self, fault: Fault, times: Iterator[Occurrence]) -> None:
        occurrence = next(times, None)
        if occurrence is None:
            return
        at_s = max(occurrence.at_s, self._stage.now_s)
        if fault.recurs:
            self._world.clock.watch(instant(at_s), _FAULT, lambda: self._occur(fault, occurrence, times))
        else:
            self._stage.call(at_s, lambda: self._occur(fault, occurrence, times))

    def _occur(self, fault: Fault, occurrence: Occurrence, times: Iterator[Occurrence]) -> None:
        entry = Entry(fault=fault.name, kind=fault.kind, at_s=self._stage.now_s)
        if fault.recurs and self._stage.is_quiet:
            return  # nothing else is going to happen: the run is over
        self.timeline.append(entry)
        entry.why_not = self._perform(fault, occurrence, entry)
        if fault.recurs:
            self._next(fault, times)

    # ------------------------------------------------------------ what

    def _perform(self, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
        """Do it; returns why not where there is nothing to do it to."""
        stage = self._stage
        if fault.kind == "client_disconnect":
            return clients.disconnect(stage, fault, entry)
        if fault.between is not None:
            return reach.part(stage, fault, occurrence, entry)
        at_large = AT_LARGE.get(fault.kind)
        if at_large is not None:
            return at_large(stage, fault, occurrence, entry)
        worker = self._target(fault, occurrence)
        if worker is None:
            wanted = "is down" if fault.kind == "worker_up" else "is up"
            return f"no worker of {fault.worker or fault.role!r} {wanted}"
        entry.target = stage.names[worker.worker_id]
        ON_WORKER[fault.kind](stage, fault, occurrence, entry, worker)
        return None

    def _target(self, fault: Fault, occurrence: Occurrence) -> MockWorker | None:
        """The worker that it happens to: by name, or drawn among those that it can happen to."""
        stage, world = self._stage, self._world
        fits = [
            worker
            for worker_id, worker in sorted(world.workers.items())
            if workers.can(stage, fault, worker) and stage.is_meant(fault, world.specs[worker_id])
        ]
        if not fits:
            return None
        by_name = {stage.names[worker.worker_id]: worker for worker in fits}
        return by_name[chosen(occurrence, list(by_name))]


def _check(stage: Stage, fault: Fault, no_links: str) -> None:
    """Refuse, before anything runs, a fault of what this run does not have."""
    world, network = stage.world, stage.network
    if fault.router >= stage.routers:
        raise ConfigError(
            f"{fault.where}: router = {fault.router}: the run has {stage.routers}, numbered from 0 (replicas.count)"
        )
    if network is None and (fault.link is not None or fault.kind == "tcp_fallback"):
        raise CapabilityError(f"{fault.where}: {no_links}")
    roles = sorted({spec.role.value for spec in world.specs.values()})
    if fault.role is not None and fault.role not in roles:
        raise ConfigError(f"{fault.where}: role = {fault.role!r}: no worker has it; there are {', '.join(roles)}")
    if network is not None and fault.link is not None:
        links.check_link(network, fault.link, fault.where)
    if fault.between is not None:
        reach.two_sets(stage, fault)
    if fault.tier is not None and world.block_tiers is None:
        raise CapabilityError(
            f"{fault.where}: no worker of this run has tiers below its device; give it some ([workers.kvbm]), "
            "or leave the fault out"
        )
