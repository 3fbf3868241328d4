"""Real engines behind our own world and frontend, asked by stock clients: what is promised of `twin serve --live`.

Every run is watched by the invariants, and its journal replays to the same orders (`live_service`). Prompts of one run
are computed alone where answers are compared: equal tokens are promised of equal batches only.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from kserve_client import infer_request, outputs, stream, unary
from live_service import MODEL, Engines, Service, decided, prompt, read

from executors.engines.metrics import Page
from executors.engines.vllm import Vllm
from executors.frontend.tokens import ServedTokenizer
from policies.cluster.events import (
    FirstToken,
)
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import Tier
from policies.cluster.kv_events import KvStored

pytestmark = pytest.mark.live

CHAT: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is made of 12 apples, and of <|end|> and é?"},
]


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def workers(answer: Any) -> tuple[str, str]:
    """Who computed the prompt, and who answered."""
    told = answer.nvext["worker_id"]
    return told["prefill_worker"], told["decode_worker"]


# ---------------------------------------------------------------- answers


def test_split_answers_are_those_of_one_worker_token_for_token(engines: Engines) -> None:
    prompts: list[list[int]] = []

    async def answers(it: Service) -> list[tuple[str, int, int]]:
        told = [await it.complete(tokens, 12) for tokens in prompts]
        return [(one.choices[0].text, one.usage.prompt_tokens, one.usage.completion_tokens) for one in told]

    async def chats(it: Service) -> list[str]:
        chat = await it.openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, temperature=0)
        message = await it.anthropic.messages.create(
            model=MODEL,
            system=CHAT[0]["content"],
            messages=CHAT[1:],
            max_tokens=12,
            extra_body={"temperature": 0},
        )
        return [chat.choices[0].message.content or "", "".join(part.text for part in message.content)]  # type: ignore[union-attr]

    async def main() -> None:
        for length in (5, 31, 32, 33, 300, 1500):
            prompts.append(await decided(engines.url("spare"), length, 12))
        async with engines.mixed("mixed") as whole:
            told_whole, said = await answers(whole), await chats(whole)
        async with engines.split() as split:
            told_split = await answers(split)
            again = await split.complete(prompts[-1], 12)
            assert await chats(split) == said
        assert [one.tokens for one in split.ended[:6]] == [one.tokens for one in whole.ended[:6]]
        assert told_split == told_whole
        assert [counts for _, *counts in told_split] == [[len(tokens), 12] for tokens in prompts]
        assert said[0] == said[1] != ""
        assert workers(again) == ("prefill-0", "decode-0")
        assert (again.choices[0].text, cached(again)) == (told_whole[-1][0], 1472)
        counts = split.cluster.world.ledger.counts()
        assert (counts["fetched"], counts["refused"]) == (len(split.ended), 0)

    asyncio.run(main())


def test_a_follow_up_goes_to_the_worker_that_has_its_prefix(engines: Engines) -> None:
    async def main() -> None:
        async with engines.mixed("mixed", "spare") as it:
            first = [prompt(320) for _ in range(4)]
            told = await asyncio.gather(*(it.complete(tokens, 40) for tokens in first))
            assert [cached(one) for one in told] == [0] * 4
            holders = [workers(one)[1] for one in told]
            assert set(holders) == {"mixed-0", "mixed-1"}
            await it.until(lambda: all(is_known(it, tokens) for tokens in first))
            for tokens, holder in zip(first, holders, strict=True):
                more = await it.complete([*tokens, *prompt(50)], 4)
                assert workers(more)[1] == holder
                assert cached(more) == 320

    asyncio.run(main())


def is_known(it: Service, tokens: list[int], tier: Tier = Tier.G1_DEVICE) -> bool:
    """Whether a worker has told of the last block of a prompt."""
    last = local_hashes(tokens, 32)[-1]
    stored = (event for event in it.happened if isinstance(event, KvStored) and event.tier is tier)
    return any(last in event.local_hashes for event in stored)


def test_kv_from_host_memory_and_from_disk_gives_the_same_tokens(engines: Engines) -> None:
    """The device has room for two of the prompts, the host for four, the disk for all."""

    async def main() -> None:
        async with engines.mixed("tiered") as it:
            prompts = [prompt(500) for _ in range(6)]
            for tokens in prompts:
                await it.complete(tokens, 8)
                await it.until(lambda tokens=tokens: is_known(it, tokens, Tier.G3_DISK))
            first = [one.tokens for one in it.ended]
            on_host, on_disk = await it.complete(prompts[2], 8), await it.complete(prompts[0], 8)
            assert (cached(on_host), cached(on_disk)) == (480, 480)
            assert [one.tokens for one in it.ended[6:]] == [first[2], first[0]]
            assert await sources(it, "mixed-0") == {"device": 0, "host": 480, "disk": 480}

    asyncio.run(main())


async def sources(it: Service, name: str) -> dict[str, float]:
    """How many tokens came from which tier, as the engine counts them."""
    engine = it.worker(name).engine
    assert isinstance(engine, Vllm)
    samples = Page(await engine.get("/metrics")).all("vllm:prompt_tokens_cached_by_source_total")
    found = {one.labels["source"]: one.value for one in samples}
    return {tier: found.get(tier, 0) for tier in ("device", "host", "disk")}


def test_c23_streaming_usage_in_its_three_forms(engines: Engines, tokenizer: ServedTokenizer) -> None:
    expected = len(tokenizer.encode_parts(tokenizer.fill(CHAT)))
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 5, "ignore_eos": True}

    async def main() -> None:
        async with engines.split() as it:
            with_usage = await it.http.post(
                "/v1/chat/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}}
            )
            without = await it.http.post("/v1/chat/completions", json={**asked, "stream": True})
            whole = (await it.http.post("/v1/chat/completions", json=asked)).json()
            for answer in (with_usage, without):
                assert answer.headers["content-type"].startswith("text/event-stream")
            told, plain = chunks(with_usage.text), chunks(without.text)
            *ordinary, last = told
            usage = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            assert usage == {"prompt_tokens": expected, "completion_tokens": 5, "total_tokens": expected + 5}
            assert last["choices"] == []
            assert ordinary[-1]["choices"][0]["finish_reason"] == "length"
            assert all(one.get("usage") is None for one in (*ordinary, *plain))
            assert len({(one["id"], one["created"]) for one in told}) == 1
            assert plain[-1]["choices"][0]["finish_reason"] == "length"
            assert {name: whole["usage"][name] for name in usage} == usage

    asyncio.run(main())


def chunks(text: str) -> list[dict[str, Any]]:
    *told, end = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return [json.loads(one) for one in told]


def test_c23_usage_over_kserve_is_that_of_the_other_forms(engines: Engines, tokenizer: ServedTokenizer) -> None:
    text = "What is made of 12 apples?"
    expected = {"prompt_tokens": len(tokenizer.encode(text)), "completion_tokens": 5}

    async def main() -> None:
        async with engines.split() as it, grpc.aio.insecure_channel(f"127.0.0.1:{it.kserve_port}") as channel:
            asked: dict[str, Any] = {"text": text, "max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
            whole = outputs(await unary(channel, "ModelInfer")(infer_request(MODEL, **asked)))
            call = stream(channel)
            await call.write(infer_request(MODEL, streaming=True, request_id="s", **asked))
            await call.done_writing()
            answers = [answer async for answer in call]
            parts = [outputs(answer.infer_response) for answer in answers]
            body = {"model": MODEL, "prompt": text, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
            plain = (await it.http.post("/v1/completions", json=body)).json()
            for told in (whole, parts[-1], plain["usage"]):
                assert {name: told[name] for name in expected} == expected
            assert not any(expected.keys() & part.keys() for part in parts[:-1])
            assert {answer.infer_response.id for answer in answers} == {"s"}
            assert (whole["finish_reason"], parts[-1]["finish_reason"]) == (b"length", b"length")
            said = b"".join(part["text_output"] for part in parts)
            assert said == whole["text_output"] == plain["choices"][0]["text"].encode()

    asyncio.run(main())


# ---------------------------------------------------------------- leaving


async def leave_stream(it: Service) -> None:
    stream = await it.stream(prompt(300), 3000)
    await read(stream, 3)
    await stream.close()


async def leave_unary(it: Service) -> None:
    call = asyncio.create_task(it.complete(prompt(300), 3000))
    await it.until(lambda: it.count(FirstToken) > 0)
    await hang_up(call)


async def leave_prefill(it: Service) -> None:
    """While the engine works on the prompt; it may be too fast for us to see, then once more."""
    for _ in range(10):
        told = it.count(FirstToken)
        call = asyncio.create_task(it.complete(prompt(3900), 150))
        await computing(it)
        await hang_up(call)
        await it.until(lambda: not it.cluster.world.open)
        if it.count(FirstToken) == told:
            return
    raise AssertionError("no prompt took long enough to leave during its prefill")


async def leave_kserve_stream(it: Service) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{it.kserve_port}") as channel:
        call = stream(channel)
        await call.write(infer_request(MODEL, streaming=True, text="apples " * 60, max_tokens=3000, ignore_eos=True))
        for _ in range(3):
            await call.read()
        call.cancel()


async def leave_kserve_unary(it: Service) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{it.kserve_port}") as channel:
        call = unary(channel, "ModelInfer")(infer_request(MODEL, text="apples " * 60, max_tokens=3000, ignore_eos=True))
        await it.until(lambda: it.count(FirstToken) > 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def hang_up(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def computing(it: Service) -> None:
    """Until some engine is at work."""
    while True:
        for worker in it.cluster.world.fleet.workers.values():
            load = await worker.engine.load()
            if load is not None and load.running:
                return


@pytest.mark.parametrize("leave", [leave_stream, leave_unary, leave_prefill, leave_kserve_stream, leave_kserve_unary])
@pytest.mark.parametrize("kind", ["unsplit", "split"])
def test_c22_when_the_client_leaves_every_engine_is_free(engines: Engines, kind: str, leave: Any) -> None:
    async def main() -> None:
        async with engines.mixed("mixed") if kind == "unsplit" else engines.split() as it:
            await leave(it)
            await it.until(lambda: not it.cluster.world.open)
            await it.free()
            assert {one.end.outcome for one in it.ended} == {"cancelled"}
            assert all(len(one.tokens) < 3000 for one in it.ended)
            counts = it.cluster.world.ledger.counts()
            assert counts["held"] == counts["sent"] == 0

    asyncio.run(main())
