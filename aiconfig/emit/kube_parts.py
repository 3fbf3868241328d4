"""What manifests of all kinds share: images, resources of GPUs, commands of containers, probes, names and labels."""

from __future__ import annotations

from aiconfig.candidate import Pool
from aiconfig.emit.launch import facts
from aiconfig.emit.plan import NIXL_PORT, PORT, Plan
from aiconfig.emit.worker import TITLES, Node, worker_words
from policies.errors import CapabilityError

IMAGES = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:{version}",
}
"""Public images of each engine by release."""
AMD_IMAGES = {"vllm": "vllm/vllm-openai-rocm:v{version}"}
NVIDIA = "nvidia.com/gpu"
VENDORS = {"mi": "amd.com/gpu"}
"""Resource names of GPUs by the first letters of our name; all others are NVIDIA."""
SHARED_MEMORY = "16Gi"
"""For what ranks exchange over /dev/shm: our choice, of memory that is used only if needed."""
STARTUP_S = 3600
"""How long loading and compiling may take before a container is started again: our choice."""
OPTIONS_FOLDER = "/etc/aiconfig"
LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""The label of the pod that serves, where a worker takes several."""
NOTE = "aiconfig.dynatwin/"
"""Begins the annotations that say what flags cannot."""


def head_lines(plan: Plan) -> list[str]:
    """What stands on top of every manifest."""
    lines = [
        f"{TITLES[plan.engine]} {plan.version}: {plan.candidate.name}",
        "Behind a value: where it came from.",
    ]
    return lines + [f"note: {notice}" for notice in plan.notices()]


def image_of(plan: Plan) -> str:
    """What containers run. Raises `CapabilityError` where no public image can be named."""
    if plan.image is not None:
        return plan.image
    images = IMAGES if all(gpu_resource(pool.gpu) == NVIDIA for pool in plan.candidate.pools) else AMD_IMAGES
    if plan.engine not in images:
        raise CapabilityError(f"images of {plan.engine} for AMD GPUs are named by their release of ROCm; give --image")
    return images[plan.engine].format(version=plan.version.removeprefix("v"))


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
    return next((resource for start, resource in VENDORS.items() if gpu.startswith(start)), NVIDIA)


def labels_of(plan: Plan, component: str) -> dict[str, str]:
    """What selects the pods of a role (or of the router)."""
    return {"app.kubernetes.io/name": plan.slug, "app.kubernetes.io/component": component}


def name_of(plan: Plan, component: str) -> str:
    """The name of its objects."""
    return f"{plan.slug}-{component}"


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
