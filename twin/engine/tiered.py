"""A vLLM engine whose pool has a block manager below it: blocks go down as policies say, and come up before a request
that wants them is admitted.

A request whose prefix goes on below waits beside the queue, without a place in the batch, while its blocks come up; one
that wants blocks which are coming up already waits for those. What could not be read is computed. Nothing is loaded
that would not fit. The engine moves nothing: it says what has begun, and is told what came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from policies.cluster.blocks import Branch
from policies.cluster.ids import Tier
from policies.kvbm.accounting import HitCount, Looked
from policies.kvbm.landing import Landing
from policies.kvbm.look_up import Costs, Miss, Plan
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Onboard
from policies.kvbm.spans import Spans
from twin.engine.core import EngineParts
from twin.engine.loading import HostLoad, LoadingEngine
from twin.engine.plan import Outcome, StepPlan
from twin.engine.pool import Match
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.perf.protocol import PrefillChunk

Lacking = Callable[[Branch, int, int], list[tuple[int, int]]]


class TierLoad(HostLoad):
    """Blocks on their way up from several tiers. Whoever moves them says in `good` how many came, from the first on,
    and when (`landed_s`). `parked` are requests that wait for the same blocks."""

    __slots__ = ("good", "landed_s", "onboard", "parked")

    def __init__(self, seq: Sequence, onboard: Onboard) -> None:
        plan = onboard.plan
        super().__init__(seq, [], plan.load_blocks, sum(leg.bytes for leg in onboard.legs))
        self.onboard = onboard
        self.good = plan.load_blocks
        self.landed_s = 0.0
        self.parked: list[Sequence] = []

    def runs(self) -> Iterable[tuple[Branch, int, int]]:
        """What comes up."""
        return ((part.stretch.branch, part.lo, part.hi) for run in self.onboard.plan.runs for part in run.found)


class StoreWait(HostLoad):
    """A request that waits for running stores to land. `is_late`: it has waited long enough, and waits for none again.
    `parked` are requests that wait for the same ones."""

    __slots__ = ("is_late", "landings", "parked")

    def __init__(self, seq: Sequence, landings: tuple[Landing, ...]) -> None:
        super().__init__(seq, [], 0, 0)
        self.landings = landings
        self.is_late = False
        self.parked: list[Sequence] = []


class TieredEngine(LoadingEngine):
    """`attach` gives it its block manager before the first step. `hits` counts look-ups at first admissions.

    A leg whose prompt comes by hand-off looks nothing up here: its blocks were looked up where they were computed, and
    they go down from here like any others.
    """

    def __init__(self, settings: EngineSettings, parts: EngineParts) -> None:
        # When a block leaves the device is when it begins to move: leaps end there.
        super().__init__(settings, replace(parts, kv_events=True, leap_past_evictions=False))
        self.manager: BlockManager
        self.hits = HitCount()
        self.on_submit: Callable[[Sequence], None] | None = None  # where somebody wants to know who comes
        self._now_s = 0.0
        self._fresh: list[tuple[Branch, int, int]] = []  # complete on the device when the step is over
        self._is_between = False  # no step is being planned or committed: what time it is, nobody says
        self._unsaid: list[Callable[[float], None]] = []  # what happened then
        self._coming = Spans()
        self._hasty: set[Sequence] = set()  # who waits for no running store any more
        self._looked: tuple[Sequence, Plan] | None = None
        self._plans: dict[Sequence, tuple[Plan, int]] = {}  # of those that were loaded: what was to come, what came

    def attach(self, make: Callable[[Lacking], BlockManager]) -> BlockManager:
        """Take the block manager that `make` gives for this device, being told which blocks are not on it."""
        lacking = self.pool.lacking
        self.manager = make(lambda branch, lo, hi: lacking(branch, [(lo, hi)]))
        return self.manager

    def _listen(self) -> None:
        self.pool.on_evict = self._on_evict
        self.pool.on_publish = self._on_publish

    @property
    def loaded_blocks(self) -> int:
        return sum(level.counts.loaded for level in self.manager.levels)

    def _on_evict(self, branch: Branch, lo: int, hi: int) -> None:
        for a, b in self.pool.lacking(branch, [(lo, hi)]):  # other copies stay
            if self._is_between:
                self._unsaid.append(partial(self.manager.evicted, branch, a, b))
            else:
                self.manager.evicted(branch, a, b, self._now_s)

    def _on_publish(self, branch: Branch, lo: int, hi: int) -> None:
        self._fresh.append((branch, lo, hi))

    # ------------------------------------------------------------ steps

    def plan(self, now_s: float) -> StepPlan | None:
        self._now_s = now_s
        self._tell(now_s)  # of what was released, or pushed out, between steps
        return super().plan(now_s)

    def commit(self, step: StepPlan) -> Outcome:
        self._now_s = step.end_s
        outcome = super().commit(step)
        self._tell(step.end_s)
        return outcome

    def settle(self, step: StepPlan, at_s: float) -> None:
        self._now_s = min(step.end_s, at_s)
        super().settle(step, at_s)

    def _tell(self, now_s: float) -> None:
        """What the manager has not heard yet."""
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for say in unsaid:
                say(now_s)
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            for branch, lo, hi in fresh:
                self.manager.completed(branch, lo, hi, now_s)

    # ------------------------------------------------------------ hand-off

    def reserve(self, seq: Sequence) -> bool:
        """Room beside what the device has of a prompt: the rest is sent, and nothing comes up for it. What makes room
        goes down."""
        self._is_between = True
        has_room = super().reserve(seq)
        self._is_between = False
        if has_room and seq.published:
            self._unsaid.append(partial(self.manager.found, seq.path.pieces, seq.published))
        return has_room

    # ------------------------------------------------------------ loads

    def loaded(self, seq: Sequence) -> None:
        load = self._loads.pop(seq, None)
        if load is None:
            return  # cancelled meanwhile
        if isinstance(load, StoreWait):
            self._waited(load)
            return
        assert isinstance(load, TierLoad)
        self._arrived(load)
        self._plans[seq] = load.onboard.plan, load.good
        if load.good:
            self.ledger.came_up(seq, load.good)
        self.ledger.trim(seq)
        self._tell(max(self._now_s, load.landed_s))
        seq.phase = Phase.LOADED
        self.waiting.appendleft(seq)
        self._unpark(load, 1)
        self._blocked = False

    def _waited(self, wait: StoreWait) -> None:
        """What a request waited for has landed, or will not: it is first in line, and looked up again."""
        if wait.is_late:
            self._hasty.add(wait.seq)
        wait.seq.phase = Phase.WAITING
        self.waiting.appendleft(wait.seq)
        self._unpark(wait, 1)
        self._blocked = False

    def submit(self, seq: Sequence) -> str | None:
        if self.on_submit is not None:
            self.on_submit(seq)
        refusal = super().submit(seq)
        if refusal is not None and self.manager.climb is not None:
            self.manager.climb.gone(seq.request_id)
        return refusal

    def cancel(self, seq: Sequence) -> None:
        self._plans.pop(seq, None)
        if self.manager.climb is not None:
            self.manager.climb.gone(seq.request_id)
        self._hasty.discard(seq)
        if seq.phase is Phase.LOADING:
            load = self._loads.get(seq)
            if load is None:  # parked
                for other in self._loads.values():
                    assert isinstance(other, TierLoad | StoreWait)
                    if seq in other.parked:
                        other.parked.remove(seq)
                seq.phase = Phase.DONE
                return
            assert isinstance(load, TierLoad | StoreWait)
            if isinstance(load, TierLoad):
                self._arrived(load)
            super().cancel(seq)
            self._unpark(load, 0)
        else:
            super().cancel(seq)

    def audit(self) -> None:
        super().audit()
        self.manager.audit()

    def _unpin(self, load: HostLoad) -> None:
        """Whoever moves the blocks gives the sources back, when the load ends or is dropped."""

    def _arrived(self, load: TierLoad) -> None:
        for run in load.runs():
            self._coming.remove(*run)

    def _unpark(self, load: TierLoad | StoreWait, at: int) -> None:
        """Those who wait for the same blocks look again, in the order in which they came."""
        for seq in reversed(load.parked):
            seq.phase = Phase.WAITING
            self.waiting.insert(at, seq)
        load.parked = []

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
            seq.phase = Phase.LOADING
            other = self._brings(plan) or self._awaits(plan)
            if other is not None:
                other.parked.append(seq)
            elif plan.awaits:
                wait = self._loads[seq] = StoreWait(seq, plan.awaits)
                self.pending_loads.append(wait)
            else:
                self._begin(seq, match, plan)
        return begun

    def _begin(self, seq: Sequence, match: Match, plan: Plan) -> None:
        blocks = plan.load_blocks
        # first: what is taken now may push it out of its tier
        onboard = self.manager.begin(plan, self._now_s, seq.request_id)
        self.ledger.start(seq, match)
        self.pool.take(blocks)
        seq.owned += blocks
        load = self._loads[seq] = TierLoad(seq, onboard)
        for run in load.runs():
            self._coming.add(*run)
        self.pending_loads.append(load)

    def _brings(self, plan: Plan) -> TierLoad | None:
        """The load that brings some of a plan's blocks already."""
        parts = [(part.stretch.branch, part.lo, part.hi) for run in plan.runs for part in run.found]
        if not any(self._coming.common(*part) for part in parts):
            return None
        for load in self._loads.values():
            if not isinstance(load, TierLoad):
                continue
            for branch, lo, hi in load.runs():
                if any(other is branch and a < hi and lo < b for other, a, b in parts):
                    return load
        return None

    def _awaits(self, plan: Plan) -> StoreWait | None:
        """Whoever waits already for a store that a plan is to wait for."""
        for load in self._loads.values() if plan.awaits else ():
            if isinstance(load, StoreWait) and not set(load.landings).isdisjoint(plan.awaits):
                return load
        return None

    def _look_up(self, seq: Sequence, match: Match) -> Plan:
        size = self.settings.block_size
        length = seq.prompt + seq.outputs
        plan = self.manager.look_up(
            seq.pieces(size),
            blocks=length // size,
            usable=self.ledger.usable(seq),
            device_blocks=match.blocks,
            now_s=self._now_s,
            costs=Costs(self.manager.alone_s, self._compute_s),
            may_wait=seq not in self._hasty,
        )
        self._looked = seq, plan
        return plan

    def _compute_s(self, lo: int, hi: int) -> float:
        """What blocks `lo..hi` of a prompt take to compute when everything before them is there."""
        if hi <= lo:
            return 0.0
        size = self.settings.block_size
        return self.latency.step_s((PrefillChunk((hi - lo) * size, lo * size, 0, False),), 0, 0, 0, 0)

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
        first, was = seq.admit_s is None, seq.phase
        super()._start(seq, now_s, hit_tokens)
        self._hasty.discard(seq)
        if self.manager.climb is not None:
            self.manager.climb.gone(seq.request_id)
        if was is Phase.ACTIVATED:
            return  # its prompt came from elsewhere
        plan, good = self._plans.pop(seq, (None, 0))
        if plan is None:
            looked = self._looked
            assert looked is not None
            assert looked[0] is seq
            plan = looked[1]
        size = self.settings.block_size
        self.manager.found(seq.pieces(size), plan.device_blocks, now_s)
        if first:
            looked_up = classes(plan, good)
            seq.host_blocks = good
            self.hits.first_admission(seq.prompt, size, looked_up)
        else:
            self.hits.readmission(hit_tokens, seq.prompt + seq.outputs - hit_tokens)

    def _give_back(self, seq: Sequence) -> None:
        super()._give_back(seq)
        self._plans.pop(seq, None)


def classes(plan: Plan, good: int) -> Looked:
    """What became of a look-up of which the first `good` loaded blocks came."""
    hits = {Tier.G1_DEVICE: plan.device_blocks}
    left = good
    for run in plan.runs:
        came = min(left, run.hi - run.lo)
        hits[run.tier] = hits.get(run.tier, 0) + came
        left -= came
    misses = dict(plan.misses)
    if good < plan.load_blocks:
        misses[Miss.FAILED] = misses.get(Miss.FAILED, 0) + plan.load_blocks - good
    return Looked(hits, misses)
