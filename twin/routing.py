"""From the configuration to the settings of the router.

Only names change here: defaults and limits are those of `twin/config.py` and of the settings themselves.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from policies.cluster.events import TaintWeight
from policies.errors import ConfigError
from policies.router.settings import RouterSettings
from twin.config import SHARED_CACHE_MULTIPLIER, ClassConfig, Config
from twin.config_lists import taint_weights

if TYPE_CHECKING:
    from policies.router.affinity import AffinitySettings
    from policies.router.overload import BusySettings
    from policies.router.programs import ProgramSettings
    from policies.router.queue import QueueClass, QueueSettings

_TABLES = ("queue", "busy", "affinity", "programs")
_OURS = ("seed", "block_size", "explain", "required_taints", "preferred_taints", *_TABLES)


def router_settings(config: Config, block_size: int, *, explain: bool = False) -> RouterSettings:
    """What the configuration asks of its router. Raises ConfigError."""
    router = config.router
    if router.index == "engine" and has_shared_tier(config) and any(g.role != "mixed" for g in config.workers):
        raise ConfigError(
            "router.index = engine with prefill and decode workers cannot follow a tier that all workers share (kvbm "
            "remote or disk_shared): each leg hears its own workers alone; take router.index = simulated, or tiers of "
            "each worker's own"
        )
    for group in config.workers if router.route_ranks else ():
        if group.dp > 1 and group.kvbm.has_tiers and group.kvbm.events == "dedupe":
            raise ConfigError(
                f"router.route_ranks = true with workers.{group.name}.kvbm.events = dedupe: such a worker gives one "
                f"account of its {group.dp} ranks and its tiers, which tells no rank from another; take per_tier, "
                "or route_ranks = false"
            )
    values = {f.name: getattr(router, f.name) for f in fields(RouterSettings) if f.name not in _OURS}
    if router.shared_cache_multiplier is None and has_shared_tier(config):
        values["shared_cache_multiplier"] = SHARED_CACHE_MULTIPLIER
    liked = taint_weights(router.preferred_taints or (), "router.preferred_taints")
    return RouterSettings(
        seed=config.seed,
        block_size=block_size,
        explain=explain,
        required_taints=router.required_taints or (),
        preferred_taints=tuple(TaintWeight(taint=taint, weight=weight) for taint, weight in liked),
        queue=_queue(config),
        busy=_busy(config),
        affinity=_affinity(config),
        programs=_programs(config),
        **values,
    )


def has_shared_tier(config: Config) -> bool:
    """Whether any tier below devices is common to workers."""
    return any(group.kvbm.remote or group.kvbm.disk_shared for group in config.workers)


def queue_classes(config: Config) -> tuple[QueueClass, ...]:
    """The classes of the queue; where none are written, all requests are one class."""
    from policies.router.queue import QueueClass

    usual = config.router.queue.order
    return tuple(
        QueueClass(
            name=one.name,
            family=one.family,
            min_tokens=one.min_tokens,
            quantum_tokens=one.quantum_tokens,
            order=one.order or usual,  # type: ignore[arg-type]  # one of the key's choices
            waits=one.waits,
        )
        for one in config.classes or (ClassConfig(),)
    )


def _queue(config: Config) -> QueueSettings | None:
    queue = config.router.queue
    if not queue.is_on:
        return None
    from policies.router.queue import QueueSettings

    return QueueSettings(
        prefill_busy_share=queue.prefill_busy_share,
        prefill_busy_tokens=queue.prefill_busy_tokens,
        busy_worker_share=queue.busy_worker_share,
        requests_per_worker=queue.requests_per_worker,
        tokens_per_worker=queue.tokens_per_worker,
        max_wait_s=queue.max_wait_s,
        classes=queue_classes(config),
    )


def _busy(config: Config) -> BusySettings | None:
    busy = config.router.busy
    if not busy.is_on and "busy_thresholds" not in kinds_of_faults(config):
        return None
    from policies.router.overload import BusySettings

    return BusySettings(**{f.name: getattr(busy, f.name) for f in fields(BusySettings)})


def kinds_of_faults(config: Config) -> frozenset[str]:
    """The kinds of faults that the scenario of this run has; none without one."""
    if config.faults.path is None:
        return frozenset()
    from twin.scenario.reading import read_scenario

    return frozenset(fault.kind for fault in read_scenario(config.faults.path).faults)


def _affinity(config: Config) -> AffinitySettings | None:
    affinity = config.router.affinity
    if affinity.mode == "off":
        return None
    from policies.router.affinity import AffinitySettings

    return AffinitySettings(bond=affinity.mode, ttl_s=affinity.ttl_s, sessions=affinity.sessions)  # type: ignore[arg-type]


def _programs(config: Config) -> ProgramSettings | None:
    if config.router.mode != "thunder":
        return None
    from policies.router.programs import ProgramSettings

    thunder = config.router.thunder
    return ProgramSettings(**{f.name: getattr(thunder, f.name) for f in fields(ProgramSettings)})
