"""Names of things: workers, requests, blocks, roles and tiers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, NewType, TypeAlias

WorkerId = NewType("WorkerId", int)
"""Identity of a worker: an integer, unique for a run, in order of start. Its display name is in the view."""

RequestId = NewType("RequestId", str)
"""Identity of a request, unique for a run."""

BlockHash = NewType("BlockHash", int)
"""Chained 64-bit hash of a KV block: names its content and everything before it."""


class RankId(NamedTuple):
    """One data-parallel rank of a worker: what a request is really sent to, and what holds blocks."""

    worker_id: WorkerId
    dp_rank: int


Place: TypeAlias = WorkerId | RankId
"""Where a request can be sent: a worker, or one rank of it where the router chooses among its ranks."""


class Role(Enum):
    """What a worker does."""

    __hash__ = object.__hash__  # Enum's own is written in Python: a key of hot tables

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Leg(Enum):
    """Which part of a request a worker does: all of it, or one side of a hand-off."""

    __hash__ = object.__hash__

    AGG = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class Trait(Enum):
    """What a request asks of its answer that a continuation on another worker may not be able to keep."""

    GUIDED = "guided"
    """The answer must follow a grammar or schema: the state of its parser is in the worker."""
    MANY = "n"
    """Several answers to one prompt."""
    LOGPROBS = "logprobs"
    """Probabilities of tokens are returned: those of the join are not what one worker would have given."""
    TOOLS = "tools"
    """Tool calls are parsed out of the answer by a parser with state."""
    SAMPLED = "sampled"
    """Drawn without a seed: it goes on elsewhere, and is another answer than it would have been."""


class LossCause(Enum):
    """How a stream broke."""

    CONNECT = "cannot_connect"
    DISCONNECTED = "worker_lost"
    CONNECT_TIMEOUT = "connection_timeout"
    RESPONSE_TIMEOUT = "response_timeout"
    SHUTDOWN = "engine_shutdown"
    INCOMPLETE = "incomplete_stream"
    OVERLOAD = "worker_overload"
    ENGINE_ERROR = "engine_error"


class FenceCause(Enum):
    """Why a worker that is up gets no new work for now; several may hold at once."""

    CANARY = "canary"
    BREAKER = "breaker"


class ProbeResult(Enum):
    """What a canary brought: an answer, a refusal for want of room (it lives), or nothing in time."""

    OK = "ok"
    OVERLOADED = "overloaded"
    SILENT = "silent"


class Tier(Enum):
    """Where a KV block lives, fastest first."""

    G1_DEVICE = "g1"
    G2_HOST = "g2"
    G3_DISK = "g3"
    G4_REMOTE = "g4"
