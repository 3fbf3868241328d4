"""`twin plan`: planners on one trace, beside static counts and an oracle, each simulated with the same demand.

What static counts and the oracle have is found by simulation too (`twin.provisioning`). Runs lie below one folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from policies.errors import ConfigError
from policies.frozen import frozen
from reports.columns import F64
from reports.plan_table import (
    PlanRow,
    PlanRun,
    PlanTable,
    by_interval,
    plan_run,
    share_by_interval,
    summary,
    write_plan,
)
from reports.report import Report
from reports.sla import parse_sla
from twin import provisioning
from twin.config import Config, WorkerGroup
from twin.config_planner import NONE
from twin.forecasting import Windows, windows_of
from twin.planning import planner_settings, startup_s
from twin.provisioning import Counts, Needs
from twin.replay import replay, run_name
from twin.scheduled import Step, written
from twin.wiring import build_cluster

USUAL = ("throughput", "load", "hybrid", "lookahead")
TARGET = 0.95
TRIED = "tried"
"""Where counts are tried, below the folder of a comparison, until what is needed is known."""

Progress = Callable[[str], None]


@frozen
class Compared:
    """Where a comparison was written, and what it came to."""

    folder: Path
    page: Path
    table: PlanTable


def compare(
    config: Config,
    planners: Sequence[str] = USUAL,
    *,
    seeds: int = 1,
    target: float = TARGET,
    most_gpus: int | None = None,
    out: Path | None = None,
    html: bool = True,
    pages: bool = False,
    progress: Progress = lambda _: None,
) -> Compared:
    """Simulate every way to plan. `config` has the limits, and the workers to begin with; `target` is the share of
    requests that is to keep them in each interval. Raises TwinError, or TraceError for bad input."""
    if config.sla is None:
        raise ConfigError("no limits to plan for: give --sla, e.g. --sla ttft=500ms,itl=50ms")
    if not planners:
        raise ConfigError("no planner to compare: name one with --planner")
    return _Comparison(config, planners, seeds, target, most_gpus, out, progress, pages=pages).run(html=html)


class _Comparison:
    """One comparison."""

    def __init__(
        self,
        config: Config,
        planners: Sequence[str],
        seeds: int,
        target: float,
        most_gpus: int | None,
        out: Path | None,
        progress: Progress,
        *,
        pages: bool,
    ) -> None:
        self._planners = planners
        self._seeds = tuple(range(config.seed, config.seed + seeds))
        self._target = target
        self._progress = progress
        self._pages = pages
        self._plain = replace(config, planner=replace(config.planner, name=NONE))
        self._asking = replace(config, planner=replace(config.planner, name="throughput"))
        assert config.sla is not None
        self._sla = parse_sla(config.sla)
        self._windows: Windows = windows_of(self._asking)
        self._settings = planner_settings(self._asking, build_cluster(self._asking).groups)
        self._roles = tuple(pool.role for pool in self._settings.pools)
        own = sum(group.count * group.gpus for group in config.workers)
        self._most_gpus = most_gpus or config.planner.max_gpu_budget or max(8 * own, 64)
        self._folder = out if out is not None else Path("runs") / f"plan-{run_name(self._asking)}"
        self._synthetic = False

    def run(self, *, html: bool) -> Compared:
        needs = self._needs()
        at_peak, at_mean = provisioning.peak(needs), provisioning.mean(needs)
        interval_s = self._windows.interval_s
        rows = [
            self._fixed("static peak", "static", at_peak, "which interval needs most"),
            self._fixed("static mean", "static", at_mean, "what is needed on average"),
            self._oracle(needs, interval_s),
            *(self._planned(name) for name in self._planners),
        ]
        notes = [*self._notes(needs)]
        best = summary(rows)
        if best is not None:
            notes.append(best)
        assert self._plain.trace.path is not None
        table = PlanTable(
            trace=self._plain.trace.path.name,
            sla=str(self._plain.sla),
            target=self._target,
            interval_s=interval_s,
            intervals=len(self._windows.num_req),
            unreachable=needs.unreachable,
            synthetic=self._synthetic,
            seeds=self._seeds,
            rows=tuple(rows),
            notes=tuple(notes),
        )
        page = write_plan(self._folder, table, html=html)
        return Compared(folder=self._folder, page=page, table=table)

    # ------------------------------------------------------------ ways to plan

    def _fixed(self, name: str, kind: str, counts: Counts, knows: str) -> PlanRow:
        workers = dict(zip(self._roles, counts, strict=True))
        config = _with_workers(self._plain, {role.value: n for role, n in workers.items()})
        line = f"{provisioning.named(counts, self._roles)} workers throughout"
        runs = [self._one(name, config, seed, [Step(0.0, workers)]) for seed in self._seeds]
        return PlanRow(name=name, kind=kind, line=line, knows=knows, runs=tuple(runs))

    def _oracle(self, needs: Needs, interval_s: float) -> PlanRow:
        start_s = self._settings.startup_s
        steps = provisioning.oracle_steps(needs, interval_s, start_s)
        first = {role.value: n for role, n in steps[0].workers.items()}
        config = _with_workers(self._plain, first)
        line = f"as many as each interval needs, started {start_s:g} s ahead"
        runs = [self._one("oracle", config, seed, steps) for seed in self._seeds]
        return PlanRow(name="oracle", kind="oracle", line=line, knows="the future", runs=tuple(runs))

    def _planned(self, name: str) -> PlanRow:
        config = replace(self._plain, planner=replace(self._plain.planner, name=name))
        runs = []
        line = name
        for seed in self._seeds:
            report, run = self._replayed(name, replace(config, seed=seed))
            line = report.planner.line if report.planner is not None else name
            runs.append(run)
        return PlanRow(name=name, kind="planner", line=line, knows=None, runs=tuple(runs))

    def _one(self, name: str, config: Config, seed: int, steps: Sequence[Step]) -> PlanRun:
        table = replace(config.planner, name="schedule", schedule=written(steps))
        return self._replayed(name, replace(config, seed=seed, planner=table))[1]

    def _replayed(self, name: str, config: Config) -> tuple[Report, PlanRun]:
        self._progress(f"{name}, seed {config.seed}")
        named = f"{name.replace(' ', '-')}-{config.seed}"
        folder = self._folder / named
        done = replay(config, out=folder, html=self._pages)
        if not done.complete:
            raise KeyboardInterrupt
        self._synthetic = done.report.meta.trace.synthetic
        table = (self._windows.interval_s, len(self._windows.num_req), self._target)
        return done.report, plan_run(folder, named, config.seed, done.report, self._sla, table)

    # ------------------------------------------------------------ what is needed

    def _needs(self) -> Needs:
        """By simulation, with the first seed."""
        windows = self._windows
        weights = windows.num_req > 0
        isl = float((windows.isl[weights] * windows.num_req[weights]).sum() / windows.num_req.sum())
        osl = float((windows.osl[weights] * windows.num_req[weights]).sum() / windows.num_req.sum())
        line = provisioning.line_of_counts(self._settings, isl, osl, self._most_gpus)
        found = provisioning.needs(self._roles, line, self._attained, self._target)
        shutil.rmtree(self._folder / TRIED)
        return found

    def _attained(self, counts: Counts) -> F64:
        shown = provisioning.named(counts, self._roles)
        self._progress(f"trying {shown} workers")
        config = _with_workers(self._plain, {r.value: n for r, n in zip(self._roles, counts, strict=True)})
        folder = self._folder / TRIED / shown.replace(" + ", "-").replace(" ", "")
        done = replay(config, out=folder, html=False)
        if not done.complete:
            raise KeyboardInterrupt
        every, kept = by_interval(folder, self._sla, self._windows.interval_s, len(self._windows.num_req))
        return share_by_interval(every, kept)

    def _notes(self, needs: Needs) -> list[str]:
        notes = [
            f"static counts and the oracle were found by simulating {len(needs.tried)} counts, up to "
            f"{provisioning.named(needs.tried[-1], self._roles)}"
        ]
        if needs.unreachable:
            notes.append(
                f"{needs.unreachable} of {len(needs.by_interval)} intervals keep the limits for less than "
                f"{self._target:.0%} of their requests with any count that was tried"
            )
        start_s = {startup_s(self._asking, group) for group in self._plain.workers}
        notes.append(f"a worker that is added takes {' or '.join(f'{s:g}' for s in sorted(start_s))} s to start")
        if len(self._seeds) > 1 and self._plain.trace.arrivals == "recorded":
            notes.append("arrivals are those of the trace with every seed; trace.arrivals = poisson draws them anew")
        return notes


def _with_workers(config: Config, counts: dict[str, int]) -> Config:
    """The configuration with so many workers of each role."""

    def sized(group: WorkerGroup) -> WorkerGroup:
        return replace(group, count=max(1, counts[group.role]))

    return replace(config, workers=tuple(sized(group) for group in config.workers))
