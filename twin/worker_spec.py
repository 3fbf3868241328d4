"""One worker of a configured cluster: who it is, what engine it runs, and what a simulation needs to know besides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.cluster.ids import Role, WorkerId
from policies.frozen import frozen
from twin.engine.settings import EngineSettings
from twin.perf.protocol import LatencyModel

if TYPE_CHECKING:
    from twin.mocker.starts import WeightLoad
    from twin.mocker.tierplan import TierPlan


@frozen
class WorkerSpec:
    """`ready_s` is when it registers; `startup_s` is how long it takes to come back, where `weights` does not say that
    they come over links of the run. `host_lanes`: by rank, the lanes that loads from host memory cross (None: they have
    one of their own); `store_lanes`: those that KV from tiers crosses which all workers share, beside the tier's own.
    `tiers`: what a block manager keeps below its device. `loras`: the adapters that it serves (None: any). `taints` and
    `on_cpu` are what routers are told of it. `path_s` is how long a request takes to its engine."""

    worker_id: WorkerId
    name: str
    settings: EngineSettings
    latency: LatencyModel
    role: Role = Role.MIXED
    gpus: int = 1
    ready_s: float = 0.0
    startup_s: float = 0.0
    weights: WeightLoad | None = None
    host_lanes: tuple[tuple[str, ...], ...] | None = None
    store_lanes: tuple[tuple[str, ...], ...] | None = None
    tiers: TierPlan | None = None
    loras: tuple[str, ...] | None = None
    taints: tuple[str, ...] = ()
    on_cpu: bool = False
    path_s: float = 0.0
