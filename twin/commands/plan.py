"""`twin plan`: which planner serves a trace best, in one table."""

from __future__ import annotations

import sys
from pathlib import Path

from twin.commands.replay_line import OPTIONS, Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

OF_ONE_RUN = (
    "--planner",
    "--out",
    "--name",
    "--json",
    "--no-html",
    "--journal",
    "--perfetto",
    "--explain",
    "--no-leap",
    "--show-config",
    "--concurrency",
    "--faults",
    "--strict",
    "--quiet",
)
"""Options of a replay that a comparison has none of, or others."""

PLAN_OPTIONS = (
    OPTIONS[0],
    Option("--planner", "NAMES", "Planners to compare, with commas; otherwise throughput,load,hybrid,lookahead."),
    Option("--seeds", "N", "Run each with N seeds, from the configured one on, and show mean and range."),
    Option("--attainment", "SHARE", "Share of requests to keep the limits in each interval; otherwise 0.95."),
    Option("--most-gpus", "N", "GPUs that are tried at most; otherwise 8 times those to begin with, 64 at least."),
    *(option for option in OPTIONS[1:] if option.flag not in OF_ONE_RUN),
    Option("--out", "DIR", "Folder of the comparison."),
    Option("--pages", "", "Write a page for each run too."),
    Option("--json", "", "Print plan.json and nothing else."),
    Option("--no-html", "", "Write no plan.html."),
    Option("--quiet", "", "No progress on stderr.", short="-q"),
)


def run(values: Values) -> int:
    """Run one line, given as the values of the options above."""
    from twin.config_read import FLAGS, load
    from twin.plan_compare import TARGET, USUAL, compare

    names = _names(values.get("planner"), USUAL)
    flags = {
        option.flag: values.get(option.name)
        for option in OPTIONS
        if option.flag in FLAGS and option.flag != "--planner"
    }
    file = Path(values["config"]) if "config" in values else None
    for name in names:  # each is checked before anything runs
        config = load(file, flags | {"--planner": name}, values.get("set", ()))
    quiet = "quiet" in values or not sys.stderr.isatty()
    done = compare(
        config,
        names,
        seeds=_whole(values, "seeds", 1),
        target=_share(values, TARGET),
        most_gpus=_whole(values, "most_gpus", 0) or None,
        out=Path(values["out"]) if "out" in values else None,
        html="no_html" not in values,
        pages="pages" in values,
        progress=(lambda _: None) if quiet else (lambda what: print(f"twin: {what}", file=sys.stderr)),
    )
    if "json" in values:
        print(done.table.to_json(), end="")
    else:
        from reports.plan_table import plan_text

        print(plan_text(done.table, str(done.page)))
    return Exit.OK


plan = command_of(run, PLAN_OPTIONS, "Compare planners on a trace, beside static counts and an oracle, in one table.")


def _names(given: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return usual
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if not names or "none" in names:
        raise ConfigError(f"--planner {given}: must be planners with commas between, like throughput,hybrid")
    return names


def _share(values: Values, usual: float) -> float:
    given = values.get("attainment")
    if given is None:
        return usual
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"--attainment {given}: must be above 0 and at most 1")
    return share


def _whole(values: Values, name: str, usual: int) -> int:
    given = values.get(name)
    if given is None:
        return usual
    if not str(given).isascii() or not str(given).isdigit() or int(given) < 1:
        raise ConfigError(f"--{name.replace('_', '-')} {given}: must be a whole number, 1 or more")
    return int(given)
