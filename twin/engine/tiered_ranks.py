"""Ranks of one worker with tiers below their devices: every rank asks for what it wants, host memory and all below it
is the worker's.

What comes up goes to the device of one rank. It moves nothing, and no request from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from twin.engine.below import Tiered
from twin.engine.loading import HostLoad
from twin.engine.plan import StepPlan
from twin.engine.ranks import Rank, RankedEngine
from twin.engine.sequence import Sequence
from twin.engine.steplog import Row


class TieredRank(Rank, Tiered):
    """A rank whose blocks come up from below; see `TieredEngine` and `TieredSglangEngine`."""

    pending_loads: list[HostLoad]

    def loaded(self, seq: Sequence) -> None: ...


class TieredRankedEngine(RankedEngine):
    """`pending_loads` have begun now on any rank; whoever owns the clock takes them, brings them up to the device of
    `rank_of` their request and calls `loaded`."""

    def __init__(
        self,
        build: Callable[[Callable[[Row], None] | None], Rank],
        ranks: int,
        *,
        interval: int = 1,
        balance_wait: int = 0,
        record: Callable[[Row], None] | None = None,
    ) -> None:
        super().__init__(build, ranks, interval=interval, balance_wait=balance_wait, record=record)
        self.tiered = cast("tuple[TieredRank, ...]", self.ranks)
        self.pending_loads: list[HostLoad] = []

    def rank_of(self, seq: Sequence) -> int:
        """The rank on which a request is."""
        return self._rank_of[seq]

    @property
    def loaded_blocks(self) -> int:
        managers = [rank.below.manager for rank in self.tiered]
        own = sum(level.counts.loaded for manager in managers for level in manager.levels)
        peers = managers[0].peers  # all ranks read with the same
        return own + (peers.loaded if peers is not None else 0)

    def plan(self, now_s: float) -> StepPlan | None:
        step = super().plan(now_s)
        for rank in self.tiered:
            if rank.pending_loads:
                self.pending_loads += rank.pending_loads
                rank.pending_loads.clear()
        return step

    def loaded(self, seq: Sequence) -> None:
        """The blocks of a load are on the device of its rank."""
        at = self._rank_of.get(seq)
        if at is not None:  # nobody has called it off meanwhile
            self.tiered[at].loaded(seq)
