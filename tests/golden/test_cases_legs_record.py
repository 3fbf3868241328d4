"""Case C16 from the record alone: in requests.parquet the parts of a handed-over request sum to its latency.

Queue to `admit_s`, prefill to `held_s`, hand-off (hold and transfer) to `moved_s`, decode to `last_token_s`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_cases_legs import HELD, split
from toy import Run, run

from twin.perf.hardware import find_gpu
from twin.perf.kv_layout import kv_cache, plan_layout
from twin.perf.models import find_model

PARTS = ("arrival_s", "admit_s", "held_s", "moved_s", "last_token_s")
ROOT = Path(__file__).parents[2]


def parts_s(row: dict[str, Any]) -> list[float]:
    """Queue, prefill, hand-off and decode of one completed request; none is negative, and together they are its
    latency."""
    stamps = [row[name] for name in PARTS]
    assert None not in stamps, row
    parts = [b - a for a, b in pairwise(stamps)]
    assert min(parts) >= 0, row
    assert parts[0] == pytest.approx(row["queue_wait_s"], abs=1e-12)
    assert sum(parts) == pytest.approx(row["e2e_s"], abs=1e-9)
    return parts


def completed(done: Run) -> list[dict[str, Any]]:
    rows = [row for row in done.rows("requests") if row["status"] == "completed"]
    assert len(rows) == done.report.counts.completed
    return rows


@pytest.mark.parametrize(("first", "decode_ms"), [("prefill", 100.0), ("decode", 110.0)])
def test_c16_the_recorded_parts_are_as_stated_and_sum_to_the_latency(
    first: str, decode_ms: float, tmp_path: Path
) -> None:
    done = split(
        "c16_disagg.jsonl",
        tmp_path / "run",
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table=f'first_token = "{first}"\nkv_bytes_per_token = 131072\nbandwidth_gb_per_s = 50.0\nsetup_s = 0.001',
    )
    (row,) = completed(done)
    assert [round(part * 1e3, 6) for part in parts_s(row)] == [0, 50, 3.62144, decode_ms]


def test_c17_the_recorded_parts_name_the_wait_for_room(tmp_path: Path) -> None:
    prefill: dict[str, object] = {"kv_blocks": 20, "max_num_seqs": 1}
    done = split("c17_held.jsonl", tmp_path / "run", prefill=prefill, decode={"kv_blocks": 10}, table=HELD)
    told = [[round(part * 1e3, 6) for part in parts_s(row)] for row in completed(done)]
    assert told == [[0, 96, 0, 320], [96, 96, 224, 320]]


@pytest.mark.parametrize("order", ["prefill-first", "decode-first"])
def test_the_parts_of_every_request_of_a_loaded_deployment_sum_to_its_latency(order: str, tmp_path: Path) -> None:
    """200 prompts in 4 s on the example deployment: many move at once, none faster than it would alone."""
    trace = tmp_path / "burst.jsonl"
    shapes = [(20 * n, 200 + 97 * n % 4000, 1 + 13 * n % 90) for n in range(200)]
    rows = [{"timestamp": at_ms, "input_length": isl, "output_length": osl} for at_ms, isl, osl in shapes]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    legs = ROOT / "docs" / "examples" / "legs.toml"
    done = run(trace, tmp_path / "run", f"disaggregation.order={order}", config_file=legs)
    found = completed(done)
    assert len(found) == 200
    layout = plan_layout(kv_cache(find_model("llama-3.1-70b"), "bf16"), 4, 4)
    nic = find_gpu("h100_sxm").nic_bytes_per_s
    assert nic is not None
    waits = 0
    for row in found:
        _, prefill_s, moved_s, decode_s = parts_s(row)
        alone_s = layout.wire_bytes(row["isl"]) / 4 / nic
        assert prefill_s > 0
        assert moved_s >= alone_s * (1 - 1e-9), row
        assert decode_s > 0
        waits += moved_s > 1.01 * alone_s
    assert waits > 10, "nothing waited: the sum was not put to the test"
