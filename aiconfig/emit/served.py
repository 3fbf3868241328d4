"""How a deployment is served, in the words of engines and of Dynamo's frontend; and what has no words there.

Engines have host tiers of their own, which move blocks otherwise than the block manager that was simulated. A tier is a
worker's: vLLM takes the size of a data-parallel rank (GiB), SGLang (GB) and TensorRT-LLM (bytes) that of each GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from aiconfig.candidate import Candidate, Pool
from aiconfig.emit.flags import Flags, Plain
from aiconfig.serving import GB, USUAL_ROUTER, Serving, size_text

GIB: Final = 2**30
FRONTEND_MODES: Final = ("random", "least-loaded", "power-of-two", "kv")
"""Modes that Dynamo's frontend has beside round robin."""
POLICIES: Final[Mapping[str, str]] = {"kv": "cache_aware", "power-of-two": "power_of_two", "random": "random"}


def host_settings(candidate: Candidate, pool: Pool, flags: Flags) -> Mapping[str, Plain]:
    """The engine's own host tier for a worker of `pool`, by key of the table of flags; empty where it has none.

    vLLM has one connector, for hand-offs or for its tier, so that a prefill worker of vLLM has no tier.
    """
    size = candidate.serving.host_kv_bytes
    found = _settings(candidate.engine, size, pool)
    idle = not size or pool.role == "decode" or (candidate.engine == "vllm" and pool.role != "mixed")
    return {} if idle or not all(key in flags for key in found) else found


def _settings(engine: str, size: int, pool: Pool) -> Mapping[str, Plain]:
    match engine:
        case "vllm":
            return {"host_kv_backend": "native", "host_kv_gib": size / GIB / pool.layout.dp}
        case "sglang":
            return {"host_kv": True, "host_kv_gb": max(1, round(size / GB / pool.worker_gpus))}
        case _:
            return {"host_kv_bytes": size // pool.worker_gpus}


def host_bytes(values: Mapping[str, object], pool: Pool) -> int:
    """The host tier of a worker that a command's values say; 0 if it has none."""
    found = {
        "host_kv_gib": GIB * pool.layout.dp,
        "host_kv_gb": GB * pool.worker_gpus,
        "host_kv_bytes": pool.worker_gpus,
    }
    return sum(round(float(str(values[key])) * unit) for key, unit in found.items() if key in values)


def serving_notices(candidate: Candidate, flags: Flags) -> Iterator[str]:
    """What whoever deploys has to see to."""
    serving, engine = candidate.serving, f"{candidate.engine} {flags.version}"
    if serving.router != USUAL_ROUTER:
        yield (
            f"requests are to be routed by {serving.router}: Dynamo's frontend is told so, routers of engines get the "
            f"nearest policy ({router_policy(serving)}); in front of other workers put a router that does so"
        )
    computing = [pool for pool in candidate.pools if pool.role != "decode"]
    if serving.host_kv_bytes and not all(host_settings(candidate, pool, flags) for pool in computing):
        yield (
            f"workers are to have {size_text(serving.host_kv_bytes)} of host memory for KV, for which {engine} has no "
            "flag here; a block manager has (Dynamo's: DYN_KVBM_CPU_CACHE_GB)"
        )
    if serving.disk_kv_bytes:
        yield (
            f"workers are to have {size_text(serving.disk_kv_bytes)} of disk for KV, for which {engine} has no flag; a "
            "block manager has (Dynamo's: DYN_KVBM_DISK_CACHE_GB)"
        )


def router_policy(serving: Serving) -> str:
    """The policy of SGLang's and of vLLM's router that comes nearest; their own choice goes by cached prefixes."""
    return POLICIES.get(serving.mode, "round_robin")


def frontend_variables(serving: Serving) -> Mapping[str, str]:
    """What the environment tells Dynamo's frontend; what it has no variable for stays as it is there."""
    if serving.mode not in FRONTEND_MODES:
        return {}
    router, found = serving.router_config(), {"DYN_ROUTER_MODE": serving.mode}
    if router.router_temperature:
        found["DYN_ROUTER_TEMPERATURE"] = repr(router.router_temperature)
    if not router.use_kv_events:
        found["DYN_ROUTER_USE_KV_EVENTS"] = "false"
    return found
