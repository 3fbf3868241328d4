"""Clients that leave, read slowly or set deadlines: the work stops, and nothing is left counted as open."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from dataclasses import replace

import pytest
from frontend_builders import (
    ANSWER,
    FAST,
    Script,
    ScriptedBackend,
    Served,
    block_encoding,
    chat,
    frames,
    ids_of,
    run,
    served,
)

from executors.frontend.settings import Settings

CHAT = "/v1/chat/completions"
OPEN = ("active_requests", "inflight_requests", "queued_requests")


def request(body: dict[str, object], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


async def all_closed(it: Served) -> dict[str, float]:
    """Metrics once nothing is open any more."""
    await it.frontend.services.open.idle()
    samples = await it.metrics()
    assert all(samples[f'dynamo_frontend_{name}{{model="tiny"}}'] == 0 for name in OPEN)
    return samples


def reset(writer: asyncio.StreamWriter) -> None:
    """Leave as a client does that is killed."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("made", [0, 2])
def test_who_leaves_before_or_during_the_answer_stops_the_engine(stream: bool, how: str, made: int) -> None:
    @run
    async def one() -> None:
        never = asyncio.Event()
        backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={made: never}))
        async with served(backend) as it:
            reader, writer = await it.raw(request(chat(stream=stream)))
            await backend.arrived.wait()
            if stream and made:
                await reader.readuntil(b" two")
            if how == "reset":
                reset(writer)
            else:
                writer.close()
            (answer,) = backend.answers
            await answer.told.wait()
            samples = await all_closed(it)
        assert answer.made == made
        assert samples["dynamo_frontend_disconnected_clients"] == 1
        assert samples['dynamo_frontend_model_cancellation_total{model="tiny"}'] == 1
        kind = "stream" if stream else "unary"
        labels = f'endpoint="chat_completions",error_type="cancelled",model="tiny",request_type="{kind}",status="error"'
        assert samples[f"dynamo_frontend_requests_total{{{labels}}}"] == 1
        assert 'dynamo_frontend_time_to_first_token_seconds_count{model="tiny"}' not in samples

    one()


@run
async def test_who_leaves_while_its_prompt_is_encoded_reaches_no_engine() -> None:
    async with served() as it:
        free = block_encoding(it)
        _reader, writer = await it.raw(request(chat()))
        while not it.frontend.services.open.count:
            await asyncio.sleep(0)
        writer.close()
        await it.frontend.services.open.idle()
        free.set()
        assert it.backend.asks == []
        samples = await it.metrics()
        assert samples["dynamo_frontend_disconnected_clients"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_only_stops_sending_is_served(stream: bool) -> None:
    @run
    async def one() -> None:
        hold = asyncio.Event()
        backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={1: hold}))
        async with served(backend) as it:
            reader, writer = await it.raw(request(chat(stream=stream), "connection: close"))
            await backend.arrived.wait()
            writer.write_eof()
            if stream:
                await reader.readuntil(b"one")
            else:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            hold.set()
            text = (await reader.read()).decode()
            writer.close()
            await all_closed(it)
        (answer,) = backend.answers
        assert answer.cancelled == []
        assert ("[DONE]" in text) if stream else (ANSWER in text)

    one()


@run
async def test_who_leaves_after_the_finish_has_not_cancelled() -> None:
    async with served() as it:
        for _ in range(3):
            await it.post(CHAT, chat(stream=True))
        samples = await all_closed(it)
    assert all(answer.cancelled == [] for answer in it.backend.answers)
    assert 'dynamo_frontend_model_cancellation_total{model="tiny"}' not in samples


@run
async def test_a_client_deadline_is_408_and_a_deadline_of_the_server_504() -> None:
    never = asyncio.Event()
    for settings, headers, status in (
        (Settings(), {"x-request-timeout-ms": "30"}, 408),
        (Settings(deadlines=replace(FAST, total_s=0.03)), {}, 504),
        (Settings(deadlines=replace(FAST, first_token_s=0.03)), {}, 504),
        (Settings(deadlines=replace(FAST, total_s=0.03)), {"x-request-timeout-ms": "50000"}, 504),
    ):
        backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={0: never}))
        async with served(backend, settings) as it:
            answer = await it.post(CHAT, chat(), headers=headers)
            samples = await all_closed(it)
        assert answer.status_code == status
        assert backend.answers[0].cancelled
        assert sum(value for name, value in samples.items() if "deadline_exceeded_total" in name) == 1


@run
async def test_a_deadline_in_mid_stream_is_an_error_event() -> None:
    never = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={2: never}))
    async with served(backend) as it:
        answer = await it.post(CHAT, chat(stream=True), headers={"x-request-timeout-ms": "500"})
        bad = await it.post(CHAT, chat(), headers={"x-request-timeout-ms": "soon"})
    told = frames(answer.text)
    assert json.loads(told[-2])["error"]["code"] == "deadline"
    assert told[-1] == "[DONE]"
    assert bad.status_code == 400


@run
async def test_silence_is_filled_with_comments() -> None:
    hold = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={2: hold}))
    async with served(backend, Settings(deadlines=replace(FAST, keep_alive_s=0.01))) as it:
        async with it.http.stream("POST", CHAT, json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if line == ": keep-alive":
                    break
            hold.set()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest


@run
async def test_a_client_that_does_not_read_is_cut_off_and_counted() -> None:
    backend = ScriptedBackend(Script(says=array("H", ids_of(ANSWER)) * 400_000, steps=[5000] * 900))
    backend.state = replace(backend.state, context_tokens=10_000_000)
    settings = Settings(deadlines=replace(FAST, stall_s=0.05))
    async with served(backend, settings) as it:
        reader, writer = await it.raw(request(chat(stream=True)), window=4096)
        await backend.arrived.wait()
        (answer,) = backend.answers
        await answer.told.wait()
        samples = await all_closed(it)
        assert samples["dynatwin_frontend_slow_reader_total"] == 1
        assert answer.made < 4_000_000
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


@run
async def test_a_reader_that_is_late_finds_no_more_chunks_than_allowed() -> None:
    backend = ScriptedBackend(Script(says=ids_of(ANSWER)))
    async with served(backend, replace(Settings(), limits=replace(Settings().limits, queued_chunks=2))) as it:
        answer = await it.post(CHAT, chat(stream=True, n=3))
    texts = [json.loads(one) for one in frames(answer.text)[:-1]]
    for index in range(3):
        said = [one["choices"][0]["delta"].get("content", "") for one in texts if one["choices"][0]["index"] == index]
        assert "".join(said) == ANSWER


@run
async def test_many_random_leavers_leave_nothing_open() -> None:
    never = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={3: never}))
    async with served(backend) as it:
        opened = [await it.raw(request(chat(stream=bool(at % 2)))) for at in range(20)]
        while len(backend.answers) < 20:
            await asyncio.sleep(0)
        for at, (_, writer) in enumerate(opened):
            reset(writer) if at % 3 else writer.close()
        for answer in backend.answers:
            await answer.told.wait()
        samples = await all_closed(it)
        assert samples["dynamo_frontend_disconnected_clients"] == 20
        assert it.frontend.services.runs == set()
