"""Following KV events over real sockets: nothing is missed, nothing is taken twice, and what is lost is said."""

from __future__ import annotations

import asyncio
import tempfile
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
from executors.engines.kv_follow import FollowCounts, KvSource, KvStreams
from policies.cluster.actions import RequestIndexDump
from policies.cluster.events import Event
from policies.cluster.hashing import local_hashes
from policies.cluster.ids import RankId
from policies.cluster.kv_events import IndexDump, IndexRecoveryFailed, KvCleared, KvRefused, KvStored
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
    """A rank that is followed into a router's index, and a queue of what was posted."""

    def __init__(self, source: KvSource) -> None:
        self.books = KvBooks(RANK, 0, 4)
        self.streams = KvStreams({0: source}, [self.books], self._post, lambda: 0.0)
        self.index = Asking(4, self.streams.ask)
        self.posted: asyncio.Queue[Event] = asyncio.Queue()
        self.index.up()

    def _post(self, event: Event) -> None:
        self.posted.put_nowait(event)
        self.index.on(event)

    @property
    def counts(self) -> FollowCounts:
        (stream,) = self.streams.streams
        return stream.counts

    async def next(self, kind: type[Event]) -> Event:
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
    """A follower that is subscribed."""
    one = Followed(publisher.source(**changes))
    try:
        await publisher.subscribed()
        yield one
    finally:
        await one.streams.close()


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
                await one.stored(0, 1, 2)
                dump = await one.next(IndexDump)
                assert isinstance(dump, IndexDump)
                assert dump.last_id == 2
                await publisher.publish(block(3))
                await one.stored(3)
                assert one.index.depth(HASHES) == 4
                assert one.index.mode is FeedMode.LIVE
                assert one.counts.repeated == 2

    run(test())


def test_it_stands_once_it_has_met_the_publisher_and_asked_for_the_beginning() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0))
            one = Followed(publisher.source())
            await one.streams.stands(LIMIT_S)
            await publisher.subscribed()
            await one.stored(0)
            assert publisher.asked_from == [0]
            await one.streams.close()

    run(test())


@pytest.mark.parametrize("replay", [None, "tcp://127.0.0.1:9"])
def test_it_does_not_stand_where_nobody_publishes(replay: str | None) -> None:
    async def test() -> None:
        one = Followed(KvSource(endpoint="tcp://127.0.0.1:9", replay=replay, replay_s=0.05))
        with pytest.raises(EngineError, match=r"nobody publishes KV events at tcp://127.0.0.1:9 within 0.2 s"):
            await one.streams.stands(0.2)
        await one.streams.close()

    run(test())


def test_it_does_not_stand_where_it_cannot_listen() -> None:
    async def test() -> None:
        one = Followed(KvSource(endpoint="tcp://127.0.0.1:none", replay=None))
        with pytest.raises(EngineError, match="cannot listen for KV events"):
            await one.streams.stands(LIMIT_S)
        await one.streams.close()

    run(test())


def test_a_silent_publisher_that_nobody_can_ask_is_no_evidence() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            for replay, heard_s in ((None, None), (publisher.source().replay, 0.0)):
                async with followed(publisher, replay=replay) as one:
                    await one.next(IndexDump)
                    assert one.streams.heard_s == heard_s

    run(test())


def test_a_gap_is_closed_by_a_repetition() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await one.next(IndexDump)
            await publisher.publish(block(0))
            await publisher.publish(block(1), sent=False)
            await publisher.publish(block(2))
            await one.stored(0, 1, 2)
            assert publisher.asked_from == [0, 1]
            assert one.counts.gaps == 1
            assert one.index.mode is FeedMode.LIVE

    run(test())


def test_a_lost_last_batch_is_found_by_asking() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=0.01) as one:
            await one.next(IndexDump)
            await publisher.publish(block(0), sent=False)
            await one.stored(0)
            assert one.counts.gaps == 0

    run(test())


def test_what_nobody_can_repeat_makes_the_index_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await one.next(IndexDump)
            await publisher.publish(block(0))
            await publisher.publish(block(1), sent=False, kept=False)
            await publisher.publish(block(2))
            await one.stored(0)
            cleared = await one.next(KvCleared)
            assert isinstance(cleared, KvCleared)
            assert cleared.event_id == 2  # number 1 is what was lost
            await one.next(IndexRecoveryFailed)
            await one.stored(2)
            assert one.index.mode is FeedMode.DEGRADED
            assert one.index.depth(HASHES) == 0
            assert one.counts.lost == one.books.counts.voids == 1

    run(test())


def test_a_buffer_that_begins_too_late_makes_the_index_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0), kept=False)
            await publisher.publish(block(1))
            async with followed(publisher) as one:
                await one.next(KvCleared)
                await one.stored(1)
                failed = await one.next(IndexRecoveryFailed)
                assert isinstance(failed, IndexRecoveryFailed)
                assert "batches 0 to 0 are lost" in failed.reason
                assert one.index.mode is FeedMode.DEGRADED

    run(test())


def test_without_a_replay_endpoint_a_late_start_is_void() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            await publisher.publish(block(0))
            async with followed(publisher, replay=None) as one:
                await one.next(IndexDump)  # of nothing: it cannot know better yet
                await publisher.publish(block(1))
                await one.next(KvCleared)
                await one.next(IndexRecoveryFailed)
                await one.stored(1)
                assert one.books.exact is False

    run(test())


def test_a_publisher_that_begins_anew_holds_nothing_of_before() -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await one.next(IndexDump)
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
            assert one.counts.restarts == 1

    run(test())


@pytest.mark.parametrize("payload", [b"\xc1", b""])
def test_a_damaged_message_is_counted_and_has_its_number_repeated(payload: bytes) -> None:
    async def test() -> None:
        async with FakePublisher() as publisher, followed(publisher, quiet_s=LIMIT_S) as one:
            await one.next(IndexDump)
            await publisher.send(payload)
            await publisher.publish(block(0), sent=False)
            await publisher.publish(block(1))
            await one.next(KvRefused)
            await one.stored(0, 1)
            assert one.counts.damaged == 1

    run(test())


def test_a_batch_of_another_rank_is_refused() -> None:
    async def test() -> None:
        async with FakePublisher(rank=3) as publisher, followed(publisher) as one:
            await one.next(IndexDump)
            await publisher.publish(block(0))
            refused = await one.next(KvRefused)
            assert isinstance(refused, KvRefused)
            assert "rank 3" in refused.what

    run(test())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"replay": "tcp://127.0.0.1:9", "replay_s": 0.05}, "nobody repeats KV events at tcp://127.0.0.1:9"),
        ({"endpoint": "tcp://127.0.0.1:none"}, "cannot listen for KV events at tcp://127.0.0.1:none"),
    ],
)
def test_who_cannot_be_followed_is_not_known(changes: dict[str, Any], why: str) -> None:
    async def test() -> None:
        async with FakePublisher() as publisher:
            one = Followed(publisher.source(**changes))
            failed = await one.next(IndexRecoveryFailed)
            assert isinstance(failed, IndexRecoveryFailed)
            assert failed.reason.startswith(why)
            assert one.index.mode is FeedMode.DEGRADED
            await one.streams.close()
            await one.streams.close()

    run(test())


def test_each_rank_answers_for_itself() -> None:
    async def test() -> None:
        async with FakePublisher() as first, FakePublisher(rank=1) as second:
            await second.publish(block(0))
            ranks = [RANK, RankId(RANK.worker_id, 1)]
            posted: asyncio.Queue[Event] = asyncio.Queue()
            sources = {0: first.source(replay="tcp://127.0.0.1:9", replay_s=LIMIT_S), 1: second.source()}
            streams = KvStreams(sources, [KvBooks(rank, 0, 4) for rank in ranks], posted.put_nowait, lambda: 0.0)
            for rank in ranks:
                streams.ask(RequestIndexDump(worker_id=rank.worker_id, dp_rank=rank.dp_rank, epoch=0, ask=1, reason=""))
            stored, dump = await posted.get(), await posted.get()
            assert isinstance(stored, KvStored)
            assert isinstance(dump, IndexDump)
            assert (stored.dp_rank, dump.dp_rank) == (1, 1)
            assert posted.empty()
            await streams.close()

    run(test())


def test_a_publisher_may_connect_to_the_follower() -> None:
    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"ipc://{folder}/kv"
            publisher = zmq.asyncio.Context.instance().socket(zmq.XPUB)
            one = Followed(KvSource(endpoint=endpoint, replay=None, topic="kv", bind=True))
            try:
                await one.next(IndexDump)
                publisher.connect(endpoint)
                await publisher.recv()
                await publisher.send_multipart([b"kv", bytes(8), msgpack.packb([1.0, [block(0)], 0])])
                await one.stored(0)
            finally:
                await one.streams.close()
                publisher.close(linger=0)

    run(test())


# ---------------------------------------------------------------- TensorRT-LLM


class Drained:
    """A server's list, and what was posted of it."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.posted: asyncio.Queue[Event] = asyncio.Queue()
        self.books = KvBooks(RANK, 0, 4)
        self.drain = KvDrain(self.lists.get, [self.books], self.posted.put_nowait, lambda: 0.0, every_s=0.0)

    def tell(self, number: int, n: int, window: int = 4096) -> None:
        tokens = [{"token_id": token, "token_extra_id": 0} for token in PROMPT[4 * n : 4 * n + 4]]
        blocks = [{"block_hash": 1000 + n, "tokens": tokens, "cache_level": 0}]
        data = {"type": "stored", "parent_hash": 999 + n if n else None, "blocks": blocks}
        self.lists.put_nowait([{"event_id": number, "window_size": window, "data": data}])


def test_a_drained_list_is_followed_and_a_missing_number_is_void() -> None:
    async def test() -> None:
        one = Drained()
        one.tell(0, 0)
        one.tell(1, 1)
        one.tell(3, 3)
        kinds = [type(await one.posted.get()).__name__ for _ in range(4)]
        assert kinds == ["KvStored", "KvStored", "KvCleared", "KvStored"]
        assert one.books.exact is False
        assert one.drain.device_blocks == 1
        await one.drain.close()

    run(test())


def test_a_list_stands_when_it_was_read_once() -> None:
    async def test() -> None:
        one = Drained()
        with pytest.raises(EngineError, match=r"cannot be read: no answer in 0.05 s"):
            await one.drain.stands(0.05)
        one.tell(0, 0)
        await one.drain.stands(LIMIT_S)
        assert one.posted.qsize() == 1
        await one.drain.close()

    run(test())


def test_only_the_widest_window_counts() -> None:
    async def test() -> None:
        one = Drained()
        one.tell(0, 0)
        one.tell(1, 1, window=128)
        one.tell(2, 1)
        await one.posted.get()
        await one.posted.get()
        assert one.drain.device_blocks == 2
        await one.drain.close()

    run(test())
