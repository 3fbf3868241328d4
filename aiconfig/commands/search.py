"""`aiconfig search`: a line into a request, the search, the answer on stdout, its files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from aiconfig.commands.line import DEMAND, SERVED, WANTED, WHERE, flag_of, real, request_of, whole, words
from twin.commands.replay_line import Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit, TwinError

if TYPE_CHECKING:
    from aiconfig.driver import Driven, How, Told
    from aiconfig.request import SearchRequest
    from aiconfig.result import Result

SEARCH_OPTIONS = (
    *WANTED,
    *WHERE,
    *SERVED,
    Option("--planner", "NAMES", "Refused: this version has no planners to try."),
    *DEMAND,
    Option("--min-gpus", "", "Fewest GPUs that serve the load (--users or --rate) within the limits."),
    Option("--soft", "", "Limits are wishes: rank by how far they are missed, and exit 0."),
    Option("--no-replay", "", "Closed form alone: means, and percentiles are not judged."),
    Option("--top", "N", "Deployments to show."),
    Option("--seed", "N", "Seed of every random draw."),
    Option("--jobs", "N", "Processes that simulate; otherwise as many as there are cores."),
    Option("--ray", "ADDRESS", "Simulate on a Ray cluster (extra `distributed`)."),
    Option("--trials", "N", "Sample the space (extra `study`) with so many deployments."),
    Option("--storage", "URL", "Where a sampled search is kept and goes on from, e.g. sqlite:///search.db."),
    Option("--study-name", "NAME", "Name of the study in the storage."),
    Option("--timeout", "S", "Seconds after which nothing more is begun."),
    Option("--explain", "", "List a candidate for each reason why others were left out."),
    Option("--out", "DIR", "Folder of the search; otherwise below runs/."),
    Option("--name", "NAME", "Name of the search, below runs/."),
    Option("--no-files", "", "Write nothing."),
    Option("--no-html", "", "Write no page."),
    Option("--png", "FILE", "Draw the plot as a picture."),
    Option("--json", "", "Print result.json and nothing else."),
    Option("--quiet", "", "No progress and no notices on stderr.", short="-q"),
)
MIN_GPUS_BUDGET = 64
"""GPUs that are looked at by --min-gpus if --gpus does not say."""


def run(values: Values) -> int:
    """Run one line, given as the values of the options above."""
    quiet = "quiet" in values
    objectives = words(values, "objective") if "objective" in values else ()
    request = _request(values, objectives)
    how = _how(values, objectives)
    folder = _folder(values, request, how)
    if "png" in values:
        from aiconfig.page import check_picture

        check_picture(Path(values["png"]))
    if not quiet:
        print("\n".join(request.lines()), end="\n\n", file=sys.stderr)
    from aiconfig.driver import drive

    with _progress(quiet=quiet) as told:
        driven = drive(request, how, told)
    try:
        result = _written(values, driven, folder)
    except (OSError, TwinError):
        _tell(values, driven.result, driven, None)  # minutes of simulation are not lost with a file
        raise
    return _tell(values, result, driven, folder)


search = command_of(run, SEARCH_OPTIONS, "Find the deployment that serves a model best within given limits.")


def _request(values: Values, objectives: tuple[str, ...]) -> SearchRequest:
    if len(set(objectives)) < len(objectives):
        raise ConfigError(f"--objective {values['objective']}: name each once")
    extra = {"objective": objectives[0]} if objectives else {}
    if "min_gpus" in values:
        if objectives and objectives != ("min-gpus",):
            raise ConfigError(
                f"--min-gpus and --objective {','.join(objectives)}: one says what is best; leave one out"
            )
        if not {"users", "rate", "trace"} & set(values):
            raise ConfigError("--min-gpus: fewest GPUs for which load? give --users N or --rate X, or --trace FILE")
        extra = {"objective": "min-gpus"}
        if "gpus" not in values:
            values = {**values, "gpus": str(MIN_GPUS_BUDGET)}
    return request_of(values, extra)


def _how(values: Values, objectives: tuple[str, ...]) -> How:
    from aiconfig.driver import How
    from aiconfig.spread import usable_cores
    from aiconfig.study import StudyOptions

    if "ray" in values and "jobs" in values:
        raise ConfigError(
            f"--ray {values['ray']} and --jobs {values['jobs']}: the cluster says how many; leave one out"
        )
    for name in ("jobs", "ray", *(option.name for option in SERVED)):
        if "no_replay" in values and name in values:
            raise ConfigError(f"{flag_of(name)} {values[name]}: has no effect beside --no-replay; leave one out")
    if "study_name" in values and "storage" not in values:
        raise ConfigError(f"--study-name {values['study_name']}: has no effect without --storage; leave it out")
    timeout_s = real(values, "timeout") if "timeout" in values else None
    usual = StudyOptions()
    return How(
        simulates="no_replay" not in values,
        jobs=whole(values, "jobs") if "jobs" in values else usable_cores(),
        ray=values.get("ray"),
        objectives=objectives,
        study=StudyOptions(
            trials=whole(values, "trials") if "trials" in values else usual.trials,
            timeout_s=timeout_s,
            seed=whole(values, "seed") if "seed" in values else usual.seed,
            storage=values.get("storage"),
            name=values.get("study_name", usual.name),
        ),
        sampled="trials" in values or "storage" in values,
        timeout_s=timeout_s,
        soft="soft" in values,
    )


def _folder(values: Values, request: SearchRequest, how: How) -> Path | None:
    """Where files go; None: nowhere."""
    from aiconfig.outputs import check_folder, search_name

    chosen = [name for name in ("out", "name", "no_files") if name in values]
    if len(chosen) > 1:
        first, second = (flag_of(name) for name in chosen[:2])
        raise ConfigError(f"{first} and {second}: each says where the files of the search go; leave one out")
    if "no_files" in values:
        return None
    name = values.get("name")
    if name is not None and (name in ("", ".", "..") or "/" in name):
        raise ConfigError(f"--name {name}: must be the name of one folder below runs/; use --out for another place")
    if "out" in values:
        folder = Path(values["out"])
    else:
        what = f"{how.simulates} {how.objectives} {how.soft} {how.sampled} {how.study.trials if how.sampled else ''}"
        folder = Path("runs") / (name or search_name(request, what))
    check_folder(folder)
    return folder


def _written(values: Values, driven: Driven, folder: Path | None) -> Result:
    """The result, with whatever files of it are wanted."""
    result = driven.result
    if folder is not None:
        from aiconfig.outputs import write_search

        result = write_search(folder, driven, html="no_html" not in values)
    if "png" in values:
        from aiconfig.page import write_picture

        write_picture(result, driven.rows, Path(values["png"]))
    return result


def _tell(values: Values, result: Result, driven: Driven, folder: Path | None) -> int:
    if "json" in values:
        print(result.to_json(), end="")
    else:
        from aiconfig.answer import WIDTH, answer_text

        terminal = sys.stdout.isatty()
        width = max(WIDTH, get_terminal_size().columns) if terminal else WIDTH
        shown = str(folder) if folder is not None else None
        explain = "explain" in values
        print(answer_text(result, folder=shown, colour=terminal, width=width, plot=terminal, explain=explain))
    if driven.interrupted:
        print("aiconfig: stopped; this is the best so far", file=sys.stderr)
        return Exit.INTERRUPTED
    return Exit.OK if result.best is not None else Exit.MISSED


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told | None]:
    """A progress bar on stderr, only where a person watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda over, total: bar.update(task, completed=over, total=total)
