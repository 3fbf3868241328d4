"""Dynamo's request trace, JSON lines or a `.jsonl.gz` segment of them: one line per event, in order of *end*.

Only `request_end` is a request; other events are counted and left out. Hashes are chained u64 block hashes (equal hash,
equal prefix) and are kept bit by bit as int64. The trace is sorted by arrival, so it is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from traces.check import Clock
from traces.options import ReadOptions, TraceInfo
from traces.parse import TICKS_PER_S, Notes, id_lists, json_numbers, texts
from traces.readers import RawTrace
from traces.readers.json_lines import Objects, objects
from traces.rows import Rows
from traces.schema import ARRIVAL, HASH_IDS, ISL, OSL, REQUEST_ID, SESSION_ID
from traces.source import Json, Kind, Source

SCHEMA = "dynamo.request.trace.v1"
_SCHEMAS = "dynamo.request.trace."
_REQUEST = "request_end"
_LOOKAHEAD_LINES = 4096

FIELDS: Mapping[str, str] = {
    ARRIVAL: "request.request_received_ms",
    ISL: "request.replay.input_length",
    OSL: "request.output_tokens",
    REQUEST_ID: "request.request_id",
    SESSION_ID: "agent_context.session_id",
    HASH_IDS: "request.replay.input_sequence_hashes",
}
_BLOCK = "trace_block_size"


class DynamoReader:
    """Reads `request_end` lines of schema `dynamo.request.trace.v1`."""

    name = "dynamo"

    def claims(self, source: Source) -> bool:
        """Some object among the first names a Dynamo request trace schema."""
        return source.kind is Kind.JSON_LINES and any(str(i.get("schema")).startswith(_SCHEMAS) for i in source.objects)

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Times are Unix ms by the schema; the block size stands in the rows and must be the same in all."""
        if source.kind is not Kind.JSON_LINES:
            raise source.error(f"dynamo traces are JSON lines, this file is {source.kind.value}; see --format")
        other = {str(item["schema"]) for item in source.objects if item.get("schema", SCHEMA) != SCHEMA}
        if other:
            raise source.error(f"schema {min(other)!r} is not known; this reads {SCHEMA!r}")
        if options.time_unit not in (None, "ms"):
            raise source.error(f"--time-unit {options.time_unit} contradicts the schema: its times are Unix ms")
        block = _block_size(source)
        if options.hash_block_tokens not in (None, block):
            said = f"--hash-block-tokens {options.hash_block_tokens} contradicts the file, where {_BLOCK} is {block}"
            raise source.error(said)
        info = TraceInfo(
            path=source.path,
            format=self.name,
            time_unit="ms",
            columns=tuple(FIELDS),
            hash_block_tokens=block,
            notes=(f"request_received_ms in Unix ms; {block} tokens per hash ({_BLOCK}); sorted by arrival",),
        )
        return RawTrace(
            info=info,
            clock=Clock(TICKS_PER_S["ms"]),
            chunks=lambda batch_rows: _chunks(source, batch_rows, block),
            fields=FIELDS,
            in_arrival_order=False,
        )


def _block_size(source: Source) -> int:
    """The block size of the first request that has one."""
    for chunk in objects(source, _LOOKAHEAD_LINES):
        for item in chunk.items:
            size = _table(_table(item, "request"), "replay").get(_BLOCK)
            if type(size) is int and size > 0:
                return size
    raise source.error(f"no request with {FIELDS[HASH_IDS]} and its {_BLOCK}; turn on replay hashes when recording")


def _chunks(source: Source, batch_rows: int, block: int) -> Iterator[Rows]:
    for chunk in objects(source, batch_rows):
        kinds = chunk.column("event_type")
        requests = [i for i, kind in enumerate(kinds) if kind == _REQUEST or i in chunk.notes or kind is None]
        others: dict[str, int] = {}
        for i in set(range(len(kinds))) - set(requests):
            reason = f"event {kinds[i]}"
            others[reason] = others.get(reason, 0) + 1
        yield _rows(chunk.take(requests), others, block)


def _rows(chunk: Objects, others: dict[str, int], block: int) -> Rows:
    notes = chunk.notes
    requests = [_table(item, "request") for item in chunk.items]
    replays = [_table(item, "replay") for item in requests]
    for i, (item, replay) in enumerate(zip(chunk.items, replays, strict=True)):
        wrong = _wrong(item, replay, block)
        if wrong:
            notes.setdefault(i, wrong)

    def numbers(tables: list[Json], column: str, notes: Notes = notes) -> list[object]:
        return [table.get(column.rpartition(".")[2]) for table in tables]

    return Rows(
        count=len(requests),
        numbers={
            ARRIVAL: json_numbers(numbers(requests, FIELDS[ARRIVAL]), FIELDS[ARRIVAL], notes),
            ISL: json_numbers(numbers(replays, FIELDS[ISL]), FIELDS[ISL], notes),
            OSL: json_numbers(numbers(requests, FIELDS[OSL]), FIELDS[OSL], notes),
        },
        place=chunk.place,
        texts={
            REQUEST_ID: texts(numbers(requests, FIELDS[REQUEST_ID])),
            SESSION_ID: texts([_table(item, "agent_context").get("session_id") for item in chunk.items]),
        },
        ids=id_lists(numbers(replays, FIELDS[HASH_IDS]), FIELDS[HASH_IDS], notes),
        unreadable=notes,
        left_out=others,
    )


def _wrong(item: Json, replay: Json, block: int) -> str | None:
    if not item:
        return None
    if item.get("event_type") is None:
        return "event_type is missing"
    if item.get("schema") != SCHEMA:
        return f"schema is {item.get('schema')!r}, not {SCHEMA!r}"
    if not replay:
        return "request.replay is missing"
    if replay.get(_BLOCK) != block:
        return f"{_BLOCK} is {replay.get(_BLOCK)!r}, and {block} in the rows before"
    return None


def _table(item: Json, key: str) -> Json:
    found = item.get(key)
    return found if isinstance(found, dict) else {}
