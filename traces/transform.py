"""Cuts a trace and moves its arrivals: slice, limit, speed-up, rescaling to a rate, Poisson re-timing.

Only arrivals change. Lengths, content and the pauses of sessions stay as they are: a user thinks no faster because more
users come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces import arrow
from traces.errors import TraceError
from traces.schema import ARRIVAL, SESSION_ID

Floats = npt.NDArray[np.float64]


class Arrivals(NamedTuple):
    """How many rows have an arrival of their own, and the time from the first to the last of them."""

    rows: int
    span_s: float

    @property
    def rate_rps(self) -> float | None:
        """Mean arrivals per second between the first and the last; None when there is no span."""
        return (self.rows - 1) / self.span_s if self.span_s > 0 else None


def transform(
    batches: Iterable[pa.RecordBatch],
    *,
    limit: int | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    speedup: float = 1.0,
    rate_rps: float | None = None,
    poisson: bool = False,
    seed: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Canonical batches in, canonical batches out, in this order: slice, limit, then times.

    `start_s` (inclusive) and `end_s` (exclusive) count from the trace's first arrival; a session is kept if its first
    turn is. `limit` is a number of rows. The first kept arrival becomes 0. `speedup` divides arrivals. `rate_rps`
    stretches them so that the mean rate from the first to the last is this. `poisson` draws exponential gaps instead,
    at `rate_rps`, or else at the mean rate of the kept rows times `speedup`.

    `rate_rps`, and `poisson` without it, need the mean rate first, so they read twice: pass a `Trace`, or whatever else
    can be iterated anew, to keep memory bounded; an iterator is held in memory. Raises TraceError for values that make
    no sense, and, while iterating, if no row is kept.
    """
    _check(limit, start_s, end_s, speedup, rate_rps)
    cut = (limit, start_s or 0.0, end_s)
    needs_rate = rate_rps is not None or poisson
    if needs_rate and iter(batches) is batches:
        batches = list(batches)
    if not needs_rate:
        return _retime(_cut(batches, *cut), lambda arrival_s: arrival_s / speedup)
    if poisson and rate_rps is not None:
        return _retime(_cut(batches, *cut), _poisson_clock(rate_rps, seed))
    return _at_rate(batches, cut, speedup, rate_rps, seed if poisson else None)


def measure(batches: Iterable[pa.RecordBatch]) -> Arrivals:
    """Count and span of the arrivals. Reads all batches."""
    rows, first, last = 0, 0.0, 0.0
    for batch in batches:
        arrival_s = arrivals_of(batch)
        if len(arrival_s):
            first = first if rows else float(arrival_s[0])
            rows, last = rows + len(arrival_s), float(arrival_s[-1])
    return Arrivals(rows, last - first)


def arrivals_of(batch: pa.RecordBatch) -> Floats:
    """The arrivals of the rows that have one, in seconds."""
    column = batch.column(batch.schema.get_field_index(ARRIVAL))
    values: Floats = arrow.values_under(column)
    return values[arrow.valid_flags(column)] if column.null_count else values


def _check(
    limit: int | None, start_s: float | None, end_s: float | None, speedup: float, rate_rps: float | None
) -> None:
    if limit is not None and limit < 1:
        raise TraceError(f"limit is {limit}; at least one row is needed")
    if start_s is not None and not 0 <= start_s < np.inf:
        raise TraceError(f"start_s is {start_s}; it counts seconds from the first arrival, 0 or more")
    if end_s is not None and not (start_s or 0.0) < end_s:
        raise TraceError(f"end_s is {end_s}; it must lie behind start_s, which is {start_s or 0.0}")
    for name, value in (("speedup", speedup), ("rate_rps", rate_rps)):
        if value is not None and not 0 < value < np.inf:
            raise TraceError(f"{name} is {value}; a finite number above 0 is needed")
    if rate_rps is not None and speedup != 1:
        raise TraceError(f"speedup {speedup} and rate_rps {rate_rps} both set the rate of arrivals; give one of them")


# ---------------------------------------------------------------- which rows


def _cut(
    batches: Iterable[pa.RecordBatch], limit: int | None, start_s: float, end_s: float | None
) -> Iterator[pa.RecordBatch]:
    """The rows in the slice, at most `limit` of them. Stops reading as soon as no further row can follow."""
    kept = 0
    sessions: set[str] = set()
    sliced = start_s > 0 or end_s is not None
    for batch in batches:
        part = _slice(batch, start_s, end_s, sessions) if sliced else batch
        if limit is not None and kept + part.num_rows > limit:
            part = part.slice(0, limit - kept)
        kept += part.num_rows
        if part.num_rows:
            yield part
        if kept == limit or (end_s is not None and _ends_behind(batch, end_s)):
            break
    if not kept:
        to = "the end" if end_s is None else f"{end_s:g} s"
        raise TraceError(f"no request arrives from {start_s:g} s to {to}; choose another slice")


def _slice(batch: pa.RecordBatch, start_s: float, end_s: float | None, sessions: set[str]) -> pa.RecordBatch:
    column = batch.column(batch.schema.get_field_index(ARRIVAL))
    arrival_s = arrow.values_under(column)
    timed = arrow.valid_flags(column)
    inside = (arrival_s >= start_s) & timed
    if end_s is not None:
        inside &= arrival_s < end_s
    if SESSION_ID in batch.schema.names:
        inside = _with_sessions(batch.column(batch.schema.get_field_index(SESSION_ID)), inside, timed, sessions)
    if inside.all():
        return batch
    return batch.take(arrow.numbers(np.flatnonzero(inside)))


def _with_sessions(
    column: pa.Array, inside: npt.NDArray[np.bool_], timed: npt.NDArray[np.bool_], kept: set[str]
) -> npt.NDArray[np.bool_]:
    """Also the later turns without arrival of sessions of which a turn was kept."""
    if column.null_count == len(column):
        return inside
    inside = inside.copy()
    for i, name in enumerate(column.to_pylist()):
        if name is None:
            continue
        if inside[i]:
            kept.add(name)
        elif not timed[i]:
            inside[i] = name in kept
    return inside


def _ends_behind(batch: pa.RecordBatch, end_s: float) -> bool:
    """Whether everything behind this batch arrives too late; with sessions, later turns may still follow."""
    if SESSION_ID in batch.schema.names:
        column = batch.column(batch.schema.get_field_index(SESSION_ID))
        if column.null_count < len(column):
            return False
    arrival_s = arrivals_of(batch)
    return bool(len(arrival_s) and arrival_s[-1] >= end_s)


# ---------------------------------------------------------------- when they come


def _at_rate(
    batches: Iterable[pa.RecordBatch],
    cut: tuple[int | None, float, float | None],
    speedup: float,
    rate_rps: float | None,
    seed: int | None,
) -> Iterator[pa.RecordBatch]:
    """Two passes: the mean rate of the kept rows, then these rows at another rate."""
    found = measure(_cut(batches, *cut))
    if found.rate_rps is None:
        raise TraceError(f"{found.rows} arrivals within {found.span_s:g} s have no mean rate; two moments are needed")
    if seed is not None:
        yield from _retime(_cut(batches, *cut), _poisson_clock(found.rate_rps * speedup, seed))
    else:
        assert rate_rps is not None
        factor = rate_rps / found.rate_rps
        yield from _retime(_cut(batches, *cut), lambda arrival_s: arrival_s / factor)


def _poisson_clock(rate_rps: float, seed: int) -> Callable[[Floats], Floats]:
    """Replaces arrivals by those of a Poisson process, the first at 0; the same whatever the batch size."""
    stream = np.random.Generator(np.random.PCG64(seed))
    latest_s: float | None = None

    def clock(arrival_s: Floats) -> Floats:
        nonlocal latest_s
        gaps_s = -np.log1p(-stream.random(len(arrival_s))) / rate_rps
        if latest_s is None and len(gaps_s):
            latest_s, gaps_s[0] = 0.0, 0.0
        gaps_s[:1] += latest_s or 0.0
        drawn: Floats = np.cumsum(gaps_s)
        latest_s = float(drawn[-1]) if len(drawn) else latest_s
        return drawn

    return clock


def _retime(batches: Iterable[pa.RecordBatch], clock: Callable[[Floats], Floats]) -> Iterator[pa.RecordBatch]:
    """Every batch with its arrivals counted from the first of all, then put through `clock`."""
    origin_s: float | None = None
    for batch in batches:
        at = batch.schema.get_field_index(ARRIVAL)
        column = batch.column(at)
        timed = arrow.valid_flags(column)
        arrival_s = arrow.values_under(column)[timed]
        if origin_s is None and len(arrival_s):
            origin_s = float(arrival_s[0])
        moved: npt.NDArray[Any] = np.zeros(len(column), np.float64)
        moved[timed] = clock(arrival_s - (origin_s or 0.0))
        columns = list(batch.columns)
        columns[at] = arrow.numbers(moved, None if timed.all() else ~timed)
        yield pa.RecordBatch.from_arrays(columns, schema=batch.schema)
