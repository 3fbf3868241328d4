"""Charts as inline SVG: lines, bands, dots and marks on linear or logarithmic axes.

Equal data gives equal bytes: no clock, no random ids. Colours are classes (c0, c1, ...), so the page decides what
they look like by day and by night; nothing here may fetch or embed anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final, Literal

import numpy as np

from policies.frozen import frozen
from reports.columns import F64

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 22, 10, 38
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

MAX_DOTS: Final = 1500
"""Dots of a scatter; more are thinned evenly, which the chart's note must say."""


@frozen
class Series:
    """One line, step line, filled band (between `low` and y) or cloud of dots. NaN breaks a line.

    `says` are the texts shown for each point when the pointer is near it.
    """

    label: str
    x: F64
    y: F64
    colour: int
    kind: Literal["line", "step", "band", "dots"] = "line"
    low: F64 | None = None
    dashed: bool = False
    says: Sequence[str] = ()


@frozen
class Mark:
    """A labelled straight line across the chart: a limit, or a level worth naming."""

    axis: Literal["x", "y"]
    at: float
    label: str
    colour: int | None = None


@frozen
class Axis:
    """What an axis shows. `tick` turns a value into its label; `low` and `high` replace the bounds of the data.

    A linear axis without `high` ends at a tick.
    """

    title: str
    tick: Callable[[float], str]
    log: bool = False
    low: float | None = None
    high: float | None = None


@frozen
class Chart:
    """A titled chart. `moments` are (x, text) shown as the heading of what the pointer is near."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    marks: Sequence[Mark] = ()
    moments: tuple[F64, Sequence[str]] | None = None

    @property
    def empty(self) -> bool:
        return not any(np.isfinite(series.y).any() for series in self.series)


class Scale:
    """Values to pixels along one axis: its bounds `low` and `high`, its `ticks`, and where a value lies."""

    def __init__(self, axis: Axis, values: Sequence[F64], start_px: float, length_px: float) -> None:
        self.log = axis.log
        known = np.concatenate([value[np.isfinite(value)] for value in values])
        if self.log:
            known = known[known > 0]
        low = axis.low if axis.low is not None else float(known.min()) if len(known) else 0.0
        high = axis.high if axis.high is not None else float(known.max()) if len(known) else 1.0
        low, high = self._widened(low, high)
        self.ticks = _log_ticks(low, high) if self.log else _linear_ticks(low, high)
        if not self.log and axis.high is None:
            step = _tick_step(low, high)
            high = max(high, math.ceil(high / step - 1e-9) * step)
            self.ticks = _linear_ticks(low, high)
        self.low, self.high = low, high
        self._start, self._length = start_px, length_px

    def _widened(self, low: float, high: float) -> tuple[float, float]:
        """A range that is not empty, on decimal bounds where it is logarithmic."""
        if not self.log:
            # Below a billionth of its values a span is rounding, and ticks could no longer be told apart.
            least = max(abs(low), abs(high)) * 1e-9
            return (low, high) if high - low > max(least, 1e-300) else (low, low + (abs(low) or 1.0))
        low, high = max(low, 1e-9), max(high, 1e-9)
        return (low, high) if high > low * 1.2 else (low / 1.5, high * 1.5)

    def px(self, value: float) -> float:
        return float(self.all_px(np.array([value]))[0])

    def all_px(self, values: F64) -> F64:
        if self.log:
            values = np.log(np.clip(values, self.low, None))
            low, high = math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        place: F64 = self._start + (values - low) / (high - low) * self._length
        return place

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def _tick_step(low: float, high: float) -> float:
    """The distance of ticks: 1, 2, 2.5 or 5 times a power of ten, about a fifth of the range."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(unit * power for unit in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * power >= raw * 0.999)


def _linear_ticks(low: float, high: float) -> list[float]:
    step = _tick_step(low, high)
    digits = 2 - math.floor(math.log10(step))  # keeps all of a step, however small, and drops what the product adds
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, digits) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    units: tuple[float, ...] = (1.0, 2.0, 5.0) if len(powers) <= 4 else (1.0,)
    return [value for power in powers for unit in units if low <= (value := unit * 10.0**power) <= high]


def draw(chart: Chart) -> str:
    """The chart as one <svg> element, its title as accessible text."""
    x = Scale(chart.x, [series.x for series in chart.series], LEFT, PLOT_W)
    y_values = [value for series in chart.series for value in (series.y, series.low) if value is not None]
    y = Scale(chart.y, y_values, TOP + PLOT_H, -PLOT_H)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        *_axes(chart, x, y),
        *(_series(series, x, y) for series in chart.series),
        *_marks(chart, x, y),
        f'<line class="cursor" y1="{TOP}" y2="{TOP + PLOT_H}"/></svg>',
    ]
    return "".join(parts)


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    right, bottom = LEFT + PLOT_W, TOP + PLOT_H
    for value in y.ticks:
        at = _n(y.px(value))
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{at}" dy=".32em" text-anchor="end">{chart.y.tick(value)}</text>'
    for value in x.ticks:
        at = _n(x.px(value))
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{at}" y="{bottom + 14}" text-anchor="middle">{chart.x.tick(value)}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text class="title" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(chart.x.title)}</text>'
    middle = TOP + PLOT_H / 2
    yield (
        f'<text class="title" transform="translate(10 {_n(middle)}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y.title)}</text>"
    )


def _series(series: Series, x: Scale, y: Scale) -> str:
    px, py = x.all_px(series.x), y.all_px(series.y)
    match series.kind:
        case "dots":
            return _dots(series, px, py)
        case "band":
            assert series.low is not None, "a band needs its lower edge"
            return _band(series, px, py, y.all_px(series.low))
        case "step":
            px, py = np.repeat(px, 2)[1:], np.repeat(py, 2)[:-1]
    dash = ' stroke-dasharray="5 3"' if series.dashed else ""
    return f'<path class="line c{series.colour}"{dash} d="{_path(px, py)}"/>'


def _dots(series: Series, px: F64, py: F64) -> str:
    known = np.flatnonzero(np.isfinite(px) & np.isfinite(py))
    known = known[:: max(-(-len(known) // MAX_DOTS), 1)]
    moves = "".join(f"M{_n(a)} {_n(b)}h0" for a, b in zip(px[known], py[known], strict=True))
    return f'<path class="dots c{series.colour}" d="{moves}"/>'


def _band(series: Series, px: F64, py: F64, low_py: F64) -> str:
    known = np.isfinite(py) & np.isfinite(low_py)
    upper, lower = _points(px[known], py[known]), _points(px[known][::-1], low_py[known][::-1])
    return f'<path class="band f{series.colour}" d="M{upper}L{lower}Z"/>' if upper else ""


def _path(px: F64, py: F64) -> str:
    """Moves and lines, broken where a value is not finite; a lone point becomes a short dash."""
    known = np.isfinite(px) & np.isfinite(py)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    runs = zip(edges[::2], edges[1::2], strict=True)
    pieces = []
    for first, end in runs:
        lone = "h1.5" if end - first == 1 else ""
        pieces.append(f"M{_points(px[first:end], py[first:end])}{lone}")
    return "".join(pieces)


def _points(px: F64, py: F64) -> str:
    return " ".join(f"{_n(a)} {_n(b)}" for a, b in zip(px, py, strict=True))


def _marks(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for mark in chart.marks:
        scale = x if mark.axis == "x" else y
        if not scale.holds(mark.at):
            continue
        at, colour = _n(scale.px(mark.at)), "mark" if mark.colour is None else f"mark c{mark.colour}"
        label = escape(mark.label)
        if mark.axis == "x":
            yield f'<line class="{colour}" x1="{at}" x2="{at}" y1="{TOP}" y2="{TOP + PLOT_H}"/>'
            yield f'<text class="marktext" x="{at}" dx="4" y="{TOP + PLOT_H - 5}">{label}</text>'
        else:
            yield f'<line class="{colour}" x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{at}" y2="{at}"/>'
            yield f'<text class="marktext" x="{LEFT + PLOT_W}" dy="-4" y="{at}" text-anchor="end">{label}</text>'


def _n(value: float) -> str:
    """A pixel position to a tenth, without what says nothing."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def pointer_json(chart: Chart) -> str:
    """What the page shows near the pointer: pixel positions and texts of each series, and of the moments."""
    x = Scale(chart.x, [series.x for series in chart.series], LEFT, PLOT_W)

    def column(values: F64, says: Sequence[str]) -> dict[str, object]:
        known = np.isfinite(values)
        px = [float(_n(value)) for value in x.all_px(values[known])]
        return {"x": px, "t": [say for say, keep in zip(says, known, strict=True) if keep]}

    plain: dict[str, object] = {
        "s": [column(series.x, series.says) if len(series.says) else None for series in chart.series]
    }
    if chart.moments is not None:
        plain["m"] = column(*chart.moments)
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
