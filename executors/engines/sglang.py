"""SGLang behind its own `/generate`: token ids in and out, split serving by a meeting point that both legs are given.

Written against 0.5.23. Chunks hold all tokens so far, or only the new ones, by how the server was started: the count of
tokens tells which are new. A prefill whose partner never comes waits for minutes, so its deadline is ours. `/health`
makes the engine answer a request of one token and is the only sign that it really works.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

from executors.deadlines import USUAL, Deadlines
from executors.engines.completions import sampling_body
from executors.engines.kv_books import KvBooks
from executors.engines.kv_follow import KvSource, KvStreams
from executors.engines.protocol import Ability, Facts, LegFailed, LegRequest, Load, Logprob, Moves, Piece, Sampling
from executors.engines.remote import Attached, Now, Remote
from policies.cluster.events import Event
from policies.cluster.ids import Leg, RankId, WorkerId
from policies.errors import CapabilityError, EngineError

_ROOMS = 2**63
"""Meeting points are numbers below this."""
_ENDS_WELL = ("stop", "length")
_NOT_SAMPLING = ("logprobs", "seed")
"""Fields that SGLang has elsewhere, or by another name."""


class Sglang(Remote):
    """One SGLang server."""

    kind = "sglang"
    moves = Moves.TOGETHER
    abilities: Final = frozenset(
        {
            Ability.ABORT,
            Ability.DRAIN,
            Ability.REPLAY,
            Ability.SPLIT,
            Ability.TIERS,
            Ability.LOGPROBS,
            Ability.GRAMMAR,
        }
    )

    def __init__(self, at: Attached, deadlines: Deadlines = USUAL, now: Now = None) -> None:
        super().__init__(at, deadlines, now)
        self._server: Mapping[str, Any] = {}
        self._followed: KvStreams | None = None

    # ------------------------------------------------------------ legs

    def meeting_point(self) -> Mapping[str, object]:
        port = self._server.get("disaggregation_bootstrap_port")
        if port is None:
            raise CapabilityError(f"{self.name} is no prefill worker: it has no disaggregation_bootstrap_port")
        return {
            "bootstrap_host": urlsplit(self.at.url).hostname,
            "bootstrap_port": port,
            "bootstrap_room": secrets.randbelow(_ROOMS),
        }

    async def pieces(self, request: LegRequest) -> AsyncGenerator[Piece]:
        async with aclosing(self.events("/generate", self._body(request), {})) as events:
            async for piece in self._read(events, with_logprobs=request.sampling.logprobs is not None):
                if request.leg is not Leg.PREFILL:
                    yield piece
                elif piece.finish is not None:
                    yield Piece(prefilled=True, cached_tokens=piece.cached_tokens)

    def _body(self, request: LegRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": request.leg_id,
            "input_ids": list(request.token_ids),
            "sampling_params": self._sampling(request.sampling) | {"max_new_tokens": request.max_tokens},
            "stream": True,
            **request.handoff,
        }
        if request.sampling.logprobs is not None and request.leg is not Leg.PREFILL:
            body |= {"return_logprob": True, "top_logprobs_num": request.sampling.logprobs}
        if request.lora is not None:
            body["lora_path"] = request.lora
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if request.dp_rank is not None:
            body["routed_dp_rank"] = request.dp_rank
        return body

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        body = sampling_body(sampling, min_tokens="min_new_tokens")
        body = {name: value for name, value in body.items() if name not in _NOT_SAMPLING}
        if sampling.seed is not None:
            body["sampling_seed"] = sampling.seed
        for kind, grammar in sampling.grammar.items():
            body |= self._grammar(kind, grammar)
        return body

    def _grammar(self, kind: str, grammar: Any) -> dict[str, str]:
        match kind:
            case "json_schema":
                return {"json_schema": grammar if isinstance(grammar, str) else json.dumps(grammar)}
            case "regex":
                return {"regex": grammar}
            case "choice":
                return {"regex": "(" + "|".join(map(re.escape, grammar)) + ")"}
            case "grammar":
                return {"ebnf": grammar}
        raise self.refused(f"has no grammar of kind {kind}; it has json_schema, regex, choice and grammar")

    async def _read(self, events: AsyncIterator[Mapping[str, Any]], *, with_logprobs: bool) -> AsyncIterator[Piece]:
        done = 0
        async for chunk in events:
            told = chunk.get("meta_info") or {}
            finish = told.get("finish_reason") or {}
            kind = finish.get("type")
            if kind not in (None, *_ENDS_WELL):
                raise self._ended_with(finish)
            new = told.get("completion_tokens", 0) - done
            done += max(new, 0)
            tokens = tuple((chunk.get("output_ids") or ())[-new:]) if new > 0 else ()
            if tokens or kind:
                yield Piece(
                    token_ids=tokens,
                    finish=kind,
                    cached_tokens=told.get("cached_tokens") if kind else None,
                    logprobs=_logprobs(told, new) if with_logprobs and tokens else (),
                )

    def _ended_with(self, finish: Mapping[str, Any]) -> LegFailed:
        status = finish.get("status_code")
        if isinstance(status, int):
            return self._refusal(status, str(finish.get("message", "")))
        return self.ended(finish.get("type"), finish.get("message") or "")

    async def abort(self, leg_id: str) -> None:
        await self._ask("POST", "/abort_request", {"rid": leg_id})

    # ------------------------------------------------------------ what it says of itself

    async def read_facts(self) -> Facts:
        told = self._server = await self.get_json("/server_info")
        models = (await self.get_json("/v1/models"))["data"]
        try:
            layout = (told["version"], told["model_path"], told["page_size"], told.get("kv_cache_dtype"))
            page, tokens = int(told["page_size"]), int(told["max_total_num_tokens"])
            return Facts(
                engine=self.kind,
                version=told["version"],
                role=self.at.role,
                models=(told["served_model_name"],),
                block_size=page,
                total_blocks=tokens // page,
                max_batched_tokens=self.at.max_batched_tokens or told.get("chunked_prefill_size"),
                max_num_seqs=self.at.max_num_seqs or int(_running(told)),
                context_tokens=models[0].get("max_model_len") or told["context_length"],
                dp_ranks=told.get("dp_size") or 1,
                gpus=self.at.gpus,
                on_cpu=self.at.on_cpu,
                loras=tuple(told.get("lora_paths") or ()),
                compatibility="/".join(map(str, layout)),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.name}: /server_info does not tell what is needed ({error!r})") from error

    async def read_load(self) -> Load | None:
        """Read from `/v1/loads`, which asks the scheduler itself: it is of now."""
        told = (await self.get_json("/v1/loads")).get("loads")
        if not told:
            return None
        page = self.facts.block_size if self.facts is not None else 1
        used = sum(int(rank["num_used_tokens"]) for rank in told)
        held = self._followed.device_blocks if self._followed is not None else 0
        active = -(-used // page)
        return Load(
            measured_s=self.now(),
            running=sum(int(rank["num_running_reqs"]) for rank in told),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in told),
            active_blocks=active,
            cached_blocks=max(0, held - active),
        )

    # ------------------------------------------------------------ its blocks

    def follow(self, worker_id: WorkerId, epoch: int, post: Callable[[Event], None]) -> KvStreams | None:
        assert self.facts is not None, "ready comes first"
        told = self._server.get("kv_events")
        if not told:
            return None
        host = urlsplit(self.at.url).hostname
        first, again = told["endpoint_port_base"], told.get("replay_endpoint_port_base")
        sources = {
            rank: KvSource(
                endpoint=f"tcp://{host}:{first + rank}",
                replay=f"tcp://{host}:{again + rank}" if again is not None else None,
                topic=told.get("topic") or "",
            )
            for rank in range(told.get("dp_size") or 1)
        }
        size = told.get("block_size") or self.facts.block_size
        books = [KvBooks(RankId(worker_id, rank), epoch, size) for rank in sources]
        self._followed = KvStreams(sources, books, post, self.now)
        return self._followed

    async def close(self) -> None:
        if self._followed is not None:
            await self._followed.close()
        await super().close()


def _logprobs(told: Mapping[str, Any], new: int) -> tuple[Logprob, ...]:
    """Of the last `new` tokens: [logarithm, token id, text], of the token and of its alternatives."""
    made: Sequence[Any] = (told.get("output_token_logprobs") or ())[-new:]
    tops: Sequence[Any] = (told.get("output_top_logprobs") or ())[-new:] or [()] * len(made)
    return tuple(
        Logprob(token_id=token, logprob=value, top=tuple((one[1], one[0]) for one in top or ()))
        for (value, token, *_), top in zip(made, tops, strict=True)
    )


def _running(told: Mapping[str, Any]) -> Any:
    """Requests that run at once: as they were asked for, or as the scheduler made them out."""
    if told.get("max_running_requests"):
        return told["max_running_requests"]
    return told["internal_states"][0]["effective_max_running_requests_per_dp"]
