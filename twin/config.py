"""What a run is configured with: every key, its default and its limits. Defaults live here, and those of serving alone
in `config_live`, and nowhere else.

The dataclasses are the schema (`config_schema`): `config_read` fills and checks them from file, flags and --set,
`config_text` writes them, docs/config.md is made from them. Nothing here reads a file, and nothing imports a heavy
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType

from policies.frozen import frozen
from twin.config_live import LiveConfig
from twin.config_planner import PlannerConfig
from twin.config_schema import LARGEST, LARGEST_SEED, LONGEST_S
from twin.config_schema import key as _key

TRIGGERS = ("on_complete", "on_evict", "on_idle")
"""When blocks go down: once complete, when they leave the tier above, when the link has nothing else to do."""
HEAVIEST = 10**6  # the largest weight of a cost: with more, blocks and requests add up to infinity
NO_ORIGINS: Mapping[str, str] = MappingProxyType({})
NO_PARAMS: Mapping[str, float | str | bool] = MappingProxyType({})
KIND_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"trtllm": MappingProxyType({"block_size": 32}), "sglang": MappingProxyType({"block_size": 1})}
)
"""Defaults of an engine kind that differ from the table's."""


@frozen
class TraceConfig:
    """`[trace]`: which demand, and how it is read and re-timed."""

    path: Path | None = _key(None, "trace to replay; in a file, relative to that file", absent="TRACE must be given")
    format: str = _key("auto", "reader to use; auto looks at the content and says what it found")
    limit: int | None = _key(None, "replay only the first rows", low=1, high=2**62, absent="all rows")
    start_s: float | None = _key(None, "leave out arrivals before this", low=0, absent="from the first arrival")
    end_s: float | None = _key(None, "leave out arrivals from here on", above=0, absent="to the last arrival")
    rate_rps: float | None = _key(None, "rescale arrivals to this mean rate", above=0, absent="the recorded rate")
    concurrency: int | None = _key(
        None, "closed loop: requests (or sessions) in flight", low=1, high=LARGEST, absent="open loop"
    )
    warmup: int | None = _key(
        None,
        "first rows that are played and left out of latencies, rates and verdicts",
        low=1,
        high=2**62,
        absent="all rows are measured",
    )
    speedup: float = _key(1.0, "divide every arrival time by this", above=0)
    arrivals: str = _key("recorded", "where arrival times come from", choices=("recorded", "poisson", "closed"))
    on_bad_row: str = _key("error", "stop at a bad row, or leave it out and count it", choices=("error", "skip"))
    time_unit: str | None = _key(
        None, "unit of the arrival column", choices=("s", "ms", "us", "ns"), absent="a property of the format"
    )
    hash_block_tokens: int | None = _key(
        None, "tokens that one hash id stands for", low=1, high=LARGEST, absent="a property of the format"
    )
    default_osl: int | None = _key(
        None, "output length of rows that have none", low=1, high=LARGEST, absent="such a row is a bad row"
    )
    sort: bool = _key(False, "sort rows whose arrivals go back in time")
    keep_zero_output: bool = _key(False, "keep rows that made no output (failed requests in some formats)")


@frozen
class EngineConfig:
    """`[workers.engine]`: sizes and switches of one engine."""

    kind: str = _key("vllm", "whose scheduler", choices=("vllm", "sglang", "trtllm"))
    block_size: int = _key(16, "tokens in a KV block (if not given, trtllm 32, sglang 1)", low=1, high=65_536)
    kv_blocks: int | None = _key(
        None,
        "KV blocks of one worker; with dp > 1 of each rank",
        low=1,
        high=LARGEST,
        absent="what fits into memory beside the weights",
    )
    gpu_memory_utilization: float = _key(0.9, "share of device memory that the engine may fill", above=0, high=1)
    max_num_seqs: int = _key(256, "running requests at most", low=1, high=LARGEST)
    max_num_batched_tokens: int = _key(8192, "tokens in a step at most", low=1, high=LARGEST)
    max_model_len: int | None = _key(
        None, "prompt and output tokens of a request at most", low=1, high=LARGEST, absent="what the pool can hold"
    )
    preemption: str = _key("lifo", "whom a shortage of blocks sends back to waiting", choices=("lifo", "fifo"))
    prefix_caching: bool = _key(True, "reuse the blocks of a common prefix")
    chunked_prefill: bool = _key(True, "a prompt may be computed over several steps")
    exclusive_prefill: bool = _key(False, "prompts and decodes never share a step; prompts first")
    capacity_policy: str = _key(
        "guaranteed_no_evict",
        "trtllm: admit who can surely finish, or who fits now",
        choices=("guaranteed_no_evict", "max_utilization"),
    )
    schedule_policy: str = _key(
        "fifo", "sglang: who waits goes in by arrival, or longest cached prefix first", choices=("fifo", "lpm")
    )
    chunked_prefill_size: int = _key(
        8192, "sglang: prompt tokens in a step at most; with dp > 1 of all ranks together", low=1, high=LARGEST
    )
    max_prefill_tokens: int = _key(16_384, "sglang: prompt tokens admitted in a step at most", low=1, high=LARGEST)
    schedule_conservativeness: float = _key(
        1.0, "sglang: weight of the outputs that running requests still make when others ask to enter", above=0
    )
    clip_max_new_tokens: int = _key(
        4096, "sglang: outputs of one request that count for admission", low=1, high=LARGEST
    )
    prefill_decode_interval: int = _key(
        0, "sglang: decode steps after a prefill step that admit nobody", low=0, high=LARGEST
    )
    recv_interval: int = _key(
        1, "sglang: decode steps between looks at who has come (scheduler_recv_interval)", low=1, high=LARGEST
    )
    batch_wait_iters: int = _key(
        0,
        "trtllm: steps that prompts wait at most for others while requests decode (batch_wait_timeout_iters); 0 is off",
        low=0,
        high=LARGEST,
    )
    batch_wait_ratio: float = _key(
        0.0,
        "trtllm: share of max_num_batched_tokens that ends their wait (batch_wait_max_tokens_ratio); 0 is off",
        low=0,
        high=1,
    )
    dp_balance_wait_iters: int = _key(
        0,
        "trtllm with dp > 1: prompts start when every rank has one, or in every so-many-th step (attention_dp_config "
        "timeout_iters); 0 is off",
        low=0,
        high=LARGEST,
    )
    prefill_schedule_interval: int = _key(
        1, "with dp > 1, steps between chances for new prompts of a rank that decodes", low=1, high=LARGEST
    )
    nextn: int = _key(0, "draft tokens that a decode step verifies (speculative decoding); 0 is off", low=0, high=5)
    accept_rates: str = _key("0.85,0.3", "chance that each draft token holds if those before it did; 0 beyond")
    cuda_graph_sizes: str | None = _key(
        None, "batch sizes with a captured graph: 1,2,4,8-256/8; decodes pay for the next", absent="no padding"
    )
    eager_factor: float = _key(2.0, "decode step above the largest captured size, against a captured one", low=1)
    max_loras: int | None = _key(
        None,
        "vllm: adapters in a batch at most; requests with others wait, those behind them may pass",
        low=1,
        high=LARGEST,
        absent="all that loras lists",
    )
    host_blocks: int | None = _key(
        None,
        "blocks of a host-memory tier below the pool (vllm, sglang); with dp > 1 of each rank",
        low=1,
        high=LARGEST,
        absent="no host tier",
    )
    host_offload: str = _key(
        "on_evict", "when blocks go down: as they are evicted, or as soon as complete", choices=("on_evict", "on_store")
    )
    host_load_gb_per_s: float = _key(32.0, "how fast blocks come back up, GB = 1e9 bytes", above=0)
    host_load_overlap: bool = _key(
        True, "sglang: prompts are computed layer by layer behind what comes up; if false, after it"
    )
    host_block_bytes: int | None = _key(
        None, "bytes of one block", low=1, high=2**62, absent="what the model and its KV format hold"
    )


@frozen
class LatencyConfig:
    """`[workers.latency]`: the step-latency model, and in `params` that model's own keys."""

    model: str = _key(
        "roofline", "what a step costs", choices=("roofline", "fixed", "linear", "polynomial", "table", "silicon")
    )
    params: Mapping[str, float | str | bool] = field(default_factory=lambda: NO_PARAMS, hash=False)


@frozen
class StartupConfig:
    """`[workers.startup]`: how a worker of the group comes up; the first ones are up when the run begins."""

    weights_from: str | None = _key(
        None, "where the weights are read from", choices=("disk", "object", "peer"), absent="workers start at once"
    )
    bandwidth_gb_per_s: float | None = _key(
        None, "what one worker reads weights at", above=0, absent="10 (disk), 5 (object store), its links (peer)"
    )
    boot_s: float = _key(10.0, "from the order to the first byte of weights", low=0, high=LONGEST_S)
    warmup_s: float | None = _key(
        None,
        "from the last byte to the first request",
        low=0,
        high=LONGEST_S,
        absent="60 (vllm), 30 (sglang), 45 (trtllm)",
    )


DISK_GB_PER_S = 10.0
"""Local NVMe, as the KV tiers have it."""
OBJECT_STORE_GB_PER_S = 5.0
"""Our estimate of what one worker gets."""
WARMUP_S: Mapping[str, float] = MappingProxyType({"vllm": 60.0, "sglang": 30.0, "trtllm": 45.0})
"""Compilation, graph capture and profiling after the weights are there: our estimates, not measured."""


@frozen
class PathConfig:
    """`[workers.links]`: which links what the group sends and gets crosses; names with + between them."""

    kv: str = _key("nic", "links between its GPUs and other workers, in order, like nic+spine")
    weights: str | None = _key(
        None,
        "links that weights cross when a worker starts, from the GPU outwards, like pcie+storage",
        absent="no links: the time is by the formula of cold starts",
    )
    host: str | None = _key(
        None, "links between its GPUs and host memory, like pcie", absent="a lane of its own, host_load_gb_per_s"
    )
    store: str | None = _key(
        None,
        "links between its host memory and KV tiers that all workers share, like nic",
        absent="the link of the tier alone",
    )


@frozen
class KvbmConfig:
    """`[workers.kvbm]`: tiers for KV blocks below the device of each worker, and the policies that move them."""

    cpu_cache_gb: float | None = _key(None, "host memory (G2) of one worker, GB = 1e9 bytes", above=0, absent="off")
    cpu_cache_tokens: int | None = _key(None, "the same in tokens", low=1, high=2**62, absent="by cpu_cache_gb")
    cpu_shared_by: int = _key(
        1, "workers of the group, in their order, that have one such tier: those of a node", low=1, high=LARGEST
    )
    disk_cache_gb: float | None = _key(None, "disk (G3) of one worker, or of all if shared", above=0, absent="off")
    disk_cache_tokens: int | None = _key(None, "the same in tokens", low=1, high=2**62, absent="by disk_cache_gb")
    disk_shared: bool = _key(False, "all workers have the disk tier in common")
    remote: bool = _key(False, "a remote store (G4) that all workers have in common")
    remote_cache_gb: float | None = _key(None, "size of the remote store", above=0, absent="never full")
    block_bytes: int | None = _key(
        None, "bytes of one block", low=1, high=2**62, absent="what the model and its KV format hold"
    )
    cpu_gb_per_s: float = _key(32.0, "between device and host, each way, one transfer after another", above=0)
    cpu_latency_s: float = _key(1e-5, "before the first byte of a transfer", low=0)
    disk_gb_per_s: float | None = _key(
        None, "disk, both ways together, shared fairly", above=0, absent="10; 80 if disk_shared"
    )
    disk_latency_s: float = _key(1e-4, "before the first byte of a transfer", low=0)
    remote_gb_per_s: float = _key(5.0, "remote store, both ways together, shared fairly by all workers", above=0)
    remote_latency_s: float = _key(5e-3, "before the first byte of a transfer", low=0)
    cpu_offload: str = _key("presence", "which blocks go down to host memory: filters, joined by +")
    disk_offload: str = _key("presence_lfu", "which blocks go down to disk")
    remote_offload: str = _key("presence_lfu", "which blocks go down to the remote store")
    cpu_trigger: str = _key("on_complete", "when blocks go down to host memory", choices=TRIGGERS)
    disk_trigger: str = _key("on_complete", "when blocks go down to disk", choices=TRIGGERS)
    remote_trigger: str = _key("on_complete", "when blocks go down to the remote store", choices=TRIGGERS)
    cpu_eviction: str = _key("lineage", "which blocks leave host memory first: lru, lineage, multi_lru, fifo")
    disk_eviction: str = _key("lineage", "which blocks leave the disk first")
    remote_eviction: str = _key("lineage", "which blocks leave the remote store first")
    when_full: str = _key("evict", "what a block does that comes to a full tier", choices=("evict", "drop"))
    prefetch: bool = _key(
        False, "while a request waits in the router's queue, fetch its blocks from disk or remote into host memory"
    )
    events: str = _key(
        "per_tier",
        "what the router is told: each tier by name, or whether a block is in any tier of the worker's own",
        choices=("per_tier", "dedupe"),
    )
    peers: bool = _key(False, "read what other workers have in host memory, and let them read this one's")
    peer_gb_per_s: float = _key(50.0, "of each worker to others, each way, shared fairly", above=0)
    peer_latency_s: float = _key(1e-5, "before the first byte of a read from another worker", low=0)
    registry_lookup_s: float = _key(
        0.0,
        "asking what peers and tiers that all share have; 0: it is known at once; more than 0.02 is no answer",
        low=0,
    )
    registry_lease_s: float = _key(60.0, "what peers have is on record so long after they were last heard of", above=0)
    registry_negative_s: float = _key(1.0, "a worker knows so long that nobody has a block", low=0)
    disk_path: str = _key(
        "direct",
        "blocks come up in one hop, through host memory all at once, or block by block",
        choices=("direct", "bounce", "piped"),
    )
    load_layers: str = _key(
        "all",
        "a prompt is computed when all layers of what comes up are there, or each as soon as it is",
        choices=("all", "each"),
    )
    onboard: str = _key(
        "always", "load what lies below; or if it is faster than computing", choices=("always", "faster", "deadline")
    )
    onboard_deadline_s: float | None = _key(None, "with onboard = deadline: latest arrival", above=0, absent="none")
    min_lfu_count: int = _key(8, "presence_lfu passes blocks that were used more often", low=0, high=15)
    tenant_quota_tokens: int | None = _key(
        None, "tenant_quota: most that one tenant may have in a tier", low=1, high=2**62, absent="none"
    )
    decay_s: float = _key(60.0, "frequency_filter: time in which a frequency falls by one", above=0)
    max_batch_blocks: int = _key(64, "blocks that move down together at most", low=1, high=LARGEST)
    min_batch_blocks: int = _key(8, "blocks that an idle link waits for", low=1, high=LARGEST)
    flush_s: float = _key(0.010, "longest wait of a block for others", low=0)
    batches_at_once: int = _key(1, "batches under way down to one tier", low=1, high=LARGEST)

    @property
    def has_tiers(self) -> bool:
        """Whether there is any tier below the device."""
        return self.has_cpu or self.has_disk or self.remote

    @property
    def goes_deeper(self) -> bool:
        """Whether there is any tier below host memory."""
        return self.has_disk or self.remote

    @property
    def reads_outside(self) -> bool:
        """Whether anything outside a worker is of use to it: a tier that all share, or what peers have."""
        return self.remote or (self.disk_shared and self.has_disk) or (self.peers and self.has_cpu)

    @property
    def asks_registry(self) -> bool:
        """Whether that is known only by asking."""
        return self.reads_outside and self.registry_lookup_s > 0

    @property
    def has_cpu(self) -> bool:
        return self.cpu_cache_gb is not None or self.cpu_cache_tokens is not None

    @property
    def has_disk(self) -> bool:
        return self.disk_cache_gb is not None or self.disk_cache_tokens is not None


SHARED_CACHE_MULTIPLIER = 0.5
"""Credit of a block in a shared tier, where there is one."""
SHARED_DISK_GB_PER_S = 80.0
"""Storage that a whole cluster shares."""


@frozen
class LinkConfig:
    """`[[links]]`: one kind of link of the run, and how many there are of it."""

    name: str = _key("nic", "name of the link; its copies are NAME:GROUP, NAME:WORKER, NAME:WORKER:RANK")
    kind: str = _key(
        "nic",
        "what it is; says what the keys left out are",
        choices=("nvlink", "pcie", "nic", "storage", "disk"),
    )
    per: str | None = _key(
        None,
        "what has a copy of its own",
        choices=("rank", "worker", "group", "run"),
        absent="rank; run for storage, worker for disk",
    )
    bandwidth_gb_per_s: float | None = _key(
        None,
        "what one copy carries, each way if duplex",
        above=0,
        absent="of the GPU (`twin hardware`); 5 for storage, 10 for disk",
    )
    latency_s: float | None = _key(
        None, "before the first byte of each transfer", low=0, high=LONGEST_S, absent="0; 0.005 for storage"
    )
    desc_cost_s: float = _key(0.0, "of each separate piece of memory that a transfer moves", low=0, high=LONGEST_S)
    discipline: str | None = _key(
        None, "who goes first", choices=("fair", "fifo", "private"), absent="fair; fifo for pcie"
    )
    duplex: bool | None = _key(None, "both ways at full speed", absent="true; false for storage and disk")


LINK_KINDS: Mapping[str, LinkConfig] = MappingProxyType(
    {
        "nvlink": LinkConfig(name="nvlink", kind="nvlink", per="rank", latency_s=0.0, discipline="fair", duplex=True),
        "pcie": LinkConfig(name="pcie", kind="pcie", per="rank", latency_s=0.0, discipline="fifo", duplex=True),
        "nic": LinkConfig(name="nic", kind="nic", per="rank", latency_s=0.0, discipline="fair", duplex=True),
        "storage": LinkConfig(
            name="storage",
            kind="storage",
            per="run",
            bandwidth_gb_per_s=OBJECT_STORE_GB_PER_S,
            latency_s=0.005,
            discipline="fair",
            duplex=False,
        ),
        "disk": LinkConfig(
            name="disk",
            kind="disk",
            per="worker",
            bandwidth_gb_per_s=DISK_GB_PER_S,
            latency_s=0.0,
            discipline="fair",
            duplex=False,
        ),
    }
)
"""What a link of each kind is where [[links]] leaves it open; these can be named without a table of their own."""
STORES = ("storage", "disk")
"""Kinds of links that have weights at their far end."""


@frozen
class WorkerGroup:
    """`[[workers]]`: one group of equal workers."""

    name: str = _key("pool", "name of the group; its workers are NAME-0, NAME-1, ...")
    count: int = _key(4, "workers in the group", low=1, high=100_000)
    role: str = _key("mixed", "what its workers do", choices=("mixed", "prefill", "decode"))
    model: str = _key("llama-3.1-70b", "model served (`twin models`)")
    gpu: str = _key("h100_sxm", "device (`twin hardware`)")
    tp: int = _key(4, "tensor parallel degree: GPUs of one worker", low=1, high=1024)
    pp: int = _key(1, "pipeline parallel degree", low=1, high=1024)
    dp: int = _key(1, "attention data parallel degree: ranks of one worker", low=1, high=1024)
    ep: int = _key(1, "expert parallel degree", low=1, high=1024)
    weights: str = _key("fp8", "number format of the weights")
    kv: str = _key("bf16", "number format of the KV cache")
    startup_s: float | None = _key(
        None,
        "how long a worker that is added later takes to start",
        low=0,
        high=LONGEST_S,
        absent="by [workers.startup]",
    )
    loras: tuple[str, ...] | None = _key(
        None, "adapters that its workers serve; [] for none", absent="any that is asked for, at no cost in memory"
    )
    lora_rank: int = _key(
        16, "largest rank of adapters; as many as can be in a batch take memory from the pool", low=1, high=1024
    )
    taints: tuple[str, ...] | None = _key(
        None, "what its workers are, for router.required_taints and preferred_taints, like zone=a", absent="none"
    )
    on_cpu: bool = _key(False, "its workers run without GPUs, for router.mode device-aware-weighted")
    path_s: float = _key(
        0.0, "from a dispatch until its engine has the request, and for its tokens back: HTTP", low=0, high=LONGEST_S
    )
    usd_per_hour: float | None = _key(None, "price of one GPU for an hour", low=0, absent="no cost is reported")
    engine: EngineConfig = field(default=EngineConfig())
    latency: LatencyConfig = field(default=LatencyConfig())
    startup: StartupConfig = field(default=StartupConfig())
    kvbm: KvbmConfig = field(default=KvbmConfig())
    links: PathConfig = field(default=PathConfig())

    @property
    def gpus(self) -> int:
        """Devices of one worker."""
        return self.tp * self.pp * self.dp


@frozen
class QueueConfig:
    """`[router.queue]`: when requests wait in the router, instead of behind the prompts that every worker has."""

    prefill_busy_share: float | None = _key(
        None,
        "a worker is busy with more prompt tokens dispatched and not computed than this share of a step's budget",
        low=0,
        high=1e6,
        absent="not by share; without either limit no request waits",
    )
    prefill_busy_tokens: int | None = _key(
        None, "a worker is busy with more such tokens than this", low=0, high=LARGEST, absent="not by tokens"
    )
    busy_worker_share: float = _key(1.0, "requests wait once this share of their workers is busy", above=0, high=1)
    order: str = _key(
        "fcfs",
        "who goes first: first come, last come, or most weight per token left to compute",
        choices=("fcfs", "lcfs", "wspt"),
    )
    requests_per_worker: int | None = _key(
        None, "as many wait at most, times the workers they could go to", low=0, high=LARGEST, absent="no limit"
    )
    tokens_per_worker: int | None = _key(
        None,
        "the next is refused once prompts of so many tokens wait, times the workers",
        low=0,
        absent="no limit",
        high=LARGEST,
    )
    max_wait_s: float | None = _key(
        None, "who has waited longer is refused", above=0, high=LONGEST_S, absent="no limit"
    )

    @property
    def is_on(self) -> bool:
        """Whether any request can ever wait."""
        return self.prefill_busy_share is not None or self.prefill_busy_tokens is not None


@frozen
class ClassConfig:
    """`[[classes]]`: one class of requests in the router's queue; classes take turns by what they are owed."""

    name: str = _key("all", "name of the class")
    family: str = _key("default", "requests that name no family are of family default")
    min_tokens: int = _key(0, "for prompts with at least so many tokens left to compute", low=0, high=LARGEST)
    quantum_tokens: int = _key(8192, "tokens of prompt that it is given in each round", low=1, high=LARGEST)
    order: str | None = _key(
        None, "who goes first within it", choices=("fcfs", "lcfs", "wspt"), absent="router.queue.order"
    )
    waits: bool = _key(True, "false: its requests go to busy workers at once")


@frozen
class BusyConfig:
    """`[router.busy]`: when a worker is overloaded: it gets nothing; if all are, requests are refused (shed)."""

    decode_blocks_share: float | None = _key(
        None, "with more of its KV blocks active than this share", low=0, high=1e6, absent="never"
    )
    prefill_tokens: int | None = _key(
        None, "with more prompt tokens dispatched and not computed than this", low=0, high=LARGEST, absent="never"
    )
    prefill_share: float | None = _key(
        None, "with more such tokens than this share of a step's budget", low=0, high=1e6, absent="never"
    )
    engine_queue: int | None = _key(
        None, "with so many requests there beside those that run", low=2, high=LARGEST, absent="never"
    )
    engine_running: int | None = _key(
        None, "how many run, for engine_queue", low=1, high=LARGEST, absent="max_num_seqs of the worker"
    )

    @property
    def is_on(self) -> bool:
        """Whether any worker can ever be overloaded."""
        return any(
            limit is not None
            for limit in (self.decode_blocks_share, self.prefill_tokens, self.prefill_share, self.engine_queue)
        )


@frozen
class AffinityConfig:
    """`[router.affinity]`: requests of a session go where its first one went."""

    mode: str = _key(
        "off",
        "hard: to that worker or, while it is overloaded, to none; soft: to that one if it may be",
        choices=("off", "hard", "soft"),
    )
    ttl_s: float = _key(300.0, "a session is forgotten so long after its last request ended", low=1, high=31_536_000)
    sessions: int = _key(65_536, "sessions remembered at most", low=1, high=LARGEST)


@frozen
class ThunderConfig:
    """`[router.thunder]`: when mode thunder pauses programs (sessions); shares are of a worker's KV blocks."""

    pause_at: float = _key(0.95, "programs of a worker with this share in use are paused", low=0, high=1)
    pause_down_to: float = _key(0.80, "until it is down to this share", low=0, high=1)
    demote_at: float = _key(0.80, "a request that has to wait for a worker with this share in use", low=0, high=1)
    demote_s: float = _key(2.0, "counts as come so much later", low=0, high=LONGEST_S)
    hysteresis: float = _key(0.10, "what is paused goes on where it leaves so much less than pause_at", low=0, high=1)
    tick_s: float = _key(5.0, "how often programs are paused and resumed", low=0.001, high=LONGEST_S)
    force_resume_s: float = _key(1800.0, "who has waited so long goes on anywhere", low=0, high=LONGEST_S)


@frozen
class RouterConfig:
    """`[router]`: the mode, and the parameters of the `kv` cost."""

    mode: str = _key(
        "round-robin",
        "which policy picks the worker",
        choices=(
            "round-robin",
            "random",
            "least-loaded",
            "power-of-two",
            "device-aware-weighted",
            "direct",
            "kv",
            "thunder",
        ),
        plugins="dynatwin.routers",
    )
    tie_break: str = _key("seeded", "who gets it at equal cost", choices=("seeded", "lowest_id", "least_recent"))
    overlap_score_credit: float = _key(
        1.0, "blocks of prefill saved by a cached block; above 1 over-credits", low=0, high=HEAVIEST
    )
    overlap_score_credit_decay: float = _key(
        0.0, "how fast prefill load of a worker lowers that credit", low=0, high=HEAVIEST
    )
    prefill_load_scale: float = _key(1.0, "weight of prefill against decode", low=0, high=HEAVIEST)
    overlap_score_weight: float | None = _key(
        None,
        "older name of prefill_load_scale; 0 also takes the credit away",
        low=0,
        high=HEAVIEST,
        absent="prefill_load_scale holds",
    )
    host_cache_hit_weight: float = _key(0.75, "credit of a block in host memory", low=0, high=1)
    disk_cache_hit_weight: float = _key(0.25, "credit of a block on disk", low=0, high=1)
    shared_cache_multiplier: float | None = _key(
        None, "credit of a block in a shared tier", low=0, high=1, absent="0.5 where there is a shared tier"
    )
    peer_cache_hit_weight: float | None = _key(
        None,
        "credit of a block in host memory of another worker, which this one can read (kvbm.peers)",
        above=0,
        high=1,
        absent="it counts for its owner alone",
    )
    decode_active_request_weight: float = _key(
        0.0, "cost of each open request on a worker, in blocks", low=0, high=HEAVIEST
    )
    router_temperature: float = _key(0.0, "0 takes the cheapest; above, softmax over the costs", low=0, high=HEAVIEST)
    track_active_blocks: bool = _key(True, "count the blocks of open requests")
    track_prefill_tokens: bool = _key(True, "count prompt tokens that are not computed yet")
    track_output_blocks: bool = _key(False, "count the blocks of generated tokens too")
    assume_kv_reuse: bool = _key(True, "equal prompts on one worker share their blocks")
    use_kv_events: bool = _key(
        True, "learn what is cached from the workers' events; false: guess it from what they were sent"
    )
    index_policy: str = _key(
        "ttl",
        "such a guess holds for approximate_ttl_s, or while the worker has room for it",
        choices=("ttl", "lru"),
    )
    approximate_ttl_s: float = _key(
        120.0, "how long a prompt that was sent to a worker counts as cached there", above=0, high=LONGEST_S
    )
    predicted_ttl_s: float | None = _key(
        None,
        "beside events: how long a prompt counts as cached where it was just sent, until events tell",
        above=0,
        high=LONGEST_S,
        absent="only what events tell counts",
    )
    index: str = _key(
        "simulated",
        "whose block events tell what is cached: the simulator's own, or such as engines send (numbered, in ids of "
        "their own, told again when lost)",
        choices=("simulated", "engine"),
    )
    route_ranks: bool = _key(
        False, "choose among the data-parallel ranks of a worker too; false: each worker takes them in turn"
    )
    decode_basis: str = _key("potential", "blocks after adding the request, or before", choices=("potential", "active"))
    prefill_tokens_per_s: float | None = _key(
        None,
        "how fast a worker computes prompts: the oldest one there weighs less the longer it is computed",
        above=0,
        absent="a prompt weighs in full until its first token",
    )
    device_ratio: int = _key(8, "requests on a worker with GPUs for one on a worker without", low=1, high=LARGEST)
    required_taints: tuple[str, ...] | None = _key(
        None, "requests go only to workers that have all of these taints", absent="none"
    )
    preferred_taints: tuple[str, ...] | None = _key(
        None, 'taints that make a worker cheaper, or dearer below 0, as in ["zone=a:1", "old:-0.5"]', absent="none"
    )
    queue: QueueConfig = field(default=QueueConfig())
    busy: BusyConfig = field(default=BusyConfig())
    affinity: AffinityConfig = field(default=AffinityConfig())
    thunder: ThunderConfig = field(default=ThunderConfig())


@frozen
class DisaggregationConfig:
    """`[disaggregation]`: how prompts go from prefill workers to decode workers, where there are such."""

    order: str | None = _key(
        None,
        "compute first and then find a decode worker, or take room there first",
        choices=("prefill-first", "decode-first"),
        absent="as the engine does: vllm and trtllm prefill-first, sglang decode-first",
    )
    first_token: str = _key(
        "decode", "whose token the client sees first (TensorRT-LLM: prefill)", choices=("decode", "prefill")
    )
    conditional: str = _key(
        "off",
        "when a prompt stays on its decode worker: little is left to compute, prefill workers are busy, or either",
        choices=("off", "isl", "prefill-load", "isl-or-load"),
    )
    prefill_busy_tokens: int | None = _key(
        None, "a prefill worker with more open prompt tokens is busy", low=0, high=LARGEST, absent="never busy"
    )
    decode_busy_share: float | None = _key(
        None,
        "a decode worker with more of its blocks promised to prompts keeps none",
        low=0,
        high=1,
        absent="never busy",
    )
    transfer: str = _key(
        "full", "send the whole prompt's KV, or only the blocks missing at the destination", choices=("full", "missing")
    )
    kv_bytes_per_token: int | None = _key(
        None, "KV bytes of one token", low=0, high=LARGEST, absent="what the model and its KV format hold"
    )
    bandwidth_gb_per_s: float | None = _key(
        None, "a link of its own for every transfer, GB = 1e9 bytes", above=0, absent="the workers' NICs, shared"
    )
    setup_s: float = _key(0.0, "fixed cost of a transfer", low=0, high=LONGEST_S)
    overlap: bool = _key(False, "decode-first: send KV layer by layer while the prompt is computed")
    lease_s: float = _key(
        60.0, "how long a prefill worker keeps blocks that nobody fetches; live too", above=0, high=LONGEST_S
    )


@frozen
class ObserveConfig:
    """`[observe]`: how late the router learns things."""

    report_lag_s: float = _key(
        0.0, "delay of the workers' load reports, and of what a planner is told", low=0, high=LONGEST_S
    )
    pass_every_s: float = _key(
        1.0, "between samples of each engine's steps that a planner is told", low=0.001, high=LONGEST_S
    )
    kv_event_lag_s: float = _key(0.0, "delay of the workers' KV events", low=0, high=LONGEST_S)
    kv_replay_events: int = _key(
        10_000, "KV events that a rank can send again; of older ones it sends all that it holds", low=1, high=LARGEST
    )
    kv_dump_block_s: float = _key(20e-6, "time that each block adds to such an answer", low=0, high=LONGEST_S)
    kv_dump_gb_per_s: float = _key(1.0, "how fast such an answer comes, GB = 1e9 bytes, 32 bytes a block", above=0)


@frozen
class ReplicasConfig:
    """`[replicas]`: several routers in front of the workers, each with books and an index of its own
    (docs/replicas.md)."""

    count: int = _key(1, "routers", low=1, high=1000)
    spread: str = _key(
        "round-robin",
        "which router a request arrives at: in turn, drawn, or the one of its session",
        choices=("round-robin", "random", "session"),
    )
    sync_delay_s: float | None = _key(
        None,
        "until a router hears what another one has sent out",
        low=0,
        high=LONGEST_S,
        absent="routers tell each other nothing, and each sees its own load only",
    )
    sync_jitter_s: float = _key(0.0, "further delay of such news, drawn evenly up to this", low=0, high=LONGEST_S)
    sync_loss: float = _key(0.0, "share of such news that is lost", low=0, high=1)
    sync_batch_s: float = _key(0.001, "how long news wait to go out together", low=0, high=LONGEST_S)
    kv_event_lag_s: float = _key(0.0, "KV events reach router i later by i times this", low=0, high=LONGEST_S)

    @property
    def syncs(self) -> bool:
        """Whether routers tell each other of their bookings."""
        return self.count > 1 and self.sync_delay_s is not None


@frozen
class ResilienceConfig:
    """`[resilience]`: what becomes of requests whose worker is lost, and how long it takes to know."""

    migration_limit: int = _key(0, "how often one request may be sent again; 0: it fails", low=0, high=1000)
    migration_max_seq_len: int | None = _key(
        None, "no migration of longer requests: prompt and delivered tokens", low=1, high=LARGEST, absent="no limit"
    )
    retry_backoff: bool = _key(
        True, "a request that is sent again after a try without any answer waits: 50 ms, 200 ms, then 1 s"
    )
    detection_delay_s: float = _key(0.0, "until a broken connection is known", low=0, high=LONGEST_S)
    canary_idle_s: float = _key(
        10.0, "silence of a worker before it gets a canary; 0: none are sent", low=0, high=LONGEST_S
    )
    canary_timeout_s: float = _key(3.0, "until a worker that does not answer gets no new work", above=0, high=LONGEST_S)
    breaker_failures: int = _key(5, "failures in a row that fence a worker; 0: no breakers", low=0, high=LARGEST)
    breaker_share: float = _key(0.5, "share of failures that fences it too", above=0, high=1)
    breaker_requests: int = _key(20, "of at least so many answers", low=1, high=LARGEST)
    breaker_window_s: float = _key(30.0, "in the last so many seconds", above=0, high=LONGEST_S)
    breaker_open_s: float = _key(10.0, "until one request may try it again", above=0, high=LONGEST_S)
    lease_ttl_s: float = _key(
        10.0, "until a worker without a heart-beat is known to be gone (detect = lease)", low=0, high=LONGEST_S
    )
    grace_s: float = _key(
        5.0, "how long a worker that leaves still serves routers that have not heard; live too", low=0, high=LONGEST_S
    )
    drain_timeout_s: float = _key(
        900.0, "how long it may then take to finish what it has; live too", low=0, high=LONGEST_S
    )
    response_inactivity_s: float = _key(
        60.0,
        "until a worker that answers nothing is taken for lost; live: a leg without new tokens goes elsewhere",
        above=0,
        high=LONGEST_S,
    )


@frozen
class FaultsConfig:
    """`[faults]`: a scenario of what goes wrong (docs/faults.md)."""

    path: Path | None = _key(None, "scenario file; in a file, relative to that file", absent="nothing goes wrong")


@frozen
class Config:
    """A whole run. `origins` says for every dotted key where its value came from; it is no part of equality.

    `no_effect` lists the options that were given, differ from their defaults and change nothing; it is empty unless
    `allow_no_effect` was set.
    """

    seed: int = _key(0, "every random draw follows from it", low=0, high=LARGEST_SEED)
    compat: str = _key("none", "behave like a reference simulator where ours differs", choices=("none", "dynamo-1.6.1"))
    allow_no_effect: bool = _key(False, "options without effect are listed in the report instead of refused")
    sla: str | None = _key(None, "limits to meet, e.g. ttft=200ms,itl=50ms@p95", absent="no verdict")
    trace: TraceConfig = field(default=TraceConfig())
    workers: tuple[WorkerGroup, ...] = field(default=(WorkerGroup(),))
    links: tuple[LinkConfig, ...] = field(default=())
    router: RouterConfig = field(default=RouterConfig())
    classes: tuple[ClassConfig, ...] = field(default=())
    replicas: ReplicasConfig = field(default=ReplicasConfig())
    observe: ObserveConfig = field(default=ObserveConfig())
    disaggregation: DisaggregationConfig = field(default=DisaggregationConfig())
    resilience: ResilienceConfig = field(default=ResilienceConfig())
    faults: FaultsConfig = field(default=FaultsConfig())
    planner: PlannerConfig = field(default=PlannerConfig())
    live: LiveConfig = field(default=LiveConfig())
    no_effect: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=lambda: NO_ORIGINS, compare=False, repr=False)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by workers of their own."""
        return any(group.role == "prefill" for group in self.workers)

    @property
    def is_destination_first(self) -> bool:
        """Whether room is taken on the decode worker before the prompt is computed."""
        order = self.disaggregation.order
        if order is not None:
            return order == "decode-first"
        return {group.engine.kind for group in self.workers} == {"sglang"}
