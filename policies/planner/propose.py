"""What the two loops say, role by role: the slow one from the forecast, the fast one from the engines.

Each says how many workers, or that it cannot tell and why; nothing is constrained here.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.ids import Role
from policies.cluster.ticks import PlanReason
from policies.frozen import frozen
from policies.planner.capacity import Capacity, Limits, Work, capacity
from policies.planner.fleet import Count
from policies.planner.load import Vote, by_sla, by_thresholds
from policies.planner.samples import Heard
from policies.planner.settings import PlannerSettings
from policies.planner.step_model import StepModel
from policies.planner.throughput import workers_for
from policies.planner.windows import Reading

_NOBODY = Work(isl=1, osl=1)
"""Stands for the average request as long as none has been seen."""


@frozen
class Need:
    """What the slow loop says of a role. `workers` None: it cannot tell, for `hold`."""

    workers: int | None
    hold: PlanReason | None = None
    capacity: Capacity | None = None


def needs(
    settings: PlannerSettings,
    models: Mapping[Role, StepModel],
    reading: Reading,
    work: Work | None,
    demand_rps: float | None,
    now: Mapping[Role, int],
) -> dict[Role, Need]:
    """Workers for a demand in requests per second; `now` is where each role starts from. Where one role cannot tell,
    its partner holds too: half a pipeline serves nobody."""
    if reading.hold is not None:
        return {role: Need(workers=None, hold=reading.hold) for role in now}
    found = {role: _need(settings, models[role], work, demand_rps, role, n, reading) for role, n in now.items()}
    if any(need.workers is None for need in found.values()):
        return {
            role: Need(workers=None, hold=need.hold or PlanReason.PARTNER_NOT_READY, capacity=need.capacity)
            for role, need in found.items()
        }
    return found


def _need(
    settings: PlannerSettings,
    model: StepModel,
    work: Work | None,
    demand_rps: float | None,
    role: Role,
    n: int,
    reading: Reading,
) -> Need:
    pool = settings.pool(role)
    can = None
    cost = model.coefficients
    if cost is not None and work is not None:
        can = capacity(role, cost, pool, work, Limits(ttft_s=settings.ttft_s, itl_s=settings.itl_s))
    if demand_rps is None or (can is None and demand_rps > 0):
        return Need(workers=None, hold=PlanReason.MODEL_NOT_READY)
    rps = can.rps if can is not None else 1.0  # of no demand, any capacity is enough
    workers = workers_for(n, demand_rps, rps, settings.load_scaling_down_sensitivity, pool.min_endpoint)
    return Need(workers=workers if reading.may_shrink else max(workers, n), capacity=can)


def vote(
    settings: PlannerSettings,
    model: StepModel,
    heard: Heard,
    count: Count,
    work: Work | None,
    role: Role,
) -> Vote:
    """What the fast loop says of a role: one more, one less, or as many as there are. It counts in workers that take
    work; what is on its way is added."""
    n, pending = count.ready, count.pending
    engines = heard.engines
    if heard.stale or len({engine.worker_id for engine in engines}) != n:
        return Vote(workers=count.current, reason=PlanReason.WORKER_COUNT_MISMATCH)
    if settings.optimization_target == "sla":
        if model.coefficients is None:
            return Vote(workers=count.current, reason=PlanReason.MODEL_NOT_READY)
        limits = Limits(ttft_s=settings.ttft_s, itl_s=settings.itl_s)
        said = by_sla(
            n,
            engines,
            model.coefficients,
            settings.pool(role),
            work or _NOBODY,
            limits,
            settings.load_scaling_down_sensitivity,
        )
    else:
        said = by_thresholds(n, engines, settings.pool(role), settings.optimization_target)
    return Vote(workers=said.workers + pending, reason=said.reason, ttft_s=said.ttft_s, itl_s=said.itl_s)
