"""An engine that tells what lies below its device of its steps and requests; the same for every scheduler.

It stands in front of a scheduler in the order of bases: `class Mine(Telling, SglangEngine)`. It decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.kvbm.accounting import HitCount
from twin.engine.below import Below
from twin.engine.plan import Outcome, StepPlan
from twin.engine.sequence import Sequence

if TYPE_CHECKING:

    class Scheduler:
        """What stands behind it."""

        def plan(self, now_s: float) -> StepPlan | None: ...
        def commit(self, step: StepPlan) -> Outcome: ...
        def settle(self, step: StepPlan, at_s: float) -> None: ...
        def reserve(self, seq: Sequence) -> bool: ...
        def submit(self, seq: Sequence) -> str | None: ...
        def audit(self) -> None: ...

else:
    Scheduler = object


class Telling(Scheduler):
    """`below` is what lies below the device."""

    below: Below
    _is_between = False  # no step is being planned or committed: nobody says what time it is

    @property
    def hits(self) -> HitCount:
        """Look-ups at first admissions."""
        return self.below.hits

    @property
    def loaded_blocks(self) -> int:
        return self.below.loaded_blocks

    def plan(self, now_s: float) -> StepPlan | None:
        self.below.tell(now_s)  # of what was released, or pushed out, between steps
        step = super().plan(now_s)
        if step is not None and self.below.overlap is not None:
            self.below.overlap.begun(now_s, loading=bool(self.below.loads))
        return step

    def commit(self, step: StepPlan) -> Outcome:
        self.below.now_s = step.end_s
        outcome = super().commit(step)
        if not step.ends_nothing:
            self.below.tell(step.end_s)
        if self.below.overlap is not None:
            self.below.overlap.over(step.end_s)
        return outcome

    def settle(self, step: StepPlan, at_s: float) -> None:
        self.below.now_s = min(step.end_s, at_s)
        super().settle(step, at_s)

    def reserve(self, seq: Sequence) -> bool:
        """Room beside what the device has of a prompt: the rest is sent, and nothing comes up for it. What makes room
        goes down."""
        self._is_between = True
        has_room = super().reserve(seq)
        self._is_between = False
        if has_room:
            self.below.reused_between_steps(seq, seq.published)
        return has_room

    def submit(self, seq: Sequence) -> str | None:
        self.below.comes(seq)
        refusal = super().submit(seq)
        if refusal is not None:
            self.below.gone(seq)
        return refusal

    def audit(self) -> None:
        super().audit()
        self.below.audit()
