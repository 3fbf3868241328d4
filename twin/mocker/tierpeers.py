"""Reads of other workers' host memory in a simulated run: who may read whom, and which lanes the bytes cross.

It decides nothing: what is read is the reader's block manager's to say, and `tierloads` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.cluster.ids import WorkerId
from policies.kvbm.level import TierBody
from policies.kvbm.peers import PeerMemory, PeerView
from policies.kvbm.registry import Lease
from twin.mocker.tierplan import Lanes, PeerPlan, joined, share


class TierPeers:
    """Of one run. A worker is here from when it comes up; its lanes stay known when it is gone."""

    def __init__(self) -> None:
        self.memory = PeerMemory()
        self._plans: dict[WorkerId, PeerPlan] = {}

    def view(
        self,
        worker_id: WorkerId,
        plan: PeerPlan,
        body: TierBody,
        lease: Lease,
        reaches: Callable[[WorkerId], bool],
    ) -> PeerView:
        """What a worker that comes up reads of others that it `reaches`; `body` is its own host memory, which they may
        read."""
        self._plans[worker_id] = plan
        return PeerView(self.memory, worker_id, body, plan.spec, plan.layout, lease, reaches)

    def way(self, reader: WorkerId, owner: WorkerId, *, rank: int = 0, ranks: int = 1) -> tuple[Lanes, float]:
        """The lanes of a read, out of one worker and into the other up to the device of one of its ranks, and what
        passes before its first byte."""
        mine = self._plans[reader]
        into, up = share(mine.into, rank, ranks), share(mine.up, rank, ranks)
        return joined(joined(self._plans[owner].out, into), up), mine.spec.latency_s
