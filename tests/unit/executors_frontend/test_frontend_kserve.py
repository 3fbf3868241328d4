"""KServe v2 over gRPC: tensors in and out, streams side by side, codes, cancellation."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

pytestmark = pytest.mark.optional
grpc = pytest.importorskip("grpc", reason="gRPC needs grpcio: pip install 'dynatwin[kserve]'")

import kserve_client  # noqa: E402
from frontend_builders import ANSWER, MODEL, Script, ScriptedBackend, Served, ids_of, run, served  # noqa: E402
from kserve_client import TEXT, outputs, stream, unary  # noqa: E402

from executors.frontend.kserve.messages import message  # noqa: E402
from executors.frontend.settings import Settings  # noqa: E402

CODE = grpc.StatusCode


infer_request = partial(kserve_client.infer_request, MODEL)


@asynccontextmanager
async def kserve(backend: ScriptedBackend | None = None) -> AsyncIterator[tuple[Served, Any]]:
    async with (
        served(backend, Settings(kserve_port=0)) as it,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.frontend.ports[-1]}") as channel,
    ):
        yield it, channel


@run
async def test_text_in_gives_text_out() -> None:
    async with kserve() as (it, channel):
        answer = await unary(channel, "ModelInfer")(infer_request(max_tokens=3, seed=4, stop='["seven"]', priority=2))
        (ask,) = it.backend.asks
    assert outputs(answer) == {
        "text_output": b"one two three", "finish_reason": b"length", "prompt_tokens": 2, "completion_tokens": 3,
    }  # fmt: skip
    assert (answer.id, answer.model_name) == ("r1", MODEL)
    assert (ask.max_tokens, ask.sampling.seed, ask.priority) == (3, 4, 2)


@run
async def test_raw_tensors_and_token_ids_are_read() -> None:
    request = message("ModelInferRequest")(model_name=MODEL)
    request.inputs.append(message("Tensor")(name="input_ids", datatype="INT32", shape=[3]))
    request.raw_input_contents.append(struct.pack("<3i", 5, 6, 7))
    raw_text = message("ModelInferRequest")(model_name=MODEL)
    raw_text.inputs.append(message("Tensor")(**TEXT))
    raw_text.raw_input_contents.append(struct.pack("<I", 3) + b"one")
    async with kserve() as (it, channel):
        await unary(channel, "ModelInfer")(request)
        await unary(channel, "ModelInfer")(raw_text)
        assert next(list(ask.token_ids)[-3:] for ask in it.backend.asks) == [5, 6, 7]
        assert len(it.backend.asks[1].token_ids) == 2


@run
async def test_wrong_tensors_and_parameters_are_invalid() -> None:
    def changed(**change: Any) -> Any:
        """The usual request with its text tensor changed."""
        made = infer_request()
        for name, value in change.items():
            if name == "shape":
                made.inputs[0].shape[:] = value
            else:
                setattr(made.inputs[0], name, value)
        return made

    nothing = message("ModelInferRequest")(model_name=MODEL)
    twice = infer_request()
    twice.inputs.append(twice.inputs[0])
    bad = [
        *(infer_request(streaming=True), infer_request(frobnicate=1), infer_request(max_tokens=0), nothing, twice),
        *(infer_request(stop="x"), infer_request(temperature=9.0)),
        *(changed(shape=[2]), changed(datatype="FP32"), changed(name="text")),
    ]
    async with kserve() as (it, channel):
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unary(channel, "ModelInfer")(request)
            assert caught.value.code() is CODE.INVALID_ARGUMENT, request
        assert it.backend.asks == []


@run
async def test_errors_have_the_codes_of_their_class() -> None:
    ends = {
        ("rejected", "all_busy"): CODE.RESOURCE_EXHAUSTED,
        ("rejected", "no_endpoints"): CODE.UNAVAILABLE,
        ("failed", "response_timeout"): CODE.DEADLINE_EXCEEDED,
        ("failed", "odd"): CODE.INTERNAL,
    }
    async with kserve() as (it, channel):
        for (outcome, code), expected in ends.items():
            it.backend.script = Script(outcome=outcome, code=code)  # type: ignore[arg-type]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unary(channel, "ModelInfer")(infer_request())
            assert caught.value.code() is expected
        unknown = infer_request()
        unknown.model_name = "huge"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "ModelInfer")(unknown)
        assert caught.value.code() is CODE.NOT_FOUND


@run
async def test_a_stream_answers_side_by_side_and_outlives_an_error() -> None:
    async with kserve() as (_, channel):
        call = stream(channel)
        await call.write(infer_request(streaming=True, request_id="a", max_tokens=2))
        await call.write(infer_request(streaming=True, request_id="b", frobnicate=1))
        await call.write(infer_request(request_id="c", max_tokens=3))
        await call.done_writing()
        told: dict[str, list[Any]] = {}
        async for answer in call:
            told.setdefault(answer.infer_response.id, []).append(answer)
    parts = [outputs(one.infer_response) for one in told["a"]]
    assert [part["text_output"] for part in parts] == [b"one", b" two", b""]
    assert parts[-1]["completion_tokens"] == 2
    finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in told["a"]]
    assert finals == [False, False, True]
    assert "frobnicate" in told["b"][0].error_message
    assert [outputs(one.infer_response)["text_output"] for one in told["c"]] == [b"one two three"]


@run
async def test_a_cancelled_or_late_rpc_cancels_the_request() -> None:
    never = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={1: never}))
    async with kserve(backend) as (it, channel):
        call = unary(channel, "ModelInfer")(infer_request())
        await backend.arrived.wait()
        call.cancel()
        await backend.answers[0].told.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "ModelInfer")(infer_request(), timeout=1.0)
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        await backend.answers[1].told.wait()
        streamed = stream(channel)
        await streamed.write(infer_request(streaming=True))
        await streamed.read()
        streamed.cancel()
        await backend.answers[2].told.wait()
        await it.frontend.services.open.idle()
        samples = await it.metrics()
    assert samples['dynamo_frontend_active_requests{model="tiny"}'] == 0
    assert samples['dynamo_frontend_model_cancellation_total{model="tiny"}'] == 3


@run
async def test_what_is_there_can_be_asked() -> None:
    async with kserve() as (it, channel):
        assert (await unary(channel, "ServerLive")(message("ServerLiveRequest")())).live
        assert (await unary(channel, "ServerReady")(message("ServerReadyRequest")())).ready
        assert (await unary(channel, "ServerMetadata")(message("ServerMetadataRequest")())).name == "dynatwin"
        described = await unary(channel, "ModelMetadata")(message("ModelMetadataRequest")(name=MODEL))
        assert [one.name for one in described.inputs] == ["text_input", "input_ids", "streaming"]
        it.backend.gone("workers of tiny: 0 of 1")
        assert not (await unary(channel, "ModelReady")(message("ModelReadyRequest")(name=MODEL))).ready
        assert not (await unary(channel, "ServerReady")(message("ServerReadyRequest")())).ready
