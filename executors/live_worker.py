"""One worker of the live world as its fleet knows it, and how it is looked after."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from executors.deadlines import Deadlines
from executors.engines.protocol import Engine, Facts, KvFollower, Load
from policies.cluster.events import Event, WorkerUp
from policies.cluster.ids import WorkerId
from policies.frozen import frozen
from twin.config import Config, ResilienceConfig
from twin.config_live import LiveConfig

_USUAL = LiveConfig()


@frozen
class Upkeep:
    """How a worker is looked after, in seconds. `misses` health checks in a row that fail make it lost; one that is to
    leave has `drain_s` for what it has. So does one that answers nothing for `silent_s` (None: that is no evidence)
    though it is asked, neither to requests nor of its KV blocks, whatever its health says."""

    report_every_s: float = _USUAL.report_every_s
    health_every_s: float = _USUAL.health_every_s
    misses: int = _USUAL.misses
    ready_s: float = _USUAL.ready_s
    drain_s: float = ResilienceConfig().drain_timeout_s
    silent_s: float | None = Deadlines().between_tokens_s

    @classmethod
    def of(cls, config: Config) -> Upkeep:
        live = config.live
        return cls(
            report_every_s=live.report_every_s,
            health_every_s=live.health_every_s,
            misses=live.misses,
            ready_s=live.ready_s,
            drain_s=config.resilience.drain_timeout_s,
            silent_s=Deadlines.of(config).between_tokens_s,
        )


@dataclass(slots=True)
class LiveWorker:
    """One worker that has registered."""

    up: WorkerUp
    engine: Engine
    group: str
    facts: Facts
    heard_s: float = 0.0
    misses: int = 0
    incarnation: int = 0
    """Which life of it a store of workers says that it is; 0 where nobody says."""
    draining: bool = False
    fenced: bool = False
    """Told to take nothing new, while somebody else is to let it go."""
    lost: bool = False
    left_s: float | None = None
    follower: KvFollower | None = None
    held: deque[Event] | None = None
    """What it said of its blocks before it was up, in order: told right after."""
    unanswered_s: float | None = None
    """Since when it owed something that was then given up; None once it has answered anything."""
    load: Load | None = None
    """As it last told it."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def worker_id(self) -> WorkerId:
        return self.up.worker_id

    @property
    def url(self) -> str:
        """Where its engine is; its name, where that has no address."""
        return str(getattr(getattr(self.engine, "at", None), "url", self.up.name))
