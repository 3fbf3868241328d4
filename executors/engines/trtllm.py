"""TensorRT-LLM behind `trtllm-serve`: token ids over `/v1/completions`, split serving by `disaggregated_params`.

Written against the interface of 1.2.1, which is published without an engine that could be run here: tested against a
server of our own that speaks it. It has no route for aborts, a closed connection is noticed within about a second, and
it refuses fields that it does not know.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from executors.deadlines import USUAL, Deadlines
from executors.engines.completions import cached_tokens, completion_body, prefill_body, read_prefill, read_stream
from executors.engines.kv_books import KvBooks
from executors.engines.kv_drain import KvDrain
from executors.engines.protocol import Ability, Facts, LegFailed, LegRequest, Load, Moves, Piece
from executors.engines.remote import Attached, Now, Remote
from policies.cluster.events import Event
from policies.cluster.ids import Leg, LossCause, RankId, WorkerId
from policies.errors import EngineError
from policies.frozen import frozen

_COMPLETIONS = "/v1/completions"
_GRAMMARS: Final = {
    "json_schema": ("json_schema", "json_schema"),
    "regex": ("regex", "regex"),
    "grammar": ("ebnf", "ebnf"),
}
"""Type and field of `response_format` for each kind of grammar."""


@frozen
class Started:
    """What a server of TensorRT-LLM was started with, and does not say: `block_size` and `context_tokens` in tokens,
    its ranks, and whether it keeps KV events."""

    block_size: int
    context_tokens: int
    dp_ranks: int = 1
    kv_events: bool = True


class Trtllm(Remote):
    """One server of TensorRT-LLM."""

    kind = "trtllm"
    moves = Moves.AFTER
    abilities: Final = frozenset({Ability.SPLIT, Ability.TIERS, Ability.GRAMMAR})

    def __init__(self, at: Attached, started: Started, deadlines: Deadlines = USUAL, now: Now = None) -> None:
        super().__init__(at, deadlines, now)
        self.started = started
        self._followed: KvDrain | None = None

    # ------------------------------------------------------------ legs

    async def pieces(self, request: LegRequest) -> AsyncGenerator[Piece]:
        body = self._body(request)
        if request.leg is Leg.PREFILL:
            yield await self._prefill(body)
            return
        if request.handoff:
            body["disaggregated_params"] = dict(request.handoff) | {"request_type": "generation_only"}
        async with aclosing(self.events(_COMPLETIONS, body, {})) as events:
            async for piece in read_stream(events, self.ended, logprobs=False):
                yield piece

    async def _prefill(self, body: Mapping[str, Any]) -> Piece:
        wanted = prefill_body(body) | {"disaggregated_params": {"request_type": "context_only"}}
        answer = await self.answer(_COMPLETIONS, wanted, {})
        handoff = read_prefill(answer, self.ended).get("disaggregated_params")
        if not handoff:
            raise LegFailed(
                LossCause.ENGINE_ERROR,
                f"{self.at.name}: no disaggregated_params; was it started with cache_transceiver_config?",
            )
        return Piece(handoff=handoff, prefilled=True, cached_tokens=cached_tokens(answer))

    def _body(self, request: LegRequest) -> dict[str, Any]:
        assert self.facts is not None, "ready comes first"
        if request.lora is not None or request.cache_salt is not None or request.dp_rank is not None:
            raise self.refused("takes no adapters, cache salts or ranks from here")
        body = completion_body(request, self.facts.models[0]) | {"detokenize": False}
        for kind, grammar in request.sampling.grammar.items():
            if kind not in _GRAMMARS:
                raise self.refused(f"has no grammar of kind {kind}; it has {', '.join(_GRAMMARS)}")
            name, field = _GRAMMARS[kind]
            body["response_format"] = {"type": name, field: grammar}
        return body

    # ------------------------------------------------------------ what it says of itself

    async def read_facts(self) -> Facts:
        if self.at.max_num_seqs is None:
            raise EngineError(f"{self.name} does not tell how many requests it runs at once; give max_num_seqs")
        version = (await self.get_json("/version"))["version"]
        models = (await self.get_json("/v1/models"))["data"]
        return Facts(
            engine=self.kind,
            version=version,
            role=self.at.role,
            models=tuple(model["id"] for model in models),
            block_size=self.started.block_size,
            total_blocks=None,
            max_batched_tokens=self.at.max_batched_tokens,
            max_num_seqs=self.at.max_num_seqs,
            context_tokens=self.started.context_tokens,
            dp_ranks=self.started.dp_ranks,
            gpus=self.at.gpus,
            on_cpu=self.at.on_cpu,
            loras=(),
            compatibility="/".join((version, models[0]["id"], str(self.started.block_size))),
        )

    async def read_load(self) -> Load | None:
        """The last iteration of `/metrics`, a JSON list that each reading empties; None where none came since."""
        told = await self.get_json("/metrics")
        if not told:
            return None
        last = told[-1]
        active = int((last.get("kvCacheStats") or {}).get("usedNumBlocks", 0))
        held = self._followed.device_blocks if self._followed is not None else 0
        return Load(
            measured_s=self.now(),
            running=int(last["numActiveRequests"]),
            waiting=int(last["numQueuedRequests"]),
            active_blocks=active,
            cached_blocks=max(0, held - active),
        )

    # ------------------------------------------------------------ its blocks

    def follow(self, worker_id: WorkerId, epoch: int, post: Callable[[Event], None]) -> KvDrain | None:
        if not self.started.kv_events:
            return None
        size = self.started.block_size
        books = [KvBooks(RankId(worker_id, rank), epoch, size) for rank in range(self.started.dp_ranks)]
        self._followed = KvDrain(lambda: self.post_json("/kv_cache_events", {}), books, post, self.now)
        return self._followed

    async def close(self) -> None:
        if self._followed is not None:
            await self._followed.close()
        await super().close()
