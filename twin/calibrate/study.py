"""One calibration from end to end: schedules, fit, bands, and the errors of each slice before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from policies.errors import ConfigError
from twin.calibrate.bands import Bands, Metrics, bands
from twin.calibrate.errors import errors_of, slices
from twin.calibrate.fit import fit
from twin.calibrate.fitted import Design, Fit
from twin.calibrate.measured import Table
from twin.calibrate.pricing import Means
from twin.calibrate.schedules import schedule_rows

WORSE = 1.1
"""A slice got worse if its mean error is more than so many times the old one."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Study:
    """A fit with what it rests on. `table` has the rows of `design`, and all that were left out."""

    table: Table
    design: Design
    fit: Fit
    bands: Bands


def design_of(table: Table, *, jobs: int = 1, seed: int = 0, told: Told = lambda what: None) -> tuple[Table, Design]:
    """The schedules of a table's rows; rows that the simulated engine refuses are left out and counted."""
    told(f"schedules of {len(table.rows):,} runs")
    scheduled = schedule_rows(table.rows, jobs=jobs, seed=seed)
    left_out = Counter(table.left_out)
    left_out.update(one.reason for one in scheduled if one.shapes is None)
    kept = [(row, one.shapes) for row, one in zip(table.rows, scheduled, strict=True) if one.shapes is not None]
    if not kept:
        raise ConfigError(f"{table.name}: the simulated engine could run none of the rows: {dict(left_out)}")
    rows, shapes = zip(*kept, strict=True)
    return replace(table, rows=rows, left_out=dict(left_out)), Design(rows, shapes)


def study(table: Table, design: Design, told: Told = lambda what: None) -> Study:
    """The fit to all rows, and its bands from fits to parts of them."""
    told("fit to all runs")
    found = fit(design)
    return Study(table=table, design=design, fit=found, bands=bands(design, told))


def errors_by_slice(design: Design, predicted: Means) -> dict[str, Metrics]:
    """The errors of each part of a table; a part without any measured time is left out."""
    found = {}
    for name, rows in slices(design.rows).items():
        tpot, ttft = (
            errors_of(np.asarray(getattr(predicted, metric))[rows], np.asarray(getattr(design.measured, metric))[rows])
            for metric in ("tpot", "ttft")
        )
        if tpot or ttft:
            found[name] = Metrics(tpot=tpot, ttft=ttft)
    return found


def worse(before: Mapping[str, Metrics], after: Mapping[str, Metrics]) -> list[str]:
    """Slices whose mean error grew by more than a tenth, in words."""
    found = []
    for name, old in before.items():
        for metric in ("tpot", "ttft"):
            was, now = getattr(old, metric), getattr(after[name], metric)
            if was is not None and now is not None and now.mape > WORSE * was.mape:
                found.append(f"{name}: mean {metric.upper()} error {was.mape:.1%} -> {now.mape:.1%}")
    return found
