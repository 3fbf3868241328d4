"""From a forecaster's name to one. Outside plug-ins are found by the caller and passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from policies.errors import ConfigError
from policies.frozen import frozen
from policies.planner.forecast.arima import Arima
from policies.planner.forecast.constant import Constant, MovingWindow
from policies.planner.forecast.holt import Holt
from policies.planner.forecast.kalman import Kalman
from policies.planner.forecast.seasonal import Seasonal, SeasonalNaive
from policies.planner.forecast.series import Forecaster

Maker = Callable[[], Forecaster]


@frozen
class ForecastSettings:
    """The knobs of all forecasters; `period` is a season in intervals (None: none is known, and who needs one is not to
    be had). Variances of `kalman` are in squared units of the series."""

    kalman_q_level: float = 1.0
    kalman_q_trend: float = 0.1
    kalman_r: float = 10.0
    kalman_min_points: int = 5
    holt_alpha: float = 0.5
    holt_beta: float = 0.3
    window_points: int = 5
    arima_log1p: bool = False
    period: int | None = None
    harmonics: int = 2
    ridge: float = 0.1

    def __post_init__(self) -> None:
        for key in ("kalman_q_level", "kalman_q_trend", "ridge"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"planner.{key} is {getattr(self, key)}, it must be 0 or more")
        if not self.kalman_r > 0:
            raise ConfigError(f"planner.kalman_r is {self.kalman_r}, it must be above 0")
        for key in ("holt_alpha", "holt_beta"):
            if not 0 < getattr(self, key) <= 1:
                raise ConfigError(f"planner.{key} is {getattr(self, key)}, it must be above 0 and at most 1")
        for key in ("kalman_min_points", "window_points", "harmonics"):
            if getattr(self, key) < 1:
                raise ConfigError(f"planner.{key} is {getattr(self, key)}, it must be 1 or more")
        if self.period is not None and (self.period < 2 or 2 * self.harmonics > self.period):
            raise ConfigError(
                f"planner.period is {self.period} with {self.harmonics} harmonics; a season is 2 intervals or more, "
                "and has at most half as many harmonics"
            )


def makers(settings: ForecastSettings) -> Mapping[str, Maker]:
    """Every forecaster that can be had with these settings, by name."""
    s = settings
    found: dict[str, Maker] = {
        "constant": Constant,
        "moving-window": lambda: MovingWindow(s.window_points),
        "holt": lambda: Holt(s.holt_alpha, s.holt_beta),
        "kalman": lambda: Kalman(s.kalman_q_level, s.kalman_q_trend, s.kalman_r, s.kalman_min_points),
        "arima": lambda: Arima(log1p=s.arima_log1p),
    }
    if s.period is not None:
        period = s.period
        found["prophet"] = lambda: Seasonal(period, s.harmonics, s.ridge)
        found["seasonal-naive"] = lambda: SeasonalNaive(period)
    return MappingProxyType(found)


def forecaster(
    name: str, settings: ForecastSettings, plugins: Mapping[str, Maker] = MappingProxyType({})
) -> Forecaster:
    """A new forecaster. Raises ConfigError for a name that is not known, or that needs a `period`."""
    kebab = name.strip().lower().replace("_", "-")
    known = makers(settings)
    make = known.get(kebab) or plugins.get(kebab) or plugins.get(name)
    if make is not None:
        return make()
    if kebab in ("prophet", "seasonal-naive"):
        raise ConfigError(f"planner.load_predictor is {name}, which needs planner.period: intervals in a season")
    raise ConfigError(f"planner.load_predictor is {name!r}, it must be one of {', '.join([*known, *plugins])}")
