"""What every family of faults works with: the world and its names for workers, the clock, the timeline.

A fault happens before everything else at its instant. Nothing here knows a kind of fault, and what finds nothing to act
on is noted, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from policies.cluster.draws import draw
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.resilience.discovery import Leases
from twin.engine.ticks import instant
from twin.mocker.churn import Loss
from twin.mocker.clock import Order
from twin.mocker.worker import MockWorker
from twin.scenario.model import ANY, Fault, Occurrence, Scenario

if TYPE_CHECKING:
    from twin.mocker.links import Network
    from twin.mocker.world import MockWorld
    from twin.worker_spec import WorkerSpec

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
    fullest_link: str | None = None  # of a fault of links: which lane carried most of what it could while it lasted
    fullest_share: float | None = None
    loss: Loss = field(default_factory=Loss)

    def plain(self) -> dict[str, object]:
        """As a flat table."""
        found: dict[str, object] = asdict(self)
        del found["loss"]
        return found | asdict(self.loss)


@frozen
class Detection:
    """How long it takes to know: of a broken connection, of a lease that ran out, of a worker that says nothing."""

    disconnect_s: float
    lease_s: float
    inactivity_s: float


class Stage:
    """One scenario on one world, for those who perform its faults."""

    def __init__(
        self,
        world: MockWorld,
        scenario: Scenario,
        *,
        seed: int,
        detection: Detection,
        network: Network | None,
        routers: int,
    ) -> None:
        self.world = world
        self.scenario = scenario
        self.seed = scenario.seed if scenario.seed is not None else seed
        self.detection = detection
        self.network = network
        self.routers = routers
        self.leases: Leases[WorkerId] = Leases(detection.lease_s)
        self.ids = worker_ids(scenario, world.specs)
        self.names = {worker_id: name for name, worker_id in self.ids.items()}
        if world.scaling is not None:
            world.scaling.on_new.append(self._meet)
        self.rows: dict[int, RequestId] = {}  # rows that have arrived, where a fault names one
        self.timeline: list[Entry] = []
        self.at_end: list[Callable[[], None]] = []  # called when the run is over, for what has no end of its own
        self.pending = 0  # events of ours on the clock

    def _meet(self, spec: WorkerSpec) -> None:
        """A worker was ordered that the run did not begin with."""
        self.names[spec.worker_id] = spec.name
        self.ids[spec.name] = spec.worker_id

    @property
    def now_s(self) -> float:
        return self.world.clock.now

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is left to happen but faults, starts, and what finds nothing to do."""
        world = self.world
        return world.clock.waiting <= self.pending + world.starts.events + world.idle_timers

    def u(self, purpose: str, name: str, n: int) -> float:
        """The n-th draw of a fault for a purpose."""
        return draw(self.seed, purpose, name, n)

    # ------------------------------------------------------------ when

    def call(self, at_s: float, what: Callable[[], None], order: int = _FAULT) -> None:
        """Let something happen at an instant, before the rest of it unless `order` says otherwise."""
        self.pending += 1

        def act() -> None:
            self.pending -= 1
            what()

        self.world.call(instant(at_s), order, act)

    def until(self, occurrence: Occurrence, entry: Entry, what: Callable[[], None], order: int = _FAULT) -> None:
        """Undo at the end of the fault, if it has one."""

        def over() -> None:
            entry.over_s = self.now_s
            what()

        if occurrence.until_s is not None:
            self.call(occurrence.until_s, over, order)

    def until_steps_end(self, occurrence: Occurrence, entry: Entry, what: Callable[[], None]) -> None:
        """The same for a partition: steps that end at that instant are still withheld, and all arrives behind them."""
        self.until(occurrence, entry, what, _TRANSFER_DONE)

    def expect(self, occurrence: Occurrence, worker: MockWorker, startup_s: float = 0.0) -> None:
        """A worker takes new work again so long after the end of the fault, at the earliest."""
        if occurrence.until_s is not None:
            self.world.churn.expect(worker.worker_id, instant(occurrence.until_s + startup_s))

    def delay_s(self, fault: Fault) -> float | None:
        """Until the cluster knows of a loss; None: it does not hear of it."""
        if fault.detection_delay_s is not None:
            return fault.detection_delay_s
        if fault.detect == "silent":
            return None
        return self.detection.lease_s if fault.detect == "lease" else self.detection.disconnect_s

    # ------------------------------------------------------------ whom

    def is_meant(self, fault: Fault, spec: WorkerSpec) -> bool:
        """Whether a fault may happen to a worker."""
        named = fault.worker in (None, ANY) or self.names.get(spec.worker_id, spec.name) == fault.worker
        return named and fault.role in (None, spec.role.value)


def whom(fault: Fault) -> str:
    """The workers that a fault may happen to, in words."""
    if fault.role is not None:
        return f"{fault.role} workers"
    return "the workers" if fault.worker == ANY else str(fault.worker)


def name_of(fault: Fault, occurrence: Occurrence) -> str:
    """The name of one occurrence of a fault."""
    return f"{fault.index}.{occurrence.n}"


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
