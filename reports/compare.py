"""Two runs side by side: what differs in their figures, request by request, and in their configurations.

A difference is only called one where an interval says so; where no honest interval exists the verdict is left open.
Works on any two run folders, simulated or live.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import numpy as np

from policies.frozen import frozen
from reports.columns import F64, Columns
from reports.metrics import Distribution, mean_ci95
from reports.record import RunRecord
from reports.report import Report, flat_config, stable_json

SCHEMA: Final = "dynatwin.comparison/1"

FLOOR_S: Final = 1e-3
"""Differences of times are relative to at least a millisecond: a queue wait of 0 must not make them infinite."""

Unit = Literal["s", "share", "count", "rate"]


@frozen
class Difference:
    """A figure of both runs. `relative` is (b - a) / a; `spread` is half the 95 % interval of b - a where there is
    one, and `inside` says whether 0 lies in it: no difference that the runs can show.
    """

    name: str
    unit: Unit
    a: float | None
    b: float | None
    absolute: float | None
    relative: float | None
    spread: float | None = None
    inside: bool | None = None


@frozen
class MatchedMetric:
    """One latency of the same requests in both runs: `rows` completed with it in both, `only_a`, `only_b` in one.

    `max_relative` is the largest |b - a| / max(a, 1 ms); `mean_difference` is the mean of b - a, with its interval.
    """

    name: str
    rows: int
    only_a: int
    only_b: int
    equal_share: float | None
    max_relative: float | None
    mean_difference_s: float | None
    mean_difference_ci95_s: tuple[float, float] | None


@frozen
class Matched:
    """Both runs had the same requests (prompt and output lengths by row): what became of each."""

    rows: int
    same_arrivals: bool
    same_status_share: float
    same_worker_share: float
    metrics: tuple[MatchedMetric, ...]


@frozen
class ConfigDifference:
    """A configuration key that the runs do not share; None where one of them has no such key."""

    key: str
    a: str | None
    b: str | None


@frozen
class Comparison:
    """Run `b` against run `a`. `matched` is None where the runs had different requests."""

    a: str
    b: str
    differences: tuple[Difference, ...]
    matched: Matched | None
    config: tuple[ConfigDifference, ...]
    notes: tuple[str, ...]
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The comparison as JSON: sorted keys, null for what is undefined."""
        return stable_json(self)


def compare(a: Path, b: Path) -> Comparison:
    """Compare two run folders; ConfigError where one of them is none."""
    records, reports = (RunRecord(a), RunRecord(b)), (Report.load(a), Report.load(b))
    names = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    matched = _matched(records[0].requests, records[1].requests)
    return Comparison(
        a=names[0],
        b=names[1],
        differences=tuple(_differences(reports[0], reports[1], matched)),
        matched=matched,
        config=tuple(_config_differences(reports[0], reports[1])),
        notes=tuple(_notes(records, reports, names, matched)),
    )


def _notes(
    records: tuple[RunRecord, RunRecord],
    reports: tuple[Report, Report],
    names: tuple[str, str],
    matched: Matched | None,
) -> Iterator[str]:
    for record, name in zip(records, names, strict=True):
        if not record.complete:
            yield f"{name} is partial: it was stopped half-way"
    if matched is None:
        traces = " and ".join(report.meta.trace.name for report in reports)
        yield f"the runs had different requests ({traces}), so rows are not matched and intervals are those of each run"
    elif not matched.same_arrivals:
        yield "the same requests, but they arrived at other times"
    if matched is not None and matched.rows < max(report.demand.requests for report in reports):
        yield f"only the first {matched.rows} rows are in both runs"
    if reports[0].meta.simulated != reports[1].meta.simulated:
        yield "one run was simulated, the other measured"


# --- figures of the runs ----------------------------------------------------------------------------------------------


def _differences(a: Report, b: Report, matched: Matched | None) -> Iterator[Difference]:
    whole = matched is not None and matched.rows == a.demand.requests == b.demand.requests
    paired = {
        metric.name: metric.mean_difference_ci95_s
        for metric in (matched.metrics if matched and whole else ())
        if not metric.only_a and not metric.only_b  # else the means are not of the same requests
    }
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_wait_s"):
        first, second = getattr(a.latency, name), getattr(b.latency, name)
        label = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "queue_wait_s": "queue wait"}[name]
        yield _mean_difference(f"{label} mean", first, second, paired.get(label))
        for statistic in ("p50", "p95", "p99"):
            yield _difference(f"{label} {statistic}", "s", first.statistic(statistic), second.statistic(statistic))
    for figure, unit, left, right in _plain_figures(a, b):
        yield _difference(figure, unit, left, right)


def _plain_figures(a: Report, b: Report) -> Iterator[tuple[str, Unit, float | None, float | None]]:
    yield "requests/s", "rate", a.throughput.requests_per_s, b.throughput.requests_per_s
    yield "output tokens/s", "rate", a.throughput.output_tokens_per_s, b.throughput.output_tokens_per_s
    per_gpu = (a.throughput.output_tokens_per_s_per_gpu, b.throughput.output_tokens_per_s_per_gpu)
    yield "output tokens/s per GPU", "rate", *per_gpu
    yield "tokens/s per user, mean", "rate", a.tokens_per_s_per_user.mean, b.tokens_per_s_per_user.mean
    yield "makespan", "s", a.makespan_s, b.makespan_s
    yield "hit rate", "share", a.hit_rate, b.hit_rate
    yield "KV pool peak", "share", a.kv_peak_share, b.kv_peak_share
    yield "busy share", "share", a.busy_share, b.busy_share
    yield "fairness", "rate", a.fairness, b.fairness
    yield "preemptions", "count", a.preemptions, b.preemptions
    for status in ("completed", "rejected", "failed", "cancelled", "open"):
        counts = getattr(a.counts, status), getattr(b.counts, status)
        if status == "completed" or any(counts):
            yield status, "count", *counts
    if a.sla and b.sla and a.sla.text == b.sla.text:
        yield "attainment", "share", a.sla.attainment, b.sla.attainment
        yield "goodput, requests/s", "rate", a.sla.goodput_rps, b.sla.goodput_rps


def _difference(name: str, unit: Unit, a: float | None, b: float | None) -> Difference:
    absolute = None if a is None or b is None else b - a
    relative = None if absolute is None or not a else absolute / a
    return Difference(name=name, unit=unit, a=a, b=b, absolute=absolute, relative=relative)


def _mean_difference(name: str, a: Distribution, b: Distribution, paired: tuple[float, float] | None) -> Difference:
    """Means with the interval of their difference: that of matched requests, or that of two independent runs."""
    plain = _difference(name, "s", a.mean, b.mean)
    if plain.absolute is None:
        return plain
    if paired is not None:
        spread, inside = (paired[1] - paired[0]) / 2, paired[0] <= 0.0 <= paired[1]
    elif a.mean_ci95 and b.mean_ci95:
        spread = math.hypot(*((high - low) / 2 for low, high in (a.mean_ci95, b.mean_ci95)))
        inside = abs(plain.absolute) <= spread
    else:
        return plain
    return Difference(
        name=name, unit="s", a=plain.a, b=plain.b, absolute=plain.absolute, relative=plain.relative, spread=spread,
        inside=inside,
    )  # fmt: skip


# --- request by request -----------------------------------------------------------------------------------------------


def _matched(a: Columns, b: Columns) -> Matched | None:
    """Match by row where both runs had the same requests, up to where the shorter one ends."""
    rows = min(a.rows, b.rows)
    if not rows or not all(np.array_equal(a.floats(name)[:rows], b.floats(name)[:rows]) for name in ("isl", "osl")):
        return None
    arrivals = a.floats("arrival_s")[:rows], b.floats("arrival_s")[:rows]
    status = [[texts[code] for code in codes[:rows]] for codes, texts in (a.codes("status"), b.codes("status"))]
    workers = a.ints("worker_id", null=-1)[:rows], b.ints("worker_id", null=-1)[:rows]
    done = [np.array([one == "completed" for one in column]) for column in status]
    names = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s", "queue wait": "queue_wait_s"}
    return Matched(
        rows=rows,
        same_arrivals=np.array_equal(*arrivals, equal_nan=True),
        same_status_share=sum(x == y for x, y in zip(*status, strict=True)) / rows,
        same_worker_share=float((workers[0] == workers[1]).mean()),
        metrics=tuple(
            _matched_metric(
                label,
                np.where(done[0], a.floats(name)[:rows], np.nan),
                np.where(done[1], b.floats(name)[:rows], np.nan),
            )
            for label, name in names.items()
        ),
    )


def _matched_metric(name: str, a: F64, b: F64) -> MatchedMetric:
    has_a, has_b = ~np.isnan(a), ~np.isnan(b)
    both = has_a & has_b
    apart = b[both] - a[both]
    some = len(apart) > 0
    return MatchedMetric(
        name=name,
        rows=int(both.sum()),
        only_a=int((has_a & ~has_b).sum()),
        only_b=int((has_b & ~has_a).sum()),
        equal_share=float((apart == 0.0).mean()) if some else None,
        max_relative=float((np.abs(apart) / np.maximum(a[both], FLOOR_S)).max()) if some else None,
        mean_difference_s=float(apart.mean()) if some else None,
        mean_difference_ci95_s=mean_ci95(apart),
    )


def _config_differences(a: Report, b: Report) -> Iterator[ConfigDifference]:
    left, right = (dict(flat_config(report.meta.config)) for report in (a, b))
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            yield ConfigDifference(key=key, a=left.get(key), b=right.get(key))
