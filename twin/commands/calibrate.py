"""`twin calibrate`: fit the roofline's coefficients to measurements, say how far off they are, compare with old."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from twin.calibrate.bands import Metrics
    from twin.calibrate.fitted import Design
    from twin.calibrate.measured import Table
    from twin.calibrate.study import Study

LIVE = "live"
LABELS = {"table": "TPOT", "run": "step"}
"""What can be fitted to, and what the time of its steps is called."""


def calibrate(
    source: Annotated[
        tuple[str, str] | None,
        typer.Option("--from", metavar="KIND PATH", help="table FILE (.csv, .parquet), run RUNDIR, or live RUNDIR."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Calibration file to write (.toml).")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="FIELD=COLUMN,...", help="Which column is what, e.g. ttft=first:ms:mean."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Old calibration file; exit 3 if a slice got worse by a tenth."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", help="Processes; otherwise one per core.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the drawn lengths.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> int:
    """Fit the roofline's coefficients to measured runs, and say how far off they are where nothing was measured."""
    source = _checked(source, out, check)
    if source[0] == LIVE:
        return _of_live(Path(source[1]), out, check, columns, jobs, seed, quiet=quiet)
    from twin.calibrate.study import study

    told = _silent if quiet else _progress
    table, design = _measured(source, columns or [], jobs, seed, told)
    done = study(table, design, told)
    after = _tell(done, source[0])
    if out is not None:
        _write(done, out)
    return Exit.OK if check is None else _compare(done, after, check, source[0])


def _of_live(
    run: Path,
    out: Path | None,
    check: Path | None,
    columns: list[str] | None,
    jobs: int | None,
    seed: int,
    *,
    quiet: bool,
) -> int:
    """The `linear` model of a live run, in a configuration; `twin record` also writes the trace."""
    from twin.commands.record import fitted, tell, written

    given = {"--check": check, "--columns": columns, "--jobs": jobs, "--seed": seed or None}
    for name in (name for name, value in given.items() if value):
        raise ConfigError(f"{name}: has no effect with --from live, which fits a linear model to single requests")
    if out is None:
        raise ConfigError("nowhere to write: give --out FILE")
    fit = fitted([run], quiet=quiet)
    written(fit, out)
    print(tell(fit))
    print(f"\nwrote {out}\nuse   twin replay TRACE --config {out}")
    return Exit.OK


def _checked(source: tuple[str, str] | None, out: Path | None, check: Path | None) -> tuple[str, str]:
    """What is to be fitted; refuses a line without that, or with nowhere for what comes of it."""
    if source is None:
        raise ConfigError("nothing to fit: give --from table FILE, --from run RUNDIR, or --from live RUNDIR")
    if out is None and check is None:
        raise ConfigError("nowhere to write: give --out FILE, or --check OLD to compare only")
    if check is not None and not check.is_file():
        raise ConfigError(f"--check {check}: there is no such file")
    return source


def _silent(what: str) -> None:
    """Progress under --quiet."""


def _progress(what: str) -> None:
    print(f"twin: {what}", file=sys.stderr)


def _tell(done: Study, kind: str) -> dict[str, Metrics]:
    """Print what was fitted and its errors, seen and unseen; returns those of the rows of the fit."""
    from twin.calibrate.study import errors_by_slice
    from twin.calibrate.tables import text_table

    design, label = done.design, LABELS[kind]
    seen = errors_by_slice(design, design.predict(done.fit))
    unseen = errors_by_slice(design, done.bands.configurations)
    print(_head(done.table, kind))
    print(f"\nruns of the fit\n{text_table(seen, label)}")
    print(f"\nconfigurations not in the fit\n{text_table(unseen, label)}")
    return seen


def _write(done: Study, out: Path) -> None:
    from twin.calibrate.write import calibration_text

    out.write_text(calibration_text(done.table, done.design, done.fit, done.bands, date.today()), encoding="utf-8")
    print(f'\nwrote {out}\nuse   [workers.latency] coefficients = "{out}"')


def _compare(done: Study, after: Mapping[str, Metrics], old: Path, kind: str) -> int:
    """Print the errors of an old file on the same rows, and which slices got worse."""
    from twin.calibrate.fitted import FromFile
    from twin.calibrate.study import errors_by_slice, worse
    from twin.calibrate.tables import text_table

    before = errors_by_slice(done.design, done.design.predict(FromFile(str(old))))
    print(f"\nbefore, with {old}\n{text_table(before, LABELS[kind])}")
    found = worse(before, after)
    for line in found:
        print(f"worse: {line}")
    print(f"check {'missed' if found else 'held'}: {len(found)} of {len(before)} slices worse by more than a tenth")
    return Exit.MISSED if found else Exit.OK


def _measured(
    source: tuple[str, str], columns: list[str], jobs: int | None, seed: int, told: Callable[[str], None]
) -> tuple[Table, Design]:
    from twin.calibrate.columns import parse_columns
    from twin.calibrate.measured import read_table
    from twin.calibrate.study import design_of
    from twin.sweep_pool import usable_cores

    kind, path = source
    if kind not in LABELS:
        raise ConfigError(
            f"--from {kind}: not a source; give --from table FILE, --from run RUNDIR, or --from live RUNDIR"
        )
    if kind == "run":
        from twin.calibrate.from_run import read_run

        if columns:
            raise ConfigError("--columns: has no effect with --from run, whose columns are known")
        return read_run(Path(path))
    read = read_table(Path(path), parse_columns(columns))
    return design_of(read, jobs=jobs or usable_cores(), seed=seed, told=told)


def _head(table: Table, kind: str) -> str:
    groups = len({row.group for row in table.rows})
    what = "kinds of steps" if kind == "run" else "runs"
    counts = "" if kind == "run" else f"TPOT {table.count('tpot'):,}, TTFT {table.count('ttft'):,}; "
    line = f"{table.name} ({table.digest}): {len(table.rows):,} {what} in {groups} groups; {counts}{table.statistic}"
    lines = [f"{'run' if kind == 'run' else 'table':9}{line}"]
    if table.left_out:
        told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(table.left_out.items()))
        lines.append(f"left out {told}")
    return "\n".join(lines)
