"""Starts the workers of a group as processes on this host: ports, folder, command line, adapter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from executors.deadlines import USUAL, Deadlines
from executors.engines.kv_tiers import KvPlaces, shared_memory
from executors.engines.launch import Launch, Place, Ports, launch, port_needs
from executors.engines.protocol import Engine
from executors.engines.remote import Attached, Remote
from executors.gpus import GpuAllocator, gpus_here
from executors.ports import LOOPBACK, PortAllocator, bracketed
from executors.process import EngineProcess
from policies.cluster.ids import Role
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from twin.config import Config, DisaggregationConfig, ResilienceConfig, WorkerGroup

NICE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


@frozen
class Model:
    """What engines load (a folder, or a name of the hub where they may look there), and the name it is served by."""

    checkpoint: str
    served_as: str

    def is_quantized(self) -> bool:
        """Whether the weights have a format of their own, as their config.json says; so too where there is none."""
        file = Path(self.checkpoint) / "config.json"
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return True
        return not isinstance(told, dict) or bool(told.get("quantization_config"))


@frozen
class Terms:
    """What engines are told at their start, and by when they have to answer: a prefill worker keeps KV that nobody
    fetches for `lease_s`, and one that is to end has `drain_s` for what it has. Engines take whole seconds: no fewer
    than these."""

    lease_s: float = DisaggregationConfig().lease_s
    drain_s: float = ResilienceConfig().drain_timeout_s
    deadlines: Deadlines = USUAL

    @classmethod
    def of(cls, config: Config) -> Terms:
        return cls(
            lease_s=config.disaggregation.lease_s,
            drain_s=config.resilience.drain_timeout_s,
            deadlines=Deadlines.of(config),
        )


USUAL_TERMS = Terms()


def adapter(group: WorkerGroup, at: Attached, now: Callable[[], float], deadlines: Deadlines = USUAL) -> Remote:
    """The adapter of a group's engine; only that one is imported."""
    match group.engine.kind:
        case "vllm":
            from executors.engines.vllm import Vllm

            return Vllm(at, deadlines, now)
        case "sglang":
            from executors.engines.sglang import Sglang

            return Sglang(at, deadlines, now)
        case "trtllm":
            from executors.engines.trtllm import Started, Trtllm

            engine = group.engine
            if engine.max_model_len is None:
                raise ConfigError(
                    f"workers {group.name}: TensorRT-LLM does not say how long a request may be; set "
                    "workers.engine.max_model_len to what it was started with"
                )
            started = Started(block_size=engine.block_size, context_tokens=engine.max_model_len, dp_ranks=group.dp)
            return Trtllm(at, started, deadlines, now)
    raise CapabilityError(f"there is no adapter for engine {group.engine.kind!r}; there are vllm, sglang and trtllm")


@frozen
class Planned:
    """One worker as it would be started: for people, before anything is."""

    name: str
    group: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]

    def text(self) -> str:
        """One shell line, and the files that it reads."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        line = " ".join([*variables, shlex.join(self.command)])
        return "\n".join([f"# {self.name}", line, *(f"#   {name}:\n{text}" for name, text in self.files.items())])


class HostStarter:
    """`fleet.Starter` on this host. `pythons` names the interpreter of the environment that each engine is in,
    `folder` is where workers have their logs; `terms` are what engines are told. They listen on `host`;
    `shared`: others than this process follow their KV events too. Each has GPUs of its own, of those `gpus`."""

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        model: Model,
        pythons: Mapping[str, Path],
        now: Callable[[], float],
        folder: Path | None = None,
        terms: Terms = USUAL_TERMS,
        host: str = LOOPBACK,
        shared: bool = False,
        tiers: KvPlaces | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self._groups = dict(groups)
        self._model = model
        self._pythons = dict(pythons)
        self._now = now
        self.folder = folder or Path(tempfile.mkdtemp(prefix="dynatwin-"))
        self._own_folder = folder is None
        self._host = host
        self._shared = shared
        self._tiers = tiers or KvPlaces()
        self._ports = PortAllocator(host)
        self._gpus = GpuAllocator(gpus_here() if gpus is None else gpus)
        self._quantized = model.is_quantized()
        self._counts: dict[str, int] = {}
        self._terms = terms
        self.processes: dict[str, EngineProcess] = {}

    def start(self, group: str) -> tuple[str, Awaitable[Engine]]:
        if group not in self._groups:
            raise ConfigError(f"there is no worker group {group!r}; there are {', '.join(self._groups)}")
        name = self._next_name(group)
        return name, self._run(name, self._groups[group])

    def plan(self) -> list[Planned]:
        """Every worker of the configuration as it would be started now; ports and GPUs are only looked up."""
        planned = []
        try:
            for group in self._groups.values():
                for _ in range(group.count):
                    name = self._next_name(group.name)
                    _, made = self._launch(name, group, self._tiers)
                    command = self._command(group, made)
                    planned.append(
                        Planned(name=name, group=group.name, command=command, env=made.env, files=made.files)
                    )
        finally:
            self._ports.close()
            self._gpus.close()
            self._counts.clear()
            if self._own_folder:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()  # empty where nothing was started
        return planned

    def _next_name(self, group: str) -> str:
        number = self._counts[group] = self._counts.get(group, -1) + 1
        return f"{group}-{number}"

    def _python(self, group: WorkerGroup) -> Path:
        kind = group.engine.kind
        if kind not in self._pythons:
            variable = f"DYNATWIN_{kind.upper()}_PYTHON"
            raise CapabilityError(
                f"workers {group.name}: no environment with {NICE_NAMES.get(kind, kind)} is known; name its "
                f"interpreter with --python {kind}=PATH or {variable} (twin probe says what this host has)"
            )
        return self._pythons[kind]

    def _command(self, group: WorkerGroup, made: Launch) -> tuple[str, ...]:
        python = self._python(group)
        return (str(python if made.script is None else python.with_name(made.script)), *made.argv)

    def _launch(self, name: str, group: WorkerGroup, tiers: KvPlaces) -> tuple[Place, Launch]:
        taken = self._ports.take(name, port_needs(group))
        try:
            gpus = self._gpus.take(name, 0 if group.on_cpu else group.gpus)
        except CapabilityError:
            self._ports.release(name)
            raise
        place = Place(
            name=name,
            model=self._model.checkpoint,
            served_as=self._model.served_as,
            ports=Ports(host=self._host, **taken),
            folder=str(self.folder / name),
            lease_s=ceil(self._terms.lease_s),
            drain_s=ceil(self._terms.drain_s),
            shared=self._shared,
            tiers=tiers,
            tag=f"{name}-{secrets.token_hex(4)}",
            gpus=gpus,
            quantized=self._quantized,
        )
        return place, launch(group, place)

    def _own_tiers(self, name: str, group: WorkerGroup) -> KvPlaces:
        """With a folder on the disk that is this worker's alone."""
        if not group.kvbm.has_disk or self._tiers.disk is None:
            return self._tiers
        self._tiers.disk.mkdir(mode=0o700, parents=True, exist_ok=True)
        return replace(self._tiers, disk=Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._tiers.disk)))

    async def _run(self, name: str, group: WorkerGroup) -> Engine:
        tiers = self._own_tiers(name, group)
        place, made = self._launch(name, group, tiers)
        Path(place.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, text in made.files.items():
            (Path(place.folder) / file).write_text(text, encoding="utf-8")
        process = await EngineProcess.start(
            name,
            self._command(group, made),
            self.folder / f"{name}.log",
            environment=_environment(made.env),
            folder=Path(place.folder),
        )
        self.processes[name] = process
        process.when_ended(lambda ended: self._clear(place))
        at = Attached(
            name=name,
            url=f"http://{bracketed(place.ports.host)}:{place.ports.http}",
            role=Role(group.role),
            gpus=0 if group.on_cpu else group.gpus,
            on_cpu=group.on_cpu,
            max_num_seqs=group.engine.max_num_seqs * group.dp,
            max_batched_tokens=group.engine.max_num_batched_tokens * group.dp,
            process=process,
        )
        return adapter(group, at, self._now, self._terms.deadlines)

    def _clear(self, place: Place) -> None:
        """A worker has ended: nothing of its KV stays, since it can be turned back into text."""
        self._ports.release(place.name)
        self._gpus.release(place.name)
        if place.tiers.disk is not None and place.tiers.disk != self._tiers.disk:
            shutil.rmtree(place.tiers.disk, ignore_errors=True)
        for left in shared_memory(place.tag):
            left.unlink(missing_ok=True)

    async def close(self) -> None:
        """End whatever was started here and still runs."""
        await asyncio.gather(*(process.stop(5.0) for process in self.processes.values()))
        self._ports.close()
        self._gpus.close()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours and what the engine needs besides; where modules are looked for, its own folders come first."""
    found = {**os.environ, **more}
    if "PYTHONPATH" in more and (ours := os.environ.get("PYTHONPATH")):
        found["PYTHONPATH"] = os.pathsep.join((more["PYTHONPATH"], ours))
    return found
