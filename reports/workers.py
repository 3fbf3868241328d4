"""What each worker did: sums over its steps and over the requests that it was sent.

Steps are read in batches and requests a column at a time. It must not define a metric of its own.
"""

from __future__ import annotations

import math

import numpy as np

from reports import metrics
from reports.columns import F64, I64, Bools, Columns, distinct
from reports.record import RunRecord
from reports.report import RunMeta, WorkerFigures, WorkerMeta
from reports.samples import WAIT_COLUMNS, waits_of

STEP_TOTAL_COLUMNS = (
    "worker_id", "kind", "start_s", "end_s", "steps", "running", "active_blocks", "preempted",
)  # fmt: skip


class StepTotals:
    """Sums and peaks of steps and leaps per worker, and when the last of all ended (NaN: there is none); "gap" rows are
    no steps and count only for ITL.
    """

    def __init__(self, record: RunRecord) -> None:
        self._sums: dict[str, dict[int, float]] = {name: {} for name in ("steps", "busy_s", "running_s", "preempted")}
        self._peaks: dict[str, dict[int, float]] = {name: {} for name in ("active_blocks",)}
        self.workers: set[int] = set()
        self.last_s = math.nan
        for batch in record.steps.batches(STEP_TOTAL_COLUMNS):
            self._add(batch)

    def sum(self, name: str, worker_id: int) -> float:
        return self._sums[name].get(worker_id, 0.0)

    def peak(self, name: str, worker_id: int) -> int:
        return int(self._peaks[name].get(worker_id, 0))

    def _add(self, batch: Columns) -> None:
        kind, labels = batch.codes("kind")
        is_step = np.array([label != "gap" for label in labels], dtype=np.bool_)[kind]
        ids, place = np.unique(batch.ints("worker_id")[is_step], return_inverse=True)
        self.workers.update(int(worker_id) for worker_id in ids)
        end_s = batch.floats("end_s")[is_step]
        self.last_s = float(np.fmax.reduce(end_s, initial=self.last_s))
        length_s = end_s - batch.floats("start_s")[is_step]
        amounts = {name: batch.floats(name)[is_step] for name in ("steps", "preempted", "running")}
        amounts |= {"busy_s": length_s, "running_s": length_s * amounts["running"]}
        for name, sums in self._sums.items():
            for worker_id, amount in zip(ids, np.bincount(place, amounts[name]), strict=True):
                sums[int(worker_id)] = sums.get(int(worker_id), 0.0) + float(amount)
        for name, peaks in self._peaks.items():
            highest = np.zeros(len(ids))
            np.maximum.at(highest, place, batch.floats(name)[is_step])
            for worker_id, peak in zip(ids, highest, strict=True):
                peaks[int(worker_id)] = max(peaks.get(int(worker_id), 0.0), float(peak))


class _RequestTotals:
    """Sums of requests per worker, at the places of `ids`; a prompt belongs to its prefill worker if it has one."""

    def __init__(self, requests: Columns, completed: Bools, ids: I64, answered: I64, prefilled: I64) -> None:
        self._ids = ids
        split = (prefilled >= 0) & (prefilled != answered)
        prompts = np.where(prefilled >= 0, prefilled, answered)
        admitted = ~np.isnan(requests.floats("admit_s"))
        isl, cached = requests.floats("isl"), np.nan_to_num(requests.floats("cached_tokens"))
        self.requests = self._by(answered) + self._by(np.where(split, prefilled, -1))
        self.completed = self._by(np.where(completed, answered, -1)) + self._by(
            np.where(completed & split, prefilled, -1)
        )
        self.prompt_tokens = self._by(np.where(admitted, prompts, -1), isl)
        self.cached_tokens = self._by(np.where(admitted, prompts, -1), cached)
        self.output_tokens = self._by(answered, requests.floats("output_tokens"))
        self.peak_waiting = _peaks_waiting(requests, ids)

    def _by(self, worker: I64, amount: F64 | None = None) -> F64:
        """Sum of `amount` (or count) by worker; -1 is nobody."""
        some = worker >= 0
        place = np.searchsorted(self._ids, worker[some])
        weights = None if amount is None else amount[some]
        return np.bincount(place, weights, minlength=len(self._ids)).astype(np.float64)


def _peaks_waiting(requests: Columns, ids: I64) -> I64:
    """The most that waited on each worker at once. From requests, so that nothing depends on how steps were cut: a
    leap has one row, whoever comes meanwhile."""
    worker, dispatch_s, admit_s = waits_of({name: requests.floats(name) for name in WAIT_COLUMNS})
    peaks = np.zeros(len(ids), dtype=np.int64)
    for place, worker_id in enumerate(ids):
        mine = worker == worker_id
        came, left = np.sort(dispatch_s[mine]), np.sort(admit_s[mine])
        waiting = np.searchsorted(came, came, side="right") - np.searchsorted(left, came, side="right")
        peaks[place] = waiting.max(initial=0)
    return peaks


def worker_figures(
    requests: Columns, steps: StepTotals, completed: Bools, meta: RunMeta, makespan: float | None
) -> tuple[WorkerFigures, ...]:
    """One entry per worker that `meta` names or the record mentions, by worker id."""
    answered, prefilled = requests.ints("worker_id", null=-1), requests.ints("prefill_worker_id", null=-1)
    known = {worker.worker_id: worker for worker in meta.workers}
    seen = {int(worker) for column in (answered, prefilled) for worker in distinct(column)} - {-1}
    ids = sorted(known.keys() | steps.workers | seen)
    sums = _RequestTotals(requests, completed, np.array(ids, dtype=np.int64), answered, prefilled)
    return tuple(
        _one_worker(known.get(worker_id) or _unnamed(worker_id), place, sums, steps, meta, makespan)
        for place, worker_id in enumerate(ids)
    )


def _unnamed(worker_id: int) -> WorkerMeta:
    return WorkerMeta(worker_id=worker_id, name=f"worker {worker_id}", group="", gpus=0)


def _there_s(worker: WorkerMeta, makespan: float | None) -> float | None:
    """How long a worker was there to be busy; one that a planner ordered is there later than the run begins."""
    if worker.up_from_s is None or makespan is None:
        return makespan
    return max(0.0, (makespan if worker.held_until_s is None else worker.held_until_s) - worker.up_from_s) or None


def _one_worker(
    worker: WorkerMeta,
    place: int,
    sums: _RequestTotals,
    steps: StepTotals,
    meta: RunMeta,
    makespan: float | None,
) -> WorkerFigures:
    worker_id = worker.worker_id
    busy_s = steps.sum("busy_s", worker_id)
    return WorkerFigures(
        worker_id=worker_id,
        name=worker.name,
        group=worker.group,
        role=worker.role,
        requests=int(sums.requests[place]),
        completed=int(sums.completed[place]),
        input_tokens=int(sums.prompt_tokens[place]),
        output_tokens=int(sums.output_tokens[place]),
        hit_rate=metrics.hit_rate(sums.cached_tokens[place], sums.prompt_tokens[place]) if meta.hash_known else None,
        steps=int(steps.sum("steps", worker_id)),
        busy_s=busy_s,
        busy_share=metrics.busy_share(busy_s, _there_s(worker, makespan)),
        mean_running=steps.sum("running_s", worker_id) / busy_s if busy_s else None,
        peak_waiting=int(sums.peak_waiting[place]),
        preemptions=int(steps.sum("preempted", worker_id)),
        kv_peak_blocks=steps.peak("active_blocks", worker_id),
        kv_peak_share=metrics.kv_peak_share(steps.peak("active_blocks", worker_id), worker.total_blocks),
    )
