"""The twin's own engine, served in real time (or on a virtual clock): a worker without a GPU and without a model.

It makes tokens when the simulated engine would, step by step. What they say is made up, but goes on where it stopped:
the token at a place of a text depends on that place and the beginning of the text alone, so an answer that moves to
another worker reads as if it had not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

import xxhash

from executors.clock import Clock, Order
from executors.engines.protocol import Ability, Facts, LegFailed, LegRequest, Load, Moves, Piece
from policies.cluster.blocks import NO_BLOCKS, BlockPath, Branch, ContentTree
from policies.cluster.events import BlocksRemoved, BlocksStored, WorkerEvent
from policies.cluster.ids import Leg, LossCause, Role, WorkerId
from policies.errors import CapabilityError
from twin.engine.build import build_engine
from twin.engine.plan import Outcome, StepPlan
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import EngineSettings
from twin.engine.ticks import instant
from twin.perf.protocol import LatencyModel

SEED_TOKENS = 16
"""How much of the beginning of a text decides what it says."""


@dataclass(slots=True)
class _Leg:
    """One leg in the engine: what was told of it, and what was not read yet."""

    asked: LegRequest
    seq: Sequence
    seed: int
    told: int = 0
    pieces: list[Piece | LegFailed] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, piece: Piece | LegFailed) -> None:
        self.pieces.append(piece)
        self.news.set()


class MockEngine:
    """One worker of the simulated kind as `protocol.Engine`. It makes token ids from the first of
    `tokens` to before the last.

    `transfer_s` is how long the KV of a prompt of so many tokens takes to come here, `path_s` how long a request does.
    `tell` takes what it has to say of its blocks, in the simulator's own words (None: it says nothing).
    """

    moves = Moves.AFTER
    abilities = frozenset({Ability.ABORT, Ability.DRAIN, Ability.SPLIT})

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        latency: LatencyModel,
        clock: Clock,
        *,
        worker_id: WorkerId,
        role: Role = Role.MIXED,
        model: str = "mock",
        gpus: int = 1,
        tree: ContentTree | None = None,
        tell: Callable[[WorkerEvent], None] | None = None,
        tokens: tuple[int, int] = (100, 32_000),
        transfer_s: Callable[[int], float] = lambda tokens: 0.0,
        path_s: float = 0.0,
    ) -> None:
        self.name = name
        self._settings = settings
        self._clock = clock
        self._worker_id = worker_id
        self._role = role
        self._model = model
        self._gpus = gpus
        self._tree = tree or ContentTree(settings.block_size, settings.block_size)
        self._tell = tell
        self._first_token, last = tokens
        self._tokens = last - self._first_token
        self._transfer_s = transfer_s
        self._path_s = path_s
        self._engine = build_engine(settings, latency, worker_id=worker_id, kv_events=tell is not None)
        self._plan: StepPlan | None = None
        self._legs: dict[str, _Leg] = {}
        self._of: dict[Sequence, _Leg] = {}
        self._held: dict[str, Sequence] = {}
        self._arriving: list[_Leg] = []
        self._dropped: list[Sequence] = []
        self._resting = True
        self._closed = False

    # ------------------------------------------------------------ protocol.Engine

    async def ready(self, deadline_s: float) -> Facts:
        return self.facts()

    def facts(self) -> Facts:
        """What it says of itself."""
        settings = self._settings
        return Facts(
            engine="mock",
            version="simulated",
            role=self._role,
            models=(self._model,),
            block_size=settings.block_size,
            total_blocks=settings.blocks * settings.ranks,
            max_batched_tokens=settings.max_num_batched_tokens * settings.ranks,
            max_num_seqs=settings.max_num_seqs * settings.ranks,
            context_tokens=settings.max_model_len or settings.blocks * settings.block_size,
            gpus=self._gpus,
            compatibility=f"mock-{settings.block_size}",
        )

    async def generate(self, request: LegRequest) -> AsyncGenerator[Piece, None]:
        if self._path_s and not self._closed:
            await self._on_its_way()
        if self._closed:
            raise LegFailed(LossCause.CONNECT, f"{self.name} is gone")
        leg = self._submit(request)
        try:
            while True:
                while leg.pieces:
                    piece = leg.pieces.pop(0)
                    if isinstance(piece, LegFailed):
                        raise piece
                    yield piece
                    if piece.finish or piece.handoff:
                        return
                leg.news.clear()
                await leg.news.wait()
        finally:
            self._forget(leg)

    async def _on_its_way(self) -> None:
        there = asyncio.Event()
        self._clock.call_at(instant(self._clock.now() + self._path_s), int(Order.COMMAND), there.set)
        await there.wait()

    def meeting_point(self) -> Mapping[str, object]:
        raise CapabilityError("a mock engine hands KV over after the prompt, not by a meeting point")

    async def abort(self, leg_id: str) -> None:
        leg = self._legs.get(leg_id)
        if leg is not None:
            self._forget(leg)
            leg.put(LegFailed(LossCause.ENGINE_ERROR, "aborted"))

    async def alive(self) -> bool:
        return not self._closed

    async def load(self) -> Load | None:
        now_s = self._clock.now()
        running, waiting, active, cached = self._engine.load(self._plan, now_s)
        return Load(measured_s=now_s, running=running, waiting=waiting, active_blocks=active, cached_blocks=cached)

    async def drain(self, deadline_s: float) -> None:
        return None

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """It is gone with all that it had, as a process that dies is."""
        if self._closed:
            return
        self._closed = True
        self._plan = None
        for leg in list(self._legs.values()):
            leg.put(LegFailed(LossCause.DISCONNECTED, f"{self.name} is gone"))
        self._legs.clear()

    # ------------------------------------------------------------ requests

    def _submit(self, request: LegRequest) -> _Leg:
        path, own = self._content(request)
        limit = 1 if request.leg is Leg.PREFILL else request.out_tokens or request.max_tokens
        seq = Sequence(
            request.request_id,
            len(request.token_ids),
            min(limit, request.max_tokens),
            path,
            own,
            dispatch_s=self._clock.now(),
            arrival_s=self._clock.now(),
            leg=Leg.AGG if request.leg is Leg.DECODE and not request.handoff else request.leg,
            lora=request.lora,
        )
        leg = _Leg(request, seq, _seed(request))
        if request.leg is Leg.DECODE and request.handoff:
            self._arriving.append(leg)
            self._take_in()
        else:
            refusal = self._engine.submit(seq)
            if refusal is not None:
                raise LegFailed(LossCause.ENGINE_ERROR, refusal, refused=True)
        self._legs[request.leg_id] = leg
        self._of[seq] = leg
        self._wake()
        return leg

    def _take_in(self) -> None:
        """Decode legs whose prompt is computed elsewhere: room for it, then its KV, between steps and in order."""
        while self._plan is None and self._arriving and self._engine.reserve(self._arriving[0].seq):
            leg = self._arriving.pop(0)
            at_s = self._clock.now() + self._transfer_s(len(leg.asked.token_ids))
            self._clock.call_at(at_s, int(Order.COMMAND), lambda leg=leg: self._arrived(leg))  # type: ignore[misc]

    def _arrived(self, leg: _Leg) -> None:
        """The KV of a prompt is here, and is let go where it was computed."""
        release = leg.asked.handoff.get("release")
        if callable(release):
            release()
        if leg.seq in self._of and not self._closed:
            self._engine.activate(leg.seq)
            self._wake()

    def _content(self, request: LegRequest) -> tuple[BlockPath, Branch]:
        own = request.own if request.own is not None else self._tree.private()
        if request.path is not None:
            return request.path, own
        blocks = len(request.token_ids) // self._settings.block_size
        return (BlockPath(((own, blocks),), blocks) if blocks else NO_BLOCKS), own

    def _forget(self, leg: _Leg) -> None:
        """Nobody reads a leg any more; what is left of it goes with the running step."""
        if self._legs.pop(leg.asked.leg_id, None) is None:
            return
        del self._of[leg.seq]
        if leg in self._arriving:
            self._arriving.remove(leg)
        elif leg.seq.finish_reason is None and not _is_done(leg.seq):
            self._drop(leg.seq)

    def _drop(self, seq: Sequence) -> None:
        if self._plan is None:
            self._engine.cancel(seq)
            self._wake()
        else:
            self._dropped.append(seq)

    # ------------------------------------------------------------ steps

    def _wake(self) -> None:
        """There may be something to do: look when everything else of this instant is done."""
        if self._plan is None and self._resting and not self._closed:
            self._resting = False
            self._clock.call_at(self._clock.now(), self._order(Order.STEP_START), self._next)

    def _order(self, order: Order) -> int:
        return int(order) * 1_000_000 + self._worker_id

    def _next(self) -> None:
        """Plan one step and wait for its end, or rest."""
        if self._closed:
            return
        now_s = self._clock.now()
        plan = self._engine.plan(now_s)
        if plan is None:
            self._resting = True
            return
        if plan.steps > 1:
            self._engine.truncate(plan, now_s)
        self._plan = plan
        self._clock.call_at(plan.end_s, self._order(Order.STEP_END), self._end)

    def _end(self) -> None:
        """A step is over: tell what came of it, then go on when everything else of this instant is done."""
        plan = self._plan
        if plan is None or self._closed:
            return
        self._plan = None
        outcome = self._engine.commit(plan)
        for seq in self._dropped:
            self._engine.cancel(seq)
        self._dropped.clear()
        self._take_in()
        self._tell_blocks()
        self._tell_tokens(outcome)
        self._clock.call_at(self._clock.now(), self._order(Order.STEP_START), self._next)

    def _tell_blocks(self) -> None:
        pool = self._engine.pool
        removed, stored = pool.removed, pool.stored
        if not removed and not stored:
            return
        pool.removed, pool.stored = [], []
        if self._tell is None:
            return
        at_s = self._clock.now()
        if removed:
            self._tell(BlocksRemoved(at_s=at_s, worker_id=self._worker_id, runs=tuple(removed)))
        if stored:
            self._tell(BlocksStored(at_s=at_s, worker_id=self._worker_id, runs=tuple(stored)))

    def _tell_tokens(self, outcome: Outcome) -> None:
        """First tokens, then further ones, then ends, which have a turn of the loop to themselves."""
        ended = [self._of[seq] for seq in outcome.ended if seq in self._of]
        held = [self._of[seq] for seq in outcome.held if seq in self._of]
        for leg in [self._of[seq] for seq in outcome.firsts if seq in self._of]:
            self._new_tokens(leg, leg.seq.cached_tokens)
        for leg in list(self._legs.values()):
            self._new_tokens(leg, None)
        if ended or held:
            asyncio.get_running_loop().call_soon(self._tell_ends, ended, held)

    def _new_tokens(self, leg: _Leg, cached_tokens: int | None) -> None:
        made, _ = self._engine.made(leg.seq)
        if made > leg.told and leg.seq.finish_reason is None:
            first = len(leg.asked.token_ids) + leg.told
            ids = tuple(self._token(leg.seed, at) for at in range(first, first + made - leg.told))
            leg.told = made
            leg.put(Piece(token_ids=ids, cached_tokens=cached_tokens))

    def _tell_ends(self, ended: list[_Leg], held: list[_Leg]) -> None:
        for leg in held:
            self._held[leg.asked.leg_id] = leg.seq
            leg.put(Piece(handoff={"release": lambda leg=leg: self._release(leg.asked.leg_id)}, prefilled=True))
        for leg in ended:
            if leg.seq.finish_reason is not None:
                leg.put(LegFailed(LossCause.ENGINE_ERROR, leg.seq.finish_reason, refused=not leg.told))
            else:
                spent = leg.seq.outputs >= leg.asked.max_tokens
                leg.put(Piece(finish="length" if spent else "stop"))

    def _release(self, leg_id: str) -> None:
        """What was held for a decode leg has been fetched, or nobody will."""
        seq = self._held.pop(leg_id, None)
        if seq is not None and not self._closed:
            self._engine.release(seq)
            self._wake()

    def _token(self, seed: int, at: int) -> int:
        return self._first_token + (seed + at * 2_654_435_761) % 2**32 % self._tokens


def _is_done(seq: Sequence) -> bool:
    return seq.phase in (Phase.DONE, Phase.HELD)


def _seed(request: LegRequest) -> int:
    head = ",".join(map(str, list(request.token_ids[:SEED_TOKENS])))
    return xxhash.xxh3_64_intdigest(head.encode())
