"""A publisher of KV events as vLLM and SGLang are one: numbered batches over PUB, earlier ones repeated over ROUTER.

It misbehaves on request: batches that are never sent, a buffer that forgets, a new beginning, messages that are no
batches. It waits until somebody has subscribed, so no test has to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from executors.engines.kv_follow import KvSource

_END = b"\xff" * 8


class FakePublisher:
    """`async with` it; `source` is where a follower finds it."""

    def __init__(self, topic: str = "kv@fake", rank: int = 0) -> None:
        self.topic, self.rank = topic, rank
        self.number = 0
        self.asked_from: list[int] = []
        self._now_s = 0.0
        self._kept: list[tuple[int, bytes]] = []
        self._context = zmq.asyncio.Context.instance()

    async def __aenter__(self) -> FakePublisher:
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        for socket in (self._pub, self._router):
            socket.bind("tcp://127.0.0.1:0")
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for socket in (self._pub, self._router):
            socket.close(linger=0)

    def source(self, **changes: Any) -> KvSource:
        ends = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self._pub, self._router)]
        return KvSource(**{"endpoint": ends[0], "replay": ends[1], "topic": self.topic} | changes)

    async def subscribed(self) -> None:
        """Somebody listens."""
        await self._pub.recv()

    async def publish(self, *events: Mapping[str, Any], sent: bool = True, kept: bool = True) -> None:
        """A batch; `sent` and `kept` say whether it goes out, and whether it can be repeated."""
        self._now_s += 1.0
        payload = msgpack.packb([self._now_s, list(events), self.rank])
        if kept:
            self._kept.append((self.number, payload))
        if sent:
            await self.send(payload)
        self.number += 1

    async def send(self, payload: bytes) -> None:
        """Anything under the next number."""
        await self._pub.send_multipart([self.topic.encode(), self.number.to_bytes(8, "big"), payload])

    def restart(self) -> None:
        """Begin anew, with nothing kept."""
        self.number = 0
        self._kept.clear()

    async def _repeat(self) -> None:
        while True:
            who, _, first = await self._router.recv_multipart()
            self.asked_from.append(int.from_bytes(first, "big"))
            for number, payload in self._kept:
                if number >= self.asked_from[-1]:
                    frames = [who, b"", self.topic.encode(), number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([who, b"", b"", _END, b""])
