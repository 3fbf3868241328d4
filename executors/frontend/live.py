"""The last minutes in short: what the dashboard draws. Kept by second, bounded, and never more than a glance."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Final

SECONDS: Final = 300
_SAMPLES: Final = 512
"""Of one second; more are thinned by leaving the rest out of the percentiles."""


class Second:
    """What happened within one second of the loop's clock."""

    __slots__ = ("at_s", "ended", "failed", "gaps", "itl", "tokens", "ttft")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.gaps = 0
        self.tokens = 0
        self.ended = 0
        self.failed = 0


class Live:
    """Seconds, newest last."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=SECONDS)

    def first_token(self, at_s: float, ttft_s: float) -> None:
        second = self._at(at_s)
        if len(second.ttft) < _SAMPLES:
            insort(second.ttft, ttft_s)

    def tokens(self, at_s: float, count: int, gap_s: float | None) -> None:
        second = self._at(at_s)
        second.tokens += count
        if gap_s is not None and len(second.itl) < _SAMPLES:
            insort(second.itl, gap_s)

    def end(self, at_s: float, *, failed: bool) -> None:
        second = self._at(at_s)
        second.ended += 1
        second.failed += failed

    def seconds(self, now_s: float) -> list[Second]:
        """Those that are over, none older than `SECONDS`."""
        return [one for one in self._seconds if now_s - SECONDS <= one.at_s < int(now_s)]

    def _at(self, at_s: float) -> Second:
        whole = int(at_s)
        for second in reversed(self._seconds):
            if second.at_s == whole:
                return second
            if second.at_s < whole:
                break
        if not self._seconds or self._seconds[-1].at_s < whole:
            self._seconds.append(Second(whole))
        return self._seconds[-1]


def percentile_ms(values: Sequence[float], share: float) -> float | None:
    """Of sorted seconds, in milliseconds, by linear interpolation; None where there are none."""
    if not values:
        return None
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return round(1e3 * (values[low] + (place - low) * (values[high] - values[low])), 3)
