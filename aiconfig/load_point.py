"""The largest load at which a deployment keeps the limits: by bisection, on the closed form or on simulated runs.

It is taken that a higher load never makes a deployment faster, which the closed form has and a simulation has up to
its noise; the loads that were tried are returned, so that nobody has to take it on trust.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import Estimate, Load
from aiconfig.judge import screened
from aiconfig.load_steps import Look, next_size
from aiconfig.memory import Fit
from policies.frozen import frozen
from reports.sla import Sla

RATE_STEPS: Final = 1000
"""Rates are searched in thousandths of the largest one that is served."""
SIMULATED_RUNS: Final = 7
"""Runs of one candidate at most."""


def closed_form_load(
    closed: ClosedForm, candidate: Candidate, fit: Fit, sla: Sla | None
) -> tuple[Load, Estimate] | None:
    """The largest load whose means keep the limits (percentiles: `judge.screened`), with its estimate.

    Without limits: the largest that is served without a queue. None if even the smallest load breaks one.
    """
    most = closed.most(candidate, fit)
    users = closed.workload.arrivals == "closed"
    largest = max(1, int(most.users)) if users else RATE_STEPS - 1

    def load_of(step: int) -> Load:
        return Load(users=step) if users else Load(rps=most.rps * step / RATE_STEPS)

    def keeps(step: int) -> bool:
        estimate = closed.estimate(candidate, load_of(step), fit)
        return estimate is not None and not broken(estimate, sla) and not (closed.strict and estimate.beyond)

    best = largest if sla is None and not closed.strict else largest_that(keeps, 1, largest)
    if best is None:
        return None
    estimate = closed.estimate(candidate, load_of(best), fit)
    assert estimate is not None
    return load_of(best), estimate


def broken(estimate: Estimate, sla: Sla | None) -> bool:
    """Whether an estimate breaks a limit as it stands, percentiles screened by means."""
    return any((limit.excess or 0.0) > 0.0 for limit in screened(estimate, sla).limits)


def largest_that(keeps: Callable[[int], bool], smallest: int, largest: int) -> int | None:
    """The largest whole number for which it holds, if it holds up to some number and not beyond; None if for none."""
    if not keeps(smallest):
        return None
    if keeps(largest):
        return largest
    low, high = smallest, largest  # holds, and does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


@frozen
class Searched:
    """What simulated runs found: the run at the largest load that kept the limits (None: none did), and all runs in
    the order in which they were made."""

    best: Estimate | None
    runs: tuple[Estimate, ...]


def simulated_load(
    simulate: Callable[[Load], Estimate | None],
    start: Load,
    keeps: Callable[[Estimate], bool],
    runs: int = SIMULATED_RUNS,
    excess: Callable[[Estimate], float] | None = None,
    hint: Callable[[Estimate], float] | None = None,
) -> Searched:
    """Between the largest load that kept the limits and the smallest that broke one, until they are within a twentieth.

    From `start` downwards if it breaks a limit, up to 4 times it if not. `excess` says how far a run is beyond its
    limits (below 0: inside), `hint` at which load it would be just inside (`load_steps.Look`), which tells where to
    look next; without them loads are halved in their logarithm.
    `simulate` returns None for a load that a run does not survive; that counts as broken.
    """
    made: list[Estimate] = []
    best: Estimate | None = None
    looks: list[Look] = []
    users = start.users is not None
    size: float | None = _size(start)
    while size is not None and len(looks) < runs:
        load = Load(users=round(size)) if users else Load(rps=size)
        estimate = simulate(load)
        if estimate is None:
            looks.append(Look(size=_size(load), kept=False))
        else:
            made.append(estimate)
            looks.append(
                Look(
                    size=_size(load),
                    kept=keeps(estimate),
                    excess=math.nan if excess is None else excess(estimate),
                    hint=math.nan if hint is None else hint(estimate),
                )
            )
            if looks[-1].kept and (best is None or _size(best.load) < _size(load)):
                best = estimate
        size = next_size(looks, whole=users)
    return Searched(best=best, runs=tuple(made))


def _size(load: Load) -> float:
    return float(load.users) if load.users is not None else float(load.rps or 0.0)
