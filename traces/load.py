"""Opens a trace of any known format and streams it as canonical record batches.

The format is recognised from the content or named, never assumed; what was recognised is in `Trace.info`. Importing
this module costs pyarrow and numpy; a reader is imported when a file needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces.check import Clock, RowChecker, Tally
from traces.duplicates import DuplicateCounter
from traces.errors import TraceError
from traces.options import ReadOptions, TraceInfo
from traces.parse import TICKS_PER_S
from traces.readers import RawTrace, reader_for
from traces.rows import NumberArray, Numbers, Rows
from traces.schema import (
    ARRIVAL,
    DELAY,
    HASH_IDS,
    META_BLOCK,
    META_GENERATOR,
    META_LICENCE,
    META_SEED,
    META_SOURCE,
    META_SYNTHETIC,
    SESSION_ID,
    TEXTS,
    canonical_schema,
)
from traces.source import look, reading

__all__ = ["BATCH_ROWS", "ReadOptions", "Trace", "TraceInfo", "open_trace"]

BATCH_ROWS = 16384
_ON_BAD_ROW = ("error", "skip")


def open_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Recognise `path` and get ready to read it. Raises TraceError if that cannot be a trace."""
    path, options = Path(path), options or ReadOptions()
    _check_options(options)
    source = look(path)
    return Trace(reader_for(source, options.format).open(source, options), options)


class Trace:
    """One trace file. Every call of `batches`, and every iteration, reads it anew.

    `skipped` counts rows that the latest reading left out, `remarks` rows that it kept but that are worth a word, both
    by reason and complete once that reading has ended.
    """

    def __init__(self, raw: RawTrace, options: ReadOptions) -> None:
        self._raw = raw
        self._options = options
        self.info = raw.info
        self.schema = canonical_schema(raw.info.columns, metadata_of(raw.info))
        self._tally = Tally({}, {})

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out, by reason."""
        return self._tally.skipped

    @property
    def remarks(self) -> dict[str, int]:
        """Rows kept, by what is remarkable about them."""
        return self._tally.remarks

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    def batches(self, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Canonical batches of at most `batch_rows` rows, in order of arrival, the first arrival at 0 s.

        Memory is bounded by a batch, plus the names of the sessions seen; only `sort`, and formats that are not in
        order of arrival, need the whole trace. Raises TraceError at the first chunk with a bad row, unless these are
        skipped, and for a trace in which no row is left.
        """
        self._tally.skipped.clear()
        self._tally.remarks.clear()
        duplicates = DuplicateCounter()
        emitted = 0
        origin: float | int | None = None
        with reading(self.info.path):
            for rows in self._in_order(batch_rows):
                if origin is None:
                    origin = rows.numbers[ARRIVAL].values[0]
                self._tally.remark("exact duplicates, kept", duplicates.count(rows))
                emitted += rows.count
                yield emit(rows, self.schema, self._raw.clock, origin)
        if not emitted:
            raise self._no_rows()

    def _in_order(self, batch_rows: int) -> Iterator[Rows]:
        in_file_order = self._raw.in_arrival_order and not self._options.sort
        checker = RowChecker(
            self.info.path,
            self._options,
            self._tally,
            fields=self._raw.fields,
            clock=self._raw.clock,
            hash_block_tokens=self.info.hash_block_tokens,
            ordered=in_file_order,
        )
        checked = (checker.check(rows) for rows in self._raw.chunks(batch_rows))
        if in_file_order:
            yield from (rows for rows in checked if rows.count)
        else:
            yield from _sorted([rows for rows in checked if rows.count], batch_rows, self._tally)

    def _no_rows(self) -> TraceError:
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        why = f"every row was left out ({left_out})" if left_out else "there is a header but no row"
        return TraceError(f"{self.info.path}: {why}; a trace needs at least one request")


def metadata_of(info: TraceInfo) -> dict[str, str]:
    """What the canonical form of a trace says about itself in its schema metadata."""
    pairs = {META_SYNTHETIC: "true" if info.synthetic else "false"}
    if info.hash_block_tokens is not None and HASH_IDS in info.columns:
        pairs[META_BLOCK] = str(info.hash_block_tokens)
    named = {
        META_SOURCE: info.source,
        META_LICENCE: info.licence,
        META_GENERATOR: info.generator,
        META_SEED: info.seed,
    }
    return pairs | {key: value for key, value in named.items() if value is not None}


def emit(rows: Rows, schema: pa.Schema, clock: Clock, origin: float | int) -> pa.RecordBatch:
    """Checked rows as a canonical batch, with arrivals in seconds after `origin` (a tick)."""
    arrival = rows.numbers[ARRIVAL]
    numbers = {**rows.numbers, ARRIVAL: Numbers((arrival.values - origin) / clock.ticks_per_s, arrival.missing)}
    columns = []
    for field in schema:
        if field.name == HASH_IDS:
            columns.append(rows.ids.to_arrow() if rows.ids is not None else pa.nulls(rows.count, field.type))
        elif field.name in TEXTS:
            columns.append(rows.texts[field.name])
        else:
            dtype = np.float64 if field.name in (ARRIVAL, DELAY) else np.int32
            columns.append(numbers[field.name].to_arrow(dtype))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _sorted(parts: list[Rows], batch_rows: int, tally: Tally) -> Iterator[Rows]:
    """All rows in order of arrival; rows of one arrival, and the later turns of a session, stay in file order."""
    if not parts:
        return
    whole = Rows.concat(parts)
    parts.clear()
    order = np.argsort(_sort_keys(whole), kind="stable")
    tally.remark("rows moved by sorting", int((order != np.arange(whole.count)).sum()))
    for start in range(0, whole.count, batch_rows):
        yield whole.take(order[start : start + batch_rows])


def _sort_keys(rows: Rows) -> NumberArray:
    """Arrival ticks; a later turn without arrival takes those of the turn before it, so that it stays behind it."""
    arrival = rows.numbers[ARRIVAL]
    if arrival.missing is None or not arrival.missing.any():
        return arrival.values
    keys = arrival.values.copy()
    latest: dict[str, int | float] = {}
    for i, (name, missing) in enumerate(zip(rows.texts[SESSION_ID].to_pylist(), arrival.missing.tolist(), strict=True)):
        if name is not None:
            keys[i] = latest[name] if missing else keys[i]
            latest[name] = keys[i]
    return keys


def _check_options(options: ReadOptions) -> None:
    if options.on_bad_row not in _ON_BAD_ROW:
        raise TraceError(f"on_bad_row is {options.on_bad_row!r}; it is one of {', '.join(_ON_BAD_ROW)}")
    if options.time_unit is not None and options.time_unit not in TICKS_PER_S:
        raise TraceError(f"time_unit is {options.time_unit!r}; it is one of {', '.join(TICKS_PER_S)}")
    for name in ("hash_block_tokens", "default_osl"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise TraceError(f"{name} is {value}; at least 1 is needed")
