"""Clients that leave, or read slowly: one by its row, or a share of all.

Draws belong to the row: who else leaves changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.ids import RequestId
from twin.engine.sequence import Sequence
from twin.engine.ticks import instant
from twin.mocker.faults.stage import Entry, Stage
from twin.mocker.requests import OpenRequest
from twin.scenario.model import Fault

BYTES_PER_TOKEN = 250
"""One server-sent event of a chat completion with a token of text: a chunk as OpenAI's API has it, counted."""


def disconnect(stage: Stage, fault: Fault, entry: Entry) -> str | None:
    """The client of one row leaves now."""
    assert fault.row is not None
    entry.target = f"row {fault.row}"
    request_id = stage.rows.get(fault.row)
    if request_id is None:
        return "the request had not arrived"
    if not stage.world.churn.cancel(request_id):
        return "the request had ended"
    return None


class _ReadSlowly(OpenRequest):
    """A request whose client takes so long for each token: what the engine has made waits for it in the frontend."""

    token_s: float
    entry: Entry

    def told(self) -> tuple[Sequence | None, float | None, float | None, int]:
        """As the client has it: its last token comes when all before it are read, or when it is made."""
        admitted, first_s, last_s, made = super().told()
        if first_s is not None and last_s is not None:
            read_s = instant(first_s + (made - 1) * self.token_s)
            if read_s > last_s:
                last_s = self.entry.over_s = read_s
        return admitted, first_s, last_s, made


def slow_reader(stage: Stage, fault: Fault) -> Callable[[int, RequestId], None]:
    """Called with each row that arrives: its client, or a share of all clients, reads so many bytes a second."""
    assert fault.bytes_per_s is not None
    token_s, name = BYTES_PER_TOKEN / fault.bytes_per_s, f"reader {fault.index}"

    def arrived(row: int, request_id: RequestId) -> None:
        if row != fault.row and (fault.rate is None or stage.u(name, str(row), 0) >= fault.rate):
            return
        usual = stage.world.open[request_id]
        request = _ReadSlowly(request_id, usual.row, usual.arrival_s, usual.path)
        request.token_s = token_s
        request.entry = Entry(fault=fault.name, kind=fault.kind, at_s=stage.now_s, target=f"row {row}")
        stage.world.open[request_id] = request
        stage.timeline.append(request.entry)

    return arrived


def leaver(stage: Stage, fault: Fault) -> Callable[[int, RequestId], None]:
    """Called with each row that arrives: a share of all clients leaves, each within a drawn time after its arrival."""
    assert fault.rate is not None
    rate, name = fault.rate, f"leave {fault.index}"

    def arrived(row: int, request_id: RequestId) -> None:
        if stage.u(name, str(row), 0) < rate:
            wait_s = fault.within_s * stage.u(name, str(row), 1)
            stage.call(stage.now_s + wait_s, lambda: _leave(stage, fault, row, request_id))

    return arrived


def _leave(stage: Stage, fault: Fault, row: int, request_id: RequestId) -> None:
    entry = Entry(fault=fault.name, kind=fault.kind, at_s=stage.now_s, target=f"row {row}")
    request = stage.world.open.get(request_id)
    if request is not None and request.row.row == row:
        stage.world.churn.cancel(request_id)
        stage.timeline.append(entry)
