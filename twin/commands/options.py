"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", "-o", help="Parquet file to write.", metavar="FILE", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
NoHtml = Annotated[bool, typer.Option("--no-html", help="Write no page.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notices on stderr.")]
OnBadRow = Annotated[
    str,
    typer.Option("--on-bad-row", help="error stops at a bad row, skip leaves it out and counts it.", metavar="WHAT"),
]
TimeUnit = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of the arrival column: s, ms, us or ns.", metavar="UNIT")
]
HashBlockTokens = Annotated[
    int | None, typer.Option("--hash-block-tokens", help="Tokens that one hash id stands for.", metavar="N")
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort rows whose arrivals go back in time.")]
