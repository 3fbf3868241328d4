"""Keeps one rank's events in order: finds gaps, has them told again, and goes on with what there is if nobody can.

A state machine without a clock: each method takes what happened and returns what to order. What the rank holds is
changed through a `Sink` only, in the order of the events' numbers, each number at most once. A gap never wipes what is
known, and a late repetition never brings a block back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from policies.cluster.actions import Action, RequestIndexDump, RequestIndexReplay, SetTimer
from policies.cluster.ids import RankId
from policies.cluster.kv_events import (
    DumpEntry,
    IndexAnswer,
    IndexDump,
    IndexRecoveryFailed,
    IndexReplay,
    KvEvent,
)

MOST_BUFFERED = 100_000
"""Events that a feed keeps while it waits; then it asks for everything instead."""

FIRST_WAIT_S = 5.0
MOST_WAIT_S = 60.0
"""How long an answer may take, and how soon a failed request is made again: twice as long each time, up to a minute."""


class FeedMode(Enum):
    """How far the content of a rank can be trusted: it is exact; exact up to a gap that is being closed; or not."""

    LIVE = "live"
    RECOVERING = "recovering"
    DEGRADED = "degraded"


class Sink(Protocol):
    """What a feed fills."""

    def apply(self, event: KvEvent) -> None: ...

    def load(self, rank: RankId, entries: Sequence[DumpEntry]) -> None: ...


@dataclass(slots=True)
class FeedCounts:
    """`gaps` found; `stale_events` that were known already, `buffer_overflows`; what became of requests for replays and
    dumps (`failed` includes those that took too long), and `late_answers`, which came when nobody needed them."""

    gaps: int = 0
    stale_events: int = 0
    buffer_overflows: int = 0
    replays_done: int = 0
    replays_failed: int = 0
    dumps_done: int = 0
    dumps_failed: int = 0
    late_answers: int = 0

    def table(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Feed:
    """The events of one registration of one rank.

    `cursor` is the number of the last event that the content stands for (-1: before the first; None: not known).
    """

    def __init__(self, rank: RankId, epoch: int, sink: Sink, counts: FeedCounts) -> None:
        self.rank = rank
        self.epoch = epoch
        self.mode = FeedMode.RECOVERING
        self.cursor: int | None = None
        self._sink = sink
        self._counts = counts
        self._buffer: dict[int, KvEvent] = {}  # not applied yet, or (DEGRADED) to be applied again behind a dump
        self._asks = 0
        self._open: int | None = None  # the request that is waited for
        self._asked_dump = False
        self._until = -1  # last event that a replay was asked for
        self._wait_s = FIRST_WAIT_S

    @property
    def timer(self) -> str:
        """The name of this rank's timer."""
        return f"kv-index/{self.rank.worker_id}/{self.rank.dp_rank}"

    @property
    def buffered(self) -> int:
        """Events kept, a measure of memory."""
        return len(self._buffer)

    @property
    def exact(self) -> bool:
        """Whether the content is just what the rank held after the event at the cursor."""
        return self.cursor is not None and self.mode is not FeedMode.DEGRADED

    def begin(self, now_s: float) -> list[Action]:
        """The rank has just registered: nobody knows what it holds."""
        return self._ask_dump(now_s, "registered")

    # ------------------------------------------------------------ what happens

    def on_event(self, event: KvEvent) -> list[Action]:
        """An event of the rank, as it came in."""
        number, cursor = event.event_id, self.cursor
        if (cursor is not None and number <= cursor) or (self.mode is FeedMode.RECOVERING and number in self._buffer):
            self._counts.stale_events += 1
            return []
        if self.mode is FeedMode.LIVE:
            assert cursor is not None
            if number == cursor + 1:
                self._apply(event)
                return []
            self._counts.gaps += 1
            self.mode = FeedMode.RECOVERING
            self._buffer[number] = event
            return self._ask_replay(event.at_s, cursor + 1, number - 1)
        if self.mode is FeedMode.DEGRADED:
            self._counts.gaps += number != self._next
            self._apply(event)
        return self._keep(event)

    def on_replay(self, answer: IndexReplay) -> list[Action]:
        """Earlier events once more: they come first, what was buffered after them."""
        if answer.ask != self._open:
            return self._late()
        events = [event for event in answer.events if (event.rank, event.epoch) == (self.rank, self.epoch)]
        if self._asked_dump:
            if not events or events[0].event_id != 0:
                return self._fail(answer)
            self._sink.load(self.rank, ())
            self.cursor = -1
        for event in events:
            if event.event_id == self._next:
                self._apply(event)
        if not self._asked_dump and self._next <= self._until:
            return self._fail(answer)
        self._counts.replays_done += 1
        return self._go_on(answer)

    def on_dump(self, answer: IndexDump) -> list[Action]:
        """All that the rank held after one of its events: what is known is replaced by it."""
        last_id = -1 if answer.last_id is None else answer.last_id
        if self.mode is FeedMode.LIVE or (answer.ask != self._open and self.exact):
            return self._late()
        if self.exact and last_id < self._next - 1:  # older than what is known for sure
            return self._fail(answer)
        self._sink.load(self.rank, answer.entries)
        self.cursor = last_id
        self._counts.dumps_done += 1
        return self._go_on(answer)

    def on_failed(self, answer: IndexRecoveryFailed) -> list[Action]:
        """Nobody can tell it again now; the timer that runs says when to ask the next time."""
        return self._fail(answer)

    def on_timer(self, now_s: float) -> list[Action]:
        """No answer in time, or time to ask again."""
        if self.mode is FeedMode.LIVE:
            return []
        if self._open is not None:
            self._give_up()
        self._wait_s = min(2 * self._wait_s, MOST_WAIT_S)
        return self._ask_dump(now_s, "again")

    # ------------------------------------------------------------ what follows

    @property
    def _next(self) -> int:
        return 0 if self.cursor is None else self.cursor + 1

    def _apply(self, event: KvEvent) -> None:
        self._sink.apply(event)
        self.cursor = event.event_id

    def _keep(self, event: KvEvent) -> list[Action]:
        """Buffer an event while an answer is waited for."""
        actions: list[Action] = []
        if len(self._buffer) >= MOST_BUFFERED:
            self._counts.buffer_overflows += 1
            if self.mode is FeedMode.DEGRADED:
                del self._buffer[next(iter(self._buffer))]
            else:  # what a dump will not cover shows as another gap
                self._buffer.clear()
                actions = self._ask_dump(event.at_s, "too much buffered")
        self._buffer[event.event_id] = event
        return actions

    def _go_on(self, answer: IndexAnswer) -> list[Action]:
        """The content is exact up to the cursor: apply what was buffered, as far as it follows."""
        for number in sorted(self._buffer):
            if number > self._next:
                break
            event = self._buffer.pop(number)
            if number == self._next:
                self._apply(event)
        self._open = None
        if not self._buffer:
            self.mode = FeedMode.LIVE
            self._wait_s = FIRST_WAIT_S
            return []
        self.mode = FeedMode.RECOVERING
        self._counts.gaps += 1
        return self._ask_replay(answer.at_s, self._next, min(self._buffer) - 1)

    def _late(self) -> list[Action]:
        self._counts.late_answers += 1
        return []

    def _fail(self, answer: IndexAnswer) -> list[Action]:
        if answer.ask != self._open:
            return self._late()
        self._give_up()
        return []

    def _give_up(self) -> None:
        """Go on with what there is: the content is not exact any more, but no worse than without the events."""
        if self._asked_dump:
            self._counts.dumps_failed += 1
        else:
            self._counts.replays_failed += 1
        self._open = None
        if self.mode is FeedMode.DEGRADED:
            return  # what is buffered was applied when it came
        self.mode = FeedMode.DEGRADED
        for number in sorted(self._buffer):
            if number >= self._next:
                self._apply(self._buffer[number])

    # ------------------------------------------------------------ orders

    def _ask_replay(self, now_s: float, from_id: int, to_id: int) -> list[Action]:
        self._until, self._asked_dump = to_id, False
        return self._ask(
            now_s,
            RequestIndexReplay(
                worker_id=self.rank.worker_id,
                dp_rank=self.rank.dp_rank,
                epoch=self.epoch,
                ask=self._asks + 1,
                from_id=from_id,
                to_id=to_id,
                reason=f"events {from_id} to {to_id} are missing",
            ),
        )

    def _ask_dump(self, now_s: float, reason: str) -> list[Action]:
        self._until, self._asked_dump = -1, True
        return self._ask(
            now_s,
            RequestIndexDump(
                worker_id=self.rank.worker_id,
                dp_rank=self.rank.dp_rank,
                epoch=self.epoch,
                ask=self._asks + 1,
                reason=reason,
            ),
        )

    def _ask(self, now_s: float, request: RequestIndexReplay | RequestIndexDump) -> list[Action]:
        self._asks = self._open = request.ask
        why = f"request {request.ask} may take so long"
        timer = SetTimer(name=self.timer, due_s=now_s + self._wait_s, background=True, reason=why)
        return [request, timer]
