"""`twin report` and `twin compare`: what finished runs came to, one alone or two side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from twin.commands.options import Json, NoHtml
from twin.errors import ConfigError, Exit

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def report(
    run: Run,
    json: Json = False,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw the run as one picture, for slides.", metavar="FILE")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print metrics in Prometheus' text format and nothing else.")
    ] = False,
    no_html: NoHtml = False,
) -> int:
    """Print the report of a run again, and make its page anew."""
    from reports.record import read_run_state
    from reports.report import Report
    from reports.tables import report_text

    if png is not None and png.suffix.lower() != ".png":
        raise ConfigError(f"--png {png}: must end in .png; it is the only format of the picture")
    other = "--json" if json else "--png" if png is not None else None
    if metrics and other is not None:
        raise ConfigError(f"--metrics and {other}: metrics are printed alone; leave one of them out")
    found = Report.load(run)
    if metrics:
        from reports.exposition import exposition
        from reports.record import RunRecord

        print(exposition(found, RunRecord(run)), end="")
        return Exit.OK
    state = read_run_state(run)
    page = run / "report.json"
    if not no_html:
        from reports.html import write_html

        page = write_html(run, found, complete=state.state == "complete")
    if png is not None:
        from reports.picture import write_picture

        write_picture(run, found, png, complete=state.state == "complete")
    if json:
        print(found.to_json(), end="")
        return Exit.OK
    print(report_text(found, path=str(page), run=state, colour=sys.stdout.isatty()))
    if png is not None:
        print(f"picture {png}")
    return Exit.OK


def compare(
    a: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the first run.")],
    b: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the second run.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Of three and more, the last is the twin of the others: live repeats."),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            "--blocks", metavar="N", help="Of repeats: every other N requests, as record --fit-blocks left them."
        ),
    ] = None,
    json: Json = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Page to write (otherwise beside the second run).", metavar="FILE")
    ] = None,
    no_html: NoHtml = False,
) -> int:
    """Two runs side by side, with the spread of the difference; or live repeats beside their twin."""
    if more:
        return _compare_repeats([a, b, *more[:-1]], more[-1], blocks=blocks, json=json, html=html)
    if blocks is not None:
        raise ConfigError(f"--blocks {blocks}: has no effect on two runs; name live repeats and their twin")
    from reports.compare import compare as compared
    from reports.compare_views import comparison_text, write_comparison_html

    if html is not None and no_html:
        raise ConfigError(f"--html {html} and --no-html: write a page or none; leave one of them out")
    found = compared(a, b)
    page = None
    if not no_html:
        page = html or b.resolve().parent / f"compare-{a.resolve().name}-{b.resolve().name}.html"
        write_comparison_html(found, a, b, page)
    if json:
        print(found.to_json(), end="")
        return Exit.OK
    print(comparison_text(found, colour=sys.stdout.isatty()))
    if page is not None:
        print(f"\npage  {_near(page)}")
    return Exit.OK


def _compare_repeats(live: list[Path], twin: Path, *, blocks: int | None, json: bool, html: Path | None) -> int:
    """Errors of a twin beside the spread of the live runs."""
    from reports.repeats import compare_repeats
    from reports.repeats_views import fidelity_text

    if html is not None:
        raise ConfigError(f"--html {html}: there is a page of two runs only; leave it out, or name two runs")
    if blocks is not None and blocks < 1:
        raise ConfigError(f"--blocks {blocks}: must be 1 or more; leave it out to compare all requests")
    found = compare_repeats(live, twin, block=blocks)
    print(found.to_json() if json else fidelity_text(found, colour=sys.stdout.isatty()), end="" if json else "\n")
    return Exit.OK


def _near(path: Path) -> Path:
    """The path from here, where it lies below here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
