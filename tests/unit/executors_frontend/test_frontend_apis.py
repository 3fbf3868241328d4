"""Anthropic's and OpenAI's other APIs, and both stock clients reading us unchanged (S16)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import anthropic
import openai
import pytest
from frontend_builders import ANSWER, FAST, MODEL, Script, ScriptedBackend, Served, chat, ids_of, run, served

from executors.engines.protocol import Ability
from executors.frontend.settings import Settings

MESSAGES = [{"role": "user", "content": "one two"}]


def openai_client(it: Served, **given: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, **given)  # type: ignore[arg-type]


def anthropic_client(it: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=it.url, api_key="none", max_retries=0)


def events(text: str) -> list[tuple[str, dict[str, object]]]:
    """Named events in order."""
    made = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in lines:
            made.append((lines["event"], json.loads(lines["data"])))
    return made


@run
async def test_the_openai_client_lists_chats_and_streams() -> None:
    settings = Settings(abilities=frozenset({Ability.LOGPROBS}), aliases={"small": MODEL})
    async with served(settings=settings) as it, openai_client(it) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "small"]
        assert (await client.models.retrieve("small")).id == "small"
        whole = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=1, temperature=0, user="me",  # type: ignore[arg-type]
        )  # fmt: skip
        assert whole.choices[0].message.content == "one two three four five"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        assert whole.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True},  # type: ignore[arg-type]
        )  # fmt: skip
        told = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in told[:-1]) == "one two three"
        assert told[-1].usage is not None
        assert told[-1].usage.completion_tokens == 3
        assert {chunk.model for chunk in told} == {"small"}
        old = await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=2)
        assert [choice.text for choice in old.choices] == ["one two", "one two"]


@run
async def test_errors_are_those_that_the_openai_client_knows() -> None:
    async with served() as it, openai_client(it) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="huge", messages=MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=9)  # type: ignore[arg-type]
        assert caught.value.param == "n"
        it.backend.script = Script(says=ids_of(ANSWER)[:2], outcome="failed", code="worker_lost", reason="it died")
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="it died"):
            async for _ in stream:
                pass


@run
async def test_a_time_out_of_the_openai_client_cancels() -> None:
    never = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={1: never}))
    async with served(backend) as it, openai_client(it, timeout=1.0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
        await backend.answers[0].told.wait()
        await it.frontend.services.open.idle()
    assert backend.answers[0].made == 1


@run
async def test_the_openai_client_reads_responses() -> None:
    async with served() as it, openai_client(it) as client:
        whole = await client.responses.create(model=MODEL, input="one", instructions="Count.", max_output_tokens=4)
        assert whole.output_text == "one two three four"
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 4
        parts: list[str] = []
        async with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "one"}]) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    parts.append(event.delta)
            final = await stream.get_final_response()
        assert "".join(parts) == ANSWER == final.output_text
        assert final.status == "completed"


@run
async def test_events_of_responses_are_numbered_without_gaps() -> None:
    async with served() as it:
        body = {"model": MODEL, "input": "one", "stream": True, "max_output_tokens": 2, "store": False}
        told = events((await it.post("/v1/responses", body)).text)
        it.backend.script = Script(says=ids_of(ANSWER)[:1], outcome="failed", code="worker_lost", reason="it died")
        failed = events((await it.post("/v1/responses", body)).text)
    assert [one["sequence_number"] for _, one in told] == list(range(len(told)))
    assert [name.removeprefix("response.") for name, _ in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert all(name == one["type"] for name, one in told)
    assert failed[-1][0] == "response.failed"
    assert failed[-1][1]["response"]["error"]["code"] == "worker_lost"  # type: ignore[index]


@run
async def test_the_anthropic_client_reads_messages_and_counts() -> None:
    async with served() as it, anthropic_client(it) as client:
        asked = {"model": MODEL, "max_tokens": 4, "messages": MESSAGES, "system": "Count."}
        whole = await client.messages.create(**asked)  # type: ignore[call-overload]
        assert whole.content[0].text == "one two three four"
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 4)
        count = await client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Count.")  # type: ignore[arg-type]
        assert count.input_tokens == whole.usage.input_tokens == len(it.backend.asks[0].token_ids)
        async with client.messages.stream(**{**asked, "max_tokens": 50}) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        assert text == ANSWER
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(ids_of(ANSWER)))
        stopped = await client.messages.create(**asked, stop_sequences=["three"])  # type: ignore[call-overload]
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
        assert stopped.content[0].text == "one two "
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(**{**asked, "max_tokens": 0})  # type: ignore[call-overload]


@run
async def test_anthropic_events_come_in_order_with_final_input_tokens_and_without_done() -> None:
    async with served() as it:
        body = {"model": MODEL, "max_tokens": 2, "messages": MESSAGES, "stream": True}
        answer = await it.post("/v1/messages", body, headers={"anthropic-version": "2023-06-01"})
        prompt = len(it.backend.asks[0].token_ids)
    told = events(answer.text)
    assert [name for name, _ in told] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[0][1]["message"]["usage"]["input_tokens"] == prompt  # type: ignore[index]
    assert told[5][1]["usage"] == {
        "input_tokens": prompt, "output_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip
    assert "[DONE]" not in answer.text


@run
async def test_silence_on_anthropic_streams_is_a_ping() -> None:
    hold = asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={1: hold}))
    async with served(backend, Settings(deadlines=replace(FAST, keep_alive_s=0.01))) as it:
        body = {"model": MODEL, "max_tokens": 2, "messages": MESSAGES, "stream": True}
        async with it.http.stream("POST", "/v1/messages", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "event: ping":
                    break
            hold.set()


@run
async def test_anthropic_can_be_turned_off() -> None:
    async with served(settings=Settings(anthropic=False)) as it:
        answer = await it.post("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": MESSAGES})
    assert answer.status_code == 404


@run
async def test_adapters_have_names_of_their_own_and_with_their_base() -> None:
    settings = Settings(loras={"poet": MODEL}, aliases={"small": MODEL})
    async with served(settings=settings) as it:
        for name in ("poet", "tiny:poet", "small:poet"):
            assert (await it.post("/v1/chat/completions", chat(model=name, max_tokens=1))).json()["model"] == name
        unknown = await it.post("/v1/chat/completions", chat(model="tiny:painter"))
        ready = await it.http.get("/v1/models/tiny:poet/ready")
        asks = it.backend.asks
    assert [(ask.model, ask.lora) for ask in asks] == [("tiny", "poet")] * 3
    assert unknown.status_code == 404
    assert ready.json()["ready"] is True


@run
async def test_names_of_models_may_have_slashes() -> None:
    async with served(settings=Settings(aliases={"org/tiny": MODEL})) as it:
        one = await it.http.get("/v1/models/org/tiny")
        ready = await it.http.get("/v1/models/org/tiny/ready")
        none = await it.http.get("/v1/models/org/huge")
    assert (one.json()["id"], ready.status_code, none.status_code) == ("org/tiny", 200, 404)
