"""Values for llm-d's Helm chart (llm-d-modelservice), per role.

The chart itself adds model, port, name and degrees of parallelism to a command of vLLM, so these stand in its
`parallelism` and not among the arguments. For SGLang the whole command is given.
"""

from __future__ import annotations

from aiconfig.candidate import Pool
from aiconfig.emit.kube_parts import (
    NVIDIA,
    SHARED_MEMORY,
    environment,
    gpu_resource,
    head_lines,
    image_of,
    probes,
    worker_command,
)
from aiconfig.emit.plan import PORT, Plan
from aiconfig.emit.worker import Node, Words, last_words, worker_words
from aiconfig.emit.yamltext import Path, dump
from policies.errors import CapabilityError

CHART_ADDS = ("model", "tp", "dp")
SIDECAR_PORT = 8200
"""Where a decode worker listens behind the chart's routing sidecar."""


def llmd_files(plan: Plan) -> dict[str, str]:
    """The values for `helm install -f`."""
    if plan.engine == "trtllm":
        raise CapabilityError("its chart serves vllm and sglang; for trtllm use --as dynamo")
    comments: dict[Path, str] = {}
    pools = {("decode" if pool.role == "mixed" else pool.role): pool for pool in plan.candidate.pools}
    values: dict[str, Node] = {
        "accelerator": {
            "type": "nvidia" if all(gpu_resource(pool.gpu) == NVIDIA for pool in pools.values()) else "amd"
        },
        "multinode": any(plan.hosts_of(pool) > 1 for pool in pools.values()),
        "modelArtifacts": {
            "name": plan.loads,
            "uri": f"hf://{plan.loads}",
            "size": "1Ti",
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": plan.slug},
        },
        "routing": {"servicePort": PORT, "proxy": _proxy(plan)},
    }
    for part in ("prefill", "decode"):
        if part not in pools:
            values[part] = {"create": False}
            continue
        values[part] = _role(plan, pools[part], part)
        for at, origin in last_words(_own_words(plan, pools[part])).items():
            comments[(0, part, "containers", 0, "args", at)] = origin
    return {"k8s/llm-d-values.yaml": dump([values], comments, head_lines(plan))}


def _proxy(plan: Plan) -> Node:
    """The sidecar of a decode worker, which has prompts prefilled elsewhere first."""
    proxy: dict[str, Node] = {"enabled": plan.candidate.mode == "disagg", "targetPort": SIDECAR_PORT}
    if plan.candidate.mode == "disagg" and plan.engine == "sglang":
        proxy["connector"] = "sglang"  # the chart's own choice is vLLM's
    return proxy


def _role(plan: Plan, pool: Pool, part: str) -> Node:
    layout, hosts = pool.layout, plan.hosts_of(pool)
    if hosts > 1 and (layout.dp % hosts or layout.pp > 1 or plan.engine != "vllm"):
        raise CapabilityError(
            f"a {pool.role} worker over {hosts} hosts is rendered for data-parallel ranks of vllm only; use --as dynamo"
        )
    return {
        "create": True,
        "replicas": pool.replicas,
        "parallelism": {
            "tensor": layout.tp if plan.engine == "vllm" else layout.ranks * layout.pp,
            "data": layout.dp if plan.engine == "vllm" else 1,
            "dataLocal": layout.dp // hosts if plan.engine == "vllm" else 1,
            "workers": hosts,
        },
        "containers": [_container(plan, pool, part)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}],
    }


def _container(plan: Plan, pool: Pool, part: str) -> Node:
    resource, gpus = gpu_resource(pool.gpu), str(pool.worker_gpus // plan.hosts_of(pool))
    container: dict[str, Node] = {"name": "vllm", "image": image_of(plan)}
    behind = part == "decode" and plan.candidate.mode == "disagg"
    if plan.engine == "vllm":
        container["modelCommand"] = "vllmServe"
        container["args"] = [word for words in _own_words(plan, pool) for word in words.words]
    else:
        command, args = worker_command(plan, pool)
        container |= {"modelCommand": "custom", "command": command}
        container["args"] = [*args[:-1], str(SIDECAR_PORT)] if behind else list(args)
    own = environment(plan, pool)
    if own:
        container["env"] = own
    container["ports"] = [{"name": "http", "containerPort": SIDECAR_PORT if behind else PORT}]
    container["resources"] = {"limits": {resource: gpus}, "requests": {resource: gpus}}
    container["mountModelVolume"] = True
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    container["extraConfig"] = probes()
    return container


def _own_words(plan: Plan, pool: Pool) -> list[Words]:
    """The parts of the command that stand in the values."""
    words = worker_words(plan, pool)
    return [part for part in words if plan.engine != "vllm" or part.key not in CHART_ADDS]
