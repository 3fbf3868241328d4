"""Whether the twin's word counts: what it foretold for the last interval, against what was then observed.

Error of the 95th percentiles of TTFT and of time between tokens, as an exponential average; above 25 % the twin is not
believed, until below 20 %. It begins in distrust: nothing has been measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.planner.lookahead_settings import LookaheadSettings

_WEIGHT = 0.3
"""Of the newest error."""


class Trust:
    """The gate. `errors` are the averages by metric; `since_s` when trust began (None: there is none)."""

    def __init__(self, settings: LookaheadSettings) -> None:
        self._settings = settings
        self._errors: dict[str, float] = {}
        self._enough = True
        self.since_s: float | None = None

    @property
    def errors(self) -> Mapping[str, float]:
        return MappingProxyType(self._errors)

    @property
    def open(self) -> bool:
        return self.since_s is not None and self._enough

    def proven(self, now_s: float) -> bool:
        """Whether it has been trusted for so long that it may go further from the rules."""
        return self.open and self.since_s is not None and now_s - self.since_s >= self._settings.trust_s

    def compare(
        self, foretold: Mapping[str, float | None], observed: Mapping[str, float | None], completed: int, now_s: float
    ) -> None:
        """One interval, in seconds by metric. Too few completed requests say nothing, and meanwhile nothing is
        trusted."""
        self._enough = completed >= self._settings.least_completed
        if not self._enough:
            return
        for metric, said in foretold.items():
            seen = observed.get(metric)
            if said is not None and seen is not None and seen > 0:
                error = abs(said - seen) / seen
                before = self._errors.get(metric, error)
                self._errors[metric] = (1 - _WEIGHT) * before + _WEIGHT * error
        worst = max(self._errors.values(), default=None)
        if worst is None:
            return
        if worst > self._settings.distrust_above:
            self.since_s = None
        elif self.since_s is None and worst < self._settings.trust_below:
            self.since_s = now_s
