"""Laws of reading traces, on random files: every format gives back the rows that were written, skipping leaves exactly
the good rows, and no file whatever raises anything but a TraceError."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.load import ReadOptions, Trace, open_trace

Row = tuple[int, int, int, list[int]]

BLOCK = 16
TOKENS = st.integers(1, 200)
IDS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def requests(draw: st.DrawFn) -> list[Row]:
    """Rows (arrival in ms, isl, osl, hash ids) in order of arrival, the first at 0; ids cover the prompt or are []."""
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 250, 10**6]), min_size=1, max_size=30))
    rows = []
    at_ms = 0
    for i, gap in enumerate(gaps):
        at_ms += gap if i else 0
        isl = draw(TOKENS)
        count = -(-isl // BLOCK)
        ids = draw(st.one_of(st.just([]), st.lists(IDS, min_size=count, max_size=count + 1)))
        rows.append((at_ms, isl, draw(TOKENS), ids))
    return rows


def read(trace: Trace, batch_rows: int) -> list[Row]:
    found = [row for batch in trace.batches(batch_rows) for row in batch.to_pylist()]
    return [(round(row["arrival_s"] * 1000), row["isl"], row["osl"], row.get("hash_ids") or []) for row in found]


def object_of(row: Row) -> dict[str, object]:
    return {"timestamp": row[0], "input_length": row[1], "output_length": row[2], "hash_ids": row[3]}


def write(folder: Path, rows: list[Row]) -> list[Path]:
    lines = "".join(json.dumps(object_of(row)) + "\n" for row in rows)
    (folder / "t.jsonl").write_text(lines)
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_ms", "prompt_tokens", "output_tokens", "hash_ids"))
        writer.writerows(rows)
    columns = dict(zip(("arrival_ms", "isl", "osl", "hash_ids"), map(list, zip(*rows, strict=True)), strict=True))
    ids = pa.array(columns.pop("hash_ids"), pa.list_(pa.int64()))
    pq.write_table(pa.table({**columns, "hash_ids": ids}), folder / "t.parquet", row_group_size=7)
    return [folder / name for name in ("t.jsonl", "t.jsonl.gz", "t.csv", "t.parquet")]


@given(requests(), st.integers(1, 40))
def test_every_format_gives_back_the_rows_that_were_written(rows: list[Row], batch_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), rows):
            assert read(open_trace(path, ReadOptions(hash_block_tokens=BLOCK)), batch_rows) == rows


BAD_LINES = st.sampled_from(
    ["{", "[]", "null", '{"timestamp": 0}', '{"timestamp": -1, "input_length": 1, "output_length": 1}',
     '{"timestamp": NaN, "input_length": 1, "output_length": 1}', '{"input_length": 1, "output_length": 1}']
)  # fmt: skip


@given(requests(), st.lists(st.tuples(st.integers(0, 100), BAD_LINES), max_size=8), st.integers(1, 40))
def test_skipping_leaves_the_good_rows_and_counts_the_others(
    rows: list[Row], bad: list[tuple[int, str]], batch_rows: int
) -> None:
    lines = [json.dumps(object_of(row)) for row in rows]
    for at, line in bad:
        lines.insert(1 + at % len(lines), line)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("\n".join(lines))
        trace = open_trace(path, ReadOptions(hash_block_tokens=BLOCK, on_bad_row="skip"))
        assert read(trace, batch_rows) == rows
        assert sum(trace.skipped.values()) == len(bad)
        strict = open_trace(path, ReadOptions(hash_block_tokens=BLOCK))
        if not bad:
            assert read(strict, 1000) == rows
            return
        with pytest.raises(TraceError) as caught:
            read(strict, 1000)
        broken = {line for _, line in bad}
        assert list(caught.value.rows) == [i for i, line in enumerate(lines, start=1) if line in broken]


@given(requests(), st.randoms(use_true_random=False))
def test_sorting_undoes_any_shuffle(rows: list[Row], draws: object) -> None:
    shuffled = list(rows)
    draws.shuffle(shuffled)  # type: ignore[attr-defined]
    expected = sorted(shuffled, key=lambda row: row[0])
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), shuffled):
            found = read(open_trace(path, ReadOptions(hash_block_tokens=BLOCK, sort=True)), 7)
            assert [row[1:] for row in found] == [row[1:] for row in expected]
            assert [row[0] for row in found] == [row[0] - expected[0][0] for row in expected]


HEADS = st.sampled_from(
    [
        b"",
        b"PAR1",
        b"\x1f\x8b\x08\x00",
        b'{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
        b"arrival_s,isl,osl\n0,1,1\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
        b'{"schema": "dynamo.request.trace.v1", "event_type": "request_end"}\n',
        b'{"schema": "dynatwin.journal/1"}\n',
        b"arrival_s,isl,osl,hash_ids,session_id,delay_s,priority\n",
    ]
)
TAILS = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(alphabet='0123456789,.-{}[]":eE \n\r\tnaif', max_size=300).map(str.encode),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                     st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay",
                                      "event", "request", "replay", "branches", "type", "blocks"]), inner, max_size=5),
                 max_leaves=15).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip


@given(HEADS, TAILS, st.sampled_from(["error", "skip"]), st.booleans(), st.sampled_from([None, 16]))
def test_no_file_raises_anything_but_a_trace_error(
    head: bytes, tail: bytes, on_bad_row: str, sort: bool, block: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(head + tail)
        options = ReadOptions(on_bad_row=on_bad_row, sort=sort, hash_block_tokens=block)
        said = None
        try:
            for batch in open_trace(path, options):
                assert min(batch.column("isl").to_pylist()) >= 1
        except TraceError as error:
            said = str(error)
        assert said is None or (str(path) in said and "\n" not in said)


NUMBER = st.one_of(st.integers(0, 20), st.integers(0, 20), st.none(), st.just(-1))
TURN = st.fixed_dictionaries(
    {"input_length": st.integers(1, 20), "output_length": st.integers(0, 2)},
    optional={"timestamp": NUMBER, "session_id": st.sampled_from(["a", "b"]), "delay": NUMBER},
)


@given(st.lists(TURN, min_size=1, max_size=15), st.booleans(), st.integers(1, 4))
def test_turns_keep_their_laws_whatever_the_batch_size(turns: list[dict[str, object]], sort: bool, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        trace = open_trace(path, ReadOptions(on_bad_row="skip", sort=sort))
        try:
            rows = [row for batch in trace.batches(1000) for row in batch.to_pylist()]
        except TraceError:
            return
        skipped, remarks = dict(trace.skipped), dict(trace.remarks)
        assert [row for batch in trace.batches(size) for row in batch.to_pylist()] == rows
        assert (trace.skipped, trace.remarks) == (skipped, remarks)
        assert len(rows) + sum(skipped.values()) == len(turns)
    assert rows[0]["arrival_s"] == 0
    seen: set[str] = set()
    latest_s = 0.0
    for row in rows:
        if row["arrival_s"] is None:
            assert row["session_id"] in seen
            assert row["delay_s"] >= 0
        else:
            assert row["delay_s"] is None
            assert row["arrival_s"] >= latest_s
            latest_s = row["arrival_s"]
        seen.add(row["session_id"])
