"""From a configuration to a live cluster: the same policies as in the twin, on engines that are started or attached to.

`LiveCluster` is everything behind the frontend. Which engine runs where is the configuration's business, which
environments and checkpoints there are on this host is `Host`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from executors.clock import Clock, WallClock
from executors.connectors.build import connect
from executors.connectors.settings import ConnectorSettings
from executors.discovery import open_discovery
from executors.discovery.record import WorkerRecord, new_incarnation
from executors.engines import kv_tiers
from executors.engines.kv_tiers import KvPlaces
from executors.engines.mock import MockEngine
from executors.engines.protocol import Engine, KvFollower
from executors.engines.remote import Attached
from executors.joining import Expected, Joiner
from executors.leases import LeaseTerms
from executors.live_worker import LiveWorker, Upkeep
from executors.peering import Peering
from executors.peers import Peers
from executors.record import LiveRecord
from executors.service import Service, Wanted
from executors.shadow.watch import Shadow
from executors.starter import HostStarter, Model, Terms, adapter
from executors.watching import Sinks, Watches
from executors.world import LiveWorld
from policies.cluster.actions import PublishBooking
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller, Policy
from policies.cluster.events import BlocksStored
from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.cluster import build_groups
from twin.config import Config, KvbmConfig, WorkerGroup
from twin.deciding import build_policy, guards, migration

FOREIGN_LEASE_S = 30.0
"""vLLM's own kv_lease_duration, of engines that nobody told another one. A longer one here than there would send out
parameters over blocks that belong to another request by then."""


@frozen
class Host:
    """What there is to serve with: the model, interpreters by engine, URLs of running engines by group (those groups
    start none), where logs and the record go. `mock`: the twin's own engines in real time instead of real ones.
    `discovery` is the store that workers of other processes are found in: then none is started here at first.
    `fingerprint` names the tokenizer of this frontend, `peering` the others whose routers share bookings with ours."""

    model: Model
    mock: bool = False
    pythons: Mapping[str, Path]
    attached: Mapping[str, tuple[str, ...]]
    discovery: str | None = None
    fingerprint: str | None = None
    peering: Peering | None = None
    logs: Path | None = None
    record: Path | None = None
    tokens: tuple[int, int] = (100, 32_000)
    """Token ids that mock engines make, from the first to before the last."""
    connector: ConnectorSettings = ConnectorSettings()
    """Who carries out what a planner orders."""
    tiers: KvPlaces = field(default_factory=KvPlaces)
    """Where KV of workers that are started here may lie below their devices."""


def live_config(config: Config, host: Host) -> tuple[Config, list[str]]:
    """The configuration as it is served, and what was changed for that, in words."""
    notices = []
    router = config.router
    if not host.mock and router.mode == "kv" and router.use_kv_events and router.index != "engine":
        router = replace(router, index="engine")
        notices.append("router.index = engine: real engines tell of their blocks in their own words")
    resilience = config.resilience
    if not resilience.migration_limit and config.origins.get("resilience.migration_limit", "default") == "default":
        resilience = replace(resilience, migration_limit=3)
        notices.append("resilience.migration_limit = 3: requests whose worker is lost go on elsewhere")
    replicas = config.replicas
    if replicas.count > 1:
        replicas = replace(replicas, count=1)
        notices.append("replicas.count = 1: a process is one router; start as many, with --peers")
    planner = config.planner
    if planner.is_on:
        planner = replace(planner, name="none")
        notices.append("planner.name = none: workers of a live cluster are not planned in this version")
    notices += _tiers(config, host)
    workers = config.workers
    if host.mock:
        workers = tuple(replace(group, kvbm=KvbmConfig()) for group in workers)
    legs = config.disaggregation
    said = config.origins.get("disaggregation.lease_s") in ("--lease", "--set")
    if not host.mock and not said and legs.lease_s > FOREIGN_LEASE_S and _holds_elsewhere(config, host):
        legs = replace(legs, lease_s=FOREIGN_LEASE_S)
        notices.append(
            f"disaggregation.lease_s = {FOREIGN_LEASE_S:g}: what vLLM keeps KV for unless told otherwise; say by "
            "--lease what engines that are not started here were told"
        )
    served = replace(
        config,
        workers=workers,
        router=router,
        resilience=resilience,
        replicas=replicas,
        disaggregation=legs,
        planner=planner,
    )
    return served, notices


def _holds_elsewhere(config: Config, host: Host) -> bool:
    """Whether prefill workers were started by somebody else, who told them how long KV is kept."""
    groups = [group.name for group in config.workers if group.role == "prefill"]
    return any(host.discovery is not None or group in host.attached for group in groups)


def _tiers(config: Config, host: Host) -> Iterator[str]:
    """What is made of KV tiers. Raises CapabilityError for what the engines that are started here cannot carry out."""
    for group in config.workers:
        if not group.kvbm.has_tiers and group.engine.host_blocks is None:
            continue
        kvbm = f"workers.{group.name}.kvbm" if group.kvbm.has_tiers else f"workers.{group.name}.engine.host_blocks"
        if host.mock:
            if group.kvbm.has_tiers:
                yield f"{kvbm}: mock engines keep KV on their devices alone"
        elif group.name in host.attached or host.discovery is not None:
            yield f"{kvbm}: those workers have the tiers that they were started with"
        else:
            kv_tiers.check(group, host.tiers)
            given = kv_tiers.simulated(group)
            if given:
                yield f"{kvbm}: {', '.join(given)} say how fast a simulation is; real links and stores are as they are"


def live_policies(config: Config, block_size: int, number: int | None = None) -> list[Policy]:
    """The policies of the configuration, in order. `number`: of this router, where it has peers."""
    return [build_policy(config, block_size, number=number), migration(config), *guards(config.resilience)]


class LiveCluster:
    """One world with its workers. Make it in a running loop; `start`, then serve `service`, then `close`. `shadow` has
    been started with the clock that this is to have."""

    def __init__(self, config: Config, host: Host, clock: Clock | None = None, shadow: Shadow | None = None) -> None:
        self.config, self.notices = live_config(config, host)
        self.host = host
        self.terms = Terms.of(self.config)
        self.clock = clock or WallClock(asyncio.get_running_loop())
        self.shadow = shadow
        self._groups = {group.name: group for group in self.config.workers}
        sizes = {group.engine.block_size for group in self.config.workers}
        block_size = max(sizes)
        number = new_incarnation() if host.peering is not None else None
        policies = live_policies(self.config, block_size, number)
        self.record = LiveRecord(host.record, self.config, policies, number) if host.record is not None else None
        onlookers = [one for one in (self.record, shadow) if one is not None]
        controller = Controller(policies, Sinks(onlookers) if onlookers else None)
        roles = frozenset(Role(group.role) for group in self.config.workers)
        split = Role.PREFILL in roles
        self.world = LiveWorld(
            controller,
            self.clock,
            ContentTree(block_size, block_size),
            deadlines=self.terms.deadlines,
            lease=LeaseTerms.of(self.terms.lease_s, self.config.live.health_every_s)
            if split and not host.mock
            else None,
            peers=self._publish if number is not None else None,
            watch=Watches(onlookers),
        )
        if shadow is not None:
            shadow.group_of = lambda worker_id: self.world.fleet.workers[worker_id].group
        self.peers: Peers | None = None
        if host.peering is not None and number is not None:
            self.peers = Peers(self.world, number, host.peering, host.model.served_as)
        fleet = self.world.fleet
        fleet.upkeep = Upkeep.of(self.config)
        fleet.follow = self._follow
        fleet.on_failed_start.append(self._failed)
        self.failures: list[str] = []
        self.starter: HostStarter | None = None
        if not host.mock:
            self.starter = HostStarter(
                self._groups, host.model, host.pythons, self.clock.now, host.logs, self.terms, tiers=host.tiers
            )
            fleet.starter = self.starter
        context = max(group.engine.max_model_len or 0 for group in self.config.workers)
        self.joiner = self._joiner(host.discovery) if host.discovery is not None else None
        self.service = Service(
            self.world,
            [Wanted(model=host.model.served_as, roles=roles, context_tokens=context)],
            shadow=shadow,
            peers=self.peers,
        )

    def _publish(self, action: PublishBooking) -> None:
        assert self.peers is not None
        self.peers.publish(action)

    def _joiner(self, place: str) -> Joiner:
        def engine(group: WorkerGroup, record: WorkerRecord) -> Engine:
            return adapter(group, _attached(group, record.name, record.url), self.clock.now, self.terms.deadlines)

        expected = Expected(model=self.host.model.served_as, fingerprint=self.host.fingerprint)
        return Joiner(self.world, open_discovery(place), self._groups, expected, engine)

    def _follow(self, worker: LiveWorker, post: object) -> KvFollower | None:
        """Listen to its KV events, where its engine tells of them and somebody wants to know."""
        follow = getattr(worker.engine, "follow", None)
        if follow is None or not self.world.reads_blocks:
            return None
        found: KvFollower | None = follow(worker.worker_id, worker.up.epoch, post)
        return found

    def _failed(self, name: str, group: str, error: Exception) -> None:
        self.failures.append(f"{name}: {error}")

    async def start(self) -> None:
        """Start every worker of the configuration, or attach to those that run; returns when all are up, and of those
        that are found in a store one of each role.

        Raises EngineError with the end of a log where one does not come up; the others are then stopped."""
        if self.peers is not None:
            await self.peers.start()
        connector = self.host.connector
        if connector.needs_discovery and self.joiner is None:
            raise ConfigError(
                f"planner.connector = {connector.connector}: workers that it starts are found by discovery; say where "
                "they register, with --discovery"
            )
        await connect(self.world, connector, self._groups)
        if self.host.mock:
            self._start_mocks()
            return
        starting = []
        for group in self.config.workers:
            urls = self.host.attached.get(group.name, ())
            for number, url in enumerate(urls):
                at = _attached(group, f"{group.name}-{number}", url)
                engine = adapter(group, at, self.clock.now, self.terms.deadlines)
                starting.append(self.world.fleet.attach(engine, f"{group.name}-{number}", group.name))
            if not urls and self.joiner is None:
                starting += [self._bring_up(group.name) for _ in range(group.count)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if self.joiner is not None:
            await self._find(self.joiner)

    async def _find(self, joiner: Joiner) -> None:
        await joiner.start()
        while not self.service.serving().models:
            joiner.joined.clear()
            await joiner.joined.wait()

    async def _bring_up(self, group: str) -> LiveWorker:
        assert self.starter is not None
        name, started = self.starter.start(group)
        self.world.fleet.starting[name] = group
        try:
            return await self.world.fleet.attach(await started, name, group)
        finally:
            del self.world.fleet.starting[name]

    def _start_mocks(self) -> None:
        wants = self.world.controller.wants(BlocksStored)
        for group in build_groups(self.config, leap=False):
            for spec in group.workers:
                engine = MockEngine(
                    spec.name,
                    spec.settings,
                    spec.latency,
                    self.clock,
                    worker_id=spec.worker_id,
                    role=spec.role,
                    model=self.host.model.served_as,
                    gpus=spec.gpus,
                    tree=self.world.tree,
                    tell=self.world.post if wants else None,
                    tokens=self.host.tokens,
                    path_s=spec.path_s,
                )
                self.world.fleet.join(engine, engine.facts(), spec.name, group.config.name, spec.worker_id)

    async def close(self) -> None:
        """Cancel what is open, end what was started, write the report of a recorded run."""
        if self.joiner is not None:
            await self.joiner.close()
        await self.world.close()
        if self.peers is not None:
            await self.peers.close()
        if self.starter is not None:
            await self.starter.close()
        if self.shadow is not None:
            await self.shadow.close()
        if self.record is not None and self.record.failed is None:
            self.record.close(self.world.fleet)


def _attached(group: WorkerGroup, name: str, url: str) -> Attached:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--attach {group.name}={url}: write the address of a running engine, http://HOST:PORT")
    return Attached(
        name=name,
        url=url.rstrip("/"),
        role=Role(group.role),
        gpus=group.tp * group.pp * group.dp,
        on_cpu=group.on_cpu,
        max_num_seqs=group.engine.max_num_seqs * group.dp,
        max_batched_tokens=group.engine.max_num_batched_tokens * group.dp,
    )
