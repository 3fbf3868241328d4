"""Instants are whole nanoseconds, held as the float nearest to that many seconds.

So equal instants are equal: 0.1 + 0.2 and 0.3 are one instant, an arrival can meet the end of a step, and results do
not depend on the order in which durations were added. Exact for runs of up to 104 days.
"""

from __future__ import annotations


def instant(seconds: float) -> float:
    """The instant nearest to `seconds` (not negative)."""
    return int(seconds * 1e9 + 0.5) / 1e9
