"""Reads a table of measured serving runs (CSV or Parquet): one row is one run with its mean TTFT and TPOT.

Rows that cannot be priced are left out and counted by reason. Nothing is guessed for a column that is missing, except
what an engine does by default.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.calibrate.columns import Columns, columns_of
from twin.perf.formats import KV_BYTES, WEIGHT_BYTES
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.memory import MEMORY_SHARE, Placement
from twin.perf.models import find_model

MODEL_ALIASES = {"llama3-8b": "llama-3.1-8b", "llama3-70b": "llama-3.1-70b", "qwen3-235b": "qwen3-235b-a22b",
                 "qwen3.5-397b": "qwen3.5-397b-a17b"}  # fmt: skip
"""Names of models in the public tables, where they are not ours."""
FP4 = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4"}
"""Which 4-bit format a model is released in; others NVFP4."""

Cells: TypeAlias = Mapping[str, object]


@frozen
class Measurement:
    """One measured run. Times are means over its requests; None: not measured, or not to be used."""

    name: str
    group: str  # rows of one configuration; folds never split it
    client: str  # who measured: such runs share a path outside the engine
    engine: str
    engine_version: str
    placed: Placement
    isl: int
    osl: int
    users: int
    prompts: int | None
    length_ratio: float | None  # lengths are uniform in [ratio L, L]; None: not known
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    poll_steps: int
    wait_steps: int
    wait_share: float
    ttft_s: float | None
    tpot_s: float | None

    @property
    def model(self) -> str:
        return self.placed.model.name

    @property
    def family(self) -> str:
        return self.placed.gpu.family


@frozen
class Table:
    """The rows that can be used, and how many others there are, by reason. `statistic` is what a time is."""

    name: str
    digest: str
    rows: tuple[Measurement, ...]
    left_out: Mapping[str, int]
    statistic: str = "mean over the requests of a run"

    def count(self, metric: str) -> int:
        """Rows that have a "ttft" or "tpot"."""
        return sum(getattr(row, f"{metric}_s") is not None for row in self.rows)


def read_table(path: Path, given: Mapping[str, str] | None = None) -> Table:
    """The measurements of a file; `given` says which column is what. Raises `ConfigError` with file, row and column."""
    cells = _cells(path)
    columns = columns_of(cells[0].keys() if cells else (), given or {}, path.name)
    rows: list[Measurement] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(cells, start=1):
        reason = _unfit(row, columns)
        if reason:
            left_out[reason] += 1
            continue
        try:
            rows.append(_measurement(row, columns, number))
        except ConfigError as error:
            left_out[str(error).split(" (known:")[0]] += 1
    if not rows:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(3)) or "it is empty"
        raise ConfigError(f"{path}: no row can be used: {why}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return Table(name=path.name, digest=digest, rows=tuple(rows), left_out=dict(left_out))


def _cells(path: Path) -> Sequence[Cells]:
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = csv.read_csv(path) if path.suffix.lower() == ".csv" else parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: cannot be read as a table ({str(error).splitlines()[0]}); give .csv or .parquet"
        ) from None
    if not table.num_rows:
        raise ConfigError(f"{path}: has no rows")
    rows: list[dict[str, object]] = table.to_pylist()
    return rows


def _unfit(row: Cells, columns: Columns) -> str | None:
    """Why a row is not to be used, as it says itself."""
    name = columns.names.get("speculation")
    if name and _text(row.get(name)) not in ("", "none"):
        return "speculative decoding on"
    if all(_time(row, columns, metric) is None for metric in ("ttft", "tpot")):
        return "neither time to be used"
    return None


def _measurement(row: Cells, columns: Columns, number: int) -> Measurement:
    def cell(field: str) -> object:
        return row.get(columns.names[field]) if field in columns.names else None

    placed = _placement(cell("model"), cell("gpu"), cell("weights"), cell("kv"), cell)
    replicas = max(1, _whole(cell("replicas")) or 1)
    users = _whole(cell("users")) or _whole(cell("concurrency"), replicas)
    engine = _text(cell("engine"))
    if engine not in MEMORY_SHARE:
        raise ConfigError(f"engine {engine!r}")
    isl, osl = _whole(cell("isl")), _whole(cell("osl"))
    if not users or not isl or not osl:
        raise ConfigError("without concurrency or lengths")
    layout = placed.layout.label().replace(" ", "/")
    group = f"{placed.model.name}/{placed.gpu.name}/{engine}/{placed.weights}/{layout}"
    return Measurement(
        name=_text(cell("id")) or f"row {number}",
        group=_text(cell("group")) or group,
        client=_client(_text(cell("client"))),
        engine=engine,
        engine_version=_text(cell("engine_version")),
        placed=placed,
        isl=isl,
        osl=osl,
        users=users,
        prompts=_whole(cell("prompts"), replicas),
        length_ratio=_ratio(cell("length_ratio"), known=_whole(cell("prompts")) is not None),
        max_num_seqs=_whole(cell("max_num_seqs")),
        max_num_batched_tokens=_whole(cell("max_num_batched_tokens")),
        poll_steps=_whole(cell("poll_steps")) or 1,
        wait_steps=_whole(cell("wait_steps")) or 0,
        wait_share=_number(cell("wait_share")) or 0.0,
        ttft_s=_time(row, columns, "ttft"),
        tpot_s=_time(row, columns, "tpot"),
    )


def _placement(model: object, gpu: object, weights: object, kv: object, cell: object) -> Placement:
    name = MODEL_ALIASES.get(_text(model), _text(model))
    find = cell if callable(cell) else (lambda field: None)
    ways = {way: _whole(find(way)) or 1 for way in ("tp", "pp", "dp", "ep")}
    held = _text(weights)
    placed = Placement(
        model=find_model(name),
        gpu=find_gpu(_text(gpu)),
        layout=Layout(**ways),
        weights=FP4.get(name, "nvfp4") if held == "fp4" else held,
        kv=_text(kv) or "bf16",
    )
    for what, value, known in (("weights", placed.weights, WEIGHT_BYTES), ("KV", placed.kv, KV_BYTES)):
        if value not in known:
            raise ConfigError(f"{what} in {value!r}")
    if placed.layout.pp > 1:
        raise ConfigError("pipeline stages")
    placed.layout.check(placed.model)
    return placed


def _client(source: str) -> str:
    """Runs that were measured in the same way: the source without its date."""
    words = source.split("_")
    return "_".join(word for word in words if not word[:1].isdigit()) or "unnamed"


def _ratio(value: object, *, known: bool) -> float | None:
    """A ratio counts where the protocol is told; of other runs the lengths are not known."""
    return _number(value) if known else None


def _time(row: Cells, columns: Columns, metric: str) -> float | None:
    if metric not in columns.names:
        return None
    use = columns.names.get(f"use_{metric}")
    value = _number(row.get(columns.names[metric]))
    if value is None or value <= 0 or (use and not row.get(use)):
        return None
    return value * columns.unit_s[metric]


def _text(value: object) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def _number(value: object) -> float | None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def _whole(value: object, divisor: int = 1) -> int | None:
    number = _number(value)
    return None if number is None else int(number / divisor)
