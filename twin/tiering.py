"""From the configuration to the tiers below each worker's device: sizes, policies, and the links that blocks cross.

Nothing here runs. What is wrong with a size or the name of a policy is said before anything does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from policies.cluster.ids import Tier
from policies.errors import CapabilityError, ConfigError
from policies.kvbm.build import EVICTIONS, OFFLOADS, KvSettings, build_eviction, build_offload
from policies.kvbm.consolidate import DEDUPE
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.prefetch import PrefetchLimits
from policies.kvbm.registry import LOOK_UP_TIMEOUT_S, RegistryRules
from policies.kvbm.sketch import Sketch
from policies.kvbm.tiers import TierSpec, check_cascade
from twin.cluster import Group, block_bytes_of
from twin.config import DISK_GB_PER_S, SHARED_DISK_GB_PER_S, KvbmConfig
from twin.mocker.tierloads import DEADLINE_S
from twin.mocker.tierplan import Lanes, LevelPlan, PeerPlan, TierPlan, joined
from twin.perf.links import FAIR, FIFO, RX, TX, Link
from twin.worker_spec import WorkerSpec

GB = 1e9
CPU, DISK, REMOTE, PEER = "kvbm-cpu", "kvbm-disk", "kvbm-remote", "kvbm-peer"
"""Links of tiers: of each worker (NAME:WORKER), or one for the run."""
_PLUGINS = "dynatwin.kv_policies"


def tier_links(groups: Iterable[Group]) -> tuple[Link, ...]:
    """The links that blocks cross between tiers, where no link of the run is named for it. Raises ConfigError."""
    links: dict[str, Link] = {}
    for group in groups:
        config = group.config.kvbm
        if not config.has_tiers:
            continue
        for spec in group.workers:
            if spec.host_lanes is None:
                name = f"{CPU}:{spec.name}"
                links[name] = Link(name=name, bytes_per_s=config.cpu_gb_per_s * GB, discipline=FIFO, duplex=True)
            if _reads_peers(config) and spec.store_lanes is None:
                name = f"{PEER}:{spec.name}"
                links[name] = Link(name=name, bytes_per_s=config.peer_gb_per_s * GB, discipline=FAIR, duplex=True)
            if config.has_disk:
                name = _disk_name(config, spec)
                _add(links, Link(name=name, bytes_per_s=_disk_gb_per_s(config) * GB, discipline=FAIR, duplex=False))
            if config.remote:
                rate = config.remote_gb_per_s * GB
                _add(links, Link(name=REMOTE, bytes_per_s=rate, discipline=FAIR, duplex=False))
    return tuple(links.values())


def _add(links: dict[str, Link], link: Link) -> None:
    known = links.setdefault(link.name, link)
    if known != link:
        raise ConfigError(
            f"kvbm: groups of workers share {link.name}, and say {known.bytes_per_s / GB:g} and "
            f"{link.bytes_per_s / GB:g} GB/s; give them one"
        )


def tiered(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups whose workers know what lies below their devices. Raises ConfigError."""
    _check_shared(groups)
    return tuple(_with_tiers(group) if group.config.kvbm.has_tiers else group for group in groups)


def cascade_warnings(groups: Iterable[Group]) -> list[str]:
    """What is odd about the sizes of tiers."""
    found = []
    for group in groups:
        if group.config.kvbm.has_tiers:
            specs = [level.spec for level in _levels(group, group.workers[0])]
            devices = group.settings.ranks * group.config.kvbm.cpu_shared_by
            warnings = check_cascade(specs, group.settings.blocks * devices)
            warnings += _registry_warnings(group.config.kvbm)
            found += [f"workers.{group.config.name}.kvbm: {warning}" for warning in warnings]
    return found


def _registry_warnings(config: KvbmConfig) -> list[str]:
    """What is odd about the times of the registry."""
    found = []
    if config.asks_registry and config.registry_lookup_s > LOOK_UP_TIMEOUT_S:
        found.append(
            f"every look-up of the registry takes more than {LOOK_UP_TIMEOUT_S:g} s (registry_lookup_s = "
            f"{config.registry_lookup_s:g}), and finds nothing of what peers and shared tiers have"
        )
    if config.asks_registry and config.peers and config.registry_lease_s < DEADLINE_S:
        found.append(
            f"registry_lease_s = {config.registry_lease_s:g} is shorter than the longest read ({DEADLINE_S:g} s): "
            "a peer could use its memory again under a reader"
        )
    return found


def _with_tiers(group: Group) -> Group:
    config = group.config.kvbm
    where = f"workers.{group.config.name}.kvbm"
    plugins = _plugins(config)
    quota = config.tenant_quota_tokens
    quota_blocks = None if quota is None else quota // group.settings.block_size
    settings = KvSettings(
        sketch=lambda: Sketch(1),
        min_lfu_count=config.min_lfu_count,
        decay_s=config.decay_s,
        quota_blocks=quota_blocks,
    )
    try:
        batches = BatchRules(
            max_blocks=config.max_batch_blocks,
            min_blocks=config.min_batch_blocks,
            flush_s=config.flush_s,
            at_once=config.batches_at_once,
        )
        check_cascade([level.spec for level in _levels(group, group.workers[0])])
        for level in _levels(group, group.workers[0]):
            build_offload(level.offload, settings, plugins)
            build_eviction(level.eviction, settings, plugins)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for name in ("peers", "prefetch") if config.cpu_shared_by > 1 else ():
        if getattr(config, name):
            raise CapabilityError(
                f"{where}.{name}: host memory that workers of a node share (cpu_shared_by = {config.cpu_shared_by}) is "
                f"not read by others, nor filled ahead of requests, in this version; leave {name} out, or give each "
                "worker its own"
            )
    if config.onboard == "deadline" and config.onboard_deadline_s is None:
        raise ConfigError(f"{where}.onboard = deadline needs {where}.onboard_deadline_s")

    def with_tiers(spec: WorkerSpec) -> WorkerSpec:
        plan = TierPlan(
            levels=_levels(group, spec),
            rule=Rule(config.onboard, config.onboard_deadline_s),
            batches=batches,
            min_lfu_count=config.min_lfu_count,
            decay_s=config.decay_s,
            quota_blocks=quota_blocks,
            prefetch=PrefetchLimits() if config.prefetch and config.has_cpu and config.goes_deeper else None,
            plugins=plugins,
            peers=_peers(group, spec) if _reads_peers(config) else None,
            events=config.events,
            registry=_registry(config),
        )
        return replace(spec, tiers=plan)

    return replace(group, workers=tuple(with_tiers(spec) for spec in group.workers))


class _Place(NamedTuple):
    """Where a tier of one worker stands: the lanes of its own, on the way up, and the hops up to the device. `key`: who
    says the same has it in common."""

    name: str
    spec: TierSpec
    own_up: Lanes
    hops: tuple[Lanes, ...]
    key: str | None


def _levels(group: Group, spec: WorkerSpec) -> tuple[LevelPlan, ...]:
    """The tiers of a worker, fastest first, with the lanes that their bytes cross."""
    up: Lanes = spec.host_lanes if spec.host_lanes is not None else ((f"{CPU}:{spec.name}{RX}",),)
    places = [place for find in (_host, _disk, _remote) if (place := find(group, spec, up)) is not None]
    return tuple(_level(group.config.kvbm, place, up, is_first=n == 0) for n, place in enumerate(places))


def _level(config: KvbmConfig, place: _Place, up: Lanes, *, is_first: bool) -> LevelPlan:
    down = _other_way(place.own_up)
    if is_first and place.spec.tier is not Tier.G2_HOST:  # its bytes come from the device, not from host memory
        down = joined(_other_way(up), down)
    return LevelPlan(
        spec=place.spec,
        offload=getattr(config, f"{place.name}_offload"),
        trigger=getattr(config, f"{place.name}_trigger"),
        eviction=getattr(config, f"{place.name}_eviction"),
        when_full=config.when_full,
        down=down,
        hops=place.hops,
        shared_key=place.key,
        piped=config.disk_path == "piped" and place.spec.tier is Tier.G3_DISK,
    )


def _block_bytes(group: Group) -> int:
    """Bytes of one block, over all ranks of a worker."""
    given = group.config.kvbm.block_bytes
    return given if given is not None else block_bytes_of(group.config)


def _host(group: Group, spec: WorkerSpec, up: Lanes) -> _Place | None:
    config = group.config.kvbm
    host_bytes = _bytes(config.cpu_cache_gb, config.cpu_cache_tokens, _block_bytes(group) / group.settings.block_size)
    if host_bytes is None:
        return None
    host = TierSpec(
        tier=Tier.G2_HOST,
        block_bytes=_block_bytes(group),
        capacity_bytes=host_bytes,
        latency_s=config.cpu_latency_s,
        bytes_per_s=config.cpu_gb_per_s * GB,
    )
    key = None
    if config.cpu_shared_by > 1:
        node = (spec.worker_id - group.workers[0].worker_id) // config.cpu_shared_by
        key = f"cpu:{group.config.name}:{node}"
    return _Place("cpu", host, up, (up,), key)


def _disk(group: Group, spec: WorkerSpec, up: Lanes) -> _Place | None:
    config = group.config.kvbm
    disk_bytes = _bytes(config.disk_cache_gb, config.disk_cache_tokens, _block_bytes(group) / group.settings.block_size)
    if disk_bytes is None:
        return None
    disk = TierSpec(
        tier=Tier.G3_DISK,
        block_bytes=_block_bytes(group),
        capacity_bytes=disk_bytes,
        latency_s=config.disk_latency_s,
        bytes_per_s=_disk_gb_per_s(config) * GB,
        is_shared=config.disk_shared,
    )
    own: Lanes = ((_disk_name(config, spec),),)
    if config.disk_shared:
        own = joined(own, spec.store_lanes or ((),))
    hops = (own, up) if config.disk_path != "direct" else (joined(own, up),)
    return _Place("disk", disk, own, hops, "disk" if config.disk_shared else None)


def _remote(group: Group, spec: WorkerSpec, up: Lanes) -> _Place | None:
    config = group.config.kvbm
    if not config.remote:
        return None
    remote = TierSpec(
        tier=Tier.G4_REMOTE,
        block_bytes=_block_bytes(group),
        capacity_bytes=None if config.remote_cache_gb is None else int(config.remote_cache_gb * GB),
        latency_s=config.remote_latency_s,
        bytes_per_s=config.remote_gb_per_s * GB,
        is_shared=True,
    )
    own = joined(((REMOTE,),), spec.store_lanes or ((),))
    return _Place("remote", remote, own, (joined(own, up),), "remote")


def _reads_peers(config: KvbmConfig) -> bool:
    """Whether a worker reads host memory of others."""
    return config.peers and config.has_cpu


def _peers(group: Group, spec: WorkerSpec) -> PeerPlan:
    """What a worker reads of others, over what KV crosses between it and the outside."""
    config = group.config.kvbm
    into: Lanes = spec.store_lanes if spec.store_lanes is not None else ((f"{PEER}:{spec.name}{RX}",),)
    up: Lanes = spec.host_lanes if spec.host_lanes is not None else ((f"{CPU}:{spec.name}{RX}",),)
    kinds = group.config
    return PeerPlan(
        spec=TierSpec(
            tier=Tier.G2_HOST,
            capacity_bytes=None,
            block_bytes=_block_bytes(group),
            latency_s=config.peer_latency_s,
            bytes_per_s=min(config.peer_gb_per_s, config.cpu_gb_per_s) * GB,
        ),
        layout=f"{kinds.model} kv={kinds.kv} tp={kinds.tp} block_size={group.settings.block_size}",
        out=_other_way(into),
        into=into,
        up=up,
    )


def _registry(config: KvbmConfig) -> RegistryRules | None:
    """How a worker asks what lies outside it; None where it is known at once."""
    if not config.asks_registry:
        return None
    return RegistryRules(
        lookup_s=config.registry_lookup_s,
        lease_s=config.registry_lease_s,
        negative_s=config.registry_negative_s,
    )


def _other_way(lanes: Lanes) -> Lanes:
    """The same links in the other direction."""
    return tuple(tuple(_reversed(lane) for lane in reversed(path)) for path in lanes)


def _reversed(lane: str) -> str:
    if lane.endswith(RX):
        return lane.removesuffix(RX) + TX
    return lane.removesuffix(TX) + RX if lane.endswith(TX) else lane


def _bytes(gb: float | None, tokens: int | None, per_token: float) -> int | None:
    if gb is not None:
        return int(gb * GB)
    return None if tokens is None else int(tokens * per_token)


def _disk_gb_per_s(config: KvbmConfig) -> float:
    if config.disk_gb_per_s is not None:
        return config.disk_gb_per_s
    return SHARED_DISK_GB_PER_S if config.disk_shared else DISK_GB_PER_S


def _disk_name(config: KvbmConfig, spec: WorkerSpec) -> str:
    return DISK if config.disk_shared else f"{DISK}:{spec.name}"


def _check_shared(groups: tuple[Group, ...]) -> None:
    """A tier that groups share holds blocks of one size and one model, or its content means nothing to them."""
    for name in ("disk_shared", "remote"):
        sharing = [group for group in groups if getattr(group.config.kvbm, name)]
        kinds = {(g.config.model, g.config.kv, g.config.tp, g.settings.block_size) for g in sharing}
        if len(kinds) > 1:
            names = ", ".join(group.config.name for group in sharing)
            raise ConfigError(
                f"kvbm.{name}: the groups {names} differ in model, KV format, tp or block_size, so none can read what "
                "another wrote; give them one, or a tier that is not shared"
            )
        if len({group.config.kvbm.events for group in sharing}) > 1:
            names = ", ".join(f"{group.config.name} = {group.config.kvbm.events}" for group in sharing)
            raise ConfigError(
                f"kvbm.events: groups that share a tier (kvbm.{name}) say {names}, and with {DEDUPE} nobody hears what "
                "one pushes out of it; give them one, or a tier that is not shared"
            )


def _plugins(config: KvbmConfig) -> Mapping[str, Any]:
    """The policies of other packages that the configuration names."""
    wanted = {
        *(f"eviction.{getattr(config, f'{tier}_eviction')}" for tier in ("cpu", "disk", "remote")),
        *(
            f"offload.{p.strip()}"
            for t in ("cpu", "disk", "remote")
            for p in getattr(config, f"{t}_offload").split("+")
        ),
    }
    ours = {*(f"eviction.{name}" for name in EVICTIONS), *(f"offload.{name}" for name in OFFLOADS)}
    if wanted <= ours:
        return {}
    from twin import plugins

    return {name: plugins.load(_PLUGINS, name) for name in plugins.names(_PLUGINS) if name in wanted - ours}
