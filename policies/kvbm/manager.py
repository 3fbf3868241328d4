"""The block manager of one worker: what it is told of blocks and transfers, and what it has moved.

It owns no clock and moves nothing: every call has the time, `due_s` says when it wants to be called, and what the world
must do comes back as orders. Blocks are found in a tier only once they have landed there, and sources that are being
copied are not evicted. Device blocks are the engine's: the manager hears of them and copies them before they go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import RequestId, Tier
from policies.errors import InvariantError
from policies.kvbm.batches import Moving, Pinned, before_first, between, first_blocks, rest
from policies.kvbm.climb import Climb
from policies.kvbm.consolidate import Change
from policies.kvbm.health import Health, NegativeCache
from policies.kvbm.landing import Landing, continued, goes_on, worth_waiting
from policies.kvbm.lane import Batch, Waiting
from policies.kvbm.level import DROP, IDLE_S, ON_COMPLETE, ON_EVICT, Counts, Level, TierBody
from policies.kvbm.lifecycle import BlockState, Cause
from policies.kvbm.look_up import ALWAYS, Costs, Lacking, Pieces, Plan, Rule, TierRun, look_up, without
from policies.kvbm.offload import Candidate
from policies.kvbm.orders import ClearKv, Leg, Offload, Onboard, Order, PublishKv
from policies.kvbm.outside import Outside
from policies.kvbm.owners import Owners
from policies.kvbm.peers import PeerView
from policies.kvbm.prefetch import PrefetchLimits
from policies.kvbm.registry import Answer, RegistryView
from policies.kvbm.sketch import Sketch
from policies.kvbm.spans import Span
from policies.kvbm.spread import Spread
from policies.kvbm.store import Gone, Hold, Lot, TierStore
from policies.kvbm.tiers import TierSpec


class BlockManager:
    """`levels` are the tiers below the device, fastest first. `device_lacking` says which blocks are not on the device;
    `sketch`, where a filter or an eviction order counts uses, is kept here; `peers` lets it read host memory of others,
    and them read its own. `load_s` says how long these legs take side by side when nothing else moves, over all that
    they cross (None: as the tiers themselves say). With a `registry` what others have is not known before that has
    been asked; without, it is known at once."""

    def __init__(
        self,
        levels: Sequence[Level],
        device_lacking: Lacking,
        *,
        rule: Rule = ALWAYS,
        sketch: Sketch | None = None,
        prefetch: PrefetchLimits | None = None,
        owners: Owners | None = None,
        peers: PeerView | None = None,
        load_s: Callable[[Sequence[Leg]], float] | None = None,
        registry: RegistryView | None = None,
    ) -> None:
        self.levels = tuple(levels)
        self.outside = Outside(self.levels, peers, registry)
        self._load_s = load_s
        self.rule = rule
        self._device_lacking = device_lacking
        self._sketch = sketch
        self._owners = owners
        self._mates = [self]  # of the ranks of one worker, in their order
        self._fetches = prefetch is not None
        self.peers = peers
        self._moving: dict[int, Moving] = {}
        self._orders: list[Order] = []
        self._batches = 0
        self._loads = 0
        self.age_at_hit = Spread()
        self.age_at_evict = Spread()
        self.reuse_at_evict = Spread()
        self.climb: Climb | None = None
        if prefetch is not None:
            self.climb = Climb(
                self.levels,
                self._on_no_device,
                prefetch,
                make_room=lambda blocks, now_s: self._room(0, blocks, now_s),
                told=lambda level, runs: self._tell(level.body, True, runs),
                most_blocks=self.levels[0].lane.rules.max_blocks,
            )

    def beside(
        self, device_lacking: Lacking, *, load_s: Callable[[Sequence[Leg]], float] | None = None
    ) -> BlockManager:
        """The manager of another rank of the same worker: another device and other lanes over the same tiers. They have
        their filters and counts of uses, reads of peers and prefetches in common; this one sees to the latter."""
        levels = [
            Level(
                level.body,
                level.offload,
                trigger=level.trigger,
                when_full=level.when_full,
                batches=level.lane.rules,
            )
            for level in self.levels
        ]
        other = BlockManager(
            levels,
            device_lacking,
            rule=self.rule,
            sketch=self._sketch,
            owners=self._owners,
            peers=self.peers,
            load_s=load_s,
            registry=self.outside.registry,
        )
        other.climb = self.climb
        other._mates = self._mates
        self._mates.append(other)
        return other

    @property
    def due_s(self) -> float | None:
        """When to call `poll` next, if nothing else happens before."""
        due_s = min((due_s for level in self.levels if (due_s := level.due_s) is not None), default=None)
        if self.climb is None or not self._fetches or (climb_s := self.climb.due_s) is None:
            return due_s
        return climb_s if due_s is None else min(due_s, climb_s)

    @property
    def idle(self) -> bool:
        """Whether nothing moves and nothing waits to move."""
        still = not self._moving and not self._loads and all(level.lane.empty for level in self.levels)
        return still and (self.climb is None or not self._fetches or self.climb.idle)

    # ------------------------------------------------------------ what the engine says

    def completed(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        """The step that filled these device blocks is over: they can be found on the device."""
        self._used(branch, lo, hi, now_s)
        self._arrived(0, BlockRun(branch, lo, hi), now_s)

    def evicted(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        """These blocks have left the device; their bytes can still be copied away."""
        self._leaving(0, BlockRun(branch, lo, hi), now_s)

    def found(self, pieces: Pieces, blocks: int, now_s: float) -> None:
        """A prompt was admitted, and its first `blocks` did not have to be computed."""
        at = 0
        for branch, end in pieces:
            end = min(end, blocks)
            if end > at:
                self._used(branch, at, end, now_s)
                at = end

    # ------------------------------------------------------------ up

    def look_up(
        self,
        pieces: Pieces,
        *,
        blocks: int,
        usable: int,
        device_blocks: int,
        now_s: float,
        room_blocks: int | None = None,
        costs: Costs | None = None,
        may_wait: bool = True,
        answer: Answer | None = None,
    ) -> Plan:
        """What to load for a prompt of which the device holds the first `device_blocks`, or what to wait for before it
        is looked up again: an `answer` of the registry, where it takes one, too. Changes nothing."""
        seen = self.outside.seen(pieces, blocks, usable, device_blocks, now_s, answer)
        plan = look_up(
            pieces,
            blocks=blocks,
            usable=usable,
            device_blocks=device_blocks,
            stores=seen.stores,
            peers=seen.peers,
            told=seen.told,
            device_lacking=self._device_lacking,
            room_blocks=room_blocks,
            rule=self.rule,
            costs=costs,
        )
        if seen.ask is not None:
            return replace(plan, awaits=(seen.ask,))

        def lately_failed(of: TierRun, run: BlockRun) -> int | None:
            return self._negative(of).first_in(run, now_s)

        if plan.runs:
            plan = without(plan, lately_failed)
        if may_wait and plan.end < usable and any(mate._moving for mate in self._mates) and goes_on(plan.misses):
            landings = self._landings()
            more = continued(pieces, plan.end, usable, landings, seen.stores)
            plan = replace(plan, awaits=worth_waiting(plan.runs, more, self.rule, costs, now_s))
        return plan

    def alone_s(self, runs: Sequence[TierRun]) -> float:
        """How long it takes to load these runs, side by side, when nothing else moves."""
        if self._load_s is not None:
            return self._load_s([self._leg(run) for run in runs])
        blocks: dict[TierSpec, int] = {}
        for run in runs:
            spec = self._spec(run)
            blocks[spec] = blocks.get(spec, 0) + run.hi - run.lo
        return max((spec.alone_s(n) for spec, n in blocks.items()), default=0.0)

    def begin(self, plan: Plan, now_s: float, request_id: RequestId | None = None) -> Onboard:
        """The device has room for the plan's blocks: they come up now. Their sources stay until they are here."""
        legs, holds, stores = [], [], []
        for run in plan.runs:
            store = self._store(run)
            held = store.upgrade(run.found) if store is not None else []
            if store is None or sum(hold.hi - hold.lo for hold in held) != run.hi - run.lo:
                raise InvariantError(f"{run.tier.value}: blocks {run.lo}..{run.hi} of a plan were gone when it began")
            for stretch, lo, hi in held:
                stretch.reuses += 1
                self.age_at_hit.add(now_s - stretch.since_s, hi - lo)
            legs.append(self._leg(run))
            holds.append(held)
            stores.append(store)
            if self.climb is not None and request_id is not None and store is self.levels[0].body.store:
                for part in run.found:
                    self.climb.taken(request_id, BlockRun(part.stretch.branch, part.lo, part.hi))
        self._loads += 1
        return Onboard(plan, tuple(legs), holds, stores)

    def loaded(self, load: Onboard, now_s: float, failed: Sequence[BlockRun] = ()) -> int:
        """Everything of a load has come, but for the `failed` blocks, which were no good.

        Returns how many blocks, from the first on, are on the device now: nothing after a failed one counts. Bad ones
        are forgotten, and not asked for again for a while.
        """
        good = 0
        whole = True
        for run, holds, store in zip(load.plan.runs, load.holds, load.stores, strict=True):
            bad = [part for part in failed if any(part.branch is hold.stretch.branch for hold in holds)]
            if whole:
                came = 0 if store is not self._store(run) else before_first(holds, bad)
                good += came
                whole = came == run.hi - run.lo
                if not whole:
                    self._counts(run).failed_reads += run.hi - run.lo - came
            store.release(holds)
            for part in bad:
                self._negative(run).add(part, now_s)
                if run.owner is None:  # a peer's is the peer's to forget
                    body = self._body(run.tier)
                    self._forget(body, body.store.drop(*part, now_s), now_s, pass_on=False)
        for leg in load.legs:
            self._counts(leg).loaded += leg.blocks
        self._loads -= 1
        return good

    def dropped(self, load: Onboard) -> None:
        """Nobody wants a load any more."""
        for store, holds in zip(load.stores, load.holds, strict=True):
            store.release(holds)
        self._loads -= 1

    # ------------------------------------------------------------ down

    def poll(self, now_s: float) -> list[Order]:
        """What is to be done now: batches that are due, and what others must be told."""
        for at, level in enumerate(self.levels):
            if level.left.blocks and level.lane.empty and now_s >= level.idle_since_s + IDLE_S:
                for run in level.left.clear():
                    self._offer(at, run, now_s)
                level.lane.flush(now_s)
            level.lane.poll(now_s)
        for at in range(len(self.levels)):
            self._start(at, now_s)
        if self.climb is not None and self._fetches:
            self._orders += self.climb.poll(now_s)
        orders, self._orders = self._orders, []
        return orders

    def fetched(self, fetch_id: int, now_s: float, bad: Sequence[BlockRun] = ()) -> None:
        """A prefetch is over; `bad` blocks were no good: they are forgotten where they came from."""
        assert self.climb is not None
        source = self.climb.moved(fetch_id, now_s, bad=bad)
        for run in bad:
            source.negative.add(run, now_s)
            self._forget(source, source.store.drop(*run, now_s), now_s, pass_on=False)

    def moved(self, batch_id: int, now_s: float, *, ok: bool = True, is_tiers_fault: bool = True) -> None:
        """A batch has been moved, or has come to nothing; `is_tiers_fault`: for want of a tier that takes it."""
        at, parts, lot, store, source, landing = self._moving.pop(batch_id)
        level = self.levels[at]
        body = level.body
        landing.is_over = True
        for part in parts:
            body.underway.remove(*part.run)
        if ok and store is body.store and not body.refuses:
            self._land(at, parts, lot, now_s)
        else:
            level.counts.failed_writes += lot.blocks
            store.free(lot, Cause.LOAD_FAILED)
            if store is body.store and is_tiers_fault:
                body.health.write_failed(now_s)
        if source.store is not None:
            source.store.release(source.holds)
        level.lane.done(now_s)
        if level.lane.empty:
            level.idle_since_s = now_s

    # ------------------------------------------------------------ tiers come and go

    def lost(self, tier: Tier) -> None:
        """A tier is gone with all that it held; what comes up from it fails, what goes down to it too."""
        body = self._body(tier)
        for each in self._moving.values():
            each.landing.is_over |= each.landing.tier is tier
        if body.health.state is not Health.DOWN:
            body.lose()
            if self.peers is not None and body is self.levels[0].body:
                self.peers.cleared()
            self._orders.append(ClearKv(tier=body.shown_tier))

    def restored(self, tier: Tier) -> None:
        """A tier is there again, empty."""
        self._body(tier).health.restored()

    def refuse(self, tier: Tier, refuses: bool) -> None:
        """Whether a tier fails all writes: it is full in a way that evicting does not help."""
        self._body(tier).refuses = refuses

    def contents(self) -> list[Change]:
        """What the worker's tiers hold, for somebody who has forgotten all about it, or has not heard of some."""
        found = []
        for level in self.levels:
            body = level.body
            runs = tuple(run for run in body.store.findable() if run.branch.shareable)
            if runs:
                found.append(Change(True, body.shown_tier, runs))
        return found

    def close(self, now_s: float) -> None:
        """The worker is gone: what it was to move comes to nothing, in tiers that others share too."""
        for level in self.levels:
            level.left.clear()
            for run in level.lane.clear():
                level.body.underway.remove(*run)
        for batch_id in list(self._moving):
            self.moved(batch_id, now_s, ok=False, is_tiers_fault=False)
        if self.climb is not None and self._fetches:
            self.climb.close(now_s)
        if self.peers is not None:
            self.peers.close()
        self._orders.clear()

    def audit(self) -> None:
        """Recount all tiers. Raises InvariantError."""
        for level in self.levels:
            level.body.store.audit()

    # ------------------------------------------------------------ inside

    def _body(self, tier: Tier) -> TierBody:
        return self._level(tier).body

    def _level(self, tier: Tier) -> Level:
        return next(level for level in self.levels if level.body.tier is tier)

    def _store(self, run: TierRun) -> TierStore | None:
        """What the tier of a run, here or at a peer, holds now; None when the peer is gone."""
        if run.owner is None:
            return self._body(run.tier).store
        assert self.peers is not None
        return self.peers.store(run.owner)

    def _spec(self, run: TierRun) -> TierSpec:
        return self.peers.spec if run.owner is not None and self.peers is not None else self._body(run.tier).spec

    def _leg(self, run: TierRun) -> Leg:
        return Leg(run.tier, run.hi - run.lo, (run.hi - run.lo) * self._spec(run).block_bytes, run.owner)

    def _negative(self, run: TierRun) -> NegativeCache:
        return (
            self.peers.negative if run.owner is not None and self.peers is not None else self._body(run.tier).negative
        )

    def _counts(self, of: TierRun | Leg) -> Counts | PeerView:
        return self.peers if of.owner is not None and self.peers is not None else self._level(of.tier).counts

    def _landings(self) -> list[Landing]:
        """Stores of the worker that are running into tiers which will still be there; the fastest tier first."""
        running = (moving for mate in self._mates for moving in mate._moving.values())
        moving = sorted(running, key=lambda moving: moving.level)
        return [each.landing for each in moving if each.store is self.levels[each.level].body.store]

    def _on_no_device(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """The blocks of [lo, hi) that are on the device of no rank."""
        spans = [(lo, hi)]
        for mate in self._mates:
            spans = [gap for a, b in spans for gap in mate._device_lacking(branch, a, b)]
        return spans

    def _used(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        if self._sketch is not None:
            self._sketch.touch_run(branch, lo, hi)
        for level in self.levels:
            level.offload.used(branch, lo, hi, now_s)

    def _arrived(self, at: int, run: BlockRun, now_s: float) -> None:
        """Blocks have come into the tier above level `at`."""
        if at < len(self.levels):
            trigger = self.levels[at].trigger
            if trigger == ON_COMPLETE:
                self._offer(at, run, now_s)
            elif trigger != ON_EVICT:
                self.levels[at].left.add(*run)

    def _leaving(self, at: int, run: BlockRun, now_s: float) -> None:
        """Blocks leave the tier above level `at`."""
        if at < len(self.levels) and self.levels[at].trigger == ON_EVICT:
            self._offer(at, run, now_s, staged=True)

    def _offer(self, at: int, run: BlockRun, now_s: float, *, staged: bool = False) -> None:
        """Blocks may move to level `at`, if its filter lets them."""
        level = self.levels[at]
        body, counts = level.body, level.counts
        blocks = run.hi - run.lo
        counts.offered += blocks
        if not body.health.may_write(now_s):
            counts.dropped += blocks
            return
        candidate = Candidate(run, tenant=self._owners.of(run.branch) if self._owners is not None else None)
        for lo, hi in level.offload.passes(candidate, body, now_s):
            blocks -= hi - lo
            fresh = body.underway.add(run.branch, lo, hi)
            counts.joined += hi - lo - sum(b - a for a, b in fresh)
            for a, b in fresh:
                dropped = level.lane.offer(now_s, BlockRun(run.branch, a, b), staged=staged)
                for part in dropped:
                    body.underway.remove(*part)
                    counts.dropped += part.hi - part.lo
        counts.filtered += blocks

    def _start(self, at: int, now_s: float) -> None:
        """Let what has been released move, as far as the lane allows."""
        level = self.levels[at]
        while (batch := level.lane.start()) is not None:
            moving = self._commit(at, batch, now_s)
            if moving is None:
                level.lane.done(now_s)
                if level.lane.empty:
                    level.idle_since_s = now_s
                continue
            self._batches += 1
            level.counts.batches += 1
            self._moving[self._batches] = moving
            self._orders.append(
                Offload(
                    batch_id=self._batches,
                    source=self.levels[at - 1].body.tier if at else Tier.G1_DEVICE,
                    target=level.body.tier,
                    blocks=moving.lot.blocks,
                    bytes=moving.lot.blocks * level.body.spec.block_bytes,
                    why=batch.why,
                )
            )

    def _commit(self, at: int, batch: Batch, now_s: float) -> Moving | None:
        """The commit point of a batch: sources that are still there are pinned, room is taken, or nothing happens."""
        level = self.levels[at]
        body = level.body
        pinned = self._pinned(at, batch)
        parts = pinned.parts
        blocks = sum(part.run.hi - part.run.lo for part in parts)
        room = self._room(at, blocks, now_s)
        if room < blocks:
            kept = first_blocks(parts, room)
            for part in rest(parts, kept):
                body.underway.remove(*part.run)
            level.counts.dropped += blocks - room
            parts, blocks = kept, room
        lot = body.store.reserve(blocks) if blocks else None
        if lot is None:
            if pinned.store is not None:
                pinned.store.release(pinned.holds)
            return None
        body.store.advance(lot, Cause.LOAD)
        landing = Landing(body.tier, tuple(part.run for part in parts), now_s + body.spec.alone_s(blocks))
        return Moving(at, tuple(parts), lot, body.store, pinned, landing)

    def _pinned(self, at: int, batch: Batch) -> Pinned:
        """What of a batch can still be copied: what was set aside, and what is still in the tier above. Looked up by
        content, so that blocks which left and came back elsewhere are found there."""
        level = self.levels[at]
        above = self.levels[at - 1].body.store if at else None
        lacking = self._device_lacking if above is None else above.lacking
        parts: list[Waiting] = []
        holds: list[Hold] = []
        for part in batch.parts:
            branch, lo, hi = part.run
            gone = [] if part.staged else lacking(branch, lo, hi)
            for a, b in gone:
                level.body.underway.remove(branch, a, b)
                level.counts.skipped += b - a
            for a, b in between(lo, hi, gone):
                parts.append(part._replace(run=BlockRun(branch, a, b)))
                if above is not None and not part.staged:
                    holds += above.upgrade(above.find(branch, a, b))
        return Pinned(parts, holds, above)

    def _room(self, at: int, blocks: int, now_s: float) -> int:
        """Make room for `blocks` in the tier of level `at`; returns for how many there is."""
        level = self.levels[at]
        store = level.body.store
        free = store.gauges[BlockState.FREE]
        if free < blocks and level.when_full != DROP:
            self._forget(level.body, store.evict(blocks - free, now_s), now_s, pass_on=True)
            free = store.gauges[BlockState.FREE]
        return min(free, blocks)

    def _forget(self, body: TierBody, gone: Sequence[Gone], now_s: float, *, pass_on: bool) -> None:
        """Blocks have left a tier: that is counted and told, and the next tier may want them."""
        if not gone:
            return
        level = self._level(body.tier)
        at = self.levels.index(level)
        runs = []
        for run, age_s, reuses, is_last in gone:
            blocks = run.hi - run.lo
            level.counts.evicted += blocks
            self.age_at_evict.add(age_s, blocks)
            self.reuse_at_evict.add(reuses, blocks)
            if is_last:
                runs.append(run)
                if body.unlisted.blocks:
                    body.unlisted.remove(*run)
                if pass_on:
                    self._leaving(at + 1, run, now_s)
        self._tell(body, False, runs)

    def _land(self, at: int, parts: Sequence[Waiting], lot: Lot, now_s: float) -> None:
        """A batch has arrived in the tier of level `at`: from now on its blocks are found there."""
        level = self.levels[at]
        body = level.body
        body.health.wrote()
        level.counts.stored += lot.blocks
        holds: list[Hold] = []
        runs = []
        for part in parts:
            held, fresh = body.store.register(lot, part.run, now_s)
            holds += held
            runs += [BlockRun(part.run.branch, lo, hi) for lo, hi in fresh]
        body.store.release(holds)
        if body.spec.is_shared:
            self.outside.put(body, [part.run for part in parts])
        self._tell(body, True, runs)
        for part in parts:
            self._arrived(at + 1, part.run, now_s)

    def _tell(self, body: TierBody, is_store: bool, runs: Sequence[BlockRun]) -> None:
        if body.shares is not None:
            body.shares.change(is_store, runs)
        if self.peers is not None and body is self.levels[0].body:
            self.peers.changed(is_store, runs)
        shared = tuple(run for run in runs if run.branch.shareable)
        if shared:
            self._orders.append(PublishKv(change=Change(is_store, body.shown_tier, shared)))
