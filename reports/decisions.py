"""The decisions of single requests, in full: every worker as the router saw it, who was next, and what that comes to.

It reads what a run recorded and judges nothing: without `--explain` there are no terms, and then it tells none.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields
from math import isnan
from typing import Final, NamedTuple

from policies.frozen import frozen
from reports import metrics, text
from reports.record import RunRecord
from reports.report import stable_json
from reports.slowest import longest

BATCH_ROWS: Final = 4096
TOLD: Final = 3
"""Requests that are told of when nobody is asked for."""


class _Entry(NamedTuple):
    """A row of decisions.parquet; numbers first, a worker of nobody is NaN."""

    at_s: float
    row: float
    worker_id: float
    request_id: str | None
    mode: str | None
    rule: str | None
    reason: str | None
    candidates: str | None


_NUMBERS: Final = _Entry._fields[:3]


@frozen
class Seen:
    """A worker as a decision saw it: blocks of its cost (None: the mode weighs none), or why it was left out."""

    worker_id: int
    in_flight: int
    cost: float | None
    overlap_blocks: int
    prefill_blocks: float
    credit_blocks: float
    decode_blocks: float
    active_requests: int
    why_not: str | None
    peer_blocks: int = 0


_SEEN: Final = tuple(item.name for item in fields(Seen))


@frozen
class Decision:
    """One order of the router for one request. `worker_id` None: it waits, or is refused. `candidates` None: their
    terms were not recorded. `ttft_s` is what came of the request in the end.

    `runner_up` is the cheapest of the other eligible workers (of several the lowest id), `regret_blocks` the cost above
    the cheapest, `overlap_lost_blocks` what another eligible worker had more of the prompt; None where nothing tells.
    """

    row: int
    request_id: str | None
    at_s: float
    mode: str
    rule: str
    reason: str
    worker_id: int | None
    candidates: tuple[Seen, ...] | None
    runner_up: int | None
    regret_blocks: float | None
    overlap_lost_blocks: int | None
    ttft_s: float | None


def decisions_of(record: RunRecord, rows: Sequence[int]) -> list[Decision]:
    """All decisions for these rows of the trace, row by row in the order asked for, each in order of time."""
    found: dict[int, list[Decision]] = {row: [] for row in rows}
    ttft_s = _ttft(record, found)
    for entry in _entries(record):
        if (row := int(entry.row)) in found:
            found[row].append(_decision(entry, ttft_s.get(row)))
    return [one for row in found for one in found[row]]


def rows_of(record: RunRecord, asked: Sequence[str]) -> tuple[list[int], list[str]]:
    """The rows of requests named by id, or by number of their row; and the names that none has."""
    ids, rows = record.requests.texts("request_id"), record.requests.ints("row").tolist()
    by_id = {name: row for name, row in zip(ids, rows, strict=True) if name is not None}
    numbers = {str(row): row for row in rows}
    places = [by_id.get(name, numbers.get(name)) for name in asked]
    return [row for row in places if row is not None], [
        name for name, row in zip(asked, places, strict=True) if row is None
    ]


def slowest_rows(record: RunRecord) -> list[int]:
    """The requests that waited longest for their first token."""
    rows = record.requests.ints("row")
    return [int(rows[place]) for place in longest(record.requests.floats("ttft_s"), TOLD)]


def _ttft(record: RunRecord, rows: Container[int]) -> dict[int, float]:
    pairs = zip(record.requests.ints("row").tolist(), record.requests.floats("ttft_s").tolist(), strict=True)
    return {row: value for row, value in pairs if row in rows and not isnan(value)}


def _entries(record: RunRecord) -> Iterator[_Entry]:
    for batch in record.decisions.batches(_Entry._fields, BATCH_ROWS):
        numbers = [batch.floats(name).tolist() for name in _NUMBERS]
        words = [batch.texts(name) for name in _Entry._fields[len(_NUMBERS) :]]
        yield from map(_Entry._make, zip(*numbers, *words, strict=True))


def _decision(entry: _Entry, ttft_s: float | None) -> Decision:
    worker_id = None if isnan(entry.worker_id) else int(entry.worker_id)
    candidates = None
    if entry.candidates is not None:
        told = json.loads(entry.candidates)
        candidates = tuple(Seen(**{name: one[name] for name in _SEEN if name in one}) for one in told)
    chosen, others = _apart(candidates or (), worker_id)
    runner_up = regret = lost = None
    if chosen is not None and chosen.cost is not None:
        costs = {one.worker_id: one.cost for one in others if one.cost is not None}
        runner_up = min(costs, key=lambda worker: (costs[worker], worker), default=None)
        regret = metrics.cost_regret(chosen.cost, [chosen.cost, *costs.values()])
        lost = metrics.overlap_lost(chosen.overlap_blocks, [one.overlap_blocks for one in others])
    return Decision(
        row=int(entry.row),
        request_id=entry.request_id,
        at_s=entry.at_s,
        mode=entry.mode or "",
        rule=entry.rule or "",
        reason=entry.reason or "",
        worker_id=worker_id,
        candidates=candidates,
        runner_up=runner_up,
        regret_blocks=regret,
        overlap_lost_blocks=lost,
        ttft_s=ttft_s,
    )


def _apart(candidates: Sequence[Seen], worker_id: int | None) -> tuple[Seen | None, list[Seen]]:
    """The chosen one, and the others that could have been."""
    able = [one for one in candidates if one.why_not is None]
    chosen = next((one for one in able if one.worker_id == worker_id), None)
    return chosen, [one for one in able if one is not chosen]


# --- in words ---------------------------------------------------------------------------------------------------------

_HEADS: Final = ("", "worker", "cost", "prompt", "credit", "decode", "open", "cached", "at peers", "")
_AT_PEERS: Final = _HEADS.index("at peers")


def decision_text(one: Decision, names: Mapping[int, str]) -> str:
    """One decision, all workers in a table, who was next and by how much."""
    who = one.request_id or f"row {one.row}"
    where = "to nobody yet" if one.worker_id is None else f"to {_name(one.worker_id, names)}"
    lines = [
        f"request {who}, row {one.row}: decided at {text.time(one.at_s)}, {where} (mode {one.mode}, rule {one.rule})",
        f"  reason     {one.reason}",
    ]
    if one.ttft_s is not None:
        lines.append(f"  came to    TTFT {text.time(one.ttft_s)}")
    if one.candidates is None:
        why = "not recorded; `twin replay ... --explain` records them"
        lines.append(f"  terms      {'none: no worker was chosen' if one.worker_id is None else why}")
        return "\n".join(lines)
    if one.regret_blocks is not None:
        lines += _against_others(one, names)
    return "\n".join([*lines, *_table(one, names)])


def _against_others(one: Decision, names: Mapping[int, str]) -> Iterator[str]:
    by_id = {seen.worker_id: seen for seen in one.candidates or ()}
    if one.runner_up is None:
        yield "  runner-up  nobody else could be chosen"
    elif one.worker_id is not None:
        chosen, other = by_id[one.worker_id], by_id[one.runner_up]
        yield f"  runner-up  {_name(one.runner_up, names)}; the chosen one against it: {_difference(chosen, other)}"
    yield (
        f"  regret     {text.figures(one.regret_blocks)} blocks above the cheapest; "
        f"{text.count(one.overlap_lost_blocks or 0)} blocks of overlap less than the longest"
    )


def _difference(chosen: Seen, other: Seen) -> str:
    pairs = (
        ("cost", (chosen.cost or 0.0) - (other.cost or 0.0)),
        ("prompt", chosen.prefill_blocks - other.prefill_blocks),
        ("credit", chosen.credit_blocks - other.credit_blocks),
        ("decode", chosen.decode_blocks - other.decode_blocks),
    )
    told = [f"{what} {'+' if value > 0 else ''}{text.figures(value, 4)}" for what, value in pairs if value]
    if chosen.active_requests != other.active_requests:
        told.append(f"open {chosen.active_requests - other.active_requests:+,}")
    return ", ".join(told) or "all terms are equal"


def _table(one: Decision, names: Mapping[int, str]) -> Iterator[str]:
    rows = [_HEADS, *(_cells(seen, one, names) for seen in one.candidates or ())]
    if not any(seen.peer_blocks for seen in one.candidates or ()):  # nowhere, or nobody counts them
        rows = [row[:_AT_PEERS] + row[_AT_PEERS + 1 :] for row in rows]
    last = len(rows[0]) - 1
    widths = [max(len(row[place]) for row in rows) for place in range(last)]
    for row in rows:
        cells = [row[0], row[1].ljust(widths[1]), *(row[at].rjust(widths[at]) for at in range(2, last)), row[last]]
        yield "  " + "  ".join([cells[0].ljust(widths[0]), *cells[1:]]).rstrip()


def _cells(seen: Seen, one: Decision, names: Mapping[int, str]) -> tuple[str, ...]:
    mark = ">" if seen.worker_id == one.worker_id else ""
    if seen.why_not is not None:
        return (mark, _name(seen.worker_id, names), *[""] * 7, seen.why_not)
    terms = (seen.prefill_blocks, seen.credit_blocks, seen.decode_blocks)
    shown = [text.figures(value, 4) for value in terms] if seen.cost is not None else ["", "", ""]
    cost = "" if seen.cost is None else text.figures(seen.cost, 4)
    open_ = seen.active_requests if seen.cost is not None else seen.in_flight
    cached = text.count(seen.overlap_blocks) if seen.cost is not None else ""
    at_peers = text.count(seen.peer_blocks) if seen.cost is not None else ""
    return (mark, _name(seen.worker_id, names), cost, *shown, text.count(open_), cached, at_peers, "")


def _name(worker_id: int, names: Mapping[int, str]) -> str:
    return names.get(worker_id, f"worker {worker_id}")


def decisions_json(found: Sequence[Decision]) -> str:
    """The same for programs: a list, sorted keys, null for what is undefined."""
    return stable_json(list(found))
