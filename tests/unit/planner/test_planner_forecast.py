"""Forecasters against the figures of the specification (P1 to P12), laws that hold for all of them, and the guard."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.planner.forecast.arima import Arima, stable
from policies.planner.forecast.backtest import backtest
from policies.planner.forecast.build import ForecastSettings, forecaster, makers
from policies.planner.forecast.constant import Constant
from policies.planner.forecast.guarded import Guarded
from policies.planner.forecast.holt import Holt
from policies.planner.forecast.kalman import Kalman
from policies.planner.forecast.seasonal import Seasonal
from policies.planner.forecast.series import Forecaster

ALL = makers(ForecastSettings(period=4))


def fed(model: Forecaster, *values: float) -> Guarded:
    guarded = Guarded(model)
    for value in values:
        guarded.observe(value)
    return guarded


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


# ---------------------------------------------------------------- the table


def test_p1_kalman_of_a_constant() -> None:
    assert fed(Kalman(), *[10] * 5).predict(1) == 10


def test_p2_p3_kalman_follows_a_ramp() -> None:
    model, states = Kalman(), []
    guarded = Guarded(model)
    for y in (10, 12, 14, 16, 18):
        guarded.observe(y)
        states.append((model.level, model.trend))
    assert states[1:] == [
        (close(11.990055), close(0.994530)),
        (close(13.980975), close(1.960627)),
        (close(15.990207), close(1.989326)),
        (close(17.994092), close(1.995473)),
    ]
    assert guarded.predict(1) == close(19.989565)
    assert guarded.predict(3) == close(23.980511)
    guarded.observe(20)
    assert (model.level, model.trend) == (close(19.996075), close(1.997619))
    assert guarded.predict(1) == close(21.993694)


def test_p4_kalman_after_a_fall_is_never_below_zero() -> None:
    model = Kalman()
    guarded = fed(model, *[100] * 5, 0)
    assert (model.level, model.trend) == (close(37.615579), close(-20.568820))
    assert guarded.predict(1) == close(17.046759)
    guarded.observe(0)
    assert (model.level, model.trend) == (close(7.479163), close(-23.184291))
    assert guarded.predict(1) == 0


def test_p5_kalman_below_its_points_says_the_last_value() -> None:
    assert fed(Kalman(), 10, 12, 14).predict(1) == 14


def test_p6_p7_holt() -> None:
    model = Holt()
    guarded = fed(model, 10, 12, 14, 16, 18)
    assert (model.level, model.trend) == (close(16.889625), close(1.434863))
    assert (guarded.predict(1), guarded.predict(3)) == (close(18.324488), close(21.194213))
    falling = Holt()
    assert fed(falling, 100, 50, 0, 0).predict(1) == 0
    assert (falling.level, falling.trend) == (close(8.0625), close(-20.04375))


@pytest.mark.parametrize(
    ("order", "values", "phi", "c", "ahead"),
    [
        ((1, 1), (10, 12, 11, 13, 12, 14), -1, 1, 13),
        ((1, 0), (100, 55, 32.5, 21.25, 15.625), 0.5, 5, 12.8125),
    ],
)
def test_p8_p9_arima(order: tuple[int, int], values: tuple[float, ...], phi: float, c: float, ahead: float) -> None:
    model = Arima(order)
    guarded = fed(model, *values)
    assert guarded.predict(1) == close(ahead)
    assert model.fit is not None
    assert (model.fit.phi, model.fit.c) == ((close(phi),), close(c))


def test_p10_seasons_on_a_line() -> None:
    values = [100 + 2 * t + 10 * math.sin(2 * math.pi * t / 8) for t in range(24)]
    guarded = fed(Seasonal(8, 2, 0.0), *values)
    assert [guarded.predict(h) for h in (1, 2, 3)] == [close(148), close(157.071068), close(162)]
    assert guarded.failures == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, -5.0, math.inf])
def test_p11_what_is_no_value_is_refused_and_changes_nothing(name: str, bad: float) -> None:
    values = [5, 9, 4, 8, 6, 9, 5, 8, 5]
    plain, disturbed = fed(ALL[name](), *values), fed(ALL[name](), *values[:5])
    assert not disturbed.observe(bad)
    for value in values[5:]:
        disturbed.observe(value)
    assert disturbed.refused == 1
    assert disturbed.path(4) == plain.path(4)


def test_p12_constant_keeps_its_value() -> None:
    assert fed(Constant(), 7).predict(1) == 7


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("name", ALL)
@given(y=st.floats(0.1, 1e6), n=st.integers(1, 20), h=st.integers(1, 9))
def test_a_constant_series_stays_constant(name: str, y: float, n: int, h: int) -> None:
    assert fed(ALL[name](), *[y] * n).predict(h) == pytest.approx(y, rel=1e-9)


@pytest.mark.parametrize("name", ALL)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=30), h=st.integers(1, 9))
def test_every_forecast_is_finite_and_not_negative(name: str, values: list[float], h: int) -> None:
    guarded = fed(ALL[name](), *values)
    for ahead in (guarded.predict(h), guarded.quantile(h, 0.9), *guarded.bootstrap(h, lambda k: 0.5)):
        assert ahead is not None
        assert math.isfinite(ahead)
        assert ahead >= 0


@pytest.mark.parametrize("name", ALL)
def test_zeros_before_the_first_traffic_are_not_fitted(name: str) -> None:
    late, prompt = fed(ALL[name](), 0, 0, 0, 7, 8, 9, 10, 11, 12, 13, 14), fed(ALL[name](), 7, 8, 9, 10, 11, 12, 13, 14)
    assert late.predict(1) == prompt.predict(1)
    assert fed(ALL[name](), 0, 0).predict(1) == 0


def test_nothing_seen_nothing_said() -> None:
    assert Guarded(Kalman()).predict(1) is None
    assert Guarded(Kalman()).path(3) == ()


@given(st.lists(st.floats(-2.5, 2.5), min_size=1, max_size=3))
def test_what_explodes_is_known_by_its_roots(phi: list[float]) -> None:
    series = [0.0] * (len(phi) - 1) + [1.0]
    for _ in range(3000):
        series.append(sum(c * series[-1 - k] for k, c in enumerate(phi)))
        if not abs(series[-1]) < 1e100:
            break
    grows = max(abs(v) for v in series[-3:]) > 1e30
    if grows:  # well above radius 1
        assert not stable(phi, 1.0)
    if stable(phi, 0.9):
        assert not grows


def test_an_explosive_fit_is_refused() -> None:
    model = Arima()
    guarded = fed(model, *[2.0**k for k in range(10)])
    assert model.fit is not None
    assert stable(model.fit.phi, 1.05)
    assert guarded.predict(1) is not None


def test_arima_chooses_a_line_for_a_line() -> None:
    assert fed(Arima(), *[10 + 3 * t for t in range(12)]).predict(2) == pytest.approx(49)


def test_arima_on_logarithms() -> None:
    growing = [math.expm1(0.1 * t) for t in range(1, 15)]
    assert fed(Arima(log1p=True), *growing).predict(1) == pytest.approx(math.expm1(1.5))


# ---------------------------------------------------------------- the guard


class Broken:
    """Says whatever it is told to say."""

    name = "broken"
    ready = True

    def __init__(self, says: Callable[[], float]) -> None:
        self._says = says

    def observe(self, y: float) -> None:
        pass

    def predict(self, h: int) -> float:
        return self._says()


def fails() -> float:
    raise RuntimeError("no")


BAD: dict[str, Callable[[], float]] = {
    "nan": lambda: math.nan,
    "negative": lambda: -1.0,
    "huge": lambda: 1e18,
    "raises": fails,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_forecaster_is_replaced_by_the_last_value_and_counted(name: str) -> None:
    guarded = fed(Broken(BAD[name]), 7, 8)
    before = guarded.failures
    assert guarded.predict(1) == 8
    assert guarded.predict(1) == 8
    assert guarded.failures == before + 1  # asked once


@pytest.mark.parametrize("name", BAD)
def test_a_bad_forecaster_cannot_win(name: str) -> None:
    result = backtest([5.0] * 20, {"broken": lambda: Broken(BAD[name]), "holt": Holt}, (1, 2))
    assert result.winner == "holt"
    assert result.scores[-1].disqualified
    assert result.scores[-1].failures == result.scores[-1].points


def test_residuals_are_what_was_missed_by() -> None:
    guarded = fed(Constant(), 10, 12, 9, 10)
    assert guarded.residuals == (2, -3, 1)
    assert guarded.quantile(1, 1.0) == 12
    assert guarded.quantile(4, 1.0) == 14
    assert guarded.bootstrap(3, lambda k: (0.0, 0.4, 0.99)[k]) == (12, 7, 11)


# ---------------------------------------------------------------- back-test


def test_a_backtest_names_the_winner_and_its_margin() -> None:
    series = [50 + 20 * math.sin(2 * math.pi * t / 8) + t for t in range(64)]
    settings = ForecastSettings(period=8, ridge=0.0)
    result = backtest(series, makers(settings), (1, 2), warm_up=24)
    assert result.winner == "prophet"
    assert result.margin == pytest.approx(1, abs=1e-6)
    naive = next(s for s in result.scores if s.name == "seasonal-naive")
    assert naive.mae == pytest.approx(8)  # one period behind a slope of 1
    constant = next(s for s in result.scores if s.name == "constant")
    assert constant.points == naive.points == 79


def test_targets_of_zero_are_counted_and_not_divided_by() -> None:
    result = backtest([4, 4, 4, 0, 4, 4], {"constant": Constant}, (1,), warm_up=1)
    (score,) = result.scores
    assert (score.points, score.zeros) == (5, 1)
    assert score.mae == pytest.approx(8 / 5)
    assert score.mape == pytest.approx((1 + 0 + 0 + 0) / 4)
    assert result.margin is None


def test_pinball_by_hand() -> None:
    result = backtest([10, 10, 14, 10], {"constant": Constant}, (1,), warm_up=2)
    (score,) = result.scores  # 10 for 14: 0.9 * 4; then 90 % quantile of residuals (0, 4) above 14: 17.6 for 10
    assert score.pinball == pytest.approx((0.9 * 4 + 0.1 * 7.6) / 2)


def test_unknown_names_and_missing_periods_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs planner"):
        forecaster("prophet", ForecastSettings())
    with pytest.raises(ConfigError, match="one of constant"):
        forecaster("oracle", ForecastSettings())
    with pytest.raises(ConfigError, match="half as many harmonics"):
        ForecastSettings(period=4, harmonics=3)
    assert forecaster("Moving_Window", ForecastSettings()).name == "moving-window"
