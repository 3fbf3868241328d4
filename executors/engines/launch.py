"""How a worker's engine is started: command line, environment and files, from our own configuration.

Nothing here starts anything. Engines listen on loopback unless another host is given; KV events carry token ids of
prompts and go over ipc where one rank publishes, else over loopback. Engines are kept from the network and from telling
anybody that they run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from executors.engines import kv_tiers
from executors.engines.kv_tiers import KvPlaces
from executors.gpus import VISIBLE
from executors.ports import LOOPBACK, PortNeed
from policies.errors import CapabilityError
from policies.frozen import frozen
from twin.config import EngineConfig, WorkerGroup

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_BUFFER = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000}
"""Batches of KV events that an engine keeps: for repetitions, in its socket, and on their way there."""


@frozen
class Ports:
    """One worker's, on `host`: HTTP, and the first of each rank's for KV events, their repetition, and KV transfers
    (vLLM's NIXL side channel, SGLang's bootstrap)."""

    host: str
    http: int
    events: int
    replay: int
    side: int


def port_needs(group: WorkerGroup) -> tuple[PortNeed, ...]:
    """What a worker of the group needs, by the names of `Ports`."""
    ranks = [PortNeed(name=name, span=group.dp) for name in ("events", "replay", "side")]
    return (PortNeed(name="http"), *ranks)


@frozen
class Launch:
    """What is to be started: `argv` behind the interpreter of the engine's own environment, or behind the `script` that
    lies beside it; variables to be added, and files by name to be written into the worker's folder first."""

    argv: tuple[str, ...]
    script: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@frozen
class Place:
    """Where a worker runs: its name, the model's folder (or hub name) and the name it is served by, its ports, and a
    folder of its own (0700), in a path short enough for sockets. `shared`: several processes follow its KV events.
    `tiers` is where its KV may lie below the device, `tag` a name that nobody else has, `gpus` are those that it alone
    has (none: whichever the engine finds). `quantized`: the checkpoint's weights have their format already."""

    name: str
    model: str
    served_as: str
    ports: Ports
    folder: str
    lease_s: int = 30
    drain_s: int = 0
    shared: bool = False
    tiers: KvPlaces = field(default_factory=KvPlaces)
    tag: str = ""
    gpus: tuple[str, ...] = ()
    quantized: bool = True


def launch(group: WorkerGroup, place: Place) -> Launch:
    """The start of one worker of a group. Raises CapabilityError for what its engine cannot do."""
    kv_tiers.check(group, place.tiers)
    match group.engine.kind:
        case "vllm":
            made = _vllm(group, place)
        case "sglang":
            made = _sglang(group, place)
        case "trtllm":
            made = _trtllm(group, place)
        case kind:
            raise CapabilityError(f"workers of engine {kind!r} cannot be started; vllm, sglang and trtllm can")
    return replace(made, env={**made.env, VISIBLE: ",".join(place.gpus)}) if place.gpus else made


def _flags(values: Mapping[str, Any]) -> list[str]:
    """`--name value` for each; True is a flag alone, None and False are left out, tables are JSON."""
    line: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        line.append(f"--{name}")
        if value is not True:
            line.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return line


def _dtype(kv: str, fp8: str | None = None) -> str | None:
    """Number format of the KV cache, 8 bits spelled as the engine does; None for the engine's own choice."""
    return None if kv in ("bf16", "fp16") else fp8 or kv


def _quantization(group: WorkerGroup, place: Place) -> str | None:
    """What makes the engine convert the weights; None where they are in the format already, or it converts to none."""
    return "fp8" if group.weights == "fp8" and not place.quantized and not group.on_cpu else None


# ---------------------------------------------------------------- vLLM


def _vllm(group: WorkerGroup, place: Place) -> Launch:
    engine, ports = group.engine, place.ports
    values: dict[str, Any] = {
        "model": place.model,
        "served-model-name": place.served_as,
        "host": ports.host,
        "port": ports.http,
        "tensor-parallel-size": group.tp if group.tp > 1 else None,
        "pipeline-parallel-size": group.pp if group.pp > 1 else None,
        "data-parallel-size": group.dp if group.dp > 1 else None,
        "enable-expert-parallel": group.ep > 1,
        "block-size": engine.block_size,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "max-model-len": engine.max_model_len,
        "num-gpu-blocks-override": engine.kv_blocks,
        "gpu-memory-utilization": engine.gpu_memory_utilization,  # on CPU: of main memory
        "quantization": _quantization(group, place),
        "kv-cache-dtype": _dtype(group.kv),
        "enable-prefix-caching": engine.prefix_caching,
        "no-enable-prefix-caching": not engine.prefix_caching,
        "enable-chunked-prefill": engine.chunked_prefill,
        "no-enable-chunked-prefill": not engine.chunked_prefill,
        "enable-prompt-tokens-details": True,
        "enable-scale-out": True,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": engine.nextn} if engine.nextn else None,
        "shutdown-timeout": place.drain_s,
        "kv-events-config": _vllm_events(group.dp, place) if engine.prefix_caching else None,
    }
    env = _OFFLINE | {"VLLM_NO_USAGE_STATS": "1"}
    if group.on_cpu:
        values |= {"dtype": "bfloat16", "enforce-eager": True}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    if group.role != "mixed":
        values["kv-transfer-config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if group.role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": place.lease_s},
            **({"kv_buffer_device": "cpu"} if group.on_cpu else {}),
        }
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": ports.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side)}
    if group.kvbm.has_tiers:
        values["kv-transfer-config"] = kv_tiers.connector(group, place.tiers, place.tag or place.name)
        env |= kv_tiers.environment(group)
    return Launch(argv=("-m", "vllm.entrypoints.openai.api_server", *_flags(values)), env=env)


def _vllm_events(dp: int, place: Place) -> dict[str, Any]:
    """One rank on loopback publishes over ipc, which vLLM binds. Otherwise it connects to ports that the one follower
    binds; where there are several followers it has to bind, and of tcp it binds nothing but all addresses."""
    ports = place.ports
    host = "*" if place.shared else ports.host
    local = dp == 1 and ports.host == LOOPBACK
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{place.folder}/kv" if local else f"tcp://{host}:{ports.events}",
        "replay_endpoint": f"ipc://{place.folder}/replay" if local else f"tcp://{host}:{ports.replay}",
        "topic": f"kv@{place.name}",
        **_BUFFER,
    }


# ---------------------------------------------------------------- SGLang


def _sglang(group: WorkerGroup, place: Place) -> Launch:
    engine, ports = group.engine, place.ports
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://{ports.host}:{ports.events}",
        "bind": True,
        "replay_endpoint": f"tcp://{ports.host}:{ports.replay}",
        "topic": f"kv@{place.name}",
        **_BUFFER,
    }
    values: dict[str, Any] = {
        "model-path": place.model,
        "served-model-name": place.served_as,
        "host": ports.host,
        "port": ports.http,
        "tp-size": group.tp if group.tp > 1 else None,
        "pp-size": group.pp if group.pp > 1 else None,
        "dp-size": group.dp if group.dp > 1 else None,
        "ep-size": group.ep if group.ep > 1 else None,
        "page-size": engine.block_size,
        "max-running-requests": engine.max_num_seqs,
        "chunked-prefill-size": engine.chunked_prefill_size if engine.chunked_prefill else -1,
        "max-prefill-tokens": engine.max_prefill_tokens,
        "schedule-policy": "fcfs" if engine.schedule_policy == "fifo" else engine.schedule_policy,
        "schedule-conservativeness": engine.schedule_conservativeness,
        "context-length": engine.max_model_len,
        "max-total-tokens": _tokens(engine),
        "mem-fraction-static": None if group.on_cpu else engine.gpu_memory_utilization,
        "quantization": _quantization(group, place),
        "kv-cache-dtype": _dtype(group.kv, "fp8_e4m3"),
        "disable-radix-cache": not engine.prefix_caching,
        "enable-metrics": True,
        "enable-cache-report": True,
        "kv-events-config": events if engine.prefix_caching else None,
    }
    if engine.nextn:
        values |= {
            "speculative-algorithm": "NEXTN",
            "speculative-num-steps": engine.nextn,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": engine.nextn + 1,
        }
    env = dict(_OFFLINE)
    if group.on_cpu:
        values |= {"device": "cpu", "dtype": "bfloat16", "skip-server-warmup": True}
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if group.role != "mixed":
        values |= {
            "disaggregation-mode": group.role,
            "disaggregation-transfer-backend": "nixl",
            "disaggregation-bootstrap-port": ports.side,
        }
    return Launch(argv=("-m", "sglang.launch_server", *_flags(values)), env=env)


def _tokens(engine: EngineConfig) -> int | None:
    return engine.kv_blocks * engine.block_size if engine.kv_blocks is not None else None


# ---------------------------------------------------------------- TensorRT-LLM


def _trtllm(group: WorkerGroup, place: Place) -> Launch:
    """Most settings go into a file of options, which is JSON and therefore YAML."""
    if group.on_cpu:
        raise CapabilityError("TensorRT-LLM runs on GPUs only; use vllm for workers on CPUs")
    engine, ports = group.engine, place.ports
    options: dict[str, Any] = {
        "enable_chunked_prefill": engine.chunked_prefill,
        "disable_overlap_scheduler": group.role == "prefill",
        "kv_cache_config": {
            "enable_block_reuse": engine.prefix_caching,
            "event_buffer_max_size": _BUFFER["max_queue_size"] if engine.prefix_caching else 0,
            "tokens_per_block": engine.block_size,
            "free_gpu_memory_fraction": engine.gpu_memory_utilization,
            "max_tokens": _tokens(engine),
            "dtype": _dtype(group.kv, "fp8") or "auto",
        },
        "scheduler_config": {"capacity_scheduler_policy": engine.capacity_policy.upper()},
    }
    if engine.nextn:
        options["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": engine.nextn}
    if group.role != "mixed":
        options["cache_transceiver_config"] = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 1000 * place.lease_s}
    values: dict[str, Any] = {
        "backend": "pytorch",
        "served_model_name": place.served_as,
        "host": ports.host,
        "port": ports.http,
        "tp_size": group.tp if group.tp > 1 else None,
        "pp_size": group.pp if group.pp > 1 else None,
        "ep_size": group.ep if group.ep > 1 else None,
        "max_batch_size": engine.max_num_seqs,
        "max_num_tokens": engine.max_num_batched_tokens,
        "max_seq_len": engine.max_model_len,
        "extra_llm_api_options": f"{place.folder}/options.yml",
    }
    argv = (place.model, *_flags(values))
    files = {"options.yml": json.dumps(options, indent=1)}
    return Launch(argv=argv, script="trtllm-serve", env=dict(_OFFLINE), files=files)
