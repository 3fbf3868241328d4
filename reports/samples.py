"""The state of each worker at whole virtual seconds, taken from its steps as they are written.

A sample at second t is the step that covers t (start <= t < end), so a worker without work has no row. Which seconds
are kept depends only on what was open when, never on the order or the size of the batches. `waiting` is the exception:
the requests that had been dispatched to the worker and not been admitted yet, from their own time stamps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from reports.columns import F64, I64, distinct
from reports.gaps import positions

MAX_SAMPLES: Final = 10_000
"""Rows of samples.parquet at most: enough for any plot, and a file that opens at once."""

STATE_NAMES: Final = ("worker_id", "running", "waiting", "active_blocks", "cached_blocks", "decodes", "prefill_tokens")
"""Columns taken over from the step (`waiting` until `Waits` replaces it); `step_s`, the mean length of its steps, is
added. The blocks are those of the row in steps.parquet, so a leap shows what it came to; `step_s` may differ in its
last digits. All else is the same with and without leaps."""


class Sampler:
    """Collects samples, thinned by a stride in seconds that doubles whenever there are more than MAX_SAMPLES."""

    def __init__(self) -> None:
        self.stride_s = 1
        self._kept: list[F64] = []
        self._rows = 0

    def add(self, columns: dict[str, F64], is_gap: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Take the seconds that these rows of steps.parquet cover; `is_gap` rows are no steps and are left out."""
        steps = {name: column[~is_gap] for name, column in columns.items()}
        first, count = self._seconds(steps["start_s"], steps["end_s"])
        while int(count.sum()) > 2 * MAX_SAMPLES:
            self._coarser()
            first, count = self._seconds(steps["start_s"], steps["end_s"])
        total = int(count.sum())
        if not total:
            return
        ends = np.cumsum(count)
        row, place = positions(ends - count, ends, 0, total)
        at_s = (first[row] + place) * float(self.stride_s)
        step_s = (steps["end_s"] - steps["start_s"]) / steps["steps"]
        self._kept.append(np.column_stack([at_s, *(steps[name][row] for name in STATE_NAMES), step_s[row]]))
        self._rows += total
        while self._rows > 4 * MAX_SAMPLES:
            self._coarser()

    def rows(self) -> F64:
        """The samples, columns at_s, STATE_NAMES, step_s, ordered by second and worker."""
        while self._rows > MAX_SAMPLES:
            self._coarser()
        if not self._kept:
            return np.empty((0, len(STATE_NAMES) + 2))
        table = np.concatenate(self._kept)
        return table[np.lexsort((table[:, 1], table[:, 0]))]

    def _seconds(self, start_s: F64, end_s: F64) -> tuple[I64, I64]:
        """(first multiple of the stride, how many) in [start, end) of each row."""
        first = np.ceil(start_s / self.stride_s)
        count = np.maximum(np.ceil(end_s / self.stride_s) - first, 0.0)
        return first.astype(np.int64), count.astype(np.int64)

    def _coarser(self) -> None:
        self.stride_s *= 2
        self._kept = [part[part[:, 0] % self.stride_s == 0] for part in self._kept]
        self._rows = sum(len(part) for part in self._kept)


WAIT_COLUMNS = ("worker_id", "prefill_worker_id", "dispatch_s", "admit_s")


class Waits:
    """Who waited at a whole second: dispatched (dispatch_s <= t) and not admitted for the first time (t < admit_s).

    The worker is the one that computes the prompt: prefill_worker_id where there is one, else worker_id (of a request
    that migrated, the last). A request that was never admitted does not count. Nothing depends on how steps were cut.
    """

    def __init__(self) -> None:
        self._kept: list[F64] = []

    def add(self, requests: Mapping[str, F64]) -> None:
        """Take what waited over a whole second; nothing else can be in a sample, so most requests are forgotten."""
        worker, dispatch, admit = waits_of(requests)
        seen = np.ceil(dispatch) < np.ceil(admit)
        self._kept.append(np.stack([worker[seen], dispatch[seen], admit[seen]]))

    def at(self, worker_ids: F64, at_s: F64) -> F64:
        """How many waited for each of these workers at these whole seconds."""
        waiting = np.zeros(len(at_s))
        worker, dispatch, admit = np.concatenate(self._kept, axis=1) if self._kept else np.empty((3, 0))
        for worker_id in distinct(worker.astype(np.int64)):
            asked, mine = worker_ids == worker_id, worker == worker_id
            came, left = np.sort(dispatch[mine]), np.sort(admit[mine])
            times = at_s[asked]
            waiting[asked] = np.searchsorted(came, times, side="right") - np.searchsorted(left, times, side="right")
        return waiting


def waits_of(requests: Mapping[str, F64]) -> tuple[F64, F64, F64]:
    """(worker, dispatch_s, admit_s) of the requests that waited, from these columns of requests.parquet."""
    prefill = requests["prefill_worker_id"]
    worker = np.where(np.isnan(prefill), requests["worker_id"], prefill)
    dispatch, admit = requests["dispatch_s"], requests["admit_s"]
    waited = dispatch < admit  # false where one of them is missing
    return worker[waited], dispatch[waited], admit[waited]
