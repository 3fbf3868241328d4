"""Which blocks simulated workers have published, where a worker gives one account of its device and its own tiers.

`News` asks what is to be told of each change; for workers that name the tier (`per_tier`) that is the change itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from policies.cluster.blocks import BlockRun
from policies.cluster.ids import Tier, WorkerId
from policies.kvbm.consolidate import DEDUPE, Change, Residency

if TYPE_CHECKING:
    from twin.engine.protocol import Pool
    from twin.worker_spec import WorkerSpec


class Accounts:
    """Of one run; a worker is here from when it starts, with nothing."""

    __slots__ = ("_residencies",)

    def __init__(self) -> None:
        self._residencies: dict[WorkerId, Residency] = {}

    def start(self, spec: WorkerSpec) -> None:
        """A worker starts: whoever had its id before is gone with all that it had."""
        if spec.tiers is not None and spec.tiers.events == DEDUPE:
            self._residencies[spec.worker_id] = Residency()

    def start_over(self, worker_id: WorkerId, pool: Pool, below: Iterable[Change]) -> None:
        """A worker is about to say anew all that it has, what it has not told yet included."""
        pool.stored, pool.removed = [], []
        residency = self._residencies.get(worker_id)
        if residency is not None:
            residency.clear()
            residency.stored(Tier.G1_DEVICE, pool.findable())
            for change in below:
                residency.stored(change.tier, change.runs)

    def take(self, worker_id: WorkerId, pool: Pool) -> tuple[Sequence[BlockRun], Sequence[BlockRun]]:
        """What is to be told of what a pool has noted, which it forgets: blocks that are gone, then those that came."""
        removed, stored = pool.removed, pool.stored
        if removed:
            pool.removed = []
        if stored:
            pool.stored = []
        residency = self._residencies.get(worker_id)
        if residency is None:
            return removed, stored
        return residency.removed(Tier.G1_DEVICE, removed), residency.stored(Tier.G1_DEVICE, stored)

    def changed(self, worker_id: WorkerId, change: Change) -> Change | None:
        """What is to be told when blocks were stored in a tier below a device, or left it."""
        residency = self._residencies.get(worker_id)
        if residency is None:
            return change
        began_or_ended = residency.stored if change.is_store else residency.removed
        return _as_device(change.is_store, began_or_ended(change.tier, change.runs))

    def lost(self, worker_id: WorkerId, tier: Tier) -> Change | None:
        """What is to be told, in place of the tier, when a tier below a device has lost everything."""
        residency = self._residencies.get(worker_id)
        return None if residency is None else _as_device(False, residency.lost(tier))

    def held(self, worker_id: WorkerId) -> list[BlockRun] | None:
        """All that a worker has published and not taken back; None for one that names the tier."""
        residency = self._residencies.get(worker_id)
        return None if residency is None else residency.held()

    def names_tiers(self, worker_id: WorkerId) -> bool:
        """Whether a worker says in which tier its blocks are."""
        return worker_id not in self._residencies


def _as_device(is_store: bool, runs: Sequence[BlockRun]) -> Change | None:
    """Told as if the worker had nothing but its device."""
    return Change(is_store, Tier.G1_DEVICE, tuple(runs)) if runs else None
