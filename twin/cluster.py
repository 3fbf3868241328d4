"""From the configuration to workers to simulate: latency models, pool sizes, engine settings.

One latency model and one pool size per group; its workers share them. Nothing here runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.cluster.ids import Role, WorkerId
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from twin.config import DISK_GB_PER_S, OBJECT_STORE_GB_PER_S, WARMUP_S, Config, WorkerGroup
from twin.config_lists import accept_rates, graph_sizes
from twin.engine.settings import EngineSettings, HostTierSettings, Layers, SglangSettings, Speculation
from twin.link_use import path_of
from twin.perf.adapters import Adapters
from twin.perf.build import build_latency
from twin.perf.cargo import WEIGHTS
from twin.perf.coldstart import LinkedStart, Startup, rank_bytes, startup
from twin.perf.energy import Power, power
from twin.perf.hardware import Gpu, find_gpu
from twin.perf.layers import rank_latency
from twin.perf.layout import Layout
from twin.perf.memory import Placement, kv_pool_tokens
from twin.perf.models import find_model
from twin.perf.protocol import LatencyModel
from twin.worker_spec import WorkerSpec

PEER = "dynamo-1.6.1"
PHYSICAL = ("roofline", "silicon")
"""Latency models of a model on a GPU, which can be asked for steps of another shape."""
RANKS_CONSERVATIVENESS = 0.3
"""What SGLang multiplies its schedule_conservativeness by when attention is data parallel (its server arguments)."""


@frozen
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
    startup_s = startup_s_of(group)
    workers = tuple(
        WorkerSpec(
            worker_id=WorkerId(first + i),
            name=f"{group.name}-{i}",
            settings=settings,
            latency=latency,
            role=Role(group.role),
            gpus=group.gpus,
            startup_s=startup_s,
            loras=group.loras,
            taints=group.taints or (),
            on_cpu=group.on_cpu,
            path_s=group.path_s,
        )
        for i in range(group.count)
    )
    return Group(config=group, settings=settings, latency=latency, workers=workers)


def startup_s_of(group: WorkerGroup) -> float:
    """How long a worker of the group takes to come up when it is added or comes back; beside what its weights take,
    where they cross links of the run."""
    if group.startup_s is not None:
        return group.startup_s
    start = startup_of(group)
    if start is None:
        return 0.0
    return start.fixed_s if isinstance(start, LinkedStart) else start.total_s


def startup_of(group: WorkerGroup) -> Startup | LinkedStart | None:
    """The parts of a start, by `[workers.startup]`; None where that is not given."""
    table = group.startup
    if table.weights_from is None:
        return None
    if group.links.weights is not None:
        return LinkedStart(
            boot_s=table.boot_s,
            warmup_s=_warmup_s(group),
            rank_bytes=tuple(round(size) for size in rank_bytes(placement_of(group))),
            source=table.weights_from,  # type: ignore[arg-type]  # one of the key's choices
            path=path_of(group, WEIGHTS),
        )
    usual = {"disk": DISK_GB_PER_S, "object": OBJECT_STORE_GB_PER_S}.get(table.weights_from)
    read = usual if table.bandwidth_gb_per_s is None else table.bandwidth_gb_per_s
    return startup(
        placement_of(group),
        source=table.weights_from,  # type: ignore[arg-type]  # one of the key's choices
        read_bytes_per_s=None if read is None else read * 1e9,
        boot_s=table.boot_s,
        warmup_s=_warmup_s(group),
    )


def _warmup_s(group: WorkerGroup) -> float:
    given = group.startup.warmup_s
    return WARMUP_S[group.engine.kind] if given is None else given


def power_of(group: WorkerGroup) -> Power | None:
    """What an estimate of energy needs; None where neither the pool nor the latency model says what hardware it is."""
    if group.engine.kv_blocks is not None and group.latency.model not in PHYSICAL:
        return None
    return power(placement_of(group))


def placement_of(group: WorkerGroup) -> Placement:
    """The group's model on its GPUs. Raises ConfigError for names that are not known."""
    return Placement(
        model=find_model(group.model),
        gpu=gpu_of(group),
        layout=Layout(tp=group.tp, pp=group.pp, dp=group.dp, ep=group.ep),
        weights=group.weights,
        kv=group.kv,
    )


def gpu_of(group: WorkerGroup) -> Gpu:
    """The group's GPU, from the user's own table where the latency model names one. Raises ConfigError."""
    hardware = group.latency.params.get("hardware")
    return find_gpu(group.gpu, Path(str(hardware)) if hardware else None)


def _latency(group: WorkerGroup, settings: EngineSettings) -> LatencyModel:
    """What the steps of one rank of a worker cost; what parallelism and speculation add, models of hardware alone
    know."""
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
    sizes = engine.cuda_graph_sizes
    return rank_latency(
        latency,
        pp=group.pp,
        dp=group.dp,
        nextn=engine.nextn,
        graph_sizes=None if sizes is None else graph_sizes(sizes, "cuda_graph_sizes"),
        eager_factor=engine.eager_factor,
        physical=group.latency.model in PHYSICAL,
    )


def _settings(group: WorkerGroup, seed: int, *, peer: bool, leap: bool) -> EngineSettings:
    engine = group.engine
    common = _common(group, seed, peer=peer, leap=leap)
    if engine.kind == "sglang":
        return _sglang(group, common, peer=peer)
    if engine.kind == "trtllm":
        from twin.engine.trtllm import TrtllmSettings

        return TrtllmSettings(
            **common,
            exclusive_prefill=False,
            preemption="lifo",
            capacity_policy=engine.capacity_policy,
            batch_wait_iters=engine.batch_wait_iters,
            batch_wait_ratio=engine.batch_wait_ratio,
        )
    return EngineSettings(
        **common,
        exclusive_prefill=engine.exclusive_prefill and not engine.nextn,
        preemption=engine.preemption,
        fifo_skip=peer,
    )


def _common(group: WorkerGroup, seed: int, *, peer: bool, leap: bool) -> dict[str, Any]:
    """What all engines have."""
    engine = group.engine
    common: dict[str, Any] = {
        "block_size": engine.block_size,
        "blocks": engine.kv_blocks if engine.kv_blocks is not None else _blocks_in_memory(group),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "prefix_caching": engine.prefix_caching,
        "chunked_prefill": engine.chunked_prefill,
        "abort_when_stuck": peer,
        "leap": leap,
        "ranks": group.dp,
        "prefill_interval": engine.prefill_schedule_interval,
        "balance_wait": engine.dp_balance_wait_iters,
        "speculation": _speculation(group, seed, peer=peer and engine.kind != "sglang"),  # the reference has none there
    }
    if engine.host_blocks is not None:
        common["host"] = _host_tier(group)
    if group.kvbm.has_tiers:
        common["layers"] = _layers(group) if group.kvbm.load_layers == "each" else None
        _check_tiers(group, peer=peer)
        common["tiers"] = True
    if engine.max_loras is not None and not peer:
        common["max_loras"] = _max_loras(group)
    return common


def _blocks_in_memory(group: WorkerGroup) -> int:
    """KV blocks of one rank that the group's GPUs have room for."""
    engine = group.engine
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
        adapters=Adapters(count=_adapters(group), rank=group.lora_rank),
    )
    return tokens // engine.block_size // group.dp


def _adapters(group: WorkerGroup) -> int:
    """How many adapters have a place in GPU memory."""
    limit = group.engine.max_loras
    return limit if limit is not None and group.loras != () else len(group.loras or ())


def _max_loras(group: WorkerGroup) -> int:
    engine = group.engine
    assert engine.max_loras is not None
    if engine.kind != "vllm" or engine.nextn or engine.host_blocks is not None:
        raise CapabilityError(
            f"workers.{group.name}.engine.max_loras: a limit on adapters is there for vllm engines without a host tier "
            "and without speculation in this version"
        )
    return engine.max_loras


def _sglang(group: WorkerGroup, sizes: dict[str, Any], *, peer: bool) -> SglangSettings:
    """SGLang takes a chunk to be for all ranks of a worker, and dares more with attention data parallelism."""
    engine = group.engine
    chunk_tokens = engine.chunked_prefill_size // group.dp
    if chunk_tokens < engine.block_size:
        raise ConfigError(
            f"workers.{group.name}.engine.chunked_prefill_size = {engine.chunked_prefill_size} leaves {chunk_tokens} "
            f"tokens a step for each of {group.dp} ranks, less than a page of {engine.block_size}; make it "
            f"{engine.block_size * group.dp} or more"
        )
    return SglangSettings(
        **(sizes | {"max_num_batched_tokens": chunk_tokens}),  # what a step can take in
        exclusive_prefill=False,
        preemption="lifo",
        schedule_policy=engine.schedule_policy,
        chunked_prefill_size=chunk_tokens,
        max_prefill_tokens=engine.max_prefill_tokens,
        schedule_conservativeness=engine.schedule_conservativeness * (RANKS_CONSERVATIVENESS if group.dp > 1 else 1.0),
        clip_max_new_tokens=engine.clip_max_new_tokens,
        prefill_decode_interval=engine.prefill_decode_interval,
        free_recompute=peer,
        recv_interval=engine.recv_interval,
    )


def _layers(group: WorkerGroup) -> Layers:
    """Of the model that the group serves. Raises CapabilityError for ranks, which wait for each other's layers."""
    if group.dp > 1:
        raise CapabilityError(
            f"workers.{group.name}.kvbm.load_layers = each: the group has {group.dp} ranks, and layers of ranks that "
            "step together are not simulated; leave load_layers out, or set dp = 1"
        )
    layers = find_model(group.model).layers
    return Layers(stage=-(-layers // group.pp), model=layers)


def _check_tiers(group: WorkerGroup, *, peer: bool) -> None:
    """Raises CapabilityError for a group that a block manager cannot serve in this version."""
    engine = group.engine
    reasons = {
        "prefix caching is off": not engine.prefix_caching,
        "it has a plain host tier (host_blocks)": engine.host_blocks is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise CapabilityError(
                f"workers.{group.name}.kvbm: {reason}; a block manager needs prefix caching and no host_blocks"
            )
    if peer and group.role != "mixed":
        raise CapabilityError(
            f"workers.{group.name}.kvbm: compat = {PEER} has preempted requests of {group.role} workers wait for "
            "others in a way that knows no tiers; leave compat out, or the tiers of this group"
        )


def block_bytes_of(group: WorkerGroup) -> int:
    """Bytes of one KV block, over all ranks of a worker."""
    from twin.perf.kv_layout import kv_cache, plan_layout

    cache = kv_cache(find_model(group.model), group.kv)
    return plan_layout(cache, group.tp, group.tp).wire_bytes(group.engine.block_size)


def _host_tier(group: WorkerGroup) -> HostTierSettings:
    engine = group.engine
    assert engine.host_blocks is not None
    alone = group.dp == 1 and not engine.nextn
    if engine.kind not in ("vllm", "sglang") or not engine.prefix_caching or (engine.kind == "vllm" and not alone):
        raise CapabilityError(
            f"workers.{group.name}.engine.host_blocks: a host tier needs prefix caching and an sglang engine, or a "
            "vllm engine with one rank and no speculation"
        )
    block_bytes = engine.host_block_bytes
    if block_bytes is None:
        block_bytes = block_bytes_of(group)
    return HostTierSettings(
        blocks=engine.host_blocks,
        block_bytes=block_bytes,
        load_bytes_per_s=engine.host_load_gb_per_s * 1e9,
        trigger=engine.host_offload,
        overlap=engine.host_load_overlap,
    )


def _speculation(group: WorkerGroup, seed: int, *, peer: bool) -> Speculation | None:
    engine = group.engine
    if not engine.nextn:
        return None
    rates = (*accept_rates(engine.accept_rates, "accept_rates"), *[0.0] * engine.nextn)[: engine.nextn]
    return Speculation(accept_rates=rates, seed=seed, in_prefill=peer)
