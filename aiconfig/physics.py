"""Whose figures price the steps of a search: the shipped tables and calibration, or files of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from aiconfig.reasons import Rejection
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.config import LatencyConfig
from twin.perf.coefficients import block_of, coefficient_names
from twin.perf.memory import Placement
from twin.perf.names import pick
from twin.perf.tables import from_file

USUAL_MODEL = LatencyConfig().model


@frozen
class Physics:
    """`hardware` is a file of GPUs; `coefficients` is what `[workers.latency]` takes under that name ("": the shipped
    calibration). `strict` leaves out what was never measured; it is the search's own and no business of a worker."""

    hardware: Path | None = None
    coefficients: str = ""
    strict: bool = False

    @property
    def latency(self) -> LatencyConfig:
        """What a worker of the twin is told; a file of coefficients by its whole path, from wherever it is read."""
        given: dict[str, float | str | bool] = {}
        if self.hardware is not None:
            given["hardware"] = str(self.hardware)
        if self.coefficients:
            given["coefficients"] = _from_anywhere(self.coefficients)
        return LatencyConfig(params=MappingProxyType(given))

    def check(self) -> None:
        """Raises ConfigError for coefficients that are neither a name nor a file that can be read."""
        file = self.coefficients.partition("#")[0]
        if file.endswith(".toml"):
            from_file(Path(file))
        elif self.coefficients:
            pick("--coefficients (a name, or FILE.toml)", self.coefficients, dict.fromkeys(coefficient_names()))

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the user's own that an answer depends on."""
        own = Path(self.coefficients.partition("#")[0])
        return tuple(path for path in (self.hardware, own if own.suffix == ".toml" else None) if path is not None)


SHIPPED = Physics()


def physics_of(latency: LatencyConfig, where: str) -> Physics:
    """The physics of a worker of the twin. Raises ConfigError for what a search cannot price."""
    if latency.model != USUAL_MODEL:
        raise ConfigError(f"{where}.model = {latency.model}: candidates are priced by the model {USUAL_MODEL!r}")
    given: Mapping[str, float | str | bool] = latency.params
    other = min(set(given) - {"hardware", "coefficients", "strict"}, default=None)
    if other is not None:
        raise ConfigError(
            f"{where}.{other}: a candidate has no single coefficients of its own; "
            f"put them into a file and name that (coefficients)"
        )
    hardware = given.get("hardware")
    return Physics(
        hardware=Path(str(hardware)) if hardware else None,
        coefficients=str(given.get("coefficients", "")),
        strict=bool(given.get("strict", False)),
    )


def uncalibrated(name: str, engine: str, placed: Placement, physics: Physics) -> Rejection | None:
    """Why a strict search leaves a worker out; None if workers like it were measured."""
    block = block_of(physics.coefficients, engine, placed)
    if block.level is not None and not block.notes:
        return None
    detail = "; ".join(block.notes) or f"coefficients {block.label}: {block.origin}"
    return Rejection(name=name, reason="uncalibrated", detail=detail)


def _from_anywhere(coefficients: str) -> str:
    file, mark, block = coefficients.partition("#")
    return f"{Path(file).absolute()}{mark}{block}" if file.endswith(".toml") else coefficients
