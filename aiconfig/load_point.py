"""The largest load at which a deployment keeps the limits: by bisection, on the closed form or on simulated runs.

It is taken that a higher load never makes a deployment faster, which the closed form has and a simulation has up to
its noise; the loads that were tried are returned, so that nobody has to take it on trust.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

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
TOLERANCE: Final = 1.05
"""How far the load that is found may be below one that breaks a limit."""


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
) -> Searched:
    """Between the largest load that kept the limits and the smallest that broke one, until they are within a twentieth.

    From `start` downwards if it breaks a limit, up to 4 times it if not. `excess` says how far a run is beyond its
    limits (below 0: inside), which tells where to look next; without it loads are halved in their logarithm.
    `simulate` returns None for a load that a run does not survive; that counts as broken.
    """
    made: list[Estimate] = []
    best: Estimate | None = None
    unit, users = _size(start), start.users is not None
    low = high = _UNKNOWN
    share, streak = 1.0, 0
    tried: set[float] = set()
    while len(tried) < runs:
        load = Load(users=max(1, round(unit * share))) if users else Load(rps=unit * share)
        if _size(load) in tried:
            break
        tried.add(_size(load))
        estimate = simulate(load)
        if estimate is not None:
            made.append(estimate)
        beyond = math.nan if estimate is None or excess is None else excess(estimate)
        if estimate is not None and keeps(estimate):
            best, low, streak = estimate, _Edge(share, beyond), max(1, streak + 1)
        else:
            high, streak = _Edge(share, beyond), min(-1, streak - 1)
        if low.share and high.share and high.share / low.share < TOLERANCE:
            break
        share = _next(low, high, streak)
        if share > 4.0:
            break
    return Searched(best=best, runs=tuple(made))


class _Edge(NamedTuple):
    """A share of the start (0: not known), and how far its run was beyond the limits (not a number: not known)."""

    share: float
    excess: float

    @property
    def log(self) -> float:
        """The excess such that a power law of the load is a straight line."""
        return math.log1p(self.excess) if -1.0 < self.excess < math.inf else math.nan


_UNKNOWN: Final = _Edge(0.0, math.nan)


def _next(low: _Edge, high: _Edge, streak: int) -> float:
    """The share to look at; `streak` is how often in a row loads kept the limits (below 0: broke them)."""
    if not high.share:
        steep = math.exp(-low.log / 2.0)  # a latency that rises with the square of the load
        return low.share * (1.3 if math.isnan(steep) else min(max(steep, 1.08), 1.6))
    if not low.share:
        steep = math.exp(-high.log / 2.0)
        # A second miss in a row says that the first guess was too careful.
        return high.share * (0.5 if math.isnan(steep) or high.share < 0.9 else min(max(steep, 0.5), 0.92))
    between = -low.log / (high.log - low.log) if high.log > low.log else math.nan
    part = 0.5 if math.isnan(between) else min(max(between, 0.15), 0.85)
    if streak > 1:  # the edge that stays is far: a law that is steep there draws a straight line too short
        part = max(part, 0.6)
    elif streak < -1:
        part = min(part, 0.4)
    return float(low.share * (high.share / low.share) ** part)


def _size(load: Load) -> float:
    return float(load.users) if load.users is not None else float(load.rps or 0.0)
