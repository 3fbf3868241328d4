"""The report as text for a terminal: what ran, the latency table, rates, limits, and what is not modelled.

It returns text and prints nothing; colour only when asked for, so a file or a pipe gets plain characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Final

from reports import text
from reports.kv_tiers import tier_lines
from reports.metrics import Distribution
from reports.record import RunState
from reports.replica_views import planner_lines
from reports.report import GroupFigures, LatencyMeta, Report, StartMeta
from reports.routing_views import ENDS_SHOWN, cache_line, end_line, routing_lines, share_lines
from reports.verdict import LimitResult

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH: Final = 100
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")


def report_text(
    report: Report, *, path: str, run: RunState | None = None, colour: bool = False, width: int = WIDTH
) -> str:
    """The report in at most `width` columns; its last line is `path`, where the rest of it lies.

    `run` adds what the run cost, and that it was stopped; it is no part of the report because it differs between equal
    runs.
    """
    blocks = [
        _facts(_stopped(report, run)),
        _facts(_what_ran(report)),
        _latency_table(report),
        _facts(_what_came_out(report)),
        _facts(_limits(report)),
        _facts(_what_it_cost(report, run)),
        _facts(_caveats(report)),
    ]
    body = "\n\n".join(filter(None, (rendered(block, colour, width) for block in blocks if block is not None)))
    return f"{body}\n\nreport  {path}"


def rendered(block: RenderableType, colour: bool, width: int) -> str:
    """A rich table or grid as text, without trailing blanks; escape codes only with `colour`."""
    from rich.console import Console

    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(block)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


Fact = tuple[str, str, str]
"""Label, text, and style of the text."""


def _facts(rows: Iterator[Fact]) -> RenderableType | None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=12)
    grid.add_column(overflow="fold")
    for label, words, style in rows:
        grid.add_row(Text(label, style="bold"), Text(words, style=style))
    return grid if grid.row_count else None


def _stopped(report: Report, run: RunState | None) -> Iterator[Fact]:
    if run is not None and run.state == "partial":
        yield "PARTIAL:", partial_line(report, run), "red"


def partial_line(report: Report, run: RunState) -> str:
    """How far a run came that was stopped half-way."""
    had = text.count(report.demand.requests)
    of = "" if run.asked_requests is None else f" of {text.count(run.asked_requests)}"
    return f"stopped after {had}{of} requests of the trace; every figure is of these alone"


def _what_ran(report: Report) -> Iterator[Fact]:
    yield "trace", trace_line(report), ""
    for note in report.meta.trace.notes:
        yield "", note, "dim"
    for line in report.meta.cluster:
        yield "cluster", line, ""
    yield "router", report.meta.router, ""
    for latency in report.meta.latency:
        yield "latency", latency_line(latency, several=len(report.meta.latency) > 1), ""


def trace_line(report: Report) -> str:
    """Name, rows, span, rate, tokens, and whether it was recorded or made up."""
    trace, demand = report.meta.trace, report.demand
    parts = [
        f"{trace.name} ({trace.format}): {text.counted(demand.requests, 'request')} over {text.time(demand.span_s)},"
        f" {text.figures(demand.rate_rps)} requests/s",
        f"{text.large(demand.input_tokens)} tokens in, {text.large(demand.output_tokens)} out",
        "SYNTHETIC" if trace.synthetic else "recorded",
    ]
    if trace.source:
        parts.append(trace.source)
    return "; ".join(parts)


def latency_line(latency: LatencyMeta, *, several: bool) -> str:
    """Model, source, engine version and error band of the step latencies of a worker group."""
    version = f", {latency.engine_version}" if latency.engine_version else ""
    band = f"error band {latency.error_band}" if latency.error_band else "error band not known"
    group = f"{latency.group}: " if several else ""
    return "; ".join([f"{group}{latency.model}: {latency.source}{version}", band, *latency.notes])


def latency_rows(report: Report) -> list[tuple[str, str, Distribution]]:
    """(name, unit, figures) of each latency, in the order of the table."""
    latency = report.latency
    rows = [
        ("TTFT", latency.ttft_s),
        ("TPOT", latency.tpot_s),
        ("ITL", latency.itl_s),
        ("E2E", latency.e2e_s),
        ("queue wait", latency.queue_wait_s),
    ]
    if latency.router_wait_s.max:  # only a router with a queue makes anybody wait
        rows.append(("router wait", latency.router_wait_s))
    return [(name, text.common_unit(sample.p99), sample) for name, sample in rows]


def interval_half(sample: Distribution) -> float | None:
    """Half the width of the 95 % interval of the mean."""
    return None if sample.mean_ci95 is None else (sample.mean_ci95[1] - sample.mean_ci95[0]) / 2


def _latency_table(report: Report) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("latency", min_width=12)
    table.add_column("")
    for name in ("mean", "± 95 %", *STATISTICS[1:], "max"):
        table.add_column(name, justify="right", min_width=8)
    for name, unit, sample in latency_rows(report):
        half = interval_half(sample)
        cells = [sample.mean, half, *(sample.statistic(statistic) for statistic in STATISTICS[1:]), sample.max]
        shown = [text.in_unit(value, unit) for value in cells]
        shown[1] = "" if half is None else shown[1]
        table.add_row(Text(name, style="bold"), Text(unit, style="dim"), *shown)
    return table


def counts_line(report: Report) -> str:
    """Requests by status; only what happened, but always the completed ones."""
    counts = report.counts
    by_status: Sequence[tuple[str, int]] = [
        ("completed", counts.completed),
        ("rejected", counts.rejected),
        ("failed", counts.failed),
        ("cancelled", counts.cancelled),
        ("open", counts.open),
    ]
    shown = ", ".join(f"{text.count(n)} {status}" for status, n in by_status if n or status == "completed")
    return f"{shown} of {text.count(report.demand.requests)}"


def _what_came_out(report: Report) -> Iterator[Fact]:
    rates, gpus = report.throughput, report.meta.gpus
    yield "requests", counts_line(report), ""
    for end in report.ends[:ENDS_SHOWN]:
        yield "", end_line(end), "dim"
    yield (
        "requests/s",
        f"{text.figures(rates.requests_per_s)}, {text.figures(rates.requests_per_s_per_gpu)} per GPU",
        "",
    )
    user = report.tokens_per_s_per_user.mean
    yield (
        "tokens/s",
        f"{text.figures(rates.output_tokens_per_s)} output, {text.figures(rates.output_tokens_per_s_per_gpu)} per GPU"
        f" ({text.counted(gpus, 'GPU')}); {text.figures(user)} per user (mean)",
        "",
    )
    yield "duration", f"{text.time(report.makespan_s)} of virtual time, first arrival to last event", ""
    yield "cache", cache_line(report), ""
    yield "KV pool", f"peak {text.share(report.kv_peak_share)}; {text.counted(report.preemptions, 'preemption')}", ""
    shares = [worker.busy_share for worker in report.workers if worker.busy_share is not None]
    spread = f" ({text.share(min(shares))} to {text.share(max(shares))})" if len(shares) > 1 else ""
    yield "workers", f"busy {text.share(report.busy_share)}{spread}; fairness {text.figures(report.fairness)}", ""
    for line in share_lines(report):
        yield "", line, "dim"
    for at, line in enumerate(planner_lines(report)):
        yield "" if at else "planner", line, ""
    for at, line in enumerate(routing_lines(report)):
        yield "" if at else "routing", line, ""
    scenario = report.meta.config.get("faults")
    path = scenario.get("path") if isinstance(scenario, Mapping) else None
    if path or report.migrations:
        told = f" by {path}; what applied, and what became of it: faults.json" if path else ""
        yield "faults", f"{text.counted(report.migrations, 'migration')}{told}", ""
    for n, line in enumerate(tier_lines(report.meta.kvbm)):
        yield "" if n else "KV tiers", line, ""
    if report.meta.moved_bytes:
        yield "links", moved_line(report.meta.moved_bytes), ""
    for line in start_lines(report.meta.starts):
        yield "starts", line, ""
    if len(report.groups) > 1 or any(group.cost_usd is not None for group in report.groups):
        for group in report.groups:
            yield "group", group_line(group), ""


MOVED: Final = {
    "kv": "of KV handed over",
    "weights": "of weights",
    "host": "from host memory",
    "tier_loads": "up from KV tiers",
    "tier_fetches": "fetched ahead",
    "tier_stores": "down to KV tiers",
}
"""What simulated links carry, in words."""


def moved_line(moved_bytes: Mapping[str, int]) -> str:
    """What the simulated links of the run carried."""
    return "moved " + ", ".join(f"{text.large(n)}B {MOVED.get(what, what)}" for what, n in moved_bytes.items())


TIMED_BY: Final = {"formula": "by the formula of cold starts", "given": "startup_s as given"}


def start_lines(starts: Sequence[StartMeta]) -> Iterator[str]:
    """How long workers took to come up, by where that time comes from."""
    by_way: dict[str, list[StartMeta]] = {}
    for start in starts:
        how = f"weights over {start.over} (simulated links)" if start.over else TIMED_BY[start.timed_by]
        by_way.setdefault(how, []).append(start)
    for how, those in by_way.items():
        took_s = [start.up_s - start.ordered_s for start in those if start.up_s is not None]
        ends = dict.fromkeys(text.time(end(took_s)) for end in (min, max)) if took_s else ()
        spread = f" in {' to '.join(ends)}" if ends else ""
        left = len(those) - len(took_s)
        broken = f"; {text.count(left)} did not come up" if left else ""
        yield f"{text.counted(len(took_s), 'worker')} came up{spread}: {how}{broken}"


def group_line(group: GroupFigures) -> str:
    """What a worker group did and cost."""
    parts = [
        f"{group.group}: {text.counted(group.workers, group.role + ' worker')} on {group.gpus} x {group.gpu}",
        f"{text.counted(group.requests, 'request')}, {text.large(group.output_tokens)} tokens out",
        f"busy {text.share(group.busy_share)}",
        f"{text.figures(hours(group.gpu_s))} GPU-hours held",
    ]
    if group.energy_j is not None:
        parts.append(f"about {text.figures(kwh(group.energy_j))} kWh (estimate)")
    if group.cost_usd is not None:
        parts.append(f"{text.figures(group.cost_usd)} USD")
    if group.good is not None:
        parts.append(f"goodput {text.figures(group.goodput_rps_per_gpu)} requests/s per GPU held")
    return "; ".join(parts)


def hours(seconds: float | None) -> float | None:
    """Seconds as hours."""
    return None if seconds is None else seconds / 3600


def kwh(joules: float | None) -> float | None:
    """Joules as kilowatt-hours."""
    return None if joules is None else joules / 3.6e6


def _limits(report: Report) -> Iterator[Fact]:
    sla = report.sla
    if sla is None:
        return
    yield "SLA", f"{sla.verdict} ({sla.text})", "green" if sla.verdict == "met" else "red"
    for limit in sla.limits:
        yield "", limit_line(limit), "green" if limit.verdict == "met" else "red"
    left_out = f", {text.count(sla.cancelled)} cancelled not counted" if sla.cancelled else ""
    yield (
        "attainment",
        f"{text.share(sla.attainment)} ({text.count(sla.good)} of {text.count(sla.counted)} requests keep every limit"
        f"{left_out}); goodput {text.figures(sla.goodput_rps)} requests/s",
        "",
    )


def limit_line(limit: LimitResult) -> str:
    """A limit, the run's figure, the verdict, and the requests that kept it."""
    value = text.time(limit.value) if limit.unit == "s" else _plain_value(limit)
    line = f"{limit.limit_text}: {value}, {limit.verdict}"
    if limit.statistic is None:
        return line
    line += f"; kept by {text.count(limit.requests_met)}, broken by {text.count(limit.requests_missed)}"
    if limit.unanswered:
        line += f"; {text.counted(limit.unanswered, 'request')} without an answer judged as infinitely slow"
    return line


def _plain_value(limit: LimitResult) -> str:
    return text.share(limit.value) if limit.unit == "share" else f"{text.figures(limit.value)} {limit.unit}"


def _what_it_cost(report: Report, run: RunState | None) -> Iterator[Fact]:
    if run is None or run.cpu_s is None:
        return
    rate = report.demand.requests / run.cpu_s if run.cpu_s else None
    yield "cost", f"{text.figures(run.cpu_s)} CPU seconds, {text.figures(rate)} requests per CPU-second", ""


def _caveats(report: Report) -> Iterator[Fact]:
    meta = report.meta
    if meta.simulated:
        yield "simulated", "every latency above is a prediction of the latency model, none was measured", "yellow"
    for reason, n in sorted(meta.trace.skipped.items()):
        yield "skipped", f"{text.counted(n, 'row')} of the trace: {reason}", "yellow"
    for warning in meta.warnings:
        yield "warning", warning, "yellow"
    for option in meta.no_effect:
        yield "no effect", option, "yellow"
    if meta.not_modelled:
        yield "not modelled", "; ".join(meta.not_modelled), ""
