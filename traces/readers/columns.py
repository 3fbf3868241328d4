"""Any CSV or parquet with the canonical columns or their usual aliases.

A column counts only under a name whose meaning and unit are known; a bare `timestamp` of numbers has no unit and asks
for one. What was taken for what, and what was left unused, is in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from traces.check import Clock
from traces.errors import TraceError
from traces.options import ReadOptions, TraceInfo
from traces.parse import NS_PER_S, TICKS_PER_S, looks_like_date
from traces.readers import RawTrace
from traces.readers.tables import Layout, filled_columns, table_rows
from traces.schema import (
    ARRIVAL,
    COLUMNS,
    DELAY,
    HASH_IDS,
    ISL,
    LORA,
    MAX_TOKENS,
    META_BLOCK,
    META_GENERATOR,
    META_LICENCE,
    META_SEED,
    META_SOURCE,
    META_SYNTHETIC,
    OSL,
    PRIORITY,
    REQUEST_ID,
    REQUIRED,
    SESSION_ID,
    TENANT,
)
from traces.source import Kind, Source

ARRIVAL_UNITS: Mapping[str, str | None] = {
    "arrival_s": "s",
    "arrived_at": "s",
    "arrival_ms": "ms",
    "timestamp_ms": "ms",
    "arrival_time": None,
    "timestamp": None,
}
"""Names of an arrival column and the unit that goes with it; None: dates, or numbers whose unit must be given."""

DELAY_UNITS: Mapping[str, str] = {"delay_s": "s", "delay_ms": "ms"}

ALIASES: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: tuple(ARRIVAL_UNITS),
    ISL: ("isl", "prompt_tokens", "input_length", "input_tokens", "contexttokens", "num_prefill_tokens"),
    OSL: ("osl", "output_tokens", "completion_tokens", "output_length", "generatedtokens", "num_decode_tokens"),
    REQUEST_ID: ("request_id",),
    SESSION_ID: ("session_id",),
    DELAY: tuple(DELAY_UNITS),
    HASH_IDS: ("hash_ids",),
    MAX_TOKENS: ("max_tokens",),
    PRIORITY: ("priority",),
    LORA: ("lora",),
    TENANT: ("tenant",),
}
"""Accepted names, in lower case; the first is the canonical one and wins over the others."""

_WHAT = {ARRIVAL: "arrival time", ISL: "prompt length", OSL: "output length"}
_BLOCK_KEYS = (META_BLOCK, "trace_block_size")


class ColumnsReader:
    """Reads tables whose column names say what they hold."""

    name = "columns"

    def claims(self, source: Source) -> bool:
        """A table with a column for at least one of arrival, prompt and output length."""
        if source.kind is Kind.JSON_LINES:
            return False
        names = {name.casefold() for name in source.columns}
        return any(names & set(ALIASES[column]) for column in REQUIRED)

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Find every column, the unit of the arrivals and the block size of the hash ids."""
        if source.kind is Kind.JSON_LINES:
            raise source.error("a table of columns is CSV or parquet, this file is JSON lines; see --format")
        return open_table(source, options, self.name, ALIASES)


def open_table(
    source: Source,
    options: ReadOptions,
    format_name: str,
    aliases: Mapping[str, tuple[str, ...]],
    *,
    unit: str | None = None,
    notes: tuple[str, ...] = (),
) -> RawTrace:
    """A table as a raw trace. `unit` is that of numeric arrivals where the format fixes it."""
    filled = filled_columns(source) if source.kind is Kind.PARQUET else frozenset(source.columns)
    names = _find(source, options, aliases, filled)
    time_unit = _time_unit(source, options, names[ARRIVAL], unit)
    block = _block_size(source, options, names)
    dated = time_unit == "date"
    delay_unit = DELAY_UNITS.get(names.get(DELAY, "").casefold(), "s")
    layout = Layout(names, dated, TICKS_PER_S[delay_unit])
    meta = source.metadata
    info = TraceInfo(
        path=source.path,
        format=format_name,
        time_unit=time_unit,
        columns=tuple(column for column in COLUMNS if column in names),
        hash_block_tokens=block,
        rows=source.rows,
        synthetic=meta.get(META_SYNTHETIC) == "true",
        source=meta.get(META_SOURCE, meta.get("trace_source")),
        licence=meta.get(META_LICENCE, meta.get("trace_licence")),
        generator=meta.get(META_GENERATOR),
        seed=meta.get(META_SEED),
        notes=(*_notes(source, options, names, time_unit, block, filled), *notes),
    )
    return RawTrace(
        info=info,
        clock=Clock(NS_PER_S, dated=True) if dated else Clock(TICKS_PER_S[time_unit]),
        chunks=table_rows(source, layout),
        fields=names,
    )


def _find(
    source: Source, options: ReadOptions, aliases: Mapping[str, tuple[str, ...]], filled: frozenset[str]
) -> dict[str, str]:
    """The file's name for each canonical column that it has; an optional one counts only if it is `filled`."""
    present = {name.casefold(): name for name in source.columns}
    names: dict[str, str] = {}
    for column, accepted in aliases.items():
        found = [present[alias] for alias in accepted if alias in present]
        if len(found) > 1 and found[0].casefold() != accepted[0]:
            both = " and ".join(found)
            raise source.error(f"both {both} could be the {_WHAT.get(column, column)}; rename or remove one", 1)
        if found and (column in REQUIRED or found[0] in filled):
            names[column] = found[0]
    lacking = [column for column in REQUIRED if column not in names]
    if lacking == [OSL] and options.default_osl is not None:
        raise source.error("there is no column for the output length; --default-osl fills gaps in one, add it first", 1)
    if lacking:
        raise _lacks(source, lacking[0], aliases)
    return names


def _lacks(source: Source, column: str, aliases: Mapping[str, tuple[str, ...]]) -> TraceError:
    known, has = ", ".join(aliases[column]), ", ".join(source.columns[:12])
    return source.error(f"no column for the {_WHAT[column]}: the columns are {has}; name one of them {known}", 1)


def _time_unit(source: Source, options: ReadOptions, name: str, unit: str | None) -> str:
    """The unit of the arrivals, or "date"; from the type, the option, the format or the name, in this order."""
    asked = options.time_unit
    if _has_dates(source, name):
        if asked is not None:
            raise source.error(f"--time-unit {asked} has no effect: {name} holds dates; leave it out")
        return "date"
    of_name = ARRIVAL_UNITS.get(name.casefold())
    if asked is not None and of_name is not None and asked != of_name:
        raise source.error(f"--time-unit {asked} contradicts the column name {name}; rename the column")
    found = asked or unit or of_name
    if found is None:
        raise source.error(f"{name} holds numbers of no known unit; give it with --time-unit s, ms, us or ns")
    return found


def _has_dates(source: Source, name: str) -> bool:
    if source.kind is Kind.CSV:
        at = source.columns.index(name)
        return len(source.first_cells) > at and looks_like_date(source.first_cells[at])
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path) as file:
        kind = file.schema_arrow.field(name).type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            first = next(file.iter_batches(1, columns=[name])).column(0)[0].as_py()
            return first is not None and looks_like_date(first)
    return bool(pa.types.is_timestamp(kind))


def _block_size(source: Source, options: ReadOptions, names: Mapping[str, str]) -> int | None:
    if HASH_IDS not in names:
        named = any(name.casefold() == HASH_IDS for name in source.columns)
        if options.hash_block_tokens is not None and not named:
            asked = options.hash_block_tokens
            raise source.error(f"--hash-block-tokens {asked} has no effect: there is no hash_ids column; leave it out")
        return None
    if options.hash_block_tokens is not None:
        return options.hash_block_tokens
    for key in _BLOCK_KEYS:
        text = source.metadata.get(key)
        if text is not None:
            if text.isdecimal() and int(text) > 0:
                return int(text)
            raise source.error(
                f"the file's metadata say {key}={text}, not a number of tokens; set --hash-block-tokens N"
            )
    raise source.error(
        "hash_ids is there, but nothing says how many tokens an id stands for; give --hash-block-tokens N"
    )


def _notes(
    source: Source,
    options: ReadOptions,
    names: Mapping[str, str],
    time_unit: str,
    block: int | None,
    filled: frozenset[str],
) -> tuple[str, ...]:
    unit = "dates, those without a zone read as UTC" if time_unit == "date" else f"in {time_unit}"
    notes = []
    if source.metadata.get(META_SYNTHETIC) == "true":
        drawn = (source.metadata.get(key, "unknown") for key in (META_GENERATOR, META_SEED))
        notes.append("synthetic: drawn by {}, seed {}".format(*drawn))
    notes += [f"{names[ARRIVAL]} {unit}; {names[ISL]} and {names[OSL]} in tokens"]
    if block is not None:
        whose = "as asked" if options.hash_block_tokens else "the file's metadata"
        notes.append(f"{block} tokens per hash id ({whose})")
    unused = [name for name in source.columns if name in filled and name not in set(names.values())]
    if unused:
        notes.append(f"columns not used: {', '.join(unused)}")
    return tuple(notes)
