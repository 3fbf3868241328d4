"""Demand: trace rows as the world takes them in, with sessions and the closed loop.

Rows stream from record batches. From the first row of a session on, a trace is read to its end: a later turn may stand
anywhere in the file. Nothing here knows workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.cluster.hashing import base_seed
from traces.arrow import valid_flags, values_under

if TYPE_CHECKING:
    import pyarrow as pa


class Row(NamedTuple):
    """One trace row. `arrival_s` None: it follows the turn before it in its session by `delay_s`."""

    row: int
    request_id: str
    arrival_s: float | None
    isl: int
    osl: int
    keys: list[int] | None
    session_id: str | None
    delay_s: float | None
    max_tokens: int | None
    priority: int
    lora: str | None
    tenant: str | None = None


class Demand:
    """Hands out rows: `open_loop()` by time, or `units()` for the closed loop.

    `arrives_s` moves the recorded time of a row. A unit is one row, or all turns of a session. After a turn ends,
    `next_turn` gives the one behind it. `keyed`, `prioritised`, `adapted` and `in_sessions` tell, once rows have been
    handed out, whether any of them had hash ids, a priority other than 0, an adapter, or a session.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], arrives_s: Callable[[float], float] | None = None) -> None:
        self._batches = batches
        self._arrives_s = arrives_s
        self._turns: dict[str, deque[Row]] = {}
        self.keyed = False
        self.prioritised = False
        self.adapted = False
        self.in_sessions = False

    def rows(self) -> Iterable[Row]:
        """All rows in file order."""
        rows = read_rows(map(self._look_at, self._batches))
        return rows if self._arrives_s is None else map(self._moved, rows)

    def _moved(self, row: Row) -> Row:
        assert self._arrives_s is not None
        return row if row.arrival_s is None else row._replace(arrival_s=self._arrives_s(row.arrival_s))

    def _look_at(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.prioritised and "priority" in batch.schema.names:
            self.prioritised = any(batch.column("priority").to_pylist())
        if not self.adapted and "lora" in batch.schema.names:
            self.adapted = any(batch.column("lora").to_pylist())
        if not self.in_sessions and "session_id" in batch.schema.names:
            self.in_sessions = batch.column("session_id").null_count < batch.num_rows
        return batch

    def open_loop(self) -> Iterator[Row]:
        """Rows that have a time, in order of time; later turns are kept for `next_turn`."""
        rows = iter(self.rows())
        for row in rows:
            if row.session_id is not None:
                yield from sorted(self._heads(chain((row,), rows), timed_turns=True), key=_arrival)
                return
            if row.keys is not None:
                self.keyed = True
            yield row

    def units(self) -> Iterator[Row]:
        """First rows of units in file order; times are ignored."""
        rows = iter(self.rows())
        for row in rows:
            if row.session_id is not None:
                yield from self._heads(chain((row,), rows), timed_turns=False)
                return
            if row.keys is not None:
                self.keyed = True
            yield row

    def _heads(self, rows: Iterable[Row], *, timed_turns: bool) -> list[Row]:
        """Read to the end: later turns go to `_turns`, the rest comes back in file order.

        With `timed_turns` a turn that has a time and no delay is no follower: it comes when it was recorded.
        """
        heads: list[Row] = []
        seen: set[str] = set()
        for row in rows:
            if row.keys is not None:
                self.keyed = True
            session = row.session_id
            follows = row.arrival_s is None or row.delay_s is not None or not timed_turns
            if session is not None and session in seen and follows:
                self._turns.setdefault(session, deque()).append(row)
            else:
                heads.append(row)
                if session is not None:
                    seen.add(session)
        return heads

    def next_turn(self, session_id: str | None) -> Row | None:
        """The turn that follows now that a turn of this session has ended; None when it was the last."""
        if session_id is None:
            return None
        turns = self._turns.get(session_id)
        if not turns:
            return None
        row = turns.popleft()
        if not turns:
            del self._turns[session_id]
        return row


def _arrival(row: Row) -> float:
    return row.arrival_s if row.arrival_s is not None else 0.0


def read_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Canonical record batches as rows, numbered from 0; columns are unpacked a batch at a time."""
    number = 0
    for batch in batches:
        size = batch.num_rows
        if not size:
            continue
        names = batch.schema.names

        def column(name: str, default: object, names: list[str] = names, batch: pa.RecordBatch = batch) -> list[Any]:
            return batch.column(name).to_pylist() if name in names else [default] * batch.num_rows

        numbers = range(number, number + size)
        ids = column("request_id", None)
        loras = column("lora", None)
        keys = _key_lists(batch.column("hash_ids")) if "hash_ids" in names else [None] * size
        if any(loras):
            keys = list(map(_of_adapter, keys, loras))
        tenants = column("tenant", None)
        if any(tenants):
            keys = list(map(_of_tenant, keys, tenants))
        yield from map(
            Row._make,
            zip(
                numbers,
                [str(n) if i is None else i for n, i in zip(numbers, ids, strict=True)],
                column("arrival_s", None),
                column("isl", 0),
                column("osl", 0),
                keys,
                column("session_id", None),
                column("delay_s", None),
                column("max_tokens", None),
                [p or 0 for p in column("priority", 0)],
                loras,
                tenants,
                strict=True,
            ),
        )
        number += size


def _of_adapter(keys: list[int] | None, lora: str | None) -> list[int] | None:
    """The same text under another adapter is another KV content, from its first block on."""
    return [keys[0] ^ base_seed(lora), *keys[1:]] if keys and lora else keys


def _of_tenant(keys: list[int] | None, tenant: str | None) -> list[int] | None:
    """What a tenant's requests leave behind is for no other tenant, whatever it says."""
    return _of_adapter(keys, f"tenant {tenant}") if tenant else keys


def _key_lists(ids: pa.ListArray) -> list[list[int] | None]:
    """The hash ids of each row as a list; None where a row has none."""
    values = values_under(ids.values).tolist()
    offsets = ids.offsets.to_pylist()
    if ids.null_count:
        bounds = zip(offsets, offsets[1:], valid_flags(ids), strict=False)
        return [values[a:b] if ok and b > a else None for a, b, ok in bounds]
    return [values[a:b] if b > a else None for a, b in pairwise(offsets)]
