"""Input that is no trace, or a trace with values that mean nothing: one TraceError with file, row, value and next step,
whatever is wrong, and never any other exception."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.errors import TraceError
from traces.load import ReadOptions, open_trace

GOOD = {"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}


def read(path: Path, options: ReadOptions | None = None) -> int:
    return sum(batch.num_rows for batch in open_trace(path, options))


def refused(path: Path, options: ReadOptions | None = None) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read(path, options)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return caught.value


def jsonl(tmp_path: Path, *changes: dict[str, object]) -> Path:
    """A good line, then one line per change."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({**GOOD, **change}) + "\n" for change in ({}, *changes)))
    return path


# ---------------------------------------------------------------- values

VALUES = [
    ("input_length", float("nan"), "input_length is nan, not a finite number"),
    ("input_length", float("inf"), "input_length is inf, not a finite number"),
    ("input_length", -5, "input_length is -5, at least 1 is needed"),
    ("input_length", 0, "input_length is 0, at least 1 is needed"),
    ("input_length", 2**31, "input_length is 2147483648, the limit is 2147483647"),
    ("input_length", 10**400, "input_length is inf"),
    ("input_length", 10.5, "input_length is 10.5, not a whole number"),
    ("input_length", "many", "input_length is 'many', not a number"),
    ("input_length", True, "input_length is True, not a number"),
    ("input_length", [1], "input_length is [1], not a number"),
    ("input_length", None, "input_length is missing"),
    ("output_length", -1, "output_length is -1, at least 0 is needed"),
    ("output_length", None, "output_length is missing"),
    ("output_length", 1e12, "output_length is 1000000000000, the limit is 2147483647"),
    ("timestamp", -1, "timestamp is -1, at least 0 is needed"),
    ("timestamp", float("nan"), "timestamp is nan"),
    ("timestamp", None, "timestamp is missing"),
    ("timestamp", "2024-01-01", "timestamp is '2024-01-01', not a number"),
    ("timestamp", 10**13, "timestamp is 10000000000000, more than 1000000000 s away from the first, 0"),
    ("max_tokens", 0, "max_tokens is 0, at least 1 is needed"),
    ("priority", 0.5, "priority is 0.5, not a whole number"),
    ("delay", -1, "delay is -0.001, at least 0 is needed"),
    ("hash_ids", 3, "hash_ids is 3, not a list"),
    ("hash_ids", [1.5], "hash_ids holds 1.5, not a whole 64-bit number"),
    ("hash_ids", [2**64], "hash_ids holds 18446744073709551616, not a whole 64-bit number"),
    ("hash_ids", ["a"], "hash_ids holds 'a', not a whole 64-bit number"),
]


@pytest.mark.parametrize(("field", "value", "said"), VALUES, ids=[f"{f}={str(v)[:12]}" for f, v, _ in VALUES])
def test_a_bad_value_names_line_field_and_value(tmp_path: Path, field: str, value: object, said: str) -> None:
    path = jsonl(tmp_path, {}, {field: value}, {})
    error = refused(path)
    assert error.rows == (3,)
    assert str(error).startswith(f"{path}:3: {said}")
    assert read(path, ReadOptions(on_bad_row="skip")) == 3


def test_a_prompt_longer_than_its_hash_ids_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"input_length": 513})
    error = refused(path)
    assert error.rows == (2,)
    assert "1 hash_ids of 512 tokens cover 512 tokens, and input_length is 513" in str(error)
    assert "--hash-block-tokens" in str(error)


def test_more_hash_ids_than_the_prompt_needs_are_fine(tmp_path: Path) -> None:
    assert read(jsonl(tmp_path, {"hash_ids": [1, 2, 3]})) == 2


def test_arrivals_that_go_back_are_refused_or_sorted(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"timestamp": 3000, "input_length": 3}, {"timestamp": 1000, "input_length": 2})
    error = refused(path)
    assert error.rows == (3,)
    assert "timestamp goes back from 3000 to 1000" in str(error)
    assert "--sort" in str(error)
    trace = open_trace(path, ReadOptions(sort=True))
    assert [row for batch in trace for row in batch.column("isl").to_pylist()] == [100, 2, 3]
    assert trace.remarks == {"rows moved by sorting": 2}
    assert read(path, ReadOptions(on_bad_row="skip")) == 2


def test_many_bad_rows_are_one_short_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *({"input_length": -i} for i in range(1, 101)))
    error = refused(path)
    assert len(error.rows) == 100
    assert "and 92 more" in str(error)
    assert len(str(error)) < 1000 + len(str(path))


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"17", "not a JSON object"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1, "lora": "\xff"}', "not UTF-8 text at byte 66"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"timestamp": ' + b"9" * 10_000 + b"}", "not usable JSON"),
    ],
    ids=["cut", "array", "number", "bytes", "deep", "digits"],
)
def test_a_line_that_cannot_be_taken_apart(tmp_path: Path, line: bytes, said: str) -> None:
    path = jsonl(tmp_path, {})
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(GOOD).encode())
    error = refused(path)
    assert error.rows == (3,)
    assert said in str(error)
    trace = open_trace(path, ReadOptions(on_bad_row="skip"))
    assert sum(batch.num_rows for batch in trace) == 3
    assert trace.skipped == {"unreadable": 1}


def test_two_halves_of_a_line_are_two_bad_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {})
    text = path.read_text()
    path.write_text(text + '{"timestamp": 0, "input_length": 5\n"output_length": 5}\n')
    assert refused(path).rows == (3, 4)


@pytest.mark.parametrize(
    ("text", "row", "said"),
    [
        ("arrival_s,isl,osl\n0,1,1\n0,1\n", 3, "the row has 2 fields, the header has 3"),
        ("arrival_s,isl,osl\n0,1,1\n0,1,1,9\n", 3, "the row has 4 fields, the header has 3"),
        ("arrival_s,isl,osl\n\n0,1,1\n\n0,x,1\n", 5, "isl is 'x', not a number"),
        ('arrival_s,isl,osl\n0,"1",1\n0,"1\n",1\n0,,1\n', 5, "isl is missing"),
        ("arrival_s,isl,osl\n0,1,1\n0,nan,1\n", 3, "isl is nan, not a finite number"),
        ("arrival_s,isl,osl\n0,1,1\ninf,1,1\n", 3, "arrival_s is inf, not a finite number"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n2024-02-31 00:00:00,1,1\n", 3, "no date of the calendar"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n17,1,1\n", 3, "timestamp is '17', not a date"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n9999-01-01 00:00:00,1,1\n", 3, "not a date"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n2023-01-01 00:00:00,1,1\n", 3,
         "timestamp goes back from 2024-01-01T00:00:00.000000000 to 2023-01-01T00:00:00.000000000"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n2123-01-01 00:00:00,1,1\n", 3, "timestamp is 2123-01-01"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n,1,1\n", 3, "timestamp is missing"),
        ("arrival_s,isl,osl\n0,1,1\n0,1,\n", 3, "osl is missing"),
        ("arrival_s,isl,osl,hash_ids\n0,1,1,7\n0,1,1,a b\n", 3, "hash_ids is 'a b', not a list of whole numbers"),
    ],
)  # fmt: skip
def test_a_bad_csv_row_names_its_line(tmp_path: Path, text: str, row: int, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    options = ReadOptions(hash_block_tokens=16) if "hash_ids" in text else ReadOptions()
    error = refused(path, options)
    assert error.rows == (row,)
    assert said in str(error)


def test_an_open_quote_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text('arrival_s,isl,osl\n0,"1,1\n0,1,1\n')
    assert "cannot be read as CSV: unexpected end of data" in str(refused(path))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("isl", pa.array([1, None, 1]), "isl is missing"),
        ("isl", pa.array([1.0, float("nan"), 1.0]), "isl is nan"),
        ("isl", pa.array([1, -3, 1]), "isl is -3"),
        ("isl", pa.array([1, 2**63 + 1, 1], pa.uint64()), "isl is 9.223372036854776e+18, the limit is 2147483647"),
        ("isl", pa.array(["1", "x", "1"]), "isl is 'x', not a number"),
        ("osl", pa.array([1, 2**40, 1]), "osl is 1099511627776, the limit is 2147483647"),
        ("arrival_s", pa.array([1.0, 0.5, 1.0]), "arrival_s goes back from 1 to 0.5"),
        ("arrival_s", pa.array([0.0, float("inf"), 1.0]), "arrival_s is inf"),
        ("arrival_s", pa.array([0.0, None, 1.0]), "arrival_s is missing"),
    ],
)
def test_a_bad_parquet_row_names_its_number(tmp_path: Path, name: str, values: pa.Array, said: str) -> None:
    path = tmp_path / "trace.parquet"
    columns = {"arrival_s": [0.0, 0.0, 1.0], "isl": [1, 1, 1], "osl": [1, 1, 1]}
    pq.write_table(pa.table({**columns, name: values}), path)
    error = refused(path)
    assert error.rows == (2,)
    assert f"{path}:2: {said}" in str(error)
    assert read(path, ReadOptions(on_bad_row="skip")) == 2


# ---------------------------------------------------------------- files


def write_cut_gzip(path: Path) -> None:
    lines = "".join(json.dumps({**GOOD, "timestamp": i, "lora": str(i**7)}) + "\n" for i in range(20_000))
    path.write_bytes(gzip.compress(lines.encode())[:-5000])


def write_damaged_gzip(path: Path) -> None:
    lines = "".join(json.dumps({**GOOD, "timestamp": i, "lora": str(i**7)}) + "\n" for i in range(20_000))
    packed = bytearray(gzip.compress(lines.encode()))
    middle = len(packed) // 2
    packed[middle : middle + 100] = b"\xff" * 100
    path.write_bytes(packed)


def write_cut_parquet(path: Path) -> None:
    pq.write_table(pa.table({"arrival_s": np.arange(1e4), "isl": np.arange(10_000), "osl": np.arange(10_000)}), path)
    path.write_bytes(path.read_bytes()[:-20])


def write_damaged_parquet(path: Path) -> None:
    columns = {"arrival_s": np.arange(1e4), "isl": np.arange(1, 10_001), "osl": np.arange(1, 10_001)}
    pq.write_table(pa.table(columns), path, use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[4:400] = bytes(396)
    path.write_bytes(damaged)


def write_parquet_with_a_flipped_bit(path: Path) -> None:
    columns = {"arrival_s": np.arange(1e4), "isl": np.arange(1, 10_001), "osl": np.arange(1, 10_001)}
    pq.write_table(pa.table(columns), path, use_dictionary=False, compression="none", write_page_checksum=True)
    damaged = bytearray(path.read_bytes())
    damaged[2000] ^= 1
    path.write_bytes(damaged)


def write_empty_parquet(path: Path) -> None:
    pq.write_table(pa.table({"arrival_s": pa.array([], pa.float64()), "isl": pa.array([], pa.int32())}), path)


FILES: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("empty.csv", b"", "the file is empty"),
    ("blank.jsonl", b"\n \n", "the file is empty"),
    ("header.csv", b"arrival_s,isl,osl\n", "a header but no row"),
    ("empty.parquet", write_empty_parquet, "the parquet file has no rows"),
    ("noise.csv", bytes(range(256)) * 50, "neither parquet nor UTF-8 text"),
    ("prose.txt", b"It was a dark and stormy night.\nThe rain fell.\n", "the format is not known"),
    ("array.json", b'[{"timestamp": 0}]\n', "a JSON array; write one object per line"),
    ("broken.jsonl", b"{timestamp: 0}\n", "none of the first lines is a JSON object"),
    ("other.jsonl", b'{"prompt": "hi"}\n', "the format is not known: JSON lines with prompt"),
    ("other.csv", b"a,b\n1,2\n", "the format is not known: CSV with a, b"),
    ("twice.csv", b"arrival_s,isl,osl,isl\n0,1,1,1\n", "names 'isl' twice"),
    ("two.csv", b"arrival_s,prompt_tokens,input_length,osl\n0,1,1,1\n", "both prompt_tokens and input_length could be"),
    ("lengths.csv", b"isl,osl\n1,1\n", "no column for the arrival time"),
    ("no_osl.csv", b"arrival_s,isl\n0,1\n", "no column for the output length"),
    ("unit.csv", b"timestamp,isl,osl\n0,1,1\n", "numbers of no known unit; give it with --time-unit"),
    ("ids.csv", b"arrival_s,isl,osl,hash_ids\n0,1,1,[1]\n", "give --hash-block-tokens"),
    ("utf16.csv", "arrival_s,isl,osl\n0,1,1\n".encode("utf-16"), "UTF-16 text"),
    ("packed.zip", b"PK\x03\x04....", "a zip archive"),
    ("packed.zst", b"\x28\xb5\x2f\xfd....", "compressed with zstd"),
    ("cut.jsonl.gz", write_cut_gzip, "the gzip data end too early"),
    ("damaged.jsonl.gz", write_damaged_gzip, "the gzip data are damaged"),
    ("cut.parquet", write_cut_parquet, "cannot be read as parquet"),
    ("damaged.parquet", write_damaged_parquet, "cannot be read"),
    ("flipped.parquet", write_parquet_with_a_flipped_bit, "could not verify page integrity"),
    ("tail.csv", b"arrival_s,isl,osl\n" + b"0,1,1\n" * 100_000 + b"0,\xff,1\n", "the text is not UTF-8"),
    ("deltas.jsonl", b'{"session_id": "s", "input_length": 5, "output_length": 5, "timestamp": 0, "group_id": 1}\n',
     "only what is new"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, content: bytes | Callable[[Path], None], said: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    assert said in str(refused(path))


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "no such file" in str(refused(tmp_path / "nothing.csv"))
    assert "a folder" in str(refused(tmp_path))
    assert "cannot be read" in str(refused(tmp_path / ("long" * 100)))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in str(refused(pipe))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    path.chmod(0)
    assert "Permission denied" in str(refused(path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_file_that_fails_while_it_is_read() -> None:
    assert "cannot be read" in str(refused(Path("/proc/self/mem")))


def test_a_trace_of_which_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,isl,osl\n0,5,0\n0,-5,1\n")
    said = str(refused(path, ReadOptions(on_bad_row="skip")))
    assert "every row was left out (1 isl below 1, 1 no output tokens)" in said


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ReadOptions(format="moon_cake"), "there is no trace format 'moon_cake'; did you mean mooncake?"),
        (ReadOptions(format="azure"), "azure traces are CSV or parquet, this file is JSON lines"),
        (ReadOptions(format="journal", time_unit="s"), "--time-unit has no effect on a journal"),
        (ReadOptions(on_bad_row="ignore"), "on_bad_row is 'ignore'; it is one of error, skip"),
        (ReadOptions(time_unit="h"), "time_unit is 'h'; it is one of s, ms, us, ns"),
        (ReadOptions(hash_block_tokens=0), "hash_block_tokens is 0; at least 1 is needed"),
        (ReadOptions(default_osl=-1), "default_osl is -1; at least 1 is needed"),
    ],
)
def test_an_option_that_makes_no_sense(tmp_path: Path, options: ReadOptions, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(jsonl(tmp_path), options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "timestamp,isl,osl\n2024-01-01 00:00:00,1,1\n",
            ReadOptions(time_unit="s"),
            "has no effect: timestamp holds dates",
        ),
        ("arrival_s,isl,osl\n0,1,1\n", ReadOptions(time_unit="ms"), "contradicts the column name arrival_s"),
        ("arrival_s,isl,osl\n0,1,1\n", ReadOptions(hash_block_tokens=64), "--hash-block-tokens 64 has no effect"),
        (
            "arrival_s,isl,osl\n0,1,1\n",
            ReadOptions(format="mooncake"),
            "mooncake traces are JSON lines, this file is CSV",
        ),
        ("arrival_s,isl,osl\n0,1,1\n", ReadOptions(format="burstgpt"), "no column for the arrival time"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, text: str, options: ReadOptions, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert said in str(refused(path, options))
