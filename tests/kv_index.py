"""A router's index in front of a follower: what it asks for is answered at once, as a world would."""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.events import Event, WorkerUp
from policies.cluster.ids import RankId, Role, WorkerId
from policies.cluster.kv_events import IndexAnswer
from policies.router.chains.feed import FeedMode
from policies.router.chains.live import LiveIndex

RANK = RankId(WorkerId(0), 0)


class Asking:
    """An index whose questions go to `answer`."""

    def __init__(self, block_size: int, answer: Callable[[RequestIndexReplay | RequestIndexDump], IndexAnswer]) -> None:
        self.index = LiveIndex(block_size)
        self.answer = answer

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
                self.on(self.answer(order))

    @property
    def mode(self) -> FeedMode | None:
        return self.index.mode(RANK)

    def depth(self, local_hashes: list[int]) -> int:
        """Leading blocks of a prompt that the worker has on its device."""
        return self.index.depths(self.index.path(local_hashes), len(local_hashes)).get(RANK, 0)
