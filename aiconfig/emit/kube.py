"""Kubernetes manifests: a Deployment and a Service for each role, a LeaderWorkerSet where a worker takes several hosts,
and what stands in front of prefill and decode workers (`kube_router.py`).

Containers get their command as a list, so no shell reads it, except where a host's rank has to come from the
environment.
"""

from __future__ import annotations

from aiconfig.candidate import Pool
from aiconfig.emit.kube_parts import (
    LEADER,
    OPTIONS_FOLDER,
    SHARED_MEMORY,
    environment,
    gpu_resource,
    head_lines,
    image_of,
    labels_of,
    name_of,
    notes_of,
    probes,
    worker_command,
)
from aiconfig.emit.kube_router import BOOTSTRAP_NOTE, router_notes, router_objects
from aiconfig.emit.launch import local_ranks
from aiconfig.emit.plan import BOOTSTRAP_PORT, NIXL_PORT, PORT, Plan
from aiconfig.emit.worker import Node, last_words, options_of, worker_items, worker_words
from aiconfig.emit.yamltext import Path, dump
from policies.errors import CapabilityError

_DEPLOYED = ("spec", "template", "spec", "containers", 0)
_GROUPED = ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "containers", 0)


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
    head = head_lines(plan)
    if plan.candidate.mode == "disagg":
        objects += router_objects(plan)
        head += router_notes(plan)
    return {"k8s/deployment.yaml": dump(objects, comments, head)}


def _config_map(plan: Plan, pool: Pool, text: str) -> Node:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(plan, pool.role), "labels": _labels(plan, pool)},
        "data": {f"{pool.role}.yml": text},
    }


def _deployment(plan: Plan, pool: Pool) -> Node:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name_of(plan, pool.role),
            "labels": _labels(plan, pool),
            "annotations": notes_of(plan, pool),
        },
        "spec": {
            "replicas": pool.replicas,
            "selector": {"matchLabels": _labels(plan, pool)},
            "template": {"metadata": _pod_metadata(plan, pool), "spec": _pod(plan, pool, _container(plan, pool))},
        },
    }


def _service(plan: Plan, pool: Pool) -> Node:
    ports: list[Node] = [{"name": "http", "port": PORT, "targetPort": "http"}]
    if plan.engine == "sglang" and pool.role == "prefill":
        ports.append({"name": "bootstrap", "port": BOOTSTRAP_PORT, "targetPort": "bootstrap"})
    grouped = plan.hosts_of(pool) > 1
    name = name_of(plan, pool.role)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        # A group's controller makes a headless Service of the group's own name, by which hosts find the leader.
        "metadata": {"name": f"{name}-http" if grouped else name, "labels": _labels(plan, pool)},
        "spec": {"selector": {**_labels(plan, pool), **(LEADER if grouped else {})}, "ports": ports},
    }


def _labels(plan: Plan, pool: Pool) -> dict[str, Node]:
    return {**labels_of(plan, pool.role)}


def _pod_metadata(plan: Plan, pool: Pool) -> dict[str, Node]:
    metadata: dict[str, Node] = {"labels": _labels(plan, pool)}
    if plan.engine == "sglang" and pool.role == "prefill":
        metadata["annotations"] = {BOOTSTRAP_NOTE: str(BOOTSTRAP_PORT)}
    return metadata


def _pod(plan: Plan, pool: Pool, container: dict[str, Node]) -> dict[str, Node]:
    volumes: list[Node] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}]
    if plan.engine == "trtllm":
        volumes.append({"name": "options", "configMap": {"name": name_of(plan, pool.role)}})
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
        "metadata": {
            "name": name_of(plan, pool.role),
            "labels": _labels(plan, pool),
            "annotations": notes_of(plan, pool),
        },
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
    return {"metadata": _pod_metadata(plan, pool), "spec": _pod(plan, pool, container)}


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
