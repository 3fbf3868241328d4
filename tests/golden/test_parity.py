"""The simulated world against a compiled simulator's per-request outputs (docs/parity.md).

Every aggregated vLLM run: all rows, all fields, times within 1e-6 relative. Settings come from the run's own JSON and
go through our configuration with `compat = "dynamo-1.6.1"`.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.cluster.controller import Controller
from reports.metrics import rank_percentile
from traces.load import open_trace
from twin.cluster import build_groups
from twin.config import Config
from twin.config_read import load
from twin.deciding import build_policy
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld, OpenRequest
from twin.replay import demand_of, read_options

pytestmark = pytest.mark.shared

RUNS = [
    "agg1_vllm",
    "agg1_vllm_fifo_budget",
    "agg1_vllm_fixed",
    "agg1_vllm_k48",
    "agg1_vllm_pool2500",
    "agg1_vllm_preempt",
    "agg1_vllm_preempt_fifo",
    "agg1_vllm_small_batch",
    "agg2_vllm_block512",
    "agg2_vllm_closed16",
    "agg2_vllm_nocache",
    "agg2_vllm_nochunk",
    "agg2_vllm_sessions",
    "agg4_vllm",
]
ENGINE_KEYS = {
    "block_size": "block_size",
    "num_gpu_blocks": "kv_blocks",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "prefix_caching",
    "enable_chunked_prefill": "chunked_prefill",
    "preemption_mode": "preemption",
}
PEER_DEFAULTS = {"block_size": 64, "num_gpu_blocks": 16384}
TOLERANCE = 1e-6


def peer_config(run: dict[str, Any], trace: Path, *more: str) -> Config:
    """A run's settings in our words."""
    settings = run["settings"]
    engine = PEER_DEFAULTS | settings.get("extra_engine_args", {}).get("engine", {})
    timing = engine.pop("timing_model", None)
    sets = [f"workers.engine.{ENGINE_KEYS[key]}={str(value).lower()}" for key, value in engine.items()]
    if timing is not None:
        sets += [
            f"workers.latency.{key.replace('_ms', '_s')}={timing[key] / 1e3}" for key in ("prefill_ms", "decode_ms")
        ]
    if "replay_concurrency" in settings:
        sets += ["trace.arrivals=closed", f"trace.concurrency={settings['replay_concurrency']}"]
    flags = {
        "TRACE": str(trace),
        "--limit": str(run["rows"][1]),
        "--workers": str(settings["num_workers"]),
        "--hash-block-tokens": str(run["trace_block_size"]),
        "--latency": "fixed" if timing else "polynomial",
    }
    return load(None, flags, [*sets, "compat=dynamo-1.6.1", *more])


def simulate(config: Config, *, leap: bool = True) -> dict[int, tuple[OpenRequest, str]]:
    assert config.trace.path is not None
    trace = open_trace(config.trace.path, read_options(config.trace))
    groups = build_groups(config, leap=leap)
    policy = build_policy(config, groups[0].settings.block_size)
    ended: dict[int, tuple[OpenRequest, str]] = {}
    world = MockWorld(
        controller=Controller([policy]),
        workers=[spec for group in groups for spec in group.workers],
        demand=demand_of(config, trace),
        sinks=MemorySinks(),
        router=config.router.mode,
        key_tokens=trace.info.hash_block_tokens,
        concurrency=config.trace.concurrency,
        on_end=lambda request, status: ended.update({request.row.row: (request, status)}),
    )
    world.run()
    world.audit()
    return ended


def load_run(shared: Path, name: str) -> tuple[dict[str, Any], Path]:
    run = json.loads((shared / "parity" / f"{name}.json").read_text())
    return run, (shared / "parity" / run["trace"]).resolve()


def close(ours_s: float | None, theirs_ms: str) -> bool:
    theirs = float(theirs_ms)
    return ours_s is not None and abs(ours_s * 1e3 - theirs) <= TOLERANCE * max(1.0, theirs)


@pytest.mark.parametrize("name", RUNS)
def test_every_request_agrees(name: str, shared: Path) -> None:
    run, trace = load_run(shared, name)
    ended = simulate(peer_config(run, trace))
    off = []
    with (shared / "parity" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ended)
    for row in rows:
        request, status = ended[int(row["line"])]
        seq = request.sequence
        assert seq is not None
        agrees = (
            status == row["status"]
            and request.worker_id == int(row["worker"])
            and seq.reused_tokens == int(row["reused_tokens"])
            and seq.readmissions == int(row["readmissions"])
            and close(request.arrival_s, row["arrival_ms"])
            and close(seq.admit_s, row["admit_ms"])
            and close(seq.first_token_s, row["first_token_ms"])
            and close(seq.last_token_s, row["last_token_ms"])
        )
        if not agrees:
            off.append((row, seq, request.arrival_s, seq.admit_s, seq.first_token_s, seq.last_token_s))
    assert not off, f"{len(off)} of {len(rows)} rows differ, first: {off[0]}"


@pytest.mark.parametrize("name", ["agg1_vllm", "agg1_vllm_preempt", "agg4_vllm"])
def test_the_summary_agrees_with_the_peers_percentile_rule(name: str, shared: Path) -> None:
    run, trace = load_run(shared, name)
    ended = simulate(peer_config(run, trace))
    ttft, e2e, tpot = [], [], []
    for request, _ in ended.values():
        seq = request.sequence
        assert seq is not None
        assert seq.first_token_s is not None
        assert seq.last_token_s is not None
        ttft.append(seq.first_token_s - request.arrival_s)
        e2e.append(seq.last_token_s - request.arrival_s)
        if seq.outputs > 1:
            tpot.append((seq.last_token_s - seq.first_token_s) / (seq.outputs - 1))
    summary = run["summary"]
    for key, values in (("ttft", ttft), ("e2e_latency", e2e), ("tpot", tpot)):
        ms = np.array(values) * 1e3
        ours = {
            "mean": ms.mean(), "min": ms.min(), "max": ms.max(), "std": ms.std(),
            "median": rank_percentile(ms, 0.5), "p90": rank_percentile(ms, 0.9), "p99": rank_percentile(ms, 0.99),
        }  # fmt: skip
        for stat, value in ours.items():
            assert value == pytest.approx(summary[f"{stat}_{key}_ms"], rel=TOLERANCE), (key, stat)


def test_our_own_rule_for_fifo_preemption_differs_and_is_a_choice(shared: Path) -> None:
    """Without `compat` no running request is skipped after a fifo preemption (switch S3)."""
    run, trace = load_run(shared, "agg1_vllm_preempt_fifo")
    peer = simulate(peer_config(run, trace))
    ours = simulate(peer_config(run, trace, "compat=none"))
    ends = [(a[0].sequence.last_token_s, ours[row][0].sequence.last_token_s) for row, a in peer.items()]  # type: ignore[union-attr]
    assert any(a != b for a, b in ends)
    assert all(status == "completed" for _, status in ours.values())


def test_kv_routing_falls_into_the_peers_band(shared: Path) -> None:
    """The peer draws ties without a seed: means of our seeds within its min-max, widened by its own spread."""
    band = json.loads((shared / "parity" / "band_agg4_vllm_kv.json").read_text())
    trace = shared / "traces" / "mooncake" / "conversation_trace.0-45min.jsonl"
    base = {"rows": [0, 600], "trace_block_size": 512, "settings": {"num_workers": 4}}
    ttft_ms, reuse = [], []
    for seed in range(5):
        ended = simulate(peer_config(base, trace, "router.mode=kv", f"seed={seed}"))
        sequences = [request.sequence for request, _ in ended.values()]
        ttft_ms.append(np.mean([(s.first_token_s - s.arrival_s) * 1e3 for s in sequences if s is not None]))
        reuse.append(sum(s.reused_tokens for s in sequences if s) / sum(s.prompt for s in sequences if s))
    runs = band["runs"] if "runs" in band else band["summaries"]
    for ours, key in ((np.mean(ttft_ms), "mean_ttft_ms"), (np.mean(reuse), "prefix_cache_reused_ratio")):
        peer = [r.get("summary", r)[key] for r in runs]
        spread = max(peer) - min(peer)
        assert min(peer) - spread <= ours <= max(peer) + spread, (key, ours, peer)


GOLDENS = [
    "first_token",
    "mean_floor",
    "mixed_pass",
    "chunked_9000",
    "tie_arrival_at_pass_end",
    "max_num_seqs_2",
    "fixed_per_pass",
    "zero_outputs",
    "max_model_len",
    "prompt_over_pool",
    "near_full_pool",
    "full_hit",
    "sessions",
    "sessions_cap1",
    "cap2",
    "arrival_speedup_2",
    "shifted_and_unsorted",
    "metrics",
]


@pytest.mark.parametrize("case", GOLDENS)
def test_golden(case: str, shared: Path, tmp_path: Path) -> None:
    """One rule each; the rows are in the golden, outcomes are told apart by lengths and arrival."""
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    golden = next(g for g in goldens["trace"] if g["case"] == case)
    trace = tmp_path / "rows.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    settings = {"num_workers": 1} | golden["settings"]
    ratio = settings.pop("arrival_speedup_ratio", 1.0)
    for key in ("sla_ttft_ms", "sla_itl_ms"):
        settings.pop(key, None)
    engine = settings.get("extra_engine_args", {}).get("engine", {})
    more = [f"workers.engine.max_model_len={engine.pop('max_model_len')}"] if "max_model_len" in engine else []
    run = {"rows": [0, len(golden["rows"])], "trace_block_size": goldens["trace_block_size"], "settings": settings}
    more += [f"trace.speedup={ratio}", "trace.sort=true", "trace.keep_zero_output=true"]
    ended = simulate(peer_config(run, trace, *more))
    ours = [_outcome(request, status) for request, status in ended.values()]
    theirs = [
        (
            r["input_length"],
            r["terminal_status"],
            r["output_length"],
            r["reused_input_tokens"],
            r.get("decode_worker_idx"),
            r["arrival_time_ms"],
            r.get("first_token_ms"),
            r.get("last_token_ms"),
        )
        for r in golden["requests"]
    ]
    assert len(ours) == len(theirs)
    for mine, other in zip(sorted(ours, key=str), sorted(theirs, key=str), strict=True):
        assert mine[:4] == other[:4]
        if other[1] == "completed":
            assert mine[4] == other[4]
            for ours_ms, theirs_ms in zip(mine[5:], other[5:], strict=True):
                assert (ours_ms is None) == (theirs_ms is None)
                assert theirs_ms is None or ours_ms == pytest.approx(theirs_ms, rel=TOLERANCE, abs=1e-6)


def _outcome(request: OpenRequest, status: str) -> tuple[Any, ...]:
    seq = request.sequence
    assert seq is not None

    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    return (
        seq.prompt,
        status,
        seq.outputs,
        seq.reused_tokens,
        request.worker_id,
        ms(request.arrival_s),
        ms(seq.first_token_s),
        ms(seq.last_token_s),
    )
