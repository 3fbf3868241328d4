"""A sweep for people: a table for the terminal, and a page with its table and plots.

It shows what reports/sweep.py put together and computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from policies.errors import ConfigError
from reports import text
from reports.columns import F64
from reports.figures import FIGURES, Figure
from reports.files import whole_file
from reports.heatmap import HeatMap, Scale, Thread, draw_heat_map, draw_parallel, shades_of
from reports.html import Toned, page_charts, page_environment
from reports.plots import number_tick, time_axis
from reports.svg import Axis, Chart, Series
from reports.sweep import SWEEP_HTML, Spread, Sweep, SweepPoint, Value
from reports.tables import WIDTH, rendered

MAX_PRINTED: Final = 60
"""Points in the printed table; those beyond are in the files."""
MAX_PANELS: Final = 12
"""Small multiples of one figure."""
DENSE: Final = 0.5
"""Share of the cells of a grid that must be there for a map of it."""


# --- words ------------------------------------------------------------------------------------------------------------


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or as many parts as it takes to tell them apart."""
    parts = [key.split(".") for key in keys]
    for size in range(1, max((len(part) for part in parts), default=1) + 1):
        names = [".".join(part[-size:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(keys)


def runs_line(sweep: Sweep) -> str:
    """Points, seeds, and how the runs ended."""
    seeds = f" x {len(sweep.seeds)} seeds" if len(sweep.seeds) > 1 else ""
    line = f"{text.counted(len(sweep.points), 'point')}{seeds}: {text.count(sweep.count('done'))} runs done"
    for status, words in (("failed", "failed"), ("open", "not run")):
        count = sweep.count(status)  # type: ignore[arg-type]  # the two statuses above
        line += f", {text.count(count)} {words}" if count else ""
    return line


def notes(sweep: Sweep) -> Iterator[str]:
    """What a reader of the table must know: keys and seeds without effect."""
    for key in sweep.keys:
        if key.effect == "none":
            yield f"no effect: {key.key} changed no figure of any run"
        elif key.effect == "not told apart" and len(key.values) > 1:
            yield f"{key.key}: no two finished points differ in it alone, so its effect is not told apart"
    if sweep.seeds_matter is False:
        yield "the seeds changed no figure of any run: one would have done"


def failures(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """(point, its one-line error) of what failed."""
    for point in sweep.points:
        for error in point.errors:
            yield point_name(sweep, point), error


def point_name(sweep: Sweep, point: SweepPoint) -> str:
    """A point by its values."""
    names = short_names([key.key for key in sweep.keys])
    return ", ".join(f"{name}={value}" for name, value in zip(names, point.values, strict=True))


def _cell(figure: Figure, spread: Spread | None, unit: str) -> str:
    """The mean, and the range of the seeds where they differ."""
    if spread is None:
        return text.NA
    mean = _in_unit(figure, spread.mean, unit)
    if spread.low == spread.high:
        return mean
    return f"{mean} ({_in_unit(figure, spread.low, unit)}..{_in_unit(figure, spread.high, unit)})"


def _in_unit(figure: Figure, value: float, unit: str) -> str:
    """A value without its unit where the column has it, with it where there is none (`unit` empty)."""
    match unit:
        case "ms" | "s":
            return text.in_unit(value, unit)
        case "%":
            return text.figures(100 * value)
        case _:
            return figure.say(value)


def _unit(figure: Figure, points: Sequence[SweepPoint]) -> str:
    """The unit of a column, that its values are read together; empty where they have none."""
    if figure.unit == "s":
        return text.common_unit(*(point.spreads[figure.name].mean for point in points if figure.name in point.spreads))
    return "%" if figure.unit == "share" else ""


def _columns(sweep: Sweep) -> list[tuple[Figure, str]]:
    return [(FIGURES[name], _unit(FIGURES[name], sweep.points)) for name in sweep.shown]


def _headers(sweep: Sweep) -> list[str]:
    names = short_names([key.key for key in sweep.keys])
    return [*names, *(f"{figure.label}, {unit}" if unit else figure.label for figure, unit in _columns(sweep))]


def _row(sweep: Sweep, point: SweepPoint, mark: str = "") -> list[str]:
    cells = [str(value) for value in point.values]
    for figure, unit in _columns(sweep):
        cell = _cell(figure, point.spreads.get(figure.name), unit)
        cells.append(f"{cell}{mark}" if point.number in sweep.best.get(figure.name, ()) else cell)
    return cells


# --- the terminal -----------------------------------------------------------------------------------------------------


def sweep_text(sweep: Sweep, *, path: str, colour: bool = False, width: int = WIDTH) -> str:
    """The sweep in at most `width` columns; its last line is `path`, where the rest of it lies."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for at, name in enumerate(_headers(sweep)):
        is_key = at < len(sweep.keys)
        table.add_column(
            name.replace("_", " ") if is_key else name, justify="left" if is_key else "right", overflow="fold"
        )
    for point in sweep.points[:MAX_PRINTED]:
        table.add_row(*_row(sweep, point, "*"))
    lines = [f"sweep  {sweep.trace}; {runs_line(sweep)}"]
    lines += [f"{key.key}: {', '.join(str(value) for value in key.values)}" for key in sweep.keys]
    after = ["* best mean of its column" + ("; mean (lowest..highest seed)" if len(sweep.seeds) > 1 else "")]
    left = len(sweep.points) - MAX_PRINTED
    if left > 0:
        after.append(f"{text.counted(left, 'more point')} in sweep.csv")
    after += notes(sweep)
    after += [f"failed  {name}: {error}" for name, error in failures(sweep)]
    return "\n".join([*lines, "", rendered(table, colour, width), "", *after, "", f"report  {path}"])


# --- the page ---------------------------------------------------------------------------------------------------------


def write_sweep_html(folder: Path, sweep: Sweep, *, complete: bool = True) -> Path:
    """Write sweep.html into the sweep's folder; `complete` False marks one that was stopped."""
    path = folder / SWEEP_HTML
    page = page_environment().get_template("sweep.html.j2").render(_page(sweep, complete))
    try:
        with whole_file(path) as out:
            out.write(page)
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror}); --no-html does without") from None
    return path


def _page(sweep: Sweep, complete: bool) -> dict[str, object]:
    moving = [at for at, key in enumerate(sweep.keys) if len(key.values) > 1]
    return {
        "title": f"Sweep of {' x '.join(short_names([key.key for key in sweep.keys]))}",
        "badges": [
            Toned("SIMULATED", "note"),
            Toned("SWEEP", "soft"),
            *([] if complete else [Toned("PARTIAL: STOPPED HALF-WAY", "bad")]),
        ],
        "facts": [
            ("trace", sweep.trace),
            *((key.key, ", ".join(str(value) for value in key.values)) for key in sweep.keys),
            ("runs", runs_line(sweep)),
        ],
        "notes": list(notes(sweep)),
        "failures": list(failures(sweep)),
        "charts": page_charts(list(_lines(sweep, moving))) if len(moving) == 1 else [],
        "drawings": list(_drawings(sweep, moving)) if len(moving) > 1 else [],
        "columns": _headers(sweep),
        "rows": [_page_row(sweep, point) for point in sweep.points],
        "has_seeds": len(sweep.seeds) > 1,
        "config": sorted(sweep.config.items()),
    }


def _page_row(sweep: Sweep, point: SweepPoint) -> list[tuple[str, bool]]:
    """Cells, and whether each has the best mean of its column."""
    best = [False] * len(point.values) + [point.number in sweep.best.get(name, ()) for name in sweep.shown]
    return list(zip(_row(sweep, point), best, strict=True))


def _axis(figure: Figure, *values: F64) -> Axis:
    if figure.unit == "s":
        return time_axis(figure.label, *values)
    tick = text.share if figure.unit == "share" else number_tick
    return Axis(title=figure.label, tick=tick, low=0.0)


def _places(values: Sequence[Value]) -> tuple[list[float], list[str]]:
    """Where values stand on an axis: numbers where they are, anything else at 0, 1, 2, ..."""
    labels = [str(value) for value in values]
    if all(isinstance(value, int | float) for value in values):
        return [float(value) for value in values], labels
    return [float(at) for at in range(len(values))], labels


def _lines(sweep: Sweep, moving: Sequence[int]) -> Iterator[Chart]:
    """Each figure over the one key that moves: the mean as a line, the range of the seeds as a band."""
    key = sweep.keys[moving[0]]
    places, labels = _places(key.values)
    where = dict(zip(key.values, places, strict=True))
    named = {float(at): label for at, label in enumerate(labels)}
    is_number = all(isinstance(value, int | float) for value in key.values)
    x_axis = Axis(
        title=key.key,
        tick=number_tick if is_number else lambda value: named.get(value, ""),
        log=is_number and min(places) > 0 and max(places) > 50 * min(places),
        low=min(places),
        high=max(places) if max(places) > min(places) else None,
    )
    for name in sweep.shown:
        figure = FIGURES[name]
        there = [point for point in sweep.points if name in point.spreads]
        there.sort(key=lambda point: where[point.values[moving[0]]])
        x = np.array([where[point.values[moving[0]]] for point in there])
        spreads = [point.spreads[name] for point in there]
        mean, low, high = (np.array([getattr(one, part) for one in spreads]) for part in ("mean", "low", "high"))
        says = [_cell(figure, spread, "") for spread in spreads]
        series = [
            Series(label="mean", x=x, y=mean, colour=0, says=says),
            Series(label="points", x=x, y=mean, colour=0, kind="dots"),
        ]
        if len(sweep.seeds) > 1:
            series.insert(0, Series(label="range of the seeds", x=x, y=high, low=low, colour=6, kind="band"))
        yield Chart(
            title=figure.label,
            note=_best_note(sweep, name),
            x=x_axis,
            y=_axis(figure, mean, high),
            series=series,
            moments=(x, [f"{key.key} = {point.values[moving[0]]}" for point in there]),
        )


def _best_note(sweep: Sweep, name: str) -> str:
    best, figure = sweep.best.get(name, ()), FIGURES[name]
    if not best:
        return "all points are equal" if figure.better else ""
    shown = " and ".join(point_name(sweep, sweep.points[number]) for number in best[:2])
    more = f" and {len(best) - 2} more" if len(best) > 2 else ""
    return f"best ({figure.better}est mean): {shown}{more}"


def _drawings(sweep: Sweep, moving: Sequence[int]) -> Iterator[Mapping[str, object]]:
    """Two keys: a map. Three: a map per value of the third. More, or a list with holes: parallel coordinates."""
    from markupsafe import Markup

    cells = 1
    for at in moving:
        cells *= len(sweep.keys[at].values)
    panels = len(sweep.keys[moving[2]].values) if len(moving) == 3 else 1
    dense = len(moving) <= 3 and panels <= MAX_PANELS and len(sweep.points) >= DENSE * cells
    for name in sweep.shown:
        note = _best_note(sweep, name)
        if not dense:
            drawn = Markup(_parallel(sweep, moving, FIGURES[name]))
            yield {"title": FIGURES[name].label, "note": note, "panels": [("", drawn)]}
            continue
        maps = list(_maps(sweep, moving, FIGURES[name]))
        shades = shades_of([one for _, one in maps])
        drawn_maps = [(title, Markup(draw_heat_map(one, shades))) for title, one in maps]
        yield {"title": FIGURES[name].label, "note": note, "panels": drawn_maps}


def _maps(sweep: Sweep, moving: Sequence[int], figure: Figure) -> Iterator[tuple[str, HeatMap]]:
    x_key, y_key = sweep.keys[moving[0]], sweep.keys[moving[1]]
    third = sweep.keys[moving[2]] if len(moving) == 3 else None
    best = sweep.best.get(figure.name, ())
    ups = tuple(reversed(y_key.values))
    for panel in third.values if third is not None else ("",):
        there = {
            (x_key.values.index(point.values[moving[0]]), ups.index(point.values[moving[1]])): point
            for point in sweep.points
            if figure.name in point.spreads and (third is None or point.values[moving[2]] == panel)
        }
        title = "" if third is None else f"{third.key} = {panel}"
        yield (
            title,
            HeatMap(
                title=f"{figure.label} {title}".strip(),
                x_title=x_key.key,
                y_title=y_key.key,
                x_labels=[str(value) for value in x_key.values],
                y_labels=[str(value) for value in ups],
                values={at: point.spreads[figure.name].mean for at, point in there.items()},
                texts={at: figure.say(point.spreads[figure.name].mean) for at, point in there.items()},
                says={
                    at: f"{point_name(sweep, point)}: {_cell(figure, point.spreads[figure.name], '')}"
                    for at, point in there.items()
                },
                marked=frozenset(at for at, point in there.items() if point.number in best),
            ),
        )


def _parallel(sweep: Sweep, moving: Sequence[int], figure: Figure) -> str:
    there = [point for point in sweep.points if figure.name in point.spreads]
    means = [point.spreads[figure.name].mean for point in there]
    low, high = min(means), max(means)
    names = short_names([sweep.keys[at].key for at in moving])
    keys = [sweep.keys[at] for at in moving]
    steps = [max(len(key.values) - 1, 1) for key in keys]
    axes = [
        Scale(title=name, ticks=[(at / step, str(value)) for at, value in enumerate(key.values)])
        for name, key, step in zip(names, keys, steps, strict=True)
    ]
    axes.append(Scale(title=figure.label, ticks=[(0.0, figure.say(low)), (1.0, figure.say(high))]))
    best = sweep.best.get(figure.name, ())
    threads = []
    for point, mean in zip(there, means, strict=True):
        share = (mean - low) / (high - low) if high > low else 0.0
        places: list[float | None] = [
            key.values.index(point.values[at]) / step for at, key, step in zip(moving, keys, steps, strict=True)
        ]
        says = f"{point_name(sweep, point)}: {_cell(figure, point.spreads[figure.name], '')}"
        good = 1 - share if figure.better == "low" else share
        threads.append(
            Thread(places=[*places, share], says=says, opacity=0.15 + 0.6 * good, marked=point.number in best)
        )
    return draw_parallel(figure.label, axes, threads)
