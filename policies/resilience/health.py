"""Whether a worker answers: a canary when it has been silent, and a fence while it does not.

A worker that says nothing for a while gets a request of one token past all queues. No answer in time: it gets no new
work, and what runs there goes on; the next answer, or anything else that it says, lifts that. Who is lost is decided
elsewhere, and an answer counts only for the worker that was asked: another epoch is another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.cluster.actions import Action, Fence, Probe, SetTimer, Unfence
from policies.cluster.events import Event, ProbeEnded, TimerFired, WorkerHeard, WorkerLost, WorkerUp
from policies.cluster.ids import FenceCause, ProbeResult, WorkerId
from policies.cluster.state import ClusterView
from policies.errors import ConfigError
from policies.frozen import frozen

_TIMER = "canary "


@frozen
class CanarySettings:
    """A canary after `idle_s` of silence; its answer must come within `timeout_s`."""

    idle_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        if self.idle_s <= 0:
            raise ConfigError(f"canary_idle_s is {self.idle_s}, it must be more than 0 to send canaries")
        if self.timeout_s <= 0:
            raise ConfigError(f"canary_timeout_s is {self.timeout_s}, it must be more than 0")


@dataclass(slots=True)
class _Patient:
    """One worker as this policy knows it."""

    epoch: int
    ready: bool = True


class Canaries:
    """Asks silent workers, fences those that do not answer, and lifts the fence when they do.

    Counters: `canary_<result>` by answer (`ok`, `overloaded`, `silent`), `canary_stale` answers of an earlier epoch,
    `canary_fenced` and `canary_restored` workers.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {WorkerUp, WorkerLost, WorkerHeard, ProbeEnded, TimerFired}
    )

    def __init__(self, settings: CanarySettings) -> None:
        self.settings = settings
        self._known: dict[WorkerId, _Patient] = {}
        self._counts: dict[str, int] = {}

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return dict(sorted(self._counts.items()))

    def is_ready(self, worker_id: WorkerId) -> bool:
        """Whether a worker is known and answered when it was last asked."""
        known = self._known.get(worker_id)
        return known is not None and known.ready

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        match event:
            case WorkerUp():
                self._known[event.worker_id] = _Patient(event.epoch)
                return (self._again(event.worker_id, event.at_s),)
            case WorkerLost():
                self._known.pop(event.worker_id, None)
            case TimerFired() if event.name.startswith(_TIMER):
                return self._ask(WorkerId(int(event.name.removeprefix(_TIMER))))
            case WorkerHeard():
                return self._heard(event.worker_id, event.epoch, event.last_s)
            case ProbeEnded():
                return self._answered(event)
        return ()

    def _ask(self, worker_id: WorkerId) -> Sequence[Action]:
        known = self._known.get(worker_id)
        if known is None:
            return ()
        settings = self.settings
        return (
            Probe(
                worker_id=worker_id,
                epoch=known.epoch,
                idle_s=settings.idle_s,
                timeout_s=settings.timeout_s,
                reason=f"nothing heard for {settings.idle_s:g} s?",
            ),
        )

    def _answered(self, event: ProbeEnded) -> Sequence[Action]:
        known = self._known.get(event.worker_id)
        if known is None or known.epoch != event.epoch:
            self._count("stale")
            return ()
        self._count(event.result.value)
        if event.result is not ProbeResult.SILENT:
            return self._heard(event.worker_id, event.epoch, event.at_s)
        again = self._again(event.worker_id, event.at_s)
        if not known.ready:
            return (again,)
        known.ready = False
        self._count("fenced")
        why = f"no answer to a canary in {self.settings.timeout_s:g} s"
        return (Fence(worker_id=event.worker_id, cause=FenceCause.CANARY, reason=why), again)

    def _heard(self, worker_id: WorkerId, epoch: int, last_s: float) -> Sequence[Action]:
        """It said something good, as of `last_s`."""
        known = self._known.get(worker_id)
        if known is None or known.epoch != epoch:
            return ()
        again = self._again(worker_id, last_s)
        if known.ready:
            return (again,)
        known.ready = True
        self._count("restored")
        return (Unfence(worker_id=worker_id, cause=FenceCause.CANARY, reason="it answers"), again)

    def _again(self, worker_id: WorkerId, since_s: float) -> SetTimer:
        due_s = since_s + self.settings.idle_s
        return SetTimer(name=f"{_TIMER}{worker_id}", due_s=due_s, background=True, reason="silent until then?")

    def _count(self, what: str) -> None:
        self._counts[f"canary_{what}"] = self._counts.get(f"canary_{what}", 0) + 1
