"""The knobs of the router, checked once. No default stands here: the values come from `twin/config.py`.

A value out of its range raises ConfigError, naming the key, the value, the limit and the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from policies.errors import ConfigError

TieBreak = Literal["seeded", "lowest_id", "least_recent"]
DecodeBasis = Literal["potential", "active"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything that a mode may read; most of it is for mode kv, whose formula `cost` states.

    `block_size` is the router's, in tokens per KV block. `seed` starts every draw. `explain` puts all terms of all
    candidates into each dispatch. `overlap_score_weight` is the older name of `prefill_load_scale`: where it is given
    it stands for it, and 0 also turns the overlap credit off.
    """

    mode: str
    seed: int
    block_size: int
    explain: bool
    tie_break: TieBreak
    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    overlap_score_weight: float | None
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    shared_cache_multiplier: float | None
    decode_active_request_weight: float
    router_temperature: float
    decode_basis: DecodeBasis
    track_active_blocks: bool
    track_prefill_tokens: bool
    track_output_blocks: bool
    assume_kv_reuse: bool
    use_kv_events: bool

    def __post_init__(self) -> None:
        _within("block_size", self.block_size, 1, math.inf)
        _within("seed", self.seed, 0, 2**64 - 1)
        for key in _AT_LEAST_ZERO:
            _within(key, getattr(self, key), 0, math.inf)
        for key in _SHARES:
            _within(key, getattr(self, key), 0, 1)
        _one_of("tie_break", self.tie_break, get_args(TieBreak))
        _one_of("decode_basis", self.decode_basis, get_args(DecodeBasis))


_AT_LEAST_ZERO = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "overlap_score_weight",
    "decode_active_request_weight",
    "router_temperature",
)
_SHARES = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier")


def _within(key: str, value: float | None, least: float, most: float) -> None:
    if value is None:
        return
    if not (math.isfinite(value) and least <= value <= most):
        limit = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ConfigError(f"router.{key} is {value}, it must be {limit}; change it or leave it out for its default")


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"router.{key} is {value!r}, it must be one of {', '.join(known)}")
