"""The run record: what is written, in which order, in how much memory, and how a broken folder is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from builders_reports import Ask, request_row, run_toy, step_row
from pyarrow import parquet

from policies.errors import ConfigError
from reports import record
from reports.record import WINDOW_ROWS, RequestRow, RunRecord, RunWriter, finish_run, read_run_state


def written(folder: Path, *requests: RequestRow) -> RunRecord:
    writer = RunWriter(folder)
    writer.requests.update({row[0]: row for row in requests})
    writer.close()
    return RunRecord(folder)


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_and_types_are_those_of_the_architecture(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    names = (
        "row request_id session_id arrival_s isl osl status reason worker_id prefill_worker_id dispatch_s admit_s"
        " first_token_s last_token_s queue_wait_s ttft_s tpot_s e2e_s output_tokens cached_tokens readmissions"
        " migrations held_s moved_s router_wait_s retry_after_s"
    )
    schema = parquet.read_schema(tmp_path / "requests.parquet")
    assert schema.names == names.split()
    assert schema.field("worker_id").type == pa.int32()
    assert parquet.read_schema(tmp_path / "steps.parquet").names == list(record.STEP_COLUMNS)


def test_latencies_are_derived_from_the_time_stamps(tmp_path: Path) -> None:
    columns = written(tmp_path, request_row(0)).requests
    derived = {name: columns.floats(name)[0] for name in record.DERIVED_COLUMNS}
    assert derived == {"queue_wait_s": 1.0, "router_wait_s": 0.5, "ttft_s": 2.0, "tpot_s": 1.0, "e2e_s": 6.0}


def test_undefined_is_null_and_never_zero(tmp_path: Path) -> None:
    rejected = request_row(
        0, "rejected", reason="needs 13 blocks, the pool has 10", worker_id=None, dispatch_s=None, admit_s=None,
        first_token_s=None, last_token_s=None, output_tokens=0, cached_tokens=None,
    )  # fmt: skip
    one_token = request_row(1, output_tokens=1, last_token_s=3.0)
    written(tmp_path, rejected, one_token)
    first, second = parquet.read_table(tmp_path / "requests.parquet").to_pylist()
    absent = {name for name, value in first.items() if value is None}
    assert absent == {
        "session_id", "worker_id", "prefill_worker_id", "dispatch_s", "admit_s", "first_token_s", "last_token_s",
        "queue_wait_s", "router_wait_s", "ttft_s", "tpot_s", "e2e_s", "cached_tokens", "held_s", "moved_s",
        "retry_after_s",
    }  # fmt: skip
    assert (second["tpot_s"], second["e2e_s"]) == (None, 2.0)


@pytest.mark.parametrize("status", ["cancelled", "failed", "open"])
def test_what_did_not_complete_keeps_its_first_token_and_no_latency(tmp_path: Path, status: str) -> None:
    columns = written(tmp_path, request_row(0, status)).requests
    assert columns.floats("ttft_s")[0] == 2.0
    assert np.isnan([columns.floats("tpot_s")[0], columns.floats("e2e_s")[0]]).all()


def test_times_survive_bit_for_bit(tmp_path: Path) -> None:
    at_s = 0.1 + 0.2
    assert written(tmp_path, request_row(0, arrival_s=at_s)).requests.floats("arrival_s")[0] == at_s


# --- order and memory -------------------------------------------------------------------------------------------------


def test_requests_come_out_in_the_order_of_the_trace(tmp_path: Path) -> None:
    record_ = written(tmp_path, *(request_row(row) for row in (3, 0, 2, 1)))
    assert record_.requests.ints("row").tolist() == [0, 1, 2, 3]


def test_a_full_window_is_written_and_forgotten(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    rows = range(WINDOW_ROWS + 10)
    writer.requests.update({row: request_row(row) for row in rows})
    writer.spill()
    assert sorted(writer.requests) == list(rows[WINDOW_ROWS:])
    writer.close()
    assert np.array_equal(RunRecord(tmp_path).requests.ints("row"), np.array(rows))


def test_a_request_in_flight_holds_back_the_rows_behind_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.requests.update({row: request_row(row) for row in range(1, WINDOW_ROWS + 1)})
    writer.spill()
    assert len(writer.requests) == WINDOW_ROWS
    writer.requests[0] = request_row(0)
    writer.spill()
    assert list(writer.requests) == [WINDOW_ROWS]


def test_steps_are_written_in_windows_into_the_same_list(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    put = writer.steps.append
    for place in range(WINDOW_ROWS):
        put(step_row(0, place * 0.25, place * 0.25 + 0.25))
    writer.spill()
    assert writer.steps == []
    put(step_row(0, 1e6, 1e6 + 1))
    writer.close()
    assert RunRecord(tmp_path).steps.rows == WINDOW_ROWS + 1


def test_a_run_without_anything_is_a_whole_folder(tmp_path: Path) -> None:
    record_ = written(tmp_path)
    assert (record_.requests.rows, record_.steps.rows, record_.samples.rows) == (0, 0, 0)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_new_run_replaces_what_an_old_one_left(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    for name in ("report.json", "report.html", "perfetto.json", "notes.txt"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    RunWriter(tmp_path).close()
    assert RunRecord(tmp_path).requests.rows == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "requests.parquet",
        "steps.parquet",
        "decisions.parquet",
        "samples.parquet",
        "run.json",
        "notes.txt",
    }


@pytest.mark.parametrize("name", ["thesis.md", "requests.parquet", "run.json"])
def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has files and no run .*--out"):
        RunWriter(tmp_path)
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_complete_run_stays_until_the_next_one_is_closed(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    finish_run(tmp_path, complete=True, cpu_s=1.0, wall_s=1.0)
    (tmp_path / "journal.jsonl").write_text("old", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for discarded in (True, False):
        writer = RunWriter(tmp_path, others=("journal.jsonl",))
        writer.requests[0] = request_row(0, isl=7)
        writer.place("journal.jsonl").write_text("new", encoding="utf-8")
        if discarded:
            writer.discard()
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert RunRecord(tmp_path).requests.ints("isl").tolist() == [100]
    writer.close()
    assert RunRecord(tmp_path).requests.ints("isl").tolist() == [7]
    assert not RunRecord(tmp_path).complete
    assert (tmp_path / "journal.jsonl").read_text(encoding="utf-8") == "new"
    assert {path.name for path in tmp_path.iterdir()} == before.keys()


def test_a_run_is_partial_until_it_is_finished(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    assert read_run_state(tmp_path).state == "partial"
    writer.close()
    assert not RunRecord(tmp_path).complete
    finish_run(tmp_path, complete=True, cpu_s=1.5, wall_s=2.5, versions={"vllm": "0.12"})
    state = RunRecord(tmp_path).state
    assert (state.state, state.cpu_s, state.wall_s) == ("complete", 1.5, 2.5)
    plain = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert {"host", "started"} <= plain.keys()
    assert plain["versions"].keys() == {"python", "numpy", "pyarrow", "vllm"}


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot write the run there .*--out") as refused:
        RunWriter(tmp_path / "file" / "run")
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    (tmp_path / "steps.parquet").unlink()
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"without steps\.parquet, run\.json"):
        RunRecord(tmp_path)
    with pytest.raises(ConfigError, match="no such run folder"):
        RunRecord(tmp_path / "nowhere")


def test_a_file_without_its_end_is_told_as_such(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    whole = (tmp_path / "requests.parquet").read_bytes()
    (tmp_path / "requests.parquet").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"requests\.parquet: not a complete parquet file"):
        RunRecord(tmp_path)


def test_a_foreign_run_json_is_refused(tmp_path: Path) -> None:
    written(tmp_path, request_row(0))
    (tmp_path / "run.json").write_text('{"state": 1', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.json: not a run\.json of ours"):
        RunRecord(tmp_path)


# --- notebooks --------------------------------------------------------------------------------------------------------


def test_a_frame_holds_the_whole_table_and_keeps_numbers_whole_beside_nulls(tmp_path: Path) -> None:
    rejected = request_row(1, "rejected", worker_id=None, admit_s=None, first_token_s=None, last_token_s=None)
    frame = written(tmp_path, request_row(0), rejected).frame("requests")
    assert tuple(frame.columns) == record.REQUEST_COLUMNS
    assert frame["status"].tolist() == ["completed", "rejected"]
    assert frame["worker_id"].dtype == "Int32"
    assert frame["worker_id"].isna().tolist() == [False, True]
    assert frame["ttft_s"].mean() == 2.0


def test_every_table_has_a_frame(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11), Ask(0.5, 50, 3)])
    opened = RunRecord(run.folder)
    rows = {name: len(opened.frame(name)) for name in ("requests", "steps", "decisions", "samples")}
    assert rows == {
        "requests": 2, "steps": opened.steps.rows, "decisions": 2, "samples": opened.samples.rows
    }  # fmt: skip
    steps = opened.frame("steps")
    assert (steps["steps"] * steps["gap_tokens"]).sum() == len(run.gaps)


def test_a_table_that_is_none_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table 'request'; there are requests, steps, decisions, samples"):
        written(tmp_path, request_row(0)).frame("request")  # type: ignore[arg-type]


# --- start-up ---------------------------------------------------------------------------------------------------------


def test_writing_and_reporting_import_no_pandas_and_no_plots(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from builders_reports import Ask, run_toy\n"
        "from reports.build import build_report\n"
        f"run = run_toy(Path({str(tmp_path)!r}), [Ask(0.0, 100, 11)])\n"
        "build_report(run.folder, run.meta)\n"
        "unwanted = {'pandas', 'matplotlib', 'jinja2', 'rich', 'scipy', 'numpy.ma', 'pyarrow.compute'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
