"""A finished run as metrics in Prometheus' text format, under the names that a live router and frontend would use.

So dashboards made for live deployments read simulated runs. Only what a run knows is written: a figure that it does not
have has no line, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from reports.columns import F64
from reports.metrics import Distribution
from reports.routing import prompt_counters

if TYPE_CHECKING:
    from reports.record import RunRecord
    from reports.report import Report

ROUTER, FRONTEND, OURS = "dynamo_component_router", "dynamo_frontend", "dynatwin_router"

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper ends of buckets; a value on an end is in its bucket."""

COUNTERS: Final[Mapping[str, str]] = {
    "non_max_overlap": f"{ROUTER}_non_max_overlap_selections_total",
    "overlap_lost_blocks": f"{ROUTER}_overlap_blocks_lost_total",
    "orphan_stores": f"{OURS}_orphan_blocks_total",
    "orphans": f"{OURS}_orphan_blocks_total",
    "adopted": f"{OURS}_orphans_adopted_total",
    "unknown_removals": f"{OURS}_unknown_removals_total",
    "duplicate_stores": f"{OURS}_duplicate_stores_total",
    "stale_events": f"{OURS}_stale_events_total",
    "gaps": f"{OURS}_gaps_total",
    "unknown_free": f"{OURS}_unknown_free_total",
    "block_size_mismatch": f"{OURS}_block_size_mismatch_total",
}
"""The router's own counters by the name of their metric."""
RECOVERIES: Final = ("replays_done", "replays_failed", "dumps_done", "dumps_failed")
INDEX: Final[Mapping[str, str]] = {
    "index_blocks": "resident",
    "index_resident": "resident",
    "index_ghosts": "ghost",
    "index_orphans": "orphan",
}
"""Sizes of the index by the state of its blocks, as far as an index tells them apart."""


def exposition(report: Report, record: RunRecord) -> str:
    """All metrics of a run as of its end; times are virtual."""
    lines = [*_requests(report, record), *_cache(report, record), *_router(report), *_workers(report)]
    return "\n".join(lines) + "\n"


def _requests(report: Report, record: RunRecord) -> Iterator[str]:
    counts, requests = report.counts, record.requests
    yield from _counter(f"{FRONTEND}_router_admission_received_total", report.demand.requests)
    yield from _counter(f"{FRONTEND}_router_admission_rejected_total", counts.rejected)
    ends = {name: getattr(counts, name) for name in ("completed", "rejected", "cancelled", "failed", "open")}
    yield from _labelled(f"{ROUTER}_requests_total", "counter", "status", ends)
    if report.routing is not None:
        yield from _counter(f"{ROUTER}_requests_started_total", report.routing.decisions)
    refused: dict[str, int] = {}
    for end in report.ends:
        if end.status == "rejected":
            refused[end.code or "engine"] = refused.get(end.code or "engine", 0) + end.requests
    yield from _labelled(f"{OURS}_rejections_total", "counter", "reason", refused)
    yield from _histogram(f"{ROUTER}_time_to_first_token_seconds", requests.floats("ttft_s"), SECONDS)
    yield from _summary(f"{ROUTER}_inter_token_latency_seconds", report.latency.itl_s)
    yield from _histogram(f"{OURS}_queue_wait_seconds", requests.floats("router_wait_s"), SECONDS)


def _cache(report: Report, record: RunRecord) -> Iterator[str]:
    """Hits are those of the engines at first admissions; what the router believed is in `kv_selected`."""
    if not report.meta.hash_known:
        return
    requests = record.requests
    cached, isl = requests.floats("cached_tokens"), requests.floats("isl")
    known = ~np.isnan(cached) & (isl > 0)
    yield from _histogram(f"{ROUTER}_kv_hit_rate", cached[known] / isl[known], SHARES)
    yield from _counter(f"{ROUTER}_kv_worker_reused_tokens_total", int(cached[known].sum()))
    size = report.meta.workers[0].block_size if report.meta.workers else None
    counters = prompt_counters(report.meta.routing)
    if size is not None and "overlap_lost_blocks" in counters:
        selected = _overlap_blocks(record) * size
        yield from _counter(f"{ROUTER}_kv_selected_cached_prefix_tokens_total", selected)
        lost = counters["overlap_lost_blocks"] * size
        yield from _counter(f"{ROUTER}_kv_best_eligible_cached_prefix_tokens_total", selected + lost)


def _overlap_blocks(record: RunRecord) -> int:
    """Blocks of overlap of all dispatches of prompts."""
    batches = record.decisions.batches(("overlap_blocks",))
    return int(sum(np.nansum(batch.floats("overlap_blocks")) for batch in batches))


def _router(report: Report) -> Iterator[str]:
    counters = prompt_counters(report.meta.routing)
    for name, metric in COUNTERS.items():
        if name in counters:
            yield from _counter(metric, counters[name])
    done = {name: counters[name] for name in RECOVERIES if name in counters}
    if done:
        yield f"# TYPE {OURS}_recoveries_total counter"
    for name, value in done.items():
        kind, outcome = name.split("s_")
        yield f'{OURS}_recoveries_total{{kind="{kind}",outcome="{outcome}"}} {value}'
    states = {state: counters[name] for name, state in INDEX.items() if name in counters}
    yield from _labelled(f"{OURS}_index_blocks", "gauge", "state", states)
    if report.routing is not None and report.routing.explained is not None:
        yield from _summary(f"{OURS}_cost_regret_blocks", report.routing.explained.regret_blocks)


def _workers(report: Report) -> Iterator[str]:
    yield from _labelled(f"{ROUTER}_worker_registered", "gauge", "worker", {w.name: 1 for w in report.workers})


# --- lines ------------------------------------------------------------------------------------------------------------


def _counter(name: str, value: int) -> Iterator[str]:
    yield f"# TYPE {name} counter"
    yield f"{name} {value}"


def _labelled(name: str, kind: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    if values:
        yield f"# TYPE {name} {kind}"
    for key, value in values.items():
        yield f'{name}{{{label}="{_escaped(key)}"}} {value}'


def _histogram(name: str, values: F64, ends: tuple[float, ...]) -> Iterator[str]:
    """Cumulative buckets; a value that is an end but for rounding is in its bucket."""
    known = values[~np.isnan(values)]
    if not len(known):
        return
    yield f"# TYPE {name} histogram"
    for end in ends:
        yield f'{name}_bucket{{le="{end:g}"}} {int((known <= end * (1 + 1e-9)).sum())}'
    yield f'{name}_bucket{{le="+Inf"}} {len(known)}'
    yield f"{name}_sum {float(known.sum())!r}"
    yield f"{name}_count {len(known)}"


def _summary(name: str, found: Distribution) -> Iterator[str]:
    if found.mean is None:
        return
    yield f"# TYPE {name} summary"
    for quantile, value in (("0.5", found.p50), ("0.9", found.p90), ("0.95", found.p95), ("0.99", found.p99)):
        if value is not None:
            yield f'{name}{{quantile="{quantile}"}} {value!r}'
    yield f"{name}_sum {found.mean * found.count!r}"
    yield f"{name}_count {found.count}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
