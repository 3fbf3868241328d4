"""From settings to a connector. Nothing is opened yet, and only what was asked for is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from executors.clock import Clock
from executors.connectors.counting import Counting
from executors.connectors.local import Local
from executors.connectors.protocol import Connector
from executors.connectors.settings import ConnectorSettings, KubernetesSettings
from policies.cluster.ids import Role
from policies.errors import ConfigError
from twin.config import WorkerGroup

if TYPE_CHECKING:
    from executors.world import LiveWorld

log = logging.getLogger(__name__)


async def connect(world: LiveWorld, settings: ConnectorSettings, groups: Mapping[str, WorkerGroup]) -> None:
    """Have a world's orders about worker counts carried out as the settings say. Raises ConfigError where the platform
    will not take them, with what to do; CapabilityError where a package is missing."""
    gpus = {name: 0 if group.on_cpu else group.tp * group.pp * group.dp for name, group in groups.items()}
    roles = {name: Role(group.role) for name, group in groups.items()}
    connector = open_connector(settings, roles, world.clock)
    if connector is None:
        world.scaling.carrier = Local(world.fleet, gpus)
        return
    try:
        await Counting(world, connector, gpus).begin()
    except BaseException:
        await connector.close()
        raise


def open_connector(
    settings: ConnectorSettings, roles: Mapping[str, Role], clock: Clock, say: Callable[[str], None] = log.info
) -> Connector | None:
    """The connector for worker groups of these roles; None: processes of this host. `say` is told what a dry run would
    do. Raises ConfigError, and CapabilityError where a package is missing."""
    if settings.virtual is not None:
        from executors.connectors.virtual import VirtualConnector
        from executors.connectors.virtual_store import open_store

        virtual = settings.virtual
        return VirtualConnector(open_store(virtual.store), roles, clock, virtual.poll_s, virtual.timeout_s)
    if settings.kubernetes is not None:
        return _kubernetes(settings.kubernetes, roles, clock, say)
    return None


def _kubernetes(
    settings: KubernetesSettings, roles: Mapping[str, Role], clock: Clock, say: Callable[[str], None]
) -> Connector:
    from executors.connectors.kubernetes import KubernetesConnector, PrintedConnector
    from executors.connectors.kubernetes_objects import read_scaled

    unknown = [group for group in settings.objects if group not in roles]
    if unknown:
        raise ConfigError(
            f"planner.kubernetes.objects names group {unknown[0]!r}; the worker groups are {', '.join(roles)}"
        )
    objects = {
        group: read_scaled(text, settings.namespace, f"planner.kubernetes.objects.{group}")
        for group, text in settings.objects.items()
    }
    shared = [group for group, one in objects.items() if list(objects.values()).count(one) > 1]
    if shared:
        raise ConfigError(
            f"planner.kubernetes.objects: groups {' and '.join(shared)} are one object, {objects[shared[0]]}; give "
            "each its own"
        )
    scaled_roles = {group: roles[group] for group in objects}
    times = {"poll_s": settings.poll_s, "timeout_s": settings.timeout_s}
    if settings.dry_run == "print":
        return PrintedConnector(objects, scaled_roles, **times, say=say)
    from executors.connectors.kubernetes_api import KubernetesApi

    return KubernetesConnector(
        KubernetesApi(clock, settings.kubeconfig, settings.context),
        objects,
        scaled_roles,
        drift_policy=settings.drift_policy,
        dry_run=settings.dry_run == "server",
        **times,
        say=say,
    )
