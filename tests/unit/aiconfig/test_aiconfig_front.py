"""The front and the objectives: who is on it, who wins, and what each figure is divided by."""

from __future__ import annotations

import math

import pytest
from aiconfig_builders import agg, estimated
from hypothesis import given
from hypothesis import strategies as st

from aiconfig.estimate import Estimate
from aiconfig.objectives import OBJECTIVES, Terms
from aiconfig.pareto import default_axes, dominates, front

EIGHT = Terms(gpus_bought=8, usd_per_gpu_hour=2.0)


def point(per_s: float, tpot_s: float | None, **layout: int) -> Estimate:
    return estimated(agg(**layout), output_tokens_per_s=per_s, tpot={"mean": tpot_s})  # type: ignore[arg-type]


def shown(*points: Estimate) -> list[float]:
    return [one.output_tokens_per_s for one in front(points, lambda one: one, default_axes(8))]


def test_who_is_worse_in_everything_is_not_on_the_front() -> None:
    assert shown(point(100, 0.1), point(200, 0.2), point(90, 0.2), point(300, 0.4)) == [300, 200, 100]


def test_who_lacks_a_figure_is_not_on_the_front() -> None:
    assert shown(point(100, 0.1), point(500, None), point(math.nan, 0.01)) == [100]


def test_of_equals_the_simplest_stays() -> None:
    points = [point(100, 0.1, tp=2), point(100, 0.1, tp=1, replicas=2), point(100, 0.1, tp=1, pp=2), point(100, 0.1)]
    found = front(points, lambda one: one, default_axes(8))
    assert [one.candidate.gpus for one in found] == [1]
    assert front(points[:3], lambda one: one, default_axes(8)) == [points[1]]  # two GPUs each: no pp, then least tp


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=20))
def test_nobody_on_the_front_is_dominated_and_everybody_else_is_covered(figures: list[tuple[int, int]]) -> None:
    points = [point(float(a), 1.0 / b) for a, b in figures]
    axes = default_axes(1)

    def of(one: Estimate) -> tuple[float, ...]:
        return tuple(value for value in (axis(one) for axis in axes) if value is not None)

    found = front(points, lambda one: one, axes)
    assert not any(dominates(of(one), of(other)) for one in found for other in found)
    assert all(any(of(one) == of(other) or dominates(of(other), of(one)) for other in found) for one in points)


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("throughput-per-gpu", 100.0),  # 800 tokens/s over the eight that are paid for, not the two in use
        ("goodput-per-gpu", 0.5 * 4.0 / 8),
        ("throughput", 800.0),
        ("cost", 8 * 2.0 / 3600 / 800 * 1e6),
        ("energy", 2.5),
        ("min-gpus", 2.0),
        ("latency", 3.0),
    ],
)
def test_each_objective_is_what_it_says(name: str, figure: float) -> None:
    one = estimated(
        agg(replicas=2),
        output_tokens_per_s=800.0,
        requests_per_s=4.0,
        goodput_share=0.5,
        energy_j=250.0,
        output_tokens=100,
        e2e={"mean": 3.0},
    )
    assert OBJECTIVES[name].figure(one, EIGHT) == pytest.approx(figure)
    assert OBJECTIVES[name].definition
    assert OBJECTIVES[name].denominator


@pytest.mark.parametrize("name", ["goodput-per-gpu", "energy", "latency", "cost"])
def test_what_is_not_known_never_wins(name: str) -> None:
    assert OBJECTIVES[name].score(estimated(agg()), Terms(gpus_bought=1)) == -math.inf


def test_less_is_better_where_it_is() -> None:
    cheap, dear = (estimated(agg(replicas=n)) for n in (1, 2))
    assert OBJECTIVES["min-gpus"].score(cheap, EIGHT) > OBJECTIVES["min-gpus"].score(dear, EIGHT)
