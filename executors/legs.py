"""Legs of requests on workers: sent, read, watched and stopped. What comes of them is posted to the world.

Every leg has deadlines of ours, whatever its engine promises, and KV that another worker holds is asked for only while
its lease surely runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from executors.clock import Order
from executors.deadlines import Deadlines
from executors.engines.protocol import LegFailed, LegRequest, Moves, Piece
from executors.fleet import SUSPECT
from executors.leases import LeaseKey, LeaseTerms
from executors.live_worker import LiveWorker
from executors.prefill_gate import PrefillGate
from executors.requests import OpenRequest, RunningLeg
from policies.cluster.actions import Dispatch
from policies.cluster.events import FirstToken, PrefillDone, RoomReserved, TokensEmitted
from policies.cluster.ids import Leg, LossCause

if TYPE_CHECKING:
    from executors.world import LiveWorld


class Legs:
    """Of one world. `lease` is how long prefill workers keep KV that nobody fetched (None: for as long as we want)."""

    def __init__(self, world: LiveWorld, deadlines: Deadlines, lease: LeaseTerms | None) -> None:
        self._world = world
        self._deadlines = deadlines
        self.lease = lease
        self.gate = PrefillGate()
        self._tells_tokens = world.controller.wants(TokensEmitted)

    def dispatch(self, action: Dispatch) -> None:
        request = self._world.open[action.request_id]
        worker = self._world.fleet.workers[action.worker_id]
        now_s = self._world.clock.now()
        if request.dispatch_s is None:
            request.dispatch_s = now_s
        leg = RunningLeg(action.leg, request.next_leg_id(), worker.worker_id, worker.up.epoch, now_s)
        request.legs[action.leg] = leg
        if action.leg is Leg.PREFILL:
            request.prefill_worker_id = action.worker_id
        else:
            request.worker_id = action.worker_id
        together = worker.engine.moves is Moves.TOGETHER
        if action.leg is Leg.DECODE and together and Leg.PREFILL not in request.legs:
            # The meeting point is the prefill worker's, which is chosen now that there is somebody to answer.
            self._world.post(RoomReserved(at_s=now_s, request_id=action.request_id, worker_id=action.worker_id))
            return
        if action.leg is Leg.PREFILL and together:
            request.handoff = worker.engine.meeting_point()
            waiting = request.legs.get(Leg.DECODE)
            if waiting is not None:
                self._begin(request, waiting, self._world.fleet.workers[waiting.worker_id], None)
        self._begin(request, leg, worker, action.dp_rank)

    def _begin(self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker, dp_rank: int | None) -> None:
        """Send a leg, and watch it."""
        ask = request.ask
        leased = request.lease if leg.leg is Leg.DECODE else None
        if leased is not None and self._world.ledger.send(leased, leg.worker_id, self._world.clock.now()) is not None:
            # Never try anyway: whose KV it would be by now nobody knows. Whoever answers computes the prompt.
            request.handoff, request.lease = {}, None
        path, own = request.content.for_engine(request.isl)
        left = request.left if ask.out_tokens is None else ask.out_tokens - request.carried
        asked = LegRequest(
            leg_id=leg.leg_id,
            request_id=ask.request_id,
            leg=leg.leg,
            token_ids=request.prompt(),
            max_tokens=1 if leg.leg is Leg.PREFILL else request.left,
            sampling=ask.sampling,
            handoff=request.handoff if leg.leg is Leg.DECODE or worker.engine.moves is Moves.TOGETHER else {},
            dp_rank=dp_rank,
            lora=ask.lora,
            cache_salt=ask.cache_salt,
            priority=ask.priority,
            path=path,
            own=own,
            out_tokens=None if ask.out_tokens is None else 1 if leg.leg is Leg.PREFILL else left,
        )

        def send() -> None:
            leg.sent_s = self._world.clock.now()
            leg.task = self._world.spawn(self._run(request, leg, worker, asked))

        if leg.leg is Leg.PREFILL and self.lease is not None and worker.engine.moves is not Moves.TOGETHER:
            step_tokens = worker.facts.max_batched_tokens
            leg.turn = self.gate.enter(leg.worker_id, len(asked.token_ids), step_tokens, send)
        else:
            send()
        self._watch(request, leg, worker)

    async def _run(self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker, asked: LegRequest) -> None:
        """One leg to its end; what becomes of the request is posted."""
        ended: Piece | None = None
        stream = worker.engine.generate(asked)
        try:
            async for piece in stream:
                if self._is_over(request, leg):
                    break
                ended = piece
                self._on_piece(request, leg, worker, piece)
        except LegFailed as failed:
            if not self._is_over(request, leg):
                self.failed(request, leg, worker, failed)
            return
        finally:
            await stream.aclose()
        if self._is_over(request, leg):
            return
        if ended is None or not (ended.finish or ended.prefilled or ended.handoff):
            cut = LegFailed(LossCause.INCOMPLETE, "the engine's stream ended without an end")
            self.failed(request, leg, worker, cut)

    def _is_over(self, request: OpenRequest, leg: RunningLeg) -> bool:
        """Whether nobody waits for a leg any more."""
        return request.closed or request.legs.get(leg.leg) is not leg

    def _on_piece(self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker, piece: Piece) -> None:
        now_s = self._world.clock.now()
        leg.heard_s = now_s
        worker.heard_s, worker.unanswered_s = now_s, None
        if piece.cached_tokens is not None and (request.cached_tokens is None or leg.leg is not Leg.DECODE):
            request.cached_tokens = piece.cached_tokens
        if leg.leg is Leg.PREFILL:
            if piece.finish or piece.prefilled or piece.handoff:
                self._prefilled(request, leg, piece, now_s)
            return
        if piece.token_ids:
            self._emit(request, leg, piece, now_s)
        if piece.finish is not None:
            request.legs.pop(leg.leg).over()
            request.handoff = {}
            self._world.end(request, piece.finish, "", "")

    def _prefilled(self, request: OpenRequest, leg: RunningLeg, piece: Piece, now_s: float) -> None:
        request.handoff = request.handoff or piece.handoff
        request.prefilled_s = now_s
        if self.lease is not None and piece.handoff:
            self._world.ledger.expire(now_s)
            request.lease = LeaseKey(leg.worker_id, leg.epoch, leg.leg_id)
            since_s = leg.since_s if leg.sent_s is None else leg.sent_s
            self._world.ledger.grant(request.lease, request.ask.request_id, since_s, self.lease)
        request.legs.pop(Leg.PREFILL).over()
        self._world.post(PrefillDone(at_s=now_s, request_id=request.ask.request_id, worker_id=leg.worker_id))

    def _emit(self, request: OpenRequest, leg: RunningLeg, piece: Piece, now_s: float) -> None:
        """The client is given tokens."""
        first_of_leg = len(request.emitted) == request.carried
        self._world.watching.tokens(request, leg.worker_id, len(piece.token_ids), now_s)
        request.emitted += piece.token_ids
        request.last_token_s = now_s
        request.stream.add(piece, now_s)
        request_id, worker_id = request.ask.request_id, leg.worker_id
        if first_of_leg and request.lease is not None:
            self._world.ledger.fetched(request.lease)
            request.lease = None
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._world.post(FirstToken(at_s=now_s, request_id=request_id, worker_id=worker_id))
        elif first_of_leg and leg.leg is Leg.AGG:
            self._world.post(PrefillDone(at_s=now_s, request_id=request_id, worker_id=worker_id))
        elif self._tells_tokens:
            n = len(piece.token_ids)
            self._world.post(TokensEmitted(at_s=now_s, request_id=request_id, worker_id=worker_id, n=n))

    def failed(self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker, failed: LegFailed) -> None:
        """A leg broke: the engine refused it, or something between us did."""
        if failed.refused and failed.cause is not LossCause.OVERLOAD and not request.emitted:
            self.stop(request)
            self._world.end(request, "rejected", failed.reason, "engine_limit")
            return
        if failed.cause is LossCause.RESPONSE_TIMEOUT and worker.unanswered_s is None:
            worker.unanswered_s = leg.since_s if leg.heard_s is None else leg.heard_s
        if failed.cause in SUSPECT:
            self._world.fleet.suspect(worker)
        self._world.interrupt(request, leg.worker_id, failed.reason, failed.cause)

    def stop(self, request: OpenRequest) -> None:
        """Every leg is stopped, wherever it is: its stream is closed, and with it the engine is told."""
        for leg in list(request.legs.values()):
            leg.over()
            if leg.task is not None and leg.task is not asyncio.current_task():
                leg.task.cancel()
        if request.lease is not None and Leg.DECODE in request.legs:
            self._world.ledger.given_back(request.lease)  # a decode worker lets go of what its client does not want
        request.lease = None
        request.legs.clear()

    # ------------------------------------------------------------ deadlines

    def _watch(self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker) -> None:
        """See again when its deadline would be over if nothing came."""
        deadlines, ask = self._deadlines, request.ask
        heard_s = leg.heard_s
        limit_s = deadlines.between_tokens_s if heard_s is not None else (ask.first_token_s or deadlines.first_token_s)
        if limit_s is None:
            return
        due_s = (leg.since_s if heard_s is None else heard_s) + limit_s
        leg.deadline = self._world.clock.call_at(
            due_s, Order.TIMER, lambda: self._check(request, leg, worker, heard_s, limit_s)
        )

    def _check(
        self, request: OpenRequest, leg: RunningLeg, worker: LiveWorker, heard_s: float | None, limit_s: float
    ) -> None:
        if self._is_over(request, leg):
            return
        if leg.heard_s != heard_s:
            self._watch(request, leg, worker)
            return
        what = "its first token" if heard_s is None else "another token"
        reason = f"worker {worker.up.name} did not make {what} within {limit_s:g} s"
        self.failed(request, leg, worker, LegFailed(LossCause.RESPONSE_TIMEOUT, reason))
