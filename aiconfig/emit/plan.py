"""What files are made from: a candidate with the workload, load and prediction that it was chosen for.

Also what all files have in common: which checkpoint is loaded, how many hosts a worker takes, and where each value
came from. Every word here may come from a user, so nothing of it reaches a file unquoted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from aiconfig.candidate import Candidate, Pool
from aiconfig.emit.flags import Flags, Plain, find_flags
from aiconfig.emit.served import serving_notices
from aiconfig.engines import ENGINE
from aiconfig.estimate import Estimate, Load
from aiconfig.workload import Workload
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from twin.config import Config, EngineConfig
from twin.perf.hardware import find_gpu

SEARCH = "search"
DEFAULT = "default"
GIVEN = "given"

MARGIN_TOKENS = 64
"""Room beyond the longest request: special tokens, a chat template, prompts that a benchmark tokenises again."""
TRAY_GPUS = {72: 4}
"""GPUs of one host where the fast domain is larger than a host: NVL72 racks have trays of four."""
PORT = 8000
BOOTSTRAP_PORT = 8998
"""SGLang's own default."""
NIXL_PORT = 5600
"""vLLM's own default of the side channel."""


@frozen
class Item:
    """One setting of a worker, in our words, with where its value came from."""

    key: str
    value: Plain
    origin: str


@frozen
class Plan:
    """One deployment to write files for.

    `config` is the twin configuration of the same deployment (its engine settings go into the files). `load` is what
    it is meant to carry, `sla` the limits that this load keeps. `checkpoint` is what engines load (None: the public
    one), `image` what containers run, `host_gpus` the GPUs of one host (None: as the GPU is usually sold), `hardware`
    a file of GPUs of the user's own. Without `engine_version` flags are those of the newest release in the table.
    """

    candidate: Candidate
    workload: Workload
    load: Load | None = None
    estimate: Estimate | None = None
    config: Config | None = None
    sla: str | None = None
    engine_version: str | None = None
    dynamo_version: str | None = None
    checkpoint: str | None = None
    image: str | None = None
    name: str | None = None
    host_gpus: int | None = None
    hardware: Path | None = None

    def __post_init__(self) -> None:
        if self.host_gpus is not None and self.host_gpus < 1:
            raise ConfigError(f"--host-gpus {self.host_gpus}: a host has at least 1")
        named = {"model": self.candidate.model, "checkpoint": self.checkpoint, "image": self.image, "name": self.name}
        for what, text in named.items():
            if text is not None and (not text or not text.isprintable() or text.startswith("-")):
                raise ConfigError(f"{what} {text!r}: it is not empty, begins with no dash and has printable characters")
        if self.name is not None and not re.search("[a-z0-9]", self.name.lower()):
            raise ConfigError(f"name {self.name!r}: Kubernetes takes letters a to z and digits; give one with some")

    @property
    def engine(self) -> str:
        return self.candidate.engine

    @property
    def flags(self) -> Flags:
        return find_flags(self.engine, self.engine_version)

    @property
    def version(self) -> str:
        """The engine's release that is to run, whether or not the table of flags covers it."""
        return self.engine_version or self.flags.version

    @property
    def slug(self) -> str:
        """A name that Kubernetes accepts: lower-case letters, digits and dashes, 40 at most."""
        text = self.name or f"{Path(self.candidate.model).name}-{self.candidate.mode}"
        name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"llm-{name}".strip("-")

    @property
    def loads(self) -> str:
        """The repository or path that engines are told to load."""
        known = checkpoints().get(self.candidate.model.lower())
        return self.checkpoint or (known.repository if known else self.candidate.model)

    @property
    def loads_origin(self) -> str:
        if self.checkpoint is not None:
            return GIVEN
        known = checkpoints().get(self.candidate.model.lower())
        return f"{DEFAULT}: the public checkpoint of {self.candidate.model}" if known else GIVEN

    @property
    def loads_weights(self) -> str | None:
        """The number format of that checkpoint, None where only the user knows."""
        known = checkpoints().get(self.candidate.model.lower())
        return known.weights if known and self.checkpoint is None else None

    @property
    def max_model_len(self) -> Item:
        """Tokens of a request at most."""
        longest = max((self.engine_of(pool).max_model_len or 0) for pool in self.candidate.pools)
        if longest:
            return Item(key="max_model_len", value=longest, origin=GIVEN)
        load = self.workload
        tokens = load.longest + MARGIN_TOKENS
        return Item(
            key="max_model_len", value=tokens, origin=f"workload: {load.isl} + {load.osl} + {MARGIN_TOKENS} of margin"
        )

    def engine_of(self, pool: Pool) -> EngineConfig:
        """Engine settings of the pool: those of the twin's configuration, else what a search takes the engine to be."""
        for group in self.config.workers if self.config else ():
            if group.role == pool.role:
                return group.engine
        taken = ENGINE[self.engine]
        return EngineConfig(
            kind=self.engine,
            gpu_memory_utilization=taken.memory_share,
            block_size=taken.block_size,
            chunked_prefill=taken.chunks,
        )

    def setting(self, pool: Pool, key: str, name: str | None = None) -> Item:
        """One engine setting of the pool, `name` in the table of flags."""
        value = getattr(self.engine_of(pool), key)
        usual = getattr(replace(self, config=None).engine_of(pool), key)
        return Item(key=name or key, value=value, origin=DEFAULT if value == usual else GIVEN)

    def hosts_of(self, pool: Pool) -> int:
        """Hosts of one worker."""
        per_host = self.gpus_per_host(pool)
        hosts = -(-pool.worker_gpus // per_host)
        if hosts > 1 and pool.worker_gpus % per_host:
            raise CapabilityError(
                f"a {pool.role} worker of {pool.worker_gpus} GPUs does not fill hosts of {per_host}: take a layout "
                f"that does, or give --host-gpus"
            )
        return hosts

    def gpus_per_host(self, pool: Pool) -> int:
        """GPUs of one host."""
        if self.host_gpus is not None:
            return self.host_gpus
        domain = find_gpu(pool.gpu, self.hardware).domain_gpus
        return TRAY_GPUS.get(domain, domain)

    def notices(self) -> tuple[str, ...]:
        """What whoever starts this should know beforehand."""
        found = [self.flags.notice] if self.flags.notice else []
        native = self.loads_weights
        for weights in sorted({pool.weights for pool in self.candidate.pools}):
            if native is not None and weights != native and weights not in CONVERTS.get(self.engine, ()):
                found.append(
                    f"{self.loads} has its weights in {native}; {weights} was chosen, which needs another checkpoint "
                    f"(--checkpoint)"
                )
        if any(pool.kv == "bf16" and self.flags["kv"].spelled("bf16") == "auto" for pool in self.candidate.pools):
            found.append("KV format auto is the model's own, unless the checkpoint brings scales for an FP8 cache")
        return (*found, *serving_notices(self.candidate, self.flags))


CONVERTS = {"vllm": ("fp8", "fp16"), "sglang": ("fp8", "fp16")}
"""Formats into which an engine turns weights as it loads them, by a flag."""


def quantised(plan: Plan, pool: Pool) -> tuple[Item, ...]:
    """What makes the engine convert the checkpoint's weights to the chosen format; nothing if they are in it."""
    native = plan.loads_weights
    if native is None or native == pool.weights or pool.weights not in CONVERTS.get(plan.engine, ()):
        return ()
    key, value = ("dtype", "fp16") if pool.weights == "fp16" else ("quantization", "fp8")
    return (Item(key=key, value=value, origin=SEARCH),)


@frozen
class Checkpoint:
    """A public checkpoint of a model and the number format of its weights."""

    repository: str
    weights: str


@cache
def checkpoints() -> Mapping[str, Checkpoint]:
    """The public checkpoint of each model of ours that has one."""
    text = (Path(__file__).parent / "checkpoints.toml").read_text(encoding="utf-8")
    return {key: Checkpoint(**row) for key, row in tomllib.loads(text).items()}
