"""Mooncake JSON lines, with or without sessions: `timestamp` in ms, one hash id per 512 tokens.

Both are properties of the format, printed and open to correction, not guesses. A file whose follow-up rows hold only
what is new since the turn before (AIPerf's agentic files) is refused rather than misread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from traces.check import Clock, plain
from traces.options import ReadOptions, TraceInfo
from traces.parse import TICKS_PER_S, Notes, id_lists, json_numbers, texts
from traces.readers import RawTrace
from traces.readers.json_lines import Objects, objects
from traces.rows import Numbers, Rows
from traces.schema import (
    ARRIVAL,
    COLUMNS,
    DELAY,
    HASH_IDS,
    ISL,
    LORA,
    MAX_TOKENS,
    OSL,
    PRIORITY,
    REQUEST_ID,
    SESSION_ID,
    TENANT,
    TEXTS,
)
from traces.source import Json, Kind, Source

UNIT = "ms"
HASH_BLOCK_TOKENS = 512

FIELDS: Mapping[str, str] = {
    ARRIVAL: "timestamp",
    ISL: "input_length",
    OSL: "output_length",
    REQUEST_ID: "request_id",
    SESSION_ID: "session_id",
    DELAY: "delay",
    HASH_IDS: "hash_ids",
    MAX_TOKENS: "max_tokens",
    PRIORITY: "priority",
    LORA: "lora",
    TENANT: "tenant",
}
_DELAY_MS = "delay_ms"
_KNOWN = {*FIELDS.values(), _DELAY_MS}


class MooncakeReader:
    """Reads `{"timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay" | "delay_ms"}`."""

    name = "mooncake"

    def claims(self, source: Source) -> bool:
        """Some object among the first has a prompt length under Mooncake's name."""
        return source.kind is Kind.JSON_LINES and any(_is_row(item) for item in source.objects)

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Unit and block size from the options, else Mooncake's own."""
        if source.kind is not Kind.JSON_LINES:
            raise source.error(f"mooncake traces are JSON lines, this file is {source.kind.value}; see --format")
        deltas = any("group_id" in item and "session_id" in item for item in source.objects)
        if deltas and options.format == "auto":
            raise source.error(
                "session_id with group_id is how AIPerf marks files whose follow-up rows hold only what is new; "
                "write full prompt lengths and hash ids, or pass --format mooncake if they are full already",
                1,
            )
        unit, block = options.time_unit or UNIT, options.hash_block_tokens or HASH_BLOCK_TOKENS
        info = TraceInfo(
            path=source.path,
            format=self.name,
            time_unit=unit,
            columns=COLUMNS,
            hash_block_tokens=block,
            notes=_notes(source, options, unit, block),
        )
        clock = Clock(TICKS_PER_S[unit])
        unit_given = options.time_unit is not None
        return RawTrace(
            info=info,
            clock=clock,
            chunks=lambda batch_rows: _chunks(source, batch_rows, clock, unit_given),
            fields={**FIELDS, DELAY: _delay_name(source)},
        )


def _is_row(item: Json) -> bool:
    return "input_length" in item and not {"event_type", "schema"} & item.keys()


def _delay_name(source: Source) -> str:
    return _DELAY_MS if any(_DELAY_MS in item for item in source.objects) else FIELDS[DELAY]


def _notes(source: Source, options: ReadOptions, unit: str, block: int) -> tuple[str, ...]:
    whose_unit = "as asked" if options.time_unit else "the format's own"
    whose_block = "as asked" if options.hash_block_tokens else "the format's own"
    unused = sorted({key for item in source.objects for key in item} - _KNOWN)
    notes = [f"timestamp in {unit} ({whose_unit}); {block} tokens per hash id ({whose_block})"]
    return (*notes, f"fields not used: {', '.join(unused)}") if unused else tuple(notes)


def _chunks(source: Source, batch_rows: int, clock: Clock, unit_given: bool) -> Iterator[Rows]:
    for chunk in objects(source, batch_rows):
        keys, notes = chunk.keys(), chunk.notes
        numbers = {
            column: json_numbers(chunk.column(FIELDS[column]), FIELDS[column], notes)
            for column in (ARRIVAL, ISL, OSL, MAX_TOKENS, PRIORITY)
        }
        if not unit_given:
            _refuse_fractions(source, chunk, numbers[ARRIVAL])
        numbers[DELAY] = _delays(chunk, keys, clock, notes)
        yield Rows(
            count=len(chunk.items),
            numbers=numbers,
            place=chunk.place,
            texts={column: texts(chunk.column(FIELDS[column])) for column in TEXTS},
            ids=id_lists(chunk.column(FIELDS[HASH_IDS]), FIELDS[HASH_IDS], notes),
            unreadable=notes,
        )


def _refuse_fractions(source: Source, chunk: Objects, arrival: Numbers) -> None:
    """Whole milliseconds are this format's; a fraction says that somebody wrote seconds."""
    values = arrival.values
    if values.dtype.kind != "f":
        return
    index = np.flatnonzero(arrival.present() & np.isfinite(values) & (values != np.floor(values)))
    if len(index):
        first = int(index[0])
        raise source.error(
            f"timestamp is {plain(values[first])}, and this format has whole milliseconds; "
            "say which it is: --time-unit s for seconds, --time-unit ms for milliseconds",
            chunk.place(first),
        )


def _delays(chunk: Objects, keys: set[str], clock: Clock, notes: Notes) -> Numbers:
    """Seconds. `delay` is in the unit of `timestamp`, `delay_ms` in ms whatever that is."""
    absent: list[object] = [None] * len(chunk.items)
    ticks = json_numbers(chunk.column("delay") if "delay" in keys else absent, "delay", notes)
    ms = json_numbers(chunk.column(_DELAY_MS) if _DELAY_MS in keys else absent, _DELAY_MS, notes)
    has_ticks, has_ms = ticks.present(), ms.present()
    for i in np.flatnonzero(has_ticks & has_ms).tolist():
        notes.setdefault(i, f"both delay and {_DELAY_MS} are given; one is enough")
    seconds = np.where(has_ms, ms.values / TICKS_PER_S["ms"], ticks.values / clock.ticks_per_s)
    return Numbers(seconds, ~(has_ticks | has_ms))
