"""Whether an estimate keeps the limits, how surely, and by how much it misses them.

A figure that is missing or not a number never keeps a limit. A mean says nothing of a percentile, so a percentile limit
is not judged by an estimate that knows means alone; `screened` then compares the mean, and is a hint for choosing what
to simulate, never a verdict.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from aiconfig.bands import band_of
from aiconfig.estimate import CLOSED_FORM, MEASURED, Band, Estimate
from policies.frozen import frozen
from reports.sla import Sla, Slo

Verdict = Literal["meets", "likely", "unlikely", "fails", "not judged"]

VERDICTS: Final[tuple[Verdict, ...]] = ("meets", "likely", "not judged", "unlikely", "fails")
"""Best first: kept even if the estimate is as wrong as nine in ten are at most; kept as estimated; not known; missed,
but within that error; missed even then. Where that error is not known, nothing is called certain. What the path
outside the engine took where the error was measured is part of it."""

MEASUREMENT: Final = Band(typical=0.0, wide=0.0, level=MEASURED)
KEPT: Final[tuple[Verdict, ...]] = ("meets", "likely")


@frozen
class LimitVerdict:
    """One limit. `excess`: how far beyond the limit the figure is, relative to the limit (below 0: inside); infinite
    where the figure is missing, None where it is not judged."""

    slo: Slo
    value: float | None
    verdict: Verdict
    excess: float | None


@frozen
class Judgement:
    """All limits of one estimate, the worst of which is the `verdict`; without limits everything meets them."""

    verdict: Verdict
    limits: tuple[LimitVerdict, ...]

    @property
    def kept(self) -> bool:
        """Whether no limit is broken by the estimate, and none was left unjudged."""
        return self.verdict in KEPT

    @property
    def distance(self) -> float | None:
        """Worst relative excess over any limit, 0 if all are kept; None if one is not judged."""
        excesses = [limit.excess for limit in self.limits]
        if any(excess is None for excess in excesses):
            return None
        return max((max(0.0, excess) for excess in excesses if excess is not None), default=0.0)

    @property
    def binding(self) -> LimitVerdict | None:
        """The limit that is the furthest exceeded, or the nearest to being so; the first of equals."""
        judged = [limit for limit in self.limits if limit.excess is not None]
        return max(judged, key=lambda limit: limit.excess or 0.0, default=None)


def judge(estimate: Estimate, sla: Sla | None) -> Judgement:
    """The verdict on every limit of `sla`."""
    limits = tuple(_limit(estimate, slo) for slo in sla.slos) if sla is not None else ()
    verdict = max((limit.verdict for limit in limits), key=VERDICTS.index, default=VERDICTS[0])
    return Judgement(verdict=verdict, limits=limits)


def screened(estimate: Estimate, sla: Sla | None) -> Judgement:
    """The same with the mean in place of each percentile that is not known, and without limits on goodput. What fails
    here would have to be better at the tail than on average; what passes is no verdict."""
    if sla is None or estimate.level != CLOSED_FORM:
        return judge(estimate, sla)
    limits = tuple(
        _compared(estimate, slo, estimate.value(slo.metric, "mean")) for slo in sla.slos if slo.statistic is not None
    )
    verdict = max((limit.verdict for limit in limits), key=VERDICTS.index, default=VERDICTS[0])
    return Judgement(verdict=verdict, limits=limits)


def excess(slo: Slo, value: float | None) -> float:
    """How far beyond the limit a value is, relative to the limit; equal is 0."""
    if value is None or math.isnan(value):
        return math.inf
    if slo.holds(value):
        return min(0.0, _beyond(slo, value))
    return _beyond(slo, value)


def _beyond(slo: Slo, value: float) -> float:
    if slo.upper:
        return value / slo.limit - 1.0
    return slo.limit / value - 1.0 if value > 0.0 else math.inf


def _limit(estimate: Estimate, slo: Slo) -> LimitVerdict:
    if estimate.level == CLOSED_FORM and slo.statistic != "mean":
        return LimitVerdict(slo=slo, value=None, verdict="not judged", excess=None)
    return _compared(estimate, slo, _value(estimate, slo))


def _value(estimate: Estimate, slo: Slo) -> float | None:
    """The figure that the limit is about."""
    if slo.statistic is not None:
        return estimate.value(slo.metric, slo.statistic)
    share = estimate.goodput_share
    return share if slo.unit == "share" or share is None else share * estimate.requests_per_s


def _compared(estimate: Estimate, slo: Slo, value: float | None) -> LimitVerdict:
    beyond = excess(slo, value)
    verdict: Verdict
    if math.isinf(beyond) or value is None:
        verdict = "fails"
    else:
        verdict = _sure(slo, value, MEASUREMENT if estimate.level == MEASURED else _band(estimate, slo))
    return LimitVerdict(slo=slo, value=value, verdict=verdict, excess=beyond)


def _band(estimate: Estimate, slo: Slo) -> Band | None:
    """None as well where the band was not measured: beyond its range."""
    return None if estimate.beyond else band_of(estimate, slo.metric)


def _sure(slo: Slo, value: float, band: Band | None) -> Verdict:
    """What lies outside the engine counts against a limit that is kept, and not for one that is missed."""
    known = band is not None and band.wide is not None
    wide, outside_s = (band.wide or 0.0, band.outside_s) if band is not None else (0.0, 0.0)
    if slo.holds(value):
        return "meets" if known and slo.holds(_at_worst(slo, value + outside_s, wide)) else "likely"
    return "fails" if known and not slo.holds(_at_best(slo, value, wide)) else "unlikely"


def _at_worst(slo: Slo, value: float, error: float) -> float:
    """What a measurement may be whose prediction is off by `error` of it; speeds are off as times are."""
    if not slo.upper:
        return value * max(0.0, 1.0 - error)
    return value / (1.0 - error) if error < 1.0 else math.inf


def _at_best(slo: Slo, value: float, error: float) -> float:
    return value / (1.0 + error) if slo.upper else value * (1.0 + error)
