"""Reads measured step latencies from CSV, parquet or the peer's NPZ profile into grids. Checks every row.

Columns of CSV and parquet: kind (prefill or decode); latency_s or latency_ms; for prefill new_tokens and, if measured,
past_tokens (context before them); for decode any of batch, and ctx_tokens (of the whole batch) or mean_ctx_tokens (per
request). Never guesses a unit; an unknown column is an error.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from policies.errors import ConfigError
from twin.perf.grid import Grid
from twin.perf.names import unknown
from twin.perf.table import (
    DecodeAxes,
    MeasuredTable,
    by_batch,
    by_batch_and_mean,
    by_ctx,
    by_ctx_and_floored_mean,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

UNITS_S = {"latency_s": 1.0, "latency_ms": 1e-3}
COLUMNS = ("kind", *UNITS_S, "new_tokens", "past_tokens", "batch", "ctx_tokens", "mean_ctx_tokens")
AXES = {"prefill": ("new_tokens", "past_tokens"), "decode": ("batch", "ctx_tokens", "mean_ctx_tokens")}
NPZ_KEYS = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")

Row = Mapping[str, object]


class _Point(NamedTuple):
    kind: str
    axes: dict[str, float]  # those that the row has
    seconds: float


def read_table(path: Path, *, extrapolate: bool = False) -> MeasuredTable:
    """The measured points of `path`. Raises `ConfigError` naming file, row and column of what is wrong."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    except OSError as error:
        raise ConfigError(f"latency table {path}: cannot be read ({error.strerror})") from error
    if path.suffix == ".npz":
        return _read_npz(path, digest, extrapolate)
    if path.suffix == ".csv":
        rows = list(_csv_rows(path))
    elif path.suffix == ".parquet":
        rows = list(_parquet_rows(path))
    else:
        raise ConfigError(f"latency table {path}: expected a .csv, .parquet or .npz file")
    points = [_point(f"{path}:{number}", row) for number, row in rows]
    if not points:
        raise ConfigError(f"latency table {path}: no rows")
    prefill, prefill_notes = _prefill_grid(path, points, extrapolate)
    decode, axes, decode_notes = _decode_grid(path, points, extrapolate)
    return MeasuredTable(
        where=path.name,
        prefill=prefill,
        decode=decode,
        decode_axes=axes,
        notes=(*prefill_notes, *decode_notes),
        digest=digest,
        rows=len(points),
    )


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows with their line in the file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, reader.fieldnames or ())
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"{path}:{reader.line_num}: {len(reader.fieldnames or ())} columns expected")
                yield reader.line_num, {key: value for key, value in row.items() if value.strip()}
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"latency table {path}: not a CSV file: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows with their number, from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ConfigError(f"latency table {path}: not a parquet file: {error}") from error
    _check_columns(path, table.column_names)
    for number, row in enumerate(table.to_pylist(), start=1):
        yield number, {key: value for key, value in row.items() if value is not None}


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in COLUMNS:
            raise unknown(f"latency table {path}: column", column, COLUMNS)
    units = [unit for unit in UNITS_S if unit in columns]
    if len(units) != 1:
        raise ConfigError(f"latency table {path}: needs either latency_s or latency_ms, found {units or 'neither'}")
    if "kind" not in columns:
        raise ConfigError(f"latency table {path}: column kind (prefill or decode) is missing")


def _point(where: str, row: Row) -> _Point:
    kind = row.get("kind")
    if kind not in ("prefill", "decode"):
        raise ConfigError(f"{where}: kind = {kind!r}; it is prefill or decode")
    unit = next(unit for unit in (*UNITS_S, "") if unit in row or not unit)
    if not unit:
        raise ConfigError(f"{where}: the latency is missing")
    seconds = _number(where, unit, row[unit]) * UNITS_S[unit]
    axes = {column: _number(where, column, row[column]) for column in AXES[str(kind)] if column in row}
    if seconds <= 0.0:
        raise ConfigError(f"{where}: {unit} = {row[unit]} must be more than 0")
    for column, value in axes.items():
        if value < 0.0 or (value == 0.0 and column in ("batch", "new_tokens")):
            raise ConfigError(f"{where}: {column} = {value:g} is too small")
    if "ctx_tokens" in axes and "mean_ctx_tokens" in axes:
        raise ConfigError(f"{where}: both ctx_tokens and mean_ctx_tokens; give one of them")
    return _Point(str(kind), axes, seconds)


def _number(where: str, column: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {column} = {value!r} is not a finite number")
    return number


def _axes_of(path: Path, kind: str, points: list[_Point]) -> frozenset[str]:
    """The columns that the rows of one kind have; all of them must have the same."""
    axes = {frozenset(point.axes) for point in points}
    if len(axes) > 1:
        listed = " and ".join(sorted("(" + ", ".join(sorted(names)) + ")" for names in axes))
        raise ConfigError(f"latency table {path}: {kind} rows differ in the columns that they fill: {listed}")
    return axes.pop()


def _prefill_grid(path: Path, points: list[_Point], extrapolate: bool) -> tuple[Grid | None, tuple[str, ...]]:
    rows = [point for point in points if point.kind == "prefill"]
    if not rows:
        return None, ()
    axes = _axes_of(path, "prefill", rows)
    if "new_tokens" not in axes:
        raise ConfigError(f"latency table {path}: prefill rows need new_tokens")
    where = f"latency table {path.name}, prefill"
    past = "past_tokens" if "past_tokens" in axes else None
    triples = ((row.axes.get("past_tokens", 0.0), row.axes["new_tokens"], row.seconds) for row in rows)
    notes = () if past else ("prior context is not in the table: it costs nothing in prefill",)
    return Grid.of(where, (past, "new_tokens"), triples, extrapolate), notes


def _decode_grid(
    path: Path, points: list[_Point], extrapolate: bool
) -> tuple[Grid | None, DecodeAxes, tuple[str, ...]]:
    rows = [point for point in points if point.kind == "decode"]
    if not rows:
        return None, by_batch, ()
    axes = _axes_of(path, "decode", rows)
    where = f"latency table {path.name}, decode"
    if "batch" not in axes:
        if axes != {"ctx_tokens"}:
            raise ConfigError(f"latency table {path}: decode rows need batch, or ctx_tokens of the whole batch")
        triples = [(0.0, row.axes["ctx_tokens"], row.seconds) for row in rows]
        notes = ("batch size is not in the table: decode depends on the context of the whole batch only",)
        return Grid.of(where, (None, "ctx_tokens"), triples, extrapolate), by_ctx, notes
    if axes == {"batch"}:
        triples = [(row.axes["batch"], 0.0, row.seconds) for row in rows]
        notes = ("context is not in the table: decode depends on the batch size only",)
        return Grid.of(where, ("batch", None), triples, extrapolate), by_batch, notes
    triples = [(row.axes["batch"], _mean_ctx_tokens(row.axes), row.seconds) for row in rows]
    return Grid.of(where, ("batch", "mean context"), triples, extrapolate), by_batch_and_mean, ()


def _mean_ctx_tokens(axes: Mapping[str, float]) -> float:
    return axes["mean_ctx_tokens"] if "mean_ctx_tokens" in axes else axes["ctx_tokens"] / axes["batch"]


def _read_npz(path: Path, digest: str, extrapolate: bool) -> MeasuredTable:
    """The peer's profile: prefill over prompt tokens, decode over (tokens in the KV pool, mean context), in ms."""
    arrays = _npz_arrays(path)
    isl, ttft_ms = arrays["prefill_isl"], arrays["prefill_ttft_ms"]
    kv_tokens, ctx_tokens, itl_ms = (arrays[key] for key in NPZ_KEYS[2:])
    if isl.shape != ttft_ms.shape or isl.ndim != 1:
        raise ConfigError(f"latency table {path}: prefill_isl {isl.shape} and prefill_ttft_ms {ttft_ms.shape} differ")
    if itl_ms.shape != (*kv_tokens.shape, *ctx_tokens.shape):
        raise ConfigError(
            f"latency table {path}: decode_itl has shape {itl_ms.shape}, expected "
            f"({kv_tokens.size}, {ctx_tokens.size}) from decode_active_kv_tokens and decode_context_length"
        )
    prefill = [(0.0, float(n), float(ms) * 1e-3) for n, ms in zip(isl, ttft_ms, strict=True)]
    decode = [
        (float(kv), float(ctx), float(itl_ms[i, j]) * 1e-3)
        for i, kv in enumerate(kv_tokens)
        for j, ctx in enumerate(ctx_tokens)
    ]
    where = f"latency table {path.name}"
    return MeasuredTable(
        where=path.name,
        prefill=Grid.of(f"{where}, prefill", (None, "new_tokens"), prefill, extrapolate),
        decode=Grid.of(f"{where}, decode", ("tokens in the KV pool", "mean context"), decode, extrapolate),
        decode_axes=by_ctx_and_floored_mean,
        notes=("prior context is not in the table: it costs nothing in prefill",),
        digest=digest,
        rows=len(prefill) + len(decode),
    )


def _npz_arrays(path: Path) -> dict[str, FloatArray]:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in NPZ_KEYS if key not in archive]
            if missing:
                raise ConfigError(
                    f"latency table {path}: array {missing[0]} is missing; expected {', '.join(NPZ_KEYS)}"
                )
            arrays = {key: np.asarray(archive[key], dtype=float) for key in NPZ_KEYS}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"latency table {path}: not a readable NPZ profile: {error}") from error
    for key, values in arrays.items():
        lowest = 0.0 if key in ("decode_active_kv_tokens", "decode_context_length") else np.nextafter(0.0, 1.0)
        if values.size == 0 or not np.all(np.isfinite(values)) or float(values.min()) < lowest:
            raise ConfigError(f"latency table {path}: {key} is empty or holds a value that is not finite and positive")
    return arrays
