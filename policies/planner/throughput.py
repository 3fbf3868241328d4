"""How many workers a forecast needs, with a margin before there are fewer.

    up = ceil(demand / rps)        down = max(ceil(demand / (rps s)), floor)        s: 0.8

Up if up > n, else the lesser of n and down. Rounding up both ways would follow every noise around a whole number, each
time with a cold start (case C18c).
"""

from __future__ import annotations

import math

_EPS = 1e-9


def workers_for(n: int, demand_rps: float, rps: float, sensitivity: float, floor: int) -> int:
    """From `n` workers of `rps` requests a second each, for `demand_rps`."""
    up = needed(demand_rps, rps)
    if up > n:
        return up
    return min(n, max(needed(demand_rps, rps * sensitivity), floor))


def needed(demand_rps: float, rps: float) -> int:
    """Workers whose capacity is no less than the demand; what a rounding error adds is not counted."""
    return math.ceil(demand_rps / rps - _EPS)
