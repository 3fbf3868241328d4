"""Repeats of a live run beside their twin: each figure with the spread that the live system has of itself.

An error that is smaller than that spread cannot be told from chance, and is never called accurate here. Figures are
those of the rows that the twin measures (its `trace.warmup` rows are left out of the live runs as well).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from policies.errors import ConfigError
from policies.frozen import frozen
from reports import metrics
from reports.build import outcomes_of
from reports.columns import F64, I64
from reports.gaps import GAP_COLUMNS
from reports.measured import warmup_rows
from reports.metrics import Distribution, distribution
from reports.record import RunRecord
from reports.report import Report, stable_json

SCHEMA: Final = "dynatwin.fidelity/1"
STATISTICS: Final = ("mean", "p50", "p90", "p99")
USUAL_REPEATS: Final = 3
"""Fewer say little about a spread."""
CLOSE: Final = 0.15
"""Relative error of a mean that passes for close, where the spread is smaller."""
SWAPPED: Final = 16
"""How many places a request may be off in another run of the same load."""
JUDGED: Final = ("TTFT mean", "ITL mean", "E2E mean")

Unit = Literal["s", "share", "count", "rate"]
Rows = I64
"""Places of requests in a run."""
Flags = npt.NDArray[np.bool_]


@frozen
class Figure:
    """One figure: mean, lowest and highest of the live runs (None where one of them does not know it), the twin's,
    and the relative error of the twin. `inside`: the twin's lies between the lowest and the highest."""

    name: str
    unit: Unit
    live: float | None
    low: float | None
    high: float | None
    twin: float | None
    error: float | None
    inside: bool | None


@frozen
class Part:
    """Where a difference of mean E2E comes from, in seconds: `ttft_s` of it is waiting and the prompt, `decode_s` the
    rest of the answer."""

    ttft_s: float
    decode_s: float


@frozen
class Fidelity:
    """Live runs against their twin. `rows` were compared, those from `first_row` on. `same_worker`: share of requests
    that the twin sent where each live run did; `live_same_worker` the same between the first live run and each other.
    `close`: whether the judged means are; None where one is not known."""

    live: tuple[str, ...]
    twin: str
    rows: int
    first_row: int
    figures: tuple[Figure, ...]
    same_worker: tuple[float, ...]
    live_same_worker: tuple[float, ...]
    e2e_part: Part | None
    close: bool | None
    latency: tuple[str, ...]
    notes: tuple[str, ...]
    not_modelled: tuple[str, ...]
    schema: str = SCHEMA

    def figure(self, name: str) -> Figure:
        return next(one for one in self.figures if one.name == name)

    def to_json(self) -> str:
        """As JSON: sorted keys, null for what is undefined."""
        return stable_json(self)


def compare_repeats(live: Sequence[Path], twin: Path, *, block: int | None = None) -> Fidelity:
    """Compare run folders; with `block` only every other block of so many requests, beginning with the second (those
    that a fit to the other ones has not seen). ConfigError where one of them is none, or had other requests than the
    others."""
    lives, sim = [_Run(folder) for folder in live], _Run(twin)
    in_live = _matched(lives, sim)
    rows = in_live[0]
    first = warmup_rows(sim.report.meta)
    if first >= len(rows):
        raise ConfigError(f"{twin}: all of its {len(rows):,} rows are warm-up; set trace.warmup lower")
    if first and block is not None:
        raise ConfigError(f"{twin}: has trace.warmup = {first}, so blocks of {block} are a part of a part; set one")
    runs = [*lives, sim]
    compared = np.arange(first, len(rows))
    if block is not None:
        compared = compared[rows[compared] // block % 2 == 1]
    if not len(compared):
        raise ConfigError(
            f"blocks of {block}: {twin} has {len(rows):,} rows, so there is no second block; take smaller ones"
        )
    places = [*(each[compared] for each in in_live), compared]
    done = np.logical_and.reduce([run.completed[at] for run, at in zip(runs, places, strict=True)])
    found = [run.figures(at, done) for run, at in zip(runs, places, strict=True)]
    figures = tuple(_figure(name, unit, [one.get(name) for one in found]) for name, unit in _units())
    by_name = {one.name: one for one in figures}
    judged = [by_name[name] for name in JUDGED]
    workers = [run.workers[at] for run, at in zip(runs, places, strict=True)]
    return Fidelity(
        live=tuple(run.name for run in lives),
        twin=sim.name,
        rows=len(done),
        first_row=first,
        figures=figures,
        same_worker=tuple(float((each == workers[-1]).mean()) for each in workers[:-1]),
        live_same_worker=tuple(float((each == workers[0]).mean()) for each in workers[1:-1]),
        e2e_part=_part(by_name),
        close=None if any(one.error is None for one in judged) else all(map(is_close, judged)),
        latency=tuple(
            f"{one.group}: {one.model}, {one.source}; error {one.error_band}" for one in sim.report.meta.latency
        ),
        notes=tuple(_notes(lives, sim, first, block, int((~done).sum()))),
        not_modelled=sim.report.meta.not_modelled,
    )


def is_close(figure: Figure) -> bool:
    """Whether the twin is within the larger of 15 % and the live spread."""
    return bool(figure.inside) or (figure.error is not None and abs(figure.error) <= CLOSE)


class _Run:
    """One run folder, read; columns are those of all its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.record, self.report = RunRecord(folder), Report.load(folder)
        self.requests = self.record.requests
        self.outcomes = outcomes_of(self.requests)
        self.completed = self.outcomes.completed
        self.workers = self.requests.ints("worker_id", null=-1)

    def figures(self, at: Rows, done: Flags) -> Mapping[str, float | None]:
        """The figures of the requests `at` these places; latencies of those that are `done` in every run. Gaps are
        those that begin while such requests arrive, rates those from the first of them to the end of the run."""
        outcomes, arrivals = self.outcomes, self.requests.floats("arrival_s")
        in_order = np.sort(at)
        columns, bounds_s = (*GAP_COLUMNS, "start_s"), _bounds_s(arrivals, in_order)
        itl = metrics.itl_s(lambda: self.record.steps.batches(columns), bounds_s=bounds_s)
        found: dict[str, float | None] = {}
        for label, values in (
            ("TTFT", distribution(outcomes.ttft_s[at][done])),
            ("ITL", itl),
            ("TPOT", distribution(outcomes.tpot_s[at][done])),
            ("E2E", distribution(outcomes.e2e_s[at][done])),
        ):
            found.update(_statistics(label, values))
        begin = in_order[0]
        own = self.completed[begin:]
        last, tokens = (self.requests.floats(name)[begin:] for name in ("last_token_s", "output_tokens"))
        elapsed_s = float(np.nanmax(last)) - float(arrivals[begin]) if own.any() else None
        found["requests/s"] = metrics.per_second(int(own.sum()), elapsed_s)
        found["output tokens/s"] = metrics.per_second(int(tokens[own].sum()), elapsed_s)
        found["hit rate"] = self._hit_rate(at, done)
        found["preemptions"] = float(self.report.preemptions) if self.report.meta.simulated else None
        found["completed"] = float(self.completed[at].sum())
        return found

    def _hit_rate(self, at: Rows, done: Flags) -> float | None:
        """Cached over all prompt tokens, of completed requests whose engine told."""
        cached = self.requests.floats("cached_tokens")[at]
        known = done & ~np.isnan(cached)
        if not self.report.meta.hash_known or not known.any():
            return None
        return metrics.hit_rate(cached[known], self.requests.floats("isl")[at][known])


def _bounds_s(arrivals: F64, at: Rows) -> F64:
    """When requests `at` these places (ascending) arrive, as ends of intervals: each from the first of a row of
    neighbours to the next request that is not among them, or to the end."""
    cuts = np.flatnonzero(np.diff(at) > 1)
    firsts, lasts = at[np.r_[0, cuts + 1]], at[np.r_[cuts, len(at) - 1]]
    after = np.r_[arrivals, np.inf][lasts + 1]
    return np.stack([arrivals[firsts], after], axis=1).ravel()


def _statistics(label: str, values: Distribution) -> Iterator[tuple[str, float | None]]:
    return ((f"{label} {name}", values.statistic(name)) for name in STATISTICS)


def _units() -> Iterator[tuple[str, Unit]]:
    for label in ("TTFT", "ITL", "TPOT", "E2E"):
        for name in STATISTICS:
            yield f"{label} {name}", "s"
    yield "requests/s", "rate"
    yield "output tokens/s", "rate"
    yield "hit rate", "share"
    yield "preemptions", "count"
    yield "completed", "count"


def _figure(name: str, unit: Unit, values: Sequence[float | None]) -> Figure:
    *live, twin = values
    known = [value for value in live if value is not None]
    if len(known) < len(live):
        return Figure(name=name, unit=unit, live=None, low=None, high=None, twin=twin, error=None, inside=None)
    mean, low, high = sum(known) / len(known), min(known), max(known)
    return Figure(
        name=name,
        unit=unit,
        live=mean,
        low=low,
        high=high,
        twin=twin,
        error=None if twin is None or not mean else twin / mean - 1,
        inside=None if twin is None else low <= twin <= high,
    )


def _part(figures: Mapping[str, Figure]) -> Part | None:
    """E2E is TTFT and the rest, and so are differences of their means over the same requests."""
    ttft, e2e = figures["TTFT mean"], figures["E2E mean"]
    if ttft.live is None or ttft.twin is None or e2e.live is None or e2e.twin is None:
        return None
    first = ttft.twin - ttft.live
    return Part(ttft_s=first, decode_s=e2e.twin - e2e.live - first)


def _matched(lives: Sequence[_Run], sim: _Run) -> list[Rows]:
    """Where each row of the twin stands in each live run. A trace has no rows of requests that delivered nothing; the
    others are found by the ids that the first live run gave them. Requests that came at nearly the same time may have
    changed places between live runs."""
    first = lives[0]
    rows: Rows = np.arange(sim.requests.rows)
    if sim.requests.rows != first.requests.rows:
        places = {name: at for at, name in enumerate(first.requests.texts("request_id"))}
        found = [places.get(name) for name in sim.requests.texts("request_id")]
        if None in found:
            raise _other_requests(first, sim, "rows")
        rows = np.array(found, dtype=np.int64)
    _check_alike(first, rows, sim, np.arange(len(rows)))
    matched = [rows]
    for run in lives[1:]:
        at = _same_requests(first, run)[rows]
        _check_alike(first, rows, run, at)
        matched.append(at)
    return matched


def _check_alike(first: _Run, rows: Rows, run: _Run, at: Rows) -> None:
    both = first.completed[rows] & run.completed[at]  # of the others the output length is what each delivered
    for name, where in (("isl", np.ones(len(rows), dtype=np.bool_)), ("osl", both)):
        if not np.array_equal(first.requests.floats(name)[rows][where], run.requests.floats(name)[at][where]):
            raise _other_requests(first, run, name)


def _same_requests(first: _Run, run: _Run) -> Rows:
    """For each request of one run its place in the other: the nth of its lengths there, no further off than `SWAPPED`
    places. An answer that was cut has no length to go by."""
    if run.requests.rows != first.requests.rows:
        raise _other_requests(first, run, "rows")
    whole = bool(first.completed.all() and run.completed.all())
    names = ("isl", "osl") if whole else ("isl",)
    keys = [np.stack([one.requests.floats(name) for name in names]) for one in (first, run)]
    here, there = (np.lexsort((np.arange(key.shape[1]), *key[::-1])) for key in keys)
    at = np.empty(len(here), dtype=np.int64)
    at[here] = there
    if not np.array_equal(keys[0][:, here], keys[1][:, there]) or np.abs(at - np.arange(len(at))).max() > SWAPPED:
        raise _other_requests(first, run, " and ".join(names))
    return at


def _other_requests(a: _Run, b: _Run, by: str) -> ConfigError:
    return ConfigError(
        f"{b.folder}: had other requests than {a.folder} ({b.requests.rows:,} and {a.requests.rows:,} rows, compared "
        f"by {by}); give repeats of one load, and the replay of the first of them"
    )


def _notes(lives: Sequence[_Run], sim: _Run, first: int, block: int | None, cut: int) -> Iterator[str]:
    for run in (*lives, sim):
        if not run.record.complete:
            yield f"{run.name} is partial: it was stopped half-way"
    if len(lives) < USUAL_REPEATS:
        yield f"{len(lives)} repeats say little about the live spread; record {USUAL_REPEATS} or more"
    made_up = [run.name for run in lives if run.report.meta.simulated]
    if made_up:
        yield f"simulated as well, and no measurement: {', '.join(made_up)}"
    if not sim.report.meta.simulated:
        yield f"{sim.name} was measured, not simulated: it is one more repeat"
    if first:
        yield f"the first {first:,} requests are played and left out of all figures (trace.warmup of {sim.name})"
    if block is not None:
        yield (
            f"every other block of {block:,} requests is compared, from the second on; ITL is that of the times in "
            f"which they arrive, requests/s and tokens/s are those of all"
        )
    if cut:
        yield f"latencies leave out {cut:,} requests that did not complete in every run"
