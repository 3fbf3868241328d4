"""A trace as a planner's windows see it, and how each forecaster would have done on it.

Rolling origin: every forecaster is asked with what it knew then. Sessions' later turns have no time of their own before
they are played, and are left out. Nothing is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.errors import ConfigError
from policies.frozen import frozen
from policies.planner.forecast.backtest import BASELINE, Backtest, Score, backtest
from policies.planner.forecast.build import ForecastSettings, Maker, makers
from traces.load import open_trace
from twin.config import Config
from twin.planning import forecast_settings
from twin.replay import demand_of, read_options

LEAST_INTERVALS = 8
"""Intervals that a trace must have for a comparison to mean anything."""
MOST_LAG = 2000
LEAST_LIKENESS = 0.3
"""Autocorrelation from which on a season is believed."""


class Windows(NamedTuple):
    """The trace in whole intervals: requests, and mean tokens in and out of those that have any (NaN: none)."""

    interval_s: float
    num_req: np.ndarray[tuple[int], np.dtype[np.float64]]
    isl: np.ndarray[tuple[int], np.dtype[np.float64]]
    osl: np.ndarray[tuple[int], np.dtype[np.float64]]
    untimed: int


@frozen
class Scored:
    """One forecaster: how far off one interval ahead, and `ahead` of them."""

    name: str
    next: Score
    ahead: Score


@frozen
class Forecasts:
    """All forecasters on one quantity, best first by the error one interval ahead; `winner` None where none qualifies.
    `margin`: by what share its error is below that of seasonal-naive (None: there is none)."""

    quantity: str
    scored: tuple[Scored, ...]
    winner: str | None
    margin: float | None
    ahead_winner: str | None


@frozen
class Forecasted:
    """What a trace came to: `period` is the season in intervals (None: none), `found` whether it was found in the trace
    itself; `ahead` how many intervals an order must last until it is ready."""

    trace: str
    interval_s: float
    intervals: int
    ahead: int
    period: int | None
    found: bool
    untimed: int
    quantities: tuple[Forecasts, ...]


def windows_of(config: Config) -> Windows:
    """The trace of the configuration in intervals. Raises TraceError, or ConfigError for one that is too short."""
    if config.trace.path is None:
        raise ConfigError("no trace given: pass a file, or set trace.path")
    interval_s = config.planner.throughput_adjustment_interval_s
    trace = open_trace(config.trace.path, read_options(config.trace))
    at_s: list[float] = []
    isl: list[int] = []
    osl: list[int] = []
    untimed = 0
    for row in demand_of(config, trace).rows():
        if row.arrival_s is None:
            untimed += 1
            continue
        at_s.append(row.arrival_s)
        isl.append(row.isl)
        osl.append(row.osl)
    times = np.array(at_s, dtype=np.float64)
    span_s = float(times.max()) if len(times) else 0.0
    count = math.floor(span_s / interval_s)
    if count < LEAST_INTERVALS:
        raise ConfigError(
            f"{config.trace.path.name}: {span_s:.6g} s are {count} whole intervals of {interval_s:g} s, and a "
            f"comparison needs {LEAST_INTERVALS}; give a shorter --interval"
        )
    place = (times / interval_s).astype(np.int64)
    whole = place < count  # what is behind the last whole interval was not seen to its end
    requests = np.bincount(place[whole], minlength=count).astype(np.float64)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(place[whole], np.array(values, dtype=np.float64)[whole], minlength=count) / requests
            for values in (isl, osl)
        ]
    return Windows(interval_s, requests, means[0], means[1], untimed)


def forecast(config: Config, startup_s: float, ahead: int | None = None) -> Forecasted:
    """Score every forecaster on the trace of the configuration; `ahead` None: as long as a start takes."""
    seen = windows_of(config)
    if ahead is None:
        ahead = math.ceil((seen.interval_s + startup_s) / seen.interval_s - 1e-9)
    settings = forecast_settings(config)
    found = settings.period is None
    if found:
        period = season_of(seen.num_req)
        if period is not None:
            harmonics = min(settings.harmonics, period // 2)
            settings = ForecastSettings(**{**_plain(settings), "period": period, "harmonics": harmonics})
    named = dict(makers(settings))
    series = {
        "num_req": seen.num_req,
        "isl": seen.isl[~np.isnan(seen.isl)],
        "osl": seen.osl[~np.isnan(seen.osl)],
    }
    assert config.trace.path is not None
    return Forecasted(
        trace=config.trace.path.name,
        interval_s=seen.interval_s,
        intervals=len(seen.num_req),
        ahead=ahead,
        period=settings.period,
        found=found,
        untimed=seen.untimed,
        quantities=tuple(
            _compared(name, [float(value) for value in values], named, ahead if name == "num_req" else 1)
            for name, values in series.items()
        ),
    )


def _plain(settings: ForecastSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _compared(quantity: str, series: Sequence[float], named: dict[str, Maker], ahead: int) -> Forecasts:
    first = backtest(series, named, (1,))
    later = first if ahead == 1 else backtest(series, named, (ahead,))
    by_name = {score.name: score for score in later.scores}
    return Forecasts(
        quantity=quantity,
        scored=tuple(Scored(name=score.name, next=score, ahead=by_name[score.name]) for score in first.scores),
        winner=first.winner,
        margin=_margin(first),
        ahead_winner=later.winner,
    )


def _margin(found: Backtest) -> float | None:
    return found.margin if any(score.name == BASELINE for score in found.scores) else None


def season_of(series: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int | None:
    """The lag at which the series is most like itself, from 4 intervals to half of it; None where it is at none."""
    off = series - series.mean()
    power = float((off * off).sum())
    most = min(len(series) // 2, MOST_LAG)
    if power <= 0 or most < 5:
        return None
    like = np.array([float((off[lag:] * off[:-lag]).sum()) / power for lag in range(1, most + 1)])
    below = np.flatnonzero(like < 0)
    if not len(below):
        return None  # it only drifts
    rest = like[below[0] :]
    best = int(np.argmax(rest))
    lag = below[0] + best + 1
    return int(lag) if rest[best] >= LEAST_LIKENESS and lag >= 4 else None
