"""TensorRT-LLM, attention-DP ranks and speculative decoding against a compiled simulator's outputs (docs/parity.md).

Whole runs per request, golden cases of one rule each, and a synthetic closed loop; times within 1e-6 relative.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_parity import TOLERANCE, close, load_run, peer_config, simulate

from reports.metrics import rank_percentile
from twin.config import Config
from twin.mocker.world import OpenRequest

pytestmark = pytest.mark.shared

TRTLLM_DEFAULTS = {"block_size": 32}


def config_of(run: dict[str, Any], trace: Path, *more: str) -> Config:
    """A run's settings in our words: the keys that the vLLM runs do not have become ours here."""
    settings = json.loads(json.dumps(run["settings"]))
    extra = settings.setdefault("extra_engine_args", {})
    engine = extra.setdefault("engine", {})
    sets = []
    if engine.pop("backend", "vllm") == "trtllm":
        sets.append("workers.engine.kind=trtllm")
        engine.setdefault("block_size", TRTLLM_DEFAULTS["block_size"])
    if "dp_size" in extra:
        sets.append(f"workers.dp={extra['dp_size']}")
    for theirs, ours in (
        ("prefill_schedule_interval", "prefill_schedule_interval"),
        ("aic_nextn", "nextn"),
        ("aic_nextn_accept_rates", "accept_rates"),
    ):
        if theirs in engine:
            sets.append(f"workers.engine.{ours}={engine.pop(theirs)}")
    return peer_config({**run, "settings": settings}, trace, *sets, *more)


@pytest.mark.parametrize("leap", [True, False])
def test_every_request_agrees(leap: bool, shared: Path) -> None:
    run, trace = load_run(shared, "agg1_trtllm_small")
    ended = simulate(config_of(run, trace), leap=leap)
    with (shared / "parity" / "agg1_trtllm_small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ended)
    off = []
    for row in rows:
        request, status = ended[int(row["line"])]
        seq = request.sequence
        assert seq is not None
        agrees = (
            status == row["status"]
            and seq.reused_tokens == int(row["reused_tokens"])
            and seq.readmissions == int(row["readmissions"]) == 0
            and close(seq.admit_s, row["admit_ms"])
            and close(seq.first_token_s, row["first_token_ms"])
            and close(seq.last_token_s, row["last_token_ms"])
        )
        if not agrees:
            off.append((row, seq, seq.admit_s, seq.first_token_s, seq.last_token_s))
    assert not off, f"{len(off)} of {len(rows)} rows differ, first: {off[0]}"


def golden_case(shared: Path, case: str, kind: str = "trace") -> dict[str, Any]:
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    found: dict[str, Any] = next(g for g in goldens[kind] if g["case"] == case)
    return {**found, "trace_block_size": goldens["trace_block_size"]}


def run_golden(golden: dict[str, Any], folder: Path, *more: str) -> list[tuple[OpenRequest, str]]:
    trace = folder / "rows.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    run = {**golden, "rows": [0, len(golden["rows"])], "settings": {"num_workers": 1} | golden["settings"]}
    ended = simulate(config_of(run, trace, *more))
    return [ended[row] for row in sorted(ended)]


CASES = [
    "full_hit_trtllm",
    "trtllm_cap",
    "dp2_barrier",
    "dp2_two_workers",
    "dp2_prefill_schedule_interval_4",
    "mtp_all_accepted",
    "mtp_none_accepted",
]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, shared: Path, tmp_path: Path) -> None:
    golden = golden_case(shared, case)
    ours = [
        (
            request.row.isl,
            status,
            request.sequence.outputs,  # type: ignore[union-attr]
            request.sequence.reused_tokens,  # type: ignore[union-attr]
            request.sequence,
        )
        for request, status in run_golden(golden, tmp_path)
    ]
    theirs = [
        (r["input_length"], r["terminal_status"], r["output_length"], r["reused_input_tokens"], r)
        for r in golden["requests"]
    ]
    assert len(ours) == len(theirs)
    for mine, other in zip(
        sorted(ours, key=lambda o: (o[0], o[3])), sorted(theirs, key=lambda o: (o[0], o[3])), strict=True
    ):
        assert mine[:4] == other[:4]
        seq, peer = mine[4], other[4]
        if mine[1] == "completed":
            for at_s, key in (
                (seq.admit_s, "first_admit_ms"),
                (seq.first_token_s, "first_token_ms"),
                (seq.last_token_s, "last_token_ms"),
            ):
                assert at_s * 1e3 == pytest.approx(peer[key], rel=TOLERANCE, abs=1e-6), (key, seq)


def test_a_synthetic_closed_loop_has_the_peers_summary(shared: Path, tmp_path: Path) -> None:
    golden = golden_case(shared, "syn_trtllm_32", "synthetic")
    isl, osl, count = golden["input_output_count"]
    trace = tmp_path / "rows.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": isl, "output_length": osl, "hash_ids": [2 * n, 2 * n + 1]})
            + "\n"
            for n in range(count)
        )
    )
    run = {**golden, "rows": [0, count], "settings": {"num_workers": 1} | golden["settings"]}
    ended = simulate(config_of(run, trace))
    sequences = [request.sequence for request, _ in ended.values()]
    arrivals_s = np.array([request.arrival_s for request, _ in ended.values()])
    ttft_ms = (np.array([s.first_token_s for s in sequences if s]) - arrivals_s) * 1e3
    e2e_ms = (np.array([s.last_token_s for s in sequences if s]) - arrivals_s) * 1e3
    tpot_ms = (e2e_ms - ttft_ms) / (osl - 1)
    summary = golden["summary"]
    assert {status for _, status in ended.values()} == {"completed"}
    for key, ms in (("ttft", ttft_ms), ("e2e_latency", e2e_ms), ("tpot", tpot_ms)):
        assert ms.mean() == pytest.approx(summary[f"mean_{key}_ms"], rel=TOLERANCE)
        assert ms.std() == pytest.approx(summary[f"std_{key}_ms"], rel=TOLERANCE, abs=1e-6)
    assert rank_percentile(ttft_ms, 0.99) == pytest.approx(summary["p99_ttft_ms"], rel=TOLERANCE)
    assert max(s.last_token_s for s in sequences if s and s.last_token_s) * 1e3 == pytest.approx(
        summary["duration_ms"], rel=TOLERANCE
    )
    assert sum(s.readmissions for s in sequences if s) == golden["readmissions"]


def test_random_bursts_take_as_many_steps_as_the_peers_up_to_chance(shared: Path, tmp_path: Path) -> None:
    """2,000 tokens in bursts of 1, 2, 3 with chances 0.2, 0.4, 0.4 take 909 steps, give or take 10 (one sigma)."""
    golden = golden_case(shared, "mtp_band_seed42")
    [(request, _)] = run_golden(golden, tmp_path)
    seq = request.sequence
    assert seq is not None
    assert seq.first_token_s is not None
    assert seq.last_token_s is not None
    peer = golden["requests"][0]
    assert seq.first_token_s * 1e3 == pytest.approx(peer["first_token_ms"], rel=TOLERANCE)
    step_ms = 5.8
    assert abs(seq.last_token_s * 1e3 - peer["last_token_ms"]) < 3 * 2**0.5 * 10 * step_ms
    ours = run_golden(golden, tmp_path, "compat=none")[0][0].sequence
    assert ours is not None
    assert ours.first_token_s * 1e3 == pytest.approx(32.105859, rel=TOLERANCE)  # type: ignore[operator]
