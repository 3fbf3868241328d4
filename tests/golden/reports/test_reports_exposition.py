"""Metrics of a run in Prometheus' text format: case C01's histogram, the router's names, and what has no line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, toy

from reports.exposition import COUNTERS, exposition
from reports.record import RunRecord


def lines(run: Run) -> dict[str, str]:
    """Every sample by its name and labels; each line is one, and each metric has its type before it."""
    found: dict[str, str] = {}
    typed: set[str] = set()
    for line in exposition(run.report, RunRecord(run.folder)).splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
            continue
        name, value = line.rsplit(" ", 1)
        base = name.split("{")[0]
        assert {base, base.removesuffix("_bucket"), base.removesuffix("_sum"), base.removesuffix("_count")} & typed
        assert name not in found, name
        float(value)
        found[name] = value
    return found


def test_c01_the_histogram_of_ttft(tmp_path: Path) -> None:
    told = lines(toy("c01_burst3.jsonl", tmp_path / "run"))
    ttft = "dynamo_component_router_time_to_first_token_seconds"
    assert float(told[f"{ttft}_sum"]) == pytest.approx(0.9)
    assert told[f"{ttft}_count"] == "3"
    assert [told[f'{ttft}_bucket{{le="{end}"}}'] for end in ("0.1", "0.25", "0.5", "+Inf")] == ["1", "1", "3", "3"]
    assert told["dynamo_frontend_router_admission_received_total"] == "3"
    assert told['dynamo_component_router_requests_total{status="completed"}'] == "3"
    assert not [name for name in told if "index_blocks" in name or "cached_prefix" in name], "it has no such index"


def test_what_a_kv_router_counts_by_hand(tmp_path: Path) -> None:
    """Three prompts of 640 tokens that are one: 0, then 9 blocks of 64 found twice; nobody had more."""
    trace = tmp_path / "t.jsonl"
    row = {"input_length": 640, "output_length": 2, "hash_ids": list(range(10))}
    trace.write_text("".join(json.dumps(row | {"timestamp": at}) + "\n" for at in (0, 5000, 10_000)))
    sets = ("router.mode=kv", "workers.engine.block_size=64")
    told = lines(toy(trace, tmp_path / "run", *sets, workers=2, key_tokens=64, explain=True))
    router = "dynamo_component_router"
    assert told[f"{router}_requests_started_total"] == "3"
    assert told[f"{router}_kv_worker_reused_tokens_total"] == str(2 * 576)
    assert told[f"{router}_kv_selected_cached_prefix_tokens_total"] == str(2 * 576)
    assert told[f"{router}_kv_best_eligible_cached_prefix_tokens_total"] == str(2 * 576)
    assert told[f"{router}_non_max_overlap_selections_total"] == told[f"{router}_overlap_blocks_lost_total"] == "0"
    assert [told[f'{router}_kv_hit_rate_bucket{{le="{end}"}}'] for end in ("0.8", "0.9", "+Inf")] == ["1", "3", "3"]
    assert float(told[f"{router}_kv_hit_rate_sum"]) == pytest.approx(1.8)
    assert told["dynatwin_router_cost_regret_blocks_sum"] == "0.0"
    assert told[f'{router}_worker_registered{{worker="pool-0"}}'] == "1"
    for name in ("unknown_removals", "stale_events", "unknown_free"):
        assert told[COUNTERS[name]] == "0", name
    assert told[COUNTERS["duplicate_stores"]] == "2", "the last block is computed, and told of, each time"


def test_refusals_by_reason_and_waits_in_the_router(tmp_path: Path) -> None:
    """Ten at once on one worker of one running and two waiting: three go, seven are refused."""
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 64, "output_length": 2}
    trace.write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    told = lines(toy(trace, tmp_path / "run", "router.busy.engine_running=1", "router.busy.engine_queue=2"))
    assert told['dynatwin_router_rejections_total{reason="engine_limit"}'] == "7"
    assert told["dynamo_frontend_router_admission_rejected_total"] == "7"
