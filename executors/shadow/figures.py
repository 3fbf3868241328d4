"""Predicted against measured over the last minutes: what the gauges say and the dashboard draws.

One request counts once, when both are known, and falls out of the window `window_s` after it ended live.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from policies.frozen import frozen
from reports.columns import F64
from twin.shadow.facts import Pair

MOST: Final = 4_096
"""Requests that are kept; of more, the latest."""
PER_REQUEST: Final = ("ttft", "tpot", "e2e")
ITL: Final = "itl"
"""The mean gap between tokens of all requests together: those of long answers count for more."""


@frozen
class Spread:
    """Of one metric, in seconds; percentiles where it has a value per request."""

    mean: float
    p50: float | None = None
    p95: float | None = None


@frozen
class Compared:
    """One metric in both worlds. `drift` is the mean predicted over the mean measured (1: they agree), `error` the mean
    difference per request without its sign, over the mean measured; None where that is 0, or not per request."""

    predicted: Spread
    measured: Spread
    drift: float | None
    error: float | None = None


@frozen
class Glance:
    """What the gauges say. `lag_s`: how old the latest news is that was simulated; `delay_s`: how far behind now the
    simulation is, waiting for lengths included. Totals are since the start."""

    up: bool
    why: str
    lag_s: float
    delay_s: float
    compared_total: int
    left_out: Mapping[str, int]
    dropped_total: int
    open: int
    window_requests: int
    window_s: float
    metrics: Mapping[str, Compared]


class _Seen(NamedTuple):
    """A pair, in seconds: when its first token came and its answer ended live, and its figures on both sides."""

    first_s: float
    at_s: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    """NaN where there is one token."""
    e2e: tuple[float, float]
    gaps: tuple[float, float]
    gaps_s: tuple[float, float]


class Window:
    """The pairs of the last `window_s` seconds of the world's clock."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[_Seen] = deque(maxlen=MOST)

    def add(self, pair: Pair) -> None:
        sides = pair.predicted, pair.measured
        tpot = [math.nan if one.tpot_s is None else one.tpot_s for one in sides]
        self._seen.append(
            _Seen(
                first_s=pair.arrival_s + pair.measured.ttft_s,
                at_s=pair.arrival_s + pair.measured.e2e_s,
                ttft=(sides[0].ttft_s, sides[1].ttft_s),
                tpot=(tpot[0], tpot[1]),
                e2e=(sides[0].e2e_s, sides[1].e2e_s),
                gaps=(max(0, sides[0].gaps), max(0, sides[1].gaps)),
                gaps_s=(sides[0].gaps_s, sides[1].gaps_s),
            )
        )

    def count(self, now_s: float) -> int:
        """Requests within the window."""
        return len(self._within(now_s))

    def _within(self, now_s: float) -> list[_Seen]:
        """Pairs come in order of their ends in the simulation, so all are looked at."""
        since_s = now_s - self._window_s
        return [seen for seen in self._seen if seen.at_s >= since_s]

    def compared(self, now_s: float) -> dict[str, Compared]:
        """By metric: ttft, tpot, e2e per request, itl of all gaps; those that somebody has."""
        seen = self._within(now_s)
        if not seen:
            return {}
        found = {name: _per_request(_columns(seen, name)) for name in PER_REQUEST}
        found[ITL] = _pooled(_columns(seen, "gaps"), _columns(seen, "gaps_s"))
        return {name: one for name, one in found.items() if one is not None}

    def series(self, now_s: float, seconds: int) -> dict[str, list[tuple[float, float]]]:
        """Medians in milliseconds of what was predicted, by the second in which it came live: of first tokens, and of
        ends for the gaps. Times are seconds before now."""
        ttft: dict[int, list[float]] = {}
        itl: dict[int, list[float]] = {}
        for seen in self._seen:
            if seen.at_s < now_s - seconds:
                continue
            ttft.setdefault(int(seen.first_s), []).append(seen.ttft[0])
            if not math.isnan(seen.tpot[0]):
                itl.setdefault(int(seen.at_s), []).append(seen.tpot[0])
        return {"ttft_ms": _line(ttft, now_s), "itl_ms": _line(itl, now_s)}


def _line(values: Mapping[int, list[float]], now_s: float) -> list[tuple[float, float]]:
    return [(round(second - now_s, 1), round(1e3 * median(found), 3)) for second, found in sorted(values.items())]


def _columns(seen: Sequence[_Seen], name: str) -> F64:
    """One figure of every request: a row for what was predicted, one for what was measured."""
    return np.array([getattr(one, name) for one in seen], dtype=np.float64).T


def _per_request(both: F64) -> Compared | None:
    both = both[:, ~np.isnan(both).any(axis=0)]
    if not both.size:
        return None
    predicted, measured = (_spread(values) for values in both)
    return Compared(
        predicted=predicted,
        measured=measured,
        drift=_over(predicted.mean, measured.mean),
        error=_over(float(np.abs(both[0] - both[1]).mean()), measured.mean),
    )


def _pooled(gaps: F64, gaps_s: F64) -> Compared | None:
    counts, sums = gaps.sum(axis=1), np.where(gaps > 0, gaps_s, 0.0).sum(axis=1)
    if not counts.all():
        return None
    predicted, measured = (float(mean) for mean in sums / counts)
    return Compared(predicted=Spread(mean=predicted), measured=Spread(mean=measured), drift=_over(predicted, measured))


def _over(a: float, b: float) -> float | None:
    return a / b if b > 0.0 else None


def _spread(values: F64) -> Spread:
    """Percentiles by linear interpolation."""
    p50, p95 = np.percentile(values, (50.0, 95.0))
    return Spread(mean=float(values.mean()), p50=float(p50), p95=float(p95))
