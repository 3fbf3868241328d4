"""A planner that knows beforehand: so many workers of each role from so many seconds on.

What a forecast-driven planner is measured against (static counts, an oracle), and what plans are simulated with. It
hears nothing of demand and gives no reasons but its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from policies.cluster.actions import Action, SetTimer
from policies.cluster.events import (
    Event,
    TimerFired,
    WorkerDraining,
    WorkerEvent,
    WorkerLost,
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role
from policies.cluster.state import ClusterView
from policies.cluster.ticks import Demand, NotePlan, PlanReason, RoleTick, Tick
from policies.errors import ConfigError
from policies.planner.fleet import Count, Fleet
from policies.planner.settings import PoolSettings

_TIMER = "schedule"
_NOTHING = Demand(kind=None, age_s=None, num_req=None, fed=None, isl=None, osl=None, hit_rate=0.0, accept_length=1.0)


class Step(NamedTuple):
    """From `at_s` on there are to be so many workers of each role."""

    at_s: float
    workers: Mapping[Role, int]


def read_schedule(text: str | None, roles: Sequence[Role]) -> list[Step]:
    """`0 mixed=4, 3600 mixed=8`: from these seconds on, so many workers of each role. Raises ConfigError."""
    where = f"planner.schedule = {text!r}"
    if text is None:
        raise ConfigError('planner.name = schedule needs planner.schedule, as in "0 mixed=4, 3600 mixed=8"')
    known = {role.value: role for role in roles}
    steps = []
    for part in text.split(","):
        at, *counts = part.split() or [""]
        try:
            workers = {known[role]: int(n) for role, _, n in (count.partition("=") for count in counts)}
            step = Step(float(at), workers)
        except (ValueError, KeyError):
            raise ConfigError(
                f"{where}: {part.strip()!r} is no step; write seconds and workers of {', '.join(known)}, as in "
                f'"0 {next(iter(known))}=4"'
            ) from None
        if not (math.isfinite(step.at_s) and step.at_s >= 0) or not workers or min(workers.values()) < 0:
            raise ConfigError(f"{where}: {part.strip()!r}: times and counts are 0 or more, and each step has a count")
        steps.append(step)
    return steps


def written(steps: Iterable[Step]) -> str:
    """Steps as `read_schedule` reads them."""
    return ", ".join(
        f"{step.at_s!r} {' '.join(f'{role.value}={n}' for role, n in step.workers.items())}" for step in steps
    )


class Scheduled:
    """Carries out `steps`, in order of time. `line` says where they come from."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {
            TimerFired,
            WorkerUp,
            WorkerLost,
            WorkerDraining,
            WorkerRecalled,
            WorkerStarting,
            WorkerStartFailed,
            WorkerStartCancelled,
        }
    )

    def __init__(self, steps: Sequence[Step], pools: Sequence[PoolSettings], drain_s: float, line: str) -> None:
        self.line = line
        self._steps = sorted(steps, key=lambda step: step.at_s)
        self._pools = {pool.role: pool for pool in pools}
        self._drain_s = drain_s
        self._fleet = Fleet()
        self._done = 0
        self._begun = False

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, WorkerEvent):
            self._fleet.hear(event, view)
            if isinstance(event, WorkerStartFailed | WorkerStartCancelled):
                self._fleet.start_ended(event.worker_id)
        if not self._begun:
            self._begun = True
            return self._next()
        if isinstance(event, TimerFired) and event.name == _TIMER:
            return self._act(view)
        return ()

    def _next(self) -> list[Action]:
        if self._done >= len(self._steps):
            return []
        due_s = self._steps[self._done].at_s
        return [SetTimer(name=_TIMER, due_s=due_s, background=True, reason=self.line)]

    def _act(self, view: ClusterView) -> list[Action]:
        step = self._steps[self._done]
        self._done += 1
        counts = {role: self._fleet.count(view, role) for role in step.workers}
        targets = {
            role: (n, f"{self.line}: {counts[role].current} to {n}")
            for role, n in step.workers.items()
            if counts[role].current != n
        }
        orders = list(self._fleet.orders(view, targets, self._pools, self._done, self._drain_s))
        tick = Tick(
            number=self._done,
            due=(_TIMER,),
            demand=_NOTHING,
            forecasts=(),
            models=(),
            roles=tuple(_told(role, counts[role], n) for role, n in step.workers.items()),
            gpus=sum((c.current + c.draining) * self._pools[role].gpus for role, c in counts.items()),
            budget=None,
            decision_id=self._done if orders else None,
        )
        return [*orders, NotePlan(tick=tick, reason=self.line), *self._next()]


def _told(role: Role, count: Count, n: int) -> RoleTick:
    reason = PlanReason.NO_CHANGE
    if n != count.current:
        reason = PlanReason.SCALE_UP if n > count.current else PlanReason.SCALE_DOWN
    return RoleTick(
        role=role,
        ready=count.ready,
        pending=count.pending,
        draining=count.draining,
        throughput=None,
        load=None,
        lookahead=None,
        wanted=n,
        bounded=n,
        final=n,
        reason=reason,
    )
