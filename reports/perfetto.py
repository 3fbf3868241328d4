"""A run as a Chrome trace, to be opened in ui.perfetto.dev: workers as processes, steps as slices, requests as
asynchronous slices with their phases, running and KV use as counters.

Events are written as they are read, so a large run needs no more memory than a small one. Times are microseconds of
virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from policies.errors import ConfigError
from reports.columns import Columns
from reports.files import whole_file
from reports.record import PERFETTO, RunRecord
from reports.report import StartMeta

STEP_NAMES: Final = (
    "worker_id", "kind", "start_s", "end_s", "steps", "decodes", "ctx_tokens", "prefills", "prefill_tokens", "running",
    "waiting", "active_blocks", "preempted",
)  # fmt: skip
REQUEST_NAMES: Final = (
    "row", "request_id", "status", "worker_id", "arrival_s", "isl", "admit_s", "first_token_s", "last_token_s",
    "output_tokens", "cached_tokens", "readmissions", "held_s", "moved_s",
)  # fmt: skip

COLOURS: Final = {
    "prefill": "rail_response",
    "decode": "good",
    "mixed": "rail_animation",
    "preempting": "terrible",
}
"""Names of the trace viewer's own palette, by what a step does."""

PHASES: Final = {"queue": "arrival_s", "prefill": "admit_s", "decode": "first_token_s"}
"""When each phase of a request begins; the last one ends with the last token."""

HANDED_OVER: Final = {"queue": "arrival_s", "prefill": "admit_s", "hand-off": "held_s", "decode": "moved_s"}
"""The same where a prefill worker held the prompt for a decode worker."""

FRONTEND: Final = 1_000_000_000
"""Process id of requests that no worker took; larger than any worker's."""

STEPS_THREAD: Final = 1
STARTS_THREAD: Final = 2

Event = Mapping[str, object]


def write_perfetto(folder: Path, names: Mapping[int, str] | None = None, starts: Sequence[StartMeta] = ()) -> Path:
    """Write perfetto.json into the run folder and return its path; `names` are the workers' names by id, `starts` those
    that came up in the run."""
    record = RunRecord(folder)
    path = folder / PERFETTO
    try:
        with whole_file(path) as out:
            out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for place, event in enumerate(_events(record, names or {}, starts)):
                out.write((",\n" if place else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
            out.write("\n]}\n")
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror})") from None
    return path


def _events(record: RunRecord, names: Mapping[int, str], starts: Sequence[StartMeta]) -> Iterator[Event]:
    seen: set[int] = set()
    coming_up = (event for start in starts for event in _start_events(start))
    for event in chain(_all_step_events(record), coming_up, _all_request_events(record)):
        seen.add(int(str(event["pid"])))
        yield event
    for worker_id in sorted(seen):
        name = "frontend" if worker_id == FRONTEND else names.get(worker_id, f"worker {worker_id}")
        yield {"ph": "M", "pid": worker_id, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": worker_id, "name": "process_sort_index", "args": {"sort_index": worker_id}}
        if worker_id != FRONTEND:
            yield {"ph": "M", "pid": worker_id, "tid": STEPS_THREAD, "name": "thread_name", "args": {"name": "steps"}}
    for worker_id in sorted({start.worker_id for start in starts}):
        yield {"ph": "M", "pid": worker_id, "tid": STARTS_THREAD, "name": "thread_name", "args": {"name": "start"}}


# --- steps ------------------------------------------------------------------------------------------------------------


def _all_step_events(record: RunRecord) -> Iterator[Event]:
    """A slice per step or leap, and counters with the state in it; they read 0 while a worker has nothing to do."""
    idle_from: dict[int, float] = {}
    for batch in record.steps.batches(STEP_NAMES):
        columns = {name: batch.floats(name).tolist() for name in STEP_NAMES if name != "kind"}
        for place, kind in enumerate(batch.texts("kind")):
            if kind == "gap":
                continue
            row = {name: column[place] for name, column in columns.items()}
            worker_id = int(row["worker_id"])
            if idle_from.get(worker_id, row["start_s"]) < row["start_s"]:
                yield from _counters(worker_id, idle_from[worker_id], _IDLE)
            yield _step(row, str(kind))
            yield from _counters(worker_id, row["start_s"], row)
            idle_from[worker_id] = row["end_s"]
    for worker_id, at_s in sorted(idle_from.items()):
        yield from _counters(worker_id, at_s, _IDLE)


_IDLE: Final = {"running": 0.0, "waiting": 0.0, "active_blocks": 0.0}


def _counters(worker_id: int, at_s: float, row: Mapping[str, float]) -> Iterator[Event]:
    load = {"running": int(row["running"]), "waiting": int(row["waiting"])}
    for name, values in (("requests", load), ("KV blocks", {"active": int(row["active_blocks"])})):
        yield {"ph": "C", "pid": worker_id, "ts": _us(at_s), "name": name, "args": values}


def _step(row: Mapping[str, float], kind: str) -> Event:
    does = _what_it_does(row)
    name = f"{does} x{int(row['steps'])}" if kind == "leap" else does
    shown = ("steps", "decodes", "ctx_tokens", "prefills", "prefill_tokens", "preempted")
    return {
        "ph": "X",
        "pid": int(row["worker_id"]),
        "tid": STEPS_THREAD,
        "ts": _us(row["start_s"]),
        "dur": _us(row["end_s"] - row["start_s"]),
        "name": name,
        "cat": kind,
        "cname": COLOURS[does],
        "args": {key: int(row[key]) for key in shown},
    }


def _what_it_does(row: Mapping[str, float]) -> str:
    if row["preempted"]:
        return "preempting"
    if row["prefills"]:
        return "mixed" if row["decodes"] else "prefill"
    return "decode"


# --- starts -----------------------------------------------------------------------------------------------------------


def _start_events(start: StartMeta) -> Iterator[Event]:
    """Boot, weights and warm-up of a worker that came up, or one slice where they are not told apart; none for what was
    broken off."""
    marks = [start.ordered_s, start.load_from_s, start.loaded_s, start.up_s]
    stages = list(zip(("boot", "weights", "warm-up"), pairwise(marks), strict=True))
    if start.load_from_s is None:
        stages = [("start", (start.ordered_s, start.up_s))]
    for name, (begin, end) in stages:
        if begin is None or end is None:
            continue
        yield {
            "ph": "X",
            "pid": start.worker_id,
            "tid": STARTS_THREAD,
            "ts": _us(begin),
            "dur": _us(end - begin),
            "name": name,
            "cat": "start",
            "args": {"bytes": start.weight_bytes, "over": start.over} if name == "weights" else {},
        }


# --- requests ---------------------------------------------------------------------------------------------------------


def _all_request_events(record: RunRecord) -> Iterator[Event]:
    for batch in record.request_batches(REQUEST_NAMES):
        yield from _request_events(batch)


def _request_events(batch: Columns) -> Iterator[Event]:
    texts = {name: batch.texts(name) for name in ("request_id", "status")}
    columns = {name: batch.floats(name).tolist() for name in REQUEST_NAMES if name not in texts}
    for place in range(batch.rows):
        row = {name: column[place] for name, column in columns.items()}
        if not np.isnan(row["arrival_s"]):
            yield from _request(row, texts["request_id"][place], str(texts["status"][place]))


def _request(row: Mapping[str, float], request_id: str | None, status: str) -> Iterator[Event]:
    """One slice from arrival to the last thing known of the request, its phases inside it."""
    name = request_id or f"row {int(row['row'])}"
    phases = PHASES if np.isnan(row["held_s"]) else HANDED_OVER
    marks = [row[at] for at in phases.values()]
    end = np.nanmax([*marks, row["last_token_s"]])
    marks.append(row["last_token_s"])
    common = {
        "cat": "request",
        "pid": FRONTEND if np.isnan(row["worker_id"]) else int(row["worker_id"]),
        "id": int(row["row"]),
    }
    shown = {key: int(row[key]) for key in ("isl", "output_tokens", "cached_tokens", "readmissions") if row[key] >= 0}
    yield {**common, "ph": "b", "ts": _us(marks[0]), "name": name, "args": {"status": status, **shown}}
    for phase, (start, stop) in zip(phases, pairwise(marks), strict=True):
        if not np.isnan(start):
            yield {**common, "ph": "b", "ts": _us(start), "name": phase}
            yield {**common, "ph": "e", "ts": _us(end if np.isnan(stop) else stop), "name": phase}
    yield {**common, "ph": "e", "ts": _us(float(end)), "name": name}


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond: what the viewers read."""
    return round(seconds * 1e6, 3)
