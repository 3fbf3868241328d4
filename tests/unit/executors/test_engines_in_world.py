"""Adapters in the live world, over real sockets: their KV events route requests, and what breaks goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fake_engines import FakeVllm
from fake_publisher import FakePublisher

from executors.backend import Ask, End
from executors.clock import WallClock
from executors.deadlines import Deadlines
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.requests import Stream
from executors.world import LiveWorld
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import Event
from policies.cluster.ids import RequestId
from policies.cluster.kv_events import IndexDump, KvStored
from policies.resilience.migration import Migration, MigrationSettings
from twin.config import Config, RouterConfig
from twin.deciding import build_policy

LIMIT_S = 20.0
PROMPT = list(range(1, 101))
AMPLE = Deadlines(connect_s=LIMIT_S, first_token_s=LIMIT_S, between_tokens_s=LIMIT_S, control_s=LIMIT_S)


class Served:
    """A world whose workers are fake servers of vLLM, each with a publisher; `heard` are the events that came in."""

    def __init__(self) -> None:
        config = Config(router=RouterConfig(mode="kv", index="engine"))
        policies = [build_policy(config, 32), Migration(MigrationSettings(limit=1, max_seq_len=None))]
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        self.world = LiveWorld(Controller(policies, self), WallClock(asyncio.get_running_loop()), ContentTree(32, 32))
        self.world.fleet.looks_after = False
        self.world.fleet.follow = lambda worker, post: worker.engine.follow(  # type: ignore[attr-defined]
            worker.worker_id, worker.up.epoch, post
        )
        self.servers: list[FakeVllm] = []
        self.publishers: list[FakePublisher] = []

    def note(self, event: Event, _: Any) -> None:
        self.heard.put_nowait(event)

    async def next(self, kind: type[Event]) -> Event:
        while not isinstance(event := await self.heard.get(), kind):
            pass
        return event

    async def add(self, stack: AsyncExitStack) -> None:
        publisher = await stack.enter_async_context(FakePublisher())
        server = FakeVllm()
        await stack.enter_async_context(server)
        source = publisher.source()
        told = {"endpoint": source.endpoint.replace("127.0.0.1", "*"), "replay_endpoint": source.replay}
        server.sources = {"0": {"enable_kv_cache_events": True, "topic": source.topic, **told}}
        name = f"w{len(self.servers)}"
        self.servers.append(server)
        self.publishers.append(publisher)
        at = Attached(name=name, url=server.url, max_num_seqs=8)
        await self.world.fleet.attach(Vllm(at, AMPLE, self.world.clock.now), name, "pool")
        await publisher.subscribed()
        await self.next(IndexDump)

    def ask(self, name: str) -> Stream:
        return self.world.submit(Ask(request_id=RequestId(name), token_ids=PROMPT, max_tokens=3, model="tiny"))


@asynccontextmanager
async def served(workers: int) -> AsyncIterator[Served]:
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        one = Served()
        for _ in range(workers):
            await one.add(stack)
        try:
            yield one
        finally:
            await one.world.close()


async def answered(stream: Stream) -> tuple[list[int], End]:
    tokens = [token async for delta in stream for token in delta.token_ids]
    assert stream.end is not None
    return tokens, stream.end


def test_a_prompt_goes_where_its_blocks_are() -> None:
    async def test() -> None:
        async with served(3) as one:
            block = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None, "medium": "GPU"}
            await one.publishers[2].publish({**block, "token_ids": PROMPT[:96], "block_size": 32})
            await one.next(KvStored)
            tokens, end = await answered(one.ask("r"))
            assert (tokens, end.outcome, end.worker) == ([500, 501, 502], "length", "w2")
            assert [len(server.bodies) for server in one.servers] == [0, 0, 1]

    asyncio.run(test())


def test_an_answer_that_breaks_goes_on_with_another_worker() -> None:
    async def test() -> None:
        async with served(2) as one:
            first, other = one.servers  # equals go to the first
            first.does = "cut"
            stream = one.ask("r")
            tokens, end = await answered(stream)
            assert (end.outcome, end.migrations) == ("length", 1)
            assert tokens == [500, 500, 501]  # the second one begins anew and makes what is left
            assert other.bodies[0]["prompt"] == [*PROMPT, 500]
            assert other.bodies[0]["max_tokens"] == 2

    asyncio.run(test())


def test_a_client_that_leaves_stops_its_leg() -> None:
    async def test() -> None:
        async with served(1) as one:
            (server,) = one.servers
            server.does = "stall"
            stream = one.ask("r")
            await anext(aiter(stream))
            stream.cancel("client left")
            await server.left.wait()
            _, end = await answered(stream)
            assert end.outcome == "cancelled"

    asyncio.run(test())
