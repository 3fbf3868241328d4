"""From the configuration to what a simulated world is made of: groups of workers, links, hand-offs, how late news is.

Worlds are made of it for a trace (`twin.replay`) and beside a live cluster (`twin.shadow`). Nothing here runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.frozen import frozen
from twin.cluster import Group, build_groups
from twin.config import Config
from twin.link_use import uses_links
from twin.mocker.clock import Clock
from twin.mocker.world import Observation
from twin.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from twin.growing import Growing
    from twin.mocker.handoff import HandoffPlan
    from twin.mocker.links import Network
    from twin.perf.links import Link
    from twin.topology import Topology


@frozen
class Cluster:
    """Worker groups as they are simulated, and the links between their workers and their tiers. `bare` are the groups
    without either, from which workers are made that come later."""

    config: Config
    groups: tuple[Group, ...]
    topology: Topology | None
    tier_links: tuple[Link, ...]
    bare: tuple[Group, ...]

    @property
    def workers(self) -> list[WorkerSpec]:
        """Of all groups, in order."""
        return [spec for group in self.groups for spec in group.workers]

    def network(self) -> Network | None:
        """The links, idle, with the clock of the world that is to use them; None where there are none."""
        if self.topology is None and not self.tier_links:
            return None
        from twin.mocker.links import Network

        links = self.topology.links if self.topology is not None else ()
        return Network(Clock(), (*links, *self.tier_links))

    def handoff(self, network: Network | None) -> HandoffPlan | None:
        """How KV goes from prefill to decode workers over these links; None where every worker does both."""
        if not self.config.is_disaggregated:
            return None
        from twin.legs import handoff_plan

        links = (self.topology, network) if self.topology is not None and network is not None else None
        return handoff_plan(self.config, self.groups, links)

    def growing(self, network: Network | None) -> Growing:
        """Who makes further workers for a world with these links."""
        from twin.growing import Growing
        from twin.planning import startup_s

        times = {group.config.name: startup_s(self.config, group.config) for group in self.bare}
        return Growing(self.config, self.bare, self.topology, network, times)


def build_cluster(config: Config, *, leap: bool = True) -> Cluster:
    """Raises TwinError for what cannot be simulated."""
    groups = build_groups(config, leap=leap)
    if config.is_disaggregated:
        from twin.legs import priced_for_legs

        groups = priced_for_legs(config, groups)
    bare = groups
    topology = None
    if uses_links(config):
        from twin.topology import build_topology, wired

        topology = build_topology(config, groups)
        groups = tuple(wired(group, topology) for group in groups)
    tier_links: tuple[Link, ...] = ()
    if any(group.config.kvbm.has_tiers for group in groups):
        from twin import tiering

        tier_links = tiering.tier_links(groups)
        groups = tiering.tiered(groups)
    return Cluster(config=config, groups=groups, topology=topology, tier_links=tier_links, bare=bare)


def observation(config: Config) -> Observation:
    """How late, and in which words, the cluster learns things."""
    observe, router = config.observe, config.router
    if router.index != "engine":
        return Observation(report_lag_s=observe.report_lag_s, kv_event_lag_s=observe.kv_event_lag_s)
    return Observation(
        report_lag_s=observe.report_lag_s,
        kv_event_lag_s=observe.kv_event_lag_s,
        engine_events=True,
        ranks_apart=router.route_ranks,
        kv_replay_events=observe.kv_replay_events,
        kv_dump_block_s=observe.kv_dump_block_s,
        kv_dump_bytes_per_s=observe.kv_dump_gb_per_s * 1e9,
    )
