"""Until when to go on: to the end, until time is up, or until somebody presses Ctrl-C.

What is over is not a failure: whoever was not asked any more is `not_simulated`, and the rest is an answer.
"""

from __future__ import annotations

import time
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import Evaluate
from aiconfig.reasons import Rejection
from aiconfig.workload import Workload
from policies.errors import CapabilityError, ConfigError

STOPPED: Final = "the search was stopped before"


class Patience:
    """Of one search. `interrupted` by Ctrl-C; `late` when its seconds (None: any number) were over."""

    def __init__(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"--timeout {timeout_s}: seconds, more than 0")
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.interrupted = self.late = False

    @property
    def over(self) -> bool:
        """Whether nothing more is to be begun."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            self.late = True
        return self.interrupted or self.late

    def asking(self, evaluate: Evaluate) -> Evaluate:
        """The same, which refuses to answer once it is over, and in whose middle Ctrl-C is no error."""

        def ask(candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
            if self.over:
                raise CapabilityError(STOPPED)
            try:
                return evaluate(candidate, workload, load)
            except KeyboardInterrupt:
                self.interrupted = True
                raise CapabilityError(STOPPED) from None

        return ask


def unplayed(name: str) -> Rejection:
    """What is said of a candidate that was not asked any more."""
    return Rejection(name=name, reason="not_simulated", detail=STOPPED)
