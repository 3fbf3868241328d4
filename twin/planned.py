"""A run with a planner: what it needs beside the router, what is kept of it, and what it says of itself afterwards.

It wires a planner to a simulated world; orders are carried out by `twin.mocker.scaling`. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from policies.cluster.controller import Policy
from policies.cluster.ids import Role
from policies.cluster.ticks import NotePlan, RoleTick, Tick
from reports.replicas import PlannerMeta, PlanRow, ReplicaRow, write_tables
from reports.report import RunMeta, WorkerMeta
from twin.config import Config
from twin.mocker.scaling import PATIENCE_S
from twin.planning import build_planner, drain_rules, hearing_rules, planner_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policies.cluster.state import ClusterView
    from twin.mocker.links import Network
    from twin.mocker.requests import OpenRequest
    from twin.mocker.world import MockWorld
    from twin.wiring import Cluster
    from twin.worker_spec import WorkerSpec


class Planned:
    """The planner of one run: it stands beside the router; `start` on its world, then what it comes to at the end."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        planner = build_planner(config, cluster.groups)
        assert planner is not None
        self.planner: Policy = planner
        self._replicas: list[ReplicaRow] = []
        self._plans: list[PlanRow] = []
        self._wanted: dict[Role, int] = {}
        self._last: dict[Role, tuple[int, ...]] = {}
        self._notices: Counter[str] = Counter()
        self._world: MockWorld | None = None

    def before(self, router: Policy) -> Policy:
        """The router; where there may be no worker at all, one that lets requests wait for the first to come."""
        settings = planner_settings(self._config, self._cluster.groups)
        if all(pool.min_endpoint for pool in settings.pools) or self._config.planner.name == "schedule":
            return router
        from policies.router.held import Held

        return Held(router, [pool.role for pool in settings.pools])

    def start(self, world: MockWorld, network: Network | None) -> None:
        """Let workers come and go in a world that has not run yet, and let the planner hear of it."""
        from twin.mocker.hearing import Hearing
        from twin.mocker.scaling import Scaling

        self._world = world
        scaling = world.scaling = Scaling(
            world,
            self._cluster.growing(network),
            rules=drain_rules(self._config),
            cuts=self._config.resilience.migration_limit > 0,
        )
        for role in {spec.role: None for spec in world.specs.values()}:
            ready = sum(spec.role is role for spec in world.specs.values())
            self._wanted[role] = ready
        scaling.on_change.append(self._count)
        world.on_plan.append(self._note)
        world.stuck = lambda: _nobody_comes(world)
        self._count()
        Hearing(world, hearing_rules(self._config)).start()
        if self._config.planner.name == "lookahead":
            from twin.asked import Answering

            settings = planner_settings(self._config, self._cluster.groups)
            world.answering = Answering(world, settings, self._config.planner.lookahead.think_s)

    # ------------------------------------------------------------ what is kept

    def _count(self) -> None:
        """Note the workers of each role, where a count has changed."""
        world = self._world
        assert world is not None
        now_s, view = world.clock.now, world.controller.view
        for role, wanted in self._wanted.items():
            counts = (wanted, *_counts(view, role))
            if self._last.get(role) == counts:
                continue
            self._last[role] = counts
            each = next(spec.gpus for spec in world.specs.values() if spec.role is role)
            row = (now_s, role.value, *counts, sum(counts[1:]) * each)
            if self._replicas and self._replicas[-1][:2] == row[:2]:
                self._replicas[-1] = row  # several changes at one instant are one
            else:
                self._replicas.append(row)

    def _note(self, at_s: float, action: NotePlan) -> None:
        tick = action.tick
        for role in tick.roles:
            self._wanted[role.role] = role.final
            self._plans.append(_plan_row(at_s, tick, role))
        self._notices.update(tick.notices)
        self._count()

    def write(self, folder: Path) -> None:
        """Write what was kept into the folder of the run."""
        write_tables(folder, self._replicas, self._plans)

    # ------------------------------------------------------------ what it says of itself

    def described(self, meta: RunMeta) -> RunMeta:
        """The run's own words with the workers that came later, and who planned them."""
        world = self._world
        assert world is not None
        assert world.scaling is not None
        late = tuple(
            replace(_worker(stay.spec, stay.group, stay.ordered_s, stay.gone_s), up_from_s=stay.up_s)
            for stay in world.scaling.stays.values()
        )
        most = max((sum(gpus) for gpus in _gpus_over_time(self._replicas)), default=meta.gpus)
        return replace(meta, workers=(*meta.workers, *late), gpus=most)

    def meta(self) -> PlannerMeta:
        world = self._world
        assert world is not None
        assert world.scaling is not None
        done = world.scaling.done
        return PlannerMeta(
            name=self._config.planner.name,
            line=planner_line(self._config, self.planner),
            starts=done["starts"],
            starts_failed=done["starts_failed"],
            starts_cancelled=done["starts_cancelled"],
            drains=done["drains"],
            recalls=done["recalls"],
            counters=dict(sorted(getattr(self.planner, "counters", {}).items())),
            notices=dict(sorted(self._notices.items())),
        )


def _nobody_comes(world: MockWorld) -> tuple[str, list[OpenRequest]] | None:
    """Whom the end of a run finds waiting for a worker that never came."""
    if world.controller.view.live:
        return None
    return f"stuck: no worker has come up within {PATIENCE_S:g} s", list(world.open.values())


def _counts(view: ClusterView, role: Role) -> tuple[int, int, int]:
    """Starting, ready and draining workers of a role."""
    mine = [worker for worker in view.workers.values() if worker.up.role is role]
    leaving = sum(worker.draining for worker in mine)
    return view.pending(role), len(mine) - leaving, leaving


def _gpus_over_time(rows: Iterable[ReplicaRow]) -> Iterable[Iterable[int]]:
    """GPUs of all roles after each row."""
    now: dict[str, int] = {}
    for row in rows:
        now[row[1]] = row[6]
        yield list(now.values())


def _worker(spec: WorkerSpec, group: str, from_s: float, until_s: float | None) -> WorkerMeta:
    return WorkerMeta(
        worker_id=spec.worker_id,
        name=spec.name,
        group=group,
        gpus=spec.gpus,
        role=spec.role.value,
        total_blocks=spec.settings.blocks * spec.settings.ranks,
        block_size=spec.settings.block_size,
        held_from_s=from_s,
        held_until_s=until_s,
    )


def _plan_row(at_s: float, tick: Tick, role: RoleTick) -> PlanRow:
    """One role of a tick in the columns of `reports.replicas.PLAN_SCHEMA`."""
    cost = next((one for one in tick.models if one.role is role.role), None)
    ahead = [one.value for one in tick.forecasts if one.quantity == "num_req"]
    demand = tick.demand
    return (
        at_s,
        tick.number,
        tick.decision_id,
        role.role.value,
        "+".join(tick.due),
        role.ready,
        role.pending,
        role.draining,
        role.throughput,
        role.load,
        role.lookahead,
        role.wanted,
        role.bounded,
        role.final,
        role.reason.value,
        tick.plan,
        demand.num_req,
        ahead[-1] if ahead else None,
        demand.isl,
        demand.osl,
        demand.hit_rate,
        role.capacity_rps,
        role.ttft_s,
        role.itl_s,
        None if cost is None else cost.base_s,
        None if cost is None else cost.per_x_s,
        None if cost is None else cost.per_kv_s,
        None if cost is None else cost.r2,
        None if cost is None else cost.samples,
        " ".join(tick.notices) or None,
        why(tick, role),
    )


def why(tick: Tick, role: RoleTick) -> str:
    """Why a role is to have as many workers as a tick says, in words."""
    current = role.ready + role.pending
    said = [
        f"{name} {count}"
        for name, count in (("throughput", role.throughput), ("load", role.load), ("look-ahead", role.lookahead))
        if count is not None
    ]
    parts = [f"{role.role.value} {current} to {role.final}: {role.reason.value}"]
    if said:
        parts.append(", ".join(said))
    ahead = [one for one in tick.forecasts if one.quantity == "num_req"]
    if ahead:
        parts.append(f"{ahead[-1].value:.4g} requests foreseen in an interval ({ahead[-1].model})")
    if role.capacity_rps is not None:
        parts.append(f"an engine serves {role.capacity_rps:.4g} requests/s")
    if role.ttft_s is not None:
        parts.append(f"TTFT {role.ttft_s * 1e3:.4g} ms")
    if role.itl_s is not None:
        parts.append(f"ITL {role.itl_s * 1e3:.4g} ms")
    if tick.plan is not None:
        parts.append(f"plan {tick.plan}")
    return "; ".join(parts)


def planner_line(config: Config, planner: Policy) -> str:
    """Who plans, for a person."""
    settings = getattr(planner, "settings", None)
    if settings is None:
        return str(getattr(planner, "line", config.planner.name))
    loops = [
        f"{name} every {every:g} s"
        for name, every, runs in (
            ("forecast", settings.throughput_adjustment_interval_s, settings.scales_throughput),
            ("load", settings.load_adjustment_interval_s, settings.scales_load),
        )
        if runs
    ]
    parts = [f"{config.planner.name}: {', '.join(loops)}", f"target {settings.optimization_target}"]
    if settings.optimization_target == "sla":
        parts.append(f"TTFT {settings.ttft_s * 1e3:g} ms, ITL {settings.itl_s * 1e3:g} ms")
    if settings.scales_throughput:
        parts.append(f"forecasts by {settings.load_predictor}")
    parts.append(f"a start takes {settings.startup_s:g} s")
    if settings.max_gpu_budget is not None:
        parts.append(f"at most {settings.max_gpu_budget} GPUs")
    if settings.advisory:
        parts.append("advisory: orders nothing")
    return "; ".join(parts)
