"""Which options of a configuration change nothing, and why: a setting that is silently ignored is a wrong answer.

An option counts when it differs from its default; saying the default aloud is harmless. Rules only read the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields

from policies.router.build import MODES
from twin.config import (
    ClassConfig,
    Config,
    DisaggregationConfig,
    EngineConfig,
    KvbmConfig,
    LatencyConfig,
    QueueConfig,
    ReplicasConfig,
    ResilienceConfig,
    RouterConfig,
    StartupConfig,
    ThunderConfig,
    TraceConfig,
    WorkerGroup,
)
from twin.config_planner import LookaheadConfig, PlannerConfig
from twin.config_schema import keys_of
from twin.link_use import path_of, used_paths, why_idle
from twin.perf.cargo import CARGOES, KV, WEIGHTS

TIERS: Mapping[str, tuple[str, Callable[[KvbmConfig], bool]]] = {
    "host_cache_hit_weight": ("host memory", lambda kvbm: kvbm.has_cpu),
    "disk_cache_hit_weight": ("a disk of its own", lambda kvbm: kvbm.has_disk and not kvbm.disk_shared),
    "shared_cache_multiplier": ("a tier that workers share", lambda kvbm: kvbm.remote or kvbm.disk_shared),
    "peer_cache_hit_weight": ("host memory that others read (peers)", lambda kvbm: kvbm.peers and kvbm.has_cpu),
}
"""What a worker must have below its device for a weight of the router to count."""
PREFILL_TERM = ("prefill_load_scale", "overlap_score_weight", "overlap_score_credit", "overlap_score_credit_decay")
DECODE_TERM = ("decode_basis", "track_output_blocks")
SGLANG_KEYS = (
    "schedule_policy",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_conservativeness",
    "clip_max_new_tokens",
    "prefill_decode_interval",
)
SGLANG_HAS_OTHERS = {
    "max_num_batched_tokens": "sglang has chunked_prefill_size and max_prefill_tokens instead",
    "preemption": "sglang retracts the request with the fewest tokens made",
    "chunked_prefill": "sglang always cuts prompts at chunked_prefill_size",
    "exclusive_prefill": "with sglang prompts and decodes never share a step anyway",
}
HOST_KEYS = ("host_offload", "host_load_gb_per_s", "host_load_overlap", "host_block_bytes")
_SYNC_KEYS = ("sync_delay_s", "sync_jitter_s", "sync_loss", "sync_batch_s")
DRAINS = ("grace_s", "drain_timeout_s", "migration_limit", "migration_max_seq_len", "retry_backoff")
"""Keys of [resilience] that count where a planner drains workers."""
PURE_TIME_MODELS = ("fixed", "polynomial")


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """(dotted key, why) of every option that was set and changes nothing."""
    yield from _trace(config.trace)
    for group in config.workers:
        if config.faults.path is None and not config.planner.is_on:
            yield from _startup(group)
        else:
            yield from _startup_parts(group)
        yield from _group(config, group)
        yield from _kvbm(config, group)
        if group.engine.max_loras is not None and config.compat != "none":
            yield f"workers.{group.name}.engine.max_loras", f"compat {config.compat} knows no adapters"
    yield from _links(config)
    yield from _router(config)
    yield from _replicas(config)
    yield from _observe(config)
    yield from _disaggregation(config)
    yield from _resilience(config)
    yield from _planner(config)


def _changed(table: object, names: Iterable[str]) -> Iterator[str]:
    """Those of `names` whose value in a dataclass is not the default."""
    defaults = {f.name: f.default for f in fields(table)}  # type: ignore[arg-type]
    return (name for name in names if getattr(table, name) != defaults[name])


def _trace(trace: TraceConfig) -> Iterator[tuple[str, str]]:
    if trace.arrivals == "closed":
        for name in _changed(trace, ("rate_rps", "speedup")):
            yield f"trace.{name}", "arrivals are closed: a request arrives when one ends, whatever the recorded times"
    elif trace.concurrency is not None:
        yield "trace.concurrency", f"arrivals are {trace.arrivals}; it needs trace.arrivals = closed"


def _startup(group: WorkerGroup) -> Iterator[tuple[str, str]]:
    why = "nothing in this run adds workers, or brings any back"
    if group.startup_s is not None:
        yield f"workers.{group.name}.startup_s", why
    for name in _changed(group.startup, [entry.name for entry in keys_of(StartupConfig)]):
        yield f"workers.{group.name}.startup.{name}", why


def _startup_parts(group: WorkerGroup) -> Iterator[tuple[str, str]]:
    """The parts of a start count where the start is made of parts."""
    for name in _changed(group.startup, [entry.name for entry in keys_of(StartupConfig)]):
        if group.startup_s is not None:
            yield f"workers.{group.name}.startup.{name}", "startup_s says how long the whole start takes"
        elif group.startup.weights_from is None:
            yield f"workers.{group.name}.startup.{name}", "startup.weights_from is not given"
        elif name == "bandwidth_gb_per_s" and group.links.weights is not None:
            yield f"workers.{group.name}.startup.{name}", "links.weights says what the weights cross"


def _group(config: Config, group: WorkerGroup) -> Iterator[tuple[str, str]]:
    shown = f"workers.{group.name}"
    if group.engine.kv_blocks is not None:
        for name in _changed(group.engine, ("gpu_memory_utilization",)):
            yield f"{shown}.engine.{name}", "kv_blocks says how large the pool is"
        if group.latency.model in PURE_TIME_MODELS:
            moving = _sizes_of_what_moves(config, group)
            for name in _changed(group, ("model", "gpu", "weights", "kv", "ep", "pp")):
                if name not in moving:
                    yield (
                        f"{shown}.{name}",
                        f"kv_blocks sets the pool, and the {group.latency.model} latency model knows no hardware",
                    )
    for name in _changed(group, ("lora_rank",)):
        if not group.loras and group.engine.max_loras is None:
            yield f"{shown}.{name}", "loras lists no adapters"
        elif group.engine.kv_blocks is not None:
            yield f"{shown}.{name}", "kv_blocks says how large the pool is"
    limit, loras = group.engine.max_loras, group.loras
    if loras is not None and limit is not None and (not loras or (limit >= len(loras) and group.engine.kv_blocks)):
        yield f"{shown}.engine.max_loras", f"loras lists {len(loras)} adapters"
    for name, why in (*_scheduler(group), *_waits(config, group)):
        yield f"{shown}.engine.{name}", why
    for name, owner in foreign_keys(group.latency).items():
        yield f"{shown}.latency.{name}", f"it belongs to the {owner} model, and {group.latency.model} is asked for"


def _sizes_of_what_moves(config: Config, group: WorkerGroup) -> set[str]:
    """The keys of a group that say how many bytes move, and what its own links carry."""
    found: set[str] = set()
    if why_idle(config, group, KV) is None:
        found |= {"model", "gpu", "kv"}
    elif config.is_disaggregated and config.disaggregation.kv_bytes_per_token is None:
        found |= {"model", "kv"}
    if why_idle(config, group, WEIGHTS) is None:
        found |= {"model", "gpu", "weights", "ep", "pp"}
    if group.kvbm.has_tiers:
        found |= {"model", "kv"} if group.kvbm.block_bytes is None else set()
        found |= {"model", "pp"} if group.kvbm.load_layers == "each" else set()
    if group.engine.host_blocks is not None:
        found |= {"model", "kv"} if group.engine.host_block_bytes is None else set()
        found |= {"gpu", "pp"} if group.links.host is not None and group.engine.kind != "sglang" else set()
    return found


def _kvbm(config: Config, group: WorkerGroup) -> Iterator[tuple[str, str]]:
    """Options of tiers that there are not, or whose policy is another one."""
    kvbm = group.kvbm
    changed = set(_changed(kvbm, [entry.name for entry in keys_of(KvbmConfig)]))
    there = {"cpu": kvbm.has_cpu, "disk": kvbm.has_disk, "remote": kvbm.remote}
    idle: dict[str, str] = {}
    if not kvbm.has_tiers:
        idle = dict.fromkeys(changed, "there is no tier: give cpu_cache_gb, disk_cache_gb or remote")
    for tier, is_there in there.items():
        if not is_there and not (tier == "cpu" and kvbm.has_tiers):
            own = [name for name in changed if name.startswith(f"{tier}_")]
            idle |= dict.fromkeys(own, f"there is no {tier} tier")
    for name in ("offload", "trigger", "eviction", "latency_s", "shared_by") if not kvbm.has_cpu else ():
        idle.setdefault(f"cpu_{name}", "there is no cpu tier")
    if (why := _unheard(config, group)) is not None:
        idle.setdefault("events", why)
    if group.count == 1:
        idle.setdefault("cpu_shared_by", "the group has one worker")
    for tier in ("cpu", "disk"):
        if getattr(kvbm, f"{tier}_cache_gb") is not None:
            idle.setdefault(f"{tier}_cache_tokens", f"{tier}_cache_gb says how large it is")
    if kvbm.has_tiers and not (kvbm.has_cpu and kvbm.goes_deeper):
        idle.setdefault("prefetch", "it takes a cpu tier and one below it")
    elif not config.router.queue.is_on:
        idle.setdefault("prefetch", "no request ever waits in the router: router.queue is off")
    sharing = sum(other.count for other in config.workers if other.kvbm.peers and other.kvbm.has_cpu)
    reading = ("peer_gb_per_s", "peer_latency_s")
    if not kvbm.peers:
        idle |= dict.fromkeys(reading, "peers is off")
    elif kvbm.has_tiers and not kvbm.has_cpu:
        idle |= dict.fromkeys(("peers", *reading), "there is no cpu tier")
    elif kvbm.has_tiers and sharing < 2 and config.faults.path is None:
        idle |= dict.fromkeys(("peers", *reading), "no other worker has a cpu tier and peers")
    elif group.links.store is not None:
        idle["peer_gb_per_s"] = "links.store says what blocks cross"
    if kvbm.has_tiers and not kvbm.reads_outside:
        idle.setdefault("registry_lookup_s", "there is nothing to ask for: peers, remote or disk_shared")
    if not kvbm.asks_registry:
        for name in ("registry_lease_s", "registry_negative_s"):
            idle.setdefault(name, "nobody asks a registry: registry_lookup_s is 0")
    elif not kvbm.peers:
        idle.setdefault("registry_lease_s", "peers is off, and what lies in tiers that all share stays on record")
    elif config.faults.path is None:
        idle.setdefault("registry_lease_s", "without faults every lease is renewed")
    if kvbm.onboard != "deadline":
        idle.setdefault("onboard_deadline_s", f"onboard = {kvbm.onboard}")
    filters = "+".join(getattr(kvbm, f"{tier}_offload") for tier, is_there in there.items() if is_there)
    if "presence_lfu" not in filters:
        idle.setdefault("min_lfu_count", "no tier has presence_lfu as its offload")
    if "tenant_quota" not in filters:
        idle.setdefault("tenant_quota_tokens", "no tier has tenant_quota as its offload")
    if "frequency_filter" not in filters:
        idle.setdefault("decay_s", "no tier has frequency_filter as its offload")
    if group.links.host is not None:
        idle.setdefault("cpu_gb_per_s", "links.host says what blocks cross")
    yield from ((f"workers.{group.name}.kvbm.{name}", why) for name, why in idle.items() if name in changed)


def _unheard(config: Config, group: WorkerGroup) -> str | None:
    """Why nobody hears what a group says of its blocks; None where somebody does, or may."""
    mode = config.router.mode
    if mode in MODES and not (mode == "kv" and config.router.use_kv_events):
        reason = "router.use_kv_events is off" if mode == "kv" else f"the mode is {mode}"
        return f"no policy of this run listens to KV events ({reason})"
    shares = group.kvbm.remote or group.kvbm.disk_shared  # of that everybody tells
    if group.role == "decode" and config.disaggregation.conditional == "off" and not shares:
        return "disaggregation.conditional is off, so nobody asks what decode workers have"
    return None


def _scheduler(group: WorkerGroup) -> Iterator[tuple[str, str]]:
    """Options that the group's engine, or another of its options, leaves without a part to play."""
    engine = group.engine
    changed = set(_changed(engine, [entry.name for entry in keys_of(EngineConfig)]))
    if engine.host_blocks is None:
        for name in HOST_KEYS:
            if name in changed:
                yield name, "there is no host tier: host_blocks is not set"
    elif group.links.host is not None and engine.kind != "sglang" and "host_load_gb_per_s" in changed:
        yield "host_load_gb_per_s", "links.host says what loads cross"
    if engine.kind == "trtllm":
        idle = {
            "preemption": "guaranteed_no_evict preempts nobody, max_utilization the newest",
            "exclusive_prefill": "TensorRT-LLM computes prompts beside decodes",
        }
    else:
        idle = {"capacity_policy": f"it belongs to trtllm, and {engine.kind} is asked for"}
    if engine.kind == "sglang":
        idle |= SGLANG_HAS_OTHERS
    else:
        idle |= dict.fromkeys(SGLANG_KEYS, f"it belongs to sglang, and {engine.kind} is asked for")
    if engine.nextn and engine.kind == "vllm":
        idle["exclusive_prefill"] = "with speculative decoding prompts are computed beside decodes"
    if group.dp == 1:
        idle["prefill_schedule_interval"] = "there is one rank (dp = 1)"
    elif engine.kind == "sglang":
        idle["prefill_schedule_interval"] = "sglang has prefill_decode_interval instead"
    elif engine.exclusive_prefill:
        idle["prefill_schedule_interval"] = "exclusive_prefill starts prompts first anyway"
    if not engine.nextn:
        idle["accept_rates"] = "nextn = 0, so there are no draft tokens"
    elif engine.accept_rates.count(",") >= engine.nextn:
        idle["accept_rates"] = f"nextn = {engine.nextn}, and it has more rates than that"
    if engine.kind == "trtllm" or (engine.kind == "vllm" and (group.dp > 1 or engine.nextn)):
        idle["host_blocks"] = "a host tier is there for sglang, and for vllm with one rank and without draft tokens"
    if engine.host_blocks is not None and engine.kind != "sglang":
        idle["host_load_overlap"] = f"it belongs to sglang, and {engine.kind} is asked for"
    if engine.kind != "vllm" or engine.nextn or engine.host_blocks is not None:
        idle["max_loras"] = "a limit on adapters is there for vllm without draft tokens and without a host tier"
    if engine.cuda_graph_sizes is None:
        idle["eager_factor"] = "without cuda_graph_sizes no step is eager"
    yield from ((name, why) for name, why in idle.items() if name in changed)


def _waits(config: Config, group: WorkerGroup) -> Iterator[tuple[str, str]]:
    """Options of how prompts wait while others decode, where they do not."""
    engine, ranks = group.engine, group.dp > 1
    changed = set(_changed(engine, ("recv_interval", "batch_wait_iters", "batch_wait_ratio", "dp_balance_wait_iters")))
    idle: dict[str, str] = {}
    if ranks:
        idle["recv_interval"] = (
            f"there are {group.dp} ranks, and with ranks (attention dp) every step looks who has come"
        )
        idle |= dict.fromkeys(
            ("batch_wait_iters", "batch_wait_ratio"), f"with {group.dp} ranks there is dp_balance_wait_iters instead"
        )
        if engine.dp_balance_wait_iters == 1:
            idle["dp_balance_wait_iters"] = "prompts may start in every step"
    else:
        idle["dp_balance_wait_iters"] = "there is one rank (dp = 1)"
        if not engine.batch_wait_iters:
            idle["batch_wait_ratio"] = "batch_wait_iters = 0, so prompts do not wait"
        if not engine.batch_wait_ratio:
            idle["batch_wait_iters"] = "batch_wait_ratio = 0, so any prompt is enough"
    if group.role == "prefill":
        idle |= dict.fromkeys(changed, "prefill workers do not decode, so no prompt waits")
    elif group.role == "decode" and config.disaggregation.conditional == "off":
        idle |= dict.fromkeys(changed, "disaggregation.conditional is off, so all prompts come by hand-off")
    for name in changed:
        owner = "sglang" if name == "recv_interval" else "trtllm"
        if engine.kind != owner:
            idle[name] = f"it belongs to {owner}, and {engine.kind} is asked for"
    yield from ((name, why) for name, why in idle.items() if name in changed)


def _links(config: Config) -> Iterator[tuple[str, str]]:
    """Links that nothing crosses, and paths that nothing takes."""
    used = {name for group in config.workers for path in used_paths(config, group).values() for name in path}
    named = {name: (group, use) for group in config.workers for use in CARGOES for name in path_of(group, use)}
    for link in config.links:
        if link.name not in used:
            why = why_idle(config, *named[link.name]) if link.name in named else None
            yield f"links.{link.name}.name", why or "no group names it in its [workers.links]"
    for group in config.workers:
        for use in _changed(group.links, CARGOES):
            why = why_idle(config, group, use)
            if why is not None:
                yield f"workers.{group.name}.links.{use}", why


def foreign_keys(latency: LatencyConfig) -> dict[str, str]:
    """The keys that only latency models other than the one asked for have, with one that has them."""
    if not latency.params:
        return {}
    from twin.perf.build import MODELS

    owners = {name: [model for model, kind in MODELS.items() if name in kind.keys] for name in latency.params}
    return {name: models[0] for name, models in owners.items() if models and latency.model not in models}


def _router(config: Config) -> Iterator[tuple[str, str]]:
    router = config.router
    yield from _queue(config)
    yield from _taints(config)
    if router.affinity.mode == "off":
        for name in _changed(router.affinity, ("ttl_s", "sessions")):
            yield f"router.affinity.{name}", "affinity.mode is off"
    if router.mode != "thunder":
        for name in _changed(router.thunder, [entry.name for entry in keys_of(ThunderConfig)]):
            yield f"router.thunder.{name}", f"mode {router.mode} pauses nothing"
    if router.busy.engine_running is not None and router.busy.engine_queue is None:
        yield "router.busy.engine_running", "without engine_queue nobody counts what runs"
    if router.mode not in MODES:
        return  # what a plug-in reads is its own affair
    for name in _changed(router, [entry.name for entry in keys_of(RouterConfig) if entry.name not in _OTHERS]):
        if router.mode != "kv" and not (name == "tie_break" and router.mode in TIES):
            yield f"router.{name}", f"mode {router.mode} does not read it"
        elif why := _of_guesses(router, name):
            yield f"router.{name}", why
        elif name == "route_ranks" and all(group.dp == 1 for group in config.workers):
            yield f"router.{name}", "every worker has one rank (dp = 1)"
        elif name in TIERS and (why := _unnamed(config, *TIERS[name])):
            yield f"router.{name}", why
        elif name == "track_output_blocks":
            yield f"router.{name}", "simulated workers do not tell the router of tokens as they make them"
        elif name in PREFILL_TERM and not router.track_prefill_tokens:
            yield f"router.{name}", "track_prefill_tokens is off, so the cost has no prefill term"
        elif name in DECODE_TERM and not router.track_active_blocks:
            yield f"router.{name}", "track_active_blocks is off, so the cost has no decode term"
        elif name == "prefill_load_scale" and router.overlap_score_weight is not None:
            yield f"router.{name}", "overlap_score_weight, its older name, is given as well and holds"
    if router.prefill_tokens_per_s is not None and not (
        (router.mode == "kv" and router.track_prefill_tokens) or router.queue.is_on or _reads_prefill(router)
    ):
        yield "router.prefill_tokens_per_s", f"mode {router.mode} does not look at prompts that are not computed"
    if router.busy.decode_blocks_share is not None and router.mode == "kv" and not router.track_active_blocks:
        yield "router.busy.decode_blocks_share", "track_active_blocks is off, so no block is counted"


def _unnamed(config: Config, what: str, has: Callable[[KvbmConfig], bool]) -> str | None:
    """Why the router hears of no block in a kind of tier; None where it does."""
    there = [group.kvbm.events for group in config.workers if has(group.kvbm)]
    if not there:
        return f"no worker has {what} below its device ([workers.kvbm])"
    return "workers name no tier of what they have (workers.kvbm.events = dedupe)" if "per_tier" not in there else None


def _of_guesses(router: RouterConfig, name: str) -> str | None:
    """Why a key of mode kv changes nothing: what it reads is told by events, or guessed, and the other is asked for."""
    if router.use_kv_events:
        return "use_kv_events is on, so what is cached is not guessed" if name in _GUESS_KEYS else None
    if name == "index" and not router.route_ranks:
        return "use_kv_events is off, so nobody tells what is cached"
    if name in TIERS:
        return "use_kv_events is off, so nobody tells what lies below a worker's device"
    if name == "predicted_ttl_s":
        return "use_kv_events is off, so everything is guessed, for approximate_ttl_s"
    if name == "approximate_ttl_s" and router.index_policy == "lru":
        return "index_policy = lru goes by room, not by time"
    return None


_GUESS_KEYS = ("index_policy", "approximate_ttl_s")
_DEFAULT_CLASS, _DEFAULT_ROUTER = ClassConfig(), RouterConfig()
_OTHERS = ("mode", "prefill_tokens_per_s", "device_ratio", "required_taints", "preferred_taints")
TIES = ("least-loaded", "device-aware-weighted", "thunder")


def _reads_prefill(router: RouterConfig) -> bool:
    return router.busy.prefill_tokens is not None or router.busy.prefill_share is not None


def _queue(config: Config) -> Iterator[tuple[str, str]]:
    queue = config.router.queue
    if not queue.is_on:
        why = "no request ever waits: neither queue.prefill_busy_share nor queue.prefill_busy_tokens is given"
        for name in _changed(queue, [entry.name for entry in keys_of(QueueConfig)]):
            yield f"router.queue.{name}", why
        for one in config.classes:
            yield f"classes.{one.name}.name", why
        return
    if queue.order != "fcfs" and config.classes and all(one.order is not None for one in config.classes):
        yield "router.queue.order", "every class says its own order"
    for one in config.classes:
        if one.quantum_tokens != _DEFAULT_CLASS.quantum_tokens and len(config.classes) == 1:
            yield f"classes.{one.name}.quantum_tokens", "it is the only class, so nobody takes turns with it"
        if one.family != "default":
            yield f"classes.{one.name}.family", "no trace names a family, so all requests are of family default"
        if not one.waits and one.order is not None:
            yield f"classes.{one.name}.order", "its requests do not wait"


def _taints(config: Config) -> Iterator[tuple[str, str]]:
    """Taints that nobody asks for, and what nobody has; workers without GPUs where the mode does not look at it."""
    router = config.router
    liked = {text.rpartition(":")[0] for text in router.preferred_taints or ()}
    asked = liked | {*(router.required_taints or ())}
    for group in config.workers:
        if group.taints and not asked & {*group.taints}:
            yield f"workers.{group.name}.taints", "neither required_taints nor preferred_taints of the router names one"
        if group.on_cpu and router.mode in MODES and router.mode != "device-aware-weighted":
            yield f"workers.{group.name}.on_cpu", f"mode {router.mode} does not look at it"
    there = {taint for group in config.workers for taint in group.taints or ()}
    if router.preferred_taints and router.mode in MODES and router.mode != "kv":
        yield "router.preferred_taints", f"mode {router.mode} has no cost to weigh"
    elif liked - there:
        yield "router.preferred_taints", f"no group of workers has {', '.join(sorted(liked - there))}"
    if router.device_ratio != _DEFAULT_ROUTER.device_ratio and router.mode in MODES:
        if router.mode != "device-aware-weighted":
            yield "router.device_ratio", f"mode {router.mode} does not read it"
        elif len({group.on_cpu for group in config.workers}) == 1:
            yield "router.device_ratio", "all workers are of one kind; see workers.on_cpu"


def _books_matter(config: Config) -> bool:
    """Whether anything but the mode looks at what was sent and has not ended: a queue, limits on load, where a prompt
    stays."""
    busy, legs = config.router.busy, config.disaggregation
    limits = (busy.decode_blocks_share, busy.prefill_tokens, busy.prefill_share)
    stays = legs.conditional != "off" and (legs.prefill_busy_tokens is not None or legs.decode_busy_share is not None)
    return config.router.queue.is_on or any(limit is not None for limit in limits) or stays


def _replicas(config: Config) -> Iterator[tuple[str, str]]:
    table, mode = config.replicas, config.router.mode
    changed = set(_changed(table, [entry.name for entry in keys_of(ReplicasConfig)]))
    why: dict[str, str] = {}
    if mode in MODES and mode != "kv":
        if not _books_matter(config):
            why = dict.fromkeys(_SYNC_KEYS, f"mode {mode} keeps no books of what other routers have sent")
        why["kv_event_lag_s"] = f"mode {mode} does not listen to KV events"
    elif mode == "kv" and not config.router.use_kv_events:
        why["kv_event_lag_s"] = "router.use_kv_events is off"
    if table.sync_delay_s is None:
        why |= dict.fromkeys(_SYNC_KEYS[1:], "sync_delay_s is not given, so routers tell each other nothing")
    if table.count == 1:
        why = dict.fromkeys(changed, "there is one router (replicas.count = 1)")
    yield from ((f"replicas.{name}", reason) for name, reason in why.items() if name in changed)


def _disaggregation(config: Config) -> Iterator[tuple[str, str]]:
    table = config.disaggregation
    if not config.is_disaggregated:
        for name in _changed(table, [entry.name for entry in keys_of(DisaggregationConfig)]):
            yield f"disaggregation.{name}", "no group of workers has the role prefill"
        return
    if table.prefill_busy_tokens is not None and "load" not in table.conditional:
        yield "disaggregation.prefill_busy_tokens", f"conditional = {table.conditional} does not look at the load"
    if table.decode_busy_share is not None and table.conditional == "off":
        yield "disaggregation.decode_busy_share", "conditional = off keeps no prompt on a decode worker anyway"
    decoded = {name for group in config.workers if group.role == "decode" for name in group.loras or ()}
    for group in config.workers:
        lost = [name for name in group.loras or () if group.role == "prefill" and name not in decoded]
        if lost:
            yield f"workers.{group.name}.loras", f"no decode worker serves {', '.join(lost)}"
    if table.conditional == "prefill-load" and table.prefill_busy_tokens is None:
        yield "disaggregation.conditional", "without prefill_busy_tokens no prefill worker is ever busy"
    if table.conditional == "isl" and config.router.mode in MODES and config.router.mode != "kv":
        yield "disaggregation.conditional", f"mode {config.router.mode} does not know what decode workers have cached"
    if table.overlap and not config.is_destination_first:
        yield "disaggregation.overlap", "prefill-first knows the destination only when the prompt is computed"
    if table.conditional != "off" and config.is_destination_first:
        yield "disaggregation.conditional", "decode-first places every request on a decode worker before it is computed"


def _resilience(config: Config) -> Iterator[tuple[str, str]]:
    if config.faults.path is None:
        for name in _changed(config.resilience, [entry.name for entry in keys_of(ResilienceConfig)]):
            if not (config.planner.is_on and name in DRAINS):
                yield (
                    f"resilience.{name}",
                    "nothing in this run loses workers; a scenario of faults does (--faults FILE)",
                )
        return
    if config.resilience.migration_max_seq_len is not None and not config.resilience.migration_limit:
        yield "resilience.migration_max_seq_len", "migration is off; it needs resilience.migration_limit"
    if not config.resilience.retry_backoff and config.resilience.migration_limit < 2:
        yield (
            "resilience.retry_backoff",
            "nothing is sent again twice; it needs resilience.migration_limit >= 2",
        )


def _planner(config: Config) -> Iterator[tuple[str, str]]:
    table = config.planner
    if not table.is_on:
        for name in _changed(table, [entry.name for entry in keys_of(PlannerConfig)]):
            yield f"planner.{name}", "nobody plans; planner.name (--planner NAME) says who does"
        for name in _changed(config.observe, ("pass_every_s",)):
            yield f"observe.{name}", "nobody plans, and nobody else asks for it"
    if table.is_on and table.name != "schedule" and table.schedule is not None:
        yield "planner.schedule", f"planner.name is {table.name}; schedule follows it"
    if table.name != "lookahead":
        for name in _changed(table.lookahead, [entry.name for entry in keys_of(LookaheadConfig)]):
            yield f"planner.lookahead.{name}", f"planner.name is {table.name}; lookahead asks the twin"
    if table.is_on and table.load_predictor not in ("prophet", "seasonal-naive"):
        for name in _changed(table, ("period", "harmonics")):
            yield f"planner.{name}", f"planner.load_predictor = {table.load_predictor} knows no seasons"


def _observe(config: Config) -> Iterator[tuple[str, str]]:
    mode = config.router.mode
    if mode not in MODES:
        return
    if config.observe.kv_event_lag_s and not (mode == "kv" and config.router.use_kv_events):
        reason = "router.use_kv_events is off" if mode == "kv" else f"the mode is {mode}"
        yield "observe.kv_event_lag_s", f"no policy of this run listens to KV events ({reason})"
    if not (mode == "kv" and config.router.use_kv_events and config.router.index == "engine"):
        for name in _changed(config.observe, ("kv_replay_events", "kv_dump_block_s", "kv_dump_gb_per_s")):
            yield f"observe.{name}", "nobody asks workers again: router.index is not engine, or its mode not kv"
    if config.observe.report_lag_s and not config.planner.is_on:
        yield "observe.report_lag_s", f"no policy of this run reads load reports (the mode is {mode})"
