"""A run as one PNG picture for slides and READMEs: badges, main figures, and the six charts that tell most.

The charts are those of the page (reports/plots.py) on the same scales; nothing is computed here. Equal runs give equal
bytes under one version of matplotlib: neither a style of the user's nor a date gets in.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from policies.errors import ConfigError
from reports import text
from reports.columns import F64
from reports.html import badges, tiles, title
from reports.plots import first_charts
from reports.record import RunRecord
from reports.report import Report
from reports.svg import Chart, Mark, Scale, Series
from reports.tables import latency_line, trace_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

WIDTH_IN, HEIGHT_IN, DPI = 12.0, 7.6, 150
"""1800 x 1140 pixels; text is large enough to be read at two thirds of that."""
CHART_IN: Final = (8.0, 4.4)
"""Of a chart alone."""

COLOURS: Final = ("#2563eb", "#e0680c", "#0d8f83", "#7c3aed", "#d6246f", "#64748b", "#a3adba", "#a37800")
TONES: Final = {"good": "#0f7a4d", "bad": "#b3261e", "note": "#8a5a00", "soft": "#5c6878", "": "#17202c"}
GRID, INK, SOFT = "#e9edf1", TONES[""], TONES["soft"]
"""The light colours of templates/page.css."""

LEFT_IN, RIGHT_IN = 0.35, WIDTH_IN - 0.35
MAX_GROUPS: Final = 2
"""Worker groups that are described; the rest are counted."""


def write_picture(folder: Path, report: Report, path: Path, *, complete: bool = True) -> Path:
    """Draw the run in `folder` to the PNG file `path` and return it; `complete` False marks a run stopped half-way.

    Raises ConfigError for a run without requests and for a path that cannot be written.
    """
    if not report.demand.requests:
        raise ConfigError(f"{folder}: the run has no request, so there is nothing to draw")
    charts = first_charts(RunRecord(folder), report)
    with _house_style():
        figure = draw(report, charts, complete=complete)
        return _save(figure, path, title(report), described(report, complete=complete))


def write_chart(chart: Chart, path: Path, told: str) -> Path:
    """Draw one chart to the PNG file `path` and return it; `told` goes into its metadata.

    Raises ConfigError for an empty chart and for a path that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if chart.empty:
        raise ConfigError(f"{path}: no figure is known, so there is nothing to draw")
    with _house_style():
        figure = Figure(figsize=CHART_IN, dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        _panel(figure.add_axes((0.09, 0.15, 0.87, 0.69)), chart, left=0.0)
        return _save(figure, path, chart.title, told)


def _save(figure: Figure, path: Path, name: str, told: str) -> Path:
    """Write a figure; what it is stands in its metadata, and no version of whatever drew it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=DPI, metadata={"Title": name, "Description": told, "Software": None})
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror})") from None
    return path


def described(report: Report, *, complete: bool = True) -> str:
    """Badges and main figures in words: what a PNG file of the run says in its metadata."""
    figures = (f"{tile.label} {tile.value}" for tile in tiles(report))
    return "; ".join([*(words for words, _ in badges(report, complete)), *figures])


@contextmanager
def _house_style() -> Iterator[None]:
    """Matplotlib as shipped, whatever the user has set; a name is no formula, and a glyph may be missing."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"text.parse_math": False, "text.color": INK, "font.size": 9.0})
        yield


def draw(report: Report, charts: Sequence[Chart], *, complete: bool) -> Figure:
    """The picture as a figure of matplotlib, with at most six charts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    end_in = _badges(figure, report, complete)
    _cut(_put(figure, LEFT_IN, 0.44, title(report), fontsize=17, fontweight="bold"), end_in)
    _lines(figure, 0.72, _facts(report), fontsize=8.5)
    _tiles(figure, report)
    for place, chart in enumerate(charts):
        row, column = divmod(place, 3)
        _panel(_axes(figure, (LEFT_IN + 0.45 + 3.79 * column, 2.60 + 2.50 * row, 3.27, 1.66)), chart)
    _lines(figure, HEIGHT_IN - 0.28, _models(report), fontsize=7.5)
    return figure


def _facts(report: Report) -> list[tuple[str, int]]:
    """Lines under the title, and on how many each may go."""
    groups, left_out = report.meta.cluster[:MAX_GROUPS], len(report.meta.cluster) - MAX_GROUPS
    more = f"and {text.counted(left_out, 'more group')} of workers; " if left_out > 0 else ""
    room = 2 if len(groups) == 1 else 1
    return [(trace_line(report), 2), *((line, room) for line in groups), (f"{more}router: {report.meta.router}", 1)]


def _models(report: Report) -> list[tuple[str, int]]:
    models = report.meta.latency
    of = f" (first of {len(models)} groups)" if len(models) > 1 else ""
    return [(f"latency model{of}: {latency_line(model, several=len(models) > 1)}", 2) for model in models[:1]]


# --- words ------------------------------------------------------------------------------------------------------------


def _put(figure: Figure, x_in: float, down_in: float, words: str, **look: object) -> Text:
    """Words at inches from the left and from the top."""
    return figure.text(x_in / WIDTH_IN, 1 - down_in / HEIGHT_IN, words, **look)  # type: ignore[arg-type]


def _cut(words: Text, right_in: float) -> None:
    """Shorten words that reach too far to the right."""
    kept = words.get_text()
    while len(kept) > 1 and words.get_window_extent().x1 > right_in * DPI:
        kept = kept[:-1]
        words.set_text(f"{kept.rstrip()}…")


def _lines(figure: Figure, down_in: float, paragraphs: list[tuple[str, int]], *, fontsize: float) -> None:
    """Soft paragraphs below each other, each on at most so many lines; what has no room ends in dots."""
    for words, most in paragraphs:
        left = words.split()
        for place in range(most):
            line = _put(figure, LEFT_IN, down_in, "", fontsize=fontsize, color=SOFT)
            left = _filled(line, left, last=place == most - 1)
            down_in += fontsize / 72 * 1.4
            if not left:
                break


def _filled(line: Text, words: list[str], *, last: bool) -> list[str]:
    """Put as many words into the line as fit; returns the others, none behind the `last` line."""
    for count in range(len(words), 0, -1):
        dots = " …" if last and count < len(words) else ""
        line.set_text(" ".join(words[:count]).rstrip(";,·" if dots else "") + dots)
        if line.get_window_extent().x1 <= RIGHT_IN * DPI:
            return [] if last else words[count:]
    return []


def _badges(figure: Figure, report: Report, complete: bool) -> float:
    """From the right edge to the left, so that they end where the charts end; returns where room for a title ends."""
    right_in = RIGHT_IN - 0.08
    for words, tone in reversed(list(badges(report, complete))):
        colour = TONES[tone]
        box = {"boxstyle": "round,pad=0.35,rounding_size=0.9", "edgecolor": colour, "facecolor": "white"}
        look = {"fontsize": 8.5, "fontweight": "bold", "color": colour, "ha": "right", "bbox": box}
        right_in = _put(figure, right_in, 0.42, words, **look).get_window_extent().x0 / DPI - 0.25
    return right_in


def _tiles(figure: Figure, report: Report) -> None:
    shown = tiles(report)
    for place, tile in enumerate(shown):
        x_in = LEFT_IN + (RIGHT_IN - LEFT_IN) / len(shown) * place
        _put(figure, x_in, 1.68, tile.value, fontsize=13, fontweight="bold")
        _put(figure, x_in, 1.76, textwrap.fill(tile.label, 18), fontsize=7.5, color=SOFT, va="top", linespacing=1.1)


# --- charts -----------------------------------------------------------------------------------------------------------


def _axes(figure: Figure, box_in: tuple[float, float, float, float]) -> Axes:
    """Axes at (left, top, width, height) in inches."""
    left, top, width, height = box_in
    share = (left / WIDTH_IN, 1 - (top + height) / HEIGHT_IN, width / WIDTH_IN, height / HEIGHT_IN)
    return figure.add_axes(share)


def _panel(axes: Axes, chart: Chart, left: float = -0.13) -> None:
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold", pad=19)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    if chart.empty:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, text.NA, transform=axes.transAxes, ha="center", color=SOFT)
        return
    _scales(axes, chart)
    for series in chart.series:
        _draw(axes, series)
    for mark in chart.marks:
        _limit(axes, mark)
    for x, words, side in ((left, chart.note, "left"), (1.0, chart.x.title, "right")):
        axes.text(x, -0.14, words, transform=axes.transAxes, ha=side, va="top", fontsize=7, color=SOFT)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.015, 0.975), ncols=len(chart.series), frameon=False, fontsize=8,
        labelcolor=SOFT, borderpad=0.2, handlelength=1.2, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip


def _scales(axes: Axes, chart: Chart) -> None:
    """The bounds and ticks that the page has."""
    x = Scale(chart.x, [series.x for series in chart.series], 0, 1)
    edges = [value for series in chart.series for value in (series.y, series.low) if value is not None]
    y = Scale(chart.y, edges, 0, 1)
    axes.set_xscale("log" if x.log else "linear")
    axes.set_yscale("log" if y.log else "linear")
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    axes.set_xticks(x.ticks, labels=[chart.x.tick(value) for value in x.ticks])
    axes.set_yticks(y.ticks, labels=[chart.y.tick(value) for value in y.ticks])
    axes.minorticks_off()
    axes.tick_params(length=0, labelsize=8, labelcolor=SOFT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw(axes: Axes, series: Series) -> None:
    colour = COLOURS[series.colour]
    match series.kind:
        case "band":
            assert series.low is not None, "a band needs its lower edge"
            axes.fill_between(series.x, series.low, series.y, color=colour, alpha=0.5, linewidth=0, label=series.label)
        case "dots":
            (dots,) = axes.plot(series.x, series.y, ".", color=colour, markersize=2.5, alpha=0.6, label=series.label)
            dots.set_clip_on(False)
        case "line" | "step":
            style = "--" if series.dashed else "-"
            how = "steps-post" if series.kind == "step" else "default"
            lone = _lone(series.y)
            dot = {"marker": "."} if lone else {}
            (line,) = axes.plot(series.x, series.y, style, color=colour, linewidth=1.3, label=series.label)
            line.set(drawstyle=how, markersize=2.5, markevery=lone, **dot)


def _lone(values: F64) -> list[int]:
    """Places of values that no line reaches: both neighbours are missing."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return [int(place) for place in np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])]


def _limit(axes: Axes, limit: Mark) -> None:
    """A limit that lies across the chart, or stands in it."""
    colour = SOFT if limit.colour is None else COLOURS[limit.colour]
    across = limit.axis == "y"
    (axes.axhline if across else axes.axvline)(limit.at, color=colour, linewidth=1, linestyle=":")
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    if (low if across else left) <= limit.at <= (high if across else right):
        at = (right, limit.at) if across else (limit.at, high)
        offset = (0, 3) if across else (-3, -9)
        box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5}
        axes.annotate(limit.label, at, offset, textcoords="offset points", ha="right", fontsize=7.5, bbox=box)
