"""Measured points on lines of equal x, each at its own y: linear along a line, linear between two lines.

On a rectangular grid that is bilinear interpolation. Outside the points it raises, unless extrapolation is switched on;
it never answers with a time that is not positive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.pieces import steps_on_this_side
from twin.perf.protocol import FOREVER_STEPS, DecodePiece


@dataclass(frozen=True, slots=True)
class Line:
    """Points of equal x, by rising y."""

    ys: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, y: float) -> tuple[float, float, float | None]:
        """(value, slope, how much further that slope holds; None: for ever), beyond the ends too."""
        ys, seconds = self.ys, self.seconds
        if len(ys) == 1:
            return seconds[0], 0.0, None if y != ys[0] else 0.0
        i = min(max(bisect_right(ys, y) - 1, 0), len(ys) - 2)
        slope = (seconds[i + 1] - seconds[i]) / (ys[i + 1] - ys[i])
        return seconds[i] + slope * (y - ys[i]), slope, ys[i + 1] - y if y <= ys[-1] else None


@frozen
class Grid:
    """Seconds over (x, y). `x_name` None: the points do not depend on x, there is one line."""

    where: str  # file and kind of point, for errors
    x_name: str | None
    y_name: str | None
    xs: tuple[float, ...]
    lines: tuple[Line, ...]
    extrapolate: bool

    @classmethod
    def of(
        cls,
        where: str,
        names: tuple[str | None, str | None],
        points: Iterable[tuple[float, float, float]],
        extrapolate: bool,
    ) -> Grid:
        """The grid of (x, y, seconds) points; points measured more than once count with their mean."""
        lines: dict[float, dict[float, list[float]]] = {}
        for x, y, seconds in points:
            lines.setdefault(x, {}).setdefault(y, []).append(seconds)
        xs = tuple(sorted(lines))
        return cls(
            where=where,
            x_name=names[0],
            y_name=names[1],
            xs=xs,
            lines=tuple(_line(lines[x]) for x in xs),
            extrapolate=extrapolate,
        )

    def seconds(self, x: float, y: float) -> float:
        """The time at (x, y)."""
        i = self._cell(x, 0.0)
        seconds = self._along(i, x, y)[0]
        if len(self.xs) > 1 and x != self.xs[i]:
            t = (x - self.xs[i]) / (self.xs[i + 1] - self.xs[i])
            seconds += t * (self._along(i + 1, x, y)[0] - seconds)
        if seconds <= 0.0:
            raise self._not_positive(seconds, x, y)
        return seconds

    def piece(self, x: float, y: float, dx: float, dy: float) -> DecodePiece:
        """The times at (x + j dx, y + j dy), j = 0, 1, ..., as far as one formula holds (dx, dy >= 0)."""
        i = self._cell(x, dx)
        g0, slope, room = self._along(i, x, y)
        g1, g2 = slope * dy, 0.0
        steps = min(_steps_in(room, dy), _steps_in(self._room(i, x), dx))
        if len(self.xs) > 1 and (dx > 0.0 or x != self.xs[i]):
            high, high_slope, room = self._along(i + 1, x, y)
            width = self.xs[i + 1] - self.xs[i]
            t, dt = (x - self.xs[i]) / width, dx / width
            g1 += t * (high_slope - slope) * dy + dt * (high - g0)
            g2 = dt * (high_slope - slope) * dy
            g0 += t * (high - g0)
            steps = min(steps, _steps_in(room, dy))
        if g0 <= 0.0:
            raise self._not_positive(g0, x, y)
        if self.extrapolate:
            steps = min(steps, steps_on_this_side(g0, g1, g2))
        return DecodePiece(g0, g1, g2, steps)

    def _cell(self, x: float, dx: float) -> int:
        """Index of the line at or below x; without dx the last line can stand alone."""
        xs = self.xs
        if not self.extrapolate and self.x_name is not None and not xs[0] <= x <= xs[-1]:
            raise ConfigError(self._outside(x, None, f"{self.x_name} {xs[0]:g} to {xs[-1]:g}"))
        i = bisect_right(xs, x) - 1
        last = len(xs) - 1
        if i == last and (len(xs) == 1 or (dx == 0.0 and x == xs[last])):
            return i
        return min(max(i, 0), max(last - 1, 0))

    def _room(self, i: int, x: float) -> float | None:
        """How much further in x the cell at i reaches (None: for ever)."""
        if x > self.xs[-1] or self.x_name is None:
            return None
        return self.xs[min(i + 1, len(self.xs) - 1)] - x

    def _along(self, i: int, x: float, y: float) -> tuple[float, float, float | None]:
        """Line i at y."""
        line = self.lines[i]
        if not self.extrapolate and self.y_name is not None and not line.ys[0] <= y <= line.ys[-1]:
            at = f" at {self.x_name} {self.xs[i]:g}" if self.x_name else ""
            raise ConfigError(self._outside(x, y, f"{self.y_name} {line.ys[0]:g} to {line.ys[-1]:g}{at}"))
        return line.at(y)

    def _not_positive(self, seconds: float, x: float, y: float) -> ConfigError:
        return ConfigError(f"{self.where}: extrapolated to {seconds:g} s at {self._point(x, y)}; measure nearer to it")

    def _point(self, x: float, y: float | None) -> str:
        names = ((self.x_name, x), (self.y_name, y))
        return ", ".join(f"{name} {value:g}" for name, value in names if name is not None and value is not None)

    def _outside(self, x: float, y: float | None, limits: str) -> str:
        point = self._point(x, y)
        return (
            f"{self.where}: {point} is outside the measured points ({limits}); measure more, or set extrapolate = true"
        )


def _line(points: dict[float, list[float]]) -> Line:
    ys = tuple(sorted(points))
    return Line(ys, tuple(sum(points[y]) / len(points[y]) for y in ys))


def _steps_in(room: float | None, by: float) -> int:
    """Steps of size `by` from here up to and including the border that is `room` away."""
    if room is None or by == 0.0:
        return FOREVER_STEPS
    return int(room // by) + 1
