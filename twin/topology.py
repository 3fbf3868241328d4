"""From the configuration to the links of a run: what each copy of one carries, and which of them a worker's KV and its
weights cross.

Links that no table declares are what their kind is on the group's GPU. Nothing here runs, and nothing is guessed: a
link whose bandwidth nobody gives and no table has is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.cluster import Group, gpu_of, startup_of
from twin.config import LINK_KINDS, Config, LinkConfig
from twin.link_use import used_paths
from twin.mocker.links import Way
from twin.mocker.starts import WeightLoad
from twin.perf.cargo import HOST, KV, STORE, WEIGHTS
from twin.perf.coldstart import LinkedStart
from twin.perf.hardware import Gpu
from twin.perf.links import RX, TX, Link
from twin.worker_spec import WorkerSpec

GB = 1e9


@frozen
class Endpoint:
    """A worker as transfers see it: its ways by use, where something moves over links for that use."""

    worker_id: WorkerId
    group: str
    ways: Mapping[str, Way]


@frozen
class Topology:
    """The links of a run. `own_ranks`: no two ranks share a link and KV of hand-offs is all that moves, so equal ranks
    can stand for each other."""

    links: tuple[Link, ...]
    endpoints: dict[WorkerId, Endpoint]
    own_ranks: bool

    def admit(self, endpoint: Endpoint) -> None:
        """A worker has come that the run did not begin with."""
        self.endpoints[endpoint.worker_id] = endpoint

    def path(self, source: WorkerId, source_rank: int, dest: WorkerId, dest_rank: int) -> tuple[str, ...]:
        """Lanes that KV crosses from one rank to another."""
        return self.way(source, KV).to(source_rank, self.way(dest, KV), dest_rank)

    def way(self, worker_id: WorkerId, use: str) -> Way:
        """A way that the worker is known to have."""
        return self.endpoints[worker_id].ways[use]


def build_topology(config: Config, groups: Iterable[Group]) -> Topology | None:
    """The links that something moves over, and each worker's ways over them; None where there are none. Raises
    ConfigError."""
    declared = {link.name: link for link in config.links}
    links: dict[str, Link] = {}
    endpoints: dict[WorkerId, Endpoint] = {}
    own_ranks = True
    for group in groups:
        paths = {
            use: [_resolved(declared.get(name) or LINK_KINDS[name]) for name in path]
            for use, path in used_paths(config, group.config).items()
        }
        own_ranks &= paths.keys() <= {KV} and all(hop.per == "rank" for hops in paths.values() for hop in hops)
        rates = {hop.name: _bytes_per_s(hop, group, use) for use, hops in paths.items() for hop in hops}
        for spec in group.workers:
            ways = {use: _way(hops, rates, group.config.name, spec, links) for use, hops in paths.items()}
            endpoints[spec.worker_id] = Endpoint(worker_id=spec.worker_id, group=group.config.name, ways=ways)
    if not links:
        return None
    return Topology(links=tuple(links.values()), endpoints=endpoints, own_ranks=own_ranks)


def _way(
    hops: Sequence[LinkConfig], rates: Mapping[str, float], group: str, spec: WorkerSpec, links: dict[str, Link]
) -> Way:
    """A worker's way over these links; the copies that it uses are added to `links`."""
    names = [[_instance(hop, group, spec.name, rank) for hop in hops] for rank in range(spec.gpus)]
    for copies in names:
        for hop, name in zip(hops, copies, strict=True):
            links.setdefault(name, _link(hop, name, rates[hop.name]))
    return Way(
        out=tuple(tuple(_lane(links[name], TX) for name in copies) for copies in names),
        into=tuple(tuple(_lane(links[name], RX) for name in copies) for copies in names),
    )


def wired(group: Group, topology: Topology | None) -> Group:
    """The group whose workers know what their weights cross, and KV from host memory and from tiers that all share."""
    if topology is None:
        return group
    start = startup_of(group.config)
    peers = tuple(spec.worker_id for spec in group.workers)

    def with_ways(spec: WorkerSpec) -> WorkerSpec:
        ways = topology.endpoints[spec.worker_id].ways
        load = None
        if WEIGHTS in ways and isinstance(start, LinkedStart):
            load = WeightLoad(
                rank_bytes=start.rank_bytes,
                way=ways[WEIGHTS],
                boot_s=start.boot_s,
                warmup_s=start.warmup_s,
                peers=peers if start.source == "peer" else None,
            )
        return replace(
            spec,
            weights=load,
            host_lanes=ways[HOST].into if HOST in ways else None,
            store_lanes=ways[STORE].into if STORE in ways else None,
        )

    return replace(group, workers=tuple(with_ways(spec) for spec in group.workers))


def _resolved(link: LinkConfig) -> LinkConfig:
    """A link with everything that its kind says, but for the bandwidth of a GPU."""
    kind = LINK_KINDS[link.kind]
    return LinkConfig(
        name=link.name,
        kind=link.kind,
        per=link.per or kind.per,
        bandwidth_gb_per_s=link.bandwidth_gb_per_s or kind.bandwidth_gb_per_s,
        latency_s=kind.latency_s if link.latency_s is None else link.latency_s,
        desc_cost_s=link.desc_cost_s,
        discipline=link.discipline or kind.discipline,
        duplex=kind.duplex if link.duplex is None else link.duplex,
    )


def _bytes_per_s(link: LinkConfig, group: Group, use: str) -> float:
    """What one copy carries: as given, or what the GPUs behind it have together."""
    if link.bandwidth_gb_per_s is not None:
        return link.bandwidth_gb_per_s * GB
    gpu = gpu_of(group.config)
    where = f"links.{link.name} of {group.config.name}"
    if link.per not in ("rank", "worker"):
        raise ConfigError(
            f"{where}: it is shared by a whole {link.per}, and no hardware table says what it carries; give "
            f'[[links]] name = "{link.name}" a bandwidth_gb_per_s'
        )
    rate = _gpu_rate(link.kind, gpu)
    if rate is None:
        raise ConfigError(
            f"{where}: {gpu.name} has no {link.kind} in the hardware table; give the link a bandwidth_gb_per_s, name "
            f"another one in workers.{group.config.name}.links.{use}, or {_INSTEAD[use]}"
        )
    return rate * (group.config.gpus if link.per == "worker" else 1)


_INSTEAD = {
    KV: "set disaggregation.bandwidth_gb_per_s",
    WEIGHTS: "leave that out, and the time is by the formula of cold starts",
    HOST: "leave that out, and loads have a lane of their own",
    STORE: "leave that out, and blocks cross the link of the shared tier alone",
}


def _gpu_rate(kind: str, gpu: Gpu) -> float | None:
    return {"nvlink": gpu.scale_up_bytes_per_s, "pcie": gpu.pcie_bytes_per_s, "nic": gpu.nic_bytes_per_s}[kind]


def _instance(link: LinkConfig, group: str, worker: str, rank: int) -> str:
    """The name of the copy that a rank uses."""
    return {
        "rank": f"{link.name}:{worker}:{rank}",
        "worker": f"{link.name}:{worker}",
        "group": f"{link.name}:{group}",
        "run": link.name,
    }[str(link.per)]


def _link(link: LinkConfig, name: str, bytes_per_s: float) -> Link:
    return Link(
        name=name,
        bytes_per_s=bytes_per_s,
        latency_s=link.latency_s or 0.0,
        desc_cost_s=link.desc_cost_s,
        discipline=str(link.discipline),
        duplex=bool(link.duplex),
    )


def _lane(link: Link, way: str) -> str:
    return link.name + way if link.duplex else link.name
