"""The answer of a search as one HTML page that needs nothing else, and its plot as a PNG picture.

The plot is everybody's: what was simulated, what the closed form says of the rest, and which of them is on the front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from aiconfig import answer, words
from aiconfig.gain_text import gain_lines
from aiconfig.outcome import Scored
from aiconfig.reasons import REASONS
from aiconfig.result import Result
from aiconfig.table import Row
from policies.errors import ConfigError
from reports import text
from reports.files import whole_file
from reports.html import Toned, page_charts, page_environment
from reports.plots import number_tick
from reports.svg import Axis, Chart, Mark, Series

PAGE: Final = "search.html"
TEMPLATE: Final = "search.html.j2"


def write_page(folder: Path, result: Result, rows: Sequence[Row]) -> Path:
    """Write search.html into the folder; its path."""
    page = page_environment().get_template(TEMPLATE).render(_page(result, rows))
    path = folder / PAGE
    with whole_file(path) as out:
        out.write(page)
    return path


def _page(result: Result, rows: Sequence[Row]) -> dict[str, object]:
    request = result.request
    return {
        "title": f"{request.model} on up to {request.gpus} x {request.gpu}",
        "badges": list(_badges(result)),
        "facts": [("asked for", line) for line in request.lines()],
        "head": list(answer.headline(result)),
        "charts": page_charts([chart for chart in (pareto_chart(result, rows),) if not chart.empty]),
        "columns": answer.columns(result) if result.found else [],
        "rows": answer.rows(result),
        "side": list(answer.side_by_side(result)),
        "gains": list(gain_lines(request, result.gains, result.found)),
        "names": [(str(at), one.candidate.name, words.kv_line(one)) for at, one in enumerate(_top(result), start=1)],
        "variations": list(_variations(result)),
        "reasons": [(reason, text.count(count), REASONS[reason]) for reason, count in result.counts.reasons.items()],
        "examples": [(one.reason, one.line()) for one in result.examples],
        "provenance": list(result.provenance),
        "errors": list(words.band_lines(result.found[0].estimate)) if result.found else [],
        "notes": list(result.notes),
    }


def _top(result: Result) -> tuple[Scored, ...]:
    return result.found[: result.request.top]


def _badges(result: Result) -> Iterator[Toned]:
    yield Toned("SIMULATED", "note") if result.simulated else Toned("CLOSED FORM", "note")
    if result.request.sla is not None:
        met = result.best is not None and result.best.judgement.kept
        yield Toned("LIMITS KEPT" if met else "LIMITS NOT KEPT", "good" if met else "bad")
    if not result.complete:
        yield Toned("STOPPED BEFORE THE END", "bad")


def _variations(result: Result) -> Iterator[tuple[str, str]]:
    for one in result.variations:
        if one.estimate is None or one.judgement is None:
            yield one.name, "cannot take it"
        else:
            yield one.name, words.limits_line(one.judgement) or "no limits"


def pareto_chart(result: Result, rows: Sequence[Row]) -> Chart:
    """Output tokens a second for each user against those for each GPU of the budget."""
    simulated = {one.candidate.name: one for one in result.found} if result.simulated else {}
    formula = [row for row in rows if row.name not in simulated and row.tokens_per_s_per_user is not None]
    fronted = [_of_row(row) for row in rows if row.name in result.front]
    series = [
        _cloud("closed form, means", [_of_row(row) for row in formula], 6),
        _cloud("beyond a limit", [_of(one, result) for one in simulated.values() if one.distance], 4),
        _cloud("simulated", [_of(one, result) for one in simulated.values() if not one.distance], 0),
        _line("front", sorted(fronted), 1),
    ]
    return Chart(
        title="Speed for a user against throughput for a GPU",
        x=Axis(title="output tokens/s for each user (1 / mean TPOT)", tick=number_tick, low=0.0),
        y=Axis(title="output tokens/s for each GPU", tick=number_tick, low=0.0),
        series=[one for one in series if len(one.x)],
        note=f"each at its load point; GPUs are the {result.request.gpus} of the budget; up and right is better",
        marks=list(_marks(result)),
    )


def _marks(result: Result) -> Iterator[Mark]:
    for slo in result.request.sla.slos if result.request.sla is not None else ():
        if slo.metric == "tpot":
            yield Mark(axis="x", at=1.0 / slo.limit, label=str(slo))
        elif slo.metric == "tps_user":
            yield Mark(axis="x", at=slo.limit, label=str(slo))


_Point = tuple[float, float, str]


def _of(one: Scored, result: Result) -> _Point:
    estimate = one.estimate
    says = f"{words.deployment(one.candidate)} at {one.load}"
    return estimate.tokens_per_s_per_user or np.nan, words.per_gpu(estimate, result.request), says


def _of_row(row: Row) -> _Point:
    return row.tokens_per_s_per_user or np.nan, row.tokens_per_s_per_gpu_bought or np.nan, row.name


def _cloud(label: str, points: Sequence[_Point], colour: int) -> Series:
    x, y = (np.array([point[at] for point in points], dtype=np.float64) for at in (0, 1))
    return Series(label=label, x=x, y=y, colour=colour, kind="dots", says=[point[2] for point in points])


def _line(label: str, points: Sequence[_Point], colour: int) -> Series:
    x, y = (np.array([point[at] for point in points], dtype=np.float64) for at in (0, 1))
    return Series(label=label, x=x, y=y, colour=colour, kind="line", says=[point[2] for point in points])


def check_picture(path: Path) -> None:
    """Raises ConfigError for a name with another ending."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png {path}: must end in .png; it is the only format of the picture")


def write_picture(result: Result, rows: Sequence[Row], path: Path) -> Path:
    """The plot as a PNG file. Raises ConfigError for another ending, for nothing to draw, and for a path that cannot be
    written."""
    check_picture(path)
    from reports.picture import write_chart

    return write_chart(pareto_chart(result, rows), path, next(answer.headline(result), ""))
