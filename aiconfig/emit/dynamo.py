"""A DynamoGraphDeployment: a frontend and a service for each role, as Dynamo's operator reads them (v1alpha1).

Workers take their engine's flags, those of the release that Dynamo's image brings unless another is named, and say
their role with a flag that depends on the release of Dynamo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aiconfig.candidate import Pool
from aiconfig.emit.flags import Flags, find_flags, shipped
from aiconfig.emit.kube_parts import NVIDIA, OPTIONS_FOLDER, SHARED_MEMORY, gpu_resource, head_lines, notes_of
from aiconfig.emit.plan import Plan
from aiconfig.emit.served import frontend_variables
from aiconfig.emit.worker import Node, Words, last_words, options_of, worker_items, worker_words
from aiconfig.emit.yamltext import Path, dump
from policies.errors import CapabilityError

SERVICES = {"vllm": "Vllm", "sglang": "Sglang", "trtllm": "Trtllm"}
ROLES = {"mixed": "Worker", "prefill": "PrefillWorker", "decode": "DecodeWorker"}
IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
REGISTRY = "nvcr.io/nvidia/ai-dynamo"


def dynamo_files(plan: Plan) -> dict[str, str]:
    """The deployment, with the option files that its workers read."""
    if any(gpu_resource(pool.gpu) != NVIDIA for pool in plan.candidate.pools):
        raise CapabilityError("Dynamo's images are for GPUs of NVIDIA; use --as k8s")
    flags = find_flags("dynamo", plan.dynamo_version)
    brings = shipped(plan.dynamo_version or flags.version, plan.engine)
    plan = replace(plan, engine_version=plan.engine_version or brings)
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
    return {"k8s/dynamo.yaml": dump(objects, comments, [*head_lines(plan), *_notices(plan, flags, brings)])}


def _notices(plan: Plan, flags: Flags, brings: str | None) -> Iterator[str]:
    if flags.notice:
        yield f"note: {flags.notice}"
    if brings is not None and plan.image is None and plan.version != brings:
        yield (
            f"note: flags are those of {plan.engine} {plan.version}, and the image of Dynamo brings {brings}: leave "
            f"out --engine-version, or give --image"
        )


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
    return plan.image or f"{REGISTRY}/{IMAGES[plan.engine]}:{(plan.dynamo_version or flags.version).removeprefix('v')}"


def _frontend(plan: Plan, flags: Flags) -> Node:
    main: Node = {"image": _image(plan, flags)}
    found: dict[str, Node] = {"componentType": "frontend", "replicas": 1}
    variables = frontend_variables(plan.candidate.serving)
    if variables:
        found["envs"] = [{"name": name, "value": value} for name, value in variables.items()]
    return {**found, "extraPodSpec": {"mainContainer": main}}


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
