"""Which forecaster would have been best on a recorded series: rolling origin, each asked with what it knew then.

Errors over all horizons asked for: MAE; MAPE (targets of 0 left out and counted); pinball loss of the 0.9 quantile,
max(0.9 e, −0.1 e) with e = value − quantile. Who fails at more than 5 % of the points cannot win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policies.frozen import frozen
from policies.planner.forecast.guarded import Guarded
from policies.planner.forecast.series import Forecaster

_QUANTILE = 0.9
_MOST_FAILURES = 0.05
BASELINE = "seasonal-naive"


@frozen
class Score:
    """How one forecaster did over `points` forecasts. `zeros`: targets of 0, not in `mape`. None: nothing to tell."""

    name: str
    points: int
    mae: float | None
    mape: float | None
    pinball: float | None
    zeros: int
    failures: int

    @property
    def disqualified(self) -> bool:
        return self.points == 0 or self.failures > _MOST_FAILURES * self.points


@frozen
class Backtest:
    """All scores, best first; `winner` None where all are disqualified. `margin`: by what share the winner's MAE is
    below that of the seasonal-naive forecast (None: that has none, or one of 0)."""

    scores: tuple[Score, ...]
    winner: str | None
    margin: float | None


def backtest(
    series: Sequence[float],
    makers: Mapping[str, Callable[[], Forecaster]],
    horizons: Sequence[int] = (1,),
    warm_up: int = 5,
) -> Backtest:
    """Compare forecasters on one series (equal intervals), from `warm_up` values on. Every forecaster is asked at the
    same points; one that is not ready yet is scored by the last value, as the planner would have it."""
    scores = [_score(name, make, series, horizons, warm_up) for name, make in makers.items()]
    scores.sort(key=lambda s: (s.disqualified, s.mae if s.mae is not None else float("inf"), s.name))
    best = scores[0] if scores and not scores[0].disqualified else None
    naive = next((s for s in scores if s.name == BASELINE), None)
    margin = None
    if best is not None and best.mae is not None and naive is not None and naive.mae:
        margin = 1 - best.mae / naive.mae
    return Backtest(scores=tuple(scores), winner=best.name if best else None, margin=margin)


def _score(
    name: str, make: Callable[[], Forecaster], series: Sequence[float], horizons: Sequence[int], warm_up: int
) -> Score:
    model = Guarded(make())
    off: list[float] = []
    relative: list[float] = []
    pinball: list[float] = []
    zeros = failures = 0
    for t, y in enumerate(series):
        model.observe(y)
        if t + 1 < warm_up:
            continue
        for h in horizons:
            if t + h >= len(series):
                continue
            target, before = series[t + h], model.failures
            ahead, high = model.predict(h), model.quantile(h, _QUANTILE)
            failures += model.failures > before
            if ahead is None or high is None:
                continue
            off.append(abs(target - ahead))
            above = target - high
            pinball.append(max(_QUANTILE * above, (_QUANTILE - 1) * above))
            if target == 0:
                zeros += 1
            else:
                relative.append(off[-1] / target)
    return Score(
        name=name,
        points=len(off),
        mae=_mean(off),
        mape=_mean(relative),
        pinball=_mean(pinball),
        zeros=zeros,
        failures=failures,
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
