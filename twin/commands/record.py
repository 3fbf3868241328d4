"""`twin record`: repeats of a live run in, the trace and the configuration of their twin out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twin.commands.options import Quiet
from twin.errors import ConfigError, Exit

if TYPE_CHECKING:
    from twin.calibrate.live.write import LiveFit

TRACE, CONFIG = "trace.parquet", "twin.toml"

FitRows = Annotated[
    int | None,
    typer.Option("--fit-rows", metavar="N", help="Fit to the first N requests only; a replay measures the others."),
]


FitBlocks = Annotated[
    int | None,
    typer.Option(
        "--fit-blocks", metavar="N", help="Fit to every other N requests; twin compare --blocks N looks at the others."
    ),
]


def record(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of repeats of a live run.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to; otherwise RUN-twin.")
    ] = None,
    fit_rows: FitRows = None,
    fit_blocks: FitBlocks = None,
    quiet: Quiet = False,
) -> int:
    """Turn live runs into a trace (of the first one) and a configuration whose step times are fitted to all of them."""
    from traces.convert import import_trace

    fit = fitted(runs, fit_rows, fit_blocks, quiet=quiet)
    folder = out if out is not None else runs[0].resolve().with_name(f"{runs[0].resolve().name}-twin")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}; choose another place") from None
    done = import_trace(fit.runs[0].folder / "journal.jsonl", folder / TRACE)
    written(fit, folder / CONFIG, folder / TRACE)
    print(tell(fit))
    print(f"\nwrote {folder / TRACE}: {done.rows:,} rows\nwrote {folder / CONFIG}")
    print(f"use   twin replay --config {folder / CONFIG} --out {folder / 'replay'}")
    blocks = f" --blocks {fit_blocks}" if fit_blocks is not None else ""
    print(f"      twin compare {' '.join(map(str, runs))} {folder / 'replay'}{blocks}")
    return Exit.OK


def fitted(runs: Sequence[Path], fit_rows: int | None = None, fit_blocks: int | None = None, *, quiet: bool) -> LiveFit:
    """What the step times of these runs are. Raises ConfigError for folders that are no repeats of a live run."""
    from twin.calibrate.live.run import Part, read_live_run, same_demand
    from twin.calibrate.live.write import fit_runs

    if fit_rows is not None and fit_blocks is not None:
        raise ConfigError(f"--fit-rows {fit_rows} and --fit-blocks {fit_blocks}: two halves at once; give one of them")
    for name, value in (("--fit-rows", fit_rows), ("--fit-blocks", fit_blocks)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: must be 1 or more; leave it out to fit to all requests")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError(f"{runs[0]}: the same run twice adds nothing; give each repeat once")
    part = Part(first=fit_rows, block=fit_blocks)
    read = [read_live_run(run, part) for run in runs]
    same_demand(read)
    rows, whole = read[0].trace_rows
    if rows == whole and part != Part():
        given = f"--fit-rows {fit_rows}" if fit_blocks is None else f"--fit-blocks {fit_blocks}"
        raise ConfigError(
            f"{given}: {runs[0]} has {whole:,} requests, so none is left to measure; leave it out to fit to all"
        )
    told: Callable[[str], None] = (lambda what: None) if quiet else _progress
    return fit_runs(read, part, told)


def written(fit: LiveFit, file: Path, trace: Path | None = None) -> None:
    """Write the configuration of the twin."""
    from datetime import date

    from twin.calibrate.live.write import fitted_toml

    try:
        file.write_text(fitted_toml(fit, date.today(), trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; choose another place") from None


def tell(fit: LiveFit) -> str:
    """What was found, group by group."""
    from twin.calibrate.live.fit import parts

    lines = [f"runs  {fit.rests_on()}"]
    for run in fit.runs:
        lines += [f"      {run.folder.name}: left out {count:,} {why}" for why, count in sorted(run.left_out.items())]
    for group in fit.groups:
        lines.append(f"\ngroup {group.group}: {group.requests:,} requests, {group.rounds} rounds")
        lines += [f"  {name:<24}{value * 1e3:>12.6g} ms" for name, value in parts(group)]
        mean_ttft, mean_tpot = group.bias
        means = f"TTFT {mean_ttft:+.1%}" + (f", time per token {mean_tpot:+.1%}" if mean_tpot is not None else "")
        lines.append(f"  means in the fit: {means}")
        lines.append(
            f"  error: {group.unseen.text() if group.unseen else 'not known, too few requests to leave any out'}"
        )
    return "\n".join(lines)


def _progress(what: str) -> None:
    print(f"twin: {what}", file=sys.stderr)
