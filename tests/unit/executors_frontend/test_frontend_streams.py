"""Streams and whole answers of chat and completions: the table S1-S5 of the contract, usage, and one id throughout."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from frontend_builders import ANSWER, Script, ScriptedBackend, chat, chat_ids, chunks, frames, ids_of, run, served

from executors.engines.protocol import Ability
from executors.frontend.settings import Settings

USAGE = {"include_usage": True}


def prompt_tokens() -> int:
    return len(chat_ids([{"role": "user", "content": "Count the apples, please."}])[1])


@run
async def test_stream_with_usage_has_text_then_finish_then_usage_then_done() -> None:
    async with served() as it:
        answer = await it.post("/v1/chat/completions", chat(max_tokens=5, stream=True, stream_options=USAGE))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    told = chunks(answer.text)
    assert len(told) == 7
    texts = [one["choices"][0]["delta"].get("content") for one in told[:5]]
    assert texts == ["one", " two", " three", " four", " five"]
    assert [one["choices"][0]["delta"].get("role") for one in told[:6]] == ["assistant", *[None] * 5]
    assert [one["choices"][0]["finish_reason"] for one in told[:6]] == [*[None] * 5, "length"]
    assert told[5]["choices"][0]["delta"] == {}
    assert [one["usage"] for one in told[:6]] == [None] * 6
    p = prompt_tokens()
    assert told[6]["choices"] == []
    assert {name: told[6]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": p, "completion_tokens": 5, "total_tokens": p + 5,
    }  # fmt: skip
    assert len({(one["id"], one["created"], one["object"], one["model"]) for one in told}) == 1
    assert told[0]["id"].startswith("chatcmpl-")
    assert told[0]["object"] == "chat.completion.chunk"


@run
async def test_stream_without_usage_has_no_usage_chunk() -> None:
    async with served() as it:
        told = chunks((await it.post("/v1/chat/completions", chat(max_tokens=5, stream=True))).text)
    assert len(told) == 6
    assert not any("usage" in one for one in told)


@run
async def test_three_tokens_make_six_frames() -> None:
    async with served() as it:
        answer = await it.post("/v1/chat/completions", chat(max_tokens=3, stream=True, stream_options=USAGE))
    assert len(frames(answer.text)) == 6


@run
async def test_a_whole_answer_has_the_same_usage_in_its_body() -> None:
    async with served() as it:
        body = (await it.post("/v1/chat/completions", chat(max_tokens=5))).json()
    p = prompt_tokens()
    assert body["usage"]["prompt_tokens"] == p
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == p + 5
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "one two three four five", "refusal": None}
    assert choice["finish_reason"] == "length"


@pytest.mark.shared
def test_case_23_counts_the_same_prompt_in_all_three_forms(shared: Path) -> None:
    asked = json.loads((shared / "cases" / "inputs" / "c23_chat_request.json").read_text(encoding="utf-8"))
    seen: list[int] = []

    @run
    async def all_three() -> None:
        settings = replace(Settings(), aliases={asked["model"]: "tiny"})
        async with served(settings=settings) as it:
            told = chunks((await it.post("/v1/chat/completions", asked)).text)
            assert [one["usage"] for one in told[:-1]] == [None] * 6
            assert told[-2]["choices"][0]["finish_reason"] == "length"
            assert told[-1]["choices"] == []
            seen.append(told[-1]["usage"]["prompt_tokens"])
            silent = {name: value for name, value in asked.items() if name != "stream_options"}
            assert not any("usage" in one for one in chunks((await it.post("/v1/chat/completions", silent)).text))
            body = (await it.post("/v1/chat/completions", {**silent, "stream": False})).json()
            seen.append(body["usage"]["prompt_tokens"])
            assert body["usage"]["completion_tokens"] == 5
            seen.extend(len(ask.token_ids) for ask in it.backend.asks)

    all_three()
    assert len(set(seen)) == 1


@run
async def test_a_stop_string_ends_the_answer_and_is_not_shown() -> None:
    async with served() as it:
        streamed = await it.post("/v1/chat/completions", chat(stop=["four"], stream=True, stream_options=USAGE))
        body = (await it.post("/v1/chat/completions", chat(stop="four"))).json()
        first, second = it.backend.answers
    told = chunks(streamed.text)
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in told[:-1])
    assert text == "one two three " == body["choices"][0]["message"]["content"]
    assert told[-2]["choices"][0]["finish_reason"] == "stop" == body["choices"][0]["finish_reason"]
    assert told[-1]["usage"]["completion_tokens"] == 4 == body["usage"]["completion_tokens"]
    assert first.cancelled == ["stop string"] == second.cancelled
    assert first.made <= 5


@run
async def test_a_stop_string_may_straddle_tokens_and_the_seam_of_a_migration() -> None:
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), steps=[2, 1, 2, 5], migrations=1))
    async with served(backend) as it:
        body = (await it.post("/v1/chat/completions", chat(stop=["ee four f"]))).json()
    assert body["choices"][0]["message"]["content"] == "one two thr"
    assert body["usage"]["completion_tokens"] == 5


@run
async def test_two_prompts_give_two_choices_in_order_and_usage_sums() -> None:
    backend = ScriptedBackend(lambda ask: Script(says=ids_of(ANSWER)[: 3 if len(ask.token_ids) == 2 else 5]))
    async with served(backend) as it:
        body = (await it.post("/v1/completions", {"model": "tiny", "prompt": ["one", "one two three"]})).json()
        lengths = [len(ask.token_ids) for ask in it.backend.asks]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["text"] for choice in body["choices"]] == ["one two three", "one two three four five"]
    assert lengths == [2, 4]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 8
    assert body["object"] == "text_completion"


@run
async def test_n_answers_count_the_prompt_once_and_are_seeded_apart() -> None:
    async with served() as it:
        body = (await it.post("/v1/chat/completions", chat(n=3, seed=5, max_tokens=2))).json()
        asks = it.backend.asks
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == prompt_tokens()
    assert body["usage"]["completion_tokens"] == 6
    assert [ask.sampling.seed for ask in asks] == [5, 6, 7]
    assert len({ask.request_id for ask in asks}) == 3
    assert all("n" in {trait.value for trait in ask.traits} for ask in asks)


@run
async def test_seeds_of_several_answers_stay_within_64_bits() -> None:
    async with served() as it:
        await it.post("/v1/chat/completions", chat(n=2, seed=2**63 - 1, max_tokens=2))
        asks = it.backend.asks
    assert [ask.sampling.seed for ask in asks] == [2**63 - 1, -(2**63)]


@run
async def test_every_streamed_choice_finishes_exactly_once() -> None:
    async with served() as it:
        asked = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 3, "stream": True}
        told = chunks((await it.post("/v1/completions", asked)).text)
    finished = [one["choices"][0]["index"] for one in told if one["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    for index in range(4):
        parts = [one["choices"][0]["text"] for one in told if one["choices"][0]["index"] == index]
        assert "".join(parts) == "one two three"


@run
async def test_an_answer_without_text_has_its_role_in_the_last_chunk() -> None:
    async with served(ScriptedBackend(Script())) as it:
        (only,) = chunks((await it.post("/v1/chat/completions", chat(stream=True))).text)
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"


@run
async def test_a_character_of_several_tokens_is_never_split() -> None:
    text = "a🍎b"
    async with served(ScriptedBackend(Script(says=ids_of(text)))) as it:
        told = chunks((await it.post("/v1/chat/completions", chat(stream=True))).text)
    parts = [one["choices"][0]["delta"].get("content", "") for one in told[:-1]]
    assert parts == ["a", "🍎", "b"]


@run
async def test_probabilities_come_with_their_tokens() -> None:
    settings = Settings(abilities=frozenset({Ability.LOGPROBS}))
    async with served(settings=settings) as it:
        body = (await it.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=2, max_tokens=2))).json()
        told = chunks((await it.post("/v1/chat/completions", chat(logprobs=True, max_tokens=2, stream=True))).text)
        old = (
            await it.post("/v1/completions", {"model": "tiny", "prompt": "one", "max_tokens": 2, "logprobs": 1})
        ).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["one", " two"]
    assert [len(one["top_logprobs"]) for one in content] == [2, 2]
    streamed = [one["choices"][0]["logprobs"]["content"] for one in told[:-1]]
    assert [[one["token"] for one in part] for part in streamed] == [["one"], [" two"]]
    assert old["choices"][0]["logprobs"]["text_offset"] == [0, 3]
    assert old["choices"][0]["logprobs"]["top_logprobs"][0] == {"one": -0.5}


@run
async def test_running_usage_stands_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with served() as it:
        told = chunks(
            (await it.post("/v1/chat/completions", chat(max_tokens=2, stream=True, stream_options=options))).text
        )
    assert [one["usage"]["completion_tokens"] for one in told][-1] == 2
    assert all(one["usage"]["prompt_tokens"] == prompt_tokens() for one in told)


@run
async def test_cached_tokens_never_are_the_whole_prompt() -> None:
    async with served(ScriptedBackend(Script(says=ids_of("one"), cached_tokens=10_000))) as it:
        body = (await it.post("/v1/chat/completions", chat())).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt_tokens() - 1}


@pytest.mark.parametrize("steps", [[10], [1] * 10, [3, 3, 4]])
def test_tokens_of_one_step_may_share_a_chunk(steps: list[int]) -> None:
    @run
    async def one() -> None:
        async with served(ScriptedBackend(Script(says=ids_of(ANSWER), steps=steps))) as it:
            told = chunks((await it.post("/v1/chat/completions", chat(stream=True))).text)
        assert len(told) == len(steps) + 1
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in told) == ANSWER

    one()


@run
async def test_small_packets_are_sent_at_once() -> None:
    """Without it the end of each answer waited for the client's delayed ACK: 40 ms on every first token."""
    async with served() as it:
        await it.http.get("/live")
        ((server, _),) = it.frontend._servers
        (connection,) = server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
