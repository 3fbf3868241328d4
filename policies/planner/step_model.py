"""What a step costs, as the planner believes it: fitted to forward passes as they come, or handed in beforehand.

    seconds = base + per_x · x + per_kv · kv        x: prompt tokens (prefill, mixed) or sequences (decode); kv: tokens

A fit keeps at most 64 passes. Both axes are cut into equal buckets over the range that was seen (16, or 4 by 4), and
the oldest pass of the fullest bucket goes first, so that rare loads are not forgotten. What cannot be (a forbidden
sign, too few passes, all alike) is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from policies.cluster.ids import Role
from policies.frozen import frozen
from policies.planner.least_squares import dot, solve_ridge

_LEAST_S = 1e-6
_OUTLIER = 10.0
"""Times the median of its bucket at which a pass is not learned from."""
_NOISE = -1e-6
"""Seconds per sequence below which a slope of sequences is no rounding; either way it counts as none."""
_TINY_RIDGE = 1e-9
"""On columns of unit spread: shares a slope among columns that always move together, and changes nothing else."""


@frozen
class StepCoefficients:
    """Seconds, seconds per unit of x, seconds per token of KV."""

    base_s: float
    per_x_s: float
    per_kv_s: float = 0.0

    def seconds(self, x: float, kv: float = 0.0) -> float:
        """What one step takes; never below a microsecond."""
        return max(_LEAST_S, self.base_s + self.per_x_s * x + self.per_kv_s * kv)


@frozen
class Sample:
    """One pass: what it ran and how long it took, and when that was."""

    x: float
    kv: float
    seconds: float
    at_s: float


class StepModel:
    """The step cost of one role. `coefficients` is the fit where there is one, else the prior, else None."""

    def __init__(
        self, role: Role, prior: StepCoefficients | None = None, most: int = 64, buckets: int = 16, least: int = 5
    ) -> None:
        self.role = role
        self._prior = prior
        self._most, self._buckets, self._least = most, buckets, least
        self._per_axis = buckets if role is Role.PREFILL else math.isqrt(buckets)
        self._range = _Range()
        self._cells: dict[tuple[int, int], list[tuple[int, Sample]]] = {}  # numbered, oldest first
        self._count = self._number = 0
        self._newest_s: float | None = None
        self._fresh = False
        self._fit: StepCoefficients | None = None
        self._r2: float | None = None
        self.outliers = 0

    # ------------------------------------------------------------ what is believed

    @property
    def coefficients(self) -> StepCoefficients | None:
        return self._fitted() or self._prior

    @property
    def source(self) -> str:
        """Where the coefficients are from: live, prior, or none."""
        return "live" if self._fitted() else "prior" if self._prior else "none"

    @property
    def ready(self) -> bool:
        return self.coefficients is not None

    @property
    def r2(self) -> float | None:
        """1 − SSE/SST of the fit; None without one."""
        return self._r2 if self._fitted() else None

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for _, sample in sorted((one for cell in self._cells.values() for one in cell), key=_first))

    def age_s(self, now_s: float) -> float | None:
        """Since the newest pass that was learned from; None before any."""
        return None if self._newest_s is None else now_s - self._newest_s

    # ------------------------------------------------------------ learning

    def learn(self, sample: Sample) -> bool:
        """Take in one pass; False where it is not learned from."""
        x, kv, seconds = sample.x, sample.kv, sample.seconds
        if not (math.isfinite(x) and math.isfinite(kv) and math.isfinite(seconds)) or seconds <= 0:
            return False
        if self._range.widen(x, kv):
            kept = sorted((one for cell in self._cells.values() for one in cell), key=_first)
            self._cells = {}
            for one in kept:
                self._cells.setdefault(self._cell(one[1]), []).append(one)
        alike = self._cells.setdefault(self._cell(sample), [])
        if _is_outlier(seconds, [old.seconds for _, old in alike]):
            self.outliers += 1
            return False
        self._number += 1
        alike.append((self._number, sample))
        self._newest_s = sample.at_s
        self._count += 1
        self._fresh = False
        if self._count > self._most:
            fullest = max(self._cells.values(), key=lambda cell: (len(cell), -cell[0][0] if cell else 0))
            del fullest[0]  # the oldest of the fullest; of equally full ones, that whose oldest is oldest
            self._count -= 1
        return True

    def _cell(self, sample: Sample) -> tuple[int, int]:
        """The bucket of a pass: equal cuts of the range that was seen, of each axis that counts."""
        kv = 0 if self.role is Role.PREFILL else self._range.kv_cut(sample.kv, self._per_axis)
        return self._range.x_cut(sample.x, self._per_axis), kv

    # ------------------------------------------------------------ fitting

    def _fitted(self) -> StepCoefficients | None:
        if not self._fresh:
            self._fit, self._r2 = None, None
            samples = self.samples
            if len(samples) >= self._least:
                self._fit = self._allowed(samples)
            if self._fit is not None:
                self._r2 = _explained(self._fit, samples)
            self._fresh = True
        return self._fit

    def _allowed(self, samples: Sequence[Sample]) -> StepCoefficients | None:
        """The fit, where its signs can be: no slope below zero, except that of sequences, which then counts as none."""
        use_kv = self.role is not Role.PREFILL
        found = _solved(samples, use_x=True, use_kv=use_kv)
        if found is None:
            return None
        if self.role is Role.DECODE and found.per_x_s < 0:
            found = _solved(samples, use_x=False, use_kv=True) if found.per_x_s < _NOISE else _without_x(found)
            if found is None:
                return None
        elif found.per_x_s < 0:
            return None
        return found if found.per_kv_s >= 0 else None


def _without_x(fit: StepCoefficients) -> StepCoefficients:
    return StepCoefficients(base_s=fit.base_s, per_x_s=0.0, per_kv_s=fit.per_kv_s)


def _solved(samples: Sequence[Sample], *, use_x: bool, use_kv: bool) -> StepCoefficients | None:
    """Least squares on centred columns of unit spread; None where nothing varies, so that no slope can be told."""
    columns = [[s.x for s in samples]] * use_x + [[s.kv for s in samples]] * use_kv
    y = [s.seconds for s in samples]
    n = len(y)
    means = [math.fsum(column) / n for column in columns]
    centred = [[v - mean for v in column] for column, mean in zip(columns, means, strict=True)]
    spreads = [math.sqrt(dot(column, column) / n) for column in centred]
    varies = [spread > 1e-9 * (1 + abs(mean)) for spread, mean in zip(spreads, means, strict=True)]
    if not any(varies):
        return None
    used = [j for j, v in enumerate(varies) if v]
    rows = [[centred[j][i] / spreads[j] for j in used] for i in range(n)]
    mean_y = math.fsum(y) / n
    found = solve_ridge(rows, [v - mean_y for v in y], [_TINY_RIDGE * n] * len(used))
    if found is None:
        return None
    slopes = [0.0] * len(columns)
    for j, slope in zip(used, found, strict=True):
        slopes[j] = slope / spreads[j]
    base_s = mean_y - dot(slopes, means)
    per_x_s = slopes[0] if use_x else 0.0
    return StepCoefficients(base_s=base_s, per_x_s=per_x_s, per_kv_s=slopes[-1] if use_kv else 0.0)


def _explained(fit: StepCoefficients, samples: Sequence[Sample]) -> float | None:
    y = [s.seconds for s in samples]
    mean = math.fsum(y) / len(y)
    total = math.fsum((v - mean) ** 2 for v in y)
    missed = math.fsum((s.seconds - fit.seconds(s.x, s.kv)) ** 2 for s in samples)
    return 1 - missed / total if total > 0 else None


def _first(numbered: tuple[int, Sample]) -> int:
    return numbered[0]


def _is_outlier(seconds: float, alike: list[float]) -> bool:
    """Against those of its bucket; the least of them, which is quick to find, settles nearly all."""
    return bool(alike) and seconds > _OUTLIER * min(alike) and seconds > _OUTLIER * median(alike)


class _Range:
    """The range of x and kv that was seen."""

    __slots__ = ("_kv_high", "_kv_low", "_x_high", "_x_low")

    def __init__(self) -> None:
        self._x_low = self._kv_low = math.inf
        self._x_high = self._kv_high = -math.inf

    def widen(self, x: float, kv: float) -> bool:
        """Whether a pass lies outside; then the range includes it."""
        if self._x_low <= x <= self._x_high and self._kv_low <= kv <= self._kv_high:
            return False
        self._x_low, self._x_high = min(self._x_low, x), max(self._x_high, x)
        self._kv_low, self._kv_high = min(self._kv_low, kv), max(self._kv_high, kv)
        return True

    def x_cut(self, x: float, n: int) -> int:
        return _cut(x, self._x_low, self._x_high, n)

    def kv_cut(self, kv: float, n: int) -> int:
        return _cut(kv, self._kv_low, self._kv_high, n)


def _cut(value: float, low: float, high: float, n: int) -> int:
    width = (high - low) / n
    return min(n - 1, int((value - low) / width)) if width > 0 else 0
