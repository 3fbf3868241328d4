"""The package aiconfigurator-core, which the latency model `silicon` asks: found, named in its words, tried out.

It is imported when that model is asked for, and never otherwise. Nothing is downloaded: what the package does not carry
is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen
from twin.perf.memory import Placement
from twin.perf.names import nearest
from twin.perf.protocol import PrefillChunk, Provenance
from twin.perf.silicon import PACKAGE, Answer, Handle, SiliconLatency, answer
from twin.perf.tables import shipped

MADE_FOR = "0.12.0"
"""The version whose answers this was written for; the extra `silicon` installs it."""


@frozen
class Names:
    """What the user calls things in the package's words; empty: by our own names and formats."""

    model_id: str = ""
    gemm: str = ""
    moe: str = ""


def silicon(placed: Placement, engine: str, where: str, names: Names) -> SiliconLatency:
    """The model of a worker. Raises CapabilityError without the package, and for what it cannot price."""
    layout = placed.layout
    layout.check(placed.model)
    if layout.dp > 1 or layout.pp > 1:
        raise CapabilityError(
            f"{where}: dp = {layout.dp} and pp = {layout.pp}; in this version it prices workers with dp = 1 and pp = 1 "
            "(the roofline prices others)"
        )
    sdk = _package(where)
    identity = _identity(placed, where, names.model_id)
    system = _called("gpus", placed.gpu.name, where, "gpu")
    options = _options(placed, where, names)
    handle = _priced(placed, engine, where, lambda: _compiled(sdk, identity, system, engine, options))
    built = SiliconLatency(handle, _provenance(identity, system, engine, options))
    _priced(placed, engine, where, lambda: _ask_each_kind(built))
    return built


def _package(where: str) -> Any:
    try:
        return import_module("aiconfigurator_core.sdk")
    except ImportError as error:
        raise CapabilityError(
            f"{where}: needs the package {PACKAGE} {MADE_FOR}, which is not installed ({error}); "
            "pip install 'dynatwin[silicon]'"
        ) from error


def _compiled(sdk: Any, identity: str, system: str, engine: str, options: Mapping[str, object]) -> Handle:
    """The package's engine. Its log tells of the tables of all models; what concerns this one it raises."""
    log = logging.getLogger("aiconfigurator_core")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        handle: Handle = sdk.EngineHandle.compile(identity, system, engine, **options)
    finally:
        log.setLevel(level)
    return handle


def _ask_each_kind(built: SiliconLatency) -> None:
    """A gap in the tables shows when it is asked for: before the run, not in it."""
    built.decode_piece(1, 1000)
    built.step_s([PrefillChunk(128, 0, 0, True)], 0, 0, 0, 0)
    built.step_s([PrefillChunk(128, 512, 0, True)], 4, 4000, 0, 0)


def _priced(placed: Placement, engine: str, where: str, ask: Callable[[], Answer]) -> Answer:
    try:
        return answer(ask)
    except CapabilityError as error:
        raise CapabilityError(f"{where}: no price for {placed.label()} with {engine}: {error}") from error


# ---------------------------------------------------------------- in the package's words


@cache
def _words() -> Mapping[str, Mapping[str, str]]:
    return shipped("silicon.toml")  # type: ignore[return-value]


def _called(what: str, name: str, where: str, key: str) -> str:
    words = _words()[what]
    if name in words:
        return words[name]
    guess = nearest(name, words)
    hint = f"; the nearest one that does is {guess}" if guess else ""
    raise CapabilityError(f"{where}: {key} = {name} has no counterpart in {PACKAGE}{hint}")


def _identity(placed: Placement, where: str, model_id: str) -> str:
    """A model that the package carries, or a directory with a config.json: for any other name it would go online."""
    if not model_id:
        return _called("models", placed.model.name, where, "model")
    if model_id not in _words()["models"].values() and not (Path(model_id) / "config.json").is_file():
        known = ", ".join(sorted(_words()["models"].values()))
        raise ConfigError(
            f"{where}: model_id = {model_id!r} is neither a directory with a config.json nor one of {known}"
        )
    return model_id


def _options(placed: Placement, where: str, names: Names) -> dict[str, object]:
    """Keywords of the package's `compile`: the layout, and how products are computed. mxfp4 it reads in the config."""
    layout, experts = placed.layout, placed.model.experts
    found: dict[str, object] = {"tp_size": layout.tp, "kvcache_quant_mode": _called("kv", placed.kv, where, "kv")}
    if found["kvcache_quant_mode"] == "bfloat16":
        found["fmha_quant_mode"] = "bfloat16"  # else it takes what an FP8 checkpoint would have
    usual = (
        ""
        if placed.weights == "mxfp4" or (names.gemm and (names.moe or experts is None))
        else _called("dense" if experts is None else "experts", placed.weights, where, "weights")
    )
    if names.gemm or usual:
        found["gemm_quant_mode"] = names.gemm or usual
    if experts is not None:
        found |= {"moe_ep_size": layout.ep, "moe_tp_size": layout.tp // layout.ep}
        if names.moe or usual:
            found["moe_quant_mode"] = names.moe or usual
    return found


def _provenance(identity: str, system: str, engine: str, options: Mapping[str, object]) -> Provenance:
    try:
        release = version(PACKAGE)
    except PackageNotFoundError:
        release = "of unknown version"
    modes = ", ".join(str(options[name]) for name in ("gemm_quant_mode", "moe_quant_mode") if name in options)
    kv = options["kvcache_quant_mode"]
    notes = ["client and server path not included (tokeniser, HTTP, streaming)"]
    if release != MADE_FOR:
        notes.append(f"made for {PACKAGE} {MADE_FOR}: its names and answers may have changed")
    return Provenance(
        name="silicon",
        source=f"{PACKAGE} {release}: {identity} on {system} TP{options['tp_size']}, {modes or 'as its config says'}, "
        f"{kv} KV",
        engine_version=_engine_version(system, engine),
        extrapolates=True,
        notes=tuple(notes),
    )


def _engine_version(system: str, engine: str) -> str | None:
    """Of which engine release its tables are; None where it does not say."""
    try:
        found = import_module("aiconfigurator_core.sdk.perf_database").resolve_query_version(system, engine, "current")
    except Exception:
        return None
    return f"{engine} {found}"
