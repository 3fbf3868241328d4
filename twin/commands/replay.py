"""`twin replay`: options into a configuration, the run, the table on stdout, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from twin.commands.replay_line import OPTIONS, Values
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from twin.replay import Replayed

Progress = Callable[[int, int | None], None]


def replay(values: Values) -> int:
    """Run one line, given as the values of the options in `replay_line.OPTIONS`."""
    from twin.config_read import FLAGS, load

    flags = {option.flag: values.get(option.name) for option in OPTIONS if option.flag in FLAGS}
    config_file = _path(values, "config")
    config = load(config_file, flags, values.get("set", ()))
    if "show_config" in values:
        from twin.config_text import show

        print(show(config), end="")
        return Exit.OK
    out, name = _path(values, "out"), _name(values)
    from twin.replay import replay as run

    with _progress(quiet="quiet" in values) as progress:
        done = run(
            config,
            config_file=config_file,
            out=out,
            name=name,
            html="no_html" not in values,
            journal="journal" in values,
            perfetto="perfetto" in values,
            explain="explain" in values,
            leap="no_leap" not in values,
            progress=progress,
        )
    return _tell(done, json="json" in values)


def _path(values: Values, name: str) -> Path | None:
    return Path(values[name]) if name in values else None


def _name(values: Values) -> str | None:
    """The name of the run: one folder below runs/."""
    name: str | None = values.get("name")
    if name is None:
        return None
    if "out" in values:
        raise ConfigError(f"--name {name}: has no effect beside --out, which says where the run goes; give one of them")
    if name in ("", ".", "..") or "/" in name:
        raise ConfigError(f"--name {name}: must be the name of one folder below runs/; use --out for another place")
    return name


def _tell(done: Replayed, *, json: bool) -> int:
    """Print the result and say how the run ended."""
    page = done.folder / "report.html"
    if json:
        print(done.report.to_json(), end="")
    else:
        from reports.record import read_run_state
        from reports.tables import report_text

        path = page if page.exists() else done.folder / "report.json"
        print(report_text(done.report, path=str(path), run=read_run_state(done.folder), colour=sys.stdout.isatty()))
    if not done.complete:
        print(f"twin: stopped; what was done so far is in {done.folder}, marked partial", file=sys.stderr)
        return Exit.INTERRUPTED
    for text in done.missed:
        print(f"twin: {text}", file=sys.stderr)
    if done.missed:
        return Exit.MISSED
    sla = done.report.sla
    return Exit.MISSED if sla is not None and sla.verdict == "missed" else Exit.OK


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr, only where a person watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=None)
        yield lambda rows, total: bar.update(task, completed=rows, total=total)
