"""What a step costs, as the planner believes it: fitted to forward passes as they come, or handed in beforehand.

    seconds = base + per_x · x + per_kv · kv        x: prompt tokens (prefill, mixed) or sequences (decode); kv: tokens

A fit keeps at most 64 passes. Both axes are cut into equal buckets over the range that was seen (16, or 4 by 4), and
the oldest pass of the fullest bucket goes first, so that rare loads are not forgotten. What cannot be (a forbidden
sign, too few passes, all alike) is not used.
"""

from __future__ import annotations

import math
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
        self._samples: list[Sample] = []
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
        return tuple(self._samples)

    def age_s(self, now_s: float) -> float | None:
        """Since the newest pass that was learned from; None before any."""
        return now_s - self._samples[-1].at_s if self._samples else None

    # ------------------------------------------------------------ learning

    def learn(self, sample: Sample) -> bool:
        """Take in one pass; False where it is not learned from."""
        if not all(map(math.isfinite, (sample.x, sample.kv, sample.seconds))) or sample.seconds <= 0:
            return False
        cells = self._cells([*self._samples, sample])
        alike = [old.seconds for old, cell in zip(self._samples, cells, strict=False) if cell == cells[-1]]
        if alike and sample.seconds > _OUTLIER * median(alike):
            self.outliers += 1
            return False
        self._samples.append(sample)
        self._fresh = False
        if len(self._samples) > self._most:
            self._forget(cells)
        return True

    def _forget(self, cells: list[tuple[int, int]]) -> None:
        """The oldest of the fullest bucket; of equally full ones, the one whose oldest is oldest."""
        counts: dict[tuple[int, int], int] = {}
        for cell in cells:
            counts[cell] = counts.get(cell, 0) + 1
        fullest = max(counts.values())
        del self._samples[next(i for i, cell in enumerate(cells) if counts[cell] == fullest)]

    def _cells(self, samples: list[Sample]) -> list[tuple[int, int]]:
        """The bucket of each pass: equal cuts of the range of each axis."""
        per_axis = self._buckets if self.role is Role.PREFILL else math.isqrt(self._buckets)
        xs = _cuts([s.x for s in samples], per_axis)
        kvs = [0] * len(samples) if self.role is Role.PREFILL else _cuts([s.kv for s in samples], per_axis)
        return list(zip(xs, kvs, strict=True))

    # ------------------------------------------------------------ fitting

    def _fitted(self) -> StepCoefficients | None:
        if not self._fresh:
            self._fit, self._r2 = None, None
            if len(self._samples) >= self._least:
                self._fit = self._allowed()
            if self._fit is not None:
                self._r2 = self._explained(self._fit)
            self._fresh = True
        return self._fit

    def _allowed(self) -> StepCoefficients | None:
        """The fit, where its signs can be: no slope below zero, except that of sequences, which then counts as none."""
        use_kv = self.role is not Role.PREFILL
        found = self._solved(use_x=True, use_kv=use_kv)
        if found is None:
            return None
        if self.role is Role.DECODE and found.per_x_s < 0:
            found = self._solved(use_x=False, use_kv=True) if found.per_x_s < _NOISE else _without_x(found)
            if found is None:
                return None
        elif found.per_x_s < 0:
            return None
        return found if found.per_kv_s >= 0 else None

    def _solved(self, *, use_x: bool, use_kv: bool) -> StepCoefficients | None:
        """Least squares on centred columns of unit spread; None where nothing varies, so that no slope can be told."""
        columns = [[s.x for s in self._samples]] * use_x + [[s.kv for s in self._samples]] * use_kv
        y = [s.seconds for s in self._samples]
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

    def _explained(self, fit: StepCoefficients) -> float | None:
        y = [s.seconds for s in self._samples]
        mean = math.fsum(y) / len(y)
        total = math.fsum((v - mean) ** 2 for v in y)
        missed = math.fsum((s.seconds - fit.seconds(s.x, s.kv)) ** 2 for s in self._samples)
        return 1 - missed / total if total > 0 else None


def _without_x(fit: StepCoefficients) -> StepCoefficients:
    return StepCoefficients(base_s=fit.base_s, per_x_s=0.0, per_kv_s=fit.per_kv_s)


def _cuts(values: list[float], n: int) -> list[int]:
    low, high = min(values), max(values)
    width = (high - low) / n
    return [min(n - 1, int((v - low) / width)) if width > 0 else 0 for v in values]
