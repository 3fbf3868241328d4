"""What it would cost to send a request to a worker, in blocks; the lowest cost wins.

`terms` is the formula, term by term, for one candidate; `costs` gives the same numbers for all candidates of a request
at once and is what routing runs on. Both are pure: no state, no view, no chance. The formula is that of NVIDIA Dynamo's
KV router, with its later terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.router.settings import RouterSettings


class Weights(NamedTuple):
    """The parameters of the formula. `decode_leg` marks the decode side of split legs."""

    overlap_credit: float
    credit_decay: float
    prefill_load_scale: float
    host: float
    disk: float
    shared: float
    peer: float
    active_request: float
    track_prefill: bool
    decode_leg: bool = False


class Load(NamedTuple):
    """One candidate as the formula sees it.

    `decode_blocks` is the decode term as it stands (with or without this request: the caller's decode basis).
    `device_blocks` is the cached prefix in device memory, `host_blocks`, `disk_blocks`, `shared_blocks` and
    `peer_blocks` (host memory of other workers) what each lower tier adds to it.
    """

    active_prefill_tokens: float
    decode_blocks: float
    active_requests: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0
    peer_blocks: int = 0


class Terms(NamedTuple):
    """The parts of one cost, in blocks, and the cost."""

    raw_prefill_blocks: float
    credit_blocks: float
    decode_blocks: float
    request_blocks: float
    cost_blocks: float


def weights(settings: RouterSettings) -> Weights:
    """The parameters of the formula from the settings."""
    credit, scale = settings.overlap_score_credit, settings.prefill_load_scale
    if settings.overlap_score_weight is not None:
        scale = settings.overlap_score_weight
        credit = credit if scale else 0.0
    return Weights(
        overlap_credit=credit,
        credit_decay=settings.overlap_score_credit_decay,
        prefill_load_scale=scale,
        host=settings.host_cache_hit_weight,
        disk=settings.disk_cache_hit_weight,
        shared=settings.shared_cache_multiplier or 0.0,
        peer=settings.peer_cache_hit_weight or 0.0,
        active_request=settings.decode_active_request_weight,
        track_prefill=settings.track_prefill_tokens,
    )


def terms(w: Weights, isl_tokens: int, block_size: int, load: Load, least_prefill_tokens: float) -> Terms:
    """The cost of one candidate, term by term.

    `least_prefill_tokens` is the smallest `active_prefill_tokens` among the eligible candidates: a candidate loses
    overlap credit (if `credit_decay` is set) by what it has above that.
    """
    raw = 0.0
    decay = 1.0
    if w.track_prefill:
        cached = load.device_blocks + load.host_blocks + load.disk_blocks + load.shared_blocks + load.peer_blocks
        raw = (load.active_prefill_tokens + max(isl_tokens, cached * block_size)) / block_size
        if w.credit_decay > 0:
            prompt_blocks = max(1, -(-isl_tokens // block_size))
            excess_blocks = (load.active_prefill_tokens - least_prefill_tokens) / block_size
            decay = 1 / (1 + w.credit_decay * excess_blocks / prompt_blocks)
    credit = (
        w.overlap_credit * decay * load.device_blocks
        + w.host * load.host_blocks
        + w.disk * load.disk_blocks
        + w.shared * load.shared_blocks
        + w.peer * load.peer_blocks
    )
    requests = w.active_request * load.active_requests
    if w.decode_leg and not w.track_prefill and w.overlap_credit > 0:
        cost = max(load.decode_blocks - credit, 0.0) + requests
    else:
        cost = w.prefill_load_scale * max(raw - credit, 0.0) + load.decode_blocks + requests
    return Terms(raw, credit, load.decode_blocks, requests, cost)


def costs(
    w: Weights,
    isl_tokens: int,
    block_size: int,
    prefill_tokens: Sequence[float],
    decode_blocks: Sequence[float],
    requests: Sequence[int],
    device_blocks: Sequence[int],
) -> list[float]:
    """The cost of every candidate of one request, in order; equal to that of `terms` to the last bit.

    The columns are the first four fields of `Load`: for candidates that have nothing cached below device memory, and
    there no more than the prompt.
    """
    if not w.track_prefill and not w.overlap_credit:  # no term of the prompt is left
        if not w.active_request:
            return list(map(float, decode_blocks))
        request = w.active_request
        return [0.0 + decode + request * active for decode, active in zip(decode_blocks, requests, strict=True)]
    columns = zip(prefill_tokens, decode_blocks, requests, device_blocks, strict=True)
    if not w.track_prefill or w.credit_decay > 0:
        least = min(prefill_tokens)
        return [terms(w, isl_tokens, block_size, Load(*load), least).cost_blocks for load in columns]
    credit, scale, request = w.overlap_credit, w.prefill_load_scale, w.active_request
    if not request:
        return [
            scale * (rest if (rest := (prefill + isl_tokens) / block_size - credit * device) > 0.0 else 0.0) + decode
            for prefill, decode, device in zip(prefill_tokens, decode_blocks, device_blocks, strict=True)
        ]
    return [
        scale * (rest if (rest := (prefill + isl_tokens) / block_size - credit * device) > 0.0 else 0.0)
        + decode
        + request * active
        for prefill, decode, active, device in columns
    ]


def taint_factor(preferences: Sequence[float]) -> float:
    """Factor on a cost from the weights of the matching preferred taints, in (0.3679, 2.7183)."""
    return math.exp(-math.tanh(sum(preferences)))
