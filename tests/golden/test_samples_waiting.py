"""`waiting` of samples.parquet from end to end: exact, and the same with and without leaps."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from twin.config_read import load
from twin.replay import replay

FIXED = (
    "workers.count=1", "workers.latency.model=fixed", "workers.latency.decode_s=0.01",
    "workers.latency.prefill_s_per_token=0.001",
)  # fmt: skip


def samples(folder: Path, rows: str, *more: str, leap: bool) -> dict[str, list[float]]:
    trace = folder / "t.csv"
    trace.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    out = folder / f"leap-{leap}"
    replay(load(None, {"TRACE": str(trace)}, [*FIXED, *more]), out=out, html=False, leap=leap)
    return pq.read_table(out / "samples.parquet").to_pydict()


def test_a_request_admitted_within_a_step_never_waits_at_a_second(tmp_path: Path) -> None:
    leaping = samples(tmp_path, "0,16,1000\n5.004,16,1000\n", leap=True)
    stepping = samples(tmp_path, "0,16,1000\n5.004,16,1000\n", leap=False)
    assert leaping["at_s"] == [float(second) for second in range(16)]
    assert leaping["waiting"] == [0] * 16
    assert leaping["running"] == [1] * 6 + [2] * 5 + [1] * 5
    same = ("at_s", "worker_id", "running", "waiting", "decodes", "prefill_tokens")
    assert {name: leaping[name] for name in same} == {name: stepping[name] for name in same}


def test_what_has_no_slot_waits_until_it_gets_one(tmp_path: Path) -> None:
    rows = "0,16,1000\n2.5,16,300\n4.5,16,300\n"
    told = [samples(tmp_path, rows, "workers.engine.max_num_seqs=1", leap=leap)["waiting"] for leap in (True, False)]
    assert told[0] == told[1]
    # The first ends at 10.006 s, the second at 13.012 s.
    assert told[0] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0]
