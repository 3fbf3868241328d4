"""Which part of a run is measured: all of it, or what follows the rows that it was warmed up with.

Latencies, rates and verdicts are about that part; counts, demand, workers, groups and charts are about the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.frozen import frozen
from reports.columns import Columns
from reports.groups import gpu_seconds, span_of
from reports.record import RunRecord
from reports.report import RunMeta


@frozen
class Measured:
    """`requests` without the rows of the warm-up; `elapsed_s` from the first arrival of the others to the end of the
    run, and the GPU-seconds held in that time (None: nothing elapsed). Gaps count from steps that began at `since_s` or
    later (None: from all)."""

    requests: Columns
    elapsed_s: float | None
    gpu_s: float | None
    since_s: float | None


def warmup_rows(meta: RunMeta) -> int:
    """How many of its first rows a run leaves out: `trace.warmup` of its configuration."""
    trace = meta.config.get("trace")
    rows = trace.get("warmup") if isinstance(trace, Mapping) else None
    return rows if isinstance(rows, int) else 0


def measured_part(record: RunRecord, meta: RunMeta, last_step_s: float) -> Measured:
    """The part of a run that its figures are about; `last_step_s` is when its last step ended."""
    warmup = warmup_rows(meta)
    requests = record.requests.behind(warmup)
    span = span_of(requests, last_step_s)
    return Measured(
        requests=requests,
        elapsed_s=None if span is None else span.end_s - span.start_s,
        gpu_s=gpu_seconds(meta.workers, span),
        since_s=span.start_s if span is not None and warmup else None,
    )
