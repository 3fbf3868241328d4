"""What of the data-sheet rates an engine reaches, and its fixed costs: the fitted figures of the roofline model.

They come from `data/coefficients.toml`, a user's file of the same shape, and single keys given beside it. Never mixed
silently: the label says which block and what was overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from policies.frozen import frozen
from twin.perf.calibration import CALIBRATION, Band, Reach, bands_of, clients_of, nearest, reach_of
from twin.perf.names import pick
from twin.perf.tables import Entry, from_file, shipped

if TYPE_CHECKING:
    from twin.perf.memory import Placement

GENERIC = "generic"
SHIPPED = "coefficients.toml"
CALIBRATED = "calibrated"
"""Name of the shipped calibration, which is used where none is named."""
UNFITTED = "priors"
"""Name of the shipped coefficients of before that calibration."""
CALIBRATION_FILE = "calibration.toml"


@frozen
class Coefficients:
    """e_*: share of a rate that is reached (0 < e). Times in seconds."""

    e_bw: float  # reading weights
    e_gemm: float
    e_moe_bw: float  # reading expert weights
    e_moe: float
    e_kv: float  # reading KV
    e_attn: float  # prefill attention
    alpha_s: float  # one hop of one collective
    e_link: float
    t_launch_s: float  # per layer
    t_moe_s: float = 0.0  # per layer with experts, beside t_launch_s
    h0_s: float = 0.0  # host, per step
    h_seq_s: float = 0.0  # host, per sequence in the step
    h_prefill_s: float = 0.0  # host, if the step computes prompt tokens
    t_half_tokens: float = 0.0  # tokens at which dense products reach half their rate
    t_half_expert_tokens: float = 0.0  # tokens of one expert at which its products do
    m_decode: float = 1.0  # factor on device time, per model: pure decode steps
    m_prefill: float = 1.0  # steps with prompt tokens
    expert_imbalance: float = 1.0  # 0: perfectly balanced experts
    client_s: float = 0.0  # path outside the engine; never part of a step
    client_s_per_token: float = 0.0  # the same, per prompt token (tokeniser, body of the request)


TUNABLE = tuple(one.name for one in fields(Coefficients))
_SHARES = ("e_bw", "e_gemm", "e_moe_bw", "e_moe", "e_kv", "e_attn", "e_link", "m_decode", "m_prefill")
_KEYS = (*TUNABLE, "engine", "family", "engine_version", "error_band", "band", "models", "range", "clients")
PRIORS = "priors, not calibrated here"


@frozen
class Block:
    """Coefficients with their name and the engine and GPU family they were fitted to (None: any)."""

    label: str
    engine: str | None
    family: str | None
    engine_version: str | None
    origin: str  # whose figures they are
    error_band: str | None
    values: Coefficients
    level: str | None = None  # how near a calibrated block is to what was asked for: `calibration.LEVELS`
    band: Band | None = None  # the errors of that level
    notes: tuple[str, ...] = ()  # what a prediction with it must say
    bands: Mapping[str, Band] = field(default_factory=dict)  # by model, and the block's own under ""
    reach: Reach | None = None  # what was measured
    clients: Mapping[str, float] = field(default_factory=dict)  # client_s of other ways of measuring

    def overridden(self, given: Entry) -> Block:
        """The same with the keys of `given` in place of its own."""
        changes = {key: _number(given, key) for key in TUNABLE if key in given.values}
        if not changes:
            return self
        label = f"{self.label} with {', '.join(changes)} given"
        return replace(self, label=label, error_band=None, band=None, values=replace(self.values, **changes))


def block_for(engine: str, family: str) -> Block:
    """The shipped block of that engine and GPU family, or the generic one."""
    for block in _shipped_blocks().values():
        if block.engine == engine and block.family == family:
            return block
    return _shipped_blocks()[GENERIC]


def named_block(name: str) -> Block:
    """A shipped block by name, or the only block of a TOML file, or one of several as FILE.toml#NAME."""
    file, _, wanted = name.partition("#")
    if not file.endswith(".toml"):
        return pick("coefficients (a name, or FILE.toml)", name, _shipped_blocks())
    blocks = _blocks(from_file(Path(file)), file, "your own")
    return next(iter(blocks.values())) if len(blocks) == 1 and not wanted else pick(f"{file}: block", wanted, blocks)


def coefficient_names() -> tuple[str, ...]:
    """Every name that `block_of` knows."""
    return (CALIBRATED, UNFITTED, *_shipped_blocks())


def block_of(name: str, engine: str, placed: Placement) -> Block:
    """The block that `name` asks for: the nearest one of a calibration file ("calibrated", and without a name: of the
    shipped one), with "priors" that of the engine and GPU family among the shipped priors, or a block by name."""
    if name == UNFITTED:
        return block_for(engine, placed.gpu.family)
    if name in ("", CALIBRATED):
        blocks, about = _shipped_calibration()
        return nearest(blocks, CALIBRATION_FILE, about, engine, placed)
    if name.endswith(".toml"):
        tables = from_file(Path(name))
        if CALIBRATION in tables:
            return nearest(_blocks(tables, name, "your own"), name, tables[CALIBRATION], engine, placed)
    return named_block(name)


@cache
def _shipped_calibration() -> tuple[Mapping[str, Block], object]:
    tables = shipped(CALIBRATION_FILE)
    return _blocks(tables, CALIBRATION_FILE, CALIBRATED), tables[CALIBRATION]


@cache
def _shipped_blocks() -> Mapping[str, Block]:
    return _blocks(shipped(SHIPPED), SHIPPED, PRIORS)


def _blocks(tables: Mapping[str, object], file: str, origin: str) -> dict[str, Block]:
    entries = {
        name: Entry.of(f"{file}: [{name}]", values, _KEYS) for name, values in tables.items() if name != CALIBRATION
    }
    return {name: _block(name, entry, origin) for name, entry in entries.items()}


def _block(name: str, entry: Entry, origin: str) -> Block:
    given = {one.name: _number(entry, one.name) for one in fields(Coefficients) if _wanted(entry, one.name)}
    return Block(
        label=name,
        engine=entry.text("engine", "") or None,
        family=entry.text("family", "") or None,
        engine_version=entry.text("engine_version", "") or None,
        origin=origin,
        error_band=entry.text("error_band", "") or None,
        values=Coefficients(**given),
        bands=bands_of(entry),
        reach=reach_of(entry),
        clients=clients_of(entry),
    )


def _wanted(entry: Entry, key: str) -> bool:
    required = key.startswith("e_") or key in ("alpha_s", "t_launch_s")
    return required or key in entry.values


def _number(entry: Entry, key: str) -> float:
    return entry.positive(key) if key in _SHARES else entry.number(key)
