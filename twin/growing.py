"""Workers that a run did not begin with: what a new one of a group is, wired and with tiers as its fellows are.

Names go on where the group's ended, and none is given twice. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from twin.config import Config
from twin.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from twin.cluster import Group
    from twin.mocker.links import Network
    from twin.topology import Topology


class Growing:
    """Makes further workers of the groups of one run. `bare` are the groups as `build_groups` makes them; links that a
    new worker brings are added to `network`, its ways to `topology`. `startup_s` holds where a group says nothing."""

    def __init__(
        self,
        config: Config,
        bare: tuple[Group, ...],
        topology: Topology | None,
        network: Network | None,
        startup_s: Mapping[str, float],
    ) -> None:
        self._config = config
        self._bare = {group.config.name: group for group in bare}
        self._topology = topology
        self._network = network
        self._startup_s = startup_s
        self._members = {group.config.name: [spec.worker_id for spec in group.workers] for group in bare}

    def make(self, group: str, worker_id: WorkerId) -> WorkerSpec:
        """A new worker of a group, not started. Raises ConfigError for a group that there is not."""
        bare = self._bare.get(group)
        if bare is None:
            raise ConfigError(f"a worker of group {group} was ordered; there are {', '.join(self._bare)}")
        first, members = bare.workers[0], self._members[group]
        spec = replace(
            first, worker_id=worker_id, name=f"{group}-{len(members)}", startup_s=self._startup_s.get(group, 0.0)
        )
        members.append(worker_id)
        grown = replace(bare, workers=(first, spec))
        if self._topology is not None:
            grown = self._wired(grown, worker_id)
        if bare.config.kvbm.has_tiers:
            grown = self._tiered(grown)
        made = grown.workers[-1]
        if made.weights is not None and made.weights.peers is not None:
            made = replace(made, weights=replace(made.weights, peers=tuple(members)))
        return made

    def _wired(self, group: Group, worker_id: WorkerId) -> Group:
        from twin.topology import build_topology, wired

        part = build_topology(self._config, (group,))
        if part is None:
            return group
        assert self._topology is not None
        assert self._network is not None
        self._network.add(part.links)
        self._topology.admit(part.endpoints[worker_id])
        return wired(group, part)

    def _tiered(self, group: Group) -> Group:
        from twin import tiering

        assert self._network is not None
        self._network.add(tiering.tier_links((group,)))
        (tiered,) = tiering.tiered((group,))
        return tiered
