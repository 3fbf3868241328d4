"""A candidate as a configuration of the twin and back, and as a folder that `twin replay` runs without edits.

The configuration says everything: what a search simulated is what `twin replay --config best.toml` simulates. Sizes and
switches of engines come from `aiconfig.engines`; nothing here computes a figure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from aiconfig.candidate import Candidate, Pool
from aiconfig.demand import Protocol, protocol, write_rows
from aiconfig.engines import ENGINE
from aiconfig.estimate import Load
from aiconfig.physics import SHIPPED, Physics, physics_of
from aiconfig.serving import serving_of
from aiconfig.workload import Workload
from policies.errors import ConfigError
from policies.frozen import frozen
from reports.files import whole_file
from twin.config import Config, DisaggregationConfig, EngineConfig, TraceConfig, WorkerGroup
from twin.config_read import load as load_config
from twin.config_schema import keys_of
from twin.config_text import to_toml
from twin.perf.layout import Layout

BEST_TOML: Final = "best.toml"
ROWS: Final = "workload.parquet"
GROUPS: Final[Mapping[str, str]] = MappingProxyType({"mixed": "pool", "prefill": "prefill", "decode": "decode"})
"""Names of worker groups by the role of their pool."""


@frozen
class Written:
    """Where best.toml lies, and what the twin reads in it."""

    path: Path
    config: Config


@frozen
class Setting:
    """What a configuration needs beside candidate and demand: the limits that a report judges, whose figures price
    steps, and the price of a GPU-hour."""

    sla: str | None = None
    physics: Physics = SHIPPED
    usd_per_hour: float | None = None


USUAL: Final = Setting()


def to_config(candidate: Candidate, workload: Workload, load: Load, rows: Path, setting: Setting = USUAL) -> Config:
    """The configuration that plays `load` of `workload` on the deployment; `rows` is the trace that holds its rows.

    Raises ConfigError for a load that the workload's arrivals cannot have.
    """
    return Config(
        seed=workload.seed,
        sla=setting.sla,
        trace=_trace(workload, load, rows),
        workers=tuple(_group(candidate, pool, setting) for pool in candidate.pools),
        router=candidate.serving.router_config(),
        disaggregation=_disaggregation(candidate.engine, candidate.mode),
    )


def _disaggregation(engine: str, mode: str) -> DisaggregationConfig:
    return DisaggregationConfig(first_token=ENGINE[engine].first_token) if mode == "disagg" else DisaggregationConfig()


def write_deployment(
    folder: Path, candidate: Candidate, workload: Workload, load: Load, setting: Setting = USUAL
) -> Written:
    """Write best.toml, and beside it the rows that it plays (a user's trace stays where it is).

    Raises ConfigError as `to_config` does.
    """
    played = protocol(workload, load)
    folder.mkdir(parents=True, exist_ok=True)
    rows = workload.trace
    if rows is None:
        rows = folder / ROWS
        write_rows(workload, played.requests, rows)
    return write_config(folder, to_config(candidate, workload, load, rows, setting))


def write_config(folder: Path, config: Config) -> Written:
    """Write best.toml and read it once: a configuration that the twin would refuse raises its ConfigError here."""
    path = folder / BEST_TOML
    with whole_file(path) as out:
        out.write(to_toml(config, beside=folder))
    return Written(path=path, config=load_config(path))


def _trace(workload: Workload, load: Load, rows: Path) -> TraceConfig:
    played: Protocol = protocol(workload, load)
    closed = load.users is not None
    drawn = workload.trace is None
    return TraceConfig(
        path=Path(os.path.abspath(rows)),
        limit=played.requests,
        warmup=played.warmup or None,
        arrivals="closed" if closed else "recorded" if drawn else workload.arrivals,
        concurrency=load.users,
        rate_rps=load.rps,
    )


def _group(candidate: Candidate, pool: Pool, setting: Setting) -> WorkerGroup:
    return WorkerGroup(
        name=GROUPS[pool.role],
        count=pool.replicas,
        role=pool.role,
        model=candidate.model,
        gpu=pool.gpu,
        tp=pool.layout.tp,
        pp=pool.layout.pp,
        dp=pool.layout.dp,
        ep=pool.layout.ep,
        weights=pool.weights,
        kv=pool.kv,
        usd_per_hour=setting.usd_per_hour,
        engine=_engine(candidate, pool),
        latency=setting.physics.latency,
        kvbm=candidate.serving.kvbm_config(pool.role),
        links=candidate.serving.paths(pool.role),
    )


def _engine(candidate: Candidate, pool: Pool) -> EngineConfig:
    engine, usual = ENGINE[candidate.engine], EngineConfig()
    sizes: dict[str, int] = {"max_num_batched_tokens": pool.max_num_batched_tokens}
    if engine.kind == "sglang":  # its chunk is that of all ranks together
        chunk = pool.max_num_batched_tokens * pool.layout.dp
        sizes = {"chunked_prefill_size": chunk, "max_prefill_tokens": max(usual.max_prefill_tokens, chunk)}
    return EngineConfig(
        kind=engine.kind,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.memory_share,
        max_num_seqs=pool.max_num_seqs,
        chunked_prefill=engine.chunks,
        nextn=candidate.nextn,
        **sizes,  # type: ignore[arg-type]  # all of them are whole numbers
    )


# ---------------------------------------------------------------- and back


def from_config(config: Config) -> Candidate:
    """The candidate that a configuration deploys, whatever it replays.

    Raises ConfigError, naming the first key, for what no candidate can say: a deployment that `to_config` of the
    candidate would set up otherwise is not that candidate.
    """
    groups = config.workers
    roles = tuple(group.role for group in groups)
    if roles not in (("mixed",), ("prefill", "decode")):
        raise ConfigError(
            f"the groups of workers have the roles {', '.join(roles)}: a candidate has one of mixed workers, or one of "
            "prefill and then one of decode workers"
        )
    first = groups[0]
    for group in groups[1:]:
        for key, mine, others in (
            ("model", group.model, first.model),
            ("engine.kind", group.engine.kind, first.engine.kind),
            ("engine.nextn", group.engine.nextn, first.engine.nextn),
        ):
            if mine != others:
                raise ConfigError(
                    f"workers.{group.name}.{key} = {mine}, and {others} in group {first.name}: "
                    "all pools of a candidate have the same"
                )
    candidate = Candidate(
        model=first.model,
        engine=first.engine.kind,
        pools=tuple(_pool(group) for group in groups),
        nextn=first.engine.nextn,
        serving=serving_of(config.router, first.kvbm),
    )
    router = candidate.serving.router_config()
    _check_table("router", config.router, router)
    for table in ("queue", "busy", "affinity", "thunder"):
        _check_table(f"router.{table}", getattr(config.router, table), getattr(router, table))
    for group, pool in zip(groups, candidate.pools, strict=True):
        _check_group(group, _group(candidate, pool, _setting_of(group)))
    _check_table("disaggregation", config.disaggregation, _disaggregation(candidate.engine, candidate.mode))
    return candidate


def _pool(group: WorkerGroup) -> Pool:
    engine = group.engine
    tokens = engine.max_num_batched_tokens
    return Pool(
        role=group.role,
        gpu=group.gpu,
        layout=Layout(tp=group.tp, pp=group.pp, dp=group.dp, ep=group.ep),
        replicas=group.count,
        weights=group.weights,
        kv=group.kv,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.chunked_prefill_size // group.dp if engine.kind == "sglang" else tokens,
    )


def _setting_of(group: WorkerGroup) -> Setting:
    physics = physics_of(group.latency, f"workers.{group.name}.latency")
    return Setting(physics=physics, usd_per_hour=group.usd_per_hour)


def _check_group(has: WorkerGroup, says: WorkerGroup) -> None:
    """What a candidate does not hold must be as it is for every candidate; names are nobody's concern."""
    shown = f"workers.{has.name}"
    _check_table(shown, has, says, apart=("name",))
    for table in ("engine", "startup", "kvbm", "links"):
        _check_table(f"{shown}.{table}", getattr(has, table), getattr(says, table))


def _check_table(shown: str, has: object, says: object, apart: tuple[str, ...] = ()) -> None:
    for entry in keys_of(type(has)):
        mine, usual = getattr(has, entry.name), getattr(says, entry.name)
        if entry.name not in apart and mine != usual:
            raise ConfigError(
                f"{shown}.{entry.name} = {mine}: a candidate cannot say that; it is {usual} in every one like this"
            )
