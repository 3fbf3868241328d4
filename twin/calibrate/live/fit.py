"""Fits step times to the times of requests: simulate, compare, correct, until nothing moves.

Under a given schedule TTFT and the time from first to last token are linear in what a step costs, so each round is
one least-squares problem without negative coefficients. The schedule depends on the coefficients a little (who meets
whom in a batch), therefore the rounds. Means count, so residuals are squared and outliers stay in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.calibrate.live.run import ServedWorker
from twin.calibrate.live.schedule import FEATURES, Schedule, schedule
from twin.calibrate.shapes import F64
from twin.engine.settings import EngineSettings
from twin.perf.linear import LinearCoefficients

NAMES = tuple(field.name for field in fields(LinearCoefficients))
ROUNDS = 15
WHOLE_STEPS, DAMPED = 3, 0.4
"""So many rounds go all the way to what would be best under their schedule, later ones only so far of it: schedules
that flip between two answers would have them flip as well."""
SMALL_STEP = 3e-3
"""Relative change of predicted times below which a fit ends."""
HELD = 1e-3
"""A ridge, in shares of each coefficient's part of the times: decides only between what measurements cannot tell
apart, like a constant per prompt in a step and one outside the engine."""
FOLDS = 5
LEAST = 10
"""Fewer requests than this cannot hold seven figures."""


@frozen
class Errors:
    """Relative errors of TTFT and TPOT, request by request: half are below the first, nine of ten below the second."""

    ttft: tuple[float, float]
    tpot: tuple[float, float] | None

    def text(self) -> str:
        pairs = (("TTFT", self.ttft), ("TPOT", self.tpot))
        told = [f"{name} {pair[0]:.0%} (90th percentile {pair[1]:.0%})" for name, pair in pairs if pair is not None]
        return f"{', '.join(told)} of single requests not used in the fit"


@frozen
class GroupFit:
    """What was found for one group; `unseen` are the errors on requests that a fit had not seen, `bias` the relative
    errors of the means of TTFT and of time per token in the fit itself. `reach`: largest batch, prompt, context."""

    group: str
    coefficients: LinearCoefficients
    path_s: float
    requests: int
    rounds: int
    unseen: Errors | None
    bias: tuple[float, float | None]
    reach: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests that count, under one schedule: `ttft` and `rest` have a row of features each, the constant outside the
    engine first; times in seconds, `gaps` in each `rest`."""

    ttft: F64
    rest: F64
    ttft_s: F64
    rest_s: F64
    gaps: F64


def fit_group(
    group: str,
    workers: Sequence[ServedWorker],
    settings: EngineSettings,
    told: Callable[[str], None] = lambda what: None,
) -> GroupFit:
    """The step times of one group. Raises ConfigError where too few requests completed, EngineError where the twin's
    engine cannot run what the live one ran."""
    requests = [request for worker in workers for request in worker.requests if request.fitted]
    if len(requests) < LEAST:
        raise ConfigError(
            f"group {group}: {len(requests)} completed requests to fit to; at least {LEAST} are needed, "
            f"and 100 or more are worth while"
        )
    theta = _first_guess(workers)
    rows, batch = _scheduled(workers, settings, theta)
    best = (math.inf, theta, rows, batch)
    for done in range(1, ROUNDS + 1):
        last, aim = theta, _solved(rows, theta)
        theta = last + (1.0 if done <= WHOLE_STEPS else DAMPED) * (aim - last)
        moved = _moved(rows, last, theta)
        rows, batch = _scheduled(workers, settings, theta)
        left = _left(rows, theta)
        told(f"group {group}: round {done}, predictions moved by {moved:.2%}, {left:.4f} unexplained")
        best = min(best, (left, theta, rows, batch), key=lambda one: one[0])
        if moved < SMALL_STEP:
            break
    _, theta, rows, batch = best
    ttft_s, rest_s = rows.ttft @ theta, rows.rest @ theta
    return GroupFit(
        group=group,
        coefficients=_coefficients(theta),
        path_s=float(theta[0]),
        requests=len(rows.ttft_s),
        rounds=done,
        unseen=_unseen(rows, theta),
        bias=(
            float(ttft_s.mean() / rows.ttft_s.mean() - 1),
            float(rest_s.sum() / rows.rest_s.sum() - 1) if rows.rest_s.sum() else None,
        ),
        reach=(
            max(1, batch),
            max(request.isl for request in requests),
            max(request.isl + request.outputs for request in requests),
        ),
    )


def _first_guess(workers: Sequence[ServedWorker]) -> F64:
    """A constant per step from the fastest answers, and one per prompt token from the fastest prompts."""
    seen = [one for worker in workers for one in worker.requests if one.first_s is not None and one.last_s is not None]
    tpot = [(one.last_s - one.first_s) / (one.outputs - 1) for one in seen if one.outputs > 1]  # type: ignore[operator]
    step_s = float(np.quantile(tpot, 0.25)) if tpot else 1e-3
    per_token = [(one.first_s - one.dispatch_s) / one.isl for one in seen]  # type: ignore[operator]
    return np.array([0.0, step_s, 0.5 * float(np.quantile(per_token, 0.25)), 0.0, 0.0, 0.0, 0.0])


def _scheduled(workers: Sequence[ServedWorker], settings: EngineSettings, theta: F64) -> tuple[_Rows, int]:
    coefficients = _coefficients(theta)
    done = [schedule(worker, settings, coefficients, float(theta[0])) for worker in workers]
    return _rows(done), max(one.batch for one in done)


def _coefficients(theta: F64) -> LinearCoefficients:
    return LinearCoefficients(**dict(zip(NAMES, theta[1:].tolist(), strict=True)))


def _rows(done: Sequence[Schedule]) -> _Rows:
    ttft, rest, ttft_s, rest_s, gaps = [], [], [], [], []
    for one in (passed for each in done for passed in each.passed if passed.request.fitted):
        request = one.request
        assert request.first_s is not None
        assert request.last_s is not None
        ttft.append([1.0, *one.until_first])
        ttft_s.append(request.first_s - request.dispatch_s)
        if request.outputs > 1:
            rest.append([0.0, *one.from_first])
            rest_s.append(request.last_s - request.first_s)
            gaps.append(request.outputs - 1)
    width = 1 + FEATURES
    return _Rows(
        np.array(ttft).reshape(-1, width), np.array(rest).reshape(-1, width), np.array(ttft_s), np.array(rest_s),
        np.array(gaps, dtype=np.float64),
    )  # fmt: skip


def _solved(rows: _Rows, theta: F64) -> F64:
    """Least squares without negative coefficients. TTFT counts by its residual, an answer by its residual over the
    root of its gaps, both in units of what is left of them now."""
    from scipy.optimize import nnls

    per_gap = 1 / np.sqrt(rows.gaps)
    sizes = (
        _size(rows.ttft @ theta - rows.ttft_s, rows.ttft_s),
        _size((rows.rest @ theta - rows.rest_s) * per_gap, rows.rest_s * per_gap) if len(rows.gaps) else 1.0,
    )
    x = np.vstack([rows.ttft / sizes[0], rows.rest * per_gap[:, None] / sizes[1]])
    y = np.concatenate([rows.ttft_s / sizes[0], rows.rest_s * per_gap / sizes[1]])
    scale = np.sqrt((x**2).sum(axis=0))
    scale[scale == 0] = 1.0
    held = HELD * np.eye(x.shape[1])
    found, _ = nnls(np.vstack([x / scale, held]), np.concatenate([y, np.zeros(x.shape[1])]))
    return np.asarray(found / scale)


def _size(residuals: F64, values: F64) -> float:
    """Root of their mean square; at least a thousandth of the values, where a fit is exact."""
    return float(max(np.sqrt((residuals**2).mean()), 1e-3 * np.abs(values).mean(), 1e-12))


def _moved(rows: _Rows, last: F64, theta: F64) -> float:
    before = np.concatenate([rows.ttft @ last, rows.rest @ last])
    after = np.concatenate([rows.ttft @ theta, rows.rest @ theta])
    return float(np.abs(after - before).sum() / max(np.abs(before).sum(), 1e-12))


def _left(rows: _Rows, theta: F64) -> float:
    """Mean squared residuals under the schedule of `theta` itself, in shares of the mean squares of the times."""
    per_gap = 1 / np.sqrt(rows.gaps)
    ttft = ((rows.ttft @ theta - rows.ttft_s) ** 2).sum() / (rows.ttft_s**2).sum()
    rest = (((rows.rest @ theta - rows.rest_s) * per_gap) ** 2).sum() / max(((rows.rest_s * per_gap) ** 2).sum(), 1e-12)
    return float(ttft + rest)


def _unseen(rows: _Rows, theta: F64) -> Errors | None:
    """Errors of fits to four fifths of the requests on the last fifth, five times; neighbours in time stay together."""
    if len(rows.ttft_s) < FOLDS * LEAST:
        return None
    of_ttft, of_rest = (np.arange(len(values)) * FOLDS // len(values) for values in (rows.ttft_s, rows.gaps))
    ttft, tpot = [], []
    for fold in range(FOLDS):
        keep, drop = (of_ttft != fold, of_rest != fold), (of_ttft == fold, of_rest == fold)
        part = _solved(_part(rows, *keep), theta)
        ttft.append(rows.ttft[drop[0]] @ part / rows.ttft_s[drop[0]] - 1)
        tpot.append(rows.rest[drop[1]] @ part / rows.rest_s[drop[1]] - 1)
    return Errors(ttft=_pair(ttft), tpot=_pair(tpot) if len(rows.gaps) else None)


def _part(rows: _Rows, of_ttft: F64, of_rest: F64) -> _Rows:
    first, second = of_ttft.astype(bool), of_rest.astype(bool)
    return _Rows(
        rows.ttft[first], rows.rest[second], rows.ttft_s[first], rows.rest_s[second], rows.gaps[second]
    )  # fmt: skip


def _pair(errors: Sequence[F64]) -> tuple[float, float]:
    sizes = np.abs(np.concatenate(errors))
    return float(np.quantile(sizes, 0.5)), float(np.quantile(sizes, 0.9))


def parts(fit: GroupFit) -> list[tuple[str, float]]:
    """Coefficients by name, the constant outside the engine first."""
    return [("path_s", fit.path_s), *zip(NAMES, astuple(fit.coefficients), strict=True)]
