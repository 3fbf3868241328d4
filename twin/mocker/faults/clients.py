"""Clients that leave: one by its row, or a share of all, each within a drawn time after its arrival.

Draws belong to the row: who else leaves changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.ids import RequestId
from twin.mocker.faults.stage import Entry, Stage
from twin.scenario.model import Fault


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
