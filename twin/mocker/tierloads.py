"""Blocks on their way up to the device of one simulated worker: hop by hop over links, with a deadline.

It carries out what an engine has begun and says what came; what a tier hands out damaged is drawn here. It decides
nothing, and nothing it brings can be used before all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from simpy.events import Event

from policies.cluster.blocks import BlockRun
from policies.cluster.draws import draw
from policies.cluster.ids import RequestId, Tier, WorkerId
from policies.kvbm.landing import Landing
from policies.kvbm.manager import BlockManager
from policies.kvbm.orders import Leg
from policies.kvbm.registry import Ask
from twin.engine.below import StoreWait, TierLoad
from twin.engine.ticks import instant
from twin.mocker.clock import Order
from twin.mocker.links import Transfer, side_by_side
from twin.perf.cargo import TIER_LOADS, TIER_PEERS

if TYPE_CHECKING:
    from twin.mocker.tiers import Tiers
    from twin.mocker.tierways import Ways

DEADLINE_S, REMOTE_DEADLINE_S = 10.0, 30.0
"""A load that takes longer has failed; longer where a remote store has part in it."""


class Loading:
    """A load that is under way: which legs are, and what became of them. It fails at `due_s`. Legs that are `stalled`,
    by number, wait until their peer can be reached again, and begin anew with that hop."""

    __slots__ = ("due_s", "left", "load", "on_done", "over", "owner", "stalled", "transfers")

    def __init__(self, owner: Loads, load: TierLoad, on_done: Callable[[], None], now_s: float) -> None:
        self.owner = owner
        self.load = load
        self.on_done = on_done
        self.left = len(load.onboard.legs)
        is_remote = any(leg.tier is Tier.G4_REMOTE for leg in load.onboard.legs)
        self.due_s = now_s + (REMOTE_DEADLINE_S if is_remote else DEADLINE_S)
        self.transfers: dict[int, Transfer] = {}
        self.stalled: dict[int, int] = {}
        self.over = False

    def cancel(self) -> bool:
        """Nobody wants it any more."""
        if self.over:
            return False
        self.over = True
        for transfer in self.transfers.values():
            transfer.cancel()
        self.owner.dropped(self)
        return True


class Landings:
    """A request that waits for stores of its own worker to land, or for the registry; not beyond `due_s`."""

    __slots__ = ("answers", "due_s", "on_done", "over", "owner", "wait")

    def __init__(self, owner: Loads, wait: StoreWait, on_done: Callable[[], None], now_s: float) -> None:
        self.owner = owner
        self.wait = wait
        self.answers: list[Event] = []  # on the clock
        self.on_done = on_done
        is_remote = any(isinstance(each, Landing) and each.tier is Tier.G4_REMOTE for each in wait.landings)
        self.due_s = now_s + (REMOTE_DEADLINE_S if is_remote else DEADLINE_S)
        self.over = False

    def cancel(self) -> bool:
        """Nobody waits any more."""
        if self.over:
            return False
        self.over = True
        self.owner.left(self)
        return True


class Loads:
    """The loads of one worker, or of one `rank` of several. `attend` is called when one is over: its sources may be
    evicted again. `bad_rate` is the share of blocks that a tier hands out damaged."""

    def __init__(
        self,
        tiers: Tiers,
        worker_id: WorkerId,
        manager: BlockManager,
        ways: Ways,
        attend: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._worker_id = worker_id
        self._manager = manager
        self._ways = ways
        self._attend = attend
        self._under_way: dict[Loading, None] = {}
        self._waits: dict[Landings, None] = {}
        self._deadline = False  # one is on the clock
        self.late = 0
        self.waits = 0  # for running stores
        self.bad_rate: dict[Tier, float] = {}

    @property
    def has_idle_deadline(self) -> bool:
        return self._deadline and not self._under_way and not self._waits

    def begin(self, load: TierLoad, on_done: Callable[[], None]) -> Loading:
        """Bring the blocks of a load up; `on_done` is called when all of them have come, or none will any more."""
        loading = Loading(self, load, on_done, self._tiers.clock.now)
        self._under_way[loading] = None
        self._watch()
        for at, leg in enumerate(load.onboard.legs):
            self._hop(loading, at, leg, 0)
        return loading

    def wait(self, wait: StoreWait, on_done: Callable[[], None]) -> Landings:
        """`on_done` is called when one of the stores that a request waits for is over, or the registry has answered,
        or it has waited too long."""
        now_s = self._tiers.clock.now
        landings = Landings(self, wait, on_done, now_s)
        self._waits[landings] = None
        asks = [each for each in wait.landings if isinstance(each, Ask)]
        for ask in asks:
            took_s = self._manager.outside.asked(ask, now_s, is_out=self._tiers.reach.is_out)
            on_answer = partial(self._answered, landings, ask)
            landings.answers.append(self._tiers.clock.at(instant(now_s + took_s), int(Order.COMMAND), (on_answer,)))
        if not asks:
            self.waits += 1
            self._watch()
        return landings

    def landed(self) -> None:
        """A store is over: who waited for it goes on."""
        for landings in list(self._waits) if self._waits else ():
            if any(landing.is_over for landing in landings.wait.landings):
                self._wait_over(landings)

    def left(self, landings: Landings) -> None:
        """A request that waited for stores, or for an answer, does so no longer."""
        del self._waits[landings]
        for event in landings.answers:
            self._tiers.clock.drop(event)

    def dropped(self, loading: Loading) -> None:
        """A load was called off: its sources may be evicted again."""
        del self._under_way[loading]
        self._manager.dropped(loading.load.onboard)

    def lose(self, tier: Tier) -> None:
        """A tier is gone: what comes up from it fails now."""
        self._fail(lambda leg: leg.tier is tier and leg.owner is None)
        self.landed()

    def lose_peer(self, owner: WorkerId) -> None:
        """The host memory of another worker is gone: what comes from it fails now."""
        self._fail(lambda leg: leg.owner == owner)

    def damaged(self, tier: Tier, request_id: RequestId, runs: Sequence[BlockRun]) -> list[BlockRun]:
        """The blocks that a tier hands out damaged, of those that were read from it for a request."""
        rate = self.bad_rate.get(tier, 0.0)
        return [
            BlockRun(branch, block, block + 1)
            for branch, lo, hi in (runs if rate else ())
            for block in range(lo, hi)
            if draw(self._tiers.seed, f"tier_corrupt.{tier.value}", request_id, block) < rate
        ]

    def close(self) -> None:
        """The worker is gone: nothing comes up any more."""
        for loading in list(self._under_way):
            loading.cancel()
        for landings in list(self._waits):
            landings.cancel()

    # ------------------------------------------------------------ inside

    def _fail(self, is_lost: Callable[[Leg], bool]) -> None:
        for loading in list(self._under_way):
            for at, leg in enumerate(loading.load.onboard.legs):
                if is_lost(leg) and (loading.stalled.pop(at, None) is not None or loading.transfers[at].cancel()):
                    loading.left -= 1
            if not loading.left:
                self._came_up(loading)

    def stall(self) -> None:
        """Some workers cannot be reached any more: reads of their memory break off, and nobody hears of it."""
        for loading in self._under_way:
            for at, transfer in loading.transfers.items():
                owner = loading.load.onboard.legs[at].owner
                if owner is not None and self._is_cut(owner) and transfer.cancel():
                    loading.stalled[at] = 0

    def go_on(self) -> None:
        """Some workers can be reached again: reads of their memory begin anew."""
        for loading in list(self._under_way):
            for at in list(loading.stalled):
                leg = loading.load.onboard.legs[at]
                if leg.owner is None or not self._is_cut(leg.owner):
                    self._hop(loading, at, leg, loading.stalled.pop(at))

    def _answered(self, landings: Landings, ask: Ask, _: Event) -> None:
        self._manager.outside.answered(ask, self._tiers.clock.now)
        self._wait_over(landings)

    def _is_cut(self, owner: WorkerId) -> bool:
        return self._tiers.reach.is_cut(self._worker_id, owner)

    def _hop(self, loading: Loading, at: int, leg: Leg, hop: int) -> None:
        if leg.owner is not None and self._is_cut(leg.owner):
            loading.stalled[at] = hop
            return
        hops, setup_s = self._ways.of(leg)
        if hop == len(hops):
            load = loading.load
            load.since_s = max(load.since_s, instant(loading.transfers[at].moving_s))
            loading.left -= 1
            if not loading.left:
                self._came_up(loading)
            return
        loading.transfers[at] = self._tiers.network.start_all(
            side_by_side(*hops[hop]),
            setup_s=setup_s if not hop else 0.0,
            on_done=partial(self._hop, loading, at, leg, hop + 1),
            cargo=TIER_LOADS if leg.owner is None else TIER_PEERS,
        )

    def _came_up(self, loading: Loading, lost: Sequence[BlockRun] = ()) -> None:
        """A load is over; `lost` are blocks that never came."""
        del self._under_way[loading]
        load, now_s = loading.load, self._tiers.clock.now
        load.good = self._manager.loaded(load.onboard, now_s, [*lost, *self._bad(load)])
        load.landed_s = now_s
        loading.over = True
        loading.on_done()
        self._attend()

    def _wait_over(self, landings: Landings) -> None:
        del self._waits[landings]
        landings.over = True
        landings.on_done()

    def _watch(self) -> None:
        """See to it that the load or wait which is due first ends in time."""
        if not self._deadline and (self._under_way or self._waits):
            self._deadline = True
            due_s = min([*(each.due_s for each in self._under_way), *(each.due_s for each in self._waits)])
            self._tiers.clock.call(instant(due_s), int(Order.COMMAND), self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = False
        now_s = self._tiers.clock.now
        for loading in [loading for loading in self._under_way if instant(loading.due_s) <= now_s]:
            lost = []
            loading.stalled.clear()
            for at, run in enumerate(loading.load.onboard.plan.runs):
                transfer = loading.transfers.get(at)
                if transfer is None or not transfer.done:
                    if transfer is not None:
                        transfer.cancel()
                    lost += [BlockRun(part.stretch.branch, part.lo, part.hi) for part in run.found]
            self.late += 1
            self._came_up(loading, lost)
        for landings in [landings for landings in self._waits if instant(landings.due_s) <= now_s]:
            landings.wait.is_late = True
            self.late += 1
            self._wait_over(landings)
        self._watch()

    def _bad(self, load: TierLoad) -> list[BlockRun]:
        """The blocks of a load that were read damaged."""
        bad = []
        for run in load.onboard.plan.runs:
            source = self if run.owner is None else self._tiers.lanes[run.owner].loads
            if source.bad_rate:
                parts = [BlockRun(part.stretch.branch, part.lo, part.hi) for part in run.found]
                bad += source.damaged(run.tier, load.seq.request_id, parts)
        return bad
