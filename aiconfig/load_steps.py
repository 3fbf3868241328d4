"""Where to look next for the largest load that keeps the limits, from the runs that were made: a simulated run costs
half a second, so each has to say as much as it can.

Three laws, each where it is the best that is known: the asymptote of a closed loop (`Look.hint`), the straight line
through two loads that broke the limits, and the one between a load that kept them and one that broke them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from policies.frozen import frozen

TOLERANCE: Final = 1.05
"""How far the load that is found may be below one that breaks a limit."""
MOST_TIMES: Final = 4.0
"""Nobody looks further above the first load than so many times it."""
_BELOW: Final = 0.98
"""A law of means is a little too high for a percentile; a load that keeps the limits says more than one that breaks
them by a hair."""


@frozen
class Look:
    """A load that was tried (users or requests a second), whether it kept the limits, and how far beyond the one that
    binds it was, relative to it (below 0: inside; not a number: not known). `hint`: the load at which that limit would
    just be kept, by a law of the queue (not a number: none is known)."""

    size: float
    kept: bool
    excess: float = math.nan
    hint: float = math.nan


def next_size(looks: Sequence[Look], *, whole: bool) -> float | None:
    """The load to try after `looks`, in the order in which they were made; `whole`: a number of users. None where
    nothing more is to be learnt."""
    low = max((look for look in looks if look.kept), key=_size, default=None)
    broke = sorted((look for look in looks if not look.kept and (low is None or look.size > low.size)), key=_size)
    if low is not None and broke and broke[0].size / low.size < TOLERANCE:
        return None
    if not broke:
        assert low is not None
        size = _above(low)
        if size > MOST_TIMES * looks[0].size:
            return None
    else:
        size = _below(broke) if low is None else _between(low, broke, _missed(looks))
    return size if not whole else _whole(size, low, broke)


def _whole(size: float, low: Look | None, broke: Sequence[Look]) -> int | None:
    """The nearest number of users above all that kept the limits and below all that broke them."""
    smallest = 1 if low is None else round(low.size) + 1
    wanted = max(round(size), smallest)
    if broke:
        wanted = min(wanted, round(broke[0].size) - 1)
    return wanted if wanted >= smallest else None


def _size(look: Look) -> float:
    return look.size


def _above(low: Look) -> float:
    """At least so far that the next miss ends it."""
    steep = math.exp(-_log(low) / 2.0)  # a latency that rises with the square of the load
    return low.size * (1.3 if math.isnan(steep) else min(max(steep, 0.99 * TOLERANCE), 1.6))


def _below(broke: Sequence[Look]) -> float:
    high = broke[0]
    law = _line(broke)
    if math.isnan(law):
        law = high.hint
    if math.isnan(law):
        steep = math.exp(-_log(high) / 2.0)
        return high.size * (0.5 if math.isnan(steep) else min(max(steep, 0.5), 0.965))
    return high.size * min(max(_BELOW * law / high.size, 0.5), 0.965)


def _between(low: Look, broke: Sequence[Look], missed: int) -> float:
    """`missed`: how often in a row a load broke the limits; the second time, laws that draw the edge from above have
    been too high, and what is left is shared out."""
    high = broke[0]
    if high.size / low.size < TOLERANCE**2:  # whatever comes of it ends the search
        return math.sqrt(high.size * low.size)
    law = _line(broke)
    if math.isnan(law):
        law = high.hint
    if math.isnan(law) or law <= low.size or missed > 1:  # not known, or a run said otherwise
        rise = _log(high) - _log(low)
        part = -_log(low) / rise if rise > 0.0 else math.nan
        part = 0.5 if math.isnan(part) else min(max(part, 0.15), 0.85)
        return low.size * math.pow(high.size / low.size, min(part, 0.5) if missed > 1 else part)
    return min(max(_BELOW * law, 1.045 * low.size), high.size / 1.045)


def _line(broke: Sequence[Look]) -> float:
    """Where the straight line through the two smallest loads that broke the limits keeps them; not a number if they
    have none. Where latency bends upwards with the load this is too high, if at all."""
    if len(broke) < 2:
        return math.nan
    near, far = broke[:2]
    if not far.excess > near.excess:  # or not known
        return math.nan
    return near.size - near.excess * (far.size - near.size) / (far.excess - near.excess)


def _log(look: Look) -> float:
    """The excess such that a power law of the load is a straight line."""
    return math.log1p(look.excess) if -1.0 < look.excess < math.inf else math.nan


def _missed(looks: Sequence[Look]) -> int:
    count = 0
    for look in reversed(looks):
        if look.kept:
            break
        count += 1
    return count
