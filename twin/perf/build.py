"""Builds the latency model that a configuration asks for. The one place that knows every model by name.

Unknown models, keys, GPUs and formats are refused with the nearest name; a key is never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.calibration import Reach
from twin.perf.coefficients import TUNABLE, block_of
from twin.perf.fixed import FixedLatency
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.linear import LinearCoefficients, LinearLatency, LinearSource
from twin.perf.memory import MEMORY_SHARE, Placement
from twin.perf.models import find_model
from twin.perf.names import pick
from twin.perf.polynomial import DEFAULT_COEFFICIENTS, PolynomialCoefficients, PolynomialLatency
from twin.perf.protocol import LatencyModel
from twin.perf.roofline import RooflineLatency
from twin.perf.tables import Entry


class LatencySettings(Protocol):
    """What the configuration says: the model's name, and that model's own keys."""

    @property
    def model(self) -> str: ...
    @property
    def params(self) -> Mapping[str, object]: ...


@frozen
class _Worker:
    """The worker that a model is built for."""

    engine: str
    model: str
    gpu: str
    layout: Layout
    weights: str
    kv: str
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class _Kind:
    keys: tuple[str, ...]
    build: Callable[[Entry, _Worker], LatencyModel]


def _fixed(given: Entry, worker: _Worker) -> LatencyModel:
    return FixedLatency(
        prefill_s=given.number("prefill_s", 0.0),
        prefill_s_per_token=given.number("prefill_s_per_token", 0.0),
        decode_s=given.number("decode_s"),
    )


def _polynomial(given: Entry, worker: _Worker) -> LatencyModel:
    if worker.pool_tokens < 1:
        raise ConfigError(f"{given.where}: needs the size of the KV pool, and it has {worker.pool_tokens} tokens")
    values = {}
    for field in fields(PolynomialCoefficients):
        usual: float = getattr(DEFAULT_COEFFICIENTS, field.name)
        falls = field.name in ("decode_quadratic_s", "decode_linear_s")
        values[field.name] = given.number(field.name, usual, at_least=-1e9 if falls else 0.0)
    return PolynomialLatency(worker.pool_tokens, PolynomialCoefficients(**values))


def _table(given: Entry, worker: _Worker) -> LatencyModel:
    from twin.perf.table import TableLatency
    from twin.perf.table_files import read_table

    extrapolate = given.flag("extrapolate")
    return TableLatency(
        read_table(Path(given.text("path")), extrapolate=extrapolate),
        extrapolate=extrapolate,
        engine_version=given.text("engine_version", "") or None,
        source=given.text("source", "") or None,
    )


def _linear(given: Entry, worker: _Worker) -> LatencyModel:
    values = {name: given.number(name, 0.0) for name in LINEAR}
    if not any(values.values()):
        raise ConfigError(f"{given.where}: every coefficient is 0; give at least one of {', '.join(values)}")
    return LinearLatency(
        LinearCoefficients(**values),
        LinearSource(
            name=given.text("source", ""),
            engine_version=given.text("engine_version", "") or None,
            error_band=given.text("error_band", "") or None,
            reach=_measured(given),
        ),
    )


def _measured(given: Entry) -> Reach | None:
    """The largest batch, prompt and context that were measured, where all three are told."""
    told = [name for name in MEASURED if name in given.values]
    if not told:
        return None
    batch, prompt_tokens, context_tokens = (int(given.number(name)) for name in MEASURED)
    return Reach(batch=batch, prompt_tokens=prompt_tokens, context_tokens=context_tokens)


def _silicon(given: Entry, worker: _Worker) -> LatencyModel:
    from twin.perf.external import Names, silicon

    placed = Placement(
        model=find_model(worker.model),
        gpu=find_gpu(worker.gpu),
        layout=worker.layout,
        weights=worker.weights,
        kv=worker.kv,
    )
    names = Names(
        model_id=given.text("model_id", ""),
        gemm=given.text("gemm_quant_mode", ""),
        moe=given.text("moe_quant_mode", ""),
    )
    return silicon(placed, worker.engine, given.where, names)


def _roofline(given: Entry, worker: _Worker) -> LatencyModel:
    pick("engine", worker.engine, MEMORY_SHARE)
    hardware = given.text("hardware", "")
    gpu = find_gpu(worker.gpu, Path(hardware) if hardware else None)
    placed = Placement(
        model=find_model(worker.model), gpu=gpu, layout=worker.layout, weights=worker.weights, kv=worker.kv
    )
    block = block_of(given.text("coefficients", ""), worker.engine, placed).overridden(given)
    if given.flag("strict") and (block.notes or block.level is None):
        why = "; ".join(block.notes) or f"coefficients {block.label} are not calibrated ({block.origin})"
        raise ConfigError(f"{given.where}: strict, and {placed.label()} is outside the calibrated range: {why}")
    return RooflineLatency(placed, block, overlap=given.flag("overlap_scheduling"))


LINEAR = tuple(field.name for field in fields(LinearCoefficients))
MEASURED = ("measured_batch", "measured_prompt_tokens", "measured_context_tokens")

MODELS: Mapping[str, _Kind] = {
    "fixed": _Kind(("prefill_s", "prefill_s_per_token", "decode_s"), _fixed),
    "polynomial": _Kind(tuple(field.name for field in fields(PolynomialCoefficients)), _polynomial),
    "linear": _Kind((*LINEAR, "source", "engine_version", "error_band", *MEASURED), _linear),
    "table": _Kind(("path", "extrapolate", "engine_version", "source"), _table),
    "roofline": _Kind(("coefficients", "hardware", "overlap_scheduling", "strict", *TUNABLE), _roofline),
    "silicon": _Kind(("model_id", "gemm_quant_mode", "moe_quant_mode"), _silicon),
}


def build_latency(
    latency_config: LatencySettings,
    *,
    engine: str,
    model: str,
    gpu: str,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    weights: str,
    kv: str,
    pool_tokens: int,
) -> LatencyModel:
    """The latency model of one worker.

    `model` is a key of `data/models.toml` or the path of a config.json, `gpu` a key of `data/hardware.toml` (or of the
    file named by the key `hardware`), `pool_tokens` the size of the worker's KV pool. Raises `ConfigError`.
    """
    kind = pick("latency model", latency_config.model, MODELS)
    where = f"workers.latency (model {latency_config.model!r})"
    given = Entry.of(where, dict(latency_config.params), kind.keys)
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep)
    worker = _Worker(
        engine=engine, model=model, gpu=gpu, layout=layout, weights=weights, kv=kv, pool_tokens=pool_tokens
    )
    return kind.build(given, worker)
