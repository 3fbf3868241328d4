"""Host memory of other workers: who has which blocks there, and what one worker may read of it.

What a worker has is on record here from when it has landed until it leaves, and all of it vanishes with its worker. One
that cannot reach the registry stays on record as it was, until its lease is over. A hit is a hint: the read may still
fail. It moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import WorkerId
from policies.kvbm.batches import between
from policies.kvbm.health import NegativeCache
from policies.kvbm.level import TierBody
from policies.kvbm.look_up import Pieces
from policies.kvbm.registry import Lease
from policies.kvbm.spans import Spans
from policies.kvbm.store import TierStore
from policies.kvbm.tiers import TierSpec


class _Member:
    """A worker on record: its host memory, its lease, and what it had when it was cut off (None: it is not)."""

    __slots__ = ("body", "frozen", "layout", "lease")

    def __init__(self, body: TierBody, layout: Hashable, lease: Lease) -> None:
        self.body = body
        self.layout = layout
        self.lease = lease
        self.frozen: Spans | None = None


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

    def join(self, owner: WorkerId, body: TierBody, layout: Hashable, lease: Lease) -> None:
        """A worker is there, and its host memory is empty."""
        self.lost(owner)
        self._members[owner] = _Member(body, layout, lease)

    def changed(self, owner: WorkerId, is_store: bool, runs: Iterable[BlockRun]) -> None:
        """Blocks have landed in a worker's host memory, or left it."""
        member = self._members.get(owner)
        for branch, lo, hi in runs if member is not None and member.frozen is None else ():
            owners = self._blocks.setdefault(branch, {})
            owners[owner] = owners.get(owner, 0) + (hi - lo if is_store else lo - hi)
            if not owners[owner]:
                del owners[owner]
                if not owners:
                    del self._blocks[branch]

    def cleared(self, owner: WorkerId) -> None:
        """A worker's host memory has lost everything; where it cannot say so, it stays on record."""
        member = self._members.get(owner)
        if member is None or member.frozen is None:
            self._forget(owner)

    def lost(self, owner: WorkerId) -> None:
        """A worker is gone, and its memory with it."""
        if self._members.pop(owner, None) is not None:
            self._forget(owner)

    def cut(self, owner: WorkerId, now_s: float) -> None:
        """A worker cannot reach the registry any more."""
        member = self._members.get(owner)
        if member is not None and member.frozen is None:
            member.frozen = Spans()
            for run in member.body.store.findable():
                member.frozen.add(*run)
            member.lease.cut(now_s)

    def back(self, owner: WorkerId, now_s: float) -> None:
        """A worker can reach it again: it says what has changed or, if its lease was over, puts all that it has."""
        member = self._members.get(owner)
        if member is not None and member.frozen is not None:
            member.frozen = None
            member.lease.back(now_s)
            self._forget(owner)
            self.changed(owner, True, member.body.store.findable())

    def body(self, owner: WorkerId) -> TierBody | None:
        """The host memory of a worker; None when it is gone."""
        member = self._members.get(owner)
        return member.body if member is not None else None

    def holders(self, reader: WorkerId, layout: Hashable, pieces: Pieces, now_s: float) -> list[WorkerId]:
        """Who is on record with any of a prompt's content in that layout, but for the reader; whoever has most of it
        first."""
        blocks: dict[WorkerId, int] = {}
        for branch, _ in pieces:
            for owner, count in self._blocks.get(branch, {}).items():
                blocks[owner] = blocks.get(owner, 0) + count
        blocks.pop(reader, None)
        return [
            owner
            for owner in sorted(blocks, key=lambda owner: (-blocks[owner], owner))
            if self._may_be_read(self._members[owner], layout, now_s)
        ]

    def listed(self, owner: WorkerId, run: BlockRun) -> list[tuple[int, int]]:
        """Which blocks of a run a worker has, as far as is on record."""
        member = self._members[owner]
        if member.frozen is not None:
            return member.frozen.common(*run)
        return between(run.lo, run.hi, member.body.store.lacking(*run))

    @staticmethod
    def _may_be_read(member: _Member, layout: Hashable, now_s: float) -> bool:
        return member.layout == layout and member.lease.holds(now_s) and member.body.health.reads

    def _forget(self, owner: WorkerId) -> None:
        for branch in [branch for branch, owners in self._blocks.items() if owner in owners]:
            del self._blocks[branch][owner]
            if not self._blocks[branch]:
                del self._blocks[branch]


class PeerView:
    """What one worker reads of others, and tells them. `spec` says how long a read takes that is alone; `reaches` says
    whether it can reach a worker now. Blocks that came damaged are not asked of any peer for a second, and stay where
    they are."""

    __slots__ = ("_layout", "_memory", "_reaches", "_worker_id", "failed_reads", "loaded", "negative", "spec")

    def __init__(
        self,
        memory: PeerMemory,
        worker_id: WorkerId,
        body: TierBody,
        spec: TierSpec,
        layout: Hashable,
        lease: Lease,
        reaches: Callable[[WorkerId], bool] = lambda _: True,
    ) -> None:
        self._memory = memory
        self._worker_id = worker_id
        self._layout = layout
        self._reaches = reaches
        self.spec = spec
        self.negative = NegativeCache()
        self.loaded = 0
        self.failed_reads = 0
        memory.join(worker_id, body, layout, lease)

    def holders(self, pieces: Pieces, now_s: float) -> list[tuple[WorkerId, TierStore]]:
        """Where blocks of a prompt may be read, for whoever knows it at once: of those that can be reached."""
        owners = self._memory.holders(self._worker_id, self._layout, pieces, now_s)
        stores = ((owner, self.store(owner)) for owner in owners if self._reaches(owner))
        return [(owner, store) for owner, store in stores if store is not None]

    def listed(self, pieces: Pieces, runs: Sequence[BlockRun], now_s: float) -> dict[WorkerId, Spans]:
        """Which of these blocks of a prompt are on record of whom, whether they can be reached or not."""
        found: dict[WorkerId, Spans] = {}
        for owner in self._memory.holders(self._worker_id, self._layout, pieces, now_s):
            spans = Spans()
            for run in runs:
                for lo, hi in self._memory.listed(owner, run):
                    spans.add(run.branch, lo, hi)
            if spans.blocks:
                found[owner] = spans
        return found

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

    def cut(self, now_s: float) -> None:
        """This worker cannot reach the registry any more."""
        self._memory.cut(self._worker_id, now_s)

    def back(self, now_s: float) -> None:
        """It can again."""
        self._memory.back(self._worker_id, now_s)

    def close(self) -> None:
        """This worker is gone."""
        self._memory.lost(self._worker_id)
