"""Bars as inline SVG: one row per thing, its parts side by side on one scale from 0 to `full`.

Equal data gives equal bytes. Colours are classes of the page (f0, f1, ...); nothing here may fetch or embed anything,
nor hide a part that is too thin to be seen: the legend and the end of the row have every value in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from policies.frozen import frozen
from reports.svg import WIDTH

LEFT, RIGHT, TOP, ROW_PX, BAR_PX = 170, 84, 6, 30, 18
PLOT_W: Final = WIDTH - LEFT - RIGHT


@frozen
class Part:
    """A piece of a row: what it is, how long (0 or more), its colour, how its value reads."""

    label: str
    value: float
    colour: int
    says: str


@frozen
class Row:
    """One bar: its name, its parts from the left, and what stands at its end."""

    label: str
    parts: Sequence[Part]
    says: str


@frozen
class Bars:
    """Rows on one scale. `full` is the value at the right end (above 0); `legend` are (text, colour)."""

    title: str
    note: str
    rows: Sequence[Row]
    full: float
    legend: Sequence[tuple[str, int]] = ()


def draw_bars(one: Bars) -> str:
    """The bars as one <svg> element, the title as accessible text."""
    height = 2 * TOP + ROW_PX * len(one.rows)
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(one.title)}">',
            *(piece for at, row in enumerate(one.rows) for piece in _row(row, TOP + at * ROW_PX, one.full)),
            "</svg>",
        ]
    )


def _row(row: Row, top: int, full: float) -> Iterator[str]:
    middle, bar = top + ROW_PX / 2, top + (ROW_PX - BAR_PX) / 2
    yield f'<text class="tick" x="{LEFT - 8}" y="{middle:g}" dy=".35em" text-anchor="end">{escape(row.label)}</text>'
    yield f'<rect class="grid" fill="none" x="{LEFT}" y="{bar:g}" width="{PLOT_W}" height="{BAR_PX}"/>'
    start = 0.0
    for part in row.parts:
        left, right = (LEFT + min(value / full, 1.0) * PLOT_W for value in (start, start + part.value))
        yield (
            f'<rect class="f{part.colour}" x="{left:.1f}" y="{bar:g}" width="{right - left:.1f}" height="{BAR_PX}">'
            f"<title>{escape(f'{part.label}: {part.says}')}</title></rect>"
        )
        start += part.value
    yield f'<text class="tick" x="{LEFT + PLOT_W + 8}" y="{middle:g}" dy=".35em">{escape(row.says)}</text>'
