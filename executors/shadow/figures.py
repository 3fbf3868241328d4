"""Predicted against measured over the last minutes: what the gauges say and the dashboard draws.

One request counts once, when both are known, and falls out of the window `window_s` after it ended live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from policies.frozen import frozen
from twin.shadow.facts import Latency, Pair

MOST: Final = 20_000
"""Requests that are kept; of more, the latest."""
PER_REQUEST: Final[Mapping[str, Callable[[Latency], float | None]]] = {
    "ttft": lambda one: one.ttft_s,
    "tpot": lambda one: one.tpot_s,
    "e2e": lambda one: one.e2e_s,
}
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
    """A pair, and when its answer ended live."""

    at_s: float
    pair: Pair


class Window:
    """The pairs of the last `window_s` seconds of the world's clock."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[_Seen] = deque(maxlen=MOST)

    def add(self, pair: Pair) -> None:
        self._seen.append(_Seen(pair.arrival_s + pair.measured.e2e_s, pair))

    def pairs(self, now_s: float) -> list[Pair]:
        """Those of the window; pairs come in order of their ends in the simulation, so all are looked at."""
        since_s = now_s - self._window_s
        return [seen.pair for seen in self._seen if seen.at_s >= since_s]

    def compared(self, now_s: float) -> dict[str, Compared]:
        """By metric: ttft, tpot, e2e per request, itl of all gaps; those that somebody has."""
        pairs = self.pairs(now_s)
        found = {name: _per_request(pairs, of) for name, of in PER_REQUEST.items()}
        found[ITL] = _pooled(pairs)
        return {name: one for name, one in found.items() if one is not None}

    def series(self, now_s: float, seconds: int) -> dict[str, list[tuple[float, float]]]:
        """Medians in milliseconds of what was predicted, by the second in which it came live: of first tokens, and of
        ends for the gaps. Times are seconds before now."""
        ttft: dict[int, list[float]] = {}
        itl: dict[int, list[float]] = {}
        for at_s, pair in self._seen:
            if at_s < now_s - seconds:
                continue
            ttft.setdefault(int(pair.arrival_s + pair.measured.ttft_s), []).append(pair.predicted.ttft_s)
            tpot_s = pair.predicted.tpot_s
            if tpot_s is not None:
                itl.setdefault(int(at_s), []).append(tpot_s)
        return {"ttft_ms": _line(ttft, now_s), "itl_ms": _line(itl, now_s)}


def _line(values: Mapping[int, list[float]], now_s: float) -> list[tuple[float, float]]:
    return [(round(second - now_s, 1), round(1e3 * median(found), 3)) for second, found in sorted(values.items())]


def _per_request(pairs: Sequence[Pair], of: Callable[[Latency], float | None]) -> Compared | None:
    both = [(a, b) for pair in pairs if (a := of(pair.predicted)) is not None and (b := of(pair.measured)) is not None]
    if not both:
        return None
    predicted, measured = (sorted(column) for column in zip(*both, strict=True))
    apart = sum(abs(a - b) for a, b in both) / len(both)
    mean = sum(measured) / len(measured)
    return Compared(
        predicted=_spread(predicted),
        measured=_spread(measured),
        drift=_over(sum(predicted) / len(predicted), mean),
        error=_over(apart, mean),
    )


def _pooled(pairs: Sequence[Pair]) -> Compared | None:
    gaps = [sum(max(0, one.gaps) for one in side) for side in _sides(pairs)]
    if not all(gaps):
        return None
    means = [
        sum(one.gaps_s for one in side if one.gaps > 0) / count for side, count in zip(_sides(pairs), gaps, strict=True)
    ]
    return Compared(predicted=Spread(mean=means[0]), measured=Spread(mean=means[1]), drift=_over(*means))


def _sides(pairs: Sequence[Pair]) -> tuple[list[Latency], list[Latency]]:
    return [pair.predicted for pair in pairs], [pair.measured for pair in pairs]


def _over(a: float, b: float) -> float | None:
    return a / b if b > 0.0 else None


def _spread(values: Sequence[float]) -> Spread:
    return Spread(mean=sum(values) / len(values), p50=_percentile(values, 0.5), p95=_percentile(values, 0.95))


def _percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by linear interpolation."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
