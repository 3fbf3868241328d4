"""Whether an open loop keeps up: does the number of requests inside grow while requests come?

Only from arrivals and ends; the warm-up, in which the number grows in every run, is left out. It judges one run and
cannot see a load that is less than its own noise above the capacity.
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


@frozen
class Growth:
    """Requests came at `arrived_rps` and went at `served_rps`, from the middle of the measured arrivals to the last."""

    arrived_rps: float
    served_rps: float
    grows: bool

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
    return Growth(arrived_rps=came / span_s, served_rps=went / span_s, grows=more > limit)


def _within(times_s: F64, from_s: float, to_s: float) -> int:
    return int(((times_s > from_s) & (times_s <= to_s)).sum())
