"""What the lines of live commands have in common: packages, interpreters of engines, pairs and numbers."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from twin.commands.replay_line import Values
from twin.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from executors.engines.kv_tiers import KvPlaces
    from twin.config import Config


def check_packages(command: str) -> None:
    """Raises CapabilityError where an extra is not installed."""
    try:
        import aiohttp  # noqa: F401
        import fastapi  # noqa: F401
        import tokenizers  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CapabilityError(f"twin {command} needs {error.name}: pip install 'dynatwin[live]'") from None


def check_kserve(values: Values) -> None:
    """Raises CapabilityError where gRPC is asked for and its extra is not installed."""
    if "kserve_grpc_port" in values and any(find_spec(name) is None for name in ("grpc", "google.protobuf")):
        raise CapabilityError("--kserve-grpc-port needs gRPC: pip install 'dynatwin[kserve]'")


COUNT_LIVE = (
    "migration_limit",
    "migration_max_seq_len",
    "retry_backoff",
    "canary_idle_s",
    "canary_timeout_s",
    "breaker_failures",
    "breaker_share",
    "breaker_requests",
    "breaker_window_s",
    "breaker_open_s",
    "grace_s",
    "drain_timeout_s",
    "response_inactivity_s",
)
"""Keys of [resilience] that change nothing in a simulation without faults, and something here: workers can be lost."""
COUNT_OF_ENGINES = (".on_cpu ", ".gpu_memory_utilization ")
"""Keys of workers that change nothing in a simulation, or nothing beside kv_blocks, and are told to real engines."""
SHARED = ("--lease", "--grace", "--drain")
"""Flags of live commands that stand for a key of the configuration, as twin.config_read.FLAGS says."""


def flags_of(values: Values) -> dict[str, object]:
    """The given ones of `SHARED`: they win over the file."""
    return {flag: values.get(flag.removeprefix("--")) for flag in SHARED}


def no_effect_live(config: Config, live: bool) -> list[str]:
    """What has no effect here: of what a simulation would pass over, that which serving passes over too."""
    counted = [*(f" resilience.{name} " for name in COUNT_LIVE), *(COUNT_OF_ENGINES if live else ())]
    return [text for text in config.no_effect if not any(key in text for key in counted)]


def pythons(values: Values) -> dict[str, Path]:
    """By engine: --python, else DYNATWIN_VLLM_PYTHON and its like, else our own environment if it has the engine."""
    from importlib.util import find_spec

    found = {}
    for kind, module in (("vllm", "vllm"), ("sglang", "sglang"), ("trtllm", "tensorrt_llm")):
        named = os.environ.get(f"DYNATWIN_{kind.upper()}_PYTHON")
        if named:
            found[kind] = Path(named)
        elif find_spec(module) is not None:
            found[kind] = Path(sys.executable)
    for kind, path in pairs_of(values, "python"):
        found[kind] = Path(path)
    for kind, python in found.items():
        if not python.exists():
            raise ConfigError(
                f"--python {kind}={python}: there is no such file; name the interpreter of its environment"
            )
    return found


def pairs_of(values: Values, name: str) -> list[tuple[str, str]]:
    """Of an option NAME=VALUE that may be given several times."""
    found = []
    for text in values.get(name, ()):
        key, equals, value = str(text).partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"--{name} {text}: write NAME=VALUE")
        found.append((key, value))
    return found


def tiers_of(values: Values) -> KvPlaces:
    """Where KV may lie below devices: --kv-disk and --kv-objects."""
    from executors.engines.kv_tiers import KvPlaces, ObjectStore

    return KvPlaces(
        disk=Path(values["kv_disk"]).resolve() if "kv_disk" in values else None,
        objects=ObjectStore.parse(values["kv_objects"]) if "kv_objects" in values else None,
    )


def whole_of(values: Values, name: str, usual: int) -> int:
    """Of an option that is a whole number, 0 or more."""
    if name not in values:
        return usual
    try:
        value = int(values[name])
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"--{name.replace('_', '-')} {values[name]}: must be a whole number, 0 or more")
    return value
