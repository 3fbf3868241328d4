"""A comparison for people: a table for the terminal, and a page with the curves of both runs laid over each other.

It shows what reports/compare.py found and computes no figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.errors import ConfigError
from reports import text
from reports.build import outcomes_of
from reports.columns import F64
from reports.compare import Comparison, Difference, MatchedMetric
from reports.html import Toned, page_charts, page_environment
from reports.plots import Clock, Say, cdf_chart, gap_cdf, number_tick, sample_cdf, time_axis
from reports.record import RunRecord
from reports.report import Report
from reports.svg import Axis, Chart
from reports.tables import WIDTH, rendered
from reports.timeline import Timeline, timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("", "a", "b", "b - a", "relative", "± 95 %", "")


def comparison_text(comparison: Comparison, *, colour: bool = False, width: int = WIDTH) -> str:
    """The comparison in at most `width` columns."""
    head = [f"a  {comparison.a}", f"b  {comparison.b}", *(f"note: {note}" for note in comparison.notes)]
    blocks = [plain_table(COLUMNS, [row for row, _ in difference_rows(comparison)])]
    if comparison.matched is not None:
        blocks.append(plain_table(MATCHED_COLUMNS, matched_rows(comparison)))
    blocks.append(plain_table(("config", "a", "b"), config_rows(comparison)))
    lines = ["\n".join(head), *(rendered(block, colour, width) for block in blocks)]
    if comparison.matched is not None:
        lines.insert(2, matched_line(comparison))
    return "\n\n".join(lines)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A table without lines; names stand left, figures right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if not place or columns[0] == "config" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def difference_rows(comparison: Comparison) -> list[tuple[list[str], str]]:
    """Rows of the table of figures, each with its tone: a difference, none that can be shown, or undecided."""
    return [(_difference_row(difference), _tone(difference)) for difference in comparison.differences]


def _difference_row(one: Difference) -> list[str]:
    say: Say = {"s": text.time, "share": text.share, "count": text.count, "rate": text.figures}[one.unit]
    values = [text.NA if value is None else say(value) for value in (one.a, one.b, one.absolute)]
    relative = "" if one.relative is None else text.change(one.relative)
    spread = "" if one.spread is None else say(one.spread)
    return [one.name, *values, "equal" if one.absolute == 0 else relative, spread, _verdict(one)]


def _verdict(one: Difference) -> str:
    if one.inside is None or one.absolute == 0:
        return ""
    return "within the spread" if one.inside else "differs"


def _tone(one: Difference) -> str:
    return "" if one.inside is None else "soft" if one.inside else "note"


MATCHED_COLUMNS = ("request by request", "in both", "only a", "only b", "equal", "largest", "mean b - a")


def matched_rows(comparison: Comparison) -> list[list[str]]:
    """Rows of the table of matched requests."""
    return [] if comparison.matched is None else [_matched_row(metric) for metric in comparison.matched.metrics]


def _matched_row(metric: MatchedMetric) -> list[str]:
    return [
        metric.name,
        text.count(metric.rows),
        text.count(metric.only_a),
        text.count(metric.only_b),
        text.share(metric.equal_share),
        text.change(metric.max_relative),
        text.time(metric.mean_difference_s),
    ]


def matched_line(comparison: Comparison) -> str:
    """What the matching was."""
    matched = comparison.matched
    if matched is None:
        return ""
    return (
        f"{text.counted(matched.rows, 'request')} matched by row: {text.share(matched.same_status_share)} with the same"
        f" status, {text.share(matched.same_worker_share)} on the same worker"
    )


def config_rows(comparison: Comparison) -> list[list[str]]:
    """Keys that differ; one line that says so where none does."""
    rows = [[one.key, one.a or "absent", one.b or "absent"] for one in comparison.config]
    return rows or [["no difference", "", ""]]


# --- the page ---------------------------------------------------------------------------------------------------------


def write_comparison_html(comparison: Comparison, a: Path, b: Path, path: Path) -> Path:
    """Write the comparison of the run folders `a` and `b` as one page at `path`."""
    page = {
        "title": f"{comparison.a} against {comparison.b}",
        "badges": [Toned("COMPARISON", "soft")],
        "notes": comparison.notes,
        "columns": ["", comparison.a, comparison.b, *COLUMNS[3:]],
        "rows": difference_rows(comparison),
        "matched": None
        if comparison.matched is None
        else {"columns": MATCHED_COLUMNS, "rows": matched_rows(comparison), "line": matched_line(comparison)},
        "config": config_rows(comparison),
        "a": comparison.a,
        "b": comparison.b,
        "charts": page_charts(overlaid_charts((a, b), (comparison.a, comparison.b))),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page_environment().get_template("compare.html.j2").render(page), encoding="utf-8")
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror})") from None
    return path


def overlaid_charts(folders: tuple[Path, Path], names: tuple[str, str]) -> list[Chart]:
    """The curves of both runs in the same charts: solid for the first, dashed for the second."""
    records = [RunRecord(folder) for folder in folders]
    workers = [tuple(worker.worker_id for worker in Report.load(folder).workers) for folder in folders]
    overs = [timeline(record, ids) for record, ids in zip(records, workers, strict=True)]
    charts = [*_overlaid_cdfs(records, overs, names), *_overlaid_times(overs, names)]
    return [chart for chart in charts if not chart.empty]


def _overlaid_cdfs(records: Sequence[RunRecord], overs: Sequence[Timeline], names: tuple[str, str]) -> Iterator[Chart]:
    outcomes = [outcomes_of(record.requests) for record in records]
    for title, metric in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e")):
        samples = [one.values(metric)[one.completed] for one in outcomes]
        yield cdf_chart(
            title,
            [
                sample_cdf(name, sample, place, dashed=place == 1)
                for place, (name, sample) in enumerate(zip(names, samples, strict=True))
            ],
        )
    pairs = enumerate(zip(names, overs, strict=True))
    yield cdf_chart("ITL", [gap_cdf(name, over, place, dashed=place == 1) for place, (name, over) in pairs])


def _overlaid_times(overs: Sequence[Timeline], names: tuple[str, str]) -> Iterator[Chart]:
    clocks = (Clock(overs[0], [overs[1]]), Clock(overs[1], [overs[0]]))

    def lines(title: str, y: Axis, rows: Sequence[F64], say: Say, note: str) -> Chart:
        series = [
            clock.line(name, row, place, say, dashed=place == 1)
            for place, (clock, name, row) in enumerate(zip(clocks, names, rows, strict=True))
        ]
        longer = int(overs[1].edges_s[-1] > overs[0].edges_s[-1])
        return clocks[longer].chart(title, y, series, note)

    ttft, itl = [over.ttft_s[1] for over in overs], [over.itl_s[1] for over in overs]
    yield lines("TTFT over time", time_axis("latency", *ttft), ttft, text.time, "p95 by arrival")
    yield lines("ITL over time", time_axis("latency", *itl), itl, text.time, "p95 by gap")
    count = Axis(title="requests", tick=number_tick, low=0.0)
    for title, level in (("Running requests", "running"), ("Waiting requests", "waiting")):
        sums = [np.asarray(over.levels[level].sum(axis=0)) for over in overs]
        yield lines(title, count, sums, text.figures, "sum of the workers, means")
    rates = [over.output_tokens_per_s for over in overs]
    yield lines("Output tokens per second", Axis(title="tokens/s", tick=number_tick, low=0.0), rates, text.figures, "")
