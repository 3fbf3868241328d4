"""Heat maps and parallel coordinates as inline SVG, for figures over two or more varied keys.

Equal data gives equal bytes. Colours are classes of the page; nothing here may fetch or embed anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from policies.frozen import frozen
from reports.svg import HEIGHT, WIDTH

LEFT, TOP, BOTTOM, ROW_PX = 150, 8, 52, 34
PALEST, DARKEST = 0.06, 0.62
LOG_ABOVE: Final = 30.0
"""Largest over smallest value from which the colours are spread by the logarithm."""
MAX_LABEL: Final = 22
MAX_TEXT_COLUMNS: Final = 12
"""Columns up to which the cells carry their values."""


@frozen
class HeatMap:
    """One map: a cell per (x label, y label), with its value, its text and what a pointer shows. Cells that are absent
    stay empty; those in `marked` have a frame.
    """

    title: str
    x_title: str
    y_title: str
    x_labels: Sequence[str]
    y_labels: Sequence[str]
    values: Mapping[tuple[int, int], float]
    texts: Mapping[tuple[int, int], str]
    says: Mapping[tuple[int, int], str]
    marked: frozenset[tuple[int, int]] = frozenset()


@frozen
class Shades:
    """From a value to how dark its cell is: the same for all maps that are compared."""

    low: float
    high: float

    def opacity(self, value: float) -> float:
        low, high = self.low, self.high
        if low > 0 and high > LOG_ABOVE * low:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.0
        return PALEST + share * (DARKEST - PALEST)


def shades_of(maps: Sequence[HeatMap]) -> Shades:
    """One scale for these maps, from their smallest to their largest value."""
    values = [value for one in maps for value in one.values.values()]
    return Shades(low=min(values, default=0.0), high=max(values, default=0.0))


def draw_heat_map(one: HeatMap, shades: Shades) -> str:
    """The map as one <svg> element, its title as accessible text."""
    height = TOP + ROW_PX * len(one.y_labels) + BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(one.title)}">',
        *_cells(one, shades),
        *_labels(one, height),
        "</svg>",
    ]
    return "".join(parts)


def _cells(one: HeatMap, shades: Shades) -> Iterator[str]:
    width = (WIDTH - LEFT - 8) / len(one.x_labels)
    for (x, y), value in sorted(one.values.items()):
        left, top = LEFT + x * width, TOP + y * ROW_PX
        frame = "heat best" if (x, y) in one.marked else "heat"
        yield (
            f'<rect class="{frame}" x="{left + 1:.1f}" y="{top + 1}" width="{width - 2:.1f}" height="{ROW_PX - 2}" '
            f'fill-opacity="{shades.opacity(value):.3f}"><title>{escape(one.says[x, y])}</title></rect>'
        )
        if len(one.x_labels) <= MAX_TEXT_COLUMNS:
            yield (
                f'<text class="cell" x="{left + width / 2:.1f}" y="{top + ROW_PX / 2}" dy=".35em" '
                f'text-anchor="middle">{escape(one.texts[x, y])}</text>'
            )


def _labels(one: HeatMap, height: int) -> Iterator[str]:
    width = (WIDTH - LEFT - 8) / len(one.x_labels)
    bottom = TOP + ROW_PX * len(one.y_labels)
    for at, label in enumerate(one.y_labels):
        middle = TOP + (at + 0.5) * ROW_PX
        yield f'<text class="tick" x="{LEFT - 6}" y="{middle}" dy=".35em" text-anchor="end">{_short(label)}</text>'
    every = -(-len(one.x_labels) // MAX_TEXT_COLUMNS)
    for at, label in enumerate(one.x_labels):
        if at % every == 0:
            centre = LEFT + (at + 0.5) * width
            yield f'<text class="tick" x="{centre:.1f}" y="{bottom + 15}" text-anchor="middle">{_short(label)}</text>'
    yield f'<text class="title" x="{WIDTH - 8}" y="{height - 18}" text-anchor="end">{escape(one.x_title)} →</text>'
    yield f'<text class="title" x="8" y="{height - 18}">↑ {escape(one.y_title)}</text>'


def _short(label: str) -> str:
    return escape(label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…")


@frozen
class Scale:
    """One upright axis of parallel coordinates: its title, labels by their place from 0 (bottom) to 1 (top)."""

    title: str
    ticks: Sequence[tuple[float, str]]


@frozen
class Thread:
    """One point as a line: its place on each axis (None: it has none there), what a pointer shows, how dark it is."""

    places: Sequence[float | None]
    says: str
    opacity: float
    marked: bool


def draw_parallel(title: str, axes: Sequence[Scale], threads: Sequence[Thread]) -> str:
    """Parallel coordinates as one <svg> element: an axis per key and one for the figure, a line per point."""
    top, bottom = 28, HEIGHT - 14
    step = (WIDTH - 140) / max(len(axes) - 1, 1)

    def px(axis: int) -> float:
        return 70 + axis * step

    def py(place: float) -> float:
        return bottom - place * (bottom - top)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for thread in threads:
        path = " ".join(f"{px(at):.1f},{py(place):.1f}" for at, place in enumerate(thread.places) if place is not None)
        kind = "thread best" if thread.marked else "thread"
        parts.append(
            f'<polyline class="{kind}" points="{path}" stroke-opacity="{thread.opacity:.3f}">'
            f"<title>{escape(thread.says)}</title></polyline>"
        )
    for at, axis in enumerate(axes):
        x = f"{px(at):.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="title" x="{x}" y="14" text-anchor="middle">{_short(axis.title)}</text>')
        parts += [
            f'<text class="cell" x="{px(at) + 4:.1f}" y="{py(place):.1f}" dy=".35em">{_short(label)}</text>'
            for place, label in axis.ticks
        ]
    return "".join([*parts, "</svg>"])
