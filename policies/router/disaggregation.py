"""Two legs: where a prompt is computed, and where the answer is made from its KV.

Owns two modes, one per leg, each with its own candidates by role. It decides the order of the legs (source first:
compute, then look for a destination; destination first: find room, then compute), and whether a short prompt stays on
the decode worker. It never moves KV: the world does, and says so with `PrefillDone` and `RoomReserved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal

from policies.cluster.actions import Action, Dispatch
from policies.cluster.draws import draw
from policies.cluster.events import (
    ENDS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestEvent,
    RequestInterrupted,
    RequestMigrated,
    RoomReserved,
    TimerFired,
    WorkerEvent,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import Leg, Place, RankId, RequestId, Role, Tier, WorkerId
from policies.cluster.state import ClusterView
from policies.frozen import frozen
from policies.router.base import NOBODY, Router
from policies.router.settings import RouterSettings

if TYPE_CHECKING:
    from policies.router.queued import Queued

Order = Literal["prefill_first", "decode_first"]
Conditional = Literal["off", "isl", "prefill_load", "isl_or_load"]

LOCAL_BELOW_TOKENS = 2048
LOCAL_BELOW_SHARE = 0.7


@frozen
class DisaggregationSettings:
    """`order` of the legs; `conditional`: when a prompt stays on its decode worker (router spec, section 11).

    `busy_tokens`: a prefill worker with more prompt tokens dispatched and not done is busy (None: never).
    `decode_busy_share`: a decode worker is busy for a prompt when the blocks of what was sent there and has not ended,
    the prompt's own included, are more than this share of its pool (None: never); it then keeps no prompt.
    """

    order: Order
    conditional: Conditional
    busy_tokens: int | None
    decode_busy_share: float | None = None


def leg_settings(settings: RouterSettings) -> tuple[RouterSettings, RouterSettings]:
    """The settings of the two legs: prefill weighs prompts alone, decode weighs blocks alone and expects no reuse.

    Requests wait in front of the prefill leg alone: what has been computed is not kept from being answered.
    """
    other = int(draw(settings.seed, "decode leg", RequestId("seed")) * 2**53)
    return (
        replace(settings, track_active_blocks=False, track_prefill_tokens=True),
        replace(
            settings,
            seed=other,
            overlap_score_credit=0.0,
            assume_kv_reuse=False,
            track_prefill_tokens=False,
            queue=None,
        ),
    )


def stays_local(isl: int, overlap_tokens: int) -> bool:
    """Whether what is left to compute is short, and a small part of the prompt (both limits strict)."""
    left = isl - overlap_tokens
    return left < LOCAL_BELOW_TOKENS and left / isl < LOCAL_BELOW_SHARE


class Disaggregated:
    """Routes both legs of each request; without a prefill worker, requests run whole on decode workers."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {
            RequestArrived,
            RequestMigrated,
            RequestInterrupted,
            PrefillDone,
            RoomReserved,
            FirstToken,
            WorkerUp,
            WorkerLost,
            BlocksStored,
            BlocksRemoved,
            BlocksCleared,
            *ENDS,
        }
    )

    def __init__(self, prefill: Router | Queued, decode: Router, settings: DisaggregationSettings) -> None:
        self._prefill = prefill
        self._decode = decode
        self._settings = settings
        self._prefills_in_time = prefill.reads_time
        self._decodes_in_time = decode.reads_time
        prefill.serve(Role.PREFILL, Leg.PREFILL)
        decode.serve(Role.DECODE, Leg.DECODE)
        self.subscribes = (prefill.subscribes | decode.subscribes | _OWN) if _learns(prefill, decode) else _OWN  # type: ignore[misc]
        self._roles: dict[WorkerId, Role] = {}
        self._prefilling: dict[RequestId, tuple[WorkerId, int]] = {}  # where, and how many prompt tokens
        self._decoding: dict[RequestId, tuple[WorkerId, int]] = {}  # where, and how many blocks its prompt has
        self._decode_blocks: dict[WorkerId, int] = {}
        self._prompt_tokens: dict[WorkerId, int] = {}
        self._local = 0

    def counters(self) -> dict[str, int]:
        """The counters of both legs, by leg, and how many requests stayed local."""
        legs = (("prefill", self._prefill), ("decode", self._decode))
        told = {f"{leg}_{name}": count for leg, router in legs for name, count in router.counters().items()}
        return told | {"local": self._local}

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, (BlocksStored, BlocksRemoved)):  # most events are these
            return self._told(event, view) if event.tier is not Tier.G4_REMOTE else self._shared_tier(event, view)
        if isinstance(event, RequestArrived):
            return self._arrived(event, view)
        if isinstance(event, PrefillDone):
            return self._prefilled(event, view)
        if isinstance(event, RoomReserved):
            return self._reserved(event, view)
        if isinstance(event, RequestEvent):
            return self._request_event(event, view)
        if isinstance(event, WorkerEvent):
            return self._worker_event(event, view)
        if isinstance(event, TimerFired):
            if TimerFired not in self._prefill.subscribes:
                return self._decode.decide(event, view)
            late = self._decode.decide(event, view) if TimerFired in self._decode.subscribes else ()
            return chain(late, self._sent_to_prefill(self._prefill.decide(event, view), view))
        self._decode.decide(event, view)
        return self._sent_to_prefill(self._prefill.decide(event, view), view)

    # ------------------------------------------------------------ the legs

    def _arrived(self, event: RequestArrived, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, RequestMigrated) and event.kept_on is not None:
            return self._send_decode(event, view)
        if not view.live_for(event.lora, Role.PREFILL):
            return self._run_whole(event, view)
        picky = event.lora or event.hints is not None or self._decode.is_guarded
        if picky and not self._decode.has_any(event, view):
            return self._send_decode(event, view)  # a refusal; the prompt would be computed for nobody
        if self._settings.order == "decode_first":
            return self._send_decode(event, view)
        if self._settings.conditional != "off":
            local = self._stay_local(event, view)
            if local:
                self._local += 1
                return local
        return self._send_prefill(event, view)

    def _prefilled(self, event: PrefillDone, view: ClusterView) -> Iterable[Action]:
        others = self._leave_prefill(event)
        if event.request_id in self._decoding:
            return others
        return (*self._send_decode(_begun(event, view, anew=self._decodes_in_time), view), *others)

    def _reserved(self, event: RoomReserved, view: ClusterView) -> Iterable[Action]:
        request = view.requests[event.request_id]
        if self._settings.order == "prefill_first" or request.prefill_worker_id is not None:
            return ()
        return self._send_prefill(_begun(event, view, anew=self._prefills_in_time), view)

    def _send_prefill(self, event: RequestArrived, view: ClusterView) -> Iterable[Action]:
        return self._sent_to_prefill(self._prefill.send(event, view), view)

    def _sent_to_prefill(self, orders: Iterable[Action], view: ClusterView) -> Iterator[Action]:
        """The orders of the prefill leg, each noted as it is made."""
        tokens = self._prompt_tokens
        for action in orders:
            if isinstance(action, Dispatch):
                isl = view.requests[action.request_id].arrived.isl
                self._prefilling[action.request_id] = (action.worker_id, isl)
                tokens[action.worker_id] = tokens.get(action.worker_id, 0) + isl
            yield action

    def _send_decode(
        self, event: RequestArrived, view: ClusterView, busy: frozenset[WorkerId] = NOBODY
    ) -> Sequence[Action]:
        action = self._decode.route(event, view, busy)
        if isinstance(action, Dispatch):
            worker_id, blocks = action.worker_id, self._prompt_blocks(event)
            self._decoding[event.request_id] = (worker_id, blocks)
            self._decode_blocks[worker_id] = self._decode_blocks.get(worker_id, 0) + blocks
        return (action,)

    def _run_whole(
        self, event: RequestArrived, view: ClusterView, busy: frozenset[WorkerId] = NOBODY
    ) -> Sequence[Action]:
        """Prompt and answer on one decode worker."""
        return tuple(
            replace(action, leg=Leg.AGG) if isinstance(action, Dispatch) else action
            for action in self._send_decode(event, view, busy)
        )

    def _stay_local(self, event: RequestArrived, view: ClusterView) -> Sequence[Action]:
        """The prompt goes whole to a decode worker, if the rule says so: the one that has most of it, where little is
        left to compute; any, where prefill workers are busy. Never to one that is busy itself. Nothing when it is to be
        handed over."""
        rule = self._settings.conditional
        busy = self._busy_for(event, view)
        if busy and len(busy) == len(view.live_for(event.lora, Role.DECODE)):
            return ()
        if rule in ("isl", "isl_or_load") and event.worker_hint is None:
            worker_id, blocks = self._decode.best_overlap(event, view, busy)
            tokens = blocks * self._decode.settings.block_size
            if worker_id is not None and stays_local(event.isl, tokens):
                reason = f"{event.isl - tokens} of {event.isl} tokens left to compute"
                return self._named(self._run_whole(replace(event, worker_hint=worker_id), view), reason)
        if rule in ("prefill_load", "isl_or_load") and self._prefill_is_busy(event, view):
            return self._named(self._run_whole(event, view, busy), "prefill workers are busy")
        return ()

    @staticmethod
    def _named(actions: Sequence[Action], reason: str) -> Sequence[Action]:
        return tuple(replace(a, rule="local", reason=reason) if isinstance(a, Dispatch) else a for a in actions)

    def _prefill_is_busy(self, event: RequestArrived, view: ClusterView) -> bool:
        limit = self._settings.busy_tokens
        if limit is None:
            return False
        return all(self._prompt_tokens.get(w.worker_id, 0) > limit for w in view.live_for(event.lora, Role.PREFILL))

    def _busy_for(self, event: RequestArrived, view: ClusterView) -> frozenset[WorkerId]:
        """Decode workers that have no room to keep this prompt."""
        share = self._settings.decode_busy_share
        if share is None:
            return NOBODY
        sent, more = self._decode_blocks, self._prompt_blocks(event)
        return frozenset(
            worker.worker_id
            for worker in view.live_for(event.lora, Role.DECODE)
            if worker.up.total_blocks is not None
            and sent.get(worker.worker_id, 0) + more > share * worker.up.total_blocks
        )

    def _prompt_blocks(self, event: RequestArrived) -> int:
        return -(-event.isl // self._decode.settings.block_size)

    # ------------------------------------------------------------ what the legs must learn

    def lose_index(self, view: ClusterView, at_s: float) -> Iterator[Action]:
        """What both legs knew of caches is lost."""
        for router in (self._prefill, self._decode):
            yield from router.lose_index(view, at_s)

    def resume(self, view: ClusterView) -> None:
        """Others had sent requests out before this router was there: where these decode, none is placed again."""
        for request_id, request in view.requests.items():
            if request.worker_id is not None:
                self._decoding[request_id] = (request.worker_id, 0)

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg) -> None:
        """Another router sent a leg of a request there: it counts as if this one had, until its end comes."""
        worker_id = place.worker_id if isinstance(place, RankId) else place
        if leg is Leg.PREFILL:
            self._prefill.peer_sent(event, place, overlap_blocks)
            self._prefilling[event.request_id] = (worker_id, event.isl)
            self._prompt_tokens[worker_id] = self._prompt_tokens.get(worker_id, 0) + event.isl
        else:
            self._decode.peer_sent(event, place, overlap_blocks)
            blocks = self._prompt_blocks(event)
            self._decoding[event.request_id] = (worker_id, blocks)
            self._decode_blocks[worker_id] = self._decode_blocks.get(worker_id, 0) + blocks

    def _leave_prefill(self, event: RequestEvent) -> Sequence[Action]:
        """The prefill leg of a request is over, if it had one; others may take its place."""
        self._prefill.withdraw(event.request_id)
        sent = self._prefilling.pop(event.request_id, None)
        if sent is None:
            return ()
        worker_id, tokens = sent
        if worker_id in self._prompt_tokens:
            self._prompt_tokens[worker_id] -= tokens
        return self._prefill.leg_over(event.request_id, event.at_s)

    def _request_event(self, event: RequestEvent, view: ClusterView) -> Sequence[Action]:
        request_id, ended = event.request_id, type(event) in ENDS
        orders: Sequence[Action] = ()
        if ended or (isinstance(event, RequestInterrupted) and event.kept_on is None):
            orders = self._leave_prefill(event)
        if request_id in self._decoding:
            if isinstance(event, RequestInterrupted):
                self._decode.leg_over(request_id, event.at_s)
            else:
                self._decode.decide(event, view)
            if ended or isinstance(event, RequestInterrupted):
                worker_id, blocks = self._decoding.pop(request_id)
                if worker_id in self._decode_blocks:
                    self._decode_blocks[worker_id] -= blocks
        return orders

    def _worker_event(self, event: WorkerEvent, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, WorkerUp):
            self._roles[event.worker_id] = event.role
        if isinstance(event, BlocksCleared) and event.tier is Tier.G4_REMOTE:
            return self._shared_tier(event, view)
        orders = self._told(event, view)
        if isinstance(event, WorkerLost):
            self._roles.pop(event.worker_id, None)
            self._prompt_tokens.pop(event.worker_id, None)
            self._decode_blocks.pop(event.worker_id, None)
        return orders

    def _told(self, event: WorkerEvent, view: ClusterView) -> Iterable[Action]:
        """Tell the leg whose worker an event is about."""
        router = self._prefill if self._roles.get(event.worker_id) is Role.PREFILL else self._decode
        return router.decide(event, view) if type(event) in router.subscribes else ()

    def _shared_tier(self, event: WorkerEvent, view: ClusterView) -> Iterable[Action]:
        """What lies in a tier that all workers share concerns both legs, whoever reports it."""
        self._decode.decide(event, view)
        return self._sent_to_prefill(self._prefill.decide(event, view), view)


def _begun(event: RequestEvent, view: ClusterView, *, anew: bool) -> RequestArrived:
    """The request of a leg that begins now: `anew`, as if it came now; else as it came, where its router reads no
    time and a copy would be for nothing."""
    arrived = view.requests[event.request_id].arrived
    return replace(arrived, at_s=event.at_s) if anew else arrived


_OWN: frozenset[type[Event]] = frozenset(
    {
        RequestArrived,
        RequestMigrated,
        RequestInterrupted,
        PrefillDone,
        RoomReserved,
        WorkerUp,
        WorkerLost,
        *ENDS,
    }
)


def _learns(*routers: Router | Queued) -> bool:
    """Whether a leg keeps books of its own, so that more events matter than those of the legs."""
    return any(router.subscribes - Router.subscribes for router in routers)
