"""Whether a tier can be written to and read from, and what was lately tried in vain.

Failed writes back off, five in a row degrade the tier (reads go on), a probe every 30 s finds out whether it is well
again. What could not be read is not asked for again for a second.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from policies.cluster.blocks import BlockRun, Branch
from policies.kvbm.spans import Span, Spans

DEGRADED_AFTER = 5
"""Failed writes in a row."""
PROBE_S = 30.0
NEGATIVE_S = 1.0
"""How long a failed or missed look-up is remembered."""


class Health(Enum):
    """What a tier is good for."""

    UP = "up"
    DEGRADED = "degraded"  # no new writes, reads go on
    DOWN = "down"  # neither


class TierHealth:
    """The health of one tier, by what became of its writes."""

    __slots__ = ("_failed_in_a_row", "_probe_s", "failed_writes", "state")

    def __init__(self) -> None:
        self.state = Health.UP
        self.failed_writes = 0
        self._failed_in_a_row = 0
        self._probe_s: float | None = None

    @property
    def reads(self) -> bool:
        return self.state is not Health.DOWN

    def may_write(self, now_s: float) -> bool:
        """Whether a write may be tried: always while it is up, as a probe when one is due."""
        if self.state is Health.UP:
            return True
        return self.state is Health.DEGRADED and self._probe_s is not None and now_s >= self._probe_s

    def wrote(self) -> None:
        """A write was done: whatever was wrong is not."""
        self._failed_in_a_row = 0
        if self.state is Health.DEGRADED:
            self.state, self._probe_s = Health.UP, None

    def write_failed(self, now_s: float) -> None:
        """A write came to nothing."""
        self.failed_writes += 1
        self._failed_in_a_row += 1
        if self.state is Health.DEGRADED or (self.state is Health.UP and self._failed_in_a_row >= DEGRADED_AFTER):
            self.state, self._probe_s = Health.DEGRADED, now_s + PROBE_S

    def lost(self) -> None:
        """The tier is gone, with all that it held."""
        self.state, self._probe_s = Health.DOWN, None

    def restored(self) -> None:
        """The tier is there again, empty."""
        self.state, self._failed_in_a_row, self._probe_s = Health.UP, 0, None


class NegativeCache:
    """Blocks that could not be read, for `hold_s` after the failure."""

    __slots__ = ("_failed", "_hold_s", "_until")

    def __init__(self, hold_s: float = NEGATIVE_S) -> None:
        self._hold_s = hold_s
        self._failed = Spans()
        self._until: deque[tuple[float, BlockRun]] = deque()

    def add(self, run: BlockRun, now_s: float) -> None:
        """These blocks could not be read just now."""
        self._forget(now_s)
        for lo, hi in self._failed.add(*run):
            self._until.append((now_s + self._hold_s, BlockRun(run.branch, lo, hi)))

    def first_in(self, run: BlockRun, now_s: float) -> int | None:
        """The first block of a run that is not worth asking for."""
        self._forget(now_s)
        common = self._failed.common(*run)
        return common[0][0] if common else None

    def forget(self, run: BlockRun) -> None:
        """These blocks are worth asking for again."""
        for lo, hi in self._failed.remove(*run):
            self._until = deque(
                (until_s, BlockRun(known.branch, a, b))
                for until_s, known in self._until
                for a, b in _outside(known, run.branch, lo, hi)
            )

    def _forget(self, now_s: float) -> None:
        until = self._until
        while until and until[0][0] <= now_s:
            _, run = until.popleft()
            self._failed.remove(*run)


def _outside(run: BlockRun, branch: Branch, lo: int, hi: int) -> list[Span]:
    """What of a run is not among blocks [lo, hi) of a branch."""
    if run.branch is not branch:
        return [(run.lo, run.hi)]
    return [(a, b) for a, b in ((run.lo, min(run.hi, lo)), (max(run.lo, hi), run.hi)) if a < b]
