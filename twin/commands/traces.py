"""`twin synth`, `twin import` and `twin traces show`: make traces, bring them into one format, look at them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twin.commands.options import HashBlockTokens, Json, OnBadRow, Out, Quiet, Sort, TimeUnit
from twin.errors import Exit

if TYPE_CHECKING:
    from traces.load import ReadOptions

Format = Annotated[str, typer.Option("--format", help="Name of the format instead of looking.", metavar="NAME")]
DefaultOsl = Annotated[
    int | None, typer.Option("--default-osl", help="Output length of rows without one.", metavar="N")
]
KeepZero = Annotated[bool, typer.Option("--keep-zero-output", help="Keep rows that made no output.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Trace file.")]

traces = typer.Typer(help="Look at trace files.", add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@traces.callback()
def _traces() -> None:
    """Look at trace files."""


@traces.command("show")
def show(
    file: File,
    format: Format = "auto",
    on_bad_row: OnBadRow = "error",
    time_unit: TimeUnit = None,
    hash_block_tokens: HashBlockTokens = None,
    default_osl: DefaultOsl = None,
    sort: Sort = False,
    keep_zero_output: KeepZero = False,
    json: Json = False,
) -> int:
    """Rows, span, rate, burstiness, lengths and the ideal hit rate of a trace."""
    from traces.stats import describe

    options = _options(format, on_bad_row, time_unit, hash_block_tokens, default_osl, sort, keep_zero_output)
    stats = describe(file, options)
    if json:
        from json import dumps

        print(dumps(stats.to_dict(), indent=1))
        return Exit.OK
    rows = [("file", str(file)), *stats.table()]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}".rstrip())
    return Exit.OK


def import_(
    file: File,
    out: Out,
    format: Format = "auto",
    on_bad_row: OnBadRow = "error",
    time_unit: TimeUnit = None,
    hash_block_tokens: HashBlockTokens = None,
    default_osl: DefaultOsl = None,
    sort: Sort = False,
    keep_zero_output: KeepZero = False,
    quiet: Quiet = False,
) -> int:
    """Read a trace in any known format and write it as parquet with the canonical columns."""
    from traces.convert import import_trace

    options = _options(format, on_bad_row, time_unit, hash_block_tokens, default_osl, sort, keep_zero_output)
    done = import_trace(file, out, options)
    if not quiet:
        for note in (
            f"read as {done.info.format}, times in {done.info.time_unit}",
            *done.info.notes,
            *(f"left out {count:,}: {reason}" for reason, count in sorted(done.skipped.items())),
            *(f"{count:,} {what}" for what, count in sorted(done.remarks.items())),
        ):
            print(f"twin: {note}", file=sys.stderr)
    print(f"{out}: {done.rows:,} rows")
    return Exit.OK


def synth(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="azure, mooncake, poisson or gamma.")],
    out: Out,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every random draw.", metavar="N")] = 0,
    rows: Annotated[int | None, typer.Option("--rows", help="How many requests.", metavar="N")] = None,
    duration_s: Annotated[float | None, typer.Option("--duration-s", help="How long.", metavar="SECONDS")] = None,
    rate_rps: Annotated[
        float | None, typer.Option("--rate-rps", help="Mean arrivals per second (poisson, gamma).", metavar="X")
    ] = None,
    cv: Annotated[
        float | None, typer.Option("--cv", help="Spread of the gaps over their mean (gamma).", metavar="X")
    ] = None,
    isl: Annotated[int | None, typer.Option("--isl", help="Mean prompt length (poisson, gamma).", metavar="N")] = None,
    osl: Annotated[int | None, typer.Option("--osl", help="Mean output length (poisson, gamma).", metavar="N")] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="fixed, geometric or azure (poisson, gamma).", metavar="WHAT")
    ] = None,
) -> int:
    """Draw a synthetic trace: the same options and seed give the same rows."""
    from traces.convert import write_table
    from traces.synth import SynthOptions, synthesise

    options = SynthOptions(
        seed=seed, rows=rows, duration_s=duration_s, rate_rps=rate_rps, cv=cv, isl=isl, osl=osl, lengths=lengths
    )
    table = synthesise(kind, options)
    written = write_table(table, out)
    print(f"{out}: {written:,} synthetic rows ({kind}, seed {seed})")
    return Exit.OK


def _options(
    format: str,
    on_bad_row: str,
    time_unit: str | None,
    hash_block_tokens: int | None,
    default_osl: int | None,
    sort: bool,
    keep_zero_output: bool,
) -> ReadOptions:
    from traces.load import ReadOptions

    return ReadOptions(
        format=format,
        on_bad_row=on_bad_row,
        time_unit=time_unit,
        hash_block_tokens=hash_block_tokens,
        default_osl=default_osl,
        sort=sort,
        keep_zero_output=keep_zero_output,
    )
