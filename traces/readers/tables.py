"""Rows from CSV and parquet, once somebody has said which column is what.

Parquet columns stay arrays throughout; CSV cells become numbers a column at a time. Memory is bounded by a batch, and a
line number is exact even behind blank lines and quoted line breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice

import numpy as np
import pyarrow as pa

from traces.arrow import valid_flags, values_under
from traces.parse import TICKS_PER_S, Notes, dates, id_lists, text_id_lists, text_numbers, texts
from traces.rows import Flags, IdLists, Numbers, Rows
from traces.schema import ARRIVAL, DELAY, HASH_IDS, ISL, MAX_TOKENS, OSL, PRIORITY, TEXTS
from traces.source import Kind, Source

_PAGE_BUFFER_BYTES = 1 << 20
_PLAIN_NUMBERS = (ISL, OSL, MAX_TOKENS, PRIORITY)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which column of the file is which canonical one; whether arrivals are dates; delays per second."""

    names: Mapping[str, str]
    dated: bool
    delays_per_s: float = TICKS_PER_S["s"]


def table_rows(source: Source, layout: Layout) -> Callable[[int], Iterator[Rows]]:
    """A function that reads the file anew, up to so many rows at a time."""
    read = _parquet_rows if source.kind is Kind.PARQUET else _csv_rows
    return lambda batch_rows: read(source, layout, batch_rows)


# ---------------------------------------------------------------- CSV


def _csv_rows(source: Source, layout: Layout, batch_rows: int) -> Iterator[Rows]:
    import csv

    place = {column: source.columns.index(name) for column, name in layout.names.items()}
    with TextIOWrapper(source.open(), encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, delimiter=source.delimiter, strict=True)
        try:
            next(reader)
            while chunk := [(cells, reader.line_num) for cells in islice(reader, batch_rows)]:
                rows = [(cells, line) for cells, line in chunk if len(cells) > 1 or (cells and cells[0].strip())]
                if rows:
                    yield _csv_chunk(rows, len(source.columns), place, layout)
        except csv.Error as error:
            raise source.error(f"cannot be read as CSV: {error}", reader.line_num) from None


def _csv_chunk(rows: list[tuple[list[str], int]], width: int, place: Mapping[str, int], layout: Layout) -> Rows:
    notes: Notes = {}
    cells = [each for each, _ in rows]
    lines = [line for _, line in rows]
    if set(map(len, cells)) != {width}:
        for i, row in enumerate(cells):
            if len(row) != width:
                notes[i] = f"the row has {len(row)} fields, the header has {width}"
                cells[i] = [""] * width
    numbers: dict[str, Numbers] = {}
    strings: dict[str, pa.Array] = {}
    ids = None
    for column, at in place.items():
        values, name = [row[at] for row in cells], layout.names[column]
        if column == ARRIVAL and layout.dated:
            numbers[column] = dates(values, name, notes)
        elif column in TEXTS:
            strings[column] = texts(values)
        elif column == HASH_IDS:
            ids = text_id_lists(values, name, notes)
        else:
            numbers[column] = text_numbers(values, name, notes)
    _delays_to_seconds(numbers, layout)
    return Rows(count=len(rows), numbers=numbers, place=lines.__getitem__, texts=strings, ids=ids, unreadable=notes)


def _delays_to_seconds(numbers: dict[str, Numbers], layout: Layout) -> None:
    if DELAY in numbers and layout.delays_per_s != 1:
        delay = numbers[DELAY]
        numbers[DELAY] = Numbers(delay.values / layout.delays_per_s, delay.missing)


# ---------------------------------------------------------------- parquet


def filled_columns(source: Source) -> frozenset[str]:
    """The columns of a parquet file in which, by its statistics, not every value is null."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path) as file:
        meta = file.metadata
        empty = set(source.columns)
        for group in range(meta.num_row_groups):
            for at in range(meta.num_columns):
                column = meta.row_group(group).column(at)
                stats = column.statistics
                if stats is None or not stats.has_null_count or stats.null_count < column.num_values:
                    empty.discard(column.path_in_schema.partition(".")[0])
    return frozenset(source.columns) - empty


def _parquet_rows(source: Source, layout: Layout, batch_rows: int) -> Iterator[Rows]:
    import pyarrow.parquet as pq

    wanted = list(dict.fromkeys(layout.names.values()))
    first = 1
    settings = {"pre_buffer": False, "buffer_size": _PAGE_BUFFER_BYTES, "page_checksum_verification": True}
    with pq.ParquetFile(source.path, **settings) as file:
        for batch in file.iter_batches(batch_rows, columns=wanted, use_threads=False):
            yield _parquet_chunk(batch, first, layout)
            first += batch.num_rows


def _parquet_chunk(batch: pa.RecordBatch, first: int, layout: Layout) -> Rows:
    notes: Notes = {}
    numbers: dict[str, Numbers] = {}
    strings: dict[str, pa.Array] = {}
    ids = None
    for column, name in layout.names.items():
        array = batch.column(batch.schema.get_field_index(name))
        if column in TEXTS:
            strings[column] = _strings(array)
        elif column == HASH_IDS:
            ids = _ids(array, name, notes)
        elif column == ARRIVAL and layout.dated:
            numbers[column] = _dates(array, name, notes)
        else:
            numbers[column] = _numbers(array, name, notes)
    _delays_to_seconds(numbers, layout)
    return Rows(
        count=batch.num_rows,
        numbers=numbers,
        place=lambda i: first + i,
        texts=strings,
        ids=ids,
        unreadable=notes,
    )


def _numbers(array: pa.Array, name: str, notes: Notes) -> Numbers:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _numbers(array.dictionary_decode(), name, notes)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values, missing = values_under(array), _missing(array)
        wide = values.dtype.kind == "f" or (values.dtype == np.uint64 and bool((values >> np.uint64(63)).any()))
        return Numbers(values.astype(np.float64 if wide else np.int64, copy=False), missing)
    return text_numbers(["" if value is None else str(value) for value in array.to_pylist()], name, notes)


def _dates(array: pa.Array, name: str, notes: Notes) -> Numbers:
    kind = array.type
    if not pa.types.is_timestamp(kind):
        return dates(array.to_pylist(), name, notes)
    return Numbers(values_under(array.view(pa.int64())) * int(1e9 / TICKS_PER_S[kind.unit]), _missing(array))


def _missing(array: pa.Array) -> Flags | None:
    return ~valid_flags(array) if array.null_count else None


def _strings(array: pa.Array) -> pa.Array:
    return array if array.type == pa.string() else array.cast(pa.string())


def _ids(array: pa.Array, name: str, notes: Notes) -> IdLists:
    kind = array.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_integer(kind.value_type) or array.values.null_count:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return text_id_lists([value or "" for value in array.to_pylist()], name, notes)
        return id_lists(array.to_pylist(), name, notes)
    values = values_under(array.values)
    values = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    offsets = values_under(array.offsets).astype(np.int64)
    if array.null_count:  # a null list may still span values: give it none
        valid = valid_flags(array)
        if (np.diff(offsets)[~valid] > 0).any():
            return id_lists(array.to_pylist(), name, notes)
    return IdLists(offsets, values)
