"""`twin replay`: options into a configuration, the run, the table on stdout, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twin.commands.options import HashBlockTokens, Json, OnBadRow, Quiet, Text, TimeUnit
from twin.errors import Exit

if TYPE_CHECKING:
    from twin.replay import Replayed

Progress = Callable[[int, int | None], None]


def replay(
    trace: Annotated[Text, typer.Argument(metavar="TRACE", help="Trace file; its format is sniffed.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file (docs/config.md).", metavar="FILE")] = None,
    workers: Annotated[Text, typer.Option("--workers", help="Number of workers.", metavar="N")] = None,
    engine: Annotated[Text, typer.Option("--engine", help="Whose scheduler: vllm.", metavar="NAME")] = None,
    model: Annotated[Text, typer.Option("--model", help="Model served (twin models).", metavar="NAME")] = None,
    gpu: Annotated[Text, typer.Option("--gpu", help="Device (twin hardware).", metavar="NAME")] = None,
    tp: Annotated[Text, typer.Option("--tp", help="GPUs of one worker.", metavar="N")] = None,
    block_size: Annotated[Text, typer.Option("--block-size", help="Tokens in a KV block.", metavar="N")] = None,
    kv_blocks: Annotated[
        Text, typer.Option("--kv-blocks", help="KV blocks of a worker; otherwise from memory.", metavar="N")
    ] = None,
    latency: Annotated[
        Text, typer.Option("--latency", help="Step latency: roofline, fixed, polynomial, table.", metavar="MODEL")
    ] = None,
    router: Annotated[
        Text,
        typer.Option("--router", help="round-robin, random, least-loaded, power-of-two, direct or kv.", metavar="MODE"),
    ] = None,
    sla: Annotated[Text, typer.Option("--sla", help="Limits, e.g. ttft=200ms,itl=50ms@p95.", metavar="LIMITS")] = None,
    seed: Annotated[Text, typer.Option("--seed", help="Seed of every random draw.", metavar="N")] = None,
    limit: Annotated[Text, typer.Option("--limit", help="Replay only the first N rows.", metavar="N")] = None,
    speedup: Annotated[Text, typer.Option("--speedup", help="Divide arrival times by this.", metavar="X")] = None,
    concurrency: Annotated[
        Text, typer.Option("--concurrency", help="Closed loop: N requests in flight.", metavar="N")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key, e.g. router.router_temperature=0.5.", metavar="KEY=VALUE"),
    ] = None,
    on_bad_row: OnBadRow = None,
    time_unit: TimeUnit = None,
    hash_block_tokens: HashBlockTokens = None,
    sort: Annotated[bool, typer.Option("--sort", help="Sort rows whose arrivals go back in time.")] = False,
    allow_no_effect: Annotated[
        bool, typer.Option("--allow-no-effect", help="List options without effect instead of refusing them.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run.", metavar="DIR")] = None,
    name: Annotated[Text, typer.Option("--name", help="Name of the run, below runs/.", metavar="NAME")] = None,
    json: Json = False,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no report.html.")] = False,
    journal: Annotated[bool, typer.Option("--journal", help="Write journal.jsonl: every event and action.")] = False,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="Write perfetto.json for ui.perfetto.dev.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Record each decision's terms per candidate.")] = False,
    no_leap: Annotated[bool, typer.Option("--no-leap", help="Compute every step on its own; results equal.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting and its origin; stop.")
    ] = False,
    quiet: Quiet = False,
) -> int:
    """Simulate a trace on a cluster and write a report."""
    from twin.config_read import load

    flags: dict[str, object] = {
        "TRACE": trace,
        "--workers": workers,
        "--engine": engine,
        "--model": model,
        "--gpu": gpu,
        "--tp": tp,
        "--block-size": block_size,
        "--kv-blocks": kv_blocks,
        "--latency": latency,
        "--router": router,
        "--sla": sla,
        "--seed": seed,
        "--limit": limit,
        "--speedup": speedup,
        "--concurrency": concurrency,
        "--on-bad-row": on_bad_row,
        "--time-unit": time_unit,
        "--hash-block-tokens": hash_block_tokens,
        "--sort": sort or None,
        "--allow-no-effect": allow_no_effect or None,
    }
    settings = load(config, flags, set_ or ())
    if show_config:
        from twin.config_text import show

        print(show(settings), end="")
        return Exit.OK
    from twin.replay import replay as run

    with _progress(quiet) as progress:
        done = run(
            settings,
            out=out,
            name=name,
            html=not no_html,
            journal=journal,
            perfetto=perfetto,
            explain=explain,
            leap=not no_leap,
            progress=progress,
        )
    return _tell(done, json=json, html=not no_html)


def _tell(done: Replayed, *, json: bool, html: bool) -> int:
    """Print the result and say how the run ended."""
    if json:
        print(done.report.to_json())
    else:
        print(done.report.to_text())
        print(f"report: {done.folder / ('report.html' if html else 'report.json')}")
    if not done.complete:
        print(f"twin: stopped; what was done so far is in {done.folder}, marked partial", file=sys.stderr)
        return Exit.INTERRUPTED
    return Exit.MISSED if done.report.sla_missed else Exit.OK


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
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
