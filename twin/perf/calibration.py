"""A calibration file: coefficients with what they were fitted to, how far off they are where nothing was measured.

The nearest calibrated neighbour is chosen in order: the same engine, GPU family and model; the same engine and family;
the family; generic. What it says of its errors is that level's, never a nearer one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.tables import Entry

if TYPE_CHECKING:
    from twin.perf.coefficients import Block
    from twin.perf.memory import Placement

CALIBRATION = "calibration"
"""The table of a file that tells what it rests on; a file without one is a list of blocks."""

CALIBRATION_KEYS = ("table", "digest", "date", "statistic", "tpot_rows", "ttft_rows", "groups", "factors")
FACTOR_KEYS = ("m_decode", "m_prefill", "m_client")
BAND_KEYS = ("tpot_rows", "tpot_p50", "tpot_p90", "ttft_rows", "ttft_p50", "ttft_p90")
REACH_KEYS = ("batch", "prompt_tokens", "context_tokens", "gpus", "weights", "kv")
NEAR = "the same engine, GPU family and model"
LEVELS = {
    "model": NEAR,
    "engine": "the same engine and GPU family; this model was not measured there",
    "family": "the mean of the engines on this GPU family; this engine was not measured there",
    "generic": "the mean of all engines and GPUs; nothing like this was measured",
}


@frozen
class Band:
    """Sizes of the relative error on runs that the fit had not seen: half of them are below, nine of ten are."""

    tpot: tuple[float, float] | None
    ttft: tuple[float, float] | None

    def text(self) -> str | None:
        """For people."""
        pairs = (("TPOT", self.tpot), ("TTFT", self.ttft))
        told = [f"{name} {p50:.0%} (90th percentile {p90:.0%})" for name, (p50, p90) in _there(pairs)]
        return ", ".join(told) + " on runs not used in the fit" if told else None


@frozen
class Reach:
    """What was measured: largest batch, longest prompt and context of one request; GPUs and formats by name."""

    batch: int
    prompt_tokens: int
    context_tokens: int
    gpus: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()

    def beyond(self, placed: Placement) -> list[str]:
        """What of a worker was never measured."""
        asked = (
            ("GPU", placed.gpu.name, self.gpus),
            ("weights in", placed.weights, self.weights),
            ("KV in", placed.kv, self.kv),
        )
        strange = [(what, name, known) for what, name, known in asked if known and name not in known]
        found = [f"{what} {name}: not among what was measured ({', '.join(known)})" for what, name, known in strange]
        stages = placed.layout.pp
        return found + ([f"{stages} pipeline stages: none were measured"] if stages > 1 else [])

    def beyond_load(self, *, batch: int, prompt_tokens: int, context_tokens: int) -> list[str]:
        """What of a load is larger than anything that was measured."""
        asked = (
            ("batch of", batch, self.batch),
            ("prompt tokens", prompt_tokens, self.prompt_tokens),
            ("tokens of context", context_tokens, self.context_tokens),
        )
        return [f"{what} {value:,}: measured up to {limit:,}" for what, value, limit in asked if value > limit]


def nearest(blocks: Mapping[str, Block], file: str, about: object, engine: str, placed: Placement) -> Block:
    """The block of a calibration file that is nearest to an engine and a placed model. `about` is its [calibration]."""
    entry = Entry.of(f"{file}: [{CALIBRATION}]", about, CALIBRATION_KEYS)
    family, model = placed.gpu.family, placed.model.name
    level, block = _nearest(blocks, file, engine, family, model)
    factors = entry.values.get("factors", {})
    values = block.values
    if isinstance(factors, dict) and model in factors:
        own = Entry.of(f"{file}: [{CALIBRATION}.factors.{model}]", factors[model], FACTOR_KEYS)
        values = replace(
            values,
            m_decode=values.m_decode * own.number("m_decode", 1.0),
            m_prefill=values.m_prefill * own.number("m_prefill", 1.0),
            client_s=values.client_s * own.number("m_client", 1.0),
        )
    band = block.bands.get(model) if level == "model" else block.bands.get("")
    notes = [] if level == "model" else [f"calibrated with {LEVELS[level]}"]
    if block.reach is not None:
        notes += block.reach.beyond(placed)
    return replace(
        block,
        label=f"{block.label} for {model}" if level == "model" else block.label,
        origin=f"calibrated {entry.text('date', 'on a day not told')} with {entry.text('table', 'a table not named')}",
        error_band=band.text() if band is not None else None,
        band=band,
        level=level,
        notes=tuple(notes),
        values=values,
    )


def _nearest(blocks: Mapping[str, Block], file: str, engine: str, family: str, model: str) -> tuple[str, Block]:
    by_place = {(block.engine, block.family): block for block in blocks.values()}
    own = by_place.get((engine, family))
    if own is not None:
        return ("model" if model in own.bands else "engine"), own
    for level, place in (("family", (None, family)), ("generic", (None, None))):
        if place in by_place:
            return level, by_place[place]
    raise ConfigError(f"{file}: no block for {engine} on {family}, none for {family}, and no generic one")


def bands_of(entry: Entry) -> dict[str, Band]:
    """The error bands of a block: by model, and under "" that of the block itself."""
    bands = {}
    own = entry.table("band", BAND_KEYS)
    if own is not None:
        bands[""] = _band(own)
    models = entry.values.get("models", {})
    if not isinstance(models, dict):
        raise ConfigError(f"{entry.where}: models = {models!r} is not a table")
    for model, values in models.items():
        bands[model] = _band(Entry.of(f"{entry.where}.models.{model}", values, BAND_KEYS))
    return bands


def _band(entry: Entry) -> Band:
    pairs = [
        (entry.number(f"{metric}_p50"), entry.number(f"{metric}_p90")) if f"{metric}_p50" in entry.values else None
        for metric in ("tpot", "ttft")
    ]
    return Band(tpot=pairs[0], ttft=pairs[1])


def reach_of(entry: Entry) -> Reach | None:
    """What a block was fitted to, if it says so."""
    own = entry.table("range", REACH_KEYS)
    if own is None:
        return None
    return Reach(
        batch=own.integer("batch"),
        prompt_tokens=own.integer("prompt_tokens"),
        context_tokens=own.integer("context_tokens"),
        gpus=own.texts("gpus"),
        weights=own.texts("weights"),
        kv=own.texts("kv"),
    )


def clients_of(entry: Entry) -> dict[str, float]:
    """`client_s` by who measured, of ways of measuring that were told apart from the usual one."""
    given = entry.values.get("clients", {})
    if not isinstance(given, dict):
        raise ConfigError(f"{entry.where}: clients = {given!r} is not a table")
    own = Entry(f"{entry.where}.clients", given)
    return {name: own.positive(name) for name in given}


def _there(pairs: tuple[tuple[str, tuple[float, float] | None], ...]) -> list[tuple[str, tuple[float, float]]]:
    return [(name, pair) for name, pair in pairs if pair is not None]
