"""The life of a request as a transition table.

`TRANSITIONS[state][event or action type]` is the next state. What is not in the table must not happen, and says so.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from policies.cluster.actions import Action, Dispatch
from policies.cluster.events import (
    Event,
    FirstToken,
    PrefillDone,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TokensEmitted,
)


class RequestState(Enum):
    """Where a request stands, as the cluster knows it."""

    ARRIVED = "arrived"
    DISPATCHED = "dispatched"
    PREFILLED = "prefilled"
    STREAMING = "streaming"
    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = RequestState
_ENDINGS: dict[type[Event | Action], RequestState] = {RequestFailed: _S.FAILED, RequestCancelled: _S.CANCELLED}

TRANSITIONS: MappingProxyType[RequestState, MappingProxyType[type[Event | Action], RequestState]] = MappingProxyType(
    {
        _S.ARRIVED: MappingProxyType({Dispatch: _S.DISPATCHED, RequestRejected: _S.REJECTED, **_ENDINGS}),
        _S.DISPATCHED: MappingProxyType(
            {
                PrefillDone: _S.PREFILLED,
                FirstToken: _S.STREAMING,
                RequestFinished: _S.COMPLETED,
                RequestRejected: _S.REJECTED,
                **_ENDINGS,
            }
        ),
        _S.PREFILLED: MappingProxyType({FirstToken: _S.STREAMING, RequestFinished: _S.COMPLETED, **_ENDINGS}),
        _S.STREAMING: MappingProxyType({TokensEmitted: _S.STREAMING, RequestFinished: _S.COMPLETED, **_ENDINGS}),
    }
)
"""Ended states have no row: nothing follows an end."""
