"""Chance by counter: a draw is a function of the seed and of what it is for, never of how many came before.

So a decision depends on (seed, request, state) alone; adding a consumer, or skipping a request, shifts nobody else's
numbers, and a replay needs no saved generator state. There is no other source of chance in `policies`.
"""

from __future__ import annotations

import xxhash

_UNIT = 2.0**-53


def draw(seed: int, purpose: str, request_id: str, k: int = 0) -> float:
    """The k-th number in [0, 1) for this purpose and request: the top 53 bits of a 64-bit hash."""
    return (xxhash.xxh3_64_intdigest(f"{purpose}|{request_id}|{k}".encode(), seed) >> 11) * _UNIT


def attempt_key(request_id: str, attempt: int) -> str:
    """The id under which a request draws: its own at first, marked when it is sent again."""
    return f"{request_id}#{attempt}" if attempt > 0 else request_id


def pick(u: float, n: int) -> int:
    """Index 0 to n - 1, each equally likely for u in [0, 1)."""
    return int(u * n)
