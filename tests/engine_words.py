"""A scene whose workers speak of their blocks as engines do: the content of `builders.Scene`, in numbered events with
ids of their own. Whoever asks them for all that they hold is told at once that it is nothing: they register empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from builders import BLOCK_SIZE, Scene

from policies.cluster.actions import Action, RequestIndexDump
from policies.cluster.events import Event, RequestArrived, WorkerUp
from policies.cluster.ids import Tier, WorkerId
from policies.cluster.kv_events import IndexDump, KvCleared, KvRemoved, KvStored
from twin.mocker.kvnames import BlockNames

Rank = tuple[int, int]


class EngineScene(Scene):
    """`rank` names the data-parallel rank that speaks."""

    def __init__(self, *args: object, **options: object) -> None:
        self.names = BlockNames(BLOCK_SIZE, BLOCK_SIZE)
        self._epochs: dict[int, int] = {}
        self._said: dict[Rank, int] = {}
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def post(self, event: Event) -> list[Action]:
        if isinstance(event, WorkerUp):
            self._epochs[event.worker_id] = event.epoch
            self._said.update({(event.worker_id, rank): 0 for rank in range(event.dp_ranks)})
        elif isinstance(event, RequestArrived):
            event = self.named(event)
        actions = super().post(event)
        for asked in actions:
            if isinstance(asked, RequestIndexDump):
                names = {name: getattr(asked, name) for name in ("worker_id", "dp_rank", "epoch", "ask", "origin")}
                self.post(IndexDump(at_s=self.now_s, last_id=None, entries=(), **names))
        return actions

    def named(self, event: RequestArrived) -> RequestArrived:
        return event if event.blocks is None else replace(event, local_hashes=self.names.prompt(event.blocks))

    def stored(
        self, worker_id: int, keys: Sequence[int], lo: int = 0, tier: Tier = Tier.G1_DEVICE, rank: int = 0
    ) -> None:
        runs = self._runs(keys, lo)
        parts = [self.names.of(*run) for run in runs]
        self.post(
            KvStored(
                **self._next(worker_id, rank),
                exts=tuple(ext for part in parts for ext in part.exts),
                local_hashes=tuple(name for part in parts for name in part.local_hashes),
                parent_ext=self.names.before(runs[0].branch, runs[0].lo),
                start_position=runs[0].lo,
                tier=tier,
            )
        )

    def removed(
        self, worker_id: int, keys: Sequence[int], lo: int = 0, tier: Tier = Tier.G1_DEVICE, rank: int = 0
    ) -> None:
        exts = tuple(ext for run in self._runs(keys, lo) for ext in self.names.of(*run).exts)
        self.post(KvRemoved(**self._next(worker_id, rank), exts=exts, tier=tier))

    def cleared(self, worker_id: int, tier: Tier | None = None, rank: int = 0) -> None:
        self.post(KvCleared(**self._next(worker_id, rank), tier=tier))

    def _next(self, worker_id: int, rank: int) -> dict:
        """What every event of a rank says, with its next number."""
        number = self._said[worker_id, rank]
        self._said[worker_id, rank] += 1
        return {
            "at_s": self.next_s,
            "worker_id": WorkerId(worker_id),
            "dp_rank": rank,
            "epoch": self._epochs[worker_id],
            "event_id": number,
        }
