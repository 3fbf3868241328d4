"""Every file of a plan, by the name that `aiconfig emit --as` gives it; and all that apply at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aiconfig.candidate import ENGINES
from aiconfig.emit.bench import bench_files
from aiconfig.emit.dynamo import dynamo_files
from aiconfig.emit.kube import kube_files
from aiconfig.emit.launch import launch_files
from aiconfig.emit.llmd import llmd_files
from aiconfig.emit.plan import Plan
from aiconfig.emit.verify import verify_files
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from twin.config_text import to_toml
from twin.perf.names import pick


def twin_files(plan: Plan) -> dict[str, str]:
    """The same deployment for `twin replay` and `twin serve`."""
    if plan.config is None:
        raise ConfigError("--as twin needs the twin's configuration of the candidate, and none was given")
    return {"best.toml": to_toml(plan.config)}


KINDS: Mapping[str, Callable[[Plan], Mapping[str, str]]] = {
    **dict.fromkeys(ENGINES, launch_files),
    "twin": twin_files,
    "k8s": kube_files,
    "dynamo": dynamo_files,
    "llm-d": llmd_files,
    "bench": bench_files,
    "verify": verify_files,
}
"""What `--as` takes. A launch command is that of the engine that was chosen, never of another."""


@frozen
class Emitted:
    """Files by path, and why others are missing."""

    files: Mapping[str, str]
    left_out: tuple[str, ...] = ()


HAS_EFFECT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ENGINES, ("engine_version", "checkpoint", "host_gpus")),
    "twin": (),
    "k8s": ("engine_version", "checkpoint", "host_gpus", "image", "name"),
    "dynamo": ("engine_version", "checkpoint", "host_gpus", "image", "name", "dynamo_version"),
    "llm-d": ("engine_version", "checkpoint", "host_gpus", "image", "name"),
    "bench": ("checkpoint",),
    "verify": ("checkpoint",),
}
"""What can be said of a plan beside its candidate, and in which kinds of files it shows."""


def check_effect(kind: str, given: Mapping[str, object]) -> None:
    """Raises `ConfigError` for a kind that there is not, and for what is given (not None) and would change nothing in
    its files."""
    known = pick("--as", kind, HAS_EFFECT)
    for key, value in given.items():
        if value is not None and key not in known:
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{option} {value}: has no effect on --as {kind}; leave one out")


def emit(plan: Plan, kind: str) -> Mapping[str, str]:
    """The files of one kind by path. Raises `ConfigError` or `CapabilityError` where they cannot be written."""
    make = pick("--as", kind, KINDS)
    if kind in ENGINES and kind != plan.engine:
        raise ConfigError(
            f"--as {kind}: this deployment was chosen for {plan.engine}; another engine needs a search of its own "
            f"(--engine {kind})"
        )
    return make(plan)


def emit_all(plan: Plan) -> Emitted:
    """The files of every kind that can be written, best.toml apart, and one line for each that cannot."""
    files: dict[str, str] = {}
    left_out = []
    for kind in (plan.engine, *(kind for kind in KINDS if kind not in (*ENGINES, "twin"))):
        try:
            files |= emit(plan, kind)
        except (CapabilityError, ConfigError) as error:
            left_out.append(f"no files for --as {kind}: {error}")
    return Emitted(files=files, left_out=tuple(left_out))


def write(files: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Writes the files below the folder, programs executable. The caller has made sure that nothing is in the way."""
    written = []
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix in (".sh", ".py"):
            path.chmod(0o755)
        written.append(path)
    return tuple(written)
