"""From the configuration to the links of a run: what each copy of one carries, and which of them a worker's KV crosses.

Links that no table declares are what their kind is on the group's GPU. Nothing here runs, and nothing is guessed: a
link whose bandwidth nobody gives and no table has is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from policies.cluster.ids import WorkerId
from policies.errors import ConfigError
from twin.cluster import Group, gpu_of
from twin.config import LINK_KINDS, LinkConfig
from twin.perf.hardware import Gpu
from twin.perf.links import RX, TX, Link

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A worker as transfers see it: by rank, the lanes that leave it and those that enter it, from the GPU outwards."""

    worker_id: WorkerId
    group: str
    out: tuple[tuple[str, ...], ...]
    into: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The links of a run. `own_ranks`: no two ranks share a link, so equal ranks can stand for each other."""

    links: tuple[Link, ...]
    endpoints: Mapping[WorkerId, Endpoint]
    own_ranks: bool

    def path(self, source: WorkerId, source_rank: int, dest: WorkerId, dest_rank: int) -> tuple[str, ...]:
        """Lanes from one rank to another; a link that both sides cross is crossed once."""
        out, into = self.endpoints[source].out[source_rank], self.endpoints[dest].into[dest_rank]
        return tuple(dict.fromkeys((*out, *reversed(into))))


def build_topology(groups: Iterable[Group], declared: Sequence[LinkConfig]) -> Topology:
    """The links that the groups name, and each worker's way to them. Raises ConfigError."""
    own = {link.name: link for link in declared}
    links: dict[str, Link] = {}
    endpoints: dict[WorkerId, Endpoint] = {}
    own_ranks = True
    for group in groups:
        hops = [_resolved(own.get(name) or LINK_KINDS[name]) for name in group.config.links.kv.split("+")]
        own_ranks &= all(hop.per == "rank" for hop in hops)
        rates = {hop.name: _bytes_per_s(hop, group) for hop in hops}
        for spec in group.workers:
            ranks = range(spec.gpus)
            names = [[_instance(hop, group.config.name, spec.name, rank) for hop in hops] for rank in ranks]
            for copies in names:
                for hop, name in zip(hops, copies, strict=True):
                    links.setdefault(name, _link(hop, name, rates[hop.name]))
            endpoints[spec.worker_id] = Endpoint(
                worker_id=spec.worker_id,
                group=group.config.name,
                out=tuple(tuple(_lane(links[name], TX) for name in copies) for copies in names),
                into=tuple(tuple(_lane(links[name], RX) for name in copies) for copies in names),
            )
    return Topology(links=tuple(links.values()), endpoints=endpoints, own_ranks=own_ranks)


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


def _bytes_per_s(link: LinkConfig, group: Group) -> float:
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
            f"another one in workers.{group.config.name}.links.kv, or set disaggregation.bandwidth_gb_per_s"
        )
    return rate * (group.config.gpus if link.per == "worker" else 1)


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
