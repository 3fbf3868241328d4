"""Kubernetes manifests: a Deployment and a Service for each role, a LeaderWorkerSet where a worker takes several hosts.

Containers get their command as a list, so no shell reads it, except where a host's rank has to come from the
environment.
"""

from __future__ import annotations

from aiconfig.candidate import Pool
from aiconfig.emit.launch import facts, local_ranks
from aiconfig.emit.plan import BOOTSTRAP_PORT, NIXL_PORT, PORT, Plan
from aiconfig.emit.worker import TITLES, Node, last_words, options_of, worker_items, worker_words
from aiconfig.emit.yamltext import Path, dump
from policies.errors import CapabilityError

IMAGES = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:{version}",
}
"""Public images of each engine by release."""
VENDORS = {"mi": "amd.com/gpu"}
"""Resource names of GPUs by the first letters of our name; all others are nvidia.com/gpu."""
SHARED_MEMORY = "16Gi"
"""For what ranks exchange over /dev/shm: our choice, of memory that is used only if needed."""
STARTUP_S = 3600
"""How long loading and compiling may take before a container is started again: our choice."""
OPTIONS_FOLDER = "/etc/aiconfig"
NOTE = "aiconfig.dynatwin/"
"""Begins the annotations that say what flags cannot."""


def kube_files(plan: Plan) -> dict[str, str]:
    """All objects of the deployment in one file."""
    objects: list[Node] = []
    comments: dict[Path, str] = {}
    for pool in plan.candidate.pools:
        options = options_of(plan.flags, worker_items(plan, pool))
        if options.tree:
            head = [f"options of a {pool.role} worker"]
            text = dump([options.tree], options.comments(), head)
            objects.append(_config_map(plan, pool, text))
        place = _GROUPED if plan.hosts_of(pool) > 1 else _DEPLOYED
        for path, origin in last_words(worker_words(plan, pool)).items():
            comments[(len(objects), *place, "args", path)] = origin
        objects.append(_leader_worker_set(plan, pool) if plan.hosts_of(pool) > 1 else _deployment(plan, pool))
        objects.append(_service(plan, pool))
    return {"k8s/deployment.yaml": dump(objects, comments, head_lines(plan))}


_DEPLOYED = ("spec", "template", "spec", "containers", 0)
_GROUPED = ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "containers", 0)


def head_lines(plan: Plan) -> list[str]:
    """What stands on top of every manifest."""
    lines = [
        f"{TITLES[plan.engine]} {plan.version}: {plan.candidate.name}",
        "Behind a value: where it came from.",
    ]
    if plan.candidate.mode == "disagg":
        lines.append("A router in front of prefill and decode workers is not part of this file: see launch/.")
    return lines + [f"note: {notice}" for notice in plan.notices()]


def image_of(plan: Plan) -> str:
    """What containers run."""
    return plan.image or IMAGES[plan.engine].format(version=plan.version.removeprefix("v"))


def worker_command(plan: Plan, pool: Pool) -> tuple[list[Node], list[Node]]:
    """Command and arguments of a worker's container, without those that differ between hosts."""
    args: list[Node] = []
    for part in worker_words(plan, pool):
        args += part.words
    if plan.engine == "trtllm":
        args += [plan.flags["extra"].name, f"{OPTIONS_FOLDER}/{pool.role}.yml"]
    args += ["--host", "0.0.0.0", "--port", str(PORT)]
    return list(plan.flags.program), args


def notes_of(plan: Plan, pool: Pool) -> dict[str, Node]:
    """Annotations that say what flags cannot."""
    return {f"{NOTE}{key}": value for key, value in facts(plan, pool).items()}


def gpu_resource(gpu: str) -> str:
    """The resource that a container asks for to get GPUs of this kind."""
    return next((resource for start, resource in VENDORS.items() if gpu.startswith(start)), "nvidia.com/gpu")


def _labels(plan: Plan, pool: Pool) -> dict[str, Node]:
    return {"app.kubernetes.io/name": plan.slug, "app.kubernetes.io/component": pool.role}


def _name(plan: Plan, pool: Pool) -> str:
    return f"{plan.slug}-{pool.role}"


def _config_map(plan: Plan, pool: Pool, text: str) -> Node:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _name(plan, pool), "labels": _labels(plan, pool)},
        "data": {f"{pool.role}.yml": text},
    }


def _deployment(plan: Plan, pool: Pool) -> Node:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _name(plan, pool), "labels": _labels(plan, pool), "annotations": notes_of(plan, pool)},
        "spec": {
            "replicas": pool.replicas,
            "selector": {"matchLabels": _labels(plan, pool)},
            "template": {"metadata": {"labels": _labels(plan, pool)}, "spec": _pod(plan, pool, _container(plan, pool))},
        },
    }


def _service(plan: Plan, pool: Pool) -> Node:
    ports: list[Node] = [{"name": "http", "port": PORT, "targetPort": "http"}]
    if plan.engine == "sglang" and pool.role == "prefill":
        ports.append({"name": "bootstrap", "port": BOOTSTRAP_PORT, "targetPort": "bootstrap"})
    selector = _labels(plan, pool)
    if plan.hosts_of(pool) > 1:
        selector["leaderworkerset.sigs.k8s.io/worker-index"] = "0"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _name(plan, pool), "labels": _labels(plan, pool)},
        "spec": {"selector": selector, "ports": ports},
    }


def _pod(plan: Plan, pool: Pool, container: dict[str, Node]) -> dict[str, Node]:
    volumes: list[Node] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}]
    if plan.engine == "trtllm":
        volumes.append({"name": "options", "configMap": {"name": _name(plan, pool)}})
    return {"containers": [container], "volumes": volumes}


def _container(plan: Plan, pool: Pool) -> dict[str, Node]:
    command, args = worker_command(plan, pool)
    gpus = str(pool.worker_gpus // plan.hosts_of(pool))
    mounts: list[Node] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if plan.engine == "trtllm":
        mounts.append({"name": "options", "mountPath": OPTIONS_FOLDER, "readOnly": True})
    resource = gpu_resource(pool.gpu)
    container: dict[str, Node] = {
        "name": "engine",
        "image": image_of(plan),
        "command": command,
        "args": args,
        "env": environment(plan, pool),
        "ports": _ports(plan, pool),
        "resources": {"limits": {resource: gpus}, "requests": {resource: gpus}},
        "volumeMounts": mounts,
        **probes(),
    }
    if not container["env"]:
        del container["env"]
    return container


def probes() -> dict[str, Node]:
    """Starting may take long; afterwards a worker that does not answer gets no requests, and later a new start."""
    health: Node = {"path": "/health", "port": "http"}
    return {
        "startupProbe": {"httpGet": health, "periodSeconds": 10, "failureThreshold": STARTUP_S // 10},
        "readinessProbe": {"httpGet": health, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {"httpGet": health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def environment(plan: Plan, pool: Pool) -> list[Node]:
    """What a worker's container has to have in its environment."""
    if plan.engine == "sglang":  # its /health would else run a request, and fail when the worker is merely busy
        return [{"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "false"}]
    if plan.engine != "vllm" or pool.role == "mixed":
        return []
    own_ip: Node = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": own_ip},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
    ]


def _ports(plan: Plan, pool: Pool) -> list[Node]:
    ports: list[Node] = [{"name": "http", "containerPort": PORT}]
    if plan.engine == "vllm" and pool.role != "mixed":
        ports.append({"name": "nixl", "containerPort": NIXL_PORT})
    if plan.engine == "sglang" and pool.role == "prefill":
        ports.append({"name": "bootstrap", "containerPort": BOOTSTRAP_PORT})
    return ports


def _leader_worker_set(plan: Plan, pool: Pool) -> Node:
    """One group of pods a worker: the first serves, the others compute with it."""
    hosts = plan.hosts_of(pool)
    if plan.engine == "trtllm":
        raise CapabilityError(
            f"a {pool.role} worker of trtllm takes {hosts} hosts, which it starts under MPI: not rendered for plain "
            f"Kubernetes; use --as dynamo, whose operator does it"
        )
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": _name(plan, pool), "labels": _labels(plan, pool), "annotations": notes_of(plan, pool)},
        "spec": {
            "replicas": pool.replicas,
            "leaderWorkerTemplate": {
                "size": hosts,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _group_pod(plan, pool, leads=True),
                "workerTemplate": _group_pod(plan, pool, leads=False),
            },
        },
    }


def _group_pod(plan: Plan, pool: Pool, leads: bool) -> dict[str, Node]:
    container = _container(plan, pool)
    args = container["args"]
    assert isinstance(args, list)
    # Kubernetes puts $(NAME) in itself; LeaderWorkerSet sets these two.
    args += _host_args(plan, pool, leads)
    if not leads:
        for key in ("startupProbe", "readinessProbe", "livenessProbe", "ports"):
            del container[key]
    env = container.setdefault("env", [])
    assert isinstance(env, list)
    index: Node = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
    env.insert(0, {"name": "NODE_RANK", "valueFrom": index})
    return {"metadata": {"labels": _labels(plan, pool)}, "spec": _pod(plan, pool, container)}


def _host_args(plan: Plan, pool: Pool, leads: bool) -> list[Node]:
    flags, hosts = plan.flags, plan.hosts_of(pool)
    leader = "$(LWS_LEADER_ADDRESS)"
    if plan.engine == "sglang":
        rank: list[Node] = [flags["host_rank"].name, "$(NODE_RANK)"]
        return [flags["hosts"].name, str(hosts), *rank, flags["leader"].name, f"{leader}:20000"]
    headless: list[Node] = [] if leads else [flags["headless"].name]
    local = local_ranks(plan, pool)
    if local and hosts > 2:
        raise CapabilityError(
            f"vllm: data-parallel ranks on {hosts} hosts need a first rank on each, which a manifest cannot compute; "
            f"use launch/{pool.role}.sh, or --as dynamo"
        )
    if local:
        start: list[Node] = [flags["dp_start"].name, "0" if leads else str(local)]
        return [flags["dp_local"].name, str(local), flags["dp_leader"].name, leader, *start, *headless]
    rank = [flags["host_rank"].name, "$(NODE_RANK)"]
    return [flags["hosts"].name, str(hosts), *rank, flags["leader"].name, leader, *headless]
