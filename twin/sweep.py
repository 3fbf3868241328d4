"""A sweep from end to end: a plan's runs in several processes, into one folder with its table, report and page.

Every run is an ordinary replay in a folder of its own below `points/`. Runs that are there already are kept, so a sweep
that was stopped goes on, and one that is extended runs only what is new. It must not change what any run comes to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from policies.errors import ConfigError, InvariantError, TwinError
from policies.frozen import frozen
from reports.figures import Figure, figures_of
from reports.files import held_back, whole_file
from reports.record import REPORT_JSON, read_run_state
from reports.report import Report, flat_config
from reports.sweep import Status, Sweep, SweepRun, build_sweep, plain_value, write_csv, write_tables
from traces.errors import TraceError
from twin import __version__
from twin.config import Config
from twin.config_text import to_plain
from twin.sweep_plan import Plan, PlannedRun, Recipe
from twin.sweep_pool import run_jobs

SWEEP_JSON = "sweep.json"
POINTS = "points"
CSV_EVERY_S = 1.0

Progress = Callable[[int, int, int], None]
"""Called with (runs over, all runs, runs failed)."""


@frozen
class Job:
    """One run for a worker process."""

    recipe: Recipe
    folder: Path
    pages: bool
    explain: bool
    leap: bool


@frozen
class Ran:
    """How a run went: its figures, or why there are none. `bug`: the reason is ours. `cpu_s` is what it took."""

    figures: dict[str, float | None]
    error: str | None = None
    bug: bool = False
    cpu_s: float = 0.0


@frozen
class Swept:
    """Where a sweep lies and what it came to.

    `ran`: runs made now, `kept`: those that were there before. Not `complete` after Ctrl-C. `bugs`: errors of ours.
    """

    folder: Path
    sweep: Sweep
    ran: int
    kept: int
    complete: bool
    bugs: tuple[str, ...]
    cpu_s: float
    wall_s: float


def sweep(
    plan: Plan,
    *,
    out: Path,
    shown: Sequence[Figure] = (),
    jobs: int,
    html: bool = True,
    pages: bool = False,
    explain: bool = False,
    leap: bool = True,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Swept:
    """Run what is not there yet of `plan` in `jobs` processes, and write the sweep's folder.

    `shown` are the figures of tables and plots (none: the usual ones). `pages` writes a page for each run, `fresh` runs
    everything anew. Ctrl-C keeps the runs that are over. Raises ConfigError for a folder that holds something else; a
    run that fails is an entry of the result.
    """
    began = time.monotonic()
    _take(out)
    ran: dict[int, Ran] = {at: Ran(figures={}, error=run.error) for at, run in enumerate(plan.runs) if run.error}
    kept = {} if fresh else _kept(plan, out)
    ran |= kept
    todo = [at for at in range(len(plan.runs)) if at not in ran]
    work = [_job(plan.runs[at], out, pages=pages, explain=explain, leap=leap) for at in todo]
    complete, written = True, began
    try:
        if progress is not None:
            progress(len(ran), len(plan.runs), _failed(ran))
        for place, result in run_jobs(attempt, work, jobs, _died):
            ran[todo[place]] = result
            if progress is not None:
                progress(len(ran), len(plan.runs), _failed(ran))
            if time.monotonic() - written > CSV_EVERY_S:
                write_csv(out, _built(plan, ran, shown))
                written = time.monotonic()
    except KeyboardInterrupt:
        complete = False
    with held_back():
        built = _built(plan, ran, shown)
        _write(out, built, html=html, complete=complete)
        done = Swept(
            folder=out,
            sweep=built,
            ran=sum(at in ran for at in todo),
            kept=len(kept),
            complete=complete,
            bugs=tuple(result.error for result in ran.values() if result.bug and result.error is not None),
            cpu_s=sum(result.cpu_s for at, result in ran.items() if at not in kept),
            wall_s=time.monotonic() - began,
        )
        _write_state(out, done)
    return done


def _failed(ran: dict[int, Ran]) -> int:
    return sum(result.error is not None for result in ran.values())


def _job(run: PlannedRun, out: Path, *, pages: bool, explain: bool, leap: bool) -> Job:
    return Job(recipe=run.recipe, folder=out / POINTS / run.folder, pages=pages, explain=explain, leap=leap)


def attempt(job: Job) -> Ran:
    """One run, in whichever process; never raises."""
    from twin.replay import replay

    started = os.times()
    try:
        done = replay(job.recipe.config(), out=job.folder, html=job.pages, explain=job.explain, leap=job.leap)
        figures, error, bug = figures_of(done.report), None, False
    except (InvariantError, TwinError, TraceError, OSError) as why:
        figures, error, bug = {}, " ".join(str(why).split()), isinstance(why, InvariantError)
    except Exception as why:
        figures, error, bug = {}, f"this is a bug: {type(why).__name__}: {' '.join(str(why).split())}", True
    ended = os.times()
    cpu_s = ended.user + ended.system - started.user - started.system
    return Ran(figures=figures, error=error, bug=bug, cpu_s=cpu_s)


def _died(_: Job, how: str) -> Ran:
    return Ran(figures={}, error=how)


def _kept(plan: Plan, out: Path) -> dict[int, Ran]:
    """The runs that are there, whole, and made by this version."""
    found = {}
    for at, run in enumerate(plan.runs):
        if run.error is not None:
            continue
        figures = _kept_figures(out / POINTS / run.folder)
        if figures is not None:
            found[at] = Ran(figures=figures)
    return found


def _kept_figures(folder: Path) -> dict[str, float | None] | None:
    if not (folder / REPORT_JSON).is_file():
        return None
    try:
        if read_run_state(folder).state != "complete" or _version_of(folder) != __version__:
            return None
        return figures_of(Report.load(folder))
    except ConfigError:
        return None


def _version_of(folder: Path) -> object:
    return json.loads((folder / "run.json").read_text(encoding="utf-8")).get("versions", {}).get("dynatwin")


# --- the folder -------------------------------------------------------------------------------------------------------


def _take(out: Path) -> None:
    """Make the folder, or take one that is empty or holds a sweep."""
    try:
        if out.is_dir() and any(out.iterdir()) and not (out / SWEEP_JSON).is_file():
            raise ConfigError(
                f"{out}: has files and no sweep (no {SWEEP_JSON}), so nothing is written there; choose a new or empty "
                "folder with --out"
            )
        (out / POINTS).mkdir(parents=True, exist_ok=True)
        _write_state(out, None)
    except OSError as why:
        raise ConfigError(f"{out}: cannot write the sweep there ({why.strerror}); choose another with --out") from None


def _write_state(out: Path, done: Swept | None) -> None:
    """Write sweep.json: all that may differ between equal sweeps."""
    state: dict[str, object] = {"state": "partial" if done is None or not done.complete else "complete"}
    state["versions"] = {"dynatwin": __version__}
    if done is not None:
        state |= {"cpu_s": done.cpu_s, "wall_s": done.wall_s, "runs_kept": done.kept}
    with whole_file(out / SWEEP_JSON) as file:
        file.write(json.dumps(state, indent=2, sort_keys=True) + "\n")


def _built(plan: Plan, ran: dict[int, Ran], shown: Sequence[Figure]) -> Sweep:
    runs: dict[int, list[SweepRun]] = {}
    for at, planned in enumerate(plan.runs):
        runs.setdefault(planned.point, []).append(_run(planned, ran.get(at)))
    return build_sweep(
        trace=trace_name(plan),
        keys=plan.keys,
        points=[
            (tuple(plain_value(value) for value in values), tuple(runs[number]))
            for number, values in enumerate(plan.points)
        ],
        shown=shown,
        seeds=plan.seeds,
        config=_common(plan),
    )


def _run(planned: PlannedRun, result: Ran | None) -> SweepRun:
    status: Status = "open" if result is None else "done" if result.error is None else "failed"
    return SweepRun(
        seed=planned.seed,
        folder=f"{POINTS}/{planned.folder}" if planned.folder else "",
        status=status,
        error=None if result is None else result.error,
        figures={} if result is None else result.figures,
    )


def trace_name(plan: Plan) -> str:
    """The trace of the sweep in words."""
    path = plan.sample.trace.path
    return "several traces" if "trace.path" in plan.keys or path is None else path.name


def _common(plan: Plan) -> dict[str, str]:
    """The configuration that all runs share: that of one of them without what is varied."""
    return dict(item for item in flat_config(to_plain(plan.sample)) if not _is_varied(item[0], plan))


def _is_varied(key: str, plan: Plan) -> bool:
    if key == "seed":
        return True
    names = {group.name for group in plan.sample.workers}
    parts = key.split(".")
    short = ".".join([parts[0], *parts[2:]]) if parts[0] == "workers" and parts[1] in names else key
    return key in plan.keys or short in plan.keys


def _write(out: Path, built: Sweep, *, html: bool, complete: bool) -> None:
    write_tables(out, built)
    try:
        with whole_file(out / REPORT_JSON) as file:
            file.write(built.to_json())
    except OSError as why:
        raise ConfigError(f"{out / REPORT_JSON}: cannot be written ({why.strerror})") from None
    if html:
        from reports.sweep_views import write_sweep_html

        write_sweep_html(out, built, complete=complete)


def sweep_name(plan: Plan) -> str:
    """`<trace stem>-sweep-<8 hex>` of its runs: the same sweep lies in the same folder."""
    import xxhash

    config: Config = plan.sample
    stem = "several" if config.trace.path is None else config.trace.path.name.split(".")[0]
    digest = xxhash.xxh3_64_hexdigest("|".join(f"{run.folder}{run.error}" for run in plan.runs).encode())
    return f"{stem}-sweep-{digest[:8]}"
