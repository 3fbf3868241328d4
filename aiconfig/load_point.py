"""The largest load at which a deployment keeps the limits: by bisection, on the closed form or on simulated runs.

It is taken that a higher load never makes a deployment faster, which the closed form has and a simulation has up to
its noise; the loads that were tried are returned, so that nobody has to take it on trust.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import Estimate, Load
from aiconfig.judge import screened
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
        return estimate is not None and not broken(estimate, sla)

    best = largest if sla is None else largest_that(keeps, 1, largest)
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
) -> Searched:
    """Bisection in the logarithm of the load, from `start` downwards if it breaks a limit, up to 4 times it if not.

    `simulate` returns None for a load that a run does not survive; that counts as broken.
    """
    made: list[Estimate] = []
    best: Estimate | None = None
    unit, users = _size(start), start.users is not None
    low, high = 0.0, 0.0  # shares of the start: kept, broken; 0: not known
    share = 1.0
    tried: set[float] = set()
    while len(tried) < runs:
        load = Load(users=max(1, round(unit * share))) if users else Load(rps=unit * share)
        if _size(load) in tried:
            break
        tried.add(_size(load))
        estimate = simulate(load)
        if estimate is not None:
            made.append(estimate)
        if estimate is not None and keeps(estimate):
            best, low = estimate, share
        else:
            high = share
        if low and high and high / low < 1.05:
            break
        share = _next(low, high)
        if share > 4.0:
            break
    return Searched(best=best, runs=tuple(made))


def _next(low: float, high: float) -> float:
    if not high:
        return low * 1.3
    return high / 2.0 if not low else float((low * high) ** 0.5)


def _size(load: Load) -> float:
    return float(load.users) if load.users is not None else float(load.rps or 0.0)
