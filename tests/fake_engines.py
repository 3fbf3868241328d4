"""Small servers that speak as vLLM, SGLang and TensorRT-LLM do, on loopback, and misbehave on request.

They answer with the tokens 500, 501, ...; what they were asked, and who was aborted or left, is there to be looked at.
`does` says how a leg goes: "answer", or one of `MISDEEDS`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

MISDEEDS = ("busy", "refuse", "crash", "abort", "stall", "hang", "cut", "endless", "error", "babble")
"""503; 400; 500; one token, then an end by "abort"; one token, then nothing; nothing at all; one token, then the
connection is closed; no reason to end; an error inside the stream; what is no JSON."""

_STATUS = {"busy": 503, "refuse": 400, "crash": 500}
FIRST_TOKEN = 500
CACHED = 32


class FakeEngine:
    """One server; `async with` it. Port 0: any."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listen = (host, port)
        self.does = "answer"
        self.health = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.aborted: list[str] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/v1/models", self._models)

    async def __aenter__(self) -> FakeEngine:
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._listen)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------ what kinds fill in

    def chunks(self, body: Mapping[str, Any]) -> list[Any]:
        """The events of a good answer, the last but the end mark ends it."""
        raise NotImplementedError

    def whole(self, body: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def aborted_chunk(self) -> Any:
        raise NotImplementedError

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 4096}]

    # ------------------------------------------------------------ routes

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.models()})

    async def leg(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.asked.set()
        if self.does in _STATUS:
            error = {"error": {"message": f"no, {self.does}", "code": _STATUS[self.does]}}
            return web.json_response(error, status=_STATUS[self.does])
        try:
            if self.does == "hang":
                await asyncio.Event().wait()
            return await (self._stream(request, body) if body.get("stream") else self._answer(body))
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _answer(self, body: Mapping[str, Any]) -> web.Response:
        return web.json_response(self.whole(body))

    async def _stream(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunks = self.chunks(body)
        match self.does:
            case "abort":
                chunks = [chunks[0], self.aborted_chunk()]
            case "error":
                chunks = [chunks[0], {"error": {"message": "the KV did not come", "code": 500}}]
            case "stall" | "cut" | "endless" | "babble":
                chunks = chunks[:1]
        for chunk in chunks:
            await response.write(b": still there\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")
        if self.does == "stall":
            await asyncio.Event().wait()
        if self.does == "cut":
            assert request.transport is not None
            request.transport.abort()
        await response.write(b"data: {\n\n" if self.does == "babble" else b"data: [DONE]\n\n")
        return response


def tokens_of(body: Mapping[str, Any], key: str = "max_tokens") -> list[int]:
    return [FIRST_TOKEN + n for n in range(body[key])]


class FakeVllm(FakeEngine):
    """0.32, as far as it is used. `sources` is what `/kv_event_sources` tells; `aborts` is `--enable-scale-out`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host, port)
        self.aborts = True
        self.sources: dict[str, Any] = {}
        self.running, self.waiting, self.usage, self.steps, self.late = 0, 0, 0.0, 0, 0
        add = self.app.router
        add.add_post("/v1/completions", self.leg)
        add.add_post("/inference/v1/abort_requests", self._abort)
        add.add_get("/version", self._version)
        add.add_get("/metrics", self._metrics)
        add.add_get("/kv_event_sources", self._sources)

    def models(self) -> list[dict[str, Any]]:
        return [*super().models(), {"id": "poems", "root": "/loras/poems", "parent": "tiny", "max_model_len": 4096}]

    def chunks(self, body: Mapping[str, Any]) -> list[Any]:
        tokens = tokens_of(body)
        chunks: list[Any] = [
            {"choices": [self._choice(body, token, "length" if token == tokens[-1] else None)]} for token in tokens
        ]
        return [*chunks, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": CACHED}}}]

    def _choice(self, body: Mapping[str, Any], token: int, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "x", "token_ids": [token], "finish_reason": finish}
        if body.get("logprobs") is not None:
            tops = {f"token_id:{token}": -0.5, "token_id:9": -1.5}
            told = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [tops]}
            choice["logprobs"] = told
        return choice

    def aborted_chunk(self) -> Any:
        return {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}]}

    def whole(self, body: Mapping[str, Any]) -> Any:
        if self.does == "endless":
            return {"choices": []}
        finish = "abort" if self.does == "abort" else "length"
        answer: dict[str, Any] = {"choices": [{"token_ids": [FIRST_TOKEN], "finish_reason": finish}]}
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 1}
        return answer | {"usage": {"prompt_tokens_details": {"cached_tokens": CACHED}}}

    async def _abort(self, request: web.Request) -> web.Response:
        if not self.aborts:
            return web.json_response({"error": "scale out is off"}, status=403)
        self.aborted += (await request.json())["request_ids"]
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _sources(self, _: web.Request) -> web.Response:
        return web.json_response(self.sources)

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {self.running}',
            f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {self.waiting}',
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {self.usage}',
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="tiny"}} {self.steps}',
            f'vllm:nixl_num_notifications_after_expiry_total{{engine="0",model_name="tiny"}} {self.late}.0',
            'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="101"} 1.0',
        ]
        return web.Response(text="\n".join(lines))


class FakeSglang(FakeEngine):
    """0.5.23, as far as it is used; chunks hold all tokens so far unless `incremental`."""

    def __init__(self, *, incremental: bool = False) -> None:
        super().__init__()
        self.incremental = incremental
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "model_path": "/models/tiny",
            "served_model_name": "tiny",
            "page_size": 32,
            "max_total_num_tokens": 3200,
            "max_running_requests": 16,
            "chunked_prefill_size": 1024,
            "dp_size": 1,
            "disaggregation_bootstrap_port": 8998,
        }
        add = self.app.router
        add.add_post("/generate", self.leg)
        add.add_post("/abort_request", self._abort)
        add.add_get("/server_info", self._info)
        add.add_get("/v1/loads", self._loads)

    def chunks(self, body: Mapping[str, Any]) -> list[Any]:
        tokens = tokens_of(body["sampling_params"], "max_new_tokens")
        return [self._chunk(tokens[: n + 1], n + 1 == len(tokens)) for n in range(len(tokens))]

    def _chunk(self, tokens: list[int], last: bool) -> dict[str, Any]:
        shown = tokens[-1:] if self.incremental else tokens
        told: dict[str, Any] = {
            "completion_tokens": len(tokens),
            "cached_tokens": CACHED,
            "finish_reason": {"type": "length", "length": len(tokens)} if last else None,
            "output_token_logprobs": [[-0.5, token, None] for token in shown],
            "output_top_logprobs": [[[-0.5, token, None], [-1.5, 9, None]] for token in shown],
        }
        return {"text": "x", "output_ids": shown, "meta_info": told}

    def aborted_chunk(self) -> Any:
        return {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "going"}}}

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _loads(self, _: web.Request) -> web.Response:
        rank = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 70}
        return web.json_response({"loads": [rank]})


class FakeTrtllm(FakeEngine):
    """1.2.1, as far as it is used; it refuses fields that it does not know."""

    KNOWN = frozenset(
        [
            "model",
            "prompt",
            "max_tokens",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "seed",
            "logprobs",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "stop_token_ids",
            "ignore_eos",
            "min_tokens",
            "detokenize",
            "response_format",
            "disaggregated_params",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.iterations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        add = self.app.router
        add.add_post("/v1/completions", self.leg)
        add.add_post("/kv_cache_events", self._events)
        add.add_get("/version", self._version)
        add.add_get("/metrics", self._metrics)

    async def leg(self, request: web.Request) -> web.StreamResponse:
        strange = (await request.json()).keys() - self.KNOWN
        if strange:
            return web.json_response({"message": f"extra fields {sorted(strange)}"}, status=400)
        return await super().leg(request)

    def chunks(self, body: Mapping[str, Any]) -> list[Any]:
        tokens = tokens_of(body)
        chunks: list[Any] = [
            {"choices": [{"token_ids": [token], "finish_reason": "length" if token == tokens[-1] else None}]}
            for token in tokens
        ]
        return [*chunks, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": CACHED}}}]

    def aborted_chunk(self) -> Any:
        return {"choices": [{"token_ids": [], "finish_reason": "cancelled"}]}

    def whole(self, body: Mapping[str, Any]) -> Any:
        params = {**body["disaggregated_params"], "ctx_request_id": 7, "first_gen_tokens": [FIRST_TOKEN]}
        return {"choices": [{"finish_reason": "length", "disaggregated_params": params}]}

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.1"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.json_response(self.iterations)

    async def _events(self, _: web.Request) -> web.Response:
        events, self.events = self.events, []
        return web.json_response(events)
