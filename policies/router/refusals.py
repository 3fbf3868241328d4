"""What each refusal of a router means to a client: its status and what it is counted as.

The table is for whoever speaks to clients; routers name codes and know nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Counted(Enum):
    """What a refusal is counted as."""

    OVERLOAD = "overload"
    UNAVAILABLE = "unavailable"
    VALIDATION = "validation"
    NOT_FOUND = "not_found"


class RefusalKind(NamedTuple):
    """`status` None: the one that is configured for overload, with a time to come back after."""

    status: int | None
    counted: Counted


_OVERLOAD = RefusalKind(None, Counted.OVERLOAD)
_UNAVAILABLE = RefusalKind(503, Counted.UNAVAILABLE)
_INVALID = RefusalKind(400, Counted.VALIDATION)

REFUSALS: Mapping[str, RefusalKind] = MappingProxyType(
    {
        "all_busy": _OVERLOAD,
        "queue_limit": _OVERLOAD,
        "engine_limit": _OVERLOAD,
        "queue_timeout": RefusalKind(503, Counted.OVERLOAD),
        "no_endpoints": _UNAVAILABLE,
        "all_fenced": _UNAVAILABLE,
        "pinned_dead": _UNAVAILABLE,
        "missing_taint": _UNAVAILABLE,
        "pinned_not_allowed": _INVALID,
        "unknown_pin": _INVALID,
        "bad_hint": _INVALID,
        "unknown_model": RefusalKind(404, Counted.NOT_FOUND),
        "unknown_lora": RefusalKind(404, Counted.NOT_FOUND),
    }
)
