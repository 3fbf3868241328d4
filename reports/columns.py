"""Columns between Python, numpy and arrow: the one place that knows how nulls travel.

A float column uses NaN for null in numpy and null in arrow, so a NaN never reaches a file. Nothing here may use
`pa.array`, `pa.scalar` or `to_numpy`: on their first call they import pandas, which costs more than a small replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from policies.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def numbers_to_arrow(values: F64, kind: pa.DataType) -> pa.Array:
    """A float64 array (NaN: null) as an arrow array of `kind`, a number type of at most 53 significant bits."""
    missing = np.isnan(values)
    some = bool(missing.any())
    bitmap = pa.py_buffer(np.packbits(~missing, bitorder="little")) if some else None
    filled = np.where(missing, 0.0, values) if some else values
    stored = np.ascontiguousarray(filled, dtype=_numpy_type(kind))
    return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(stored)])


def text_to_arrow(values: Sequence[str | None]) -> pa.Array:
    """Strings (None: null) as an arrow string array."""
    builder = pa.lib.StringBuilder()
    builder.append_values(values)
    return builder.finish()


def to_arrow(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Plain Python values of one column (None: null) as an arrow array of `kind`: string, or a number."""
    if pa.types.is_string(kind):
        return text_to_arrow(values)  # type: ignore[arg-type]  # the schema says string, the caller keeps to it
    return numbers_to_arrow(np.array(values, dtype=np.float64), kind)


def _numpy_type(kind: pa.DataType) -> type[np.generic]:
    if pa.types.is_float64(kind):
        return np.float64
    return np.int64 if pa.types.is_int64(kind) else np.int32


def distinct(values: I64) -> I64:
    """The different values, ascending: np.unique, without the import of numpy.ma that it makes."""
    ranked = np.sort(values)
    return ranked[np.concatenate([[True], ranked[1:] != ranked[:-1]])] if len(ranked) else ranked


def valid_mask(column: pa.Array) -> Bools:
    """True where the arrow array has a value."""
    bitmap = column.buffers()[0]
    if bitmap is None or column.null_count == 0:
        return np.ones(len(column), dtype=np.bool_)
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little", count=column.offset + len(column))
    return bits[column.offset :].astype(np.bool_)


def floats(column: pa.Array) -> F64:
    """An arrow number array as float64, NaN where it is null; a view of the buffer where that is possible."""
    raw = np.frombuffer(column.buffers()[1], dtype=_numpy_type(column.type))
    values: F64 = raw[column.offset : column.offset + len(column)].astype(np.float64, copy=False)
    if column.null_count:
        values = np.where(valid_mask(column), values, np.nan)
    return values


def codes(column: pa.Array, labels: dict[str | None, int]) -> I64:
    """A string array as small integers; `labels` maps text to code and grows by what is new (null included)."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    indices = floats(encoded.indices)
    table = [labels.setdefault(text, len(labels)) for text in encoded.dictionary.to_pylist()]
    null = labels.setdefault(None, len(labels)) if encoded.null_count else 0
    lookup = np.array([*table, null], dtype=np.int64)
    return lookup[np.where(np.isnan(indices), len(table), indices).astype(np.int64)]


class Columns:
    """The columns of one parquet file or of one batch of it, read one at a time and on demand."""

    __slots__ = ("_read", "rows")

    def __init__(self, rows: int, read: _Reader | _Rest) -> None:
        self.rows = rows
        self._read = read

    def behind(self, rows: int) -> Columns:
        """The same columns without their first `rows` rows."""
        return Columns(max(self.rows - rows, 0), _Rest(self._read, rows)) if rows else self

    def floats(self, name: str) -> F64:
        """A number column as float64, NaN for null. Integers up to 2**53 are exact."""
        chunks = [floats(chunk) for chunk in self._read(name)]
        return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.float64)

    def ints(self, name: str, null: int | None = None) -> I64:
        """A number column as int64; a null becomes `null`, which must be given if there is one."""
        values = self.floats(name)
        missing = np.isnan(values)
        if missing.any():
            if null is None:
                raise ConfigError(f"column {name}: {int(missing.sum())} nulls where every row needs a value")
            values = np.where(missing, float(null), values)
        return values.astype(np.int64)

    def texts(self, name: str) -> list[str | None]:
        """A string column as Python strings."""
        return [text for chunk in self._read(name) for text in chunk.to_pylist()]

    def codes(self, name: str) -> tuple[I64, list[str | None]]:
        """A string column as (code per row, text per code), in order of first appearance."""
        labels: dict[str | None, int] = {}
        chunks = [codes(chunk, labels) for chunk in self._read(name)]
        return (np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)), list(labels)


class _Reader:
    """How `Columns` gets at its arrow chunks: from a file, or from a batch that is already in memory."""

    __slots__ = ("_source",)

    def __init__(self, source: ParquetFile | pa.RecordBatch) -> None:
        self._source = source

    def __call__(self, name: str) -> Iterable[pa.Array]:
        if isinstance(self._source, pa.RecordBatch):
            return [self._source.column(name)]
        chunks: list[pa.Array] = self._source.read(columns=[name], use_threads=False).column(0).chunks
        return chunks


class _Rest:
    """What another reader reads, without its first rows."""

    __slots__ = ("_read", "_rows")

    def __init__(self, read: _Reader | _Rest, rows: int) -> None:
        self._read = read
        self._rows = rows

    def __call__(self, name: str) -> Iterable[pa.Array]:
        left = self._rows
        for chunk in self._read(name):
            if left < len(chunk):
                yield chunk.slice(left)
            left = max(left - len(chunk), 0)


class ColumnFile:
    """A parquet file of a run, opened for reading by columns or by bounded batches.

    `coded` names string columns with few values, which are read as dictionaries: encoding them here would import
    pyarrow.compute. Raises ConfigError with one line where the file is absent or is no complete parquet file.
    """

    def __init__(self, path: Path, coded: Sequence[str] = ()) -> None:
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path, read_dictionary=list(coded) or None)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; is {path.parent} a finished run folder?") from None
        except KeyError as why:
            raise ConfigError(f"{path}: has no column {why}; it is not a file of this version's runs") from None
        except (pa.ArrowInvalid, OSError) as why:
            text = str(why).splitlines()[0] if str(why) else type(why).__name__
            raise ConfigError(f"{path}: not a complete parquet file ({text}); run the replay again") from None

    @property
    def rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def columns(self) -> Columns:
        """The whole file; a column is read when it is asked for."""
        return Columns(self.rows, _Reader(self._file))

    def batches(self, names: Sequence[str], rows: int = 65_536) -> Iterator[Columns]:
        """The named columns in batches of at most `rows` rows, in the order of the file."""
        for batch in self._file.iter_batches(batch_size=rows, use_threads=False, columns=list(names)):
            yield Columns(batch.num_rows, _Reader(batch))
