"""The slowest requests of a run, each with the part of its time that made it slow.

It ranks and explains with the time stamps of the record; it must not guess at causes that the record does not hold.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from reports import text
from reports.columns import F64, Columns
from reports.report import Report

SLOWEST_TTFT: Final = 20
SLOWEST_TPOT: Final = 10


class RankedTable(NamedTuple):
    """A titled table of text cells; the last column holds words."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class _Requests:
    """The columns that a ranking needs, read once."""

    def __init__(self, requests: Columns, report: Report) -> None:
        names = (
            "row", "arrival_s", "isl", "output_tokens", "worker_id", "dispatch_s", "admit_s", "first_token_s", "ttft_s",
            "tpot_s", "e2e_s", "cached_tokens", "readmissions", "migrations",
        )  # fmt: skip
        self._columns = {name: requests.floats(name) for name in names}
        self._ids = requests.texts("request_id")
        self._workers = {worker.worker_id: worker.name for worker in report.workers}

    def column(self, name: str) -> F64:
        return self._columns[name]

    def number(self, name: str, place: int) -> float | None:
        value = float(self._columns[name][place])
        return None if np.isnan(value) else value

    def count(self, name: str, place: int) -> str:
        value = self.number(name, place)
        return text.NA if value is None else text.count(value)

    def time(self, name: str, place: int) -> str:
        return text.time(self.number(name, place))

    def name(self, place: int) -> str:
        return self._ids[place] or f"row {self.count('row', place)}"

    def worker(self, place: int) -> str:
        value = self.number("worker_id", place)
        return text.NA if value is None else self._workers.get(int(value), f"worker {int(value)}")


def slowest_tables(requests: Columns, report: Report) -> list[RankedTable]:
    """The requests with the longest TTFT and those with the longest time per token; an empty ranking is left out."""
    columns = _Requests(requests, report)
    tables = [_by_ttft(columns), _by_tpot(columns)]
    return [table for table in tables if table.rows]


def longest(values: F64, count: int) -> list[int]:
    """Places of the largest defined values, largest first, ties by row."""
    known = np.flatnonzero(~np.isnan(values))
    if len(known) > count:  # all that can be among the first, ties included
        known = known[values[known] >= np.partition(values[known], -count)[-count]]
    return [int(place) for place in known[np.argsort(-values[known], kind="stable")][:count]]


def _by_ttft(columns: _Requests) -> RankedTable:
    rows = [
        [
            columns.name(place),
            columns.time("ttft_s", place),
            columns.time("e2e_s", place),
            columns.time("arrival_s", place),
            columns.count("isl", place),
            columns.count("cached_tokens", place),
            columns.count("output_tokens", place),
            columns.worker(place),
            _why_late(columns, place),
        ]
        for place in longest(columns.column("ttft_s"), SLOWEST_TTFT)
    ]
    names = ["request", "TTFT", "E2E", "arrived at", "prompt tokens", "cached", "output tokens", "worker", "why"]
    return RankedTable(f"The {len(rows)} requests that waited longest for their first token", names, rows)


def _why_late(columns: _Requests, place: int) -> str:
    """The parts of TTFT, largest first, and what disturbed it."""
    arrival, first = columns.number("arrival_s", place), columns.number("first_token_s", place)
    dispatch, admit = columns.number("dispatch_s", place), columns.number("admit_s", place)
    if arrival is None or first is None:
        return ""
    dispatch = arrival if dispatch is None else dispatch
    admit = dispatch if admit is None else admit
    parts = [
        (dispatch - arrival, "before it was sent to a worker"),
        (admit - dispatch, "in the worker's queue"),
        (first - admit, "computing the prompt"),
    ]
    shown = [
        f"{text.time(part)} {what}" for part, what in sorted(parts, reverse=True) if part > 0.01 * (first - arrival)
    ]
    return "; ".join([*shown, *_disturbed(columns, place)])


def _disturbed(columns: _Requests, place: int) -> list[str]:
    times = {"readmissions": "preempted", "migrations": "migrated"}
    counts = {what: columns.number(name, place) or 0.0 for name, what in times.items()}
    return [f"{what} {int(n)} time{'s' if n > 1 else ''}" for what, n in counts.items() if n]


def _by_tpot(columns: _Requests) -> RankedTable:
    rows = [
        [
            columns.name(place),
            columns.time("tpot_s", place),
            columns.time("e2e_s", place),
            columns.time("arrival_s", place),
            columns.count("isl", place),
            columns.count("output_tokens", place),
            columns.worker(place),
            "; ".join(_disturbed(columns, place)),
        ]
        for place in longest(columns.column("tpot_s"), SLOWEST_TPOT)
    ]
    names = ["request", "TPOT", "E2E", "arrived at", "prompt tokens", "output tokens", "worker", "why"]
    return RankedTable(f"The {len(rows)} requests with the longest time per output token", names, rows)
