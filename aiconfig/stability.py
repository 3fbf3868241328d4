"""Whether an open loop keeps up: does the number of requests inside grow while requests come?

Only from arrivals and ends. In the time of the first answers the number grows in every run, so growth alone is no proof
in a run that is not much longer than an answer: there later requests must take longer than earlier ones too. It judges
one run and cannot see a load that is less than its own noise above the capacity.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from policies.frozen import frozen
from reports.columns import F64, Columns

SHARE: Final = 0.05
"""Growth of less than this share of the arrivals counts as none."""
DEVIATIONS: Final = 4.0
"""Nor does growth of less than so many standard deviations of the number of Poisson arrivals."""
SLOWER: Final = 1.5
"""Behind a queue that grows the last quarter of the requests takes at least so many times as long as the second."""


@frozen
class Growth:
    """Requests came at `arrived_rps` and went at `served_rps`, from the middle of the measured arrivals to the last.

    `grows`: by more than chance. `slows`: requests of the last quarter of the arrivals also take longer than those of
    the second (those that never end: for ever)."""

    arrived_rps: float
    served_rps: float
    grows: bool
    slows: bool

    @property
    def growth_rps(self) -> float:
        """By how many requests a second the number inside grows."""
        return self.arrived_rps - self.served_rps

    def line(self) -> str:
        """For people."""
        return (
            f"queue grows at {self.growth_rps:.3g} requests/s: {self.arrived_rps:.4g} come and {self.served_rps:.4g} "
            "are served"
        )


def growth(requests: Columns) -> Growth | None:
    """What the measured `requests` (arrival_s, last_token_s) say; None where too little time passed to say anything."""
    arrival_s, end_s = requests.floats("arrival_s"), requests.floats("last_token_s")
    arrived = np.sort(arrival_s[~np.isnan(arrival_s)])
    if len(arrived) < 2:
        return None
    from_s, to_s = float(arrived[len(arrived) // 2]), float(arrived[-1])
    if not to_s > from_s:
        return None
    came, went = _within(arrival_s, from_s, to_s), _within(end_s, from_s, to_s)
    more = came - went
    limit = max(SHARE * came, DEVIATIONS * math.sqrt(came))
    span_s = to_s - from_s
    early_s, late_s = (_mean_time_s(arrival_s, end_s, quarter) for quarter in (1, 3))
    return Growth(
        arrived_rps=came / span_s,
        served_rps=went / span_s,
        grows=more > limit,
        slows=late_s > SLOWER * early_s,
    )


def _mean_time_s(arrival_s: F64, end_s: F64, quarter: int) -> float:
    """Mean time inside of the requests in one quarter of the arrivals (0 to 3), in order of arrival."""
    order = np.argsort(arrival_s, kind="stable")
    mine = order[quarter * len(order) // 4 : (quarter + 1) * len(order) // 4]
    times_s = end_s[mine] - arrival_s[mine]
    return math.inf if np.isnan(times_s).any() or not len(times_s) else float(times_s.mean())


def _within(times_s: F64, from_s: float, to_s: float) -> int:
    return int(((times_s > from_s) & (times_s <= to_s)).sum())
