"""Importing a trace as canonical parquet: nothing is lost or added, the file is whole or absent, memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.convert import ROW_GROUP_ROWS, import_trace, write_batches, write_table
from traces.errors import TraceError
from traces.load import ReadOptions, open_trace
from traces.schema import canonical_schema
from traces.synth import SynthOptions, synthesise

DATA = Path(__file__).resolve().parents[2] / "data"
SCHEMA = canonical_schema(("arrival_s", "isl", "osl"))


def numbered(rows: int, start: int = 0) -> pa.RecordBatch:
    at = np.arange(start, start + rows)
    return pa.RecordBatch.from_pydict(
        {"arrival_s": at.astype(float), "isl": at.astype(np.int32) + 1, "osl": at.astype(np.int32) + 1}, schema=SCHEMA
    )


@pytest.mark.shared
def test_what_is_imported_reads_back_the_same(shared: Path, tmp_path: Path) -> None:
    src, dst = shared / "parity" / "traces" / "sessions.jsonl", tmp_path / "out.parquet"
    done = import_trace(src, dst, ReadOptions(hash_block_tokens=64))
    again = open_trace(dst)
    names = list(again.info.columns)
    assert names == ["arrival_s", "isl", "osl", "session_id", "delay_s", "hash_ids"]
    before = pa.Table.from_batches(open_trace(src, ReadOptions(hash_block_tokens=64))).select(names)
    assert pa.Table.from_batches(again).equals(before)
    assert done.rows == before.num_rows == again.info.rows
    assert (again.info.format, again.info.hash_block_tokens) == ("columns", 64)
    assert (again.info.source, again.info.synthetic) == ("sessions.jsonl", False)


def test_counts_of_an_import(tmp_path: Path) -> None:
    done = import_trace(DATA / "messy" / "s4_burstgpt_zero_output_dupes.csv", tmp_path / "out.parquet")
    assert (done.rows, done.skipped, done.remarks) == (4, {"no output tokens": 3}, {"exact duplicates, kept": 1})
    assert done.info.format == "burstgpt"


def test_a_synthetic_trace_stays_synthetic(tmp_path: Path) -> None:
    drawn = synthesise("mooncake", SynthOptions(seed=5, rows=50))
    write_table(drawn, tmp_path / "one.parquet")
    import_trace(tmp_path / "one.parquet", tmp_path / "two.parquet")
    assert pq.read_table(tmp_path / "two.parquet").equals(drawn, check_metadata=True)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    drawn = synthesise("azure", SynthOptions(seed=5, rows=2000))
    write_table(drawn, tmp_path / "one.parquet")
    write_batches(drawn.to_batches(max_chunksize=17), drawn.schema, tmp_path / "two.parquet")
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_row_groups_are_full_whatever_the_batches(tmp_path: Path) -> None:
    sizes = [1, ROW_GROUP_ROWS - 2, 3, ROW_GROUP_ROWS, 5]
    starts = np.cumsum([0, *sizes])
    batches = (numbered(size, int(start)) for size, start in zip(sizes, starts, strict=False))
    path = tmp_path / "out.parquet"
    assert write_batches(batches, SCHEMA, path) == sum(sizes)
    meta = pq.ParquetFile(path).metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [ROW_GROUP_ROWS, ROW_GROUP_ROWS, 7]
    assert pq.read_table(path)["isl"].to_pylist() == list(range(1, sum(sizes) + 1))


# ---------------------------------------------------------------- whole or absent


def test_a_bad_row_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    src, dst = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [{"timestamp": i, "input_length": 1, "output_length": 1} for i in range(40_000)]
    rows[-1]["input_length"] = -1
    src.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dst.write_bytes(b"precious")
    with pytest.raises(TraceError, match=r"in\.jsonl:40000"):
        import_trace(src, dst)
    assert dst.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted() -> Iterator[pa.RecordBatch]:
        yield numbered(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_batches(interrupted(), SCHEMA, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for dst in (tmp_path / "absent" / "out.parquet", tmp_path / "file" / "out.parquet"):
        with pytest.raises(TraceError) as caught:
            write_batches([numbered(1)], SCHEMA, dst)
        assert str(caught.value).startswith(f"{dst}: cannot be written: ")
    with pytest.raises(TraceError, match="cannot be written"):
        write_batches([numbered(1)], SCHEMA, tmp_path)


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write_batches([numbered(1)], SCHEMA, tmp_path / "out.parquet")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "out.parquet").stat().st_mode == (tmp_path / "other").stat().st_mode


# ---------------------------------------------------------------- memory, start-up

READ_ALL = """
import resource, sys
from pathlib import Path
from traces.load import open_trace
from traces.transform import transform
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = True
rows = 0
for batch in transform(open_trace(Path(sys.argv[1])), speedup=2.0):
    rows += batch.num_rows
    if first:
        first, base = False, peak()
unit = 1 if sys.platform == 'darwin' else 1024
print(rows, (peak() - base) * unit)
"""


@pytest.mark.slow
@pytest.mark.parametrize("group_rows", [ROW_GROUP_ROWS, 2_000_000])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, root: Path, group_rows: int) -> None:
    path, total = tmp_path / "long.parquet", 2_000_000
    draws = np.random.default_rng(0)
    table = pa.table(
        {
            "arrival_s": np.cumsum(draws.exponential(0.1, total)),
            "isl": draws.integers(1, 4000, total),
            "osl": draws.integers(1, 400, total),
        }
    )
    pq.write_table(table, path, row_group_size=group_rows)
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, path], cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, grown_bytes = map(int, done.stdout.split())
    assert rows == total
    assert grown_bytes < 16 * 2**20, f"{grown_bytes / 2**20:.0f} MiB more than after the first batch"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "options"),
    [("azure.parquet", ""), ("parity/traces/sessions.jsonl", "hash_block_tokens=64")],
)
def test_reading_needs_neither_pandas_nor_pyarrow_compute(shared: Path, root: Path, name: str, options: str) -> None:
    path = root / "traces" / name if name == "azure.parquet" else shared / name
    code = (
        "import sys; from pathlib import Path; from traces.load import *; from traces.transform import transform\n"
        f"trace = open_trace(Path({str(path)!r}), ReadOptions({options}))\n"
        "print(sum(b.num_rows for b in transform(trace, limit=150)))\n"
        "print([m for m in ('pandas', 'pyarrow.compute', 'scipy', 'numpy.random') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["150", "[]"], done.stderr


def test_a_trace_is_not_written_over_itself(tmp_path: Path) -> None:
    src, link = tmp_path / "a.csv", tmp_path / "link.csv"
    src.write_text("arrival_s,isl,osl\n0,1,1\n", encoding="utf-8")
    link.symlink_to(src)
    for dst in (src, link):
        with pytest.raises(TraceError, match="is the trace that is read"):
            import_trace(src, dst)
    assert src.read_text(encoding="utf-8") == "arrival_s,isl,osl\n0,1,1\n"


@pytest.mark.parametrize(("target", "kind"), [("/dev/null", "device"), ("pipe", "pipe"), ("folder", "folder")])
@pytest.mark.parametrize("linked", [False, True])
def test_only_a_file_is_written(tmp_path: Path, target: str, kind: str, linked: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(TraceError, match=f"it is a {kind}, not a file"):
        write_batches([numbered(1)], SCHEMA, link if linked else tmp_path / target)
    assert link.is_symlink()


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for rows in (1, 2):
        write_batches([numbered(rows)], SCHEMA, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert pq.read_table(tmp_path / "real").num_rows == rows
