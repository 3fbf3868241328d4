"""Drains the KV events of a TensorRT-LLM server: its list is emptied by each reading, so there is one reader only.

Events are numbered per rank, and nothing can be repeated: a number that is missing makes the books void. Engines with
attention windows tell of each window's blocks; only the widest one says how far a prefix goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from executors.engines.kv_books import KvBooks
from executors.engines.kv_tell import KvTeller
from executors.engines.kv_wire import trtllm
from policies.cluster.events import Event
from policies.errors import EngineError


class KvDrain(KvTeller):
    """The events of all ranks of one server on their way into their books. `read` empties the server's list; it is
    asked again `every_s` after each answer."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        books: Sequence[KvBooks],
        post: Callable[[Event], None],
        now: Callable[[], float],
        every_s: float = 0.05,
    ) -> None:
        """Begin to ask."""
        super().__init__(books, post, now)
        self._read = read
        self._every_s = every_s
        self._expected: dict[int, int] = {}
        self._widest = 0
        self._read_once = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="kv events of a trtllm server")

    async def stands(self, deadline_s: float) -> None:
        """Returns when the list has been read once: what comes later waits in it."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._read_once.wait()
        except TimeoutError:
            said = self._why_not.get(next(iter(self.books)))
            raise EngineError(f"its KV events cannot be read: {said or f'no answer in {deadline_s:g} s'}") from None

    async def close(self) -> None:
        """Stop asking. May be called twice."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            why_not = None
            try:
                for event in await self._read():
                    self._take(event)
                self.heard()
                self._read_once.set()
            except EngineError as error:
                why_not = str(error)
            for books in self.books.values():
                self.knows(books, why_not)
            await asyncio.sleep(self._every_s)

    def _take(self, event: Mapping[str, Any]) -> None:
        books = self.books.get(event.get("attention_dp_rank") or 0)
        if books is None:
            return
        news = trtllm(event, books.block_size)
        rank = books.rank.dp_rank
        expected = self._expected.get(rank, 0)
        if news.number < expected:
            self.restarted(books)
            expected = 0
        if news.number > expected:
            lost = f"KV events {expected} to {news.number - 1} are lost: the server's list was too short, or read twice"
            self.void(books, lost)
        self._expected[rank] = news.number + 1
        self._widest = max(self._widest, news.window or 0)
        if (news.window or self._widest) == self._widest:
            self.tell(books, news.said)
