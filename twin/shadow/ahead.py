"""The simulation beside a live cluster: facts in, pairs of predicted and measured latencies out.

A prediction is of a request whose answer has the length that it had. So the simulation waits at the oldest request that
is open, and goes on as requests end; behind that nothing is known better by waiting. What is open for longer than
`wait_s` is let in with all its budget and stopped when it ends live: it is load for the others, and not compared.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from policies.cluster.controller import Controller, Policy
from policies.cluster.ids import RequestId, WorkerId
from policies.errors import CapabilityError, ConfigError, EngineError
from twin.config import Config
from twin.deciding import build_policy, guards, migration
from twin.engine.ticks import instant
from twin.mocker.demand import Demand, Row
from twin.mocker.fed import FedWorld
from twin.mocker.requests import OpenRequest
from twin.mocker.sinks import Sinks
from twin.shadow.facts import (
    Arrived,
    Drains,
    Ended,
    Fact,
    Joined,
    Latency,
    Left,
    Limits,
    OfWorkers,
    Pair,
    Progress,
)
from twin.shadow.workers import Workers
from twin.wiring import build_cluster, observation

TOO_LONG = "open_too_long"
NO_TOKENS = "no_tokens"
MOST_PAIRS = 1_000
"""Of one answer: who reads it serves meanwhile."""
UNLIKE = "twin_"
"""Before what became of a request in the simulation, where it completed live."""


@dataclass(slots=True)
class _Request:
    """One that arrived. `assumed`: it was let in before its length was known."""

    arrived: Arrived
    row: int
    ended: Ended | None = None
    assumed: bool = False
    is_in: bool = False

    @property
    def at_s(self) -> float:
        return self.arrived.at_s


class Ahead:
    """One simulation. `sinks` takes its rows. Raises TwinError for a configuration that cannot be simulated."""

    def __init__(self, config: Config, sinks: Sinks, wait_s: float) -> None:
        if config.replicas.count > 1:
            raise ConfigError("replicas.count: the shadow is of one router; a process is one")
        cluster = build_cluster(config)
        self.block_size = max(group.settings.block_size for group in cluster.groups)
        self.policies: list[Policy] = [
            build_policy(config, self.block_size),
            migration(config),
            *guards(config.resilience),
        ]
        self.workers = Workers(cluster, self._is_there)
        network = cluster.network()
        self.world = FedWorld(
            controller=Controller(self.policies),
            workers=cluster.workers,
            demand=Demand([]),
            sinks=sinks,
            router=config.router.mode,
            key_tokens=self.block_size,
            observe=observation(config),
            handoff=cluster.handoff(network),
            network=network,
            seed=config.seed,
            on_end=self._on_end,
        )
        self.world.open_to_news()
        self.count = 0
        self._sinks = sinks
        self._wait_s = wait_s
        self._waiting: deque[_Request | OfWorkers] = deque()
        self._open: dict[RequestId, _Request] = {}
        self._pairs: deque[Pair] = deque()
        self._left_out: Counter[str] = Counter()
        self._notices: list[str] = []
        self._clock_s = 0.0

    # ------------------------------------------------------------ what is told

    def take(self, facts: Sequence[Fact], now_s: float) -> Progress:
        """Facts in order of time, all there are from before `now_s`: go on as far as they allow."""
        for fact in facts:
            self._note(fact)
        self._advance(now_s)
        return self._progress(MOST_PAIRS)

    def finish(self, now_s: float) -> Progress:
        """Nothing more comes: to the end. Raises EngineError where what is open cannot go on."""
        self._advance(now_s)
        try:
            self.world.run()
        except EngineError:
            self.world.abandon()
            raise
        return self._progress(len(self._pairs))

    def _note(self, fact: Fact) -> None:
        if isinstance(fact, Arrived):
            request = _Request(fact, self.count)
            self.count += 1
            self._open[fact.request_id] = request
            self._waiting.append(request)
        elif isinstance(fact, Ended):
            found = self._open.get(fact.request_id)
            if found is None:
                return  # let in as too long, and over in the simulation by now
            found.ended = fact
            if found.is_in:
                self.world.leave(fact.request_id, fact.at_s)
        else:
            self._waiting.append(fact)

    def _advance(self, now_s: float) -> None:
        waiting, world = self._waiting, self.world
        while waiting:
            first = waiting[0]
            if isinstance(first, _Request) and first.ended is None:
                if now_s - first.at_s <= self._wait_s:
                    break
                first.assumed = True
            world.advance(first.at_s)
            self._let_in(first)
            waiting.popleft()
        self._clock_s = waiting[0].at_s if waiting else now_s
        world.advance(self._clock_s)

    # ------------------------------------------------------------ what it means in the simulation

    def _let_in(self, what: _Request | OfWorkers) -> None:
        match what:
            case _Request():
                self._arrive(what)
            case Joined():
                self._join(what)
            case Left():
                worker_id = self.workers.left(what.worker_id)
                if worker_id is not None and not what.drained:  # one that drains leaves when it has drained here
                    self.world.lose(worker_id, what.reason, what.at_s)
            case Drains():
                worker_id = self.workers.of(what.worker_id)
                if worker_id is not None:
                    act = self.world.recall if what.stays else self.world.drain
                    act(worker_id, what.at_s)
            case Limits():
                self.world.happen(what.event)

    def _join(self, joined: Joined) -> None:
        try:
            self.world.join(self.workers.join(joined), joined.at_s)
        except CapabilityError as error:
            self._notices.append(str(error))

    def _arrive(self, request: _Request) -> None:
        arrived, ended = request.arrived, request.ended
        if ended is not None and ended.outcome == "rejected":
            self._leave_out(request, ended)
            return
        request.is_in = True
        completed = ended is not None and ended.outcome == "completed"
        row = Row(
            row=request.row,
            request_id=arrived.request_id,
            arrival_s=arrived.at_s,
            isl=arrived.isl,
            osl=max(1, ended.output_tokens) if ended is not None and completed else arrived.max_tokens,
            keys=self._keys(arrived, request.row),
            session_id=arrived.session_id,
            delay_s=None,
            max_tokens=arrived.max_tokens,
            priority=arrived.priority,
            lora=arrived.lora,
            tenant=arrived.tenant,
        )
        self.world.arrive(row, self.workers.of(arrived.worker_hint))
        if ended is not None and not completed:
            self.world.leave(arrived.request_id, max(ended.at_s, instant(arrived.at_s + 1e-9)))

    def _keys(self, arrived: Arrived, row: int) -> list[int] | None:
        """A key a block, and one of its own for what is left of the prompt."""
        if arrived.hashes is None:
            return None
        keys = array("Q", arrived.hashes).tolist()
        return [*keys, -1 - row] if arrived.isl % self.block_size else keys

    def _leave_out(self, request: _Request, ended: Ended) -> None:
        """What the live cluster took on no worker is not simulated, for nobody knows how long it would have been."""
        arrived = request.arrived
        del self._open[arrived.request_id]
        self._left_out["rejected"] += 1
        self._sinks.requests[request.row] = (
            *(request.row, arrived.request_id, arrived.session_id, arrived.at_s, arrived.isl, arrived.max_tokens),
            *("rejected", "not simulated: the live cluster rejected it"),
            *(None,) * 6,
            *(0, None, 0, 0, None, None),
        )

    def _is_there(self, worker_id: WorkerId) -> bool:
        worker = self.world.workers.get(worker_id)
        return worker is not None and not worker.down

    # ------------------------------------------------------------ what came of it

    def _on_end(self, request: OpenRequest, status: str) -> None:
        self.world.churn.pins.pop(request.row.row, None)
        asked = self._open.pop(RequestId(request.row.request_id))
        reason = self._why_not(asked, status)
        if reason is None:
            measured = _measured(asked)
            _, first_s, last_s, made = request.told()
            if measured is not None and first_s is not None and last_s is not None:
                at_s = request.arrival_s
                predicted = Latency(ttft_s=first_s - at_s, e2e_s=last_s - at_s, gaps=made - 1)
                self._pairs.append(Pair(asked.arrived.request_id, asked.at_s, predicted, measured))
                return
            reason = NO_TOKENS
        self._left_out[reason] += 1

    @staticmethod
    def _why_not(asked: _Request, status: str) -> str | None:
        """Why a request is not compared."""
        if asked.assumed:
            return TOO_LONG
        assert asked.ended is not None
        if asked.ended.outcome != "completed":
            return asked.ended.outcome
        return None if status == "completed" else UNLIKE + status

    def _progress(self, most: int) -> Progress:
        told = Progress(
            clock_s=self._clock_s,
            pairs=tuple(self._pairs.popleft() for _ in range(min(most, len(self._pairs)))),
            left_out=dict(self._left_out),
            open=len(self._open),
            notices=tuple(self._notices),
        )
        self._left_out.clear()
        self._notices.clear()
        return told


def _measured(asked: _Request) -> Latency | None:
    ended = asked.ended
    if ended is None or ended.first_s is None or ended.last_s is None:
        return None
    return Latency(ttft_s=ended.first_s - asked.at_s, e2e_s=ended.last_s - asked.at_s, gaps=ended.output_tokens - 1)
