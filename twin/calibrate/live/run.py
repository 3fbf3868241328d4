"""A live run as what each of its workers was given, and what the clients of its requests saw.

Read from the run folder alone: demand from the journal (or the trace of a simulated run that stands in for a live one),
times from the record. Whoever it was that decided does not matter here: requests go where they went.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.frozen import frozen
from reports.columns import Columns
from reports.record import RunRecord
from reports.report import Report, WorkerMeta
from traces.load import open_trace
from twin.config import Config
from twin.config_read import load
from twin.mocker.demand import Row, read_rows

JOURNAL, CONFIG_TOML = "journal.jsonl", "config.toml"


@frozen
class Part:
    """Which requests of a run count in a fit, by their place in it: the `first` so many, or every other block of
    `block` requests, beginning with the first block (neither: all of them)."""

    first: int | None = None
    block: int | None = None

    def has(self, row: int) -> bool:
        if self.block is not None:
            return row // self.block % 2 == 0
        return self.first is None or row < self.first

    def words(self) -> str:
        """What goes before the names of the runs."""
        if self.block is not None:
            return f"every other block of {self.block:,} requests of each of "
        return "" if self.first is None else f"the first {self.first:,} requests of each of "


ALL = Part()


@frozen
class Observed:
    """One request on the worker that answered it. Seconds of the run's clock; `first_s` and `last_s` are those of the
    first and the last token (None: it did not complete, and only loads the engine). `fitted`: it counts in a fit."""

    row: int
    dispatch_s: float
    isl: int
    outputs: int
    keys: tuple[int, ...] | None
    first_s: float | None
    last_s: float | None
    fitted: bool


@frozen
class ServedWorker:
    """One worker with what it was given, in order of dispatch."""

    run: str
    name: str
    group: str
    block_size: int
    total_blocks: int
    key_tokens: int | None
    requests: tuple[Observed, ...]


@frozen
class LiveRun:
    """A run: its folder, its configuration, its workers, and `left_out`: requests that no fit can use, by reason.
    `trace_rows` says how many rows its trace has of requests in the fit, and of all."""

    folder: Path
    digest: str
    config: Config
    engines: str
    workers: tuple[ServedWorker, ...]
    left_out: dict[str, int]
    trace_rows: tuple[int, int]


def read_live_run(folder: Path, part: Part = ALL) -> LiveRun:
    """A run folder with a journal; `part` of its requests counts in a fit.

    Raises ConfigError where it is none, was split between prefill and decode workers, or has no completed request.
    """
    for needed in (JOURNAL, CONFIG_TOML):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"{folder}: not a whole run folder, without {needed}; record it with twin serve --record DIR"
            )
    report, record = Report.load(folder), RunRecord(folder)
    config = load(folder / CONFIG_TOML)
    if any(Role(group.role) is not Role.MIXED for group in config.workers):
        raise ConfigError(
            f"{folder}: prefill and decode workers: its times are those of two engines and a transfer, which the fit "
            f"cannot tell apart; calibrate with a run of mixed workers"
        )
    trace = open_trace(folder / JOURNAL)
    rows = {row.request_id: row for row in read_rows(trace)}
    left_out = dict(trace.skipped)
    seen = _Requests(record.requests, rows, left_out, part)
    workers = tuple(_worker(folder.name, meta, trace.info.hash_block_tokens, seen) for meta in report.meta.workers)
    if not any(request.fitted for worker in workers for request in worker.requests):
        raise ConfigError(f"{folder}: no request completed on one worker, so there is nothing to fit")
    return LiveRun(
        folder=folder,
        digest=hashlib.sha256((folder / JOURNAL).read_bytes()).hexdigest()[:12],
        config=config,
        engines=", ".join(sorted({line.split(": ")[1].split(",")[0] for line in report.meta.cluster if ": " in line})),
        workers=workers,
        left_out=left_out,
        trace_rows=seen.trace_rows,
    )


class _Requests:
    """The requests of a run by worker."""

    def __init__(self, columns: Columns, rows: dict[str, Row], left_out: dict[str, int], part: Part) -> None:
        self.by_worker: dict[int, list[Observed]] = {}
        codes, labels = columns.codes("status")
        times = [columns.floats(name).tolist() for name in ("dispatch_s", "first_token_s", "last_token_s")]
        workers, moves = columns.ints("worker_id", null=-1).tolist(), columns.ints("migrations", null=0).tolist()
        fitted = 0
        for at, name in enumerate(columns.texts("request_id")):
            row, worker = rows.get(str(name)), workers[at]
            fitted += row is not None and part.has(at)
            dispatch_s, first_s, last_s = (values[at] for values in times)
            if row is None or worker < 0 or math.isnan(dispatch_s):
                continue  # counted by the reader of the journal, or nobody's work
            whole = labels[codes[at]] == "completed" and not math.isnan(first_s)
            if moves[at] or not whole:
                reason = "sent to more than one worker" if moves[at] else f"ended {labels[codes[at]]}"
                left_out[reason] = left_out.get(reason, 0) + 1
            whole = whole and not moves[at]
            self.by_worker.setdefault(worker, []).append(
                Observed(
                    row=at,
                    dispatch_s=dispatch_s,
                    isl=row.isl,
                    outputs=row.osl,
                    keys=None if row.keys is None else tuple(row.keys),
                    first_s=first_s if whole else None,
                    last_s=last_s if whole else None,
                    fitted=whole and part.has(at),
                )
            )
        self.trace_rows = (fitted, len(rows))


def _worker(run: str, meta: WorkerMeta, key_tokens: int | None, seen: _Requests) -> ServedWorker:
    if meta.block_size is None or meta.total_blocks is None:
        raise ConfigError(f"{run}: worker {meta.name} did not tell the size of its KV pool; record the run again")
    return ServedWorker(
        run=run,
        name=meta.name,
        group=meta.group,
        block_size=meta.block_size,
        total_blocks=meta.total_blocks,
        key_tokens=key_tokens,
        requests=tuple(sorted(seen.by_worker.get(meta.worker_id, ()), key=lambda one: (one.dispatch_s, one.row))),
    )


def same_demand(runs: Sequence[LiveRun]) -> None:
    """Repeats are runs of one configuration. Raises ConfigError where their groups differ."""
    first = runs[0]
    for other in runs[1:]:
        if _groups(other.config) != _groups(first.config):
            raise ConfigError(
                f"{other.folder}: other groups of workers than {first.folder}; give repeats of one configuration"
            )


def _groups(config: Config) -> Iterable[object]:
    return [(group.name, group.count, group.engine) for group in config.workers]
