"""The summary figures of the compiled simulator, recomputed from its own per-request rows with our metrics.

This shows that both mean the same by TTFT, E2E, mean and standard deviation, and that `rank_percentile` is its rule.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reports.metrics import distribution, e2e_s, makespan_s, rank_percentile, ttft_s

RUNS = ("agg1_vllm", "agg4_vllm", "agg1_vllm_preempt", "agg2_vllm_sessions")
RANKS = {"median": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@pytest.mark.shared
@pytest.mark.parametrize("run", RUNS)
def test_our_metrics_of_the_peers_rows_are_the_peers_summary(shared: Path, run: str) -> None:
    summary = json.loads((shared / "parity" / f"{run}.json").read_text(encoding="utf-8"))["summary"]
    rows = np.genfromtxt(shared / "parity" / f"{run}.csv", delimiter=",", names=True, usecols=(1, 3, 4))
    arrival, first, last = rows["arrival_ms"], rows["first_token_ms"], rows["last_token_ms"]
    assert makespan_s(arrival, last) == pytest.approx(summary["duration_ms"], rel=1e-6)
    for name, sample in (("ttft", ttft_s(arrival, first)), ("e2e_latency", e2e_s(arrival, last))):
        ours = distribution(sample)
        for statistic in ("mean", "min", "max", "std"):
            assert ours.statistic(statistic) == pytest.approx(summary[f"{statistic}_{name}_ms"], rel=1e-6), statistic
        for rank, quantile in RANKS.items():
            assert rank_percentile(sample, quantile) == pytest.approx(summary[f"{rank}_{name}_ms"], rel=1e-6), rank
