"""A vLLM engine whose pool has a block manager below it: blocks go down as policies say, and come up before a request
that wants them is admitted.

A request whose prefix goes on below waits beside the queue, without a place in the batch, while its blocks come up; one
that wants blocks which are coming up already waits for those. What could not be read is computed. Nothing is loaded
that would not fit. The engine moves nothing: it says what has begun, and is told what came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.cluster.blocks import Branch
from policies.kvbm.look_up import Lacking, Plan
from policies.kvbm.manager import BlockManager
from twin.engine.below import Below, StoreWait
from twin.engine.core import EngineParts
from twin.engine.loading import LoadingEngine
from twin.engine.plan import StepPlan
from twin.engine.pool import Match
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.telling import Telling
from twin.perf.protocol import PrefillChunk


class TieredEngine(Telling, LoadingEngine):
    """A vLLM replica with tiers; `attach` gives it its block manager before the first step.

    A leg whose prompt comes by hand-off looks nothing up here: its blocks were looked up where they were computed, and
    they go down from here like any others.
    """

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        # When a block leaves the device is when it begins to move: leaps end there.
        super().__init__(settings, replace(parts, kv_events=True, leap_past_evictions=False))
        self.below = Below(settings, self._loads, self.pending_loads, self.blocks_s)

    def attach(self, make: Callable[[Lacking], BlockManager]) -> BlockManager:
        lacking = self.pool.lacking
        self.below.manager = make(lambda branch, lo, hi: lacking(branch, [(lo, hi)]))
        return self.below.manager

    def _listen(self) -> None:
        self.pool.on_evict = self._on_evict
        self.pool.on_publish = self._on_publish

    def _on_evict(self, branch: Branch, lo: int, hi: int) -> None:
        heard = self.below.evicted_between_steps if self._is_between else self.below.evicted
        for a, b in self.pool.lacking(branch, [(lo, hi)]):  # other copies stay
            heard(branch, a, b)

    def _on_publish(self, branch: Branch, lo: int, hi: int) -> None:
        self.below.completed(branch, lo, hi)

    # ------------------------------------------------------------ loads

    def loaded(self, seq: Sequence) -> None:
        load = self.below.came(seq)
        if load is None:
            return
        if isinstance(load, StoreWait):
            seq.phase = Phase.WAITING
        else:
            if load.good:
                self.ledger.came_up(seq, load.good)
            self.ledger.trim(seq)
            self.below.tell(max(self.below.now_s, load.landed_s))
            seq.phase = Phase.LOADED
        self.waiting.extendleft(reversed([seq, *self.below.unparked(load)]))
        self._blocked = False

    def cancel(self, seq: Sequence) -> None:
        if seq.phase is Phase.LOADING:
            self.waiting.extendleft(reversed(self.below.dropped(seq)))
            self.ledger.release(seq)
            seq.phase = Phase.DONE
            self._blocked = False
        else:
            self.below.gone(seq)
            super().cancel(seq)

    def _begin_loads(self) -> bool:
        """Take the heads of waiting whose prefix goes on below out of the queue, as long as they fit; whether there
        were any."""
        waiting = self.waiting
        begun = False
        while waiting and self._may_load(waiting[0]):
            seq = waiting[0]
            match = self.ledger.prefix(seq)
            plan = self._look_up(seq, match)
            if not (plan.runs or plan.awaits) or not self.ledger.fits(seq, match):
                break
            begun = True
            waiting.popleft()
            if not self.below.joins(seq, plan):
                self.below.begin(seq, plan)
                self.ledger.start(seq, match)
                self.pool.take(plan.load_blocks)
                seq.owned += plan.load_blocks
        return begun

    def _look_up(self, seq: Sequence, match: Match) -> Plan:
        return self.below.look_up(seq, match.blocks, self.ledger.usable(seq))

    # ------------------------------------------------------------ what a step takes

    def _plan_exclusive(self, step: StepPlan) -> None:
        super()._plan_exclusive(step)
        if step.mixed and self.below.overlap is not None:
            self.below.overlap.shorten(step, [(seq, None) for seq in step.entering], lambda _: step.start_s)

    def _price(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], batch: int, ctx: int) -> None:
        super()._price(step, work, batch, ctx)
        if self.below.overlap is not None:
            partial = self._partial
            price = super()._price

            def end_s(rest: list[tuple[Sequence, PrefillChunk]]) -> float:
                other = StepPlan(step.start_s)
                price(other, rest, batch, ctx)
                return other.end_s

            self.below.overlap.shorten(step, work, end_s)
            self._partial = partial

    # ------------------------------------------------------------ admission

    def _admit_all(self, step: StepPlan, work: list[tuple[Sequence, PrefillChunk]], left: int) -> None:
        while True:
            before = len(work)
            super()._admit_all(step, work, left)
            left -= sum(chunk.new_tokens + chunk.recomputed_tokens for _, chunk in work[before:])
            if not self._begin_loads():
                return

    def _admissible(self, seq: Sequence, left: int) -> Match | None:
        match = super()._admissible(seq, left)
        if match is None or seq.phase is Phase.LOADED:
            return match
        plan = self._look_up(seq, match)
        return None if plan.runs or plan.awaits else match  # what lies below comes up first

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        if self._loads and not any(seq.phase is Phase.LOADED for seq in self.waiting):
            return None  # whoever waits for a store holds no blocks, and goes on when that is over
        return super()._plan_stuck(step)

    def _start(self, seq: Sequence, now_s: float, hit_tokens: int) -> None:
        is_first, was = seq.admit_s is None, seq.phase
        super()._start(seq, now_s, hit_tokens)
        if was is Phase.ACTIVATED:
            self.below.gone(seq)  # its prompt came from elsewhere
        else:
            self.below.admitted(seq, now_s, hit_tokens, is_first=is_first)

    def _give_back(self, seq: Sequence) -> None:
        super()._give_back(seq)
        self.below.forget(seq)
