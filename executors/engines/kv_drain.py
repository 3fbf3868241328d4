"""Drains the KV events of a TensorRT-LLM server: its list is emptied by each read, so there is one reader only.

Its events are numbered per server, and nothing can be repeated: a number that is missing makes the books void. Engines
with attention windows tell of each window's blocks; only the widest window says how far a prefix goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from executors.engines.kv_books import KvBooks
from executors.engines.kv_wire import trtllm
from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.ids import Tier
from policies.cluster.kv_events import IndexAnswer, KvEvent
from policies.errors import EngineError


class KvDrain:
    """The events of all ranks of one server on their way into their books. `read` empties the server's list; it is
    asked again `every_s` after each answer."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        books: Sequence[KvBooks],
        post: Callable[[KvEvent], None],
        every_s: float = 0.05,
    ) -> None:
        self._read = read
        self._books = {one.rank.dp_rank: one for one in books}
        self._post = post
        self._every_s = every_s
        self._expected: dict[int, int] = {}
        self._widest = 0
        self.heard_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take what there is, and go on. Raises EngineError when the server does not answer."""
        await self._once()
        self._task = asyncio.create_task(self._run(), name="kv events of a trtllm server")

    def answer(self, request: RequestIndexReplay | RequestIndexDump) -> IndexAnswer:
        return self._books[request.dp_rank].answer(request, _now_s())

    @property
    def device_blocks(self) -> int:
        return sum(one.copies()[Tier.G1_DEVICE] for one in self._books.values())

    async def close(self) -> None:
        """Stop asking. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            with contextlib.suppress(EngineError):  # it may be busy or gone: health checks find out
                await self._once()

    async def _once(self) -> None:
        for event in await self._read():
            self._take(event)
        self.heard_s = _now_s()

    def _take(self, event: Mapping[str, Any]) -> None:
        books = self._books.get(event.get("attention_dp_rank") or 0)
        if books is None:
            return
        news = trtllm(event, books.block_size)
        rank = books.rank.dp_rank
        expected = self._expected.get(rank, 0)
        if news.number < expected:
            self._post(books.restarted(_now_s()))
            expected = 0
        if news.number > expected:
            lost = f"KV events {expected} to {news.number - 1} are lost: the server's list was too short, or read twice"
            self._post(books.void(lost, _now_s()))
        self._expected[rank] = news.number + 1
        self._widest = max(self._widest, news.window or 0)
        if (news.window or self._widest) == self._widest:
            for told in books.take(news.said, _now_s()):
                self._post(told)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
