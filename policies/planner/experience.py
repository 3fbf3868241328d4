"""What was too few before: the fast loop does not go back there while the demand is what it was then.

Queues tell when there are too few prefill workers and not when there are too many: an empty queue in front of two
workers may be an endless one in front of one. So a count at which the loop had to grow is remembered with the demand of
that moment, at first for `span_s`, twice as long each time that it proves right again. Under a steady load the changes
become ever rarer, whatever the signal.
"""

from __future__ import annotations

from policies.frozen import frozen

_MOST_DOUBLINGS = 12


@frozen
class _TooFew:
    rps: float | None
    until_s: float
    times: int


class Experience:
    """One role's. `share` of a demand that was too much for n workers is still too near to it."""

    def __init__(self, span_s: float, share: float) -> None:
        self._span_s, self._share = span_s, share
        self._known: dict[int, _TooFew] = {}

    def grew(self, n: int, rps: float | None, now_s: float) -> None:
        """`n` workers were too few for a demand (requests per second; None: not known)."""
        before = self._known.get(n)
        if before is not None and now_s < before.until_s:
            return
        times = 0 if before is None else min(before.times + 1, _MOST_DOUBLINGS)
        self._known[n] = _TooFew(rps=rps, until_s=now_s + self._span_s * 2**times, times=times)

    def forbids(self, n: int, rps: float | None, now_s: float) -> bool:
        """Whether `n` workers would be too few again, as far as is known."""
        known = self._known.get(n)
        if known is None or now_s >= known.until_s:
            return False
        return known.rps is None or rps is None or rps >= self._share * known.rps
