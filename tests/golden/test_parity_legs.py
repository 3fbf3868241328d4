"""Disaggregated serving against the compiled simulator: every row, and the five stamps of every hand-off.

Settings of a run go through our own TOML with `compat = "dynamo-1.6.1"`; see docs/parity.md.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from test_parity import ENGINE_KEYS, PEER_DEFAULTS, TOLERANCE, close, load_run

from policies.cluster.controller import Controller
from traces.load import open_trace
from twin.cluster import build_groups
from twin.config import Config
from twin.config_read import load
from twin.deciding import build_policy
from twin.legs import handoff_plan, priced_for_legs
from twin.mocker.handoff import Handoff
from twin.mocker.requests import OpenRequest
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.replay import demand_of, read_options

pytestmark = pytest.mark.shared

RUNS = [
    "disagg2p2d_vllm",
    "disagg2p2d_vllm_xfer",
    "disagg2p2d_vllm_ties",
    "disagg1p1d_vllm_tight",
    "disagg1p1d_trtllm",
    "disagg1p2d_sglang",
    "disagg2p2d_sglang",
]
DEFAULTS = {
    "vllm": PEER_DEFAULTS,
    "trtllm": {"block_size": 32, "num_gpu_blocks": 16384},
    "sglang": {"block_size": 1, "num_gpu_blocks": 16384},
}


def group(role: str, count: int, engine: dict[str, Any]) -> str:
    """One worker group in TOML."""
    kind = engine.get("backend", "vllm")
    keys = DEFAULTS[kind] | engine
    timing = keys.pop("timing_model", None)
    lines = [f'kind = "{kind}"']
    lines += [f"{ENGINE_KEYS[key]} = {json.dumps(value)}" for key, value in keys.items() if key in ENGINE_KEYS]
    latency = 'model = "polynomial"'
    if timing is not None:
        latency = f'model = "fixed"\nprefill_s = {timing["prefill_ms"] / 1e3}\ndecode_s = {timing["decode_ms"] / 1e3}'
    return (
        f'[[workers]]\nname = "{role}"\nrole = "{role}"\ncount = {count}\n'
        f"[workers.engine]\n{chr(10).join(lines)}\n[workers.latency]\n{latency}\n"
    )


def legs_config(run: dict[str, Any], trace: Path, folder: Path, *sets: str) -> Config:
    settings = run["settings"]
    prefill, decode = (settings[f"{role}_engine_args"]["engine"] for role in ("prefill", "decode"))
    table = [f"kv_bytes_per_token = {prefill.get('kv_transfer_bytes_per_token', 0)}"]
    if "kv_transfer_bandwidth" in prefill:
        table.append(f"bandwidth_gb_per_s = {prefill['kv_transfer_bandwidth']}")
    if prefill.get("kv_transfer_timing_mode") == "destination_missing":
        table.append('transfer = "missing"')
    text = f'compat = "dynamo-1.6.1"\n[disaggregation]\n{chr(10).join(table)}\n'
    text += group("prefill", settings["num_prefill_workers"], prefill)
    text += group("decode", settings["num_decode_workers"], decode)
    file = folder / "run.toml"
    file.write_text(text)
    flags = {"TRACE": str(trace), "--limit": str(run["rows"][1]), "--hash-block-tokens": str(run["trace_block_size"])}
    return load(file, flags, sets)


def simulate(config: Config, *, leap: bool = True) -> dict[int, tuple[OpenRequest, Handoff | None, str]]:
    assert config.trace.path is not None
    trace = open_trace(config.trace.path, read_options(config.trace))
    groups = priced_for_legs(config, build_groups(config, leap=leap))
    ended: dict[int, tuple[OpenRequest, Handoff | None, str]] = {}
    world = MockWorld(
        controller=Controller([build_policy(config, groups[0].settings.block_size)]),
        workers=[spec for group in groups for spec in group.workers],
        demand=demand_of(config, trace),
        sinks=MemorySinks(),
        router=config.router.mode,
        key_tokens=trace.info.hash_block_tokens,
        handoff=handoff_plan(config, groups),
        on_end=lambda request, status: ended.update({request.row.row: (request, request.handoff, status)}),
    )
    world.run()
    world.audit()
    return ended


def differences(
    row: dict[str, str], request: OpenRequest, handoff: Handoff | None, status: str, prefill_workers: int
) -> list[str]:
    """What of one row is not as the peer has it."""
    seq, prefill = request.sequence, request.prefill
    assert handoff is not None
    assert prefill is not None
    off = []
    if status != row["status"]:
        off.append(f"status {status}")
    if request.prefill_worker_id != int(row["prefill_worker"]):
        off.append(f"prefill worker {request.prefill_worker_id}")
    if request.worker_id is None or request.worker_id - prefill_workers != int(row["worker"]):
        off.append(f"decode worker {request.worker_id}")
    if prefill.reused_tokens != int(row["reused_tokens"]):
        off.append(f"reused {prefill.reused_tokens}")
    if seq is not None and seq.readmissions != int(row["readmissions"]):
        off.append(f"readmissions {seq.readmissions}")
    ours = {
        "arrival": request.arrival_s,
        "admit": prefill.admit_s,
        "first_token": request.first_s,
        "last_token": request.last_s,
        "source_held": handoff.held_s,
        "dest_reserved": handoff.reserved_s,
        "dest_activated": handoff.activated_s,
        "decode_admit": None if seq is None else seq.admit_s,
        "source_released": handoff.released_s,
    }
    off += [f"{name} {at_s}" for name, at_s in ours.items() if not close(at_s, row[f"{name}_ms"])]
    return off


@pytest.mark.parametrize("name", RUNS)
def test_every_request_and_every_stamp_agrees(name: str, shared: Path, tmp_path: Path) -> None:
    run, trace = load_run(shared, name)
    ended = simulate(legs_config(run, trace, tmp_path))
    with (shared / "parity" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ended)
    prefill_workers = run["settings"]["num_prefill_workers"]
    off = {row["line"]: differences(row, *ended[int(row["line"])], prefill_workers) for row in rows}
    off = {line: what for line, what in off.items() if what}
    assert not off, f"{len(off)} of {len(rows)} rows differ, first: {next(iter(off.items()))}"


@pytest.mark.parametrize(
    "name", ["disagg2p2d_vllm_xfer", "disagg1p1d_vllm_tight", "disagg1p1d_trtllm", "disagg2p2d_sglang"]
)
@pytest.mark.parametrize("compat", ["dynamo-1.6.1", "none"])
def test_leaping_changes_nothing(name: str, compat: str, shared: Path, tmp_path: Path) -> None:
    run, trace = load_run(shared, name)
    config = legs_config(run, trace, tmp_path, f"compat={compat}", *(["disaggregation.bandwidth_gb_per_s=50"]))
    leapt, stepped = simulate(config), simulate(config, leap=False)
    assert leapt.keys() == stepped.keys()
    for row, (request, handoff, status) in leapt.items():
        other, other_handoff, other_status = stepped[row]
        assert status == other_status
        assert (request.first_s, request.last_s, request.made) == (other.first_s, other.last_s, other.made)
        assert handoff is not None
        assert other_handoff is not None
        for stamp in ("held_s", "reserved_s", "activated_s", "released_s"):
            assert getattr(handoff, stamp) == getattr(other_handoff, stamp), (row, stamp)


@pytest.mark.parametrize("case", ["pd_vllm", "pd_vllm_xfer", "pd_destination_missing", "pd_prompt_over_decode_pool"])
def test_golden(case: str, shared: Path, tmp_path: Path) -> None:
    goldens = json.loads((shared / "parity" / "goldens.json").read_text())
    golden = next(g for g in goldens["trace"] if g["case"] == case)
    trace = tmp_path / "rows.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    run = {"rows": [0, len(golden["rows"])], "trace_block_size": goldens["trace_block_size"]} | {
        "settings": golden["settings"]
    }
    ended = simulate(legs_config(run, trace, tmp_path))
    theirs = sorted(golden["requests"], key=lambda r: (r["input_length"], r["arrival_time_ms"]))
    ours = sorted(ended.values(), key=lambda item: (item[0].row.isl, item[0].arrival_s))
    assert len(ours) == len(theirs)
    for (request, _, status), other in zip(ours, theirs, strict=True):
        assert status == other["terminal_status"]
        if status == "completed":
            first, last = request.first_s, request.last_s
            assert first is not None
            assert last is not None
            assert first * 1e3 == pytest.approx(other["first_token_ms"], rel=TOLERANCE)
            assert last * 1e3 == pytest.approx(other["last_token_ms"], rel=TOLERANCE)
