"""KV tiers of a live worker: from `[workers.kvbm]` to what its engine is started with, or a refusal by name.

No engine lets anybody move one of its blocks by hand, so what our policies decide about tiers is decided inside the
engine: vLLM loads them at its start (`in_vllm`). What it cannot do is never left out in silence. Keys for stores are
not among the arguments: the engine's process has them from its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from policies.kvbm.build import EVICTIONS
from twin.config import KvbmConfig, WorkerGroup

BYTES_PER_GB: Final = 10**9
MODULE: Final = "dynatwin_vllm"
MODULE_FOLDER: Final = Path(__file__).parent / "in_vllm" / "path"
"""What the engine's process finds our specs by: a folder with this one module, and nothing else of our environment."""

OF_THE_HOST: Final = frozenset(
    {
        "block_bytes", "cpu_gb_per_s", "cpu_latency_s", "disk_gb_per_s", "disk_latency_s", "disk_path",
        "remote_gb_per_s", "remote_latency_s", "peer_gb_per_s", "peer_latency_s", "registry_lookup_s",
        "registry_lease_s", "registry_negative_s",
    }
)  # fmt: skip
"""Keys that describe what is simulated: real links and stores are as they are."""

_ONLY: Final[Mapping[str, tuple[object, str]]] = {
    "cpu_shared_by": (1, "each vLLM has host memory of its own"),
    "disk_shared": (False, "no worker can keep the size of a folder that others write to; use remote"),
    "remote_cache_gb": (None, "nobody bounds an object store from here; give its bucket a lifecycle rule"),
    "remote_eviction": ("lineage", "objects are not evicted; give the bucket a lifecycle rule"),
    "cpu_trigger": ("on_complete", "vLLM copies blocks down when they are complete, and at no other time"),
    "disk_trigger": ("on_complete", "vLLM copies blocks on when they have come to host memory"),
    "remote_trigger": ("on_complete", "vLLM copies blocks on when they have come to host memory"),
    "prefetch": (False, "vLLM brings blocks up for requests that it has"),
    "events": ("per_tier", "vLLM tells of each tier by itself"),
    "peers": (False, "workers do not read each other's host memory; use remote"),
    "load_layers": ("all", "vLLM computes a prompt when all of it has come up"),
    "onboard": ("always", "vLLM brings up whatever is found"),
    "onboard_deadline_s": (None, "vLLM brings up whatever is found"),
    "tenant_quota_tokens": (None, "an engine knows no tenants"),
    "max_batch_blocks": (64, "vLLM moves the blocks of a step together"),
    "min_batch_blocks": (8, "vLLM moves the blocks of a step together"),
    "flush_s": (0.010, "vLLM moves the blocks of a step together"),
    "batches_at_once": (1, "vLLM moves the blocks of a step together"),
}
"""Keys whose one value a live vLLM can carry out, and why."""

_FILTERS: Final = frozenset({"presence", "presence_lfu", "frequency_filter"})
_NEEDS: Final[Mapping[str, str]] = {
    "pass_all": "an engine never writes again what is there",
    "priority": "no caller sets priorities of blocks in a live engine",
    "tenant_quota": "an engine knows no tenants",
}


@frozen
class ObjectStore:
    """Where the remote tier lies: a bucket of an S3 server. Keys come from the environment of the engine's process
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or whatever else the chain of the AWS SDK finds), never from here."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""

    @staticmethod
    def parse(text: str) -> ObjectStore:
        """Of `s3://BUCKET[/PREFIX][?endpoint=http://HOST:PORT&region=NAME]`. Raises ConfigError."""
        parts = urlsplit(text)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.scheme != "s3" or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                f"--kv-objects: {text.rpartition('@')[2]!r} is not s3://BUCKET[/PREFIX][?endpoint=http://HOST:PORT&"
                "region=NAME]; keys are not part of it, they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        unknown = sorted(asked.keys() - {"endpoint", "region"})
        if unknown:
            raise ConfigError(f"--kv-objects: {', '.join(unknown)} is not known; there are endpoint and region")
        if len(parts.netloc) < 3:
            raise ConfigError(f"--kv-objects: bucket {parts.netloc!r} is too short; names have 3 letters at least")
        return ObjectStore(
            bucket=parts.netloc,
            prefix=parts.path.strip("/"),
            endpoint=asked.get("endpoint", ""),
            region=asked.get("region", ""),
        )

    def settings(self) -> dict[str, str]:
        """As vLLM's `store_config`."""
        scheme = urlsplit(self.endpoint).scheme or "https"
        found = {"bucket": self.bucket, "endpoint_override": self.endpoint, "scheme": scheme, "region": self.region}
        return {name: value for name, value in found.items() if value or name == "endpoint_override"}


@frozen
class KvPlaces:
    """Where tiers of a worker lie: a folder for its files, an object store."""

    disk: Path | None = None
    objects: ObjectStore | None = None


def check(group: WorkerGroup, places: KvPlaces) -> None:
    """Raises CapabilityError for the first setting of the group's tiers that its engine cannot carry out."""
    for name, why in refusals(group, places):
        raise CapabilityError(f"workers.{group.name}.{name}: {why}")


def refusals(group: WorkerGroup, places: KvPlaces) -> Iterator[tuple[str, str]]:
    """Settings that a live engine cannot carry out, and why or what to do."""
    kvbm = group.kvbm
    if group.engine.host_blocks is not None:
        yield "engine.host_blocks", "an engine's own offload is not started from here; give kvbm.cpu_cache_tokens"
    if not kvbm.has_tiers:
        return
    if group.engine.kind != "vllm":
        yield "kvbm", f"tiers are carried out by vLLM, not by {group.engine.kind}; start it by hand and --attach it"
        return
    if group.role != "mixed":
        yield "kvbm", f"a {group.role} worker of vLLM hands KV over and has no tiers; give them to mixed workers"
    if not group.engine.prefix_caching:
        yield "kvbm", "there is nothing to keep without engine.prefix_caching"
    if not kvbm.has_cpu:
        yield "kvbm", "vLLM reaches disk and object store through host memory only; give cpu_cache_gb"
    for name, (only, why) in _ONLY.items():
        if (value := getattr(kvbm, name)) != only:
            yield f"kvbm.{name}", f"{_shown(value)} cannot be carried out live: {why} ({name} = {_shown(only)})"
    yield from _policies(kvbm)
    if kvbm.has_disk and places.disk is None:
        yield "kvbm.disk_cache_gb", "which folder? give --kv-disk DIR"
    if kvbm.remote and places.objects is None:
        yield "kvbm.remote", "which object store? give --kv-objects s3://BUCKET"


def _policies(kvbm: KvbmConfig) -> Iterator[tuple[str, str]]:
    for tier, is_there in (("cpu", kvbm.has_cpu), ("disk", kvbm.has_disk), ("remote", kvbm.remote)):
        if not is_there:
            continue
        for part in getattr(kvbm, f"{tier}_offload").split("+"):
            name = part.strip().lower().replace("-", "_")
            if name not in _FILTERS:
                why = _NEEDS.get(name, "plug-ins are not loaded into an engine")
                known = ", ".join(sorted(_FILTERS))
                yield f"kvbm.{tier}_offload", f"{part.strip()} cannot be carried out live: {why}; there are {known}"
        order = getattr(kvbm, f"{tier}_eviction").lower().replace("-", "_")
        if order not in EVICTIONS:
            yield f"kvbm.{tier}_eviction", f"{order} cannot be carried out live; there are {', '.join(EVICTIONS)}"


def _shown(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def simulated(group: WorkerGroup) -> tuple[str, ...]:
    """Settings of the group's tiers that were given, and describe what is simulated."""
    usual = KvbmConfig()
    return tuple(name for name in sorted(OF_THE_HOST) if getattr(group.kvbm, name) != getattr(usual, name))


def connector(group: WorkerGroup, places: KvPlaces, tag: str) -> dict[str, Any]:
    """vLLM's `kv-transfer-config` for a worker; nobody else is called `tag`. Raises CapabilityError for what it cannot
    do."""
    check(group, places)
    kvbm = group.kvbm
    secondary: list[dict[str, Any]] = []
    told = {"enable_kv_events": True}
    if kvbm.has_disk:
        assert places.disk is not None
        secondary.append({"type": "DiskTier", "module_path": MODULE, "root_dir": str(places.disk), **told})
    if kvbm.remote:
        assert places.objects is not None
        store = places.objects
        secondary.append(
            {
                "type": "obj",
                "store_config": store.settings(),
                "prefix": store.prefix,
                "io_threads": 4,
                "locality": "REMOTE",
                **told,
            }
        )
    extra: dict[str, Any] = {
        "spec_name": "TierSpec" if secondary else "HostSpec",
        "spec_module_path": MODULE,
        "self_describing_kv_events": True,
        "offload_prompt_only": False,  # also what answers add, which the next turn of a chat begins with
        "dynatwin": settings(kvbm, group.dp),
    }
    if secondary:
        extra["secondary_tiers"] = secondary
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": tag,
        "kv_connector_extra_config": extra,
    }


def shared_memory(tag: str) -> Iterator[Path]:
    """What a killed vLLM leaves of its host tier in memory that outlives it."""
    return Path("/dev/shm").glob(f"vllm_offload_{tag}*")


def settings(kvbm: KvbmConfig, dp: int) -> dict[str, Any]:
    """What our side in the engine is told; sizes are those of one rank, which has an engine of its own."""
    tiers: dict[str, Any] = {"host": _tier(kvbm, "cpu", dp)}
    if kvbm.has_disk:
        tiers["disk"] = _tier(kvbm, "disk", dp)
    if kvbm.remote:
        tiers["remote"] = {"offload": kvbm.remote_offload}
    return {
        "tiers": tiers,
        "when_full": kvbm.when_full,
        "min_lfu_count": kvbm.min_lfu_count,
        "decay_s": kvbm.decay_s,
    }


def _tier(kvbm: KvbmConfig, tier: str, dp: int) -> dict[str, Any]:
    size_gb, tokens = getattr(kvbm, f"{tier}_cache_gb"), getattr(kvbm, f"{tier}_cache_tokens")
    size = {"bytes": int(size_gb * BYTES_PER_GB) // dp} if size_gb is not None else {"tokens": tokens // dp}
    return {**size, "offload": getattr(kvbm, f"{tier}_offload"), "eviction": getattr(kvbm, f"{tier}_eviction")}


def environment(group: WorkerGroup) -> dict[str, str]:
    """What the process of the engine needs besides."""
    if not group.kvbm.has_tiers:
        return {}
    found = {"PYTHONPATH": str(MODULE_FOLDER)}
    if group.kvbm.remote:
        found["NIXL_TELEMETRY_ENABLE"] = "y"  # vLLM asks for it after each transfer, and dies without
    return found
