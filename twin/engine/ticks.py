"""Instants are whole nanoseconds, held as the float nearest to that many seconds.

So equal instants are equal: 0.1 + 0.2 and 0.3 are one instant, an arrival can meet the end of a step, and results do
not depend on the order in which durations were added. Exact for runs of up to 104 days.
"""

from __future__ import annotations

from policies.errors import EngineError

LAST_S = 1e12
"""No run goes on for longer: 31,000 years, which only a wrong figure asks for."""


def before(at_s: float) -> float:
    """The last instant before `at_s`: whatever has happened by then came before everything that happens at `at_s`."""
    return instant(max(at_s - 1e-9, 0.0))


def instant(seconds: float) -> float:
    """The instant nearest to `seconds` (not negative)."""
    try:
        return int(seconds * 1e9 + 0.5) / 1e9
    except (OverflowError, ValueError):
        raise beyond(seconds) from None


def not_before(seconds: float) -> float:
    """The first instant that is not before `seconds`: whoever wakes then finds that time passed."""
    at_s = instant(seconds)
    return at_s if at_s >= seconds else instant(seconds + 1e-9)


def beyond(seconds: float) -> EngineError:
    """What stops a run that would go on past `LAST_S`."""
    return EngineError(
        f"the run comes to something that happens {seconds:.3g} s after its start, the limit is {LAST_S:.0e} s: a time "
        "of the configuration or the trace is too long, or a rate or bandwidth too low (--show-config prints them)"
    )
