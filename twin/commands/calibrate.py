"""`twin calibrate`: fit the roofline's coefficients to measurements, say how far off they are, compare with old."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twin.errors import CapabilityError, ConfigError, Exit

if TYPE_CHECKING:
    from twin.calibrate.fitted import Design
    from twin.calibrate.measured import Table

SOURCES = ("table", "run")


def calibrate(
    source: Annotated[
        tuple[str, str] | None,
        typer.Option("--from", metavar="KIND PATH", help="table FILE (.csv, .parquet), or run RUNDIR."),
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
    live: Annotated[
        str | None, typer.Option("--live", metavar="URL", help="A server to probe; not there yet, and says so.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", help="Processes; otherwise one per core.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the drawn lengths.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> int:
    """Fit the roofline's coefficients to measured runs, and say how far off they are where nothing was measured."""
    from twin.calibrate.fitted import FromFile
    from twin.calibrate.study import errors_by_slice, study, worse
    from twin.calibrate.tables import text_table
    from twin.calibrate.write import calibration_text

    if live is not None:
        raise CapabilityError(
            f"--live {live}: probing a server is not there yet; measure it with a load generator and give the table: "
            f"--from table FILE"
        )
    if source is None:
        raise ConfigError("nothing to fit: give --from table FILE, or --from run RUNDIR")
    if out is None and check is None:
        raise ConfigError("nowhere to write: give --out FILE, or --check OLD to compare only")
    if check is not None and not check.is_file():
        raise ConfigError(f"--check {check}: there is no such file")
    told: Callable[[str], None] = (
        (lambda what: None) if quiet else (lambda what: print(f"twin: {what}", file=sys.stderr))
    )
    table, design = _measured(source, columns or [], jobs or _cores(), seed, told)
    done = study(table, design, told)
    label = "step" if source[0] == "run" else "TPOT"
    print(_head(table, source[0]))
    after = errors_by_slice(design, design.predict(done.fit))
    print(f"\nruns of the fit\n{text_table(after, label)}")
    print(f"\nconfigurations not in the fit\n{text_table(errors_by_slice(design, done.bands.configurations), label)}")
    if out is not None:
        out.write_text(calibration_text(table, design, done.fit, done.bands, date.today()), encoding="utf-8")
        print(f'\nwrote {out}\nuse   [workers.latency] coefficients = "{out}"')
    if check is None:
        return Exit.OK
    before = errors_by_slice(design, design.predict(FromFile(str(check))))
    print(f"\nbefore, with {check}\n{text_table(before, label)}")
    found = worse(before, after)
    for line in found:
        print(f"worse: {line}")
    print(f"check {'missed' if found else 'held'}: {len(found)} of {len(before)} slices worse by more than a tenth")
    return Exit.MISSED if found else Exit.OK


def _measured(
    source: tuple[str, str], columns: list[str], jobs: int, seed: int, told: Callable[[str], None]
) -> tuple[Table, Design]:
    from twin.calibrate.columns import parse_columns
    from twin.calibrate.measured import read_table
    from twin.calibrate.study import design_of

    kind, path = source
    if kind not in SOURCES:
        raise ConfigError(f"--from {kind}: not a source; give --from table FILE, or --from run RUNDIR")
    if kind == "run":
        from twin.calibrate.from_run import read_run

        if columns:
            raise ConfigError("--columns: has no effect with --from run, whose columns are known")
        return read_run(Path(path))
    return design_of(read_table(Path(path), parse_columns(columns)), jobs=jobs, seed=seed, told=told)


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


def _cores() -> int:
    from twin.commands.sweep import _cores as cores

    return cores()
