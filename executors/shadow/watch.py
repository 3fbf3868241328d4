"""The shadow of a live world: what happens is noted and sent off a few times a second, the answers are kept as figures.

On the path of a request it appends to a list, and nothing else. Who simulates is behind a pipe: it may be slow, hang or
die, and serving does not notice. Its lag is bounded: past it, arrivals are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from executors.backend import STOP_STRING, End
from executors.clock import Clock
from executors.requests import OpenRequest
from executors.shadow.child import Child, Gone
from executors.shadow.figures import Glance, Window
from executors.world import Watch
from policies.cluster.events import (
    BusyThresholdsChanged,
    Event,
    WorkerDraining,
    WorkerLost,
    WorkerRecalled,
    WorkerUp,
)
from policies.cluster.ids import RequestId, WorkerId
from policies.frozen import frozen
from twin.config import Config
from twin.config_text import to_toml
from twin.shadow.facts import (
    Arrived,
    Batch,
    Drains,
    Ended,
    Fact,
    Joined,
    Left,
    Limits,
    OfWorkers,
    Outcome,
    Progress,
    Setup,
)

log = logging.getLogger(__name__)

EVERY_S: Final = 0.2
"""Between two batches."""
BACKLOG: Final = 10_000
"""Arrivals that may wait to be simulated."""
MOST_FACTS: Final = 256
"""Of one batch: half a millisecond of packing with prompts of 1,500 tokens (benchmarks/shadow.py)."""
SERIES_S: Final = 300
END_S: Final = 30.0
"""How long the process may take for what is left, and then again for its record."""
DROPPED, DOWN = "dropped", "shadow_down"


@frozen
class Wanted:
    """A shadow: how long it waits for the length of an answer, over how long figures are taken, and where the simulated
    run is kept (None: nowhere)."""

    wait_s: float = 60.0
    window_s: float = 300.0
    record: Path | None = None


class Shadow(Watch):
    """Of one world. Make it with `start`; give it to the world as its watch and to the controller as a sink."""

    def __init__(self, child: Child, clock: Clock, wanted: Wanted) -> None:
        self.up = True
        self.why = ""
        self.group_of: Callable[[WorkerId], str] = lambda _: ""
        """Set by whoever has the workers."""
        self._child = child
        self._clock = clock
        self._window = Window(wanted.window_s)
        self._wanted = wanted
        self._facts: deque[Fact] = deque()
        self._behind = False
        """Whether the last batch had not room for all of them."""
        self._told: set[RequestId] = set()
        self._ahead = 0
        """Arrivals that were noted and not answered for."""
        self._handled_s = self._at_s = clock.now()
        self._open = self._compared = self._dropped = 0
        self._left_out: Counter[str] = Counter()
        self._closing = asyncio.Event()
        self._talking = asyncio.ensure_future(self._talk())

    @staticmethod
    async def start(config: Config, clock: Clock, wanted: Wanted) -> Shadow:
        """Raises ConfigError for a configuration that cannot be simulated."""
        record = str(wanted.record.resolve()) if wanted.record is not None else None
        setup = Setup(config=to_toml(config), wait_s=wanted.wait_s, record=record)
        return Shadow(await Child.start(setup), clock, wanted)

    @property
    def pid(self) -> int:
        return self._child.pid

    # ------------------------------------------------------------ Watch, JournalSink

    def arrived(self, request: OpenRequest) -> None:
        if not self.up:
            self._left_out[DOWN] += 1
            return
        if self._ahead >= BACKLOG:
            self._dropped += 1
            self._left_out[DROPPED] += 1
            return
        ask, local = request.ask, request.content.local
        self._ahead += 1
        self._told.add(ask.request_id)
        self._facts.append(
            Arrived(
                at_s=request.arrival_s,
                request_id=ask.request_id,
                isl=len(ask.token_ids),
                max_tokens=ask.max_tokens,
                hashes=None if local is None else array("Q", local).tobytes(),
                session_id=ask.session_id,
                priority=ask.priority,
                lora=ask.lora,
                tenant=ask.tenant,
                worker_hint=ask.worker_hint,
            )
        )

    def ended(self, request: OpenRequest, end: End) -> None:
        request_id = request.ask.request_id
        if request_id not in self._told:
            return
        self._told.discard(request_id)
        if self.up:
            self._facts.append(
                Ended(
                    at_s=self._clock.now(),
                    request_id=request_id,
                    outcome=_outcome(end),
                    output_tokens=end.output_tokens,
                    first_s=request.first_token_s,
                    last_s=request.last_token_s,
                )
            )

    def note(self, event: Event, actions: object) -> None:
        """Whatever happens to workers."""
        if type(event) in _OF_WORKERS and self.up:
            self._facts.append(self._of_workers(event))

    def _of_workers(self, event: Event) -> OfWorkers:
        match event:
            case WorkerUp():
                return Joined(
                    event.at_s,
                    event.worker_id,
                    self.group_of(event.worker_id),
                    event.total_blocks * event.block_size if event.total_blocks else None,
                    event.max_num_seqs,
                )
            case WorkerLost():
                return Left(event.at_s, event.worker_id, event.reason, event.reason == "drained")
            case WorkerDraining() | WorkerRecalled():
                return Drains(event.at_s, event.worker_id, stays=isinstance(event, WorkerRecalled))
            case BusyThresholdsChanged():
                return Limits(event.at_s, event)
            case _:
                raise AssertionError(event)

    # ------------------------------------------------------------ the process

    async def _talk(self) -> None:
        """Batch and answer in turn, until all is over or nobody answers."""
        try:
            over = False
            while not over:
                if not (self._facts and self._behind):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), EVERY_S)
                batch = self._next()
                over = batch.over
                self._heard(batch, await self._child.answer(batch))
        except Gone as gone:
            self._lost(str(gone))
        except Exception as error:  # a bug of ours must not end serving
            await self._child.kill()
            self._lost(f"{type(error).__name__}: {error}")

    def _next(self) -> Batch:
        """What is to be told next: never so much that the loop would be held up by writing it down."""
        facts = [self._facts.popleft() for _ in range(min(len(self._facts), MOST_FACTS))]
        self._behind = bool(self._facts)
        if self._behind:
            return Batch(now_s=self._facts[0].at_s, facts=tuple(facts))
        return Batch(now_s=self._clock.now(), facts=tuple(facts), over=self._closing.is_set())

    def _heard(self, batch: Batch, told: Progress) -> None:
        self._handled_s, self._at_s = batch.now_s, told.clock_s
        self._ahead -= sum(type(fact) is Arrived for fact in batch.facts)
        self._open = told.open
        self._left_out.update(told.left_out)
        self._compared += len(told.pairs)
        for pair in told.pairs:
            self._window.add(pair)
        for notice in told.notices:
            log.warning("shadow: %s", notice)

    def _lost(self, why: str) -> None:
        """It is gone, and stays so: what it knew of the cluster went with it."""
        self.up, self.why = False, why
        log.warning("the shadow has ended (%s): serving goes on, without predictions", why)
        self._left_out[DOWN] += self._ahead + self._open
        self._ahead = self._open = 0
        self._facts.clear()
        self._told.clear()

    async def kill(self) -> None:
        """There is nothing to shadow after all."""
        self._talking.cancel()
        await self._child.kill()

    async def close(self) -> None:
        """Nothing more happens: let it simulate the rest and write what it keeps, but not for ever."""
        self._closing.set()
        try:
            async with asyncio.timeout(END_S):
                await self._talking
        except TimeoutError:
            log.warning("the shadow was killed: %.0f s were not enough for what it was behind", END_S)
            await self._child.kill()
            return
        await self._child.end(END_S)

    # ------------------------------------------------------------ what it has found

    def glance(self) -> Glance:
        now_s = self._clock.now()
        up = self.up
        return Glance(
            up=up,
            why=self.why,
            lag_s=now_s - self._handled_s,
            delay_s=now_s - self._at_s,
            compared_total=self._compared,
            left_out=dict(self._left_out),
            dropped_total=self._dropped,
            open=self._open + self._ahead,
            window_requests=self._window.count(now_s),
            window_s=self._wanted.window_s,
            metrics=self._window.compared(now_s),
        )

    def series(self) -> Mapping[str, list[tuple[float, float]]]:
        """What the dashboard draws beside what was measured; nothing once it is gone."""
        return self._window.series(self._clock.now(), SERIES_S) if self.up else {}


_OF_WORKERS: Final = frozenset({WorkerUp, WorkerLost, WorkerDraining, WorkerRecalled, BusyThresholdsChanged})


def _outcome(end: End) -> Outcome:
    """An answer that was cut at a stop string is complete."""
    if end.outcome in ("stop", "length") or (end.outcome == "cancelled" and end.reason == STOP_STRING):
        return "completed"
    match end.outcome:
        case "cancelled" | "rejected" | "failed":
            return end.outcome
        case _:
            raise AssertionError(end.outcome)
