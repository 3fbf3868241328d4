"""From the configuration to workers to simulate: latency models, pool sizes, engine settings.

One latency model and one pool size per group; its workers share them. Nothing here runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.cluster.ids import Role, WorkerId
from twin.config import Config, WorkerGroup
from twin.config_lists import accept_rates, graph_sizes
from twin.engine.settings import EngineSettings, Speculation
from twin.engine.trtllm import TrtllmSettings
from twin.mocker.world import WorkerSpec
from twin.perf.build import build_latency
from twin.perf.layers import PaddedLatency, PipelinedLatency, RankLatency, VerifyLatency
from twin.perf.memory import kv_pool_tokens
from twin.perf.protocol import LatencyModel

PEER = "dynamo-1.6.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A worker group, ready to simulate; `workers` are its members."""

    config: WorkerGroup
    settings: EngineSettings
    latency: LatencyModel
    workers: tuple[WorkerSpec, ...]


def build_groups(config: Config, *, leap: bool = True) -> tuple[Group, ...]:
    """All groups, workers numbered through. Raises ConfigError where a model does not fit its GPUs."""
    groups = []
    first = 0
    for group in config.workers:
        built = _build(group, first, config.seed, peer=config.compat == PEER, leap=leap)
        groups.append(built)
        first += group.count
    return tuple(groups)


def _build(group: WorkerGroup, first: int, seed: int, *, peer: bool, leap: bool) -> Group:
    settings = _settings(group, seed, peer=peer, leap=leap)
    latency = _latency(group, settings)
    workers = tuple(
        WorkerSpec(
            worker_id=WorkerId(first + i),
            name=f"{group.name}-{i}",
            settings=settings,
            latency=latency,
            role=Role(group.role),
            gpus=group.gpus,
            startup_s=group.startup_s or 0.0,
        )
        for i in range(group.count)
    )
    return Group(config=group, settings=settings, latency=latency, workers=workers)


def _latency(group: WorkerGroup, settings: EngineSettings) -> LatencyModel:
    """What the steps of one rank of a worker cost; what parallelism and speculation add, the roofline alone knows."""
    engine = group.engine
    latency = build_latency(
        group.latency,
        engine=engine.kind,
        model=group.model,
        gpu=group.gpu,
        tp=group.tp,
        pp=group.pp,
        dp=group.dp,
        ep=group.ep,
        weights=group.weights,
        kv=group.kv,
        pool_tokens=settings.blocks * settings.block_size,
    )
    physical = group.latency.model == "roofline"
    if physical and group.dp > 1:
        latency = RankLatency(latency, group.dp)
    if physical and engine.nextn:
        latency = VerifyLatency(latency, engine.nextn)
    if engine.cuda_graph_sizes is not None:
        latency = PaddedLatency(latency, graph_sizes(engine.cuda_graph_sizes, "cuda_graph_sizes"), engine.eager_factor)
    if physical and group.pp > 1:
        latency = PipelinedLatency(latency, group.pp)
    return latency


def _settings(group: WorkerGroup, seed: int, *, peer: bool, leap: bool) -> EngineSettings:
    engine = group.engine
    blocks = engine.kv_blocks
    if blocks is None:
        hardware = group.latency.params.get("hardware")  # the user's own GPUs count for memory too
        tokens = kv_pool_tokens(
            engine=engine.kind,
            model=group.model,
            gpu=group.gpu,
            tp=group.tp,
            pp=group.pp,
            dp=group.dp,
            ep=group.ep,
            weights=group.weights,
            kv=group.kv,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            hardware=Path(str(hardware)) if hardware else None,
        )
        blocks = tokens // engine.block_size // group.dp
    sizes: dict[str, Any] = {
        "block_size": engine.block_size,
        "blocks": blocks,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "prefix_caching": engine.prefix_caching,
        "chunked_prefill": engine.chunked_prefill,
        "abort_when_stuck": peer,
        "leap": leap,
        "ranks": group.dp,
        "prefill_interval": engine.prefill_schedule_interval,
        "speculation": _speculation(group, seed, peer=peer),
    }
    if engine.kind == "trtllm":
        return TrtllmSettings(
            **sizes, exclusive_prefill=False, preemption="lifo", capacity_policy=engine.capacity_policy
        )
    return EngineSettings(
        **sizes,
        exclusive_prefill=engine.exclusive_prefill and not engine.nextn,
        preemption=engine.preemption,
        fifo_skip=peer,
    )


def _speculation(group: WorkerGroup, seed: int, *, peer: bool) -> Speculation | None:
    engine = group.engine
    if not engine.nextn:
        return None
    rates = (*accept_rates(engine.accept_rates, "accept_rates"), *[0.0] * engine.nextn)[: engine.nextn]
    return Speculation(accept_rates=rates, seed=seed, in_prefill=peer)
