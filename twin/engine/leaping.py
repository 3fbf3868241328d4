"""A planned leap while it runs: cut short, accounted for in part, priced anew. The same for every scheduler."""

from __future__ import annotations

from typing import Protocol

from twin.engine.batch import DecodeBatch
from twin.engine.epoch import Epoch
from twin.engine.plan import StepPlan
from twin.perf.protocol import DecodePiece


class Pool(Protocol):
    """`free`: blocks that nobody holds and nothing is cached in."""

    free: int


class Leaping:
    """What a scheduler inherits; it says in `_advance` what decode steps do to its books."""

    batch: DecodeBatch
    pool: Pool
    _epoch: Epoch

    def _advance(self, step: StepPlan) -> None:
        """The decode steps of `step` are over."""
        raise NotImplementedError

    def truncate(self, step: StepPlan, at_s: float) -> bool:
        """Shorten a planned leap to the step in which `at_s` falls; returns whether its end has moved."""
        if step.settled and at_s <= step.start_s:
            steps = 0
        elif step.steps <= 1:
            return False
        else:
            steps = self._epoch.steps_to(at_s, step.start_s, step.end_s, step.steps)
        if steps == step.steps:
            return False
        step.steps = steps
        step.end_s = self._epoch.end_s(steps)
        return True

    def settle(self, step: StepPlan, at_s: float) -> None:
        """Account for the steps of a planned leap that have ended by `at_s`, so that its evictions are known.

        The plan goes on behind them; its end does not move. One that was cut to end at `at_s` has no steps left.
        """
        if not step.steps or step.mixed or step.literal:
            return
        epoch, batch, pool = self._epoch, self.batch, self.pool
        steps = epoch.steps_to(at_s, step.start_s, step.end_s, step.steps)
        if epoch.end_s(steps) > at_s:
            steps -= 1
        if not steps:
            return
        whole_steps, end_s = step.steps, step.end_s
        step.steps, step.end_s = steps, epoch.end_s(steps)
        self._advance(step)
        step.start_s, step.end_s = step.end_s, end_s
        step.steps = whole_steps - steps
        step.settled = True
        if not step.steps:
            step.evict_s = None
            return
        until = batch.steps_within(step.steps, pool.free) + 1
        step.evict_s = epoch.end_s(until) if until < step.steps else None

    def reprice(self, step: StepPlan | None, end_s: float | None = None) -> None:
        """Step times have changed: the next step is priced anew.

        A running `step`, which the caller has cut to one, ends when it was to, or at `end_s`.
        """
        self._epoch.piece = None
        if step is None:
            return
        if end_s is not None:
            step.end_s = end_s
        if not step.mixed and not step.literal:
            self._epoch.begin(DecodePiece(step.end_s - step.start_s, 0.0, 0.0, 1), step.start_s)
