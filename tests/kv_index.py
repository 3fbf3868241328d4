"""A router's index in front of whoever follows KV events: its questions go where a world would send them."""

from __future__ import annotations

from collections.abc import Callable

from executors.engines.kv_books import KvBooks
from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.events import Event, WorkerUp
from policies.cluster.ids import RankId, Role, WorkerId
from policies.router.chains.feed import FeedMode
from policies.router.chains.live import LiveIndex

RANK = RankId(WorkerId(0), 0)


class Asking:
    """An index whose questions go to `ask`; what follows is to be given to `on`."""

    def __init__(self, block_size: int, ask: Callable[[RequestIndexReplay | RequestIndexDump], None]) -> None:
        self.index = LiveIndex(block_size)
        self.ask = ask

    @classmethod
    def of(cls, books: KvBooks) -> Asking:
        """One that is answered from books at once."""
        one = cls(books.block_size, lambda order: one.on(books.answer(order, 0.0)))
        return one

    def up(self) -> None:
        """The worker registers: the index asks for all that it holds."""
        size = self.index.block_size
        self.on(
            WorkerUp(
                at_s=0.0,
                worker_id=RANK.worker_id,
                name="w",
                role=Role.MIXED,
                block_size=size,
                total_blocks=None,
                max_batched_tokens=None,
                max_num_seqs=8,
            )
        )

    def on(self, event: Event) -> None:
        for order in self.index.on(event):
            if isinstance(order, RequestIndexReplay | RequestIndexDump):
                self.ask(order)

    @property
    def mode(self) -> FeedMode | None:
        return self.index.mode(RANK)

    def depth(self, local_hashes: list[int]) -> int:
        """Leading blocks of a prompt that the worker has on its device."""
        return self.index.depths(self.index.path(local_hashes), len(local_hashes)).get(RANK, 0)
