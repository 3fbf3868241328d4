"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Text = str | None

Out = Annotated[Path, typer.Option("--out", "-o", help="File to write (parquet).", metavar="FILE", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notices on stderr.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every random draw.", metavar="N")]
OnBadRow = Annotated[Text, typer.Option("--on-bad-row", help="error (default) stops, skip counts.", metavar="WHAT")]
TimeUnit = Annotated[Text, typer.Option("--time-unit", help="Unit of the arrival column: s, ms, us, ns.", metavar="U")]
HashBlockTokens = Annotated[
    Text, typer.Option("--hash-block-tokens", help="Tokens that one hash id stands for.", metavar="N")
]
