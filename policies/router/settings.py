"""The knobs of the router, checked once. No default stands here: the values come from `twin/config.py`.

A value out of its range raises ConfigError, naming the key, the value, the limit and the next step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from policies.cluster.events import TaintWeight
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.router.checks import one_of, within

if TYPE_CHECKING:  # what is off is not loaded
    from policies.router.affinity import AffinitySettings
    from policies.router.overload import BusySettings
    from policies.router.programs import ProgramSettings
    from policies.router.queue import QueueSettings

TieBreak = Literal["seeded", "lowest_id", "least_recent"]
DecodeBasis = Literal["potential", "active"]
IndexPolicy = Literal["ttl", "lru"]
IndexKind = Literal["simulated", "engine"]


@frozen
class RouterSettings:
    """Everything that a mode may read; most of it is for mode kv, whose formula `cost` states.

    `block_size` is the router's, in tokens per KV block. `seed` starts every draw. `explain` puts all terms of all
    candidates into each dispatch. `overlap_score_weight` is the older name of `prefill_load_scale`: where it is given
    it stands for it, and 0 also turns the overlap credit off.

    What is absent (None) is off and costs nothing: `queue`, `busy` limits, session `affinity`. `required_taints` and
    `preferred_taints` hold for every request, beside those of its own. `device_ratio` is for mode
    device-aware-weighted, `programs` for mode thunder. `prefill_tokens_per_s`: how fast prompts are computed, so that
    the load of one shrinks while it is (None: it counts in full until its first token).

    `peer_cache_hit_weight`: credit of a block in host memory of another worker that reads and is read (None: it counts
    for nobody but its owner).

    `index`: whose words tell what is cached, the simulator's own (`cached`) or those of engines (`engine_index`), which
    number what they say and can be asked again. `route_ranks`: each data-parallel rank of a worker is a place of its
    own; without, a worker chooses among its ranks.

    Without `use_kv_events`, what is cached is guessed from dispatches: by `index_policy` for `approximate_ttl_s`, or as
    much as a worker has room for. With them, a dispatch counts as cached for `predicted_ttl_s` (None: not at all).
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
    index_policy: IndexPolicy
    approximate_ttl_s: float
    predicted_ttl_s: float | None = None
    peer_cache_hit_weight: float | None = None
    index: IndexKind = "simulated"
    route_ranks: bool = False
    device_ratio: int | None = None
    prefill_tokens_per_s: float | None = None
    required_taints: tuple[str, ...] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    queue: QueueSettings | None = None
    busy: BusySettings | None = None
    affinity: AffinitySettings | None = None
    programs: ProgramSettings | None = None

    def __post_init__(self) -> None:
        within("block_size", self.block_size, 1, math.inf)
        within("seed", self.seed, 0, 2**64 - 1)
        for key in _AT_LEAST_ZERO:
            within(key, getattr(self, key), 0, math.inf)
        for key in _SHARES:
            within(key, getattr(self, key), 0, 1)
        one_of("tie_break", self.tie_break, get_args(TieBreak))
        within("device_ratio", self.device_ratio, 1)
        within("approximate_ttl_s", self.approximate_ttl_s, 1e-9)
        within("predicted_ttl_s", self.predicted_ttl_s, 1e-9)
        one_of("index_policy", self.index_policy, get_args(IndexPolicy))
        one_of("index", self.index, get_args(IndexKind))
        if self.route_ranks and self.index != "engine":
            raise ConfigError(
                f"route_ranks needs index = engine, and index is {self.index}: the simulator's own words tell what a "
                "worker has, not which of its ranks"
            )
        within("prefill_tokens_per_s", self.prefill_tokens_per_s, 1e-9)
        one_of("decode_basis", self.decode_basis, get_args(DecodeBasis))


_AT_LEAST_ZERO = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "overlap_score_weight",
    "decode_active_request_weight",
    "router_temperature",
)
_SHARES = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier", "peer_cache_hit_weight")
