"""`twin sweep`: options into a plan, its runs in several processes, the table on stdout, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from twin.commands.replay_line import OPTIONS, Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from twin.sweep import Progress, Swept

OF_ONE_RUN = ("--out", "--name", "--json", "--no-html", "--journal", "--perfetto", "--show-config", "--quiet")
"""Options of a replay that a sweep has none of, or others."""

SWEEP_OPTIONS = (
    OPTIONS[0],
    Option("--vary", "KEY=A,B,C", "A key and its values; several make a grid.", many=True),
    Option("--list", "FILE", "Points: CSV with keys as its header, or TOML with [[points]]; each with the whole grid."),
    Option("--seeds", "N", "Run each point with N seeds, from the configured one on, and show mean and range."),
    Option("--jobs", "N", "Processes; otherwise as many as there are cores."),
    Option("--metric", "NAME", "Figure to show, e.g. ttft_p95 or hit_rate; every figure is in the files.", many=True),
    Option("--out", "DIR", "Folder of the sweep; runs that are there already are kept."),
    *(option for option in OPTIONS[1:] if option.flag not in OF_ONE_RUN),
    Option("--fresh", "", "Run every point anew, also those that are there."),
    Option("--pages", "", "Write a page for each run too."),
    Option("--json", "", "Print the sweep's report.json and nothing else."),
    Option("--no-html", "", "Write no sweep.html."),
    Option("--quiet", "", "No progress on stderr.", short="-q"),
)


def run(values: Values) -> int:
    """Run one line, given as the values of the options above."""
    from reports.figures import chosen_figures
    from twin.config_read import FLAGS
    from twin.sweep import sweep as run_sweep
    from twin.sweep import sweep_name
    from twin.sweep_plan import NO_LIST, parse_vary, plan_sweep, read_list
    from twin.sweep_pool import usable_cores

    shown = chosen_figures(values.get("metric", ()))
    jobs = _whole(values, "jobs", usable_cores())
    plan = plan_sweep(
        file=_path(values, "config"),
        flags={option.flag: values.get(option.name) for option in OPTIONS if option.flag in FLAGS},
        sets=values.get("set", ()),
        grid=[parse_vary(given) for given in values.get("vary", ())],
        listed=read_list(Path(values["list"])) if "list" in values else NO_LIST,
        seeds=_whole(values, "seeds", 1),
        explain="explain" in values,
    )
    out = _path(values, "out") or Path("runs") / sweep_name(plan)
    with _progress(quiet="quiet" in values) as progress:
        done = run_sweep(
            plan,
            out=out,
            shown=shown,
            jobs=jobs,
            html="no_html" not in values,
            pages="pages" in values,
            explain="explain" in values,
            leap="no_leap" not in values,
            fresh="fresh" in values,
            progress=progress,
        )
    return _tell(done, json="json" in values)


sweep = command_of(
    run, SWEEP_OPTIONS, "Replay a trace for every combination of some settings, on several cores, into one table."
)


def _path(values: Values, name: str) -> Path | None:
    return Path(values[name]) if name in values else None


def _whole(values: Values, name: str, usual: int) -> int:
    given = values.get(name)
    if given is None:
        return usual
    if not str(given).isascii() or not str(given).isdigit() or int(given) < 1:
        raise ConfigError(f"--{name} {given}: must be a whole number, 1 or more")
    return int(given)


def _tell(done: Swept, *, json: bool) -> int:
    """Print the result and say how the sweep ended."""
    page = done.folder / "sweep.html"
    if json:
        print(done.sweep.to_json(), end="")
    else:
        from reports.sweep_views import sweep_text
        from reports.tables import WIDTH

        path = page if page.exists() else done.folder / "report.json"
        width = max(WIDTH, get_terminal_size().columns)
        print(sweep_text(done.sweep, path=str(path), colour=sys.stdout.isatty(), width=width))
        print(f"cost    {done.ran} runs in {done.cpu_s:.1f} CPU seconds, {done.wall_s:.1f} s; {done.kept} there before")
    if not done.complete:
        left = done.sweep.count("open")
        print(
            f"twin: stopped with {left} runs to go; the same line goes on with what is in {done.folder}",
            file=sys.stderr,
        )
        return Exit.INTERRUPTED
    failed = done.sweep.count("failed")
    if failed:
        print(f"twin: {failed} of {len(done.sweep.runs)} runs failed; the report says why", file=sys.stderr)
    if done.bugs:
        print(f"twin: {done.bugs[0]}", file=sys.stderr)
        return Exit.BUG
    return Exit.MISSED if failed else Exit.OK


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr, only where a person watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    failed = TextColumn("{task.fields[failed]}")
    columns = (TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), failed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweep", total=None, failed="")

        def show(over: int, total: int, failures: int) -> None:
            bar.update(task, completed=over, total=total, failed=f"{failures} failed" if failures else "")

        yield show
