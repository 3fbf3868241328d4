"""The run record: what became of every request, step and decision, as parquet in one folder.

Writing is on the replay's hot path: rows are plain tuples until there are enough for a row group, and memory stays
bounded by the requests in flight plus one window. Nothing here may compute a metric of its own (reports/metrics.py),
and nothing but `RunRecord.frame`, which is for notebooks, may import pandas.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from policies.errors import ConfigError
from policies.frozen import frozen
from reports import metrics
from reports.columns import F64, ColumnFile, Columns, numbers_to_arrow, text_to_arrow, to_arrow
from reports.files import held_back, whole_file
from reports.samples import STATE_NAMES, Sampler, Waits

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow.parquet import ParquetWriter

WINDOW_ROWS: Final = 65_536
"""Rows of a row group, and of what is held back for one."""

RequestRow: TypeAlias = tuple[
    int, str | None, str | None, float | None, int, int, str, str | None, int | None, int | None, float | None,
    float | None, float | None, float | None, int, int | None, int, int, float | None, float | None,
]  # fmt: skip
"""row, request_id, session_id, arrival_s, isl, osl, status, reason, worker_id, prefill_worker_id, dispatch_s, admit_s,
first_token_s, last_token_s, output_tokens, cached_tokens, readmissions, migrations, held_s, moved_s (when a prefill
worker had computed the prompt, and when a decode worker had its KV; None without a hand-off). Rows count 0, 1, 2, ...
without holes."""

StepRow: TypeAlias = tuple[
    int, str, float, float, int, int, int, int, int, int, int, int, int, int, int, float | None, float | None,
    float | None,
]  # fmt: skip
"""The columns of STEP_SCHEMA, in order."""

DecisionRow: TypeAlias = tuple[
    float, int, str | None, int | None, str | None, str | None, int | None, str | None, str | None
]
"""The columns of DECISION_SCHEMA, in order."""

_F, _I, _L, _S = pa.float64(), pa.int32(), pa.int64(), pa.string()

REQUEST_SCHEMA: Final = pa.schema(
    [
        ("row", _L), ("request_id", _S), ("session_id", _S), ("arrival_s", _F), ("isl", _I), ("osl", _I),
        ("status", _S), ("reason", _S), ("worker_id", _I), ("prefill_worker_id", _I), ("dispatch_s", _F),
        ("admit_s", _F), ("first_token_s", _F), ("last_token_s", _F), ("queue_wait_s", _F), ("ttft_s", _F),
        ("tpot_s", _F), ("e2e_s", _F), ("output_tokens", _I), ("cached_tokens", _I), ("readmissions", _I),
        ("migrations", _I), ("held_s", _F), ("moved_s", _F),
        ("router_wait_s", _F), ("retry_after_s", _F),
    ]
)  # fmt: skip
STEP_SCHEMA: Final = pa.schema(
    [
        ("worker_id", _I), ("kind", _S), ("start_s", _F), ("end_s", _F), ("steps", _I), ("decodes", _I),
        ("ctx_tokens", _L), ("prefills", _I), ("prefill_tokens", _I), ("running", _I), ("waiting", _I),
        ("active_blocks", _I), ("cached_blocks", _I), ("preempted", _I), ("gap_tokens", _I), ("gap0_s", _F),
        ("gap1_s", _F), ("gap2_s", _F),
    ]
)  # fmt: skip
DECISION_SCHEMA: Final = pa.schema(
    [
        ("at_s", _F), ("row", _L), ("request_id", _S), ("worker_id", _I), ("mode", _S), ("rule", _S),
        ("overlap_blocks", _I), ("reason", _S), ("candidates", _S),
    ]
)  # fmt: skip
SAMPLE_SCHEMA: Final = pa.schema([("at_s", _F), *((name, _I) for name in STATE_NAMES), ("step_s", _F)])

AT, WORKER, WAITING = (SAMPLE_SCHEMA.get_field_index(name) for name in ("at_s", "worker_id", "waiting"))

REQUEST_COLUMNS: Final = tuple(REQUEST_SCHEMA.names)
STEP_COLUMNS: Final = tuple(STEP_SCHEMA.names)
DECISION_COLUMNS: Final = tuple(DECISION_SCHEMA.names)

DERIVED_COLUMNS: Final = ("queue_wait_s", "router_wait_s", "ttft_s", "tpot_s", "e2e_s")
SPARSE_COLUMN: Final = "retry_after_s"
GIVEN_COLUMNS: Final = tuple(name for name in REQUEST_COLUMNS if name not in (*DERIVED_COLUMNS, SPARSE_COLUMN))

STATUSES: Final = ("completed", "rejected", "cancelled", "failed", "open")

REQUESTS, STEPS, DECISIONS, SAMPLES = "requests.parquet", "steps.parquet", "decisions.parquet", "samples.parquet"
TableName: TypeAlias = Literal["requests", "steps", "decisions", "samples"]
TABLES: Final[Mapping[str, str]] = {
    "requests": REQUESTS, "steps": STEPS, "decisions": DECISIONS, "samples": SAMPLES
}  # fmt: skip
REPORT_JSON, REPORT_HTML, RUN_JSON, PERFETTO = "report.json", "report.html", "run.json", "perfetto.json"
OWN_FILES: Final = (REQUESTS, STEPS, DECISIONS, SAMPLES, REPORT_JSON, REPORT_HTML, RUN_JSON, PERFETTO)
"""What this room writes into a run folder. A new run removes all of it first, so that no part of an old run stays."""


class _Table:
    """One parquet file, written a row group at a time; the file exists, with its schema, from the start."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        from pyarrow import parquet

        floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        # Measured on 60,000 step rows: zstd 1 with split bytes for floats takes 9 ms for 1.2 MB; snappy 6 ms for
        # 1.5 MB; the writer's defaults 28 ms for 1.9 MB.
        self._writer: ParquetWriter = parquet.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=texts,
            use_byte_stream_split=floats,
            write_statistics=False,
        )
        self.schema = schema

    def write(self, columns: Mapping[str, pa.Array]) -> None:
        arrays = [columns[name] for name in self.schema.names]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.schema))

    def close(self) -> None:
        self._writer.close()


class RunWriter:
    """Takes the rows of a run and keeps them on disk.

    Put finished requests into `requests` (by row, in any order), append to `steps` and `decisions`, call `spill` now
    and then, and `close` at the end. Until `finish_run` says otherwise, run.json calls the run partial.

    An earlier run in the folder is replaced: at once if it is partial, by `close` if it is complete, so that `discard`
    can still leave it as it was.
    """

    def __init__(self, folder: Path, *, others: Sequence[str] = ()) -> None:
        """Create the folder, or take one that is empty or holds a run; ConfigError for any other.

        `others` are names of files beside this room's that a run has; those of an earlier run go with it.
        """
        self.folder = folder
        self._replaced = (*OWN_FILES, *others)
        self._keeps = _holds_complete_run(folder)  # an earlier run that stays until `close`
        self._made = not folder.exists()
        self._placed: list[str] = []
        self._started = _now()
        self.requests: dict[int, RequestRow] = {}
        self.retry_after_s: dict[int, float] = {}
        self.steps: list[StepRow] = []
        self.decisions: list[DecisionRow] = []
        self._next_row = 0  # first row that is not written yet
        self._ready_to = 0  # rows from _next_row up to here are all in `requests`
        self._sampler = Sampler()
        self._waits = Waits()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._keeps:
                self._begin()
            self._requests = _Table(self.place(REQUESTS), REQUEST_SCHEMA)
            self._steps = _Table(self.place(STEPS), STEP_SCHEMA)
            self._decisions = _Table(self.place(DECISIONS), DECISION_SCHEMA)
        except OSError as why:
            raise _unwritable(folder, why) from None

    def place(self, name: str) -> Path:
        """Where to write the run's file `name`: under its name, or beside it until `close` has replaced a whole run."""
        if not self._keeps:
            return self.folder / name
        self._placed.append(name)
        return self._part(name)

    @property
    def can_discard(self) -> bool:
        """Whether there is a complete earlier run that `discard` would leave as it was."""
        return self._keeps

    def discard(self) -> None:
        """Drop this run instead of closing it; the earlier run stays."""
        assert self._keeps, "nothing to go back to"
        for table in (self._requests, self._steps, self._decisions):
            table.close()
        for name in self._placed:
            self._part(name).unlink(missing_ok=True)

    def undo(self) -> None:
        """Leave nothing of a run that was refused before it began."""
        if self._keeps:
            self.discard()
            return
        for table in (self._requests, self._steps, self._decisions):
            table.close()
        for name in self._replaced:
            (self.folder / name).unlink(missing_ok=True)
        if self._made:
            self.folder.rmdir()

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}.part"

    def _begin(self) -> None:
        """Nothing of an earlier run stays, and the folder is that of a run under way."""
        for name in self._replaced:
            (self.folder / name).unlink(missing_ok=True)
        write_run_state(self.folder, RunState(state="partial", started=self._started))

    def spill(self) -> None:
        """Write what fills a row group; next to free when nothing does. Ctrl-C waits: no row is written twice."""
        if len(self.requests) >= WINDOW_ROWS:
            with held_back():
                self._spill_requests()
        if len(self.steps) >= WINDOW_ROWS:
            with held_back():
                self._write_steps()
        if len(self.decisions) >= WINDOW_ROWS:
            with held_back():
                self._write_decisions()

    def close(self) -> None:
        """Write everything that is left, and samples.parquet. The rows handed over so far are all kept."""
        left = sorted(self.requests)
        for low in range(0, len(left), WINDOW_ROWS):
            self._write_requests([self.requests.pop(row) for row in left[low : low + WINDOW_ROWS]])
        self._write_steps()
        self._write_decisions()
        try:
            for table in (self._requests, self._steps, self._decisions):
                table.close()
            if self._keeps:
                self._keeps = False
                self._begin()
                for name in self._placed:
                    self._part(name).replace(self.folder / name)
            self._write_samples()
        except OSError as why:
            raise _unwritable(self.folder, why) from None

    def _spill_requests(self) -> None:
        waiting, ready = self.requests, self._ready_to
        while ready in waiting:
            ready += 1
        self._ready_to = ready
        while ready - self._next_row >= WINDOW_ROWS:
            rows = range(self._next_row, self._next_row + WINDOW_ROWS)
            self._write_requests([waiting[row] for row in rows])
            self._next_row = rows.stop
            for row in rows:
                del waiting[row]

    def _write_requests(self, rows: Sequence[RequestRow]) -> None:
        given = dict(zip(GIVEN_COLUMNS, zip(*rows, strict=True), strict=True))
        numbers = {
            name: np.array(values, dtype=np.float64)
            for name, values in given.items()
            if not pa.types.is_string(REQUEST_SCHEMA.field(name).type)
        }
        completed = np.array([status == "completed" for status in given["status"]])
        numbers |= derived_columns(numbers, completed)
        numbers[SPARSE_COLUMN] = self._retries(given["row"])
        self._waits.add(numbers)
        arrays = {name: numbers_to_arrow(column, REQUEST_SCHEMA.field(name).type) for name, column in numbers.items()}
        arrays |= {name: text_to_arrow(values) for name, values in given.items() if name not in numbers}
        self._put(self._requests, arrays)

    def _retries(self, rows: Sequence[object]) -> F64:
        """When whoever was refused may come again, by row; most were not."""
        told = self.retry_after_s
        if not told:
            return np.full(len(rows), np.nan)
        return np.array([told.pop(row, np.nan) for row in rows], dtype=np.float64)  # type: ignore[call-overload]

    def _write_steps(self) -> None:
        if not self.steps:
            return
        given = dict(zip(STEP_COLUMNS, zip(*self.steps, strict=True), strict=True))
        kinds: tuple[str, ...] = given.pop("kind")
        numbers = {name: np.array(values, dtype=np.float64) for name, values in given.items()}
        self._sampler.add(numbers, np.array([kind == "gap" for kind in kinds]))
        arrays = {name: numbers_to_arrow(column, STEP_SCHEMA.field(name).type) for name, column in numbers.items()}
        self._put(self._steps, {**arrays, "kind": text_to_arrow(kinds)})
        self.steps.clear()  # the same list object: engines hold on to its append

    def _write_decisions(self) -> None:
        if not self.decisions:
            return
        given = zip(DECISION_SCHEMA, zip(*self.decisions, strict=True), strict=True)
        self._put(self._decisions, {field.name: to_arrow(values, field.type) for field, values in given})
        self.decisions.clear()

    def _write_samples(self) -> None:
        table = _Table(self.folder / SAMPLES, SAMPLE_SCHEMA)
        columns = np.ascontiguousarray(self._sampler.rows().T)
        columns[WAITING] = self._waits.at(columns[WORKER], columns[AT])
        pairs = zip(SAMPLE_SCHEMA, columns, strict=True)
        table.write({field.name: numbers_to_arrow(column, field.type) for field, column in pairs})
        table.close()

    def _put(self, table: _Table, columns: Mapping[str, pa.Array]) -> None:
        try:
            table.write(columns)
        except OSError as why:
            raise _unwritable(self.folder, why) from None


def derived_columns(given: Mapping[str, F64], completed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> dict[str, F64]:
    """The latencies of requests from their time stamps.

    TTFT stands for whatever produced a first token, queue wait for whatever was admitted, router wait for whatever was
    dispatched; time per token and
    end-to-end latency belong to completed requests alone.
    """
    arrival, first, last = given["arrival_s"], given["first_token_s"], given["last_token_s"]
    return {
        "queue_wait_s": metrics.queue_wait_s(arrival, given["admit_s"]),
        "router_wait_s": metrics.router_wait_s(arrival, given["dispatch_s"]),
        "ttft_s": metrics.ttft_s(arrival, first),
        "tpot_s": np.where(completed, metrics.tpot_s(first, last, given["output_tokens"]), np.nan),
        "e2e_s": np.where(completed, metrics.e2e_s(arrival, last), np.nan),
    }


def _holds_complete_run(folder: Path) -> bool:
    """Whether a complete run lies there; ConfigError for a folder with files that are no run."""
    try:
        if not folder.is_dir() or next(folder.iterdir(), None) is None:
            return False
        return read_run_state(folder).state == "complete"
    except ConfigError:
        raise ConfigError(
            f"{folder}: has files and no run (no run.json of ours), so nothing is written there; choose a new or empty"
            " folder with --out"
        ) from None
    except OSError as why:
        raise _unwritable(folder, why) from None


def _unwritable(folder: Path, why: OSError) -> ConfigError:
    text = why.strerror or str(why).splitlines()[0]
    return ConfigError(f"{folder}: cannot write the run there ({text}); choose another folder with --out")


# --- run.json: all that may differ between equal runs -----------------------------------------------------------------


@frozen
class RunState:
    """How a run went on the machine that made it; null while it is not over.

    `asked_requests` is how many requests it was to run, where that is known before the end of the trace.
    """

    state: Literal["complete", "partial"]
    started: str
    cpu_s: float | None = None
    wall_s: float | None = None
    asked_requests: int | None = None


def finish_run(
    folder: Path,
    *,
    complete: bool,
    cpu_s: float,
    wall_s: float,
    asked_requests: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> RunState:
    """Say in run.json that the run is over; `complete` False keeps it partial (stopped half-way).

    `versions` adds what the caller knows, such as its own version or that of a live engine.
    """
    before = read_run_state(folder)
    state = RunState(
        state="complete" if complete else "partial",
        started=before.started,
        cpu_s=cpu_s,
        wall_s=wall_s,
        asked_requests=asked_requests,
    )
    write_run_state(folder, state, versions or {})
    return state


def write_run_state(folder: Path, state: RunState, versions: Mapping[str, str] | None = None) -> None:
    """Write run.json, whole or not at all."""
    host = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
    ours = {"python": platform.python_version(), "numpy": np.__version__, "pyarrow": pa.__version__}
    plain = {**asdict(state), "host": host, "versions": {**ours, **(versions or {})}}
    with whole_file(folder / RUN_JSON) as out:
        out.write(json.dumps(plain, indent=2, sort_keys=True) + "\n")


def read_run_state(folder: Path) -> RunState:
    """The state in run.json; ConfigError where it is absent or is none of ours."""
    path = folder / RUN_JSON
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        known = {name: plain[name] for name in ("state", "started", "cpu_s", "wall_s")}
        return RunState(**known, asked_requests=plain.get("asked_requests"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {folder} is no run folder") from None
    except (ValueError, KeyError, TypeError, OSError) as why:
        raise ConfigError(f"{path}: not a run.json of ours ({why}); run the replay again") from None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# --- reading ----------------------------------------------------------------------------------------------------------


class RunRecord:
    """A run folder, opened for reading. Columns are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError that lists what is missing, or names the file that cannot be read."""
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such run folder; `twin replay` prints where it wrote")
        missing = [name for name in (REQUESTS, STEPS, DECISIONS, SAMPLES, RUN_JSON) if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{folder}: not a whole run folder, without {', '.join(missing)}; run the replay again")
        self.folder = folder
        self.state = read_run_state(folder)
        self.steps = ColumnFile(folder / STEPS, coded=("kind",))
        self._requests = ColumnFile(folder / REQUESTS, coded=("status", "reason"))

    @property
    def complete(self) -> bool:
        """False for a run that was stopped half-way: what it has is kept."""
        return self.state.state == "complete"

    @property
    def requests(self) -> Columns:
        """One row per trace row, in the order of the trace."""
        return self._requests.columns()

    def request_batches(self, names: Sequence[str]) -> Iterator[Columns]:
        """The same in batches, for what needs every column of a row at once."""
        return self._requests.batches(names)

    @property
    def decisions(self) -> ColumnFile:
        return ColumnFile(self.folder / DECISIONS)

    @property
    def samples(self) -> Columns:
        return ColumnFile(self.folder / SAMPLES).columns()

    def frame(self, name: TableName) -> DataFrame:
        """A whole table of the run for a notebook; whole numbers stay whole beside nulls (Int32, Int64).

        Raises ConfigError for a name that is no table.
        """
        if name not in TABLES:
            raise ConfigError(f"a run has no table {name!r}; there are {', '.join(TABLES)}")
        import pandas
        from pyarrow import parquet

        whole = {pa.int32(): pandas.Int32Dtype(), pa.int64(): pandas.Int64Dtype()}
        frame: DataFrame = parquet.read_table(self.folder / TABLES[name]).to_pandas(types_mapper=whole.get)
        return frame
