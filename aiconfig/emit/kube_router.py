"""What stands in front of prefill and decode workers on plain Kubernetes: a Deployment and a Service for the engine's
own router. SGLang's finds each worker by its labels, and may list pods for that; TensorRT-LLM's is told the Services of
both roles. vLLM brings none.
"""

from __future__ import annotations

from aiconfig.emit.kube_parts import LEADER, OPTIONS_FOLDER, image_of, labels_of, name_of, probes
from aiconfig.emit.launch import SGLANG_ROUTER, TRTLLM_ROUTER, trtllm_router
from aiconfig.emit.plan import PORT, Plan
from aiconfig.emit.served import router_policy
from aiconfig.emit.worker import Node
from aiconfig.emit.yamltext import dump

BOOTSTRAP_NOTE = "sglang.ai/bootstrap-port"
"""The annotation of a prefill worker from which the router reads its bootstrap port."""
START_S = 3600
"""How long TensorRT-LLM's router waits for its workers: by its own choice minutes, and models take longer to load."""
ROUTER = "router"


def router_objects(plan: Plan) -> list[Node]:
    """The objects of the router; none for vLLM."""
    match plan.engine:
        case "sglang":
            return [*_may_list_pods(plan), _deployment(plan, SGLANG_ROUTER, _sglang_args(plan)), _service(plan)]
        case "trtllm":
            args = ["-c", f"{OPTIONS_FOLDER}/{ROUTER}.yml", "--server_start_timeout", str(START_S)]
            return [_trtllm_workers(plan), _deployment(plan, TRTLLM_ROUTER, args), _service(plan)]
    return []


def router_notes(plan: Plan) -> list[str]:
    """Where requests go, for the head of the file."""
    if plan.engine == "vllm":
        return [
            "note: vLLM brings no router for prefill and decode workers, and none is in this file: use --as dynamo or "
            "--as llm-d, or run launch/router.sh where it reaches every worker",
        ]
    return [f"Requests go to the Service {name_of(plan, ROUTER)}."]


def _sglang_args(plan: Plan) -> list[str]:
    args = ["--pd-disaggregation", "--policy", router_policy(plan.candidate.serving)]
    args += ["--service-discovery", "--service-discovery-namespace", "$(POD_NAMESPACE)"]
    args += ["--service-discovery-port", str(PORT)]
    for pool in plan.candidate.pools:
        wanted = labels_of(plan, pool.role) | (LEADER if plan.hosts_of(pool) > 1 else {})
        args += [f"--{pool.role}-selector", *(f"{key}={value}" for key, value in wanted.items())]
    return [*args, "--host", "0.0.0.0", "--port", str(PORT)]


def _may_list_pods(plan: Plan) -> list[Node]:
    name, group = name_of(plan, ROUTER), "rbac.authorization.k8s.io"
    metadata: Node = {"name": name, "labels": {**labels_of(plan, ROUTER)}}
    rules: list[Node] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _trtllm_workers(plan: Plan) -> Node:
    tree = trtllm_router([name_of(plan, "prefill")], [name_of(plan, "decode")])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(plan, ROUTER), "labels": {**labels_of(plan, ROUTER)}},
        "data": {f"{ROUTER}.yml": dump([tree], head=["a Service spreads requests over the workers of its role"])},
    }


def _deployment(plan: Plan, program: tuple[str, ...], args: list[str]) -> Node:
    container: dict[str, Node] = {
        "name": ROUTER,
        "image": image_of(plan),
        "command": [*program],
        "args": [*args],
        "ports": [{"name": "http", "containerPort": PORT}],
        **probes(),
    }
    pod: dict[str, Node] = {"containers": [container]}
    if plan.engine == "sglang":
        namespace: Node = {"fieldRef": {"fieldPath": "metadata.namespace"}}
        container["env"] = [{"name": "POD_NAMESPACE", "valueFrom": namespace}]
        pod["serviceAccountName"] = name_of(plan, ROUTER)
    else:
        container["volumeMounts"] = [{"name": "options", "mountPath": OPTIONS_FOLDER, "readOnly": True}]
        pod["volumes"] = [{"name": "options", "configMap": {"name": name_of(plan, ROUTER)}}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name_of(plan, ROUTER), "labels": {**labels_of(plan, ROUTER)}},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {**labels_of(plan, ROUTER)}},
            "template": {"metadata": {"labels": {**labels_of(plan, ROUTER)}}, "spec": pod},
        },
    }


def _service(plan: Plan) -> Node:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name_of(plan, ROUTER), "labels": {**labels_of(plan, ROUTER)}},
        "spec": {
            "selector": {**labels_of(plan, ROUTER)},
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }
