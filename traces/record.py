"""A run's journal as a trace: what ran, live or simulated, becomes demand that can be replayed.

It reads the plain JSON of the journal and knows no policy. Arrivals, prompt lengths, content and delivered tokens are
taken as observed; what a cluster decided is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from traces.check import Clock
from traces.options import ReadOptions, TraceInfo
from traces.parse import TICKS_PER_S, Notes, id_lists, json_numbers, texts
from traces.readers import RawTrace
from traces.readers.json_lines import objects
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

SCHEMA = "dynatwin.journal/"
_ARRIVED = "RequestArrived"
_FINISHED = "RequestFinished"
_CUT = {"RequestFailed": "failed", "RequestCancelled": "cancelled"}
_REJECTED = "RequestRejected"
_ENDS = {_FINISHED, _REJECTED, *_CUT}

FIELDS: Mapping[str, str] = {
    ARRIVAL: "at_s",
    ISL: "isl",
    OSL: "output_tokens",
    REQUEST_ID: "request_id",
    SESSION_ID: "session_id",
    MAX_TOKENS: "max_tokens",
    PRIORITY: "priority",
    LORA: "lora",
    TENANT: "tenant",
    HASH_IDS: "blocks",
}


class JournalReader:
    """Reads `RequestArrived` events, and the event that ended each request for its output length."""

    name = "journal"

    def claims(self, source: Source) -> bool:
        """The first line is a journal's header."""
        return source.kind is Kind.JSON_LINES and str(source.objects[0].get("schema")).startswith(SCHEMA)

    def open(self, source: Source, options: ReadOptions) -> RawTrace:
        """Times are seconds; content is known in the block size of the workers."""
        if source.kind is not Kind.JSON_LINES:
            raise source.error(f"a journal is JSON lines, this file is {source.kind.value}; see --format")
        for name in ("time_unit", "hash_block_tokens"):
            if getattr(options, name) is not None:
                raise source.error(f"--{name.replace('_', '-')} has no effect on a journal; leave it out")
        block = _block_size(source)
        demand = _demand(source)
        info = TraceInfo(
            path=source.path,
            format=self.name,
            time_unit="s",
            columns=tuple(column for column in COLUMNS if column != HASH_IDS or block is not None),
            hash_block_tokens=block,
            synthetic=demand.get("synthetic") is True,
            source=_text(demand, "source"),
            licence=_text(demand, "licence"),
            generator=_text(demand, "generator"),
            seed=_text(demand, "seed"),
            notes=(
                "at_s in s; output lengths as delivered; a later turn follows the end of the turn before it",
                f"prompt content in blocks of {block} tokens"
                if block
                else "no block size: prompt content is not known",
            ),
        )
        keep_unended = options.default_osl is not None
        return RawTrace(
            info=info,
            clock=Clock(TICKS_PER_S["s"]),
            chunks=lambda batch_rows: _Reading(source, block, keep_unended).chunks(batch_rows),
            fields=FIELDS,
        )


def _demand(source: Source) -> Json:
    """What the header tells of the trace behind the run: `config.demand`; empty in journals without it."""
    config = source.objects[0].get("config")
    demand = config.get("demand") if isinstance(config, dict) else None
    return demand if isinstance(demand, dict) else {}


def _text(demand: Json, name: str) -> str | None:
    value = demand.get(name)
    return value if isinstance(value, str) else None


def _block_size(source: Source) -> int | None:
    """The block size that all workers had that were up before the first request; None if they disagree."""
    sizes: set[object] = set()
    for chunk in objects(source, 4096):
        for item in chunk.items:
            event = _event(item)
            if event.get("type") == _ARRIVED:
                return _only(sizes)
            if event.get("type") == "WorkerUp":
                sizes.add(event.get("block_size"))
    return _only(sizes)


def _only(sizes: set[object]) -> int | None:
    size = next(iter(sizes)) if len(sizes) == 1 else None
    return size if isinstance(size, int) and size > 0 else None


def _event(item: Json) -> Json:
    found = item.get("event")
    return found if isinstance(found, dict) else {}


def _signed(value: int) -> int:
    """A 64-bit hash as the trace's column has it."""
    return value - 2**64 if value >= 2**63 else value


@dataclass(slots=True)
class _Request:
    """A request as far as the journal has told of it; `wrong` says why its line cannot be used."""

    line: int
    event: Json
    ids: list[int] = field(default_factory=list)
    delay_s: float | None = None
    osl: object = None
    ended: bool = False
    wrong: str | None = None


class _Reading:
    """One pass over a journal. Requests leave in order of arrival, each once it has ended."""

    def __init__(self, source: Source, block: int | None, keep_unended: bool) -> None:
        self._source = source
        self._block = block
        self._keep_unended = keep_unended
        self._open: dict[str, _Request] = {}
        self._turn_end_s: dict[str, float] = {}
        self._turns_open: dict[str, int] = {}
        self._branches: dict[str, int] = {}
        self._arrived = 0
        self._left_out: dict[str, int] = {}
        self._remarks: dict[str, int] = {}

    def chunks(self, batch_rows: int) -> Iterator[Rows]:
        """Rows, up to so many at a time; whatever has not ended stands at the end."""
        ready: list[_Request] = []
        for chunk in objects(self._source, batch_rows):
            for i, item in enumerate(chunk.items):
                if i in chunk.notes:
                    ready.append(_Request(chunk.place(i), {}, wrong=chunk.notes[i]))
                else:
                    self._take(item, chunk.place(i))
            ready += self._leaving(at_end=False)
            while len(ready) >= batch_rows:
                yield self._rows(ready[:batch_rows])
                ready = ready[batch_rows:]
        ready += self._leaving(at_end=True)
        for start in range(0, max(len(ready), 1), batch_rows):
            yield self._rows(ready[start : start + batch_rows])

    def _take(self, item: Json, line: int) -> None:
        branches = item.get("branches")
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, dict) and isinstance(branch.get("uid"), int):
                self._branches[str(branch.get("hash"))] = branch["uid"]
        event = _event(item)
        kind, name = event.get("type"), str(event.get("request_id"))
        if kind == _ARRIVED:
            self._arrive(event, name, line)
        elif kind in _ENDS and name in self._open:
            self._end(self._open[name], str(kind), event)

    def _arrive(self, event: Json, name: str, line: int) -> None:
        request = _Request(line, event)
        self._open[name] = request
        self._arrived += 1
        self._follow(request)
        if self._block is not None and event.get("blocks") is not None:
            try:
                request.ids = self._ids(event, self._block)
            except (TypeError, ValueError, KeyError, AttributeError):
                request.wrong = "blocks cannot be followed; the line is damaged, or of another version"

    def _follow(self, request: _Request) -> None:
        """A turn that came when all turns before it had ended waited for the last of them."""
        session, at_s = request.event.get("session_id"), request.event.get("at_s")
        if session is None:
            return
        end_s = self._turn_end_s.get(str(session))
        if end_s is not None and not self._turns_open.get(str(session)) and isinstance(at_s, int | float):
            request.delay_s = max(0.0, at_s - end_s)
        self._turns_open[str(session)] = self._turns_open.get(str(session), 0) + 1

    def _ids(self, event: Json, block: int) -> list[int]:
        """An id per block, and one of its own for a partial last block: the block's own hash where the run knew it, or
        the branch's number and the place in the prompt.

        A branch is forgotten when nobody in the run holds it any more, and the same content then gets a new number:
        what every worker of a simulated run had dropped counts as new. In a live run engines hold blocks by their
        hashes, and a number says nothing of what they still have.
        """
        path, isl = event["blocks"], event["isl"]
        ids: list[int] = []
        hashes = event.get("local_hashes")
        if hashes is not None:
            ids = [_signed(int(each)) for each in hashes]  # type: ignore[attr-defined]
        else:
            for name, end in path["pieces"]:  # type: ignore[index]  # any other shape is caught by the caller
                first = self._branches[name] << 32
                ids += range(first + len(ids), first + end)
        if len(ids) != isl // block:  # type: ignore[operator]
            raise ValueError
        return [*ids, -self._arrived] if isl % block else ids  # type: ignore[operator]

    def _end(self, request: _Request, kind: str, event: Json) -> None:
        request.ended = True
        tokens = event.get("output_tokens")
        if kind == _FINISHED or (kind in _CUT and tokens != 0):
            request.osl = tokens
            if kind in _CUT:
                self._count(self._remarks, f"{_CUT[kind]}, with the output delivered until then")
        session, at_s = request.event.get("session_id"), event.get("at_s")
        if session is None:
            return
        self._turns_open[str(session)] -= 1
        follows = isinstance(request.osl, int) and request.osl > 0  # only a turn that the trace keeps can be followed
        if follows and isinstance(at_s, int | float):
            self._turn_end_s[str(session)] = at_s

    def _leaving(self, at_end: bool) -> list[_Request]:
        """Requests from the front that have ended, or all of them at the end of the journal."""
        leaving = []
        for name, request in list(self._open.items()):
            if not request.ended and not at_end:
                break
            del self._open[name]
            if request.osl is None and request.ended and not self._keep_unended:
                self._count(self._left_out, "no output tokens")
            elif request.osl is None and not self._keep_unended:
                self._count(self._left_out, "not ended in the journal")
            else:
                leaving.append(request)
        return leaving

    def _rows(self, requests: list[_Request]) -> Rows:
        notes: Notes = {i: request.wrong for i, request in enumerate(requests) if request.wrong}
        left_out, self._left_out = self._left_out, {}
        remarks, self._remarks = self._remarks, {}
        events = [request.event for request in requests]

        def numbers(column: str) -> Numbers:
            return json_numbers([event.get(FIELDS[column]) for event in events], FIELDS[column], notes)

        arrival = numbers(ARRIVAL)
        delayed = np.array([request.delay_s is not None for request in requests], np.bool_)
        delay = Numbers(np.array([request.delay_s or 0.0 for request in requests], np.float64), ~delayed)
        return Rows(
            count=len(requests),
            numbers={
                ARRIVAL: Numbers(arrival.values, ~arrival.present() | delayed),
                ISL: numbers(ISL),
                OSL: json_numbers([request.osl for request in requests], FIELDS[OSL], notes),
                DELAY: delay,
                MAX_TOKENS: numbers(MAX_TOKENS),
                PRIORITY: numbers(PRIORITY),
            },
            place=lambda i: requests[i].line,
            texts={c: texts([event.get(FIELDS[c]) for event in events]) for c in TEXTS},
            ids=id_lists([request.ids for request in requests], FIELDS[HASH_IDS], notes),
            unreadable=notes,
            left_out=left_out,
            remarks=remarks,
        )

    @staticmethod
    def _count(counts: dict[str, int], reason: str) -> None:
        counts[reason] = counts.get(reason, 0) + 1
