"""What each format's reader makes of a well-formed file: values, units, block sizes, sessions, and what it says."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.errors import TraceError
from traces.load import ReadOptions, Trace, open_trace
from traces.readers import GROUP

ROW = {"timestamp": 0, "input_length": 10, "output_length": 1}


def rows(trace: Trace) -> list[dict[str, object]]:
    return [row for batch in trace for row in batch.to_pylist()]


def column(trace: Trace, name: str) -> list[object]:
    return [row[name] for row in rows(trace)]


def lines(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def table(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    return path


# ---------------------------------------------------------------- mooncake


def test_mooncake_is_in_milliseconds_with_512_tokens_per_id(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {**ROW, "timestamp": 27482, "hash_ids": [4, 5]}, {**ROW, "timestamp": 30535})
    trace = open_trace(path)
    assert column(trace, "arrival_s") == [0.0, 3.053]
    assert column(trace, "hash_ids") == [[4, 5], None]
    assert trace.info.hash_block_tokens == 512
    assert trace.info.notes == ("timestamp in ms (the format's own); 512 tokens per hash id (the format's own)",)


def test_mooncake_with_another_block_size_says_so(tmp_path: Path) -> None:
    trace = open_trace(lines(tmp_path / "t.jsonl", ROW), ReadOptions(hash_block_tokens=16))
    assert trace.info.hash_block_tokens == 16
    assert "16 tokens per hash id (as asked)" in trace.info.notes[0]


def test_later_turns_have_a_delay_and_no_arrival(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {**ROW, "session_id": "a"},
        {"session_id": "a", "delay": 1500, "input_length": 20, "output_length": 2},
        {**ROW, "timestamp": 100, "session_id": 7},
        {"session_id": 7, "delay_ms": 2, "input_length": 30, "output_length": 3},
        {"session_id": "a", "delay": 0.5, "input_length": 40, "output_length": 4},
    )
    trace = open_trace(path)
    found = rows(trace)
    assert [row["arrival_s"] for row in found] == [0.0, None, 0.1, None, None]
    assert [row["delay_s"] for row in found] == [None, 1.5, None, 0.002, 0.0005]
    assert [row["session_id"] for row in found] == ["a", "a", "7", "7", "a"]


def test_a_delay_counts_in_the_unit_of_the_file_and_delay_ms_in_ms(tmp_path: Path) -> None:
    turns = [
        {**ROW, "session_id": "a"},
        {**ROW, "session_id": "a", "delay": 2},
        {**ROW, "session_id": "a", "delay_ms": 2},
    ]
    trace = open_trace(lines(tmp_path / "t.jsonl", *turns), ReadOptions(time_unit="s"))
    assert column(trace, "delay_s") == [None, 2.0, 0.002]


def test_a_delay_replaces_the_recorded_time_of_a_later_turn(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {**ROW, "session_id": "a", "delay": 9},
        {**ROW, "timestamp": 5000, "session_id": "a", "delay": 10},
        {**ROW, "timestamp": 3000, "session_id": "a"},
    )
    trace = open_trace(path)
    assert [(row["arrival_s"], row["delay_s"]) for row in rows(trace)] == [(0.0, None), (None, 0.01), (3.0, None)]
    assert trace.remarks == {
        "recorded arrivals of later turns give way to their delays": 1,
        "delays of first turns have nothing to follow": 1,
    }


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"session_id": "b", "delay": 5}, "timestamp is missing"),
        ({"delay": 5}, "timestamp is missing"),
        ({"session_id": "a"}, "timestamp and delay are missing, a later turn needs one of them"),
        ({"session_id": "a", "delay": 5, "delay_ms": 5}, "both delay and delay_ms are given"),
    ],
)
def test_a_turn_that_follows_nothing_is_an_error(tmp_path: Path, turn: dict[str, object], said: str) -> None:
    path = lines(tmp_path / "t.jsonl", {**ROW, "session_id": "a"}, {"input_length": 1, "output_length": 1, **turn})
    with pytest.raises(TraceError, match=r"t\.jsonl:2") as caught:
        rows(open_trace(path))
    assert said in str(caught.value)


def test_turns_of_a_skipped_first_turn_are_skipped_with_it(tmp_path: Path) -> None:
    turn = {"session_id": "a", "delay": 5, "input_length": 1, "output_length": 1}
    first = {**ROW, "session_id": "a", "timestamp": 10}
    path = lines(tmp_path / "t.jsonl", {**ROW, "timestamp": 20}, first, turn, {**ROW, "timestamp": 30})
    trace = open_trace(path, ReadOptions(on_bad_row="skip"))
    assert column(trace, "arrival_s") == [0.0, 0.01]
    assert trace.skipped == {"arrival_s goes back": 1, "arrival_s missing": 1}


def test_optional_fields_may_come_late(tmp_path: Path) -> None:
    late = {**ROW, "request_id": "r", "max_tokens": 9, "priority": -2, "lora": "x", "session_id": "s"}
    trace = open_trace(lines(tmp_path / "t.jsonl", *[ROW] * 2000, late))
    batches = list(trace.batches(1000))
    assert [batch.num_rows for batch in batches] == [1000, 1000, 1]
    assert {batch.schema for batch in batches} == {trace.schema}
    found = batches[-1].to_pylist()[0]
    assert [found[name] for name in ("request_id", "max_tokens", "priority", "lora", "session_id")] == [
        "r",
        9,
        -2,
        "x",
        "s",
    ]


def test_sorting_keeps_turns_behind_the_turn_before(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {**ROW, "timestamp": 9000, "session_id": "a", "input_length": 1},
        {**ROW, "timestamp": 1000, "session_id": "b", "input_length": 2},
        {"delay": 5, "session_id": "a", "input_length": 3, "output_length": 1},
        {"delay": 5, "session_id": "b", "input_length": 4, "output_length": 1},
    )
    found = rows(open_trace(path, ReadOptions(sort=True)))
    assert [row["isl"] for row in found] == [2, 4, 1, 3]
    assert [row["arrival_s"] for row in found] == [0.0, None, 8.0, None]


@pytest.mark.shared
def test_the_recorded_trace_and_its_parquet_form_agree(shared: Path) -> None:
    folder = shared / "traces" / "mooncake"
    from_lines = open_trace(folder / "conversation_trace.0-45min.jsonl")
    from_parquet = open_trace(folder / "mooncake_conversation.0-45min.parquet")
    assert from_parquet.info.hash_block_tokens == 512
    names = ["arrival_s", "isl", "osl", "hash_ids"]
    one, other = (pa.Table.from_batches(trace.batches()).select(names) for trace in (from_lines, from_parquet))
    assert one.num_rows == 8940
    assert one.equals(other)
    assert sum(map(len, one["hash_ids"].to_pylist())) == 217_677


# ---------------------------------------------------------------- dynamo


def dynamo(
    end_ms: int, received_ms: int, name: str, isl: int, hashes: list[int], **request: object
) -> dict[str, object]:
    replay = {"trace_block_size": 64, "input_length": isl, "input_sequence_hashes": hashes}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": end_ms,
        "request": {
            "request_id": name, "request_received_ms": received_ms, "output_tokens": 5, "replay": replay, **request,
        },
    }  # fmt: skip


T0 = 1_700_000_000_000


def test_dynamo_lines_are_sorted_by_arrival_and_hashes_keep_their_bits(tmp_path: Path) -> None:
    top = 2**64 - 1
    late = {**dynamo(T0 + 900, T0 + 250, "b", 64, [top]), "agent_context": {"session_id": "chat"}}
    early = dynamo(T0 + 950, T0, "a", 130, [top, 2**63, 2**63 - 1], input_tokens=130)
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": T0}
    trace = open_trace(lines(tmp_path / "t.jsonl", tool, late, tool, early))
    found = rows(trace)
    assert [(row["request_id"], row["arrival_s"], row["isl"], row["osl"]) for row in found] == [
        ("a", 0.0, 130, 5), ("b", 0.25, 64, 5),
    ]  # fmt: skip
    assert found[0]["hash_ids"] == [-1, -(2**63), 2**63 - 1]
    assert found[1]["hash_ids"] == [-1]
    assert found[1]["session_id"] == "chat"
    assert trace.info.hash_block_tokens == 64
    assert trace.skipped == {"event tool_end": 2}


def test_dynamo_segments_come_in_gzip_and_may_be_joined(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    segments = [dynamo(T0 + i, T0 + i, str(i), 64, [i]) for i in range(3)]
    path.write_bytes(b"".join(gzip.compress((json.dumps(item) + "\n").encode()) for item in segments))
    assert column(open_trace(path), "request_id") == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replay": None}, "request.replay is missing"),
        ({"request_received_ms": None}, "request.request_received_ms is missing"),
        ({"output_tokens": None}, "request.output_tokens is missing"),
        ({"replay": {"trace_block_size": 16, "input_length": 5, "input_sequence_hashes": [1]}},
         "trace_block_size is 16, and 64 in the rows before"),
        ({"replay": {"trace_block_size": 64, "input_length": 65, "input_sequence_hashes": [1]}},
         "1 request.replay.input_sequence_hashes of 64 tokens cover 64 tokens, and request.replay.input_length is 65"),
    ],
)  # fmt: skip
def test_a_dynamo_request_that_lacks_something_is_a_bad_row(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = lines(tmp_path / "t.jsonl", dynamo(T0, T0, "a", 64, [1]), dynamo(T0, T0, "b", 64, [1], **change))
    with pytest.raises(TraceError) as caught:
        rows(open_trace(path))
    assert caught.value.rows == (2,)
    assert said in str(caught.value)
    assert column(open_trace(path, ReadOptions(on_bad_row="skip")), "request_id") == ["a"]


@pytest.mark.parametrize(
    ("item", "options", "said"),
    [
        ({**dynamo(T0, T0, "a", 64, [1]), "schema": "dynamo.request.trace.v2"}, ReadOptions(), "v2' is not known"),
        (dynamo(T0, T0, "a", 64, [1]), ReadOptions(time_unit="s"), "--time-unit s contradicts the schema"),
        (dynamo(T0, T0, "a", 64, [1]), ReadOptions(hash_block_tokens=16), "where trace_block_size is 64"),
        (dynamo(T0, T0, "a", 64, [1], replay=None), ReadOptions(), "turn on replay hashes when recording"),
    ],
)  # fmt: skip
def test_a_dynamo_trace_of_another_kind(tmp_path: Path, item: object, options: ReadOptions, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(lines(tmp_path / "t.jsonl", item), options)
    assert said in str(caught.value)


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "names",
    [
        ("arrival_s", "isl", "osl"),
        ("arrival_s", "prompt_tokens", "output_tokens"),
        ("arrival_s", "prompt_tokens", "completion_tokens"),
        ("arrival_s", "input_length", "output_length"),
        ("arrival_s", "ContextTokens", "GeneratedTokens"),
        ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        (" Arrival_S ", "ISL", "OSL"),
    ],
)
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_aliases_and_separators(tmp_path: Path, names: tuple[str, ...], mark: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([mark.join(names), mark.join(["1.5", "100.0", "10"]), mark.join(["2", "200", "20"])]))
    assert rows(open_trace(path)) == [
        {"arrival_s": 0.0, "isl": 100, "osl": 10},
        {"arrival_s": 0.5, "isl": 200, "osl": 20},
    ]


def test_the_canonical_name_wins_over_an_alias_and_the_rest_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", arrival_s=[0.0], isl=[1], osl=[2], output_tokens=[3], ttft_s=[0.5])
    trace = open_trace(path)
    assert rows(trace) == [{"arrival_s": 0.0, "isl": 1, "osl": 2}]
    assert "columns not used: output_tokens, ttft_s" in trace.info.notes


@pytest.mark.parametrize(("unit", "per_s"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_the_unit_of_a_bare_timestamp(tmp_path: Path, unit: str, per_s: int) -> None:
    start = 1_700_000_000 * per_s
    path = tmp_path / "t.csv"
    path.write_text(f"timestamp,isl,osl\n{start},1,1\n{start + per_s // 4 if per_s > 1 else start + 1},1,1\n")
    trace = open_trace(path, ReadOptions(time_unit=unit))
    assert column(trace, "arrival_s") == [0.0, 0.25 if per_s > 1 else 1.0]
    assert trace.info.time_unit == unit


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns", "UTC")]
)
def test_timestamps_of_parquet_in_every_unit(tmp_path: Path, kind: pa.DataType) -> None:
    start = datetime(2024, 2, 3, 10, tzinfo=UTC)
    moments = pa.array([start, start + timedelta(seconds=61)]).cast(kind)
    path = table(tmp_path / "t.parquet", TIMESTAMP=moments, ContextTokens=[1, 1], GeneratedTokens=[1, 1])
    trace = open_trace(path)
    assert column(trace, "arrival_s") == [0.0, 61.0]
    assert (trace.info.format, trace.info.time_unit) == ("azure", "date")


def test_dates_of_mixed_form(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    moments = [
        "2024-05-10 00:00:00", "2024-05-10 00:00:00.009930+00:00", "2024-05-10T00:00:01Z", "2024-05-10 02:00:02,5+0200",
        "2024-05-09 20:30:03.123456789123-03:30",
    ]  # fmt: skip
    path.write_text("TIMESTAMP;ContextTokens;GeneratedTokens\n" + "".join(f"{each};1;1\n" for each in moments))
    assert column(open_trace(path), "arrival_s") == pytest.approx([0.0, 0.00993, 1.0, 2.5, 3.123456789], abs=1e-12)


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([[1, 2], None, []], pa.list_(pa.int32())),
        pa.array([[1, 2], None, []], pa.large_list(pa.int64())),
        pa.array([[1, 2], None, []], pa.list_(pa.uint64())),
        pa.array([[1, 2], None, []], pa.list_(pa.uint32())),
        pa.array(["[1, 2]", None, ""]),
        pa.array(["1 2", None, "[]"]),
        pa.array([[9], [1, 2], None, []], pa.list_(pa.int64())).slice(1),
    ],
)
def test_hash_ids_of_every_type(tmp_path: Path, ids: pa.Array) -> None:
    path = table(tmp_path / "t.parquet", arrival_s=[0.0, 0.0, 0.0], isl=[20, 9, 9], osl=[1, 1, 1], hash_ids=ids)
    assert column(open_trace(path, ReadOptions(hash_block_tokens=16)), "hash_ids") == [[1, 2], None, None]


def test_unsigned_hash_ids_keep_their_bits(tmp_path: Path) -> None:
    ids = pa.array([[2**64 - 2]], pa.list_(pa.uint64()))
    path = table(tmp_path / "t.parquet", arrival_s=[0.0], isl=[9], osl=[1], hash_ids=ids)
    assert column(open_trace(path, ReadOptions(hash_block_tokens=16)), "hash_ids") == [[-2]]


def test_every_optional_column_of_a_table(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.parquet",
        arrival_s=[5.0, None],
        isl=pa.array([1, 2], pa.uint8()),
        osl=pa.array([1.0, 2.0], pa.float32()),
        request_id=[17, 18],
        session_id=pa.array(["s", "s"]).dictionary_encode(),
        delay_ms=[None, 250],
        max_tokens=[None, 5],
        priority=[1, None],
        lora=pa.array([None, "l"], pa.large_string()),
        tenant=["t", None],
    )
    assert rows(open_trace(path)) == [
        {"arrival_s": 0.0, "isl": 1, "osl": 1, "request_id": "17", "session_id": "s", "delay_s": None,
         "max_tokens": None, "priority": 1, "lora": None, "tenant": "t"},
        {"arrival_s": None, "isl": 2, "osl": 2, "request_id": "18", "session_id": "s", "delay_s": 0.25,
         "max_tokens": 5, "priority": None, "lora": "l", "tenant": None},
    ]  # fmt: skip


def test_a_column_of_nulls_counts_as_absent(tmp_path: Path) -> None:
    nothing = pa.nulls(1, pa.list_(pa.int64()))
    path = table(
        tmp_path / "t.parquet", arrival_s=[0.0], isl=[1], osl=[1], hash_ids=nothing, session_id=pa.nulls(1, pa.string())
    )
    assert open_trace(path).info.columns == ("arrival_s", "isl", "osl")


def test_metadata_of_a_canonical_file(tmp_path: Path) -> None:
    found = pa.table({"arrival_s": [0.0], "isl": [1], "osl": [1], "hash_ids": [[1]]})
    pairs = {
        "hash_block_tokens": "64",
        "synthetic": "true",
        "source": "a",
        "licence": "b",
        "generator": "g",
        "seed": "4",
    }
    path = tmp_path / "t.parquet"
    pq.write_table(found.replace_schema_metadata(pairs), path)
    info = open_trace(path).info
    assert (info.hash_block_tokens, info.synthetic, info.source, info.licence) == (64, True, "a", "b")
    assert (info.rows, info.generator, info.seed) == (1, "g", "4")
    assert info.notes[0] == "synthetic: drawn by g, seed 4"


def test_burstgpt_seconds_may_have_fractions(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("Timestamp,Session ID,Model,Request tokens,Response tokens\n5,x,m,1,2\n5.25,,m,3,4\n")
    trace = open_trace(path)
    assert column(trace, "arrival_s") == [0.0, 0.25]
    assert column(trace, "session_id") == ["x", None]


def test_a_compressed_csv_is_read_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfarrival_s,isl,osl\n0,1,2\n"))
    assert rows(open_trace(path)) == [{"arrival_s": 0.0, "isl": 1, "osl": 2}]


@pytest.mark.shared
def test_the_recorded_csv_and_its_parquet_form_agree(shared: Path) -> None:
    folder = shared / "traces" / "azure_2023"
    for service, count in (("conv", 15440), ("code", 7621)):
        from_csv = open_trace(folder / f"AzureLLMInferenceTrace_{service}.0-45min.csv")
        from_parquet = open_trace(folder / f"azure_{service}.0-45min.parquet")
        assert from_csv.info.format == "azure"
        assert column(from_csv, "arrival_s") == pytest.approx(column(from_parquet, "arrival_s"), abs=1e-6)
        assert column(from_csv, "isl") == column(from_parquet, "isl")
        assert len(column(from_csv, "osl")) == count


# ---------------------------------------------------------------- reading again, other readers


def test_every_reading_starts_anew(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", ROW, {**ROW, "input_length": -1}, ROW)
    trace = open_trace(path, ReadOptions(on_bad_row="skip"))
    assert trace.skipped == {}
    first, second = rows(trace), rows(trace)
    assert first == second
    assert trace.skipped == {"isl below 1": 1}
    assert trace.remarks == {"exact duplicates, kept": 1}


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 1000])
def test_the_batch_size_changes_nothing(tmp_path: Path, batch_rows: int) -> None:
    items = [{**ROW, "timestamp": i // 3, "input_length": 1 + i % 2, "hash_ids": [i % 2]} for i in range(20)]
    trace = open_trace(lines(tmp_path / "t.jsonl", *items))
    whole = rows(trace)
    remarks = dict(trace.remarks)
    assert [row for batch in trace.batches(batch_rows) for row in batch.to_pylist()] == whole
    assert trace.remarks == remarks == {"exact duplicates, kept": 6}


def test_a_reader_from_outside_is_found_by_name_and_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "outside"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import numpy as np\n"
        "from traces.check import Clock\n"
        "from traces.options import TraceInfo\n"
        "from traces.readers import RawTrace\n"
        "from traces.rows import Numbers, Rows\n"
        "class Reader:\n"
        "    name = 'outside'\n"
        "    def claims(self, source):\n"
        "        return source.columns == ('when', 'in', 'out')\n"
        "    def open(self, source, options):\n"
        "        def chunks(batch_rows):\n"
        "            cells = [line.split(',') for line in source.open().read().decode().split()[1:]]\n"
        "            columns = dict(zip(('arrival_s', 'isl', 'osl'), np.array(cells, np.int64).T))\n"
        "            numbers = {name: Numbers(values) for name, values in columns.items()}\n"
        "            yield Rows(count=len(cells), numbers=numbers, place=lambda i: i + 2)\n"
        "        names = ('arrival_s', 'isl', 'osl')\n"
        "        info = TraceInfo(path=source.path, format=self.name, time_unit='s', columns=names)\n"
        "        return RawTrace(info=info, clock=Clock(1.0), chunks=chunks, fields={'isl': 'in'})\n"
    )
    meta = tmp_path / "site" / "outside-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{GROUP}]\noutside = outside:Reader\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = tmp_path / "t.csv"
    path.write_text("when,in,out\n10,5,6\n12,7,8\n")
    for options in (ReadOptions(), ReadOptions(format="outside")):
        trace = open_trace(path, options)
        assert trace.info.format == "outside"
        assert rows(trace) == [{"arrival_s": 0.0, "isl": 5, "osl": 6}, {"arrival_s": 2.0, "isl": 7, "osl": 8}]
    path.write_text("when,in,out\n10,5,6\n12,0,8\n")
    with pytest.raises(TraceError, match=r"t\.csv:3: in is 0, at least 1 is needed"):
        rows(open_trace(path))
