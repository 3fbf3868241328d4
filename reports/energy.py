"""An estimate of the energy that GPUs draw, from the steps that they did: never measured, and shown as an estimate.

It knows the rated power and what steps ask of a GPU (handed over in `PowerMeta`), not what the GPU is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from reports.columns import F64, I64, Bools, Columns
from reports.gaps import GAP_COLUMNS, PIECE_VALUES, positions
from reports.report import PowerMeta

IDLE_SHARE: Final = 0.25
"""Of the rated power: what a GPU draws that does nothing."""
READING_SHARE: Final = 0.6
"""A GPU that only reads memory draws this share of what one that multiplies draws, above idle."""

ENERGY_COLUMNS: Final = (
    *("worker_id", "kind", "start_s", "end_s", "steps", "decodes", "ctx_tokens", "prefill_tokens"),
    *GAP_COLUMNS[1:],
)


class _Steps(NamedTuple):
    """Steps and leaps: equal-length arrays. Step j of a leap (from 0) takes `time0_s + j * (time1_s + j * time2_s)` and
    reads `ctx_tokens + j * decodes` tokens of context."""

    steps: F64
    length_s: F64
    time0_s: F64
    time1_s: F64
    time2_s: F64
    decodes: F64
    ctx_tokens: F64
    prefill_tokens: F64

    def at(self, rows: Bools | I64) -> _Steps:
        return _Steps(*(column[rows] for column in self))

    def step(self, j: F64) -> _Steps:
        """The j-th step of each row as a row of its own."""
        time_s = self.time0_s + j * (self.time1_s + j * self.time2_s)
        one, none = np.ones_like(j), np.zeros_like(j)
        return self._replace(
            steps=one,
            length_s=np.where(self.steps > 1, time_s, self.length_s),
            time0_s=time_s,
            time1_s=none,
            time2_s=none,
            ctx_tokens=self.ctx_tokens + j * self.decodes,
        )


def use_s(batch: Columns, rows: Bools, power: PowerMeta) -> F64:
    """Seconds at full power of each step or leap: for each step its length times max(multiply share, 0.6 * bandwidth
    share), its length at most. A leap is what its steps are, one by one where what limits them changes on the way."""
    given = _steps(batch, rows)
    used = _used_s(given, power)[np.arange(len(given.steps)), _limit(given, power)] if len(given.steps) else given.steps
    first, last = given.step(np.zeros_like(given.steps)), given.step(given.steps - 1.0)
    mixed = (given.steps > 1) & ((_limit(first, power) != _limit(last, power)) | (given.time2_s != 0.0))
    if mixed.any():
        used = used.copy()
        used[mixed] = _one_by_one(given.at(mixed), power)
    return used


def _steps(batch: Columns, rows: Bools) -> _Steps:
    length_s = (batch.floats("end_s") - batch.floats("start_s"))[rows]
    steps = batch.floats("steps")[rows]
    told = batch.floats("gap_tokens")[rows] > 0  # else its steps are taken as equal
    time0, time1, time2 = (batch.floats(name)[rows] for name in ("gap0_s", "gap1_s", "gap2_s"))
    return _Steps(
        steps,
        length_s,
        np.where(told, time0, length_s / np.maximum(steps, 1.0)),
        np.where(told, time1, 0.0),
        np.where(told, time2, 0.0),
        *(batch.floats(name)[rows] for name in ("decodes", "ctx_tokens", "prefill_tokens")),
    )


def _used_s(given: _Steps, power: PowerMeta) -> F64:
    """Three columns for each row: what multiplying, reading, and its length allow, over all of its steps."""
    steps, decodes = given.steps, given.decodes
    tokens = decodes * steps + given.prefill_tokens
    ctx_tokens = given.ctx_tokens * steps + decodes * steps * (steps - 1) / 2
    touched = 1.0 - power.expert_missed ** (tokens / np.maximum(steps, 1.0))
    read_s = steps * (power.step_read_s + power.experts_read_s * touched) + power.ctx_token_read_s * ctx_tokens
    return np.stack([power.token_multiply_s * tokens, READING_SHARE * read_s, given.length_s], axis=1)


def _limit(given: _Steps, power: PowerMeta) -> I64:
    """Which of the three columns counts: the larger of the first two, the third at most."""
    used = _used_s(given, power)
    larger = np.argmax(used[:, :2], axis=1)
    return np.where(used[np.arange(len(used)), larger] > used[:, 2], 2, larger)


def _one_by_one(given: _Steps, power: PowerMeta) -> F64:
    """The sums over the steps of each leap, in bounded memory."""
    ends = np.cumsum(given.steps.astype(np.int64))
    starts, used = ends - given.steps.astype(np.int64), np.zeros_like(given.steps)
    for low in range(0, int(ends[-1]), PIECE_VALUES):
        row, j = positions(starts, ends, low, min(low + PIECE_VALUES, int(ends[-1])))
        one = given.at(row).step(j.astype(np.float64))
        amount = _used_s(one, power)[np.arange(len(row)), _limit(one, power)]
        used += np.bincount(row, amount, minlength=len(used))
    return used


def energy_j(held_s: float, used_s: float, gpus: int, tdp_w: float) -> float:
    """Energy = idle power * time held + (rated - idle power) * time at full power, for each GPU of a worker; idle power
    is a quarter of the rated one. An estimate: nothing of it was measured.
    """
    return gpus * tdp_w * (IDLE_SHARE * held_s + (1.0 - IDLE_SHARE) * used_s)
