"""Scales and charts at the ends of what a run can hold: ticks that differ, and pixels that are numbers."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest

from reports.plots import number_tick
from reports.svg import Axis, Chart, Scale, Series, draw

SPANS = [10.0**power for power in range(-15, 13)]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("low", [0.0, 1.0])
@pytest.mark.parametrize("log", [False, True])
def test_ticks_differ_and_lie_in_the_range(span: float, low: float, log: bool) -> None:
    values = np.array([low * span, low * span + span * 0.73])
    scale = Scale(Axis(title="", tick=str, log=log), [values], 0.0, 100.0)
    assert all(a < b for a, b in pairwise(scale.ticks))
    assert all(scale.low * (1 - 1e-9) <= tick <= scale.high * (1 + 1e-9) for tick in scale.ticks)
    assert len(scale.ticks) >= (1 if log else 4)
    assert log or math.isclose(scale.ticks[-1], scale.high)


@pytest.mark.parametrize("span", [0.0, *SPANS])
@pytest.mark.parametrize("start", [0.0, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("bounds", [None, (0.0, None), (0.0, 1.0)])
def test_every_span_makes_a_chart_of_finite_pixels(
    span: float, start: float, log: bool, bounds: tuple[float, float | None] | None
) -> None:
    x, y = np.array([start, start + span]), np.array([span, np.nan])
    low, high = bounds or (None, None)
    chart = Chart(
        title="t",
        x=Axis(title="x", tick=number_tick, low=start, high=start + span),
        y=Axis(title="y", tick=number_tick, log=log, low=None if log else low, high=None if log else high),
        series=[Series(label="s", x=x, y=y, colour=0)],
    )
    svg = draw(chart)
    assert not re.search(r"[^a-z](nan|inf)[^a-z]", svg)


def test_ticks_of_usual_ranges_are_round() -> None:
    assert Scale(Axis(title="", tick=str), [np.array([0.0, 0.3])], 0.0, 1.0).ticks == [0.0, 0.1, 0.2, 0.3]
    assert Scale(Axis(title="", tick=str), [np.array([0.0, 1.2])], 0.0, 1.0).ticks == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    assert Scale(Axis(title="", tick=str), [np.array([7.0])], 0.0, 1.0).ticks == [8.0, 10.0, 12.0, 14.0]
