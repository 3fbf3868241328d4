"""A trace file before anybody knows its format: is it there, what kind is it, what stands at its beginning.

Reads bytes, unpacks gzip, and turns every way in which a file can be unusable into one TraceError. It knows no format.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

from traces.errors import TraceError

_HEAD_BYTES = 256 * 1024
_HEAD_LINES = 64
_STRAY_SHARE = 0.05
"""Up to this share of bytes that are not UTF-8 a file counts as text with damaged lines."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_OTHER_KINDS: Mapping[bytes, str] = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
    b"BZh": "compressed with bzip2; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it",
    b"ARROW1": "an Arrow file; write it as parquet",
    b"\xff\xfe": "UTF-16 text; write it as UTF-8",
    b"\xfe\xff": "UTF-16 text; write it as UTF-8",
}

Json = Mapping[str, object]


class Kind(Enum):
    """How the bytes of a file are laid out."""

    PARQUET = "parquet"
    JSON_LINES = "JSON lines"
    CSV = "CSV"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A readable, non-empty file and its beginning.

    `columns`: names in the CSV header or the parquet schema. `objects`: the first lines of JSON that could be read.
    `first_cells`: the first row of a CSV. `metadata`: key-value pairs of a parquet file. `rows`: of a parquet file.
    """

    path: Path
    kind: Kind
    columns: tuple[str, ...] = ()
    objects: tuple[Json, ...] = ()
    first_cells: tuple[str, ...] = ()
    delimiter: str = ","
    metadata: Mapping[str, str] = field(default_factory=dict)
    rows: int | None = None

    def open(self) -> IO[bytes]:
        """The bytes from the start, unpacked, without a byte order mark."""
        return _open(self.path)

    def error(self, what: str, line: int | None = None) -> TraceError:
        """A TraceError about this file, or one line of it (a parquet file has none)."""
        line = None if self.kind is Kind.PARQUET else line
        return TraceError(f"{self.path}{f':{line}' if line else ''}: {what}", rows=(line,) if line else ())


def look(path: Path) -> Source:
    """Open `path` far enough to see what it is. Raises TraceError for whatever cannot be a trace."""
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a folder" if path.is_dir() else "not a regular file (a pipe or device can be read only once)"
            raise TraceError(f"{path}: this is {what}; name one trace file")
        with _open(path) as stream:
            head = stream.read(_HEAD_BYTES)
    if not head.strip():
        raise TraceError(f"{path}: the file is empty; a trace has at least one request")
    if head.startswith(b"PAR1"):
        return _look_parquet(path)
    for magic, what in _OTHER_KINDS.items():
        if head.startswith(magic):
            raise TraceError(f"{path}: this is {what}; a trace is parquet, CSV or JSON lines, or one of these in gzip")
    return _look_text(path, head)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the system and the decoders say about a broken file into a TraceError about `path`."""
    try:
        yield
    except EOFError:
        raise TraceError(f"{path}: the gzip data end too early; the file was cut, fetch it again") from None
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; check the path") from None
    except pa.ArrowException as error:
        raise TraceError(f"{path}: cannot be read as parquet: {_first_line(error)}; the file is damaged") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: the text is not UTF-8 ({error.reason}); write it as UTF-8") from None
    except Exception as error:
        if type(error).__module__ in ("zlib", "gzip"):
            raise TraceError(f"{path}: the gzip data are damaged ({error}); fetch the file again") from None
        if isinstance(error, OSError):
            raise TraceError(f"{path}: cannot be read: {error.strerror or _first_line(error)}") from None
        raise


def _open(path: Path) -> IO[bytes]:
    stream: IO[bytes] = path.open("rb")
    try:
        start = stream.read(3)
        if start[:2] == _GZIP:
            import gzip

            stream.close()
            stream = cast(IO[bytes], gzip.open(path))  # noqa: SIM115  (the caller closes it)
            start = stream.read(3)
        if start != _BOM:
            stream.seek(0)
    except BaseException:
        stream.close()
        raise
    return stream


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(". ")


# ---------------------------------------------------------------- kinds


def _look_parquet(path: Path) -> Source:
    import pyarrow.parquet as pq

    with reading(path), pq.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    if rows == 0:
        raise TraceError(f"{path}: the parquet file has no rows; a trace has at least one request")
    pairs = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in (schema.metadata or {}).items()}
    return Source(path=path, kind=Kind.PARQUET, columns=tuple(schema.names), metadata=pairs, rows=rows)


def _look_text(path: Path, head: bytes) -> Source:
    cut = head.rfind(b"\n") if len(head) >= _HEAD_BYTES else len(head)
    text = head[: cut if cut > 0 else len(head)].decode("utf-8", "replace")
    if "\0" in text or text.count("\ufffd") > _STRAY_SHARE * len(text):
        raise TraceError(f"{path}: this is neither parquet nor UTF-8 text; a trace is parquet, CSV or JSON lines")
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise TraceError(f"{path}: there is nothing but blanks in it; a trace has at least one request")
    if lines[0].lstrip()[0] in "{[":
        return _look_json(path, lines)
    return _look_csv(path, lines)


def _look_json(path: Path, lines: list[str]) -> Source:
    if lines[0].lstrip().startswith("["):
        raise TraceError(f"{path}:1: this is a JSON array; write one object per line (JSON lines)")
    objects = []
    for line in islice(lines, _HEAD_LINES):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            objects.append(found)
    if not objects:
        raise TraceError(f"{path}:1: none of the first lines is a JSON object; a trace in JSON has one per line")
    return Source(path=path, kind=Kind.JSON_LINES, objects=tuple(objects))


def _look_csv(path: Path, lines: list[str]) -> Source:
    import csv

    delimiter = max(",;\t", key=lambda mark: (lines[0].count(mark), mark == ","))
    try:
        rows = list(csv.reader(lines[:2], delimiter=delimiter))
    except csv.Error as error:
        raise TraceError(f"{path}:1: the header cannot be read as CSV: {error}") from None
    columns = tuple(cell.strip() for cell in rows[0])
    twice = {name for name in columns if columns.count(name) > 1}
    if twice:
        raise TraceError(f"{path}:1: the header names {min(twice)!r} twice; rename one of the columns")
    first = tuple(rows[1]) if len(rows) > 1 else ()
    return Source(path=path, kind=Kind.CSV, columns=columns, first_cells=first, delimiter=delimiter)
