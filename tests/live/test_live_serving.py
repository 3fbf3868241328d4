"""Real engines behind our own world and frontend, asked by stock clients: what is promised of `twin serve --live`.

Every run is watched by the invariants, and its journal replays to the same orders (`live_service`). Prompts of one run
are computed alone where answers are compared: equal tokens are promised of equal batches only.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from live_service import MODEL, Service, configured, serving

from executors.engines.metrics import Page
from executors.engines.vllm import Vllm
from executors.frontend.tokens import ServedTokenizer
from executors.leases import LeaseTerms
from executors.process import group_members
from policies.cluster.events import (
    FirstToken,
    RequestFailed,
    RequestInterrupted,
    RequestMigrated,
    WorkerLost,
)
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import Tier
from policies.cluster.kv_events import KvStored

pytestmark = pytest.mark.live

SEED = os.environ.get("DYNATWIN_TEST_SEED", "0")
NUMBERS = iter(range(10**6))
CHAT: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is made of 12 apples, and of <|end|> and é?"},
]


def prompt(length: int) -> list[int]:
    """Tokens that no test had before."""
    rng = random.Random(f"{SEED} serving {next(NUMBERS)}")
    return [rng.randint(100, 4000) for _ in range(length)]


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> ServedTokenizer:
    return ServedTokenizer.from_folder(tiny_model)


class Engines:
    """Servers by what they serve as; `one`, `two` and `split` are clusters of them."""

    def __init__(self, servers: Any, tokenizer: ServedTokenizer, folder: Path) -> None:
        self.servers = servers
        self._tokenizer = tokenizer
        self._folder = folder

    def url(self, name: str) -> str:
        return str(self.servers[name].url)

    def mixed(self, *names: str, mode: str = "kv") -> Any:
        config = configured(self._folder, mode, mixed=len(names))
        return serving(config, self._run(), self._tokenizer, mixed=tuple(map(self.url, names)))

    def split(self) -> Any:
        config = configured(self._folder, "kv", prefill=1, decode=1)
        urls = {"prefill": (self.url("prefill"),), "decode": (self.url("decode"),)}
        return serving(config, self._run(), self._tokenizer, **urls)

    def _run(self) -> Path:
        folder = self._folder / f"run-{next(NUMBERS)}"
        folder.mkdir()
        return folder


@pytest.fixture
def engines(vllm_servers: Any, tokenizer: ServedTokenizer, tmp_path: Path) -> Engines:
    return Engines(vllm_servers, tokenizer, tmp_path)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def workers(answer: Any) -> tuple[str, str]:
    """Who computed the prompt, and who answered."""
    told = answer.nvext["worker_id"]
    return told["prefill_worker"], told["decode_worker"]


async def read(stream: Any, tokens: int = 10**9) -> tuple[str, Any]:
    """The text of a stream up to so many chunks, and its usage if that was reached."""
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
        tokens -= bool(chunk.choices)
        if not tokens:
            break
    return text, usage


# ---------------------------------------------------------------- answers


def test_split_answers_are_those_of_one_worker_token_for_token(engines: Engines) -> None:
    prompts = [prompt(length) for length in (5, 31, 32, 33, 300, 1500)]

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


@pytest.mark.parametrize("leave", [leave_stream, leave_unary, leave_prefill])
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


# ---------------------------------------------------------------- leases


def test_a_hand_off_past_its_lease_is_never_sent_and_the_answer_is_right(engines: Engines) -> None:
    tokens = prompt(200)

    async def main() -> None:
        async with engines.mixed("mixed") as whole:
            await whole.complete(tokens, 12)
        async with engines.split() as it:
            it.cluster.world._lease = LeaseTerms.of(1e-6, health_period_s=1e-7)
            late = await it.complete(tokens, 12)
            counts = it.cluster.world.ledger.counts()
            assert (counts["ever_sent"], counts["refused"], counts["expired"]) == (0, 1, 1)
            assert it.ended[0].tokens == whole.ended[0].tokens
            assert late.usage.prompt_tokens == 200

    asyncio.run(main())


# ---------------------------------------------------------------- workers come and go


def test_scaling_down_and_up_under_load_loses_nothing(engines: Engines) -> None:
    async def stream(it: Service, sizes: tuple[int, int]) -> Any:
        _, usage = await read(await it.stream(prompt(sizes[0]), sizes[1]))
        return usage

    async def main() -> None:
        async with engines.mixed("mixed", "spare", mode="least-loaded") as it:
            rng = random.Random(7)
            sizes = [(rng.randint(20, 400), rng.randint(60, 120)) for _ in range(30)]
            streams = [asyncio.create_task(stream(it, one)) for one in sizes[:20]]
            await it.until(lambda: it.count(FirstToken) >= 10)
            leaving = it.worker("mixed-1").worker_id
            it.cluster.world.fleet.drain(leaving)
            await it.until(lambda: it.count(WorkerLost) == 1)
            back = await it.attach("back", engines.url("spare"))
            streams += [asyncio.create_task(stream(it, one)) for one in sizes[20:]]
            usages = await asyncio.gather(*streams)
            assert [(one.prompt_tokens, one.completion_tokens) for one in usages] == sizes
            used = Counter(one.end.worker for one in it.ended)
            assert set(used) == {"mixed-0", "mixed-1", "back"}
            assert back.worker_id != leaving
            assert it.count(RequestInterrupted) == it.count(RequestMigrated) == it.count(RequestFailed) == 0

    asyncio.run(main())


def test_c21_a_worker_that_is_killed_in_mid_stream_costs_no_token(engines: Engines) -> None:
    """The spare server is gone afterwards."""
    tokens = prompt(300)

    async def main() -> None:
        async with engines.mixed("spare") as it:
            stream = await it.stream(tokens, 120)
            begun, _ = await read(stream, 10)
            await it.attach("other", engines.url("mixed"))
            for pid in list(group_members(engines.servers["spare"].pid)):
                os.kill(pid, signal.SIGKILL)
            rest, usage = await read(stream)
            (moved,) = it.ended
            assert (moved.end.outcome, moved.end.migrations, moved.end.worker) == ("length", 1, "other")
            assert it.count(WorkerLost) == 1
            unbroken = await it.complete(tokens, 120)
            assert moved.tokens == it.ended[1].tokens
            assert begun + rest == unbroken.choices[0].text
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (300, 120, 420)

    asyncio.run(main())
