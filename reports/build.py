"""From a run folder to its report: reads the record once, asks reports/metrics.py, writes report.json.

It must stay light (numpy and pyarrow alone) and in bounded memory: columns of requests one at a time, steps in
batches. It decides nothing about definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from policies.errors import ConfigError
from reports import metrics
from reports.columns import I64, Columns
from reports.ends import end_figures
from reports.files import whole_file
from reports.gaps import GAP_COLUMNS
from reports.groups import gpu_seconds, group_figures, span_of
from reports.measured import measured_part
from reports.metrics import distribution
from reports.record import REPORT_JSON, STATUSES, RunRecord
from reports.replicas import PlannerMeta, planner_figures
from reports.report import (
    Counts,
    Demand,
    EndFigures,
    GroupMeta,
    Latencies,
    LatencyMeta,
    PowerMeta,
    Report,
    RunMeta,
    Throughput,
    TraceMeta,
    WorkerMeta,
)
from reports.routing import hit_bound, routing_figures, share_figures
from reports.sla import Sla
from reports.verdict import Outcomes, good_requests, judge
from reports.workers import StepTotals, worker_figures

__all__ = [
    "GroupMeta",
    "LatencyMeta",
    "PowerMeta",
    "Report",
    "RunMeta",
    "TraceMeta",
    "WorkerMeta",
    "build_report",
    "outcomes_of",
]


def build_report(folder: Path, meta: RunMeta, sla: Sla | None = None, planner: PlannerMeta | None = None) -> Report:
    """Compute the report of the run in `folder`, write it there as report.json, and return it."""
    record = RunRecord(folder)
    report = _report(record, meta, sla)
    if planner is not None:
        end_s = span_of(record.requests, StepTotals(record).last_s)
        costs = [group.cost_usd for group in report.groups]
        figures = planner_figures(folder, planner, None if end_s is None else end_s.end_s, report.gpu_s, costs)
        report = replace(report, planner=figures)
    try:
        with whole_file(folder / REPORT_JSON) as out:
            out.write(report.to_json())
    except OSError as why:
        raise ConfigError(f"{folder / REPORT_JSON}: cannot be written ({why.strerror})") from None
    return report


def _report(record: RunRecord, meta: RunMeta, sla: Sla | None) -> Report:
    requests = record.requests
    whole, status = outcomes_of(requests), _status(requests)
    ends = end_figures(requests, status)
    steps = StepTotals(record)
    makespan = metrics.makespan_s(requests.floats("arrival_s"), requests.floats("last_token_s"), steps.last_s)
    workers = worker_figures(requests, steps, whole.completed, meta, makespan)
    span = span_of(requests, steps.last_s)
    gpu_s = gpu_seconds(meta.workers, span)
    good = None if sla is None else good_requests(sla, whole)
    measured = measured_part(record, meta, steps.last_s)
    outcomes = whole if measured.requests.rows == requests.rows else outcomes_of(measured.requests)
    columns = GAP_COLUMNS if measured.since_s is None else (*GAP_COLUMNS, "start_s")
    itl = metrics.itl_s(lambda: record.steps.batches(columns), since_s=measured.since_s)
    completed, output = outcomes.completed, measured.requests.ints("output_tokens", null=0)
    elapsed, held = measured.elapsed_s, measured.gpu_s
    return Report(
        meta=meta,
        demand=_demand(requests),
        counts=_counts(status, ends),
        makespan_s=makespan,
        throughput=_throughput(int(completed.sum()), int(output[completed].sum()), elapsed, held),
        latency=_latencies(measured.requests, outcomes, itl),
        tokens_per_s_per_user=distribution(metrics.tokens_per_s_per_user(outcomes.tpot_s[completed])),
        hit_rate=_hit_rate(requests, meta),
        hit_bound=hit_bound(requests, meta),
        routing=routing_figures(record, meta),
        ends=ends,
        shares=share_figures(workers),
        preemptions=sum(worker.preemptions for worker in workers),
        readmissions=int(requests.ints("readmissions", null=0).sum()),
        migrations=int(requests.ints("migrations", null=0).sum()),
        kv_peak_share=max((w.kv_peak_share for w in workers if w.kv_peak_share is not None), default=None),
        busy_share=_mean([worker.busy_share for worker in workers]),
        fairness=metrics.jain_fairness(np.array([worker.requests for worker in workers], dtype=np.float64)),
        workers=workers,
        groups=group_figures(record, meta, workers, span, good),
        gpu_s=gpu_s,
        sla=None if sla is None else judge(sla, outcomes, itl, elapsed, held),
    )


def outcomes_of(requests: Columns) -> Outcomes:
    """The columns of requests.parquet that attainment and latency figures are about."""
    status = _status(requests)
    return Outcomes(
        completed=status == STATUSES.index("completed"),
        cancelled=status == STATUSES.index("cancelled"),
        ttft_s=requests.floats("ttft_s"),
        tpot_s=requests.floats("tpot_s"),
        e2e_s=requests.floats("e2e_s"),
    )


def _status(requests: Columns) -> I64:
    """Status of each request as its place in STATUSES."""
    codes, labels = requests.codes("status")
    unknown = [str(label) for label in labels if label not in STATUSES]
    if unknown:
        raise ConfigError(f"requests.parquet: status {unknown[0]!r}; known: {', '.join(STATUSES)}")
    return np.array([STATUSES.index(str(label)) for label in labels], dtype=np.int64)[codes]


def _demand(requests: Columns) -> Demand:
    arrival = requests.floats("arrival_s")
    arrived = arrival[~np.isnan(arrival)]
    span = float(arrived.max() - arrived.min()) if len(arrived) else None
    return Demand(
        requests=requests.rows,
        span_s=span,
        rate_rps=metrics.per_second(len(arrived), span),
        input_tokens=int(requests.ints("isl").sum()),
        output_tokens=int(requests.ints("osl").sum()),
    )


def _counts(status: I64, ends: Sequence[EndFigures]) -> Counts:
    by_status = np.bincount(status, minlength=len(STATUSES))
    reasons: dict[str, int] = {}
    for end in ends:
        reasons[end.reason] = reasons.get(end.reason, 0) + end.requests
    return Counts(**{name: int(count) for name, count in zip(STATUSES, by_status, strict=True)}, reasons=reasons)


def _throughput(completed: int, tokens: int, makespan: float | None, gpu_s: float | None) -> Throughput:
    return Throughput(
        requests_per_s=metrics.per_second(completed, makespan),
        requests_per_s_per_gpu=metrics.per_second(completed, gpu_s),
        output_tokens_per_s=metrics.per_second(tokens, makespan),
        output_tokens_per_s_per_gpu=metrics.per_second(tokens, gpu_s),
    )


def _latencies(requests: Columns, outcomes: Outcomes, itl: metrics.Distribution) -> Latencies:
    completed = outcomes.completed
    return Latencies(
        ttft_s=distribution(outcomes.ttft_s[completed], interval=True),
        tpot_s=distribution(outcomes.tpot_s[completed], interval=True),
        itl_s=itl,
        e2e_s=distribution(outcomes.e2e_s[completed], interval=True),
        queue_wait_s=distribution(requests.floats("queue_wait_s")[completed], interval=True),
        router_wait_s=distribution(requests.floats("router_wait_s")[completed], interval=True),
    )


def _hit_rate(requests: Columns, meta: RunMeta) -> float | None:
    if not meta.hash_known:
        return None
    admitted = ~np.isnan(requests.floats("admit_s"))
    return metrics.hit_rate(requests.floats("cached_tokens")[admitted], requests.floats("isl")[admitted])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
