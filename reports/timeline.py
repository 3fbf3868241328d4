"""A run over time, in buckets of equal width: what the plots show and a mean over the whole run would hide.

Steps are read in batches, so memory is buckets times workers. Gap quantiles here come from a histogram with bins of
0.8 % width: good for a plot; the figures of the report (reports/metrics.py) are exact.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from policies.frozen import frozen
from reports import metrics
from reports.columns import F64, I64, Bools, Columns
from reports.gaps import GAP_COLUMNS, GapRows, positions
from reports.record import RunRecord
from reports.samples import waits_of

STEP_COLUMNS: Final = (*GAP_COLUMNS, "kind", "worker_id", "start_s", "end_s", "running", "active_blocks", "decodes",
                       "prefill_tokens")  # fmt: skip
GAP_QUANTILES: Final = (0.50, 0.95)
LEVELS: Final = ("running", "active_blocks")
_WAIT_COLUMNS: Final = ("worker_id", "prefill_worker_id", "dispatch_s", "admit_s")

_BIN_SHIFT: Final = 45
"""Keeps 7 bits of a float's mantissa: 128 bins per factor of two."""

_LOWEST_BIN: Final = int(np.float64(1e-7).view(np.int64)) >> _BIN_SHIFT
_BINS: Final = (int(np.float64(1e6).view(np.int64)) >> _BIN_SHIFT) - _LOWEST_BIN + 1


@frozen
class Timeline:
    """Buckets between `edges_s` (n + 1 of them). Arrays are [bucket] or [worker, bucket]; NaN where nothing was.

    `levels` are time-weighted means with idle time as 0, `waiting` (reports/samples.py says who waits) from the
    requests and the rest from the steps; `busy` is the share of the bucket spent in steps; quantiles
    are rows p50, p95, max. TTFT belongs to the bucket of the arrival, a gap to that of its end.
    """

    edges_s: F64
    worker_ids: tuple[int, ...]
    levels: dict[str, F64]
    busy: F64
    output_tokens_per_s: F64
    prompt_tokens_per_s: F64
    arrivals_per_s: F64
    completions_per_s: F64
    ttft_s: F64
    itl_s: F64
    hit_rate: F64
    itl_cdf: tuple[F64, F64]

    @property
    def centres_s(self) -> F64:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2


def bucket_count(requests: int) -> int:
    """Buckets so that an average one holds 40 arrivals, between 24 and 160."""
    return min(max(requests // 40, 24), 160)


def timeline(record: RunRecord, worker_ids: tuple[int, ...], buckets: int | None = None) -> Timeline:
    """The whole run, as long as its makespan, over time. Rows of workers not named in `worker_ids` are left out."""
    requests = record.requests
    arrival = requests.floats("arrival_s")
    start = float(np.nanmin(arrival)) if np.isfinite(arrival).any() else 0.0
    span = metrics.run_span_s(arrival, requests.floats("last_token_s"), _last_step_s(record))
    end = start if span is None else span[1]
    edges = np.linspace(start, max(end, start + 1e-6, start * (1 + 1e-9)), (buckets or bucket_count(requests.rows)) + 1)
    steps = _StepSeries(edges, worker_ids)
    for batch in record.steps.batches(STEP_COLUMNS):
        steps.add(batch)
    width = float(edges[1] - edges[0])
    gone = requests.floats("e2e_s") + arrival
    return Timeline(
        edges_s=edges,
        worker_ids=worker_ids,
        levels={
            **{name: steps.level_s[name] / width for name in LEVELS},
            "waiting": _waiting_s(requests, edges, worker_ids) / width,
        },
        busy=steps.busy_s / width,
        output_tokens_per_s=(steps.tokens + _first_tokens(requests, edges)) / width,
        prompt_tokens_per_s=steps.prompt_tokens / width,
        arrivals_per_s=np.histogram(arrival[np.isfinite(arrival)], edges)[0] / width,
        completions_per_s=np.histogram(gone[np.isfinite(gone)], edges)[0] / width,
        ttft_s=_quantiles_over_time(arrival, requests.floats("ttft_s"), edges),
        itl_s=steps.gap_quantiles(),
        hit_rate=_hit_rate_over_time(requests, edges),
        itl_cdf=steps.gap_cdf(),
    )


def _last_step_s(record: RunRecord) -> float:
    """When the last step of all ended; NaN where there is none."""
    last_s = np.nan
    for batch in record.steps.batches(("kind", "end_s")):
        kind, labels = batch.codes("kind")
        is_step = np.array([label != "gap" for label in labels], dtype=np.bool_)[kind]
        last_s = np.fmax.reduce(batch.floats("end_s")[is_step], initial=last_s)
    return float(last_s)


def _bucket_of(at_s: F64, edges: F64) -> I64:
    """The bucket of each time; the last edge belongs to the last bucket."""
    place = np.searchsorted(edges, at_s, side="right") - 1
    return np.clip(place, 0, len(edges) - 2)


def _first_tokens(requests: Columns, edges: F64) -> F64:
    """First tokens come with the prompt and make no gap, so steps do not count them."""
    first = requests.floats("first_token_s")
    return np.histogram(first[np.isfinite(first)], edges)[0].astype(np.float64)


def _waiting_s(requests: Columns, edges: F64, worker_ids: tuple[int, ...]) -> F64:
    """The seconds that requests waited, by worker and bucket."""
    worker, dispatch, admit = waits_of({name: requests.floats(name) for name in _WAIT_COLUMNS})
    out = np.zeros((len(worker_ids), len(edges) - 1))
    for place, worker_id in enumerate(worker_ids):
        mine = worker == worker_id
        waited = _seconds_since(dispatch[mine], edges) - _seconds_since(admit[mine], edges)
        out[place] = np.maximum(np.diff(waited), 0.0)
    return out


def _seconds_since(moments: F64, edges: F64) -> F64:
    """For each edge, the sum of the seconds since the moments before it; counted from the first edge for precision."""
    moments = np.sort(moments) - edges[0]
    before = np.searchsorted(moments, edges - edges[0])
    since: F64 = before * (edges - edges[0]) - np.concatenate([[0.0], np.cumsum(moments)])[before]
    return since


def _quantiles_over_time(at_s: F64, values: F64, edges: F64) -> F64:
    """p50, p95 and max (rows) of the values in each bucket."""
    known = np.isfinite(at_s) & np.isfinite(values)
    order = np.argsort(at_s[known], kind="stable")
    values, bounds = values[known][order], np.searchsorted(at_s[known][order], edges)
    bounds[-1] = len(values)
    out = np.full((3, len(edges) - 1), np.nan)
    for bucket, (low, high) in enumerate(pairwise(bounds)):
        if high > low:
            out[:2, bucket] = np.quantile(values[low:high], GAP_QUANTILES)
            out[2, bucket] = values[low:high].max()
    return out


def _hit_rate_over_time(requests: Columns, edges: F64) -> F64:
    admit = requests.floats("admit_s")
    admitted = np.isfinite(admit)
    place = _bucket_of(admit[admitted], edges)
    cached = np.bincount(place, np.nan_to_num(requests.floats("cached_tokens")[admitted]), minlength=len(edges) - 1)
    asked = np.bincount(place, requests.floats("isl")[admitted], minlength=len(edges) - 1)
    return np.array([np.nan if not a else metrics.hit_rate(c, a) for c, a in zip(cached, asked, strict=True)])


class _StepSeries:
    """Sums over steps by worker and bucket, and a histogram of gaps by bucket."""

    def __init__(self, edges: F64, worker_ids: tuple[int, ...]) -> None:
        count = len(edges) - 1
        self._edges, self._ids = edges, np.array(worker_ids, dtype=np.int64)
        self.level_s = {name: np.zeros((len(worker_ids), count)) for name in LEVELS}
        self.busy_s = np.zeros((len(worker_ids), count))
        self.tokens, self.prompt_tokens = np.zeros(count), np.zeros(count)
        self._gaps = np.zeros((count, _BINS), dtype=np.int64)
        self._longest = np.full(count, np.nan)

    def add(self, batch: Columns) -> None:
        kind, labels = batch.codes("kind")
        is_gap = np.array([label == "gap" for label in labels], dtype=np.bool_)[kind]
        self._add_gaps(batch)
        self._add_levels(batch, ~is_gap)

    def gap_quantiles(self) -> F64:
        """p50, p95 and max (rows) by bucket."""
        out = np.full((3, len(self._longest)), np.nan)
        middles = _bin_middles()
        upto = np.cumsum(self._gaps, axis=1)
        for bucket in np.flatnonzero(upto[:, -1]):
            ranks = [quantile * (upto[bucket, -1] - 1) for quantile in GAP_QUANTILES]
            out[:2, bucket] = middles[np.searchsorted(upto[bucket], ranks, side="right")]
        out[:2] = np.fmin(out[:2], self._longest)
        out[2] = self._longest
        return out

    def gap_cdf(self) -> tuple[F64, F64]:
        """(gap, share of gaps at most that long), thinned to the bins that hold any."""
        total = self._gaps.sum(axis=0)
        some = np.flatnonzero(total)
        return _bin_middles()[some], np.cumsum(total[some]) / max(int(total.sum()), 1)

    def _add_gaps(self, batch: Columns) -> None:
        weights = batch.ints("gap_tokens", null=0)
        has = weights > 0
        names = ("gap0_s", "gap1_s", "gap2_s", "start_s", "end_s")
        gap0, gap1, gap2, start, end = (batch.floats(name)[has] for name in names)
        rows = GapRows(batch.ints("steps")[has], weights[has], gap0, gap1, gap2)
        ends = np.cumsum(rows.steps)
        starts = ends - rows.steps
        total = int(ends[-1]) if len(ends) else 0
        for low in range(0, total, 1 << 18):
            row, step = positions(starts, ends, low, min(low + (1 << 18), total))
            values = rows.gap0_s[row] + (rows.gap1_s[row] + rows.gap2_s[row] * step) * step
            at_s = start[row] + (end[row] - start[row]) * (step + 1) / rows.steps[row]
            self._count(_bucket_of(at_s, self._edges), values, rows.gap_tokens[row])

    def _count(self, bucket: I64, values: F64, weights: I64) -> None:
        place = np.clip((values.view(np.int64) >> _BIN_SHIFT) - _LOWEST_BIN, 0, _BINS - 1)
        flat = np.bincount(bucket * _BINS + place, weights, minlength=self._gaps.size)
        self._gaps += flat.astype(np.int64).reshape(self._gaps.shape)
        self.tokens += np.bincount(bucket, weights, minlength=len(self.tokens))
        np.fmax.at(self._longest, bucket, values)

    def _add_levels(self, batch: Columns, is_step: Bools) -> None:
        ids = batch.ints("worker_id")
        place = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        mine = is_step & (self._ids[place] == ids) if len(self._ids) else np.zeros_like(is_step)
        worker, start, end = place[mine], batch.floats("start_s")[mine], batch.floats("end_s")[mine]
        first, last = _bucket_of(start, self._edges), _bucket_of(end, self._edges)
        ends = np.cumsum(last - first + 1)
        row, step = positions(ends - (last - first + 1), ends, 0, int(ends[-1])) if len(ends) else (first, first)
        bucket = first[row] + step
        inside = np.minimum(end[row], self._edges[bucket + 1]) - np.maximum(start[row], self._edges[bucket])
        flat = worker[row] * (len(self._edges) - 1) + bucket
        self.busy_s += np.bincount(flat, inside, minlength=self.busy_s.size).reshape(self.busy_s.shape)
        for name in LEVELS:
            weighted = batch.floats(name)[mine][row] * inside
            self.level_s[name] += np.bincount(flat, weighted, minlength=self.busy_s.size).reshape(self.busy_s.shape)
        self.prompt_tokens += np.bincount(last, batch.floats("prefill_tokens")[mine], minlength=len(self.prompt_tokens))


def _bin_middles() -> F64:
    """The middle of each gap bin, in seconds."""
    low = (np.arange(_BINS, dtype=np.int64) + _LOWEST_BIN) << _BIN_SHIFT
    return (low + (np.int64(1) << (_BIN_SHIFT - 1))).view(np.float64)
