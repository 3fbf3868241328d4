"""Writes traces as canonical parquet: a drawn table, or any trace file, streamed.

The file appears under its name only when it is whole. Nothing that changes from day to day is written, so the same rows
give the same bytes with the same pyarrow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from traces.errors import TraceError
from traces.load import ReadOptions, TraceInfo, open_trace

ROW_GROUP_ROWS = 65536
_COMPRESSION_LEVEL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import read and wrote. `skipped` and `remarks` as in `Trace`."""

    info: TraceInfo
    rows: int
    skipped: dict[str, int]
    remarks: dict[str, int]


def import_trace(src: Path, dst: Path, options: ReadOptions | None = None) -> Imported:
    """Read `src` in whatever format and write it to `dst`. Raises TraceError; `dst` is then as it was before."""
    src, dst = Path(src), Path(dst)
    trace = open_trace(src, options)
    if dst.exists() and dst.samefile(src):
        raise TraceError(f"{dst}: is the trace that is read, and would be replaced; choose another name to write to")
    schema = trace.schema
    if trace.info.source is None:
        schema = schema.with_metadata({**schema.metadata, b"source": src.name.encode()})
    rows = write_batches(trace, schema, dst)
    return Imported(info=trace.info, rows=rows, skipped=dict(trace.skipped), remarks=dict(trace.remarks))


def write_table(table: pa.Table, dst: Path) -> int:
    """Write a canonical table, such as one from `traces.synth`. Returns the number of rows."""
    return write_batches(table.to_batches(), table.schema, dst)


def write_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, dst: Path) -> int:
    """Write canonical batches with the metadata of `schema`, a row group at a time. Returns the number of rows."""
    import pyarrow.parquet as pq

    written = 0
    settings = {"compression": "zstd", "compression_level": _COMPRESSION_LEVEL, "write_page_checksum": True}
    with _whole_file(Path(dst)) as path, pq.ParquetWriter(path, schema, **settings) as writer:
        for table in _row_groups(batches, schema):
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
            written += table.num_rows
    return written


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of whole row groups, and a last one of what remains."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
        rows += batch.num_rows
        if rows >= ROW_GROUP_ROWS:
            table = pa.Table.from_batches(held, schema)
            whole = rows - rows % ROW_GROUP_ROWS
            yield table.slice(0, whole)
            held, rows = table.slice(whole).to_batches(), rows - whole
    if rows:
        yield pa.Table.from_batches(held, schema)


@contextmanager
def _whole_file(dst: Path) -> Iterator[Path]:
    """A temporary file beside `dst` that takes its name at the end, or goes away if anything fails.

    A symbolic link stays, and what it names is written; devices, pipes and folders are refused.
    """
    asked, dst = dst, dst.resolve() if dst.is_symlink() else dst
    try:
        if dst.exists() and not dst.is_file():
            raise TraceError(f"{asked}: cannot be written: it is a {_kind(dst)}, not a file; choose another place")
        handle, name = tempfile.mkstemp(dir=dst.parent, prefix=f".{dst.name}.", suffix=".part")
        os.close(handle)
    except OSError as error:
        raise TraceError(f"{dst}: cannot be written: {error.strerror}; choose another place") from None
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        os.replace(part, dst)
    except OSError as error:
        raise TraceError(f"{dst}: cannot be written: {error.strerror or error}; choose another place") from None
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def _kind(path: Path) -> str:
    return "folder" if path.is_dir() else "pipe" if path.is_fifo() else "device"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
