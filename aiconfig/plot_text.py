"""A cloud of marks in characters, for a terminal. It shows what it is given and computes no figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from reports import text

WIDTH: Final = 64
HEIGHT: Final = 14
STEPS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class Dot(NamedTuple):
    """One point; where two fall on one place the later one is seen."""

    x: float
    y: float
    mark: str


def scatter(dots: Sequence[Dot], x_title: str, y_title: str, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines of a plot with both axes from 0; none without a point that is finite."""
    shown = [dot for dot in dots if math.isfinite(dot.x) and math.isfinite(dot.y)]
    if not shown:
        return []
    x_most, y_most = _round_up(max(dot.x for dot in shown)), _round_up(max(dot.y for dot in shown))
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    for dot in shown:
        grid[height - round(dot.y / y_most * height)][round(dot.x / x_most * width)] = dot.mark
    labels = {0: text.figures(y_most), height // 2: text.figures(y_most / 2), height: "0"}
    room = max(len(label) for label in labels.values())
    lines = [y_title]
    for at, row in enumerate(grid):
        lines.append(f"{labels.get(at, ''):>{room}} |{''.join(row)}".rstrip())
    lines.append(f"{'':>{room}} +{'-' * (width + 1)}")
    middle, most = text.figures(x_most / 2), text.figures(x_most)
    ticks = f"0{middle:^{width - len(most)}}{most}"
    lines.append(f"{'':>{room}}  {ticks}  {x_title}")
    return lines


def _round_up(value: float) -> float:
    """The next of `STEPS` times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in STEPS if step * power >= value * 0.9999)
