"""What a caller may ask of a reader, and what a reader says about a trace. Plain values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a trace file.

    `format`: a reader's name, or "auto" to look at the content. `on_bad_row`: "error" or "skip" (and count).
    `time_unit` (s, ms, us, ns), `hash_block_tokens`: in place of what the format says. `default_osl`: for rows without
    an output length. `sort`: put rows in order of arrival instead of refusing them (reads the whole trace into memory).
    `keep_zero_output`: keep rows that made no token, which are left out and counted otherwise.
    """

    format: str = "auto"
    on_bad_row: str = "error"
    time_unit: str | None = None
    hash_block_tokens: int | None = None
    default_osl: int | None = None
    sort: bool = False
    keep_zero_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """What is known of a trace before its rows are read.

    `time_unit` is that of the file ("s", "ms", ..., or "date"); batches are in seconds always. `hash_block_tokens` is
    None when there are no hash ids. `rows` is None when only reading to the end would tell; it counts rows of the file,
    left out ones too. `columns` are those of the batches; in JSON formats a column may turn out to hold only nulls.
    `generator` and `seed` say how a synthetic trace was drawn. `notes` say in words what was recognised and what was
    not used.
    """

    path: Path
    format: str
    time_unit: str
    columns: tuple[str, ...]
    hash_block_tokens: int | None = None
    rows: int | None = None
    synthetic: bool = False
    source: str | None = None
    licence: str | None = None
    generator: str | None = None
    seed: str | None = None
    notes: tuple[str, ...] = ()
