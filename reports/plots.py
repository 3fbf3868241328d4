"""Which charts a run gets: latency distributions, the run over time, and how evenly the workers were used.

Charts are made from the record through reports/timeline.py and drawn by reports/svg.py; a comparison uses the same
functions for both runs. A chart without data is left out rather than shown empty.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import numpy as np

from reports import text
from reports.build import outcomes_of
from reports.columns import F64
from reports.record import RunRecord
from reports.report import Report
from reports.svg import MAX_DOTS, Axis, Chart, Mark, Series
from reports.timeline import Timeline, timeline

MAX_LINES: Final = 8
"""Workers that get a line of their own; more are shown as a band and a median."""

Say: TypeAlias = Callable[[float], str]
"""How a value reads."""

_CDF_SHARES: Final = np.concatenate([np.linspace(0, 0.9, 91), np.linspace(0.905, 0.99, 18), np.linspace(0.991, 1, 10)])


def run_charts(record: RunRecord, report: Report) -> list[Chart]:
    """Every chart of the report page, in reading order; none for a run without requests."""
    if not report.demand.requests:
        return []
    over = _over(record, report)
    charts = [
        *_distributions(record, report, over),
        *_latencies_over_time(report, over),
        *_replicas_over_time(record, report, over),
        *_load_over_time(over),
        *_workers_over_time(report, over),
        _ttft_by_prompt(record),
    ]
    return [chart for chart in charts if not chart.empty]


def _replicas_over_time(record: RunRecord, report: Report, over: Timeline) -> list[Chart]:
    if report.planner is None:
        return []
    from reports.replica_views import replica_charts

    clock = Clock(over)
    return list(replica_charts(record.folder, clock.factor, clock.axis(), float(over.edges_s[-1])))


def first_charts(record: RunRecord, report: Report) -> list[Chart]:
    """The six charts that tell most, in reading order; one may be empty."""
    over = _over(record, report)
    ttft, itl = _latencies_over_time(report, over)
    return [
        ttft,
        itl,
        _all_latencies(record, over),
        _in_the_engines(over),
        _kv_in_use(report, over, most=2),
        _requests_per_second(over),
    ]


def _over(record: RunRecord, report: Report) -> Timeline:
    return timeline(record, tuple(worker.worker_id for worker in report.workers))


# --- axes -------------------------------------------------------------------------------------------------------------


class Clock:
    """The time axis of a run, in the unit that suits its length; `centres` are its buckets in that unit."""

    def __init__(self, over: Timeline, others: Sequence[Timeline] = ()) -> None:
        """`others` are shown on the same axis, so that it must hold all of them."""
        low_s = min(float(one.edges_s[0]) for one in (over, *others))
        high_s = max(float(one.edges_s[-1]) for one in (over, *others))
        units = ((600.0, 1.0, "s"), (36_000.0, 60.0, "min"), (864_000.0, 3600.0, "h"), (math.inf, 86_400.0, "d"))
        self.factor, self.unit = next((factor, unit) for limit, factor, unit in units if high_s - low_s < limit)
        self.centres = over.centres_s / self.factor
        self._low, self._high = low_s / self.factor, high_s / self.factor
        self.bucket = f"buckets of {text.time(float(over.edges_s[1] - over.edges_s[0]))}"

    def axis(self) -> Axis:
        return Axis(title=f"virtual time, {self.unit}", tick=number_tick, low=self._low, high=self._high)

    def moments(self) -> tuple[F64, list[str]]:
        return self.centres, [f"{value:.4g} {self.unit}" for value in self.centres]

    def line(self, label: str, values: F64, colour: int, say: Say, *, dashed: bool = False) -> Series:
        """One value per bucket as a line."""
        says = [say(float(value)) for value in values]
        return Series(label=label, x=self.centres, y=values, colour=colour, dashed=dashed, says=says)

    def band(self, label: str, high: F64, low: F64, colour: int, says: Sequence[str]) -> Series:
        """A filled band, one pair of edges per bucket."""
        return Series(label=label, x=self.centres, y=high, low=low, colour=colour, kind="band", says=says)

    def chart(self, title: str, y: Axis, series: Sequence[Series], note: str, marks: Sequence[Mark] = ()) -> Chart:
        """A chart over this clock's time."""
        note = f"{note}; {self.bucket}" if note else self.bucket
        return Chart(title=title, note=note, x=self.axis(), y=y, series=series, marks=marks, moments=self.moments())


def time_axis(title: str, *samples: F64) -> Axis:
    """A latency axis: logarithmic where linear would hide the small or the large."""
    known = np.concatenate([sample[np.isfinite(sample) & (sample > 0)] for sample in samples])
    log = len(known) > 0 and float(known.max()) > 30.0 * float(np.median(known))
    return Axis(title=title, tick=_time_tick, log=log, low=None if log else 0.0)


def _time_tick(value_s: float) -> str:
    if not value_s:
        return "0"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.6g} µs"
    return f"{value_s * 1e3:.6g} ms" if value_s < 1.0 else f"{value_s:.6g} s"


def number_tick(value: float) -> str:
    return text.large(value) if abs(value) >= 10_000 else f"{value:,.6g}"


def _share_tick(value: float) -> str:
    return f"{value * 100:.6g} %"


def _limit_marks(report: Report, axis: Literal["x", "y"], colours: dict[str, int]) -> list[Mark]:
    """The limits of the SLA on these metrics, in the colours of their series."""
    return [
        Mark(axis=axis, at=limit.limit, label=limit.limit_text, colour=colours[limit.metric])
        for limit in (report.sla.limits if report.sla else ())
        if limit.metric in colours
    ]


# --- distributions ----------------------------------------------------------------------------------------------------


def _distributions(record: RunRecord, report: Report, over: Timeline) -> Iterator[Chart]:
    outcomes = outcomes_of(record.requests)
    done = outcomes.completed
    waits = record.requests.floats("queue_wait_s")[done]
    shown = [
        sample_cdf("TTFT", outcomes.ttft_s[done], 0),
        sample_cdf("E2E", outcomes.e2e_s[done], 1),
        sample_cdf("queue wait", waits, 2, dashed=True),
    ]
    if report.latency.router_wait_s.max:
        shown.append(sample_cdf("in the router", record.requests.floats("router_wait_s")[done], 5, dashed=True))
    yield cdf_chart(
        "Latency of requests",
        shown,
        _limit_marks(report, "x", {"ttft": 0, "e2e": 1}),
    )
    yield cdf_chart(
        "Latency of tokens",
        [gap_cdf("ITL (pooled gaps)", over, 3), sample_cdf("TPOT (per request)", outcomes.tpot_s[done], 4)],
        _limit_marks(report, "x", {"itl": 3, "tpot": 4}),
    )


def _all_latencies(record: RunRecord, over: Timeline) -> Chart:
    outcomes = outcomes_of(record.requests)
    samples = (("TPOT", outcomes.tpot_s, 4), ("TTFT", outcomes.ttft_s, 0), ("E2E", outcomes.e2e_s, 1))
    of_requests = [sample_cdf(name, values[outcomes.completed], colour) for name, values, colour in samples]
    return cdf_chart("Latency distributions", [gap_cdf("ITL", over, 3), *of_requests])


def _ttft_by_prompt(record: RunRecord) -> Chart:
    outcomes = outcomes_of(record.requests)
    isl, y = record.requests.floats("isl")[outcomes.completed], outcomes.ttft_s[outcomes.completed]
    thinned = f"; one in {-(-len(y) // MAX_DOTS)} requests is shown" if len(y) > MAX_DOTS else ""
    wide = len(isl) > 0 and float(isl.max()) > 50.0 * float(np.median(isl))
    return Chart(
        title="TTFT by prompt length",
        note=f"the lower edge is the prompt alone, what is above it is waiting{thinned}",
        x=Axis(title="prompt tokens", tick=number_tick, log=wide),
        y=time_axis("TTFT", y),
        series=[Series(label="requests", x=isl, y=y, colour=0, kind="dots")],
    )


def sample_cdf(label: str, values: F64, colour: int, *, dashed: bool = False) -> Series:
    """The distribution of a sample as a line from its minimum to its maximum."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Series(label=label, x=np.empty(0), y=np.empty(0), colour=colour)
    x = np.quantile(known, _CDF_SHARES)
    says = [f"p{share * 100:.4g} {text.time(float(value))}" for share, value in zip(_CDF_SHARES, x, strict=True)]
    return Series(label=label, x=x, y=_CDF_SHARES, colour=colour, dashed=dashed, says=says)


def gap_cdf(label: str, over: Timeline, colour: int, *, dashed: bool = False) -> Series:
    """The distribution of the pooled gaps, from the histogram of the timeline."""
    x, y = over.itl_cdf
    says = [f"p{share * 100:.4g} {text.time(float(value))}" for share, value in zip(y, x, strict=True)]
    return Series(label=label, x=x, y=y, colour=colour, kind="step", dashed=dashed, says=says)


def cdf_chart(title: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> Chart:
    """Distributions on one logarithmic latency axis, from the first percentile on."""
    known = np.concatenate([one.x[(one.y >= 0.01) & (one.x > 0)] for one in series])
    low = float(known.min()) if len(known) else None
    axis = Axis(title="latency", tick=_time_tick, log=True, low=low)
    return Chart(
        title=title,
        note="share of the sample at or below a latency",
        x=axis,
        y=Axis(title="share", tick=_share_tick, low=0.0, high=1.0),
        series=series,
        marks=marks,
    )


# --- over time --------------------------------------------------------------------------------------------------------


def _latencies_over_time(report: Report, over: Timeline) -> Iterator[Chart]:
    for name, by, rows, colour in (("TTFT", "arrival", over.ttft_s, 0), ("ITL", "gap", over.itl_s, 3)):
        marks = _limit_marks(report, "y", {name.lower(): colour})
        yield latency_over_time(f"{name} over time", by, rows, Clock(over), colour, marks)


def latency_over_time(title: str, by: str, rows: F64, clock: Clock, colour: int, marks: Sequence[Mark] = ()) -> Chart:
    """p50, p95 and the longest of each bucket, so that a stall is seen and not averaged away."""
    p50, p95, longest = rows
    series = [
        replace(clock.line("longest", longest, 5, text.time), kind="dots"),
        clock.line("p95", p95, colour + 1, text.time),
        clock.line("p50", p50, colour, text.time),
    ]
    note = f"p50, p95 and the longest by {by}"
    return clock.chart(title, time_axis("latency", p50, p95, longest), series, note, marks)


def _load_over_time(over: Timeline) -> Iterator[Chart]:
    clock = Clock(over)
    yield _in_the_engines(over)
    yield _requests_per_second(over)
    yield clock.chart(
        "Tokens per second",
        Axis(title="tokens/s", tick=number_tick, low=0.0),
        [
            clock.line("prompt tokens computed", over.prompt_tokens_per_s, 1, text.figures),
            clock.line("output tokens", over.output_tokens_per_s, 0, text.figures),
        ],
        "",
    )
    hits = over.hit_rate if np.nansum(over.hit_rate) > 0 else np.full_like(over.hit_rate, np.nan)
    yield clock.chart(
        "Prefix hit rate",
        Axis(title="share of tokens", tick=_share_tick, low=0.0),
        [clock.line("hit rate", hits, 2, text.share)],
        "cached / all prompt tokens, by admission",
    )


def _in_the_engines(over: Timeline) -> Chart:
    clock = Clock(over)
    running, waiting = over.levels["running"].sum(axis=0), over.levels["waiting"].sum(axis=0)
    return clock.chart(
        "Requests in the engines",
        Axis(title="requests", tick=number_tick, low=0.0),
        [
            clock.band("waiting", running + waiting, running, 1, [text.figures(float(n)) for n in waiting]),
            clock.band("running", running, np.zeros_like(running), 0, [text.figures(float(n)) for n in running]),
        ],
        "waiting on top of running; means",
    )


def _requests_per_second(over: Timeline) -> Chart:
    clock, arrived = Clock(over), over.arrivals_per_s
    return clock.chart(
        "Requests per second",
        Axis(title="requests/s", tick=number_tick, low=0.0),
        [
            clock.band("arrived", arrived, np.zeros_like(arrived), 6, [text.figures(float(n)) for n in arrived]),
            clock.line("completed", over.completions_per_s, 2, text.figures),
        ],
        "",
    )


def _workers_over_time(report: Report, over: Timeline) -> Iterator[Chart]:
    share, count = Axis(title="share", tick=_share_tick, low=0.0), Axis(title="requests", tick=number_tick, low=0.0)
    names, clock = [worker.name for worker in report.workers], Clock(over)
    yield _kv_in_use(report, over)
    there = _there(report, over)
    running, busy = over.levels["running"] * there, over.busy * there
    yield _per_worker("Running requests per worker", count, clock, running, names, text.figures)
    yield _per_worker("Busy share per worker", replace(share, high=1.0), clock, busy, names, text.share)


def _there(report: Report, over: Timeline) -> F64:
    """1 for each worker and bucket in which it was there, NaN elsewhere; 1 throughout where nobody plans."""
    found = np.ones((len(over.worker_ids), len(over.edges_s) - 1))
    if report.planner is None:
        return found
    known = {worker.worker_id: worker for worker in report.meta.workers}
    for place, worker_id in enumerate(over.worker_ids):
        worker = known.get(worker_id)
        if worker is None:
            continue
        from_s = worker.up_from_s if worker.held_from_s is not None else -math.inf
        until_s = math.inf if worker.held_until_s is None else worker.held_until_s
        if from_s is None:
            found[place] = np.nan  # it never came up
        else:
            found[place, (over.edges_s[1:] <= from_s) | (over.edges_s[:-1] >= until_s)] = np.nan
    return found


def _kv_in_use(report: Report, over: Timeline, most: int = MAX_LINES) -> Chart:
    sizes = {worker.worker_id: worker.total_blocks for worker in report.meta.workers}
    totals = [float(sizes.get(worker_id) or np.nan) for worker_id in over.worker_ids]
    kv_share: F64 = over.levels["active_blocks"] / np.array(totals, dtype=np.float64).reshape(-1, 1)
    kv_share = kv_share * _there(report, over)
    share, names = Axis(title="share", tick=_share_tick, low=0.0), [worker.name for worker in report.workers]
    return _per_worker("KV pool in use", share, Clock(over), kv_share, names, text.share, most)


def _per_worker(
    title: str, y: Axis, clock: Clock, rows: F64, names: Sequence[str], say: Say, most: int = MAX_LINES
) -> Chart:
    """A line per worker; where that would be a tangle, the range of the workers and their median."""
    if len(names) <= most:
        lines = [clock.line(name, row, place, say) for place, (name, row) in enumerate(zip(names, rows, strict=True))]
        return clock.chart(title, y, lines, "means")
    with warnings.catch_warnings():  # a bucket without any worker has no median, and that is no fault
        warnings.simplefilter("ignore", RuntimeWarning)
        middle = np.nanmedian(rows, axis=0)
    lowest, highest = np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0)
    says = [f"{say(float(a))} to {say(float(b))}" for a, b in zip(lowest, highest, strict=True)]
    series = [clock.band("range", highest, lowest, 0, says), clock.line("median", middle, 0, say)]
    return clock.chart(title, y, series, f"{len(names)} workers; means")
