"""What a sweep comes to: its points, the figures of their runs, the spread over seeds, what is best, what did nothing.

Equal sweeps give equal bytes, however many processes ran them and in whichever order they ended: no clock, no host and
no absolute path belongs in here. It computes no figure of a run; those come from reports/figures.py.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Final, Literal, TypeAlias

from policies.errors import ConfigError
from policies.frozen import frozen
from reports.columns import to_arrow
from reports.figures import FIGURES, USUAL_FIGURES, Figure
from reports.files import whole_file
from reports.report import stable_json

SCHEMA: Final = "dynatwin.sweep/1"
SWEEP_PARQUET, SWEEP_CSV, SWEEP_HTML = "sweep.parquet", "sweep.csv", "sweep.html"

Value: TypeAlias = int | float | str
"""A value of a varied key: a number where it reads as one, else the text that was given."""
Status: TypeAlias = Literal["done", "failed", "open"]
Effect: TypeAlias = Literal["some", "none", "not told apart"]


@frozen
class SweepRun:
    """One run of a point: where it lies below the sweep's folder, how it ended, its figures (none unless done)."""

    seed: int
    folder: str
    status: Status
    error: str | None
    figures: Mapping[str, float | None]


@frozen
class Spread:
    """A figure over the seeds of a point: how many runs have it, their mean, and from where to where it goes."""

    runs: int
    mean: float
    low: float
    high: float


@frozen
class SweepPoint:
    """One combination of values, in the order of the keys, and what its runs came to."""

    number: int
    values: tuple[Value, ...]
    runs: tuple[SweepRun, ...]
    spreads: Mapping[str, Spread]

    @property
    def errors(self) -> tuple[str, ...]:
        """Why runs of this point failed, each reason once."""
        return tuple(dict.fromkeys(run.error for run in self.runs if run.error is not None))


@frozen
class SweepKey:
    """A varied key, its values in the order given, and whether it changed any figure of any run.

    "none": points that differ in this key alone have equal figures throughout. "not told apart": no two finished
    points differ in this key alone, so nothing can be said.
    """

    key: str
    values: tuple[Value, ...]
    effect: Effect


@frozen
class Sweep:
    """A whole sweep. `shown` are the figures of its tables and plots; `best` has the point numbers with the best mean
    of each figure that has a better way, several where they are equal. `config` is what all runs have in common.
    """

    trace: str
    keys: tuple[SweepKey, ...]
    seeds: tuple[int, ...]
    seeds_matter: bool | None
    shown: tuple[str, ...]
    points: tuple[SweepPoint, ...]
    best: Mapping[str, tuple[int, ...]]
    config: Mapping[str, str]
    schema: str = SCHEMA

    @property
    def runs(self) -> tuple[SweepRun, ...]:
        return tuple(run for point in self.points for run in point.runs)

    def count(self, status: Status) -> int:
        """Runs that ended so."""
        return sum(run.status == status for run in self.runs)

    def to_json(self) -> str:
        """The bytes of the sweep's report.json."""
        return stable_json(self)


def plain_value(given: str) -> Value:
    """A value as it was given: a number where it reads as one (not inf or nan), else text."""
    for kind in (int, float):
        try:
            value = kind(given)
        except ValueError:
            continue
        if value == value and abs(value) != float("inf"):
            return value
    return given


# --- from runs to a sweep ---------------------------------------------------------------------------------------------


def build_sweep(
    *,
    trace: str,
    keys: Sequence[str],
    points: Iterable[tuple[tuple[Value, ...], tuple[SweepRun, ...]]],
    shown: Sequence[Figure],
    seeds: Sequence[int],
    config: Mapping[str, str],
) -> Sweep:
    """Put the runs of all points together.

    `shown` are the figures to show, as far as any run has them; if none are named, the usual ones that are not 0
    throughout.
    """
    built = tuple(
        SweepPoint(number=number, values=values, runs=runs, spreads=_spreads(runs))
        for number, (values, runs) in enumerate(points)
    )
    there = {name for point in built for name in point.spreads}
    telling = {name for point in built for name, spread in point.spreads.items() if spread.low or spread.high}
    names = [figure.name for figure in shown] or [name for name in USUAL_FIGURES if name in telling]
    return Sweep(
        trace=trace,
        keys=tuple(
            SweepKey(key=key, values=_distinct(point.values[at] for point in built), effect=_effect(built, at, key))
            for at, key in enumerate(keys)
        ),
        seeds=tuple(seeds),
        seeds_matter=_seeds_matter(built),
        shown=tuple(name for name in dict.fromkeys(names) if name in there),
        points=built,
        best={name: best for name, figure in FIGURES.items() if (best := _best(built, figure))},
        config=config,
    )


def _distinct(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def _spreads(runs: Sequence[SweepRun]) -> dict[str, Spread]:
    """Of every figure that a finished run has; the mean of equal values is that value, to the bit."""
    spreads = {}
    for name in FIGURES:
        values = [value for run in runs if (value := run.figures.get(name)) is not None]
        if values:
            low, high = min(values), max(values)
            mean = low if low == high else sum(values) / len(values)
            spreads[name] = Spread(runs=len(values), mean=mean, low=low, high=high)
    return spreads


def _best(points: Sequence[SweepPoint], figure: Figure) -> tuple[int, ...]:
    """Numbers of the points with the best mean; none where neither way is better, or nothing is there to compare."""
    means = {point.number: point.spreads[figure.name].mean for point in points if figure.name in point.spreads}
    if figure.better is None or len(means) < 2:
        return ()
    best = min(means.values()) if figure.better == "low" else max(means.values())
    if best == (max(means.values()) if figure.better == "low" else min(means.values())):
        return ()  # all are equal: none is best
    return tuple(number for number, mean in means.items() if mean == best)


def _effect(points: Sequence[SweepPoint], at: int, key: str) -> Effect:
    """Whether points that differ in their value of `key`, at `at`, alone ever differ in a figure."""
    alike: dict[tuple[object, ...], list[Mapping[str, float | None]]] = {}
    for point in points:
        others = (*point.values[:at], *point.values[at + 1 :])
        for run in point.runs:
            if run.status == "done":
                alike.setdefault((others, None if key == "seed" else run.seed), []).append(run.figures)
    groups = [group for group in alike.values() if len(group) > 1]
    if not groups:
        return "not told apart"
    return "none" if all(figures == group[0] for group in groups for figures in group[1:]) else "some"


def _seeds_matter(points: Sequence[SweepPoint]) -> bool | None:
    """Whether the runs of a point ever differ; None where no point has two."""
    groups = [done for point in points if len(done := [r.figures for r in point.runs if r.status == "done"]) > 1]
    return any(figures != group[0] for group in groups for figures in group) if groups else None


# --- on disk ----------------------------------------------------------------------------------------------------------


def write_tables(folder: Path, sweep: Sweep) -> None:
    """Write sweep.csv and sweep.parquet: a row per run, columns point, status, the keys, seed, every figure, error."""
    try:
        write_csv(folder, sweep)
        _write_parquet(folder, sweep)
    except OSError as why:
        raise ConfigError(f"{folder}: cannot be written ({why.strerror})") from None


def write_csv(folder: Path, sweep: Sweep) -> None:
    """Write sweep.csv; what is undefined is an empty field."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column_names(sweep))
    writer.writerows(_rows(sweep))
    with whole_file(folder / SWEEP_CSV) as file:
        file.write(out.getvalue())


def column_names(sweep: Sweep) -> list[str]:
    """The columns of sweep.csv and sweep.parquet."""
    return ["point", "status", *(key.key for key in sweep.keys), "run_seed", *FIGURES, "folder", "error"]


def _rows(sweep: Sweep) -> Iterator[list[Value | None]]:
    for point in sweep.points:
        for run in point.runs:
            figures = [run.figures.get(name) for name in FIGURES]
            yield [point.number, run.status, *point.values, run.seed, *figures, run.folder, run.error]


def _write_parquet(folder: Path, sweep: Sweep) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names, rows = column_names(sweep), list(_rows(sweep))
    columns = list(zip(*rows, strict=True))
    kinds = [_kind(name, column) for name, column in zip(names, columns, strict=True)]
    arrays = [to_arrow(_typed(column, kind), kind) for column, kind in zip(columns, kinds, strict=True)]
    part = folder / f"{SWEEP_PARQUET}.part"
    parquet.write_table(pa.Table.from_arrays(arrays, names=names), part, compression="zstd")
    part.replace(folder / SWEEP_PARQUET)


def _typed(column: Sequence[Value | None], kind: object) -> Sequence[object]:
    if kind != "string":
        return column
    return [None if value is None else str(value) for value in column]


def _kind(name: str, column: Sequence[Value | None]) -> object:
    """The arrow type of a column: whole numbers, numbers, or text where any value is text."""
    import pyarrow as pa

    if name in FIGURES:
        return pa.float64()
    if any(isinstance(value, str) for value in column) or all(value is None for value in column):
        return pa.string()
    whole = all(isinstance(value, int) and abs(value) < 2**53 for value in column)
    return pa.int64() if whole else pa.float64()
