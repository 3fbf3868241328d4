"""Demand: rows out of record batches, sessions wherever their turns stand, the closed loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from simulate import RowsDemand, engine_settings, simulate, trace_row

from traces.load import ReadOptions, open_trace
from twin.mocker.demand import Demand, read_rows
from twin.perf.fixed import FixedLatency

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)


def test_rows_come_out_of_batches_with_their_keys_and_numbers() -> None:
    batch = pa.record_batch(
        {
            "arrival_s": [0.0, 1.0, 2.0],
            "isl": [20, 10, 5],
            "osl": [1, 2, 3],
            "hash_ids": pa.array([[1, 2], None, [3]], pa.list_(pa.int64())),
            "request_id": ["a", None, "c"],
        }
    )
    rows = list(read_rows([batch, batch.slice(1)]))
    assert [row.row for row in rows] == [0, 1, 2, 3, 4]
    assert [row.keys for row in rows] == [[1, 2], None, [3], None, [3]]
    assert [row.request_id for row in rows] == ["a", "1", "c", "3", "c"]


def test_later_turns_are_found_wherever_they_stand_behind_rows_without_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]},
        {"timestamp": 1000, "session_id": "s", "input_length": 10, "output_length": 1, "hash_ids": [2]},
        {"timestamp": 9000, "input_length": 10, "output_length": 1, "hash_ids": [3]},
        {"session_id": "s", "delay": 500, "input_length": 10, "output_length": 1, "hash_ids": [4]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = open_trace(path, ReadOptions(hash_block_tokens=16))
    demand = Demand(trace)
    assert [row.row for row in demand.open_loop()] == [0, 1, 2]
    assert demand.keyed
    turn = demand.next_turn("s")
    assert turn is not None
    assert (turn.row, turn.delay_s) == (3, 0.5)
    assert demand.next_turn("s") is None


def test_the_cap_counts_sessions_and_stays_taken_while_one_thinks() -> None:
    rows = [
        trace_row(0, 0.0, 100, 1, session_id="s"),
        trace_row(1, None, 100, 1, session_id="s", delay_s=1.0),
        trace_row(2, 0.0, 100, 1),
    ]
    settings = engine_settings(chunked_prefill=False, exclusive_prefill=True)
    seen = simulate(rows, [(settings, TOY)], concurrency=1)
    assert [seen.ended[row][0].arrival_s for row in (0, 1, 2)] == [0.0, 1.1, 1.2]


def test_an_id_that_the_trace_repeats_while_it_is_open_does_no_harm() -> None:
    rows = [trace_row(n, 0.0, 10, 3)._replace(request_id="same") for n in range(3)]
    seen = simulate(rows, [(engine_settings(), TOY)])
    assert [status for _, status in seen.ended.values()] == ["completed"] * 3
    assert {request.row.request_id for request, _ in seen.ended.values()} == {"same"}


def test_without_ids_nothing_is_keyed() -> None:
    demand = RowsDemand([trace_row(0, 0.0, 10, 1)])
    list(demand.open_loop())
    assert not demand.keyed


def test_a_replay_imports_no_heavy_package(tmp_path: Path) -> None:
    """The start of a replay is most of a short one: pandas alone would cost as much as 3,000 requests."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    code = (
        "import sys; from pathlib import Path; from twin.config_read import load; from twin.replay import replay\n"
        f"replay(load(None, {{'TRACE': {str(trace)!r}}}), out=Path({str(tmp_path / 'run')!r}), html=False)\n"
        "print([m for m in ('pandas', 'scipy', 'matplotlib', 'pydantic', 'numpy.ma') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
