"""vLLM behind its OpenAI server: token ids over `/v1/completions`, split serving by `kv_transfer_params`.

Written against 0.32. An abort takes the id that vLLM makes of ours, `cmpl-OURS-0`, and is answered 200 whatever id is
given; the server needs `--enable-scale-out` for it. Gauges move only when the engine steps, so a reading is as old as
the last step. The parameters of a hand-off are passed on untouched; how long they hold is the caller's to watch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

from executors.deadlines import USUAL, Deadlines
from executors.engines.completions import (
    cached_tokens,
    completion_body,
    prefill_body,
    read_prefill,
    read_stream,
)
from executors.engines.kv_books import KvBooks
from executors.engines.kv_follow import KvSource, KvStreams
from executors.engines.metrics import Page
from executors.engines.protocol import Ability, Facts, LegFailed, LegRequest, Load, Moves, Piece
from executors.engines.remote import Attached, Now, Remote
from policies.cluster.events import Event
from policies.cluster.ids import Leg, LossCause, RankId, Role, WorkerId
from policies.errors import EngineError

_LATE = "vllm:nixl_num_notifications_after_expiry_total"
_COMPLETIONS = "/v1/completions"
_ABORT = "/inference/v1/abort_requests"
_CACHE = "vllm:cache_config_info"
_NULL_BLOCKS = 1
"""Blocks of a pool that hold nothing ever."""

_GRAMMARS: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_ALWAYS: Final = frozenset({Ability.DRAIN, Ability.TIERS, Ability.LOGPROBS, Ability.GRAMMAR})


class Vllm(Remote):
    """One vLLM server."""

    kind = "vllm"
    moves = Moves.AFTER

    def __init__(self, at: Attached, deadlines: Deadlines = USUAL, now: Now = None) -> None:
        super().__init__(at, deadlines, now)
        self._aborts = False
        self._steps: float | None = None
        self._stepped_s = 0.0
        self._sources: Mapping[int, KvSource] = {}
        self._followed: KvStreams | None = None

    @property
    def abilities(self) -> frozenset[Ability]:
        found = {
            Ability.ABORT: self._aborts,
            Ability.SPLIT: self.at.role is not Role.MIXED,
            Ability.REPLAY: bool(self._sources) and all(one.replay for one in self._sources.values()),
        }
        return _ALWAYS | {ability for ability, has in found.items() if has}

    # ------------------------------------------------------------ legs

    async def pieces(self, request: LegRequest) -> AsyncGenerator[Piece]:
        body, headers = self._body(request), self._headers(request)
        if request.leg is Leg.PREFILL:
            yield await self._prefill(body, headers)
            return
        if request.handoff:
            body["kv_transfer_params"] = dict(request.handoff)
        async with aclosing(self.events(_COMPLETIONS, body, headers)) as events:
            async for piece in read_stream(events, self.ended, request.sampling.logprobs is not None):
                yield piece

    async def _prefill(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Piece:
        wanted = prefill_body(body) | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        answer = await self.answer(_COMPLETIONS, wanted, headers)
        read_prefill(answer, self.ended)
        handoff = answer.get("kv_transfer_params")
        if not handoff:
            raise LegFailed(
                LossCause.ENGINE_ERROR, f"{self.at.name}: no kv_transfer_params; was it started with a connector?"
            )
        cached = cached_tokens(answer)
        return Piece(
            handoff=handoff,
            prefilled=True,
            cached_tokens=cached if cached is not None else handoff.get("remote_prefill_cached_tokens"),
        )

    def _body(self, request: LegRequest) -> dict[str, Any]:
        assert self.facts is not None, "ready comes first"
        body = completion_body(request, self.facts.models[0]) | {"return_token_ids": True}
        if request.sampling.logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.sampling.grammar:
            body["structured_outputs"] = self._grammar(request.sampling.grammar)
        return body

    def _grammar(self, grammar: Mapping[str, object]) -> dict[str, object]:
        if not grammar.keys() <= _GRAMMARS.keys():
            raise self.refused(f"has no grammar of kind {', '.join(grammar)}; it has {', '.join(_GRAMMARS)}")
        return {_GRAMMARS[kind]: value for kind, value in grammar.items()}

    def _headers(self, request: LegRequest) -> dict[str, str]:
        headers = {"X-Request-Id": request.leg_id}
        if request.dp_rank is not None:
            headers["X-data-parallel-rank"] = str(request.dp_rank)
        return headers

    async def abort(self, leg_id: str) -> None:
        if self._aborts:
            await self.post_json(_ABORT, {"request_ids": [f"cmpl-{leg_id}-0"]})

    # ------------------------------------------------------------ what it says of itself

    async def read_facts(self) -> Facts:
        version = (await self.get_json("/version"))["version"]
        models = (await self.get_json("/v1/models"))["data"]
        plain = [model for model in models if not model.get("parent")]
        page = Page(await self.get("/metrics"))
        pools = page.all(_CACHE)
        if not plain or not pools:
            raise EngineError(f"{self.name}: /v1/models or {_CACHE} of /metrics is empty; are metrics switched off?")
        self._aborts = await self._takes_aborts()
        seqs, tokens = await self._sizes()
        events = (await self.get_json("/kv_event_sources")).items()
        self._sources = {int(rank): self._source(one) for rank, one in events if one.get("enable_kv_cache_events")}
        labels = pools[0].labels
        return Facts(
            engine=self.kind,
            version=version,
            role=self.at.role,
            models=tuple(model["id"] for model in plain),
            block_size=int(labels["block_size"]),
            total_blocks=int(labels["num_gpu_blocks"]) - _NULL_BLOCKS,
            max_batched_tokens=tokens,
            max_num_seqs=seqs,
            context_tokens=plain[0]["max_model_len"],
            dp_ranks=len(pools),
            gpus=self.at.gpus,
            on_cpu=self.at.on_cpu,
            loras=tuple(model["id"] for model in models if model.get("parent")),
            compatibility="/".join((version, plain[0]["root"], labels["block_size"], labels["cache_dtype"])),
        )

    async def _takes_aborts(self) -> bool:
        """Whether the route for aborts is there; an abort of nothing harms nobody."""
        try:
            await self.post_json(_ABORT, {"request_ids": []})
        except EngineError:
            return False
        return True

    async def _sizes(self) -> tuple[int, int | None]:
        """Sequences and tokens of a step at most: as it was started, or as a server in development mode tells."""
        if self.at.max_num_seqs is not None:
            return self.at.max_num_seqs, self.at.max_batched_tokens
        try:
            told = (await self.get_json("/server_info?config_format=json"))["vllm_config"]["scheduler_config"]
        except EngineError as error:
            raise EngineError(
                f"{self.name} does not tell how many requests it runs at once ({error}); give max_num_seqs with its URL"
            ) from error
        return told["max_num_seqs"], told["max_num_batched_tokens"]

    async def read_load(self) -> Load | None:
        page = Page(await self.get("/metrics"))
        running, waiting = page.total("vllm:num_requests_running"), page.total("vllm:num_requests_waiting")
        if running is None or waiting is None:
            return None
        blocks = {pool.labels.get("engine"): int(pool.labels["num_gpu_blocks"]) for pool in page.all(_CACHE)}
        used = page.all("vllm:kv_cache_usage_perc")
        active = round(sum(one.value * blocks.get(one.labels.get("engine"), 0) for one in used))
        held = self._followed.device_blocks if self._followed is not None else 0
        return Load(
            measured_s=self._measured_s(page),
            running=int(running),
            waiting=int(waiting),
            active_blocks=active,
            cached_blocks=max(0, held - active),
            late_fetches=int(page.total(_LATE) or 0),
        )

    def _measured_s(self, page: Page) -> float:
        """When the engine stepped last, as far as readings tell: the gauges are of that time."""
        steps = page.total("vllm:iteration_tokens_total_count")
        if self._steps is None or steps != self._steps:
            self._steps, self._stepped_s = steps, self.now()
        return self._stepped_s

    # ------------------------------------------------------------ its blocks

    def follow(self, worker_id: WorkerId, epoch: int, post: Callable[[Event], None]) -> KvStreams | None:
        assert self.facts is not None, "ready comes first"
        if not self._sources:
            return None
        books = [KvBooks(RankId(worker_id, rank), epoch, self.facts.block_size) for rank in self._sources]
        self._followed = KvStreams(self._sources, books, post, self.now)
        return self._followed

    def _source(self, told: Mapping[str, Any]) -> KvSource:
        """Where to listen: vLLM binds wildcards and ipc, and connects to any other endpoint, which is ours to bind."""
        host = urlsplit(self.at.url).hostname or ""
        endpoint, replay = told["endpoint"], told.get("replay_endpoint")
        theirs = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        return KvSource(
            endpoint=endpoint.replace("*", host),
            replay=replay.replace("*", host) if replay else None,
            topic=told.get("topic") or "",
            bind=not theirs,
        )

    async def close(self) -> None:
        if self._followed is not None:
            await self._followed.close()
        await super().close()
