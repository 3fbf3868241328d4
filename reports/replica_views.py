"""What a planner did, for people: workers over time, its decisions with their reasons, what was billed.

It words and draws what `reports.replicas` found, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from policies.errors import ConfigError
from reports import text
from reports.columns import F64
from reports.replicas import PLANS, ChangeFigures, PlannerFigures, Series, read_series
from reports.report import Report
from reports.svg import Axis, Chart
from reports.svg import Series as Line

TEXT_DECISIONS: Final = 5
PAGE_DECISIONS: Final = 100
_STATES: Final = (("wanted", 3, True), ("ready", 0, False), ("starting", 1, False), ("draining", 2, False))
"""Counts of a role, with colour and dashes."""


def replica_charts(folder: Path, factor: float, axis: Axis, end_s: float) -> Iterator[Chart]:
    """Workers of each role by state, and the GPUs that are billed; `factor` is seconds in a unit of the axis."""
    series = read_series(folder)
    for one in series:
        at = _corners(one.at_s, end_s) / factor
        lines = [
            Line(
                label=name,
                x=at,
                y=_steps(getattr(one, name)),
                colour=colour,
                dashed=dashed,
                says=[f"{name} {value:g}" for value in _steps(getattr(one, name))],
            )
            for name, colour, dashed in _STATES
        ]
        y = Axis(title="workers", tick=_whole, low=0.0)
        yield Chart(title=f"{one.role} workers", note="as ordered and as they were", x=axis, y=y, series=lines)
    if series:
        yield Chart(
            title="GPUs billed",
            note="of workers that start, serve or drain",
            x=axis,
            y=Axis(title="GPUs", tick=_whole, low=0.0),
            series=[_gpus(one, place, factor, end_s) for place, one in enumerate(series)],
        )


def _gpus(series: Series, place: int, factor: float, end_s: float) -> Line:
    y = _steps(series.gpus)
    says = [f"{series.role} {value:g}" for value in y]
    return Line(label=series.role, x=_corners(series.at_s, end_s) / factor, y=y, colour=place, says=says)


def _corners(at_s: F64, end_s: float) -> F64:
    """Where a count that stays until the next change begins and ends."""
    ends = np.append(at_s[1:], max(end_s, float(at_s[-1])))
    return np.column_stack([at_s, ends]).ravel()


def _steps(values: F64) -> F64:
    return np.repeat(values, 2)


def _whole(value: float) -> str:
    return f"{value:g}"


def planner_lines(report: Report) -> Iterator[str]:
    """What the planner did, line by line."""
    found = report.planner
    if found is None:
        return
    yield found.line
    for role in found.roles:
        yield (
            f"{role.role}: {role.first} workers at first, {role.fewest} to {role.most} ready, "
            f"{text.figures(role.mean)} on average; {text.counted(role.ups, 'time')} up, {role.downs} down"
        )
    yield _billed(found)
    for one in found.decisions[:TEXT_DECISIONS]:
        yield f"{text.time(one.at_s)}: {one.text}"
    if found.changes > TEXT_DECISIONS:
        yield f"and {found.changes - TEXT_DECISIONS} more changes: plans.parquet"
    if found.notices:
        yield "noticed: " + ", ".join(f"{name} in {text.counted(n, 'tick')}" for name, n in found.notices.items())


def _billed(found: PlannerFigures) -> str:
    hours = None if found.gpu_s is None else found.gpu_s / 3600
    parts = [
        f"{text.figures(hours)} GPU-hours billed, {text.figures(found.starting_gpu_s / 3600)} of them starting and "
        f"{text.figures(found.draining_gpu_s / 3600)} draining"
    ]
    if found.cost_usd is not None:
        parts.append(f"{text.figures(found.cost_usd)} USD")
    parts.append(f"{found.starts} started")
    for count, what in ((found.starts_failed, "failed"), (found.starts_cancelled, "called off")):
        if count:
            parts.append(f"{count} {what}")
    parts.append(f"{found.drains} drained")
    if found.recalls:
        parts.append(f"{found.recalls} recalled")
    return ", ".join(parts)


def decision_rows(report: Report) -> list[list[str]]:
    """The changes that were ordered, first ones first."""
    found = report.planner
    return [] if found is None else [_row(one) for one in found.decisions[:PAGE_DECISIONS]]


DECISION_COLUMNS: Final = ("at", "role", "workers", "reason", "why")


def _row(one: ChangeFigures) -> list[str]:
    return [text.time(one.at_s), one.role, f"{one.before} to {one.after}", one.reason, one.text]


def ways_chart(role: str, ways: Sequence[tuple[str, Series]], end_s: float) -> Chart:
    """Ready workers of one role over time, one line for each way to plan; seconds as they suit the length."""
    units = ((600.0, 1.0, "s"), (36_000.0, 60.0, "min"), (float("inf"), 3600.0, "h"))
    factor, unit = next((factor, unit) for limit, factor, unit in units if end_s < limit)
    lines = [
        Line(
            label=name,
            x=_corners(one.at_s, end_s) / factor,
            y=_steps(one.ready),
            colour=place,
            says=[f"{name} {value:g}" for value in _steps(one.ready)],
        )
        for place, (name, one) in enumerate(ways)
    ]
    x = Axis(title=f"virtual time, {unit}", tick=_whole, low=0.0, high=end_s / factor)
    note = "the first seed of each"
    return Chart(
        title=f"{role} workers ready", note=note, x=x, y=Axis(title="workers", tick=_whole, low=0.0), series=lines
    )


def plan_lines(folder: Path, ticks: Sequence[int] = ()) -> list[str]:
    """What each stage of a planner said, tick by tick; without `ticks` of those that changed something. Raises
    ConfigError for a run without a planner, and for ticks that it does not have."""
    from pyarrow import parquet

    path = folder / PLANS
    if not path.is_file():
        raise ConfigError(f"{folder}: no planner ran there (no {PLANS}); --planner NAME has one")
    rows = parquet.read_table(path).to_pylist()
    known = {row["tick"] for row in rows}
    unknown = [tick for tick in ticks if tick not in known]
    if unknown:
        raise ConfigError(
            f"{folder}: there is no tick {unknown[0]}; it has {min(known, default=0)} to {max(known, default=0)}"
        )
    shown = [row for row in rows if (row["tick"] in ticks if ticks else _changes(row))]
    return [line for row in shown for line in _stages(row)]


def _changes(row: Mapping[str, Any]) -> bool:
    return row["decision_id"] is not None and row["final"] != row["ready"] + row["starting"]


def _stages(row: Mapping[str, Any]) -> Iterator[str]:
    """One role in one tick."""
    yield f"{text.time(row['at_s'])}  tick {row['tick']} ({row['due']})  {row['text']}"
    yield f"    there were {row['ready']} ready, {row['starting']} starting, {row['draining']} draining"
    if row["num_req"] is not None:
        yield (
            f"    demand {text.figures(row['num_req'])} requests in the last window, ISL {text.figures(row['isl'])}, "
            f"OSL {text.figures(row['osl'])}, hit rate {text.share(row['hit_rate'])}"
        )
    if row["base_s"] is not None:
        fit = f", R² {row['r2']:.3f} of {row['samples']} passes" if row["r2"] is not None else ", not measured yet"
        yield (
            f"    a step costs {text.time(row['base_s'])} + {text.time(row['per_x_s'])} x + "
            f"{text.time(row['per_kv_s'])} per KV token{fit}"
        )
    yield f"    wanted {row['wanted']}, within floors and steps {row['bounded']}, ordered {row['final']}"
    if row["notices"]:
        yield f"    noticed: {row['notices']}"
