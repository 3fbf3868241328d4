"""GPUs and their links, from `data/hardware.toml` and users' files of the same shape. Data-sheet rates only.

Efficiencies (what of a rate is reached) belong to the coefficients, never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.formats import MATH_RATE
from twin.perf.names import pick
from twin.perf.tables import Entry, from_file, shipped

MIB = 2**20
HOST_GPUS = 8
"""GPUs that reach each other over PCIe in one host, where there is no faster link."""

KEYS = (
    "family",
    "memory",
    "memory_mib",
    "bandwidth_tb_s",
    "bf16_tflops",
    "fp8_tflops",
    "fp4_tflops",
    "int8_tflops",
    "scale_up",
    "scale_up_gpus",
    "scale_up_gb_s",
    "pcie_gb_s",
    "nic_gb_s",
    "host_gb",
    "tdp_w",
    "source",
    "note",
)


@frozen
class Gpu:
    """One GPU. Rates per second: FLOP (dense), bytes (memory; links per direction). None: it has no such thing."""

    name: str
    family: str
    memory: str
    mem_bytes: int
    mem_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    fp4_flops: float | None
    int8_flops: float | None
    scale_up: str | None  # "switch" or "mesh"
    domain_gpus: int  # GPUs that reach each other without a network
    scale_up_bytes_per_s: float | None
    pcie_bytes_per_s: float
    nic_bytes_per_s: float | None
    host_bytes: int | None  # memory of the host, an even share for each of its GPUs; None: not known
    tdp_w: float
    source: str
    note: str

    def math_flops(self, weights: str) -> float:
        """Tensor rate for weights in this format.

        A format that the GPU cannot multiply runs at the BF16 rate and keeps its bytes (weight-only).
        """
        rates = {"fp8": self.fp8_flops, "fp4": self.fp4_flops, "int8": self.int8_flops}
        rate = rates.get(MATH_RATE.get(weights, "bf16"))
        return max(rate or 0.0, self.bf16_flops)

    def group_bytes_per_s(self, gpus: int) -> float:
        """What one of `gpus` GPUs of the same fast domain can send to the others, per direction."""
        if self.scale_up_bytes_per_s is None:
            return self.pcie_bytes_per_s
        if self.scale_up == "mesh" and gpus < self.domain_gpus:
            return self.scale_up_bytes_per_s * (gpus - 1) / (self.domain_gpus - 1)
        return self.scale_up_bytes_per_s

    def network_bytes_per_s(self) -> float:
        """What one GPU can send to another host; `ConfigError` if it has no network card."""
        if self.nic_bytes_per_s is None:
            raise ConfigError(
                f"{self.name} has no network card (nic_gb_s): a worker has at most {self.domain_gpus} of them"
            )
        return self.nic_bytes_per_s


def find_gpu(name: str, extra: Path | None = None) -> Gpu:
    """The GPU of that name; `extra` is a TOML file that adds GPUs, or overrides keys of known ones."""
    return pick("GPU", name, gpus(extra))


def gpus(extra: Path | None = None) -> Mapping[str, Gpu]:
    """Every known GPU by name."""
    if extra is None:
        return _shipped_gpus()
    own, tables = from_file(extra), shipped("hardware.toml")
    for name, values in own.items():
        known, new = tables.get(name), values
        if isinstance(known, dict) and isinstance(new, dict):
            new = {"source": f"{extra}, rest vendor data sheet", **known, **new}
        elif isinstance(new, dict):
            new = {"source": str(extra), **new}
        tables[name] = new
    return {name: _gpu(name, values, str(extra)) for name, values in tables.items()}


@cache
def _shipped_gpus() -> Mapping[str, Gpu]:
    return {name: _gpu(name, values, "hardware.toml") for name, values in shipped("hardware.toml").items()}


def _gpu(name: str, values: object, file: str) -> Gpu:
    entry = Entry.of(f"{file}: [{name}]", values, KEYS)
    scale_up = entry.text("scale_up", "")
    if scale_up not in ("", "switch", "mesh"):
        raise ConfigError(f"{entry.where}: scale_up = {scale_up!r}; it is 'switch', 'mesh' or absent")
    return Gpu(
        name=name,
        family=entry.text("family"),
        memory=entry.text("memory", ""),
        mem_bytes=entry.integer("memory_mib") * MIB,
        mem_bytes_per_s=entry.positive("bandwidth_tb_s") * 1e12,
        bf16_flops=entry.positive("bf16_tflops") * 1e12,
        fp8_flops=_scaled(entry.optional("fp8_tflops"), 1e12),
        fp4_flops=_scaled(entry.optional("fp4_tflops"), 1e12),
        int8_flops=_scaled(entry.optional("int8_tflops"), 1e12),
        scale_up=scale_up or None,
        domain_gpus=entry.integer("scale_up_gpus", None if scale_up else HOST_GPUS),
        scale_up_bytes_per_s=_scaled(entry.positive("scale_up_gb_s") if scale_up else None, 1e9),
        pcie_bytes_per_s=entry.positive("pcie_gb_s") * 1e9,
        nic_bytes_per_s=_scaled(entry.optional("nic_gb_s"), 1e9),
        host_bytes=None if (host_gb := entry.optional("host_gb")) is None else round(host_gb * 1e9),
        tdp_w=entry.positive("tdp_w"),
        source=entry.text("source", "vendor data sheet"),
        note=entry.text("note", ""),
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
