"""Planners on one trace, beside static counts and an oracle: one table, with the spread over seeds.

Equal comparisons give equal bytes: no clock, no host. Figures of a run come from its report; attainment by interval is
counted here from its requests, by the interval in which they arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from policies.errors import ConfigError
from policies.frozen import frozen
from reports import text
from reports.build import outcomes_of
from reports.columns import F64
from reports.files import whole_file
from reports.record import RunRecord
from reports.replicas import Series, read_series
from reports.report import Report, stable_json
from reports.sla import Sla
from reports.svg import Chart
from reports.verdict import good_requests

SCHEMA: Final = "dynatwin.plan/1"
PLAN_JSON, PLAN_HTML = "plan.json", "plan.html"


@frozen
class PlanRun:
    """One run of one way to plan: GPU-hours billed, share of requests within every limit, requests and intervals that
    missed it, cost, changes ordered, GPUs at most."""

    seed: int
    folder: str
    gpu_hours: float | None
    attainment: float | None
    missed: int
    intervals_missed: int
    cost_usd: float | None
    changes: int
    most_gpus: int
    unfinished: int


@frozen
class PlanRow:
    """One way to plan. `kind`: static, oracle or planner; `knows`: what it knows that no planner could."""

    name: str
    kind: str
    line: str
    knows: str | None
    runs: tuple[PlanRun, ...]

    def mean(self, figure: str) -> float | None:
        known = [value for value in (getattr(run, figure) for run in self.runs) if value is not None]
        return sum(known) / len(known) if known else None

    def spread(self, figure: str) -> tuple[float, float] | None:
        """From the lowest to the highest of the seeds."""
        known = [float(value) for value in (getattr(run, figure) for run in self.runs) if value is not None]
        return (min(known), max(known)) if known else None


@frozen
class PlanTable:
    """All ways on one trace. `target` is the attainment that static counts and the oracle are made to keep in each
    interval; `unreachable`: intervals in which no count that was tried does."""

    trace: str
    sla: str
    target: float
    interval_s: float
    intervals: int
    unreachable: int
    synthetic: bool
    seeds: tuple[int, ...]
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The bytes of plan.json."""
        return stable_json(self)


def by_interval(folder: Path, sla: Sla, interval_s: float, count: int) -> tuple[F64, F64]:
    """(requests, those within every limit) by the interval of their arrival."""
    requests = RunRecord(folder).requests
    arrival = requests.floats("arrival_s")
    good = good_requests(sla, outcomes_of(requests))
    known = np.isfinite(arrival)
    place = np.clip((arrival[known] / interval_s).astype(np.int64), 0, count - 1)
    every = np.bincount(place, minlength=count).astype(np.float64)
    kept = np.bincount(place, good[known], minlength=count).astype(np.float64)
    return every, kept


def share_by_interval(every: F64, kept: F64) -> F64:
    """Attainment by interval; 1 where nobody came."""
    return np.where(every > 0, kept / np.maximum(every, 1), 1.0)


def plan_run(folder: Path, named: str, seed: int, report: Report, sla: Sla, table: tuple[float, int, float]) -> PlanRun:
    """The figures of one run; `table` is the interval, how many there are, and the attainment to keep."""
    interval_s, count, target = table
    every, kept = by_interval(folder, sla, interval_s, count)
    costs = [group.cost_usd for group in report.groups if group.cost_usd is not None]
    result = report.sla
    return PlanRun(
        seed=seed,
        folder=named,
        gpu_hours=None if report.gpu_s is None else report.gpu_s / 3600,
        attainment=None if result is None else result.attainment,
        missed=int(every.sum() - kept.sum()),
        intervals_missed=int((share_by_interval(every, kept) < target).sum()),
        cost_usd=sum(costs) if costs else None,
        changes=report.planner.changes if report.planner is not None else 0,
        most_gpus=report.meta.gpus,
        unfinished=report.demand.requests - report.counts.completed,
    )


# --- for people -------------------------------------------------------------------------------------------------------

COLUMNS: Final = ("", "GPU-hours", "attainment", "intervals missed", "requests missed", "changes", "GPUs at most")


def table_rows(table: PlanTable) -> Iterator[list[str]]:
    """One row for each way to plan, with the range over seeds where there are several."""
    priced = any(row.mean("cost_usd") is not None for row in table.rows)
    for row in table.rows:
        cells = [
            row.name,
            _ranged(row, "gpu_hours", text.figures),
            _ranged(row, "attainment", text.share),
            _ranged(row, "intervals_missed", _number),
            _ranged(row, "missed", _number),
            _ranged(row, "changes", _number),
            _ranged(row, "most_gpus", _number),
        ]
        yield [*cells, _ranged(row, "cost_usd", text.figures)] if priced else cells


def table_columns(table: PlanTable) -> list[str]:
    priced = any(row.mean("cost_usd") is not None for row in table.rows)
    return [*COLUMNS, "USD"] if priced else [*COLUMNS]


def _number(value: float) -> str:
    """A count, or the mean of several."""
    return text.count(value) if value == int(value) else f"{value:,.1f}"


def _ranged(row: PlanRow, figure: str, say: Callable[[float], str]) -> str:
    mean, spread = row.mean(figure), row.spread(figure)
    if mean is None or spread is None:
        return text.NA
    low, high = say(spread[0]), say(spread[1])
    return say(mean) if low == high else f"{say(mean)} ({low} to {high})"


def plan_text(table: PlanTable, path: str) -> str:
    """The table for a terminal; its last line is `path`."""
    rows = [table_columns(table), *table_rows(table)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    seeds = f", {len(table.seeds)} seeds: mean (lowest to highest)" if len(table.seeds) > 1 else ""
    head = (
        f"{table.trace}: {table.intervals} intervals of {table.interval_s:g} s; {table.sla}, of which "
        f"{text.share(table.target)} in each interval{seeds}"
    )
    made = [f"{row.name}: {row.line}" + (f"; knows {row.knows}" if row.knows else "") for row in table.rows]
    return "\n".join([head, "", *lines, "", *made, *(f"note: {note}" for note in table.notes), "", f"report  {path}"])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One row of a table of text: the first column to the left, the others to the right."""
    first, *rest = cells
    return "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))])


def write_plan(folder: Path, table: PlanTable, *, html: bool) -> Path:
    """Write plan.json and, if wanted, the page; returns the path of what a person opens."""
    path = folder / PLAN_JSON
    try:
        with whole_file(path) as out:
            out.write(table.to_json())
        return path if not html else _write_page(folder, table)
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror}); choose another folder with --out") from None


def _write_page(folder: Path, table: PlanTable) -> Path:
    from reports.html import Toned, page_charts, page_environment

    badges = [Toned("SIMULATED", "note")]
    badges.append(Toned("SYNTHETIC TRACE", "note") if table.synthetic else Toned("RECORDED TRACE", "soft"))
    page = page_environment().get_template("plan.html.j2")
    path = folder / PLAN_HTML
    with whole_file(path) as out:
        out.write(
            page.render(
                title=f"Planners on {table.trace}",
                badges=badges,
                facts=[
                    ("trace", f"{table.trace}, {table.intervals} intervals of {table.interval_s:g} s"),
                    ("limits", f"{table.sla}, kept by {text.share(table.target)} of the requests of each interval"),
                    ("seeds", ", ".join(map(str, table.seeds))),
                ],
                notes=table.notes,
                charts=page_charts(list(_charts(folder, table))),
                columns=table_columns(table),
                rows=list(table_rows(table)),
                ways=[[row.name, row.line, row.knows or ""] for row in table.rows],
                runs=[(row.name, run.seed, run.folder) for row in table.rows for run in row.runs],
            )
        )
    return path


def _charts(folder: Path, table: PlanTable) -> Iterator[Chart]:
    """Workers of each role over time, one line for each way to plan (its first seed)."""
    from reports.replica_views import ways_chart

    found: dict[str, list[tuple[str, Series]]] = {}
    for row in table.rows:
        for series in read_series(folder / row.runs[0].folder):
            found.setdefault(series.role, []).append((row.name, series))
    end_s = table.interval_s * table.intervals
    for role, ways in found.items():
        yield ways_chart(role, ways, end_s)


def summary(rows: Sequence[PlanRow]) -> str | None:
    """How the best planner stands beside the oracle and the static peak, in one line."""
    planners = [row for row in rows if row.kind == "planner" and row.mean("gpu_hours") is not None]
    oracle = next((row for row in rows if row.kind == "oracle"), None)
    if not planners or oracle is None or not oracle.mean("gpu_hours"):
        return None
    best = max(planners, key=lambda row: (row.mean("attainment") or 0.0, -(row.mean("gpu_hours") or 0.0)))
    hours, least = best.mean("gpu_hours"), oracle.mean("gpu_hours")
    assert hours is not None
    assert least is not None
    return (
        f"most attainment of the planners: {best.name}, {text.share(best.mean('attainment'))} with "
        f"{text.figures(hours / least)} times the oracle's GPU-hours"
    )
