"""SGLang against a compiled simulator's per-request outputs (docs/engines/sglang.md).

Whole runs, aggregated and disaggregated, golden cases of one rule each, and a synthetic closed loop; times within
1e-6 relative. Settings come from the run's own JSON and go through our configuration.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_parity_legs
from test_parity import TOLERANCE, close, load_run, peer_config, simulate

from twin.config import Config

pytestmark = pytest.mark.shared

RUNS = ["agg2_sglang_fifo", "agg1_sglang_lpm", "agg1_sglang_retract", "agg2_sglang_slots"]
DEFAULTS = {"block_size": 1, "num_gpu_blocks": 16384}


def config_of(run: dict[str, Any], trace: Path, *more: str) -> Config:
    """A run's settings in our words."""
    settings = json.loads(json.dumps(run["settings"]))
    engine = settings["extra_engine_args"]["engine"]
    assert engine.pop("backend") == "sglang"
    sets = ["workers.engine.kind=sglang"]
    own = engine.pop("sglang", {})
    if "prefill_decode_interval" in engine:
        own["prefill_decode_interval"] = engine.pop("prefill_decode_interval")
    sets += [f"workers.engine.{key}={value}" for key, value in own.items()]
    settings["extra_engine_args"]["engine"] = DEFAULTS | engine
    return peer_config({**run, "settings": settings}, trace, *sets, *more)


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_every_request_agrees(name: str, leap: bool, shared: Path) -> None:
    run, trace = load_run(shared, name)
    ended = simulate(config_of(run, trace), leap=leap)
    with (shared / "parity" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ended)
    off = []
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
            off.append((row, seq, seq.admit_s, seq.first_token_s, seq.last_token_s))
    assert not off, f"{len(off)} of {len(rows)} rows differ, first: {off[0]}"


CASES = ["zero_outputs_sglang", "full_hit_sglang", "sglang_exclusive", "sglang_prefill_decode_interval_3"]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, shared: Path, tmp_path: Path) -> None:
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    golden = next(g for g in goldens["trace"] if g["case"] == case)
    trace = tmp_path / "rows.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    settings = {"num_workers": 1} | golden["settings"]
    run = {"rows": [0, len(golden["rows"])], "trace_block_size": goldens["trace_block_size"], "settings": settings}
    ended = simulate(config_of(run, trace, "trace.keep_zero_output=true"))
    theirs = {(r["input_length"], r["arrival_time_ms"]): r for r in golden["requests"]}
    assert len(ended) == len(theirs)
    for request, status in ended.values():
        seq = request.sequence
        assert seq is not None
        other = theirs[seq.prompt, request.arrival_s * 1e3]
        assert status == other["terminal_status"]
        assert (seq.outputs, seq.reused_tokens) == (other["output_length"], other["reused_input_tokens"])
        for ours_s, key in (
            (seq.admit_s, "first_admit_ms"),
            (seq.first_token_s, "first_token_ms"),
            (seq.last_token_s, "last_token_ms"),
        ):
            assert (ours_s is None) == (key not in other), (key, seq)
            assert ours_s is None or ours_s * 1e3 == pytest.approx(other[key], rel=TOLERANCE, abs=1e-6)


def test_a_closed_loop_of_unrelated_prompts_has_the_peers_means(shared: Path, tmp_path: Path) -> None:
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    golden = next(g for g in goldens["synthetic"] if g["case"] == "syn_sglang_32")
    isl, osl, count = golden["input_output_count"]
    trace = tmp_path / "rows.jsonl"
    keys = [[1000 * n + i for i in range(-(-isl // 64))] for n in range(count)]
    rows = [{"timestamp": 0, "input_length": isl, "output_length": osl, "hash_ids": ids} for ids in keys]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"num_workers": 1} | golden["settings"]
    ended = simulate(config_of({"rows": [0, count], "trace_block_size": 64, "settings": settings}, trace))
    sequences = [(request.arrival_s, request.sequence) for request, _ in ended.values()]
    ttft_ms = np.array([(s.first_token_s - at_s) * 1e3 for at_s, s in sequences])  # type: ignore[operator,union-attr]
    e2e_ms = np.array([(s.last_token_s - at_s) * 1e3 for at_s, s in sequences])  # type: ignore[operator,union-attr]
    summary = golden["summary"]
    assert ttft_ms.mean() == pytest.approx(summary["mean_ttft_ms"], rel=TOLERANCE)
    assert ttft_ms.std() == pytest.approx(summary["std_ttft_ms"], rel=TOLERANCE)
    assert e2e_ms.mean() == pytest.approx(summary["mean_e2e_latency_ms"], rel=TOLERANCE)
    assert sum(s.readmissions for _, s in sequences if s is not None) == golden["readmissions"]


@pytest.mark.parametrize("name", ["disagg1p2d_sglang", "disagg2p2d_sglang"])
def test_every_hand_off_agrees(name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_parity_legs.DEFAULTS, "sglang", DEFAULTS)
    run, trace = load_run(shared, name)
    ended = test_parity_legs.simulate(test_parity_legs.legs_config(run, trace, tmp_path))
    with (shared / "parity" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ended)
    prefill_workers = run["settings"]["num_prefill_workers"]
    off = []
    for row in rows:
        wrong = test_parity_legs.differences(row, *ended[int(row["line"])], prefill_workers)
        if wrong:
            off.append((row, wrong))
    assert not off, f"{len(off)} of {len(rows)} rows differ, first: {off[0]}"
