"""`twin forecast`: how well each forecaster would have foreseen the demand of a trace."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from twin.commands.replay_line import OPTIONS, Option, Values
from twin.commands.typed import command_of
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from twin.forecasting import Forecasted, Forecasts

_OF_TRACES = (
    "TRACE",
    "--config",
    "--limit",
    "--speedup",
    "--set",
    "--format",
    "--on-bad-row",
    "--time-unit",
    "--hash-block-tokens",
    "--default-osl",
    "--keep-zero-output",
    "--sort",
)
FORECAST_OPTIONS = (
    *(option for option in OPTIONS if option.flag in _OF_TRACES),
    Option("--interval", "SECONDS", "Length of a window; otherwise that of [planner], 180."),
    Option("--ahead", "N", "Windows ahead, beside the next one; otherwise until a start of now is ready."),
    Option("--period", "N", "Windows in a season; otherwise the one that the trace shows, if it does."),
    Option("--json", "", "Print JSON and nothing else."),
)


def run(values: Values) -> int:
    """Run one line, given as the values of the options above."""
    from twin.config_read import FLAGS, load
    from twin.forecasting import forecast
    from twin.planning import startup_s

    flags = {option.flag: values.get(option.name) for option in OPTIONS if option.flag in FLAGS}
    sets = [*values.get("set", ())]
    if "interval" in values:
        sets.append(f"planner.throughput_adjustment_interval_s={values['interval']}")
    if "period" in values:
        sets += [f"planner.period={values['period']}", "planner.load_predictor=seasonal-naive"]
    file = Path(values["config"]) if "config" in values else None
    config = load(file, flags | {"--planner": "throughput"}, sets)
    found = forecast(config, max(startup_s(config, group) for group in config.workers), _ahead(values))
    if "json" in values:
        from reports.report import stable_json

        print(stable_json(asdict(found)), end="")
    else:
        _print(found)
    return Exit.OK


forecast = command_of(run, FORECAST_OPTIONS, "Score each forecaster of the planner on the demand of a trace.")


def _ahead(values: Values) -> int | None:
    given = values.get("ahead")
    if given is None:
        return None
    if not str(given).isascii() or not str(given).isdigit() or int(given) < 1:
        raise ConfigError(f"--ahead {given}: must be a whole number, 1 or more")
    return int(given)


def _print(found: Forecasted) -> None:
    from reports import text

    season = "no season" if found.period is None else f"a season of {found.period}"
    if found.found:
        season += " (as the trace shows)"
    print(f"{found.trace}: {found.intervals} windows of {found.interval_s:g} s, {season}; ahead: {found.ahead}")
    if found.untimed:
        print(f"twin: {found.untimed:,} later turns of sessions have no time of their own, left out", file=sys.stderr)
    for one in found.quantities:
        print()
        print("\n".join(_table(one, found.ahead if one.quantity == "num_req" else 1)))
        if one.winner is None:
            print("no forecaster qualifies: each failed at more than 5 % of the points")
            continue
        margin = "" if one.margin is None else f", {text.share(one.margin)} below seasonal-naive"
        later = "" if one.ahead_winner == one.winner else f"; {found.ahead} ahead {one.ahead_winner}"
        print(f"best: {one.winner}{margin}{later}")


def _table(one: Forecasts, ahead: int) -> list[str]:
    """Columns as text; `ahead` 1 leaves its own columns out."""
    from reports import text

    head = [one.quantity, "MAE", "MAPE", "pinball p90"]
    if ahead > 1:
        head += [f"MAE +{ahead}", f"MAPE +{ahead}", f"pinball +{ahead}"]
    rows = [[*head, "failures"]]
    for scored in one.scored:
        cells = [scored.name]
        for score in (scored.next, scored.ahead)[: 2 if ahead > 1 else 1]:
            cells += [text.figures(score.mae), text.share(score.mape), text.figures(score.pinball)]
        told = f"{scored.next.failures} of {scored.next.points}" if scored.next.failures else "0"
        rows.append([*cells, told + (" (disqualified)" if scored.next.disqualified else "")])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
