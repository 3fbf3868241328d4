"""Windows of traffic, judged: what the forecasts are fed, and whether the planner may decide on it at all.

Zero traffic is not no data. A source that answered "none" is believed, one that did not answer is not; who has never
seen traffic waits `hold_s` for it before it shrinks. It must never fill a gap, neither with zero nor in between.
"""

from __future__ import annotations

import math

from policies.cluster.ticks import PlanReason
from policies.cluster.traffic import Lengths, TrafficWindow, WindowKind
from policies.frozen import frozen
from policies.planner.capacity import Work
from policies.planner.forecast.guarded import Guarded

_MOST_HIT = 0.95
_LATE = 1.5
"""Intervals without a window after which there is no data."""


@frozen
class Reading:
    """What one window came to. `fed`: requests of one interval that the forecasts were given (None: nothing).
    `hold`: why nothing is decided on it (None: it is). `may_shrink`: a window that was half seen never shrinks."""

    kind: WindowKind
    fed: float | None
    hold: PlanReason | None
    may_shrink: bool
    flags: tuple[str, ...] = ()


NOTHING = Reading(kind=WindowKind.NO_DATA, fed=None, hold=PlanReason.NO_DATA, may_shrink=False)


class Traffic:
    """Forecasts of requests per interval and of prompt and answer lengths, fed window by window.

    `started_s` is when the planner began to look. `hit_rate` and `accept_length` are the last ones told.
    """

    def __init__(
        self, interval_s: float, hold_s: float, num_req: Guarded, isl: Guarded, osl: Guarded, most_accept: float = 1.0
    ) -> None:
        self._interval_s, self._hold_s = interval_s, hold_s
        self.num_req, self.isl, self.osl = num_req, isl, osl
        self._most_accept = most_accept
        self.started_s: float | None = None
        self.seen_traffic = False
        self.hit_rate = 0.0
        self.accept_length = 1.0
        self.window: TrafficWindow | None = None
        self.reading: Reading | None = None
        self.lengths: tuple[Lengths, ...] = ()
        self.no_data_windows = 0
        self._data_s: float | None = None

    def take(self, window: TrafficWindow) -> Reading:
        """Take in one window; the tables Z1 to Z8."""
        if self.started_s is None:
            self.started_s = window.t0_s
        self.window = window
        self.reading = reading = self._read(window)
        if reading.kind is WindowKind.NO_DATA:
            self.no_data_windows += 1
            return reading
        self._data_s = window.t1_s
        if reading.fed is not None:
            self.num_req.observe(reading.fed)
            if reading.fed > 0:
                self._learn_requests(window)
        self._learn_rates(window)
        return reading

    def at(self, now_s: float) -> Reading:
        """The last reading; `NOTHING` where no window has come for one and a half intervals."""
        if self.reading is None or self.window is None or now_s - self.window.t1_s > _LATE * self._interval_s:
            return NOTHING
        return self.reading

    def silent_s(self, now_s: float) -> float:
        """How long nothing has been observed."""
        since_s = self._data_s if self._data_s is not None else self.started_s
        return 0.0 if since_s is None else now_s - since_s

    def age_s(self, now_s: float) -> float | None:
        """Since the end of the last window; None before any."""
        return None if self.window is None else now_s - self.window.t1_s

    def work(self) -> Work | None:
        """The request that is expected; None as long as no length is known."""
        isl, osl = self.isl.predict(1), self.osl.predict(1)
        if isl is None or osl is None:
            return None
        return Work(isl=isl, osl=osl, hit_rate=self.hit_rate, accept_length=self.accept_length)

    def _read(self, window: TrafficWindow) -> Reading:
        seconds = window.t1_s - window.t0_s
        told = math.isfinite(window.num_req) and window.num_req >= 0 and seconds > 0
        if window.kind is WindowKind.NO_DATA or not told or not 0 < window.coverage <= 1:
            return NOTHING
        partial = window.kind is WindowKind.PARTIAL
        flags = ("partial",) * partial + ("counter_reset",) * window.counter_reset
        requests = window.num_req / window.coverage if partial else window.num_req
        fed = requests * self._interval_s / seconds
        if fed > 0:
            self.seen_traffic = True
        elif not self.seen_traffic and window.t1_s - (self.started_s or 0.0) < self._hold_s:
            waits = PlanReason.AWAITING_FIRST_TRAFFIC
            return Reading(kind=window.kind, fed=None, hold=waits, may_shrink=False, flags=flags)
        return Reading(kind=window.kind, fed=fed, hold=None, may_shrink=not partial, flags=flags)

    def _learn_requests(self, window: TrafficWindow) -> None:
        if window.isl is not None:
            self.isl.observe(window.isl)
        if window.osl is not None:
            self.osl.observe(window.osl)
        if window.lengths:
            self.lengths = window.lengths

    def _learn_rates(self, window: TrafficWindow) -> None:
        if window.kv_hit_rate is not None and math.isfinite(window.kv_hit_rate):
            self.hit_rate = min(_MOST_HIT, max(0.0, window.kv_hit_rate))
        if window.accept_length is not None and math.isfinite(window.accept_length):
            self.accept_length = min(self._most_accept, max(1.0, window.accept_length))
