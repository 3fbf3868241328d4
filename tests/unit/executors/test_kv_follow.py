"""Following KV events over real sockets: nothing is missed, nothing is taken twice, and what is lost is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from fake_publisher import FakePublisher
from kv_index import RANK, Asking

from executors.engines.kv_books import KvBooks
from executors.engines.kv_drain import KvDrain
from executors.engines.kv_follow import KvSource, KvStream, KvStreams
from policies.cluster.hashing import local_hashes
from policies.cluster.kv_events import KvCleared, KvEvent, KvRefused, KvStored
from policies.errors import EngineError
from policies.router.chains.feed import FeedMode

LIMIT_S = 20.0
PROMPT = list(range(40))
HASHES = local_hashes(PROMPT, 4)


def block(n: int) -> dict[str, Any]:
    """Block `n` of the prompt, below the one before it."""
    return {
        "type": "BlockStored",
        "block_hashes": [1000 + n],
        "parent_block_hash": 999 + n if n else None,
        "token_ids": PROMPT[4 * n : 4 * n + 4],
        "block_size": 4,
        "medium": "GPU",
    }


class Followed:
    """A stream into a router's index, and a queue of what was posted."""

    def __init__(self, source: KvSource) -> None:
        self.stream = KvStream(source, KvBooks(RANK, 0, 4), self._post)
        self.index = Asking(4, self.stream.answer)
        self.posted: asyncio.Queue[KvEvent] = asyncio.Queue()

    def _post(self, event: KvEvent) -> None:
        self.index.on(event)
        self.posted.put_nowait(event)

    async def next(self, kind: type[KvEvent]) -> KvEvent:
        event = await self.posted.get()
        assert isinstance(event, kind)
        return event

    async def stored(self, *numbers: int) -> None:
        for n in numbers:
            event = await self.next(KvStored)
            assert isinstance(event, KvStored)
            assert event.exts == (1000 + n,)


@asynccontextmanager
async def followed(publisher: FakePublisher, **changes: Any) -> AsyncIterator[Followed]:
    """A follower that has caught up, registered at the index, and is subscribed."""
    one = Followed(publisher.source(**changes))
    await one.stream.start()
    one.index.up()
    try:
        await publisher.subscribed()
        yield one
    finally:
        await one.stream.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    asyncio.run(limited())


def test_who_comes_late_has_the_beginning_repeated() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0))
            await publisher.publish(block(1), block(2))
            async with followed(publisher) as one:
                assert one.index.depth(HASHES) == 3
                await publisher.publish(block(3))
                await one.stored(0, 1, 2, 3)
                assert one.index.depth(HASHES) == 4
                assert one.index.mode is FeedMode.LIVE
                assert one.stream.counts.repeated == 2

    run(test())


def test_a_gap_is_closed_by_a_repetition() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await publisher.publish(block(0))
            await publisher.publish(block(1), sent=False)
            await publisher.publish(block(2))
            await one.stored(0, 1, 2)
            assert publisher.asked_from == [0, 1]
            assert one.stream.counts.gaps == 1
            assert one.index.mode is FeedMode.LIVE

    run(test())


def test_a_lost_last_batch_is_found_by_asking() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=0.01) as one:
            await publisher.publish(block(0), sent=False)
            await one.stored(0)
            assert one.stream.counts.gaps == 0

    run(test())


def test_what_nobody_can_repeat_makes_the_index_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await publisher.publish(block(0))
            await publisher.publish(block(1), sent=False, kept=False)
            await publisher.publish(block(2))
            await one.stored(0)
            cleared = await one.next(KvCleared)
            assert cleared.event_id == 2  # number 1 is what was lost
            await one.stored(2)
            assert one.index.mode is FeedMode.DEGRADED
            assert one.index.depth(HASHES) == 0
            assert one.stream.counts.lost == one.stream.books.counts.voids == 1

    run(test())


def test_a_buffer_that_begins_too_late_makes_the_index_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0), kept=False)
            await publisher.publish(block(1))
            async with followed(publisher) as one:
                await one.next(KvCleared)
                await one.stored(1)
                assert one.index.mode is FeedMode.DEGRADED

    run(test())


def test_without_a_replay_endpoint_a_late_start_is_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0))
            async with followed(publisher, replay=None) as one:
                await publisher.publish(block(1))
                await one.next(KvCleared)
                await one.stored(1)
                assert one.stream.books.exact is False

    run(test())


def test_a_publisher_that_begins_anew_holds_nothing_of_before() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            for n in range(3):
                await publisher.publish(block(n))
            await one.stored(0, 1, 2)
            publisher.restart()
            await publisher.publish(block(0), sent=False)
            await publisher.publish(block(1))
            await one.next(KvCleared)
            await one.stored(0, 1)
            assert one.index.depth(HASHES) == 2
            assert one.index.mode is FeedMode.LIVE
            assert one.stream.counts.restarts == 1

    run(test())


@pytest.mark.parametrize("payload", [b"\xc1", b""])
def test_a_damaged_message_is_counted_and_has_its_number_repeated(payload: bytes) -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await publisher.send(payload)
            await publisher.publish(block(0), sent=False)
            await publisher.publish(block(1))
            await one.next(KvRefused)
            await one.stored(0, 1)
            assert one.stream.counts.damaged == 1

    run(test())


def test_a_batch_of_another_rank_is_refused() -> None:
    async def test() -> None:
        async with FakePublisher(rank=3) as publisher, followed(publisher) as one:
            await publisher.publish(block(0))
            refused = await one.next(KvRefused)
            assert isinstance(refused, KvRefused)
            assert "rank 3" in refused.what

    run(test())


def test_a_follower_that_nobody_answers_does_not_start() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            dead = publisher.source(replay="tcp://127.0.0.1:9", replay_s=0.05)
            streams = KvStreams([KvStream(dead, KvBooks(RANK, 0, 4), lambda event: None)])
            with pytest.raises(EngineError, match="nobody repeats KV events at tcp"):
                await streams.start()

    run(test())


def test_a_publisher_may_connect_to_the_follower() -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        publisher = context.socket(zmq.XPUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        publisher.unbind(f"tcp://127.0.0.1:{port}")
        one = Followed(KvSource(endpoint=f"tcp://127.0.0.1:{port}", replay=None, topic="kv", bind=True))
        await one.stream.start()
        publisher.connect(f"tcp://127.0.0.1:{port}")
        await publisher.recv()
        await publisher.send_multipart([b"kv", bytes(8), msgpack.packb([1.0, [block(0)], 0])])
        await one.stored(0)
        await one.stream.close()
        publisher.close(linger=0)
        context.term()

    run(test())


# ---------------------------------------------------------------- TensorRT-LLM


class Drained:
    """A server's list, and what was posted of it."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.posted: asyncio.Queue[KvEvent] = asyncio.Queue()
        self.books = KvBooks(RANK, 0, 4)
        self.drain = KvDrain(self.lists.get, [self.books], self.posted.put_nowait, every_s=0.0)

    def tell(self, number: int, n: int, window: int = 4096) -> None:
        tokens = [{"token_id": token, "token_extra_id": 0} for token in PROMPT[4 * n : 4 * n + 4]]
        blocks = [{"block_hash": 1000 + n, "tokens": tokens, "cache_level": 0}]
        data = {"type": "stored", "parent_hash": 999 + n if n else None, "blocks": blocks}
        self.lists.put_nowait([{"event_id": number, "window_size": window, "data": data}])


def test_a_drained_list_is_followed_and_a_missing_number_is_void() -> None:
    async def test() -> None:
        one = Drained()
        one.tell(0, 0)
        await one.drain.start()
        one.tell(1, 1)
        one.tell(3, 3)
        kinds = [type(await one.posted.get()).__name__ for _ in range(4)]
        assert kinds == ["KvStored", "KvStored", "KvCleared", "KvStored"]
        assert one.books.exact is False
        assert one.drain.device_blocks == 1
        await one.drain.close()

    run(test())


def test_only_the_widest_window_counts() -> None:
    async def test() -> None:
        one = Drained()
        one.tell(0, 0)
        await one.drain.start()
        one.tell(1, 1, window=128)
        one.tell(2, 1)
        await one.posted.get()
        await one.posted.get()
        assert one.drain.device_blocks == 2
        await one.drain.close()

    run(test())
