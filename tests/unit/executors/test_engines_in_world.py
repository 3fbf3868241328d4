"""Adapters in the live world, over real sockets: their KV events route requests, and what breaks goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_engines import FakeVllm
from fake_publisher import FakePublisher

from executors import fleet
from executors.backend import Ask, End
from executors.clock import WallClock
from executors.deadlines import Deadlines
from executors.engines.protocol import KvFollower
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.live_worker import LiveWorker
from executors.requests import Stream
from executors.world import LiveWorld
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import Event
from policies.cluster.ids import RequestId
from policies.cluster.kv_events import IndexDump, KvStored
from policies.errors import EngineError
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
        self.log: list[Event] = []
        self.world = LiveWorld(Controller(policies, self), WallClock(asyncio.get_running_loop()), ContentTree(32, 32))
        self.world.fleet.looks_after = False
        self.world.fleet.follow = lambda worker, post: worker.engine.follow(  # type: ignore[attr-defined]
            worker.worker_id, worker.up.epoch, post
        )
        self.servers: list[FakeVllm] = []
        self.publishers: list[FakePublisher] = []

    def note(self, event: Event, _: Any) -> None:
        self.log.append(event)
        self.heard.put_nowait(event)

    async def next(self, kind: type[Event]) -> Event:
        while not isinstance(event := await self.heard.get(), kind):
            pass
        return event

    async def add(self, stack: AsyncExitStack, *told: dict[str, Any]) -> None:
        """A worker, of whose blocks the publisher has told before."""
        publisher = await stack.enter_async_context(FakePublisher())
        for event in told:
            await publisher.publish(event)
        server = FakeVllm()
        await stack.enter_async_context(server)
        source = publisher.source()
        ends = {"endpoint": source.endpoint.replace("127.0.0.1", "*"), "replay_endpoint": source.replay}
        server.sources = {"0": {"enable_kv_cache_events": True, "topic": source.topic, **ends}}
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


BLOCK = {"type": "BlockStored", "parent_block_hash": None, "medium": "GPU", "block_size": 32}


class Late:
    """A follower that stands only once `count` events have come of it."""

    def __init__(self, engine: Any, worker: LiveWorker, post: Callable[[Event], None], count: int) -> None:
        self._left = count
        self._came = asyncio.Event()
        self._post = post
        self._own: KvFollower = engine.follow(worker.worker_id, worker.up.epoch, self._hear)
        self.ask, self.close = self._own.ask, self._own.close

    @property
    def heard_s(self) -> float | None:
        return self._own.heard_s

    def _hear(self, event: Event) -> None:
        self._post(event)
        self._left -= 1
        if not self._left:
            self._came.set()

    async def stands(self, deadline_s: float) -> None:
        await self._own.stands(deadline_s)
        await self._came.wait()


def test_what_a_worker_says_before_it_is_up_is_told_right_after_in_order() -> None:
    """L2: nobody hears of a worker before it is listened to, and nothing that it says is before it or lost."""

    async def test() -> None:
        async with served(0) as one, AsyncExitStack() as stack:
            one.world.fleet.follow = lambda worker, post: Late(worker.engine, worker, post, 2)
            first = {**BLOCK, "block_hashes": [1], "token_ids": PROMPT[:32]}
            second = {**BLOCK, "block_hashes": [2], "parent_block_hash": 1, "token_ids": PROMPT[32:64]}
            await one.add(stack, first, second)  # returns at the answer to what the index asks of a new worker
            assert [type(event).__name__ for event in one.log] == ["WorkerUp", "KvStored", "KvStored", "IndexDump"]
            stored = [event.exts for event in one.log if isinstance(event, KvStored)]
            assert stored == [(1,), (2,)]

    asyncio.run(test())


def test_a_worker_whose_events_nobody_publishes_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LISTEN_S", 0.1)

    async def test() -> None:
        async with served(0) as one, FakeVllm() as server:
            nowhere = {"endpoint": "tcp://*:9", "replay_endpoint": "tcp://127.0.0.1:9", "topic": ""}
            server.sources = {"0": {"enable_kv_cache_events": True, **nowhere}}
            engine = Vllm(Attached(name="w", url=server.url, max_num_seqs=8), AMPLE, one.world.clock.now)
            with pytest.raises(EngineError, match="nobody publishes KV events at"):
                await one.world.fleet.attach(engine, "w", "pool")
            assert one.log == []
            assert one.world.fleet.workers == {}
            await engine.close()

    asyncio.run(test())


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
