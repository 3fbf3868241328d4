"""The life of a request as a transition table.

`TRANSITIONS[state][event or action type]` is the next state. What is not in the table must not happen, and says so.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from policies.cluster.actions import Action, Dispatch, Enqueue
from policies.cluster.events import (
    Event,
    FirstToken,
    PrefillDone,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    RequestRejected,
    RoomReserved,
    TokensEmitted,
)


class RequestState(Enum):
    """Where a request stands, as the cluster knows it."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    PREFILLED = "prefilled"
    STREAMING = "streaming"
    INTERRUPTED = "interrupted"
    MIGRATING = "migrating"
    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # members are looked up at every event; that of Enum is slow


_S = RequestState
_ENDINGS: dict[type[Event | Action], RequestState] = {RequestFailed: _S.FAILED, RequestCancelled: _S.CANCELLED}
_LEAVING: dict[type[Event | Action], RequestState] = {RequestInterrupted: _S.INTERRUPTED, **_ENDINGS}

TRANSITIONS: MappingProxyType[RequestState, MappingProxyType[type[Event | Action], RequestState]] = MappingProxyType(
    {
        _S.ARRIVED: MappingProxyType(
            {Dispatch: _S.DISPATCHED, Enqueue: _S.QUEUED, RequestRejected: _S.REJECTED, **_ENDINGS}
        ),
        _S.QUEUED: MappingProxyType(
            {
                Dispatch: _S.DISPATCHED,
                Enqueue: _S.QUEUED,  # its router was restarted, and it asked again
                RequestRejected: _S.REJECTED,
                **_ENDINGS,
            }
        ),
        _S.DISPATCHED: MappingProxyType(
            {
                RoomReserved: _S.DISPATCHED,  # destination first: the decode leg is placed before the prefill leg
                Dispatch: _S.DISPATCHED,
                Enqueue: _S.DISPATCHED,
                PrefillDone: _S.PREFILLED,
                FirstToken: _S.STREAMING,
                RequestFinished: _S.COMPLETED,
                RequestRejected: _S.REJECTED,
                **_LEAVING,
            }
        ),
        _S.PREFILLED: MappingProxyType(
            {
                Dispatch: _S.PREFILLED,  # source first: the decode leg is placed now
                RoomReserved: _S.PREFILLED,
                FirstToken: _S.STREAMING,
                RequestFinished: _S.COMPLETED,
                RequestRejected: _S.REJECTED,
                **_LEAVING,
            }
        ),
        _S.STREAMING: MappingProxyType(
            {TokensEmitted: _S.STREAMING, RoomReserved: _S.STREAMING, RequestFinished: _S.COMPLETED, **_LEAVING}
        ),
        _S.INTERRUPTED: MappingProxyType({RequestMigrated: _S.MIGRATING, **_ENDINGS}),
        _S.MIGRATING: MappingProxyType({Dispatch: _S.DISPATCHED, Enqueue: _S.QUEUED, **_ENDINGS}),
    }
)
"""Ended states have no row: nothing follows an end."""
