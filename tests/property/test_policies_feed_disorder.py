"""A live index whose events get lost, late, doubled and out of order, and whose requests are answered well or badly.

The law: whenever a rank's content is said to be exact, it is what the engine held after the event at the cursor, as a
plain set of blocks; and when all answers come again, it becomes exact and current.
"""

from __future__ import annotations

from dataclasses import replace

from builders import worker
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.actions import Action, RequestIndexDump, RequestIndexReplay, SetTimer
from policies.cluster.events import Event, TimerFired
from policies.cluster.ids import BlockHash, RankId, Tier, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.kv_events import (
    DumpEntry,
    IndexDump,
    IndexRecoveryFailed,
    IndexReplay,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
)
from policies.router.chains.feed import FeedMode
from policies.router.chains.holders import Overlap
from policies.router.chains.live import LiveIndex

RANK = RankId(WorkerId(0), 0)
SIZE = 64
Content = tuple[int, ...]
Held = frozenset[tuple[Tier, Content]]
PROMPTS: list[Content] = [tuple(int(c) for c in f"{n:0{length}b}") for length in (1, 2, 3, 4) for n in range(2**length)]
BLOCKS = st.sampled_from(PROMPTS)
TIERS = st.sampled_from([Tier.G1_DEVICE, Tier.G1_DEVICE, Tier.G2_HOST])


def named(content: Content) -> BlockHash:
    return BlockHash(int("1" + "".join(map(str, content)), 2))


def prefixes(content: Content, lo: int = 0) -> list[Content]:
    return [content[:n] for n in range(lo + 1, len(content) + 1)]


class Engine:
    """One registration of a rank: the set of blocks that it holds, every event that it sent, and what it held then."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.events: list[KvEvent] = []
        self.held: list[Held] = [frozenset()]

    @property
    def common(self) -> dict:
        return {"at_s": 0.0, "worker_id": RANK.worker_id, "epoch": self.epoch}

    def store(self, content: Content, lo: int, tier: Tier) -> KvEvent:
        lo = min(lo, len(content) - 1)
        event = KvStored(
            **self.common,
            event_id=len(self.events),
            exts=tuple(map(named, prefixes(content, lo))),
            local_hashes=tuple(map(BlockHash, content[lo:])),
            parent_ext=named(content[:lo]) if lo else None,
            tier=tier,
        )
        return self._sent(event, self.held[-1] | {(tier, block) for block in prefixes(content, lo)})

    def remove(self, content: Content, lo: int, tier: Tier) -> KvEvent:
        blocks = prefixes(content, min(lo, len(content) - 1))
        exts = tuple(map(named, blocks))
        event = KvRemoved(**self.common, event_id=len(self.events), exts=exts, tier=tier)
        return self._sent(event, self.held[-1] - {(tier, block) for block in blocks})

    def clear(self) -> KvEvent:
        return self._sent(KvCleared(**self.common, event_id=len(self.events)), frozenset())

    def _sent(self, event: KvEvent, held: Held) -> KvEvent:
        self.events.append(event)
        self.held.append(held)
        return event

    def dump(self, upto: int) -> tuple[int | None, tuple[DumpEntry, ...]]:
        """What it held after `upto` events, children without their parents where those are not held."""
        entries = tuple(
            DumpEntry(
                parent_ext=named(content[:-1]) if len(content) > 1 else None,
                exts=(named(content),),
                local_hashes=(BlockHash(content[-1]),),
                tiers=(tier,),
            )
            for tier, content in sorted(self.held[upto], key=lambda block: (len(block[1]), block[1], block[0].value))
        )
        return (upto - 1 if upto else None), entries


def overlap(held: Held, prompt: Content) -> Overlap:
    at, found = 0, []
    for tier in Tier:
        first = at
        while at < len(prompt) and (tier, prompt[: at + 1]) in held:
            at += 1
        found.append(at - first)
    return Overlap(*found)


class Wire:
    """The engine, the index, and what is under way between them."""

    def __init__(self) -> None:
        self.live = LiveIndex(SIZE)
        self.invariants = Invariants()
        self.engine = Engine(0)
        self.now_s = 0.0
        self.delayed: list[Event] = []
        self.asks: list[RequestIndexDump | RequestIndexReplay] = []
        self.timers: dict[str, float] = {}
        self.post(worker(0))

    def post(self, event: Event) -> None:
        event = replace(event, at_s=self.now_s)
        if isinstance(event, TimerFired):
            del self.timers[event.name]
        actions = self.live.on(event)
        self.invariants.observe(event, actions)
        for action in actions:
            self._order(action)
        feed = self.live._feeds[RANK]
        if feed.mode is FeedMode.LIVE:
            assert feed.cursor is not None
            engine = self.engine if feed.epoch == self.engine.epoch else self.before
            self.check(engine.held[feed.cursor + 1])

    def check(self, held: Held) -> None:
        index = self.live._indexes[SIZE]
        for prompt in PROMPTS:
            assert index.overlaps(index.match(index.path(prompt)))[RANK] == overlap(held, prompt)

    def _order(self, action: Action) -> None:
        if isinstance(action, SetTimer):
            self.timers[action.name] = action.due_s
        else:
            assert isinstance(action, RequestIndexDump | RequestIndexReplay)
            self.asks.append(action)

    def restart(self, up_first: bool) -> None:
        self.before, self.engine = self.engine, Engine(self.engine.epoch + 1)
        self.asks.clear()
        if up_first:
            self.post(worker(0, epoch=self.engine.epoch))
        else:
            self.post(self.engine.store((0, 1), 0, Tier.G1_DEVICE))
            self.post(worker(0, epoch=self.engine.epoch))

    def answer(self, how: int, lag: int) -> None:
        """The oldest request is answered: rightly, with a dump, with half a replay, or not possible."""
        if not self.asks:
            return
        ask = self.asks.pop(0)
        if ask.epoch != self.engine.epoch:
            return
        common = {**self.engine.common, "ask": ask.ask}
        upto = max(0, len(self.engine.events) - lag)
        last_id, entries = self.engine.dump(upto)
        if how == 0:
            self.post(IndexRecoveryFailed(**common, reason="cannot"))
        elif how == 1 and isinstance(ask, RequestIndexReplay):
            events = self.engine.events[ask.from_id : ask.to_id]
            self.post(IndexReplay(**common, events=tuple(events)))
        elif how == 2 and isinstance(ask, RequestIndexDump):
            self.post(IndexReplay(**common, events=tuple(self.engine.events[:upto])))
        elif isinstance(ask, RequestIndexReplay) and how > 3:
            self.post(IndexReplay(**common, events=tuple(self.engine.events[ask.from_id : ask.to_id + 1])))
        else:
            self.post(IndexDump(**common, last_id=last_id, entries=entries))

    def fire(self) -> None:
        if self.timers:
            name = min(self.timers, key=lambda timer: self.timers[timer])
            self.now_s = max(self.now_s, self.timers[name])
            self.post(TimerFired(at_s=self.now_s, name=name))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store"] * 8 + ["remove"] * 5 + ["clear", "restart"] + ["answer"] * 6 + ["fire"] * 2),
        st.sampled_from(["now"] * 5 + ["late"] * 2 + ["lost"] * 2 + ["twice"]),
        BLOCKS,
        st.integers(0, 3),
        TIERS,
        st.integers(0, 7),
    ),
    min_size=20,
    max_size=60,
)


@given(steps=STEPS)
@examples(400)
def test_what_is_said_to_be_exact_is_exact(steps: list) -> None:
    wire = Wire()
    for kind, fate, content, lo, tier, how in steps:
        if kind == "restart":
            wire.restart(up_first=how > 3)
        elif kind == "answer":
            wire.answer(how, lag=lo if how % 2 else 0)
        elif kind == "fire":
            wire.fire()
        else:
            engine = wire.engine
            event = engine.clear() if kind == "clear" else getattr(engine, kind)(content, lo, tier)
            if fate == "late":
                wire.delayed.append(event)
            elif fate != "lost":
                wire.post(event)
            if fate == "twice":
                wire.post(event)
        if wire.delayed and how % 3 == 0:
            wire.post(wire.delayed.pop(how % len(wire.delayed)))
    wire.post(wire.engine.store((0,), 0, Tier.G1_DEVICE))  # so that a loss at the end is seen
    for _ in range(20):
        while wire.asks:
            wire.answer(7, lag=0)
        if wire.live.mode(RANK) is FeedMode.LIVE:
            break
        wire.fire()
    assert wire.live.mode(RANK) is FeedMode.LIVE
    wire.check(wire.engine.held[-1])
    wire.invariants.finish(partial=True)
