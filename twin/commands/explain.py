"""`twin explain`: why requests of a finished run went where they went, and why there were as many workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twin.commands.options import Json
from twin.errors import ConfigError, Exit


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQUEST]...", help="Ids of requests, or rows of the trace; else the slowest three."),
    ] = None,
    plans: Annotated[
        bool, typer.Option("--plans", help="Changes of a planner instead, or the ticks that are named.")
    ] = False,
    json: Json = False,
) -> int:
    """Why requests went where they went: all workers with their terms, the runner-up, and what it came to."""
    if plans:
        return _explain_plans(run, requests or [])
    from reports.decisions import decision_text, decisions_json, decisions_of, rows_of, slowest_rows
    from reports.record import RunRecord
    from reports.report import Report

    record = RunRecord(run)
    rows, unknown = rows_of(record, requests) if requests else (slowest_rows(record), [])
    if unknown:
        raise ConfigError(
            f"{run}: no request has the id or the row {', '.join(unknown)}; requests.parquet lists them all"
        )
    found = decisions_of(record, rows)
    if json:
        print(decisions_json(found), end="")
        return Exit.OK
    names = {worker.worker_id: worker.name for worker in Report.load(run).workers}
    if not found:
        print("no decision was made for these requests")
    print("\n\n".join(decision_text(one, names) for one in found))
    return Exit.OK


def _explain_plans(run: Path, asked: list[str]) -> int:
    """What each stage of the planner said, of its changes or of the ticks asked for."""
    from reports.replica_views import plan_lines

    wrong = [one for one in asked if not (one.isascii() and one.isdigit())]
    if wrong:
        raise ConfigError(f"{wrong[0]}: with --plans, name ticks by their number (plans.parquet lists them all)")
    lines = plan_lines(run, [int(one) for one in asked])
    print("\n".join(lines) if lines else "the planner changed nothing")
    return Exit.OK
