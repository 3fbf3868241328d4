"""The knobs of the router, checked once. No default stands here: the values come from `twin/config.py`.

A value out of its range raises ConfigError, naming the key, the value, the limit and the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from policies.cluster.events import TaintWeight
from policies.errors import ConfigError
from policies.router.affinity import AffinitySettings
from policies.router.checks import one_of, within
from policies.router.overload import BusySettings
from policies.router.queue import Classes, QueueClass

TieBreak = Literal["seeded", "lowest_id", "least_recent"]
DecodeBasis = Literal["potential", "active"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """When requests wait in the router, and how many may (`queue` has the order in which they go).

    A worker is busy with prompts when more than `prefill_busy_share` of what a step takes, or more than
    `prefill_busy_tokens`, is dispatched there and not computed; requests wait while `busy_worker_share` of the workers
    that they may go to are. At most `requests_per_worker` and `tokens_per_worker` wait, times those workers, none
    longer than `max_wait_s`. None: that limit does not exist.
    """

    prefill_busy_share: float | None
    prefill_busy_tokens: float | None
    busy_worker_share: float
    requests_per_worker: int | None
    tokens_per_worker: int | None
    max_wait_s: float | None
    classes: tuple[QueueClass, ...]

    def __post_init__(self) -> None:
        if self.prefill_busy_share is None and self.prefill_busy_tokens is None:
            raise ConfigError(
                "router.queue: without prefill_busy_share and prefill_busy_tokens no worker is ever busy, and nothing "
                "would wait; give one of them"
            )
        within("queue.prefill_busy_share", self.prefill_busy_share, 0)
        within("queue.prefill_busy_tokens", self.prefill_busy_tokens, 0)
        within("queue.busy_worker_share", self.busy_worker_share, 0, 1)
        within("queue.requests_per_worker", self.requests_per_worker, 0)
        within("queue.tokens_per_worker", self.tokens_per_worker, 0)
        within("queue.max_wait_s", self.max_wait_s, 0)
        Classes(self.classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything that a mode may read; most of it is for mode kv, whose formula `cost` states.

    `block_size` is the router's, in tokens per KV block. `seed` starts every draw. `explain` puts all terms of all
    candidates into each dispatch. `overlap_score_weight` is the older name of `prefill_load_scale`: where it is given
    it stands for it, and 0 also turns the overlap credit off.

    What is absent (None) is off and costs nothing: `queue`, `busy` limits, session `affinity`. `required_taints` and
    `preferred_taints` hold for every request, beside those of its own. `device_ratio` is for mode
    device-aware-weighted. `prefill_tokens_per_s`: how fast prompts are computed, so that the load of one shrinks while
    it is (None: it counts in full until its first token).
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
    device_ratio: int | None = None
    prefill_tokens_per_s: float | None = None
    required_taints: tuple[str, ...] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    queue: QueueSettings | None = None
    busy: BusySettings | None = None
    affinity: AffinitySettings | None = None

    def __post_init__(self) -> None:
        within("block_size", self.block_size, 1, math.inf)
        within("seed", self.seed, 0, 2**64 - 1)
        for key in _AT_LEAST_ZERO:
            within(key, getattr(self, key), 0, math.inf)
        for key in _SHARES:
            within(key, getattr(self, key), 0, 1)
        one_of("tie_break", self.tie_break, get_args(TieBreak))
        within("device_ratio", self.device_ratio, 1)
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
_SHARES = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier")
