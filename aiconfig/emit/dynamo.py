"""A DynamoGraphDeployment: a frontend and a service for each role, as Dynamo's operator reads them (v1alpha1).

Workers take their engine's flags, and say their role with a flag that depends on the release of Dynamo.
"""

from __future__ import annotations

from aiconfig.candidate import Pool
from aiconfig.emit.flags import Flags, find_flags
from aiconfig.emit.kube import OPTIONS_FOLDER, SHARED_MEMORY, head_lines, notes_of
from aiconfig.emit.plan import Plan
from aiconfig.emit.worker import Node, Words, last_words, options_of, worker_items, worker_words
from aiconfig.emit.yamltext import Path, dump

SERVICES = {"vllm": "Vllm", "sglang": "Sglang", "trtllm": "Trtllm"}
ROLES = {"mixed": "Worker", "prefill": "PrefillWorker", "decode": "DecodeWorker"}
IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
REGISTRY = "nvcr.io/nvidia/ai-dynamo"


def dynamo_files(plan: Plan) -> dict[str, str]:
    """The deployment, with the option files that its workers read."""
    flags = find_flags("dynamo", plan.dynamo_version)
    objects: list[Node] = []
    if plan.engine == "trtllm":
        objects.append(_options(plan))
    comments: dict[Path, str] = {}
    services: dict[str, Node] = {"Frontend": _frontend(plan, flags)}
    for pool in plan.candidate.pools:
        name = SERVICES[plan.engine] + ROLES[pool.role]
        services[name] = _service(plan, pool, flags)
        place = ("spec", "services", name, "extraPodSpec", "mainContainer", "args")
        for at, origin in last_words(worker_args(plan, pool, flags)).items():
            comments[(len(objects), *place, at)] = origin
    objects.append(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": plan.slug},
            "spec": {"backendFramework": plan.engine, "services": services},
        }
    )
    head = [line for line in head_lines(plan) if "router" not in line]
    head += [f"note: {flags.notice}"] if flags.notice else []
    return {"k8s/dynamo.yaml": dump(objects, comments, head)}


def worker_args(plan: Plan, pool: Pool, flags: Flags) -> list[Words]:
    """Arguments of a Dynamo worker: the engine's own, the model by flag, and the role."""
    key = "model" if plan.engine == "vllm" else "model_path"
    args = [Words(key="model", words=(flags[key].name, plan.loads), origin=plan.loads_origin)]
    if plan.engine == "trtllm":
        args.append(
            Words(key="extra", words=(flags["extra"].name, f"{OPTIONS_FOLDER}/{pool.role}.yml"), origin="this file")
        )
    else:
        args += [part for part in worker_words(plan, pool) if part.key not in ("model", "role")]
    return args + _role(plan, pool, flags)


def _role(plan: Plan, pool: Pool, flags: Flags) -> list[Words]:
    if pool.role == "mixed":
        return []
    old = f"vllm_{pool.role}"
    words = flags[old].words(True) if plan.engine == "vllm" and old in flags else flags["role"].words(pool.role)
    return [Words(key="role", words=words, origin="search")]


def _image(plan: Plan, flags: Flags) -> str:
    return plan.image or f"{REGISTRY}/{IMAGES[plan.engine]}:{flags.version}"


def _frontend(plan: Plan, flags: Flags) -> Node:
    main: Node = {"image": _image(plan, flags)}
    return {"componentType": "frontend", "replicas": 1, "extraPodSpec": {"mainContainer": main}}


def _service(plan: Plan, pool: Pool, flags: Flags) -> Node:
    hosts = plan.hosts_of(pool)
    main: dict[str, Node] = {
        "image": _image(plan, flags),
        "command": [*flags.program, f"dynamo.{plan.engine}"],
        "args": [word for part in worker_args(plan, pool, flags) for word in part.words],
    }
    pod: dict[str, Node] = {"mainContainer": main}
    if plan.engine == "trtllm":
        main["volumeMounts"] = [{"name": "options", "mountPath": OPTIONS_FOLDER, "readOnly": True}]
        pod["volumes"] = [{"name": "options", "configMap": {"name": f"{plan.slug}-options"}}]
    service: dict[str, Node] = {"annotations": notes_of(plan, pool), "componentType": "worker"}
    if pool.role != "mixed":
        service["subComponentType"] = pool.role
    service["replicas"] = pool.replicas
    if hosts > 1:
        service["multinode"] = {"nodeCount": hosts}
    service["resources"] = {"limits": {"gpu": str(pool.worker_gpus // hosts)}}
    service["sharedMemory"] = {"size": SHARED_MEMORY}
    service["extraPodSpec"] = pod
    return service


def _options(plan: Plan) -> Node:
    """TensorRT-LLM's settings under Dynamo stand in its file of options alone."""
    texts: dict[str, Node] = {}
    for pool in plan.candidate.pools:
        options = options_of(plan.flags, worker_items(plan, pool), whole=True)
        texts[f"{pool.role}.yml"] = dump([options.tree], options.comments())
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{plan.slug}-options"},
        "data": texts,
    }
