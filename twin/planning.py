"""From the configuration to the planner's settings, for either world, and to what a simulated world needs beside it.

What a step costs is handed over as the run's latency model has it, until engines have shown it. Nothing here runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.planner.lookahead_settings import LookaheadSettings
from policies.planner.settings import PlannerSettings, PoolSettings, with_preset
from policies.planner.step_model import Sample, StepCoefficients, StepModel
from policies.resilience.drain import DrainRules
from twin.cluster import startup_of, startup_s_of
from twin.config import Config, WorkerGroup
from twin.perf.protocol import PrefillChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.cluster.controller import Policy
    from policies.planner.forecast.build import Maker
    from twin.cluster import Group
    from twin.mocker.hearing import HearingRules
    from twin.perf.protocol import LatencyModel

USUAL_STARTUP_S = 120.0
"""A start of a worker whose group does not say how long it takes."""
TTFT_S, ITL_S = 0.5, 0.05
_OURS = {"throughput": (True, False), "load": (False, True), "hybrid": (True, True), "lookahead": (True, False)}
"""Which loops run, slow and fast."""


def startup_s(config: Config, group: WorkerGroup) -> float:
    """How long a worker that is added takes to start, beside what its weights take over links."""
    says = group.startup_s is not None or startup_of(group) is not None
    return startup_s_of(group) if says or not config.planner.is_on else USUAL_STARTUP_S


def limits(config: Config) -> tuple[float, float]:
    """Seconds to the first token and between tokens that are promised."""
    table = config.planner
    ttft_s, itl_s = table.ttft_s, table.itl_s
    if config.sla is not None and (ttft_s is None or itl_s is None):
        from reports.sla import parse_sla

        slos = parse_sla(config.sla).slos
        ttft_s = ttft_s or next((slo.limit for slo in slos if slo.metric == "ttft"), None)
        itl_s = itl_s or next((slo.limit for slo in slos if slo.metric in ("itl", "tpot")), None)
    return ttft_s or TTFT_S, itl_s or ITL_S


def planner_settings(config: Config, groups: Sequence[Group]) -> PlannerSettings:
    """Everything that the planner may read. Raises ConfigError."""
    table = config.planner
    slow, fast = _OURS.get(table.name, (True, True))
    ttft_s, itl_s = limits(config)
    given: dict[str, Any] = {
        name: getattr(table, name)
        for name in (
            "throughput_adjustment_interval_s",
            "load_adjustment_interval_s",
            "max_throughput_scaling_replicas",
            "max_gpu_budget",
            "min_gpu_budget",
            "load_predictor",
            "load_scaling_down_sensitivity",
            "hold_s",
            "down_after_ticks",
            "up_cooldown_s",
            "down_cooldown_s",
            "warmup_skip_s",
            "warmup_skip_passes",
            "scale_timeout_s",
            "drift_policy",
            "advisory",
        )
    }
    pools = tuple(_pool(config, group) for group in _one_of_each(config, groups))
    roles = {pool.role for pool in pools}
    settings = PlannerSettings(
        **given,
        pools=pools,
        mode="agg" if Role.MIXED in roles else "disagg",
        optimization_target=_target(config, slow=slow),  # type: ignore[arg-type]  # one of the key's choices
        ttft_s=ttft_s,
        itl_s=itl_s,
        throughput_scaling=slow,
        load_scaling=fast,
        forecast=forecast_settings(config),
        startup_s=_believed_startup_s(config, groups),
        drain_timeout_s=_drain_timeout_s(config),
        seed=config.seed,
        lookahead=_lookahead(config) if table.name == "lookahead" else None,
    )
    return settings if table.preset is None else with_preset(settings, table.preset)


def build_planner(config: Config, groups: Sequence[Group]) -> Policy | None:
    """The planner of the configuration, from a plug-in where none of ours has that name; None without one."""
    if not config.planner.is_on:
        return None
    settings = planner_settings(config, groups)
    if config.planner.name == "schedule":
        from twin.scheduled import Scheduled, read_schedule

        steps = read_schedule(config.planner.schedule, [pool.role for pool in settings.pools])
        return Scheduled(steps, settings.pools, settings.drain_timeout_s, "schedule")
    if config.planner.name not in _OURS:
        from twin import plugins

        made: Policy = plugins.load("dynatwin.planners", config.planner.name)(settings)
        return made
    from policies.planner.planner import build

    return build(settings, forecasters(config))


def forecasters(config: Config) -> dict[str, Maker]:
    """The forecaster of another package that the configuration names, if it does."""
    from policies.planner.forecast.build import makers
    from twin import plugins

    name = config.planner.load_predictor
    if name in makers(forecast_settings(config)) or name not in plugins.names("dynatwin.forecasters"):
        return {}
    return {name: plugins.load("dynatwin.forecasters", name)}


def forecast_settings(config: Config) -> Any:
    """The knobs of all forecasters."""
    from policies.planner.forecast.build import ForecastSettings

    table = config.planner
    names = ("kalman_q_level", "kalman_q_trend", "kalman_r", "kalman_min_points", "period", "harmonics")
    return ForecastSettings(**{name: getattr(table, name) for name in names})


def drain_rules(config: Config) -> DrainRules:
    """Of drains that a planner orders."""
    return DrainRules(grace_s=config.resilience.grace_s, timeout_s=_drain_timeout_s(config))


def hearing_rules(config: Config) -> HearingRules:
    """When a planner is told what."""
    from twin.mocker.hearing import HearingRules

    return HearingRules(
        window_s=config.planner.throughput_adjustment_interval_s,
        pass_s=config.observe.pass_every_s,
        lag_s=config.observe.report_lag_s,
    )


def _target(config: Config, *, slow: bool) -> str:
    table = config.planner
    limited = config.sla is not None or table.ttft_s is not None or table.itl_s is not None
    if slow:
        if table.target not in (None, "sla"):
            raise ConfigError(
                f"planner.target = {table.target}: planner {table.name} forecasts what limits of latency need; leave "
                "it out, or take planner.name = load"
            )
        return "sla"
    return table.target or ("sla" if limited else "throughput")


def _lookahead(config: Config) -> LookaheadSettings:
    table = config.planner.lookahead
    names = ("attainment", "seeds", "most_plans", "most_asked", "reach", "change_cost_gpu_s", "trust_s")
    wait_s = max(table.wait_s, table.think_s)
    return LookaheadSettings(**{name: getattr(table, name) for name in names}, wait_s=wait_s)


def _one_of_each(config: Config, groups: Sequence[Group]) -> list[Group]:
    """The group of each role. Raises ConfigError where a role has several: new workers would be of one of them."""
    found: dict[str, Group] = {}
    for group in groups:
        other = found.setdefault(group.config.role, group)
        if other is not group:
            raise ConfigError(
                f"planner.name = {config.planner.name}: the groups {other.config.name} and {group.config.name} are "
                f"both of role {group.config.role}, and a planner adds workers of one group to a role; make them one"
            )
    return list(found.values())


def _pool(config: Config, group: Group) -> PoolSettings:
    """What the planner knows of the workers of a group. Ranks of a worker count as one engine."""
    table, made = config.planner, group.settings
    least = {"prefill": table.min_prefill, "decode": table.min_decode}.get(group.config.role)
    role = Role(group.config.role)
    return PoolSettings(
        role=role,
        group=group.config.name,
        engine_num_gpu=group.config.gpus,
        min_endpoint=table.min_endpoint if least is None else least,
        max_num_seqs=made.max_num_seqs * made.ranks,
        max_batched_tokens=made.max_num_batched_tokens * made.ranks,
        max_kv_tokens=made.blocks * made.block_size * made.ranks,
        nextn=group.config.engine.nextn,
        prior=step_cost(role, group) if table.bootstrap == "model" else None,
        up_above=table.up_above,
        down_below=table.down_below,
    )


def step_cost(role: Role, group: Group) -> StepCoefficients | None:
    """A straight line through what the group's latency model says of steps that an engine can have; None where that is
    none that a planner could believe (a slope below zero)."""
    made, latency = group.settings, group.latency
    most_tokens, most_seqs, ranks = made.max_num_batched_tokens, made.max_num_seqs, made.ranks
    model = StepModel(role)
    if role is Role.PREFILL:
        for n in range(1, 17):
            model.learn(_sample(latency, max(1, most_tokens * n // 16), 0, 0, ranks))
        return model.coefficients
    room = made.blocks * made.block_size
    for batch in sorted({max(1, most_seqs * n // 32) for n in (1, 2, 4, 8, 16)}):
        for length in (256, 1024, 4096):
            if batch * length <= room:
                sample = _sample(latency, 0, batch, batch * length, ranks)
                model.learn(sample if role is Role.MIXED else replace(sample, x=float(batch * ranks)))
    cost = model.coefficients
    if cost is None or role is Role.DECODE:
        return cost
    # what prompts add is told from decodes alone: long ones bend the line, and would lift it where most steps are
    batch = max(1, most_seqs // 32)
    beside = [_sample(latency, max(1, most_tokens // n), batch, batch * 1024, ranks) for n in (16, 8, 4)]
    slopes = [(one.seconds - cost.seconds(0.0, one.kv)) / one.x for one in beside]
    return replace(cost, per_x_s=max(0.0, sum(slopes) / len(slopes)))


def _sample(latency: LatencyModel, tokens: int, batch: int, kv: int, ranks: int) -> Sample:
    """One step as the model has it; ranks of a worker do the same side by side, and count as one engine."""
    chunks = (PrefillChunk(tokens, 0, 0, True),) if tokens else ()
    seconds = latency.step_s(chunks, batch, kv, 0, 0) if tokens else latency.decode_piece(batch, kv).g0
    return Sample(x=float(tokens * ranks), kv=float(kv * ranks), seconds=seconds, at_s=0.0)


def _drain_timeout_s(config: Config) -> float:
    given = config.planner.drain_timeout_s
    return config.resilience.drain_timeout_s if given is None else given


def _believed_startup_s(config: Config, groups: Sequence[Group]) -> float:
    """The slowest start of a group, where nothing else is given."""
    if config.planner.startup_s is not None:
        return config.planner.startup_s
    return max(startup_s(config, group.config) for group in groups)
