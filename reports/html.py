"""The report as one HTML page that needs nothing else: style, script and charts are inside it.

Equal runs give equal bytes: no date, no host, no cost of the run. It shows what the report and the record say and
computes no metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from policies.errors import ConfigError
from reports import text
from reports.bars import Bars, draw_bars
from reports.files import whole_file
from reports.kv_tiers import tier_bars
from reports.metrics import DEFINITIONS, Distribution, definition
from reports.plots import run_charts
from reports.record import REPORT_HTML, RunRecord
from reports.replica_views import DECISION_COLUMNS, decision_rows, planner_lines
from reports.report import Json, Report, flat_config
from reports.routing_views import (
    END_COLUMNS,
    cache_line,
    decision_tables,
    end_rows,
    routing_lines,
    share_lines,
)
from reports.slowest import slowest_tables
from reports.svg import Chart, draw, pointer_json
from reports.tables import (
    counts_line,
    hours,
    interval_half,
    kwh,
    latency_line,
    latency_rows,
    trace_line,
)
from reports.verdict import LimitResult, SlaResult

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES: Final = Path(__file__).parent / "templates"

MAX_WORKER_ROWS: Final = 64
"""Workers shown in the table, busiest first beyond it."""


class Toned(NamedTuple):
    """Words and how they are coloured: good, bad, note, soft or plain."""

    text: str
    tone: str = ""


class Bar(NamedTuple):
    """A table cell with a bar behind it, `bar` percent wide."""

    text: str
    bar: float


class Tile(NamedTuple):
    """One of the figures at the top."""

    label: str
    value: str


def write_html(folder: Path, report: Report, *, complete: bool = True) -> Path:
    """Write report.html into the run folder and return its path; `complete` False marks a run stopped half-way."""
    record = RunRecord(folder)
    page = page_environment().get_template("report.html.j2").render(_page(record, report, complete))
    path = folder / REPORT_HTML
    try:
        with whole_file(path) as out:
            out.write(page)
    except OSError as why:
        raise ConfigError(f"{path}: cannot be written ({why.strerror}); --no-html does without") from None
    return path


def page_environment() -> Environment:
    """The templates of this package. Everything put into a page is escaped, except what is marked safe here."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals["css"] = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    environment.globals["js"] = Markup((TEMPLATES / "page.js").read_text(encoding="utf-8"))
    return environment


def page_charts(charts: Sequence[Chart]) -> list[dict[str, object]]:
    """Charts as the template takes them: drawn, with their legend and what the pointer shows."""
    from markupsafe import Markup

    return [
        {
            "title": chart.title,
            "note": chart.note,
            "svg": Markup(draw(chart)),
            "near": pointer_json(chart),
            "legend": [
                {"label": series.label, "colour": series.colour, "dashed": series.dashed} for series in chart.series
            ],
        }
        for chart in charts
    ]


def page_bars(bars: Sequence[Bars]) -> list[dict[str, object]]:
    """Bars as the template takes them: drawn, with their legend."""
    from markupsafe import Markup

    return [{"title": one.title, "note": one.note, "svg": Markup(draw_bars(one)), "legend": one.legend} for one in bars]


def _page(record: RunRecord, report: Report, complete: bool) -> dict[str, object]:
    return {
        "title": title(report),
        "badges": list(badges(report, complete)),
        "facts": list(_facts(report)),
        "tiles": tiles(report),
        "sla": None if report.sla is None else _sla(report.sla),
        "latency": _latency(report),
        "charts": page_charts(run_charts(record, report)),
        "bars": page_bars(list(tier_bars(report))),
        "groups": _groups(report),
        "workers": _workers(report),
        "planner": _planner(report),
        "routing": _routing(report),
        "ends": {"columns": END_COLUMNS, "rows": end_rows(report)},
        "slowest": slowest_tables(record.requests, report),
        "caveats": list(_caveats(report, complete)),
        "definitions": [(name, definition(name)) for name in DEFINITIONS],
        "config": config_rows(report.meta.config, report.meta.origins),
        "trace": report.meta.trace.name,
        "seed": report.meta.seed,
    }


def title(report: Report) -> str:
    """The run in a few words."""
    workers, gpus = text.counted(len(report.workers), "worker"), text.counted(report.meta.gpus, "GPU")
    if report.planner is not None:
        return f"{report.meta.trace.name} on {gpus} at most, planned ({report.planner.name})"
    return f"{report.meta.trace.name} on {workers}, {gpus}"


def badges(report: Report, complete: bool) -> Iterator[Toned]:
    """What must not be overlooked: simulated or measured, synthetic or recorded, partial, the verdict."""
    yield Toned("SIMULATED", "note") if report.meta.simulated else Toned("MEASURED", "good")
    yield Toned("SYNTHETIC TRACE", "note") if report.meta.trace.synthetic else Toned("RECORDED TRACE", "soft")
    if not complete:
        yield Toned("PARTIAL: STOPPED HALF-WAY", "bad")
    if report.sla is not None:
        yield Toned(f"SLA {report.sla.verdict.upper()}", "good" if report.sla.verdict == "met" else "bad")


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "trace", trace_line(report)
    for line in report.meta.cluster:
        yield "cluster", line
    yield "router", report.meta.router
    if report.planner is not None:
        yield "planner", report.planner.line
    for latency in report.meta.latency:
        yield "latency model", latency_line(latency, several=len(report.meta.latency) > 1)
    yield "requests", counts_line(report)
    yield "duration", f"{text.time(report.makespan_s)} of virtual time, first arrival to last event"


def tiles(report: Report) -> list[Tile]:
    """The figures at the top."""
    latency, rates = report.latency, report.throughput
    return [
        Tile("TTFT p95", text.time(latency.ttft_s.p95)),
        Tile("ITL p95", text.time(latency.itl_s.p95)),
        Tile("E2E p95", text.time(latency.e2e_s.p95)),
        Tile("requests/s", text.figures(rates.requests_per_s)),
        Tile("output tokens/s", text.figures(rates.output_tokens_per_s)),
        Tile("output tokens/s per GPU", text.figures(rates.output_tokens_per_s_per_gpu)),
        Tile("tokens/s per user, mean", text.figures(report.tokens_per_s_per_user.mean)),
        Tile("prefix hit rate", text.share(report.hit_rate)),
        *_bound_tile(report),
        Tile("KV pool peak", text.share(report.kv_peak_share)),
        Tile("preemptions", text.count(report.preemptions)),
    ]


def _bound_tile(report: Report) -> list[Tile]:
    bound = report.hit_bound
    return [] if bound is None else [Tile("upper bound of it", text.share(bound.upper_bound))]


def _sla(sla: SlaResult) -> dict[str, object]:
    left_out = (
        f"; {text.counted(sla.cancelled, 'request')} cancelled by the client not counted" if sla.cancelled else ""
    )
    return {
        "verdict": sla.verdict,
        "tone": "good" if sla.verdict == "met" else "bad",
        "summary": f"{text.count(sla.good)} of {text.count(sla.counted)} requests keep every limit: attainment "
        f"{text.share(sla.attainment)}, goodput {text.figures(sla.goodput_rps)} requests/s"
        f" ({text.figures(sla.goodput_rps_per_gpu)} per GPU){left_out}.",
        "rows": [_limit_row(limit) for limit in sla.limits],
    }


def _limit_row(limit: LimitResult) -> list[str]:
    value = {"s": text.time(limit.value), "share": text.share(limit.value)}.get(limit.unit, text.figures(limit.value))
    verdict = limit.verdict + (
        f" ({text.counted(limit.unanswered, 'request')} without an answer)" if limit.unanswered else ""
    )
    if limit.statistic is None:
        return [limit.limit_text, value, verdict, "", "", ""]
    counts = (limit.requests_met, limit.requests_missed, limit.requests_undefined)
    return [limit.limit_text, value, verdict, *(text.count(n) for n in counts)]


def _latency(report: Report) -> dict[str, object]:
    names = ("mean", "± 95 %", "p50", "p90", "p95", "p99", "min", "max", "std", "count")
    return {"columns": ["", *names], "rows": [_latency_row(*row) for row in latency_rows(report)]}


def _latency_row(name: str, unit: str, sample: Distribution) -> list[str]:
    values = [sample.mean, interval_half(sample), sample.p50, sample.p90, sample.p95, sample.p99]
    values += [sample.min, sample.max, sample.std]
    return [f"{name}, {unit}", *(text.in_unit(value, unit) for value in values), text.count(sample.count)]


def _planner(report: Report) -> dict[str, object]:
    """What a planner did, and its changes with their reasons; empty without one."""
    return {
        "lines": list(planner_lines(report))[: 2 + len(report.planner.roles)] if report.planner is not None else [],
        "columns": DECISION_COLUMNS,
        "rows": decision_rows(report),
    }


def _routing(report: Report) -> dict[str, object]:
    """What the router did: lines, and tables of single decisions."""
    lines = [cache_line(report), *share_lines(report), *routing_lines(report)]
    hint = report.routing is not None and report.routing.effectiveness is not None and not report.meta.explained
    return {"lines": lines, "tables": list(decision_tables(report)), "hint": hint}


def _groups(report: Report) -> dict[str, object]:
    """What each worker group did and cost; columns that no group has a figure for are left out."""
    groups = report.groups
    rows = {
        "workers": [text.count(group.workers) for group in groups],
        "role": [group.role for group in groups],
        "GPUs": [f"{text.count(group.gpus)} x {group.gpu}" for group in groups],
        "requests": [text.count(group.requests) for group in groups],
        "prompt tokens": [text.large(group.input_tokens) for group in groups],
        "output tokens": [text.large(group.output_tokens) for group in groups],
        "busy": [text.share(group.busy_share) for group in groups],
        "GPU-hours held": [text.figures(hours(group.gpu_s)) for group in groups],
        "output tokens/s per GPU": [text.figures(group.output_tokens_per_s_per_gpu) for group in groups],
    }
    if any(group.energy_j is not None for group in groups):
        rows["kWh (estimate)"] = [text.figures(kwh(group.energy_j)) for group in groups]
    if any(group.cost_usd is not None for group in groups):
        rows["USD"] = [text.figures(group.cost_usd) for group in groups]
    if any(group.good is not None for group in groups):
        rows["goodput per GPU, requests/s"] = [text.figures(group.goodput_rps_per_gpu) for group in groups]
    names = [group.group for group in groups]
    return {"columns": ["", *rows], "rows": [list(cells) for cells in zip(names, *rows.values(), strict=True)]}


def _workers(report: Report) -> dict[str, object]:
    shown = sorted(report.workers, key=lambda worker: (-worker.busy_s, worker.worker_id))[:MAX_WORKER_ROWS]
    shown.sort(key=lambda worker: worker.worker_id)
    most = max((worker.requests for worker in shown), default=0) or 1
    rows = [
        [
            worker.name,
            worker.role,
            Bar(text.count(worker.requests), 100 * worker.requests / most),
            Bar(text.share(worker.busy_share), 100 * (worker.busy_share or 0.0)),
            text.figures(worker.mean_running),
            text.count(worker.peak_waiting),
            Bar(text.share(worker.kv_peak_share), 100 * (worker.kv_peak_share or 0.0)),
            Bar(text.share(worker.hit_rate), 100 * (worker.hit_rate or 0.0)),
            text.large(worker.input_tokens),
            text.large(worker.output_tokens),
            text.count(worker.preemptions),
        ]
        for worker in shown
    ]
    left_out = len(report.workers) - len(shown)
    columns = ["worker", "role", "requests", "busy", "running (mean)", "waiting (peak)", "KV peak", "hit rate"]
    return {
        "columns": [*columns, "prompt tokens", "output tokens", "preemptions"],
        "rows": rows,
        "left_out": f"the {len(shown)} busiest of {len(report.workers)} workers" if left_out else "",
    }


def _caveats(report: Report, complete: bool) -> Iterator[Toned]:
    meta = report.meta
    if not complete:
        yield Toned("The run was stopped half-way; requests that were open then are counted as open.", "bad")
    if meta.simulated:
        yield Toned("Every latency here is a prediction of the latency model; none was measured.", "note")
    if meta.trace.synthetic:
        yield Toned("The trace was drawn from fitted figures; nobody sent these requests.", "note")
    for reason, n in sorted(meta.trace.skipped.items()):
        yield Toned(f"{text.counted(n, 'row')} of the trace left out: {reason}", "note")
    for warning in meta.warnings:
        yield Toned(warning, "note")
    for option in meta.no_effect:
        yield Toned(f"Without effect: {option}", "note")
    for missing in meta.not_modelled:
        yield Toned(f"Not modelled: {missing}")
    yield Toned(f"Percentiles: {report.percentile_method}. Intervals of means: {report.interval_method}.", "soft")


def config_rows(config: Mapping[str, Json], origins: Mapping[str, str]) -> list[list[str]]:
    """The configuration as rows (dotted key, value, origin)."""
    return [[key, value, origins.get(key, "")] for key, value in flat_config(config)]
