"""Names of things: workers, requests, blocks, roles and tiers."""

from __future__ import annotations

from enum import Enum
from typing import NewType

WorkerId = NewType("WorkerId", int)
"""Identity of a worker: an integer, unique for a run, in order of start. Its display name is in the view."""

RequestId = NewType("RequestId", str)
"""Identity of a request, unique for a run."""

BlockHash = NewType("BlockHash", int)
"""Chained 64-bit hash of a KV block: names its content and everything before it."""


class Role(Enum):
    """What a worker does."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Leg(Enum):
    """Which part of a request a worker does: all of it, or one side of a hand-off."""

    AGG = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(Enum):
    """Where a KV block lives, fastest first."""

    G1_DEVICE = "g1"
    G2_HOST = "g2"
    G3_DISK = "g3"
    G4_REMOTE = "g4"
