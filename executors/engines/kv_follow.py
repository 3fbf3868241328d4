"""Follows the KV events of one rank over ZMQ: in order, each batch once, from the first one on.

A publisher numbers its batches from 0, and whoever listens later has missed some without any sign. So a follower
connects first and has everything from 0 repeated once it has met the publisher, has every gap repeated as it finds it,
and asks for what it may have missed whenever it hears nothing. What cannot be repeated is lost: the books are void from
then on, and say so.
Events hold the token ids of prompts: they are never logged, and endpoints must be loopback, ipc or a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import zmq
import zmq.asyncio

from executors.engines.kv_books import KvBooks
from executors.engines.kv_tell import KvTeller
from executors.engines.kv_wire import Batch, Refused, batch
from policies.cluster.events import Event
from policies.errors import EngineError
from policies.frozen import frozen

_HIGH_WATER = 100_000
"""Batches that wait in our socket; as many as engines keep on their side by default."""
_NUMBER_BYTES = 8
_END = (2**64 - 1).to_bytes(_NUMBER_BYTES, "big")
"""The number that ends a repetition."""


@frozen
class KvSource:
    """Where the events of one rank come from. `bind`: the publisher connects to us. `replay`: where earlier batches are
    asked for (None: nowhere). `quiet_s`: after so long without any, we ask what we may have missed; `replay_s`: how
    long the next part of a repetition may take."""

    endpoint: str
    replay: str | None
    topic: str = ""
    bind: bool = False
    quiet_s: float = 1.0
    replay_s: float = 3.0


@dataclass(slots=True)
class FollowCounts:
    """`batches` taken; `gaps` found in their numbers, `repeated` batches that closed them; `lost` batches, that nobody
    could repeat; `restarts` of the publisher; `damaged` messages."""

    batches: int = 0
    gaps: int = 0
    repeated: int = 0
    lost: int = 0
    restarts: int = 0
    damaged: int = 0

    def table(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class KvStream:
    """The events of one rank on their way into its books."""

    def __init__(self, source: KvSource, books: KvBooks, teller: KvTeller) -> None:
        self.source = source
        self.books = books
        self.counts = FollowCounts()
        self._teller = teller
        self._expected = 0
        self._sent_s = float("-inf")  # of the last batch, by the engine's clock
        self._context = zmq.asyncio.Context.instance()  # never ended: that would keep the loop waiting
        self._met = asyncio.Event()  # the publisher and we
        self._asked = asyncio.Event()  # for what came before
        self._cannot: EngineError | None = None
        self._task = asyncio.create_task(self._run(), name=f"kv events of {books.rank}")

    async def close(self) -> None:
        """Stop listening. May be called twice."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def stands(self, deadline_s: float) -> None:
        """Returns when publisher and follower have met, and it is asked for its first batches. Raises EngineError."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._asked.wait()
                await self._met.wait()
        except TimeoutError:
            raise EngineError(
                f"nobody publishes KV events at {self.source.endpoint} within {deadline_s:g} s; is the engine told to?"
            ) from None
        if self._cannot is not None:
            raise self._cannot

    def _listen(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)  # a subscription that nobody took must not keep us
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt_string(zmq.SUBSCRIBE, self.source.topic)
        self._meeting = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            (socket.bind if self.source.bind else socket.connect)(self.source.endpoint)
        except zmq.ZMQError as error:
            self._close(socket)
            raise EngineError(f"cannot listen for KV events at {self.source.endpoint}: {error}") from error
        return socket

    async def _run(self) -> None:
        try:
            socket = self._listen()
        except EngineError as error:
            self._cannot = error
            self._met.set()
            self._asked.set()
            self._teller.knows(self.books, str(error))
            return
        meeting = asyncio.create_task(self._meet())
        try:
            if not self.source.bind:  # what is published once we have met reaches us; the rest is asked for then
                await asyncio.wait({meeting}, timeout=self.source.replay_s)
            await self._ask_again()
            while True:
                if await socket.poll(1000 * self.source.quiet_s):
                    await self._hear(await socket.recv_multipart())
                else:
                    await self._ask_again()
        finally:
            meeting.cancel()
            await asyncio.gather(meeting, return_exceptions=True)
            self._close(socket)

    async def _meet(self) -> None:
        await self._meeting.recv_multipart()
        self._met.set()

    def _close(self, socket: zmq.asyncio.Socket) -> None:
        socket.disable_monitor()
        self._meeting.close(linger=0)
        socket.close(linger=0)

    async def _ask_again(self) -> None:
        """Take what may have been missed; who waits for the books learns whether they can be trusted."""
        if await self._catch_up() or self.source.replay is None:
            self._teller.knows(self.books)
        else:
            where, limit_s = self.source.replay, self.source.replay_s
            self._teller.knows(self.books, f"nobody repeats KV events at {where} within {limit_s:g} s")

    # ------------------------------------------------------------ batches

    async def _hear(self, frames: Sequence[bytes]) -> None:
        """A message as it was published."""
        if self.source.replay is not None:
            self._teller.heard()
        number, news = self._read(frames)
        if news is None:
            return
        if number < self._expected:
            if news.sent_s <= self._sent_s:
                return  # repeated already
            self.counts.restarts += 1
            self._expected = 0
            self._teller.restarted(self.books)
        if number > self._expected:
            self.counts.gaps += 1
            await self._catch_up()
        if number > self._expected:
            self._lose(number, "nobody could repeat them" if self.source.replay else "no replay_endpoint is set")
        if number == self._expected:
            self._take(number, news)

    async def _catch_up(self) -> bool:
        """Take all that follows the last batch; whether anybody answered."""
        async with contextlib.aclosing(self._repeated(self._expected)) as repeated:
            async for frames in repeated:
                if frames[-2] == _END:
                    self._teller.heard()
                    return True
                number, news = self._read(frames)
                if number > self._expected:
                    self._lose(number, "the publisher does not keep them any more")
                if number == self._expected and news is not None:
                    self.counts.repeated += 1
                    self._take(number, news)
        return False

    async def _repeated(self, first: int) -> AsyncGenerator[Sequence[bytes]]:
        """Messages from that number on and the end mark; ends without it when the publisher falls silent."""
        if self.source.replay is None:
            self._asked.set()
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
            self._asked.set()
            while await socket.poll(1000 * self.source.replay_s):
                yield await socket.recv_multipart()
        finally:
            socket.close(linger=0)

    def _read(self, frames: Sequence[bytes]) -> tuple[int, Batch | None]:
        """Number and content of a message; no content, and said, where it has none that can be read."""
        try:
            *_, number, payload = frames
            news = batch(payload)
        except (EngineError, ValueError) as error:
            self.counts.damaged += 1
            self._note(f"message that cannot be read: {error}")
            return -1, None
        if news.dp_rank is not None and news.dp_rank != self.books.rank.dp_rank:
            self._note(f"batch of rank {news.dp_rank} on the stream of rank {self.books.rank.dp_rank}")
            return int.from_bytes(number, "big"), Batch(sent_s=news.sent_s, dp_rank=None, said=())
        return int.from_bytes(number, "big"), news

    def _take(self, number: int, news: Batch) -> None:
        self.counts.batches += 1
        self._expected = number + 1
        self._sent_s = max(self._sent_s, news.sent_s)
        self._teller.tell(self.books, news.said)

    def _lose(self, number: int, why: str) -> None:
        """Batches up to `number` are gone: go on from there, with books that know nothing."""
        self.counts.lost += number - self._expected
        what = f"KV event batches {self._expected} to {number - 1} are lost: {why}"
        self._expected = number
        self._teller.void(self.books, what)

    def _note(self, what: str) -> None:
        self._teller.tell(self.books, (Refused(what=what),))


class KvStreams(KvTeller):
    """Those of all ranks of a worker, each from a publisher of its own: `sources` by rank."""

    def __init__(
        self,
        sources: Mapping[int, KvSource],
        books: Sequence[KvBooks],
        post: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        """Begin to listen."""
        super().__init__(books, post, now)
        self.streams = [KvStream(sources[rank], one, self) for rank, one in self.books.items()]

    async def stands(self, deadline_s: float) -> None:
        await asyncio.gather(*(one.stands(deadline_s) for one in self.streams))

    async def close(self) -> None:
        for one in self.streams:
            await one.close()
