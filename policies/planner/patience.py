"""When a role may change: what is under way, how long ago the last change ended, how often starts have failed.

To grow is never put off by patience (but for a cooldown that was asked for); to shrink takes as many ticks in a row
that agree as were asked for. Who fails to start is tried again after 10 · 2^k seconds.
"""

from __future__ import annotations

from policies.planner.fleet import Count
from policies.planner.settings import PlannerSettings

_MOST_DOUBLINGS = 10


class Patience:
    """One role's."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._open = False  # a change of ours is not over
        self._completed_s: float | None = None
        self._growing_since_s: float | None = None
        self._agreed = 0
        self.failures = 0
        """Starts that failed since the last one that did not."""
        self.retry_s: float | None = None

    def look(self, count: Count, now_s: float) -> bool:
        """Take in how many there are; True where starts have taken too long, and are given up now."""
        if count.pending == 0:
            self._growing_since_s = None
        elif self._growing_since_s is None:
            self._growing_since_s = now_s
        if self._open and count.pending == 0 and count.draining == 0:
            self._open = False
            self._completed_s = now_s
        late = self._growing_since_s is not None and now_s - self._growing_since_s >= self._settings.scale_timeout_s
        if late:
            self._growing_since_s = now_s
            self.failed(now_s)
        return late

    def ordered(self) -> None:
        """A change of ours has begun."""
        self._open = True
        self._agreed = 0

    def wants_fewer(self, fewer: bool) -> None:
        """Once a tick: whether it says that there are too many."""
        self._agreed = self._agreed + 1 if fewer else 0

    def failed(self, now_s: float) -> None:
        """A start failed."""
        wait_s = self._settings.retry_backoff_s * 2 ** min(self.failures, _MOST_DOUBLINGS)
        self.failures += 1
        self.retry_s = now_s + wait_s

    def succeeded(self) -> None:
        """A start came up."""
        self.failures = 0
        self.retry_s = None

    @property
    def alarmed(self) -> bool:
        return self.failures >= self._settings.alarm_after_failures

    def may_shrink(self, now_s: float) -> bool:
        return self._agreed >= self._settings.down_after_ticks and self._cooled(self._settings.down_cooldown_s, now_s)

    def may_grow(self, now_s: float) -> bool:
        return self._cooled(self._settings.up_cooldown_s, now_s)

    def backs_off(self, now_s: float) -> bool:
        """Whether a start failed a moment ago."""
        return self.retry_s is not None and now_s < self.retry_s

    def _cooled(self, cooldown_s: float, now_s: float) -> bool:
        """Since the last change that was completed; while one is open, none has been since."""
        if cooldown_s <= 0:
            return True
        return not self._open and (self._completed_s is None or now_s - self._completed_s >= cooldown_s)
