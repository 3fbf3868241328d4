"""Host memory of other workers: who has which blocks there, and what one worker may read of it.

What a worker has is known here from when it has landed until it leaves, and all of it vanishes with its worker; the
leases of those that are there are renewed, so none ever runs out. A hit is a hint: the read may still fail. It moves
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import WorkerId
from policies.kvbm.health import NegativeCache
from policies.kvbm.level import TierBody
from policies.kvbm.look_up import Pieces
from policies.kvbm.store import TierStore
from policies.kvbm.tiers import TierSpec


class _Member(NamedTuple):
    body: TierBody
    layout: Hashable


class PeerMemory:
    """Host memory of the workers of a run that let others read it. A `layout` tells contents of differently laid out
    engines apart."""

    __slots__ = ("_blocks", "_members")

    def __init__(self) -> None:
        self._members: dict[WorkerId, _Member] = {}
        self._blocks: dict[Branch, dict[WorkerId, int]] = {}

    def __len__(self) -> int:
        """Blocks on record, over all workers."""
        return sum(sum(owners.values()) for owners in self._blocks.values())

    def join(self, owner: WorkerId, body: TierBody, layout: Hashable) -> None:
        """A worker is there, and its host memory is empty."""
        self.lost(owner)
        self._members[owner] = _Member(body, layout)

    def changed(self, owner: WorkerId, is_store: bool, runs: Iterable[BlockRun]) -> None:
        """Blocks have landed in a worker's host memory, or left it."""
        for branch, lo, hi in runs if owner in self._members else ():
            owners = self._blocks.setdefault(branch, {})
            owners[owner] = owners.get(owner, 0) + (hi - lo if is_store else lo - hi)
            if not owners[owner]:
                del owners[owner]
                if not owners:
                    del self._blocks[branch]

    def cleared(self, owner: WorkerId) -> None:
        """A worker's host memory has lost everything."""
        for branch in [branch for branch, owners in self._blocks.items() if owner in owners]:
            del self._blocks[branch][owner]
            if not self._blocks[branch]:
                del self._blocks[branch]

    def lost(self, owner: WorkerId) -> None:
        """A worker is gone, and its memory with it."""
        if self._members.pop(owner, None) is not None:
            self.cleared(owner)

    def body(self, owner: WorkerId) -> TierBody | None:
        """The host memory of a worker; None when it is gone."""
        member = self._members.get(owner)
        return member.body if member is not None else None

    def holders(self, reader: WorkerId, layout: Hashable, pieces: Pieces) -> list[tuple[WorkerId, TierStore]]:
        """Who has any of a prompt's content in that layout, but for the reader; whoever has most of it first."""
        blocks: dict[WorkerId, int] = {}
        for branch, _ in pieces:
            for owner, count in self._blocks.get(branch, {}).items():
                blocks[owner] = blocks.get(owner, 0) + count
        blocks.pop(reader, None)
        members = self._members
        return [
            (owner, members[owner].body.store)
            for owner in sorted(blocks, key=lambda owner: (-blocks[owner], owner))
            if members[owner].layout == layout and members[owner].body.health.reads
        ]


class PeerView:
    """What one worker reads of others, and tells them. `spec` says how long a read takes that is alone; blocks that
    came damaged are not asked of any peer for a second, and stay where they are."""

    __slots__ = ("_layout", "_memory", "_worker_id", "failed_reads", "loaded", "negative", "spec")

    def __init__(self, memory: PeerMemory, worker_id: WorkerId, body: TierBody, spec: TierSpec, layout: Hashable):
        self._memory = memory
        self._worker_id = worker_id
        self._layout = layout
        self.spec = spec
        self.negative = NegativeCache()
        self.loaded = 0
        self.failed_reads = 0
        memory.join(worker_id, body, layout)

    def holders(self, pieces: Pieces) -> list[tuple[WorkerId, TierStore]]:
        """Where blocks of a prompt may be read."""
        return self._memory.holders(self._worker_id, self._layout, pieces)

    def store(self, owner: WorkerId) -> TierStore | None:
        """What a peer's host memory holds now; None when the peer is gone."""
        body = self._memory.body(owner)
        return body.store if body is not None else None

    def changed(self, is_store: bool, runs: Iterable[BlockRun]) -> None:
        """Blocks have landed in this worker's host memory, or left it."""
        self._memory.changed(self._worker_id, is_store, runs)

    def cleared(self) -> None:
        """This worker's host memory has lost everything."""
        self._memory.cleared(self._worker_id)

    def close(self) -> None:
        """This worker is gone."""
        self._memory.lost(self._worker_id)
