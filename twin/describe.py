"""What a run says about itself: cluster and router in words, what is not modelled, what deserves a warning.

Words only: every figure in here comes from the configuration or from counters of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Protocol

from policies.cluster.controller import Policy
from policies.cluster.ids import WorkerId
from reports.report import GroupMeta, LatencyMeta, PowerMeta, RunMeta, StartMeta, TraceMeta, WorkerMeta
from reports.routing import prompt_counters
from traces.options import TraceInfo
from twin.cluster import PEER, Group, power_of, startup_of
from twin.config import Config, KvbmConfig, WorkerGroup
from twin.config_text import to_plain
from twin.describe_router import router_line
from twin.engine.settings import SglangSettings
from twin.mocker.starts import Start
from twin.worker_spec import WorkerSpec

NOT_MODELLED = (
    "tokeniser and HTTP time, and the network between clients and the cluster",
    "router and scheduler compute time",
    "the making of draft tokens, and CUDA-graph padding unless cuda_graph_sizes is given",
    "sampling: every request makes exactly the output length of its trace row",
)

NO_FAULTS = ("engine errors and failures of the control plane (a scenario of --faults has them)",)
NO_TIERS = ("KV tiers below devices (workers.kvbm has them)",)
PATH_NOT_MODELLED = (
    "tokeniser and HTTP time, but for the constant way to an engine (path_s), and the network between clients and the "
    "cluster"
)
TIERS_NOT_MODELLED = (
    "KV tiers: layers that come while a step runs, checks of stored bytes, device memory that waits to be copied, "
    "disks that workers of one node share",
)

ADAPTERS_NOT_MODELLED = ("what adapters add to a step, the time to load one",)

NO_KEYS_WARNING = (
    "router kv: the trace has no prefix content (no hash ids), so kv routing could only balance load; "
    "its overlap terms were 0 throughout"
)


class Demanded(Protocol):
    """What a run says of the demand that it had: a `traces.load.Trace`, or clients."""

    @property
    def info(self) -> TraceInfo: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    @property
    def remarks(self) -> Mapping[str, int]: ...


def describe_run(
    config: Config,
    groups: tuple[Group, ...],
    trace: Demanded,
    policy: Policy,
    *,
    hash_known: bool,
    no_effect: tuple[str, ...],
) -> RunMeta:
    """Everything about the run that its record does not hold, as the report wants it."""
    workers = tuple(
        WorkerMeta(
            worker_id=spec.worker_id,
            name=spec.name,
            group=group.config.name,
            gpus=spec.gpus,
            role=spec.role.value,
            total_blocks=spec.settings.blocks * spec.settings.ranks,
            block_size=spec.settings.block_size,
        )
        for group in groups
        for spec in group.workers
    )
    return RunMeta(
        trace=_trace_meta(trace),
        cluster=(
            *(cluster_line(group) for group in groups),
            *([handoff_line(config)] if config.is_disaggregated else ()),
        ),
        router=router_line(config),
        latency=tuple(_latency_meta(group) for group in groups),
        workers=workers,
        groups=tuple(_group_meta(group) for group in groups),
        gpus=sum(worker.gpus for worker in workers),
        hash_known=hash_known,
        seed=config.seed,
        routing=_counters(policy),
        not_modelled=_not_modelled(config, groups),
        no_effect=(*config.no_effect, *no_effect),
        warnings=(*_warnings(config, trace, policy, hash_known=hash_known), *_tier_warnings(groups)),
        config=to_plain(config),
        origins=dict(config.origins),
    )


def _not_modelled(config: Config, groups: Iterable[Group]) -> tuple[str, ...]:
    groups = tuple(groups)
    faults = () if config.faults.path is not None else NO_FAULTS
    tiers = TIERS_NOT_MODELLED if any(group.config.kvbm.has_tiers for group in groups) else NO_TIERS
    outside = (PATH_NOT_MODELLED, *NOT_MODELLED[1:]) if all(group.config.path_s for group in groups) else NOT_MODELLED
    return (*outside, *faults, *tiers, *(ADAPTERS_NOT_MODELLED if any(_has_adapters(g) for g in groups) else ()))


def _has_adapters(group: Group) -> bool:
    return bool(group.config.loras) or group.settings.max_loras is not None


def _counters(policy: Policy) -> dict[str, int]:
    """What the router counted; a plug-in need not count anything."""
    counters = getattr(policy, "counters", None)
    return dict(counters()) if counters is not None else {}


def _group_meta(group: Group) -> GroupMeta:
    power = power_of(group.config)
    return GroupMeta(
        name=group.config.name,
        gpu=group.config.gpu,
        role=group.config.role,
        usd_per_hour=group.config.usd_per_hour,
        power=None if power is None else PowerMeta(**asdict(power)),
    )


def cluster_line(group: Group) -> str:
    """One worker group for a person."""
    config, settings = group.config, group.settings
    engine = (
        f"block {settings.block_size} x {settings.blocks:,} ({settings.block_size * settings.blocks:,} tokens), "
        f"{settings.max_num_seqs} sequences, {settings.max_num_batched_tokens:,} tokens a step, "
        f"prefix caching {_on(settings.prefix_caching)}, chunked prefill {_on(settings.chunked_prefill)}"
    )
    if settings.exclusive_prefill:
        engine += ", exclusive prefill"
    if settings.ranks > 1:
        engine += f", each of {settings.ranks} ranks"
    if config.engine.kind == "trtllm":
        engine += f", {config.engine.capacity_policy}"
        if config.engine.batch_wait_iters:
            engine += f", prompts wait for others up to {config.engine.batch_wait_iters} steps"
        if config.engine.dp_balance_wait_iters:
            engine += f", ranks for each other's prompts up to {config.engine.dp_balance_wait_iters}"
    if config.engine.kind == "sglang":
        engine += f", {config.engine.schedule_policy}"
        if config.engine.recv_interval > 1:
            engine += f", looks who has come every {config.engine.recv_interval} decode steps"
    if isinstance(settings, SglangSettings) and settings.ranks > 1:
        engine += f", conservativeness {settings.schedule_conservativeness:g}"
    if settings.host is not None:
        engine += f", host tier of {settings.host.blocks:,} blocks"
    if config.kvbm.has_tiers:
        engine += f", KV tiers {' > '.join(_tiers_in_words(config.kvbm))}"
        if config.kvbm.events == "dedupe":
            engine += ", published as one"
    if settings.speculation is not None:
        engine += f", drafts accepted {'/'.join(f'{rate:g}' for rate in settings.speculation.accept_rates)}"
    if config.loras is not None:
        engine += f", {len(config.loras)} adapters" if len(config.loras) != 1 else ", 1 adapter"
    if settings.max_loras is not None:
        engine += f", {settings.max_loras} in a batch"
    layout = f"TP {config.tp}"
    for name, degree in (("PP", config.pp), ("DP", config.dp), ("EP", config.ep)):
        if degree > 1:
            layout += f" {name} {degree}"
    start = startup_of(config) if config.startup_s is None else None
    if start is not None:
        engine += f" · {start.label()}"
    return (
        f"{config.name}: {config.count} x {config.role} · {config.engine.kind} · {config.model} "
        f"{config.weights.upper()} weights, {config.kv.upper()} KV · {config.gpu} {layout} · {engine}"
    )


def _tiers_in_words(kvbm: KvbmConfig) -> Iterator[str]:
    """Size and policies of each tier."""
    sizes = {
        "cpu": (kvbm.cpu_cache_gb, kvbm.cpu_cache_tokens) if kvbm.has_cpu else None,
        "disk": (kvbm.disk_cache_gb, kvbm.disk_cache_tokens) if kvbm.has_disk else None,
        "remote": (kvbm.remote_cache_gb, None) if kvbm.remote else None,
    }
    for name, size in sizes.items():
        if size is not None:
            gb, tokens = size
            large = f"{gb:g} GB" if gb is not None else "unlimited" if tokens is None else f"{tokens:,} tokens"
            policies = [getattr(kvbm, f"{name}_{what}") for what in ("offload", "trigger", "eviction")]
            shared = " shared" if name == "remote" or (name == "disk" and kvbm.disk_shared) else ""
            if name == "cpu" and kvbm.cpu_shared_by > 1:
                shared = f" of {kvbm.cpu_shared_by} workers"
            yield f"{name}{shared} {large} ({', '.join(policies)})"


def starts_meta(
    starts: Iterable[Start], groups: Iterable[Group], specs: Mapping[WorkerId, WorkerSpec]
) -> tuple[StartMeta, ...]:
    """Starts that took time, as the report wants them. `specs`: of all workers that there ever were."""
    by_name = {group.config.name: group.config for group in groups}
    configs = {worker_id: by_name[spec.name.rpartition("-")[0]] for worker_id, spec in specs.items()}
    return tuple(
        StartMeta(
            worker_id=start.worker_id,
            ordered_s=start.ordered_s,
            timed_by=_timed_by(start, configs[start.worker_id]),
            load_from_s=start.load_s,
            loaded_s=start.loaded_s,
            up_s=start.up_s,
            weight_bytes=None if start.load is None else sum(start.load.rank_bytes),
            over=None if start.load is None else configs[start.worker_id].links.weights,
            sent_by=start.peer,
        )
        for start in starts
        if start.up_s != start.ordered_s
    )


def _timed_by(start: Start, group: WorkerGroup) -> str:
    if start.load is not None:
        return "links"
    return "formula" if group.startup_s is None and startup_of(group) is not None else "given"


def handoff_line(config: Config) -> str:
    """How KV is handed over, for a person."""
    table = config.disaggregation
    order = "destination first" if config.is_destination_first else "source first"
    paths = dict.fromkeys(group.links.kv for group in config.workers)
    links = "the workers' NICs, shared" if list(paths) == ["nic"] else f"shared links {', '.join(paths)}"
    if table.bandwidth_gb_per_s is not None:
        links = f"private links of {table.bandwidth_gb_per_s:g} GB/s"
    elif config.compat == PEER:
        links = "no time"
    lease = "" if config.compat == PEER else f", leases of {table.lease_s:g} s"
    return f"hand-off: {order}, first token from the {table.first_token} worker, {links}{lease}"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _trace_meta(trace: Demanded) -> TraceMeta:
    info = trace.info
    remarks = tuple(f"{what}: {count:,} rows" for what, count in sorted(trace.remarks.items()))
    return TraceMeta(
        name=info.path.name,
        format=info.format,
        synthetic=info.synthetic,
        source=info.source,
        licence=info.licence,
        notes=(*info.notes, *remarks),
        skipped=dict(trace.skipped),
    )


def _latency_meta(group: Group) -> LatencyMeta:
    provenance = group.latency.provenance
    return LatencyMeta(
        group=group.config.name,
        model=provenance.name,
        source=provenance.source,
        engine_version=provenance.engine_version,
        error_band=provenance.error_band,
        notes=provenance.notes,
    )


def _warnings(config: Config, trace: Demanded, policy: Policy, *, hash_known: bool) -> tuple[str, ...]:
    warnings = []
    if trace.skipped:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(trace.skipped.items()))
        warnings.append(f"rows of the trace left out: {left_out}")
    if config.router.mode == "kv" and not hash_known:
        warnings.append(NO_KEYS_WARNING)
    models = sorted({group.model for group in config.workers})
    if len(models) > 1:
        warnings.append(
            f"groups serve different models ({', '.join(models)}), and no trace names a model: "
            "every request may go to every group"
        )
    counts = _counters(policy)
    refused = sum(count for name, count in counts.items() if name.endswith("rejected_unknown_lora"))
    if refused:
        warnings.append(f"requests whose adapter no worker served then: {refused:,}, rejected (unknown_lora)")
    if config.router.mode == "kv" and hash_known and counts:
        warnings.extend(_kv_health(prompt_counters(counts)))
    if any(count for name, count in counts.items() if name.endswith("queue_budget_suspect")):
        warnings.append(
            "router.queue.prefill_busy_share: the step budget of a worker is more than half its KV pool, so it hardly "
            "ever counts as busy; take prefill_busy_tokens"
        )
    return tuple(warnings)


def _tier_warnings(groups: tuple[Group, ...]) -> list[str]:
    """Tiers whose sizes make no sense."""
    if not any(group.config.kvbm.has_tiers for group in groups):
        return []
    from twin.tiering import cascade_warnings

    return cascade_warnings(groups)


def _kv_health(counters: Mapping[str, int]) -> list[str]:
    warnings = []
    decisions = counters.get("decisions", 0)
    if decisions >= 100 and not counters.get("overlap_differs", 0):
        warnings.append(
            f"router kv: overlap was the same on every worker in all {decisions:,} decisions "
            "(routing effectiveness 0); it only balanced load: do prompts of the trace share hash ids, and is "
            "prefix_caching on?"
        )
    if counters.get("kv_index_empty", 0):
        warnings.append("router kv: nothing was in the prefix index after the first 100 finished requests")
    return warnings
