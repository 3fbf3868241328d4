"""A user's trace as a workload: its rows for the simulation, their means for the closed form.

The means are of the rows that a simulation would play, so that both speak of the same demand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from aiconfig.estimate import Load
from aiconfig.workload import Workload
from policies.errors import ConfigError
from policies.frozen import frozen
from traces.load import open_trace
from traces.stats import describe_batches
from traces.transform import transform

TRACE_REQUESTS: Final = 3000
"""Rows that are played of a trace if not told otherwise: with 2,500 behind the warm-up, and seconds per candidate."""


@frozen
class TraceWorkload:
    """The workload of a trace, and the mean rate at which its rows came (None: they came all at once, or follow
    each other)."""

    workload: Workload
    recorded: Load | None


def read_workload(
    path: Path, *, requests: int | None = None, arrivals: str = "recorded", seed: int = 0
) -> TraceWorkload:
    """Read the first `requests` rows (None: 3,000) of a trace of any format that `twin` reads.

    `prefix_tokens` is what an endless cache would have held of the mean prompt. Raises TraceError for what is no trace,
    and ConfigError for arrivals that there are not.
    """
    trace = open_trace(path)
    batches = transform(trace, limit=requests or TRACE_REQUESTS)
    stats = describe_batches(batches, trace.info, trace.skipped, trace.remarks)
    isl, osl = max(1, round(stats.isl.mean)), max(1, round(stats.osl.mean))
    shared = int((stats.hit_rate_tokens or 0.0) * stats.isl.mean)
    workload = Workload(
        isl=isl,
        osl=osl,
        prefix_tokens=min(shared, isl - 1),
        arrivals=arrivals,
        requests=stats.rows,
        trace=Path(os.path.abspath(path)),  # other processes may stand elsewhere
        seed=seed,
        max_isl=int(stats.isl.quantiles[-1]),
        max_tokens=_longest(path, stats.rows),
    )
    if arrivals != "closed" and stats.rate_rps is None:
        raise ConfigError(
            f"--trace {path}: its {stats.rows} rows have no mean rate (they came at one moment); "
            "say --arrivals closed and --users N"
        )
    return TraceWorkload(workload=workload, recorded=None if stats.rate_rps is None else Load(rps=stats.rate_rps))


def _longest(path: Path, rows: int) -> int:
    """Tokens of the longest request among the first rows."""
    longest = 0
    for batch in transform(open_trace(path), limit=rows):
        for isl, osl in zip(batch.column("isl").to_pylist(), batch.column("osl").to_pylist(), strict=True):
            longest = max(longest, isl + osl)
    return longest
