"""Which simulated worker stands for which live one: as they join, the next of their group that nobody stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.cluster.ids import WorkerId
from policies.errors import CapabilityError
from twin.cluster import Group
from twin.shadow.facts import Joined
from twin.wiring import Cluster
from twin.worker_spec import WorkerSpec


class Workers:
    """Of one cluster. Live ids follow the order in which engines come up, those of the configuration its groups; within
    a group all are alike. `is_there`: whether a simulated worker has not gone yet: one that drains may take
    longer than the live one did, and what it has is not to be lost for another."""

    def __init__(self, cluster: Cluster, is_there: Callable[[WorkerId], bool]) -> None:
        self._is_there = is_there
        self._groups = {group.config.name: group for group in cluster.groups}
        self._fixed = cluster.topology is not None or bool(cluster.tier_links)
        self._free = {group.config.name: list(group.workers) for group in cluster.groups}
        self._next_id = len(cluster.workers)
        self._specs: dict[WorkerId, tuple[str, WorkerSpec]] = {}
        self.ever: dict[WorkerId, tuple[str, WorkerSpec]] = {}
        """Those that there were, by the id in the simulation, with the group of each."""

    def join(self, joined: Joined) -> WorkerSpec:
        """The worker that stands for a live one from now on, with the room that its engine says it has.

        Raises CapabilityError where the configuration has no place for one more."""
        name, spec = self._specs.get(joined.worker_id) or (joined.group, self._place(joined.group))
        spec = _with_room(spec, joined)
        self._specs[joined.worker_id] = self.ever[spec.worker_id] = (name, spec)
        return spec

    def left(self, worker_id: WorkerId) -> WorkerId | None:
        """Who stood for a live worker that is gone; its place is free."""
        found = self._specs.pop(worker_id, None)
        if found is None:
            return None
        name, spec = found
        self._free[name].append(spec)
        return spec.worker_id

    def of(self, worker_id: WorkerId | None) -> WorkerId | None:
        """Who stands for a live worker; None for one that nobody stands for."""
        found = self._specs.get(worker_id) if worker_id is not None else None
        return None if found is None else found[1].worker_id

    def groups(self) -> tuple[Group, ...]:
        """The groups, each with the workers that it had."""
        return tuple(
            replace(group, workers=tuple(spec for of, spec in self.ever.values() if of == name))
            for name, group in self._groups.items()
        )

    def _place(self, name: str) -> WorkerSpec:
        group = self._groups[name]
        free = self._free[name]
        for spec in free:
            if self._fixed or not self._is_there(spec.worker_id):
                free.remove(spec)
                return spec
        if self._fixed:
            raise CapabilityError(
                f"group {name} has {group.config.count} workers in the configuration, and links or tiers for no more: "
                "one more is not simulated"
            )
        self._next_id += 1
        number = sum(of == name for of, _ in self.ever.values())
        return replace(group.workers[0], worker_id=WorkerId(self._next_id - 1), name=f"{name}-{number}")


def _with_room(spec: WorkerSpec, joined: Joined) -> WorkerSpec:
    """The pool and the batch that the engine itself tells of, which need not be what was computed for it."""
    settings = spec.settings
    blocks, most = settings.blocks, settings.max_num_seqs
    if joined.pool_tokens:
        blocks = max(1, joined.pool_tokens // settings.block_size // settings.ranks)
    if joined.max_num_seqs:
        most = max(1, joined.max_num_seqs // settings.ranks)
    return replace(spec, settings=replace(settings, blocks=blocks, max_num_seqs=most))
