"""SGLang with a block manager below its radix cache: pages go down as policies say, and come up before the request that
wants them is let in.

As with the vLLM engine, a request whose prefix goes on below waits beside the queue while others pass. Pages come up
for a request that fits whole, its reserve included; one that does not is computed, in chunks, as if there were nothing
below: so whoever is kept out is kept out whatever lies below, and leaps stay what they are. `host_blocks` is another
thing, SGLang's own host tier (`radix_host.py`); an engine has one of both at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from policies.cluster.blocks import BlockRun, Branch
from policies.kvbm.look_up import Lacking
from policies.kvbm.manager import BlockManager
from policies.kvbm.spans import Spans
from twin.engine.batch import DecodeBatch
from twin.engine.below import Below, StoreWait
from twin.engine.core import EngineParts
from twin.engine.loading import HostLoad
from twin.engine.plan import StepPlan
from twin.engine.radix import RadixCache
from twin.engine.radix_ledger import RadixLedger
from twin.engine.radix_telling import TellingLedger
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import SglangSettings
from twin.engine.sglang import SglangEngine
from twin.engine.sglang_queue import PrefillQueue, Work
from twin.engine.sglang_speculative import SpeculativeSglangEngine
from twin.engine.telling import Telling
from twin.engine.ticks import instant
from twin.engine.token_ratio import TokenRatio


class TieredLedger(TellingLedger):
    """A ledger that knows which pages are in its tree, by content (`there`), and takes in what came up."""

    __slots__ = ("there",)

    def __init__(self, pool: RadixCache, batch: DecodeBatch, *, tell: Callable[[list[BlockRun]], None]) -> None:
        super().__init__(pool, batch, tell=tell)
        self.there = Spans()
        pool.on_publish = self._arrived

    def _arrived(self, branch: Branch, lo: int, hi: int) -> None:
        self.there.add(branch, lo, hi)

    def make_room(self, seq: Sequence, pages: int) -> None:
        """Take the pages of a sequence that has been locked and waits for them to come up."""
        self._take(seq, 0, pages)

    def came_up(self, seq: Sequence, pages: int) -> None:
        """So many pages of a sequence's prefix have come up; what it has beyond them was meant for others that did
        not."""
        upto = seq.published + pages
        self.pool.free += seq.owned - upto
        seq.owned = upto
        seq.computed = upto * self._size
        if pages:
            self.publish_computed(seq)


class TieredQueue(PrefillQueue):
    """A queue whose head leaves it while its pages come up."""

    __slots__ = ("_below", "_grounded", "_tree")

    def __init__(
        self,
        settings: SglangSettings,
        ledger: TieredLedger,
        ratio: TokenRatio,
        batch: DecodeBatch,
        waiting: deque[Sequence],
        running: Collection[Sequence],
        below: Below,
    ) -> None:
        super().__init__(settings, ledger, ratio, batch, waiting, running)
        self._tree = ledger
        self._below = below
        self._grounded: set[Sequence] = set()  # nothing comes up for them any more

    def ground(self, seq: Sequence) -> None:
        """Whatever lies below, it is computed: what came up for a request kept everybody from going on."""
        self._grounded.add(seq)

    def forget(self, seq: Sequence) -> None:
        self._grounded.discard(seq)

    def _take_up(self, seq: Sequence, total: float, slots: int) -> int | None:
        if seq in self._ledger.ends:
            return None  # begun, or loaded
        settings, below, size = self._settings, self._below, self._settings.block_size
        length = seq.prompt + seq.outputs
        cached, usable = self._ledger.cached(seq, length - 1), (length - 1) // size
        plan = below.look_up(seq, cached, usable)
        if not (plan.runs or plan.awaits):
            return None
        reserve = min(seq.outputs_limit - seq.outputs, settings.clip_max_new_tokens)
        needed = self._ledger.whole(length) - cached * size + reserve
        room, pages = self._ledger.pool.room, plan.load_blocks
        if seq in self._grounded or needed >= total:
            below.look_up(seq, cached, usable, room_blocks=0)
            return None
        if len(below.loads) >= slots:
            self.certain = 1
            return None
        if not below.joins(seq, plan):
            if not self._tree.lock(seq, length - 1, pages):
                below.look_up(seq, cached, usable, room_blocks=0)
                return None
            below.begin(seq, plan)
            self._tree.make_room(seq, pages)
        self.waiting.popleft()
        self._changes += 1
        return room - self._ledger.pool.room

    def _enter(self, seq: Sequence, length: int, pages: int, below: int, now_s: float) -> bool:
        is_first, was, has_begun = seq.admit_s is None, seq.phase, seq in self._ledger.ends
        found_tokens = seq.computed
        if not super()._enter(seq, length, pages, below, now_s):
            return False
        if was is Phase.LOADED:
            seq.let_in(now_s, found_tokens)
        elif has_begun:
            return True
        else:
            found_tokens = seq.published * self._settings.block_size
        self._grounded.discard(seq)
        self._below.admitted(seq, now_s, found_tokens, is_first=is_first)
        return True


class TieredSglangEngine(Telling, SglangEngine):
    """An SGLang replica with tiers; `attach` gives it its block manager before the first step. `pending_loads` have
    begun now; whoever owns the clock takes them and calls `loaded` when they have come up."""

    def __init__(self, settings: SglangSettings, parts: EngineParts) -> None:
        self.pending_loads: list[HostLoad] = []
        self._loads: dict[Sequence, HostLoad] = {}
        self.below = Below(settings, self._loads, self.pending_loads, self.blocks_s)
        # When a page leaves the device is when it begins to move: leaps end there.
        super().__init__(settings, replace(parts, kv_events=True, leap_past_evictions=False))

    def _make_ledger(self) -> RadixLedger:
        self._tree = TieredLedger(self.pool, self.batch, tell=self._on_new)
        self.pool.on_evict = self._on_evict
        return self._tree

    def _make_queue(self) -> PrefillQueue:
        self._line = TieredQueue(
            self.settings, self._tree, self._ratio, self.batch, self.waiting, self.running, self.below
        )
        return self._line

    def attach(self, make: Callable[[Lacking], BlockManager]) -> BlockManager:
        self.below.manager = make(self._tree.there.lacking)
        return self.below.manager

    @property
    def idle(self) -> bool:
        return not self._loads and super().idle

    def _on_new(self, runs: list[BlockRun]) -> None:
        for run in runs:
            self.below.completed(*run)

    def _on_evict(self, branch: Branch, lo: int, hi: int) -> None:
        self._tree.there.remove(branch, lo, hi)
        self.pool.unsay(BlockRun(branch, lo, hi))
        heard = self.below.evicted_between_steps if self._is_between else self.below.evicted
        heard(branch, lo, hi)

    # ------------------------------------------------------------ requests

    def loaded(self, seq: Sequence) -> None:
        """The pages of a load are on the device: the request is first in line."""
        load = self.below.came(seq)
        if load is None:
            return
        if isinstance(load, StoreWait):
            seq.phase = Phase.WAITING
        else:
            self.ledger.settle()
            self._tree.came_up(seq, load.good)
            self.below.tell(max(self.below.now_s, load.landed_s))
            seq.phase = Phase.LOADED
        self._queue.put_first(seq, *self.below.unparked(load))

    def cancel(self, seq: Sequence) -> None:
        self._line.forget(seq)
        self.below.gone(seq)
        if seq.phase is Phase.LOADING:
            self._queue.put_first(*self.below.dropped(seq))
        elif seq.phase is Phase.LOADED:
            seq.phase = Phase.WAITING
        super().cancel(seq)

    # ------------------------------------------------------------ what a step takes

    def _begin_prefill(self, step: StepPlan, work: Work) -> None:
        super()._begin_prefill(step, work)
        if self.below.overlap is not None:

            def end_s(rest: Work) -> float:
                return instant(step.start_s + self._took_s(self._priced(rest)))

            self.below.overlap.shorten(step, work, end_s)

    # ------------------------------------------------------------ room

    def _plan_stuck(self, step: StepPlan) -> StepPlan | None:
        """Nothing runs and the head of waiting cannot enter: what came up for those who wait may be what is in its way.
        It is cached like anything else, and they wait as if they had just come."""
        loaded = [seq for seq in self.waiting if seq.phase is Phase.LOADED]
        if self._loads and not loaded:
            return None  # what is on its way, or waits for a store, goes on when that is over
        others_hold = len(self.ledger.ends) > len(self._queue.begun()) or self.activated
        if others_hold or not loaded:
            return super()._plan_stuck(step)
        for seq in loaded:
            self._line.ground(seq)
            self._give_back(seq)
        return self._plan(step.start_s)

    def _give_back(self, seq: Sequence) -> None:
        super()._give_back(seq)
        self.below.forget(seq)
        if seq.phase is Phase.LOADED:
            seq.phase = Phase.WAITING


class TieredSpeculativeSglangEngine(TieredSglangEngine, SpeculativeSglangEngine):
    """SGLang with draft tokens: what does not hold never enters the tree, so it never goes down."""
