"""What lies below the device of one engine, and what is between the two: what the block manager must still hear, what
comes up and for whom, what became of look-ups.

The same for every scheduler. It moves nothing and lets nobody in: a scheduler asks what to load for the head of its
queue, takes room for it, and is told when it is there. Nothing that is on its way counts as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from policies.cluster.blocks import Branch
from policies.cluster.ids import Tier
from policies.kvbm.accounting import HitCount, Looked
from policies.kvbm.landing import Landing
from policies.kvbm.look_up import Costs, Lacking, Miss, Plan
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Onboard
from policies.kvbm.registry import NOTHING, Answer, Ask
from policies.kvbm.spans import Spans
from twin.engine.layerwise import Arrival, Overlap
from twin.engine.loading import HostLoad
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings


class TierLoad(HostLoad):
    """Blocks on their way up from several tiers. Whoever moves them says in `good` how many came, from the first on,
    and when (`landed_s`); from `since_s` on, every tier sends. `parked` are requests that wait for the same blocks."""

    __slots__ = ("good", "landed_s", "onboard", "parked", "since_s")

    def __init__(self, seq: Sequence, onboard: Onboard) -> None:
        plan = onboard.plan
        super().__init__(seq, [], plan.load_blocks, sum(leg.bytes for leg in onboard.legs))
        self.onboard = onboard
        self.good = plan.load_blocks
        self.landed_s = self.since_s = 0.0
        self.parked: list[Sequence] = []

    def runs(self) -> Iterable[tuple[Branch, int, int]]:
        """What comes up."""
        return ((part.stretch.branch, part.lo, part.hi) for run in self.onboard.plan.runs for part in run.found)


class StoreWait(HostLoad):
    """A request that waits for running stores to land, or for an answer of the registry. `is_late`: it has waited long
    enough, and waits for no store again. `parked` are requests that wait for the same ones."""

    __slots__ = ("is_late", "landings", "parked")

    def __init__(self, seq: Sequence, landings: tuple[Landing | Ask, ...]) -> None:
        super().__init__(seq, [], 0, 0)
        self.landings = landings
        self.is_late = False
        self.parked: list[Sequence] = []


class Tiered(Protocol):
    """An engine, or a rank of one, with a block manager below its device; `hits` are look-ups at first admissions."""

    below: Below

    @property
    def hits(self) -> HitCount: ...

    @property
    def settings(self) -> EngineSettings: ...

    def attach(self, make: Callable[[Lacking], BlockManager]) -> BlockManager:
        """Take the block manager that `make` gives for this device, being told which blocks are not on it; before the
        first step."""
        ...


class Below:
    """Of one engine. `loads` are those under way by request, `pending` those that have begun now. `compute_s` says how
    long blocks `lo..hi` of a prompt take to compute."""

    def __init__(
        self,
        settings: EngineSettings,
        loads: dict[Sequence, HostLoad],
        pending: list[HostLoad],
        compute_s: Callable[[int, int], float],
    ) -> None:
        self.manager: BlockManager
        self.hits = HitCount()
        self.overlap = Overlap(settings.layers) if settings.layers is not None else None
        self.on_submit: Callable[[Sequence], None] | None = None  # where somebody wants to know who comes
        self.loads = loads
        self.now_s = 0.0
        self._pending = pending
        self._compute_s = compute_s
        self._block_size = settings.block_size
        self._fresh: list[tuple[Branch, int, int]] = []  # complete on the device when the step is over
        self._unsaid: list[Callable[[float], None]] = []  # what happened while nobody said what time it is
        self._coming = Spans()
        self._hasty: set[Sequence] = set()  # who waits for no running store any more
        self._answers: dict[Sequence, Answer] = {}  # of the registry, until a request is admitted
        self._looked: tuple[Sequence, Plan] | None = None
        self._plans: dict[Sequence, tuple[Plan, int]] = {}  # of those that were loaded: what was to come, what came

    @property
    def loaded_blocks(self) -> int:
        from_peers = self.manager.peers.loaded if self.manager.peers is not None else 0
        return sum(level.counts.loaded for level in self.manager.levels) + from_peers

    def audit(self) -> None:
        """Recount the tiers, and what is on its way. Raises InvariantError."""
        self.manager.audit()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing comes up, and nobody who was loaded waits to be admitted."""
        if self.overlap is not None and not self.overlap.is_quiet:
            return False
        return not (self.loads or self._plans or self._coming.blocks or self._hasty or self._answers)

    # ------------------------------------------------------------ what the manager hears

    def completed(self, branch: Branch, lo: int, hi: int) -> None:
        """Blocks can be found on the device; the manager hears of it with `tell`."""
        self._fresh.append((branch, lo, hi))

    def evicted(self, branch: Branch, lo: int, hi: int) -> None:
        """Blocks have left the device, in the step of `now_s`."""
        self.manager.evicted(branch, lo, hi, self.now_s)

    def evicted_between_steps(self, branch: Branch, lo: int, hi: int) -> None:
        """Blocks have left the device, and the engine does not know when."""
        self._unsaid.append(partial(self.manager.evicted, branch, lo, hi))

    def reused_between_steps(self, seq: Sequence, blocks: int) -> None:
        """A prompt that comes from elsewhere found so many blocks on the device."""
        if blocks:
            self._unsaid.append(partial(self.manager.found, seq.path.pieces, blocks))

    def tell(self, now_s: float) -> None:
        """The manager hears what it has not heard yet."""
        self.now_s = now_s
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for say in unsaid:
                say(now_s)
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            for branch, lo, hi in fresh:
                self.manager.completed(branch, lo, hi, now_s)

    # ------------------------------------------------------------ what comes up

    def look_up(self, seq: Sequence, device_blocks: int, usable: int, *, room_blocks: int | None = None) -> Plan:
        """What to load for a request of which the device has the first blocks, and `usable` need not be computed."""
        plan = self.manager.look_up(
            seq.pieces(self._block_size),
            blocks=(seq.prompt + seq.outputs) // self._block_size,
            usable=usable,
            device_blocks=device_blocks,
            now_s=self.now_s,
            room_blocks=room_blocks,
            costs=Costs(self.manager.alone_s, self._compute_s),
            may_wait=seq not in self._hasty,
            answer=self._answers.get(seq),
        )
        self._looked = seq, plan
        return plan

    def joins(self, seq: Sequence, plan: Plan) -> bool:
        """Whether a request waits, beside the queue, for what is on its way already: blocks that come up for another
        one, or running stores. It looks again then."""
        other = self._brings(plan) or self._awaits(plan)
        if other is not None:
            other.parked.append(seq)
        elif plan.awaits:
            wait = self.loads[seq] = StoreWait(seq, plan.awaits)
            self._pending.append(wait)
        else:
            return False
        seq.phase = Phase.LOADING
        return True

    def begin(self, seq: Sequence, plan: Plan) -> None:
        """The blocks of a plan come up from now on. Before room is taken for them: what is taken may push them out of
        their tier."""
        load = self.loads[seq] = TierLoad(seq, self.manager.begin(plan, self.now_s, seq.request_id))
        for run in load.runs():
            self._coming.add(*run)
        self._pending.append(load)
        seq.phase = Phase.LOADING

    def came(self, seq: Sequence) -> TierLoad | StoreWait | None:
        """What a request waited for is over; None where it was cancelled meanwhile."""
        load = self.loads.pop(seq, None)
        if load is None:
            return None
        assert isinstance(load, TierLoad | StoreWait)
        if isinstance(load, TierLoad):
            self._arrived(load)
            self._plans[seq] = load.onboard.plan, load.good
            if self.overlap is not None and load.good == load.onboard.plan.load_blocks:
                self.overlap.landed(seq, Arrival(load.since_s, load.landed_s))
        else:
            self._waited(seq, load)
        return load

    def _waited(self, seq: Sequence, wait: StoreWait) -> None:
        """A request has its answer; or stores have landed, of which an answer from before does not know."""
        answers = [each.answer for each in wait.landings if isinstance(each, Ask)]
        if answers:
            self._answers[seq] = answers[0] or NOTHING
        else:
            self._answers.pop(seq, None)
        if wait.is_late:
            self._hasty.add(seq)

    def dropped(self, seq: Sequence) -> list[Sequence]:
        """A request that was to be loaded is wanted no more; those who waited for the same blocks look again."""
        self.gone(seq)
        load = self.loads.pop(seq, None)
        if load is None:  # it waited for what comes up for another one
            for other in self.loads.values():
                assert isinstance(other, TierLoad | StoreWait)
                if seq in other.parked:
                    other.parked.remove(seq)
            return []
        assert isinstance(load, TierLoad | StoreWait)
        if isinstance(load, TierLoad):
            self._arrived(load)
        if load.on_dropped is not None:
            load.on_dropped()
        return self.unparked(load)

    @staticmethod
    def unparked(load: TierLoad | StoreWait) -> list[Sequence]:
        """Those who waited for the same blocks, in the order in which they came: they look again."""
        parked, load.parked = load.parked, []
        for seq in parked:
            seq.phase = Phase.WAITING
        return parked

    def comes(self, seq: Sequence) -> None:
        """A request asks to be let in."""
        if self.on_submit is not None:
            self.on_submit(seq)

    def gone(self, seq: Sequence) -> None:
        """A request waits no longer, for whatever reason: nothing is fetched or kept for it."""
        self.forget(seq)
        if self.manager.climb is not None:
            self.manager.climb.gone(seq.request_id)

    def forget(self, seq: Sequence) -> None:
        """A request gives back what was loaded for it."""
        self._plans.pop(seq, None)
        self._answers.pop(seq, None)
        self._hasty.discard(seq)
        if self.overlap is not None:
            self.overlap.forget(seq)

    def _arrived(self, load: TierLoad) -> None:
        for run in load.runs():
            self._coming.remove(*run)

    def _brings(self, plan: Plan) -> TierLoad | None:
        """The load that brings some of a plan's blocks already."""
        parts = [(part.stretch.branch, part.lo, part.hi) for run in plan.runs for part in run.found]
        if not any(self._coming.common(*part) for part in parts):
            return None
        for load in self.loads.values():
            if not isinstance(load, TierLoad):
                continue
            for branch, lo, hi in load.runs():
                if any(other is branch and a < hi and lo < b for other, a, b in parts):
                    return load
        return None

    def _awaits(self, plan: Plan) -> StoreWait | None:
        """Whoever waits already for a store that a plan is to wait for."""
        for load in self.loads.values() if plan.awaits else ():
            if isinstance(load, StoreWait) and not set(load.landings).isdisjoint(plan.awaits):
                return load
        return None

    # ------------------------------------------------------------ admission

    def admitted(self, seq: Sequence, now_s: float, hit_tokens: int, *, is_first: bool) -> None:
        """A request enters with what was looked up, or loaded, for it: that is counted, by tier, the first time."""
        plan, good = self._plans.pop(seq, (None, 0))
        if self.overlap is not None:
            self.overlap.enters(seq)
        self.gone(seq)
        if plan is None:
            looked = self._looked
            assert looked is not None
            assert looked[0] is seq
            plan = looked[1]
        self.manager.found(seq.pieces(self._block_size), plan.device_blocks, now_s)
        if is_first:
            seq.host_blocks = good
            self.hits.first_admission(seq.prompt, self._block_size, classes(plan, good))
        else:
            self.hits.readmission(hit_tokens, seq.prompt + seq.outputs - hit_tokens)


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
