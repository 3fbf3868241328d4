"""What a search is asked for: model, GPUs, engines, demand, limits, objective; and for each value where it came from.

Whatever is not given has the default below, so that a search runs with no argument at all. Names are checked here,
once; nothing here searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path

from aiconfig.candidate import ENGINES, MODES
from aiconfig.estimate import Load
from aiconfig.formats import searched_kv, searched_weights
from aiconfig.objectives import OBJECTIVES
from aiconfig.physics import Physics
from aiconfig.serving import USUAL_ROUTER, Serving, router_choice, size_text
from aiconfig.workload import Workload
from policies.errors import ConfigError
from policies.frozen import frozen
from reports.sla import Sla
from twin.config_schema import LARGEST_SEED
from twin.perf.formats import kv_bytes, weight_bytes
from twin.perf.hardware import Gpu, find_gpu
from twin.perf.models import Model, find_model
from twin.perf.names import pick

DEFAULT = "default"
GIVEN = "given"


@frozen
class SearchRequest:
    """One search. `gpu` serves mixed and decode workers, and prefill workers too unless `prefill_gpu` names another.

    `gpus` is the budget, all roles together. None in `weights`, `kv`, `max_num_seqs` and `max_num_batched_tokens`:
    what `formats` and `engines` say is tried. Finalists are simulated under every one of `servings`: each of `routers`
    with each host and disk tier for KV, bytes of a worker; the first of each is what others are compared with. Without
    `load` each candidate is judged at the largest load at which it
    meets `sla`. `origins` says for each field where its value came from; it is no part of equality.
    """

    model: str = "llama-3.1-8b"
    gpu: str = "h100_sxm"
    prefill_gpu: str | None = None
    gpus: int = 8
    engines: tuple[str, ...] = ("vllm",)
    modes: tuple[str, ...] = MODES
    workload: Workload = Workload(isl=1024, osl=256)
    sla: Sla | None = None
    load: Load | None = None
    objective: str = "throughput-per-gpu"
    weights: tuple[str, ...] | None = None
    kv: tuple[str, ...] | None = None
    max_num_seqs: tuple[int, ...] | None = None
    max_num_batched_tokens: tuple[int, ...] | None = None
    nextn: tuple[int, ...] = (0,)
    routers: tuple[str, ...] = (USUAL_ROUTER,)
    host_kv: tuple[int, ...] = (0,)
    disk_kv: tuple[int, ...] = (0,)
    usd_per_gpu_hour: float | None = None
    hardware: Path | None = None
    coefficients: str = ""
    strict: bool = False
    seed: int = 0
    top: int = 5
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        find_model(self.model)
        for gpu in (self.gpu, self.prefill_gpu):
            if gpu is not None:
                find_gpu(gpu, self.hardware)
        self.physics.check()
        self._check_names()
        self._check_numbers()
        self._check_servings()
        self._check_goodput()

    def _check_names(self) -> None:
        for what, names, known in (("engine", self.engines, ENGINES), ("mode", self.modes, MODES)):
            for name in names:
                pick(what, name, dict.fromkeys(known))
            if not names or len(set(names)) < len(names):
                raise ConfigError(
                    f"--{what} {','.join(names)}: name at least one, each once; known: {', '.join(known)}"
                )
        pick("objective", self.objective, OBJECTIVES)
        for name in self.weights or ():
            weight_bytes(name)
        for name in self.kv or ():
            kv_bytes(name)
        if self.objective == "cost" and self.usd_per_gpu_hour is None:
            raise ConfigError("--objective cost needs the price of a GPU-hour: give --price")

    def _check_numbers(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"--gpus {self.gpus}: a deployment has at least 1 GPU")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ConfigError(f"--seed {self.seed}: a seed is 0 to {LARGEST_SEED}")
        if self.top < 1:
            raise ConfigError(f"--top {self.top}: an answer shows at least 1 candidate")
        if self.usd_per_gpu_hour is not None and not self.usd_per_gpu_hour > 0:
            raise ConfigError(f"--price {self.usd_per_gpu_hour}: dollars for a GPU-hour are more than 0")
        for drafts in self.nextn:
            if not 0 <= drafts <= 5:
                raise ConfigError(f"--nextn {drafts}: a decode step verifies 0 to 5 drafts")
        for name, values in (
            ("max-num-seqs", self.max_num_seqs),
            ("max-num-batched-tokens", self.max_num_batched_tokens),
        ):
            for value in values or ():
                if value < 1:
                    raise ConfigError(f"--{name} {value}: a step has room for at least 1")

    def _check_goodput(self) -> None:
        """Goodput counts requests that keep limits of their own: without such nobody knows it."""
        if self.sla is not None and self.sla.per_request:
            return
        limited = self.sla is not None and any(slo.metric == "goodput" for slo in self.sla.slos)
        if limited or self.objective == "goodput-per-gpu":
            asked = f"--sla {self.sla.text}" if limited and self.sla is not None else f"--objective {self.objective}"
            raise ConfigError(
                f"{asked}: goodput counts requests that keep every limit on a request, and none is given; "
                "add one to --sla, such as ttft=200ms"
            )

    @property
    def physics(self) -> Physics:
        """Whose figures price the steps."""
        return Physics(hardware=self.hardware, coefficients=self.coefficients, strict=self.strict)

    def _check_servings(self) -> None:
        for router in self.routers:
            if router_choice(router) != router:
                raise ConfigError(f"--router {router}: is written {router_choice(router)}")
        shown = {
            "router": self.routers,
            "host-kv": tuple(size_text(size) for size in self.host_kv),
            "disk-kv": tuple(size_text(size) for size in self.disk_kv),
        }
        for name, values in shown.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"--{name} {','.join(values)}: name at least one, each once")
        for host in self.host_kv:
            for disk in self.disk_kv:
                if 0 < disk <= host:
                    raise ConfigError(
                        f"--disk-kv {size_text(disk)}: is not larger than the host tier above it, {size_text(host)}, "
                        "and would mostly keep second copies"
                    )

    @property
    def servings(self) -> tuple[Serving, ...]:
        """Ways to serve that finalists are simulated under, the one first that others are compared with."""
        return tuple(
            Serving(router=router, host_kv_bytes=host, disk_kv_bytes=disk)
            for router in self.routers
            for host in self.host_kv
            for disk in self.disk_kv
        )

    def origin(self, name: str) -> str:
        """Where the value of a field came from: "default", "given", or what `origins` says."""
        return self.origins.get(name, DEFAULT)

    def find_model(self) -> Model:
        """The model's shape."""
        return find_model(self.model)

    def gpu_of(self, role: str) -> Gpu:
        """The GPU of workers in that role."""
        name = self.prefill_gpu if role == "prefill" and self.prefill_gpu else self.gpu
        return find_gpu(name, self.hardware)

    def weights_of(self, role: str) -> tuple[str, ...]:
        """Weight formats to try in that role."""
        return self.weights or searched_weights(self.find_model(), self.gpu_of(role))

    def kv_of(self, role: str) -> tuple[str, ...]:
        """KV formats to try in that role."""
        return self.kv or searched_kv(self.find_model(), self.gpu_of(role))

    def lines(self) -> list[str]:
        """Every value with its origin, for people; printed before the search."""
        shown = ((one.name, getattr(self, one.name)) for one in fields(self) if one.name != "origins")
        return [f"{name} = {_text(name, value)} ({self.origin(name)})" for name, value in shown if value is not None]


def search_request(given: Mapping[str, object], origin: str = GIVEN) -> SearchRequest:
    """A request with the values that are `given` (by field name) and defaults for the rest.

    Raises ConfigError for a name that no field has, with the nearest.
    """
    known = {one.name: one for one in fields(SearchRequest) if one.name != "origins"}
    for name in given:
        pick("search option", name, known)
    return SearchRequest(**given, origins=dict.fromkeys(given, origin))  # type: ignore[arg-type]  # names are checked


def _text(name: str, value: object) -> str:
    if name == "coefficients" and not value:
        return "the shipped calibration"
    if name in ("host_kv", "disk_kv") and isinstance(value, tuple):
        return ", ".join(size_text(one) if one else "none" for one in value)
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value)
    if isinstance(value, Sla):
        return value.text
    if isinstance(value, Workload):
        return f"{value.isl}/{value.osl} tokens, {value.arrivals} arrivals"
    return str(value)
