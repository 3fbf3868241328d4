"""What one engine can do within its limits: the batch that serves most, and its latency.

For every batch b that fits an engine, prefill serves b / T(b · isl_eff) requests a second and decode
b / (osl · itl(b)); of those that keep the limits the fastest is taken. Where none does, the fastest of all is, and
said so: no number of workers helps a limit that one idle worker misses. Seconds, tokens, requests per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from policies.cluster.ids import Role
from policies.frozen import frozen
from policies.planner.settings import PoolSettings
from policies.planner.step_model import StepCoefficients

_MOST_CANDIDATES = 128
_MOST_HIT = 0.95
_EPS = 1e-9


@frozen
class Work:
    """One request as it is on average: tokens in and out, share of the prompt in a cache, tokens per decode step."""

    isl: float
    osl: float
    hit_rate: float = 0.0
    accept_length: float = 1.0

    @property
    def isl_eff(self) -> int:
        """Prompt tokens that are computed, 1 at least."""
        return max(1, math.ceil(self.isl * (1 - min(self.hit_rate, _MOST_HIT)) - _EPS))

    @property
    def context(self) -> float:
        """Tokens of KV that a sequence holds half-way through its answer."""
        return self.isl + self.osl // 2


@frozen
class Limits:
    """What is promised: seconds to the first token, seconds between tokens."""

    ttft_s: float
    itl_s: float


@frozen
class Capacity:
    """The best batch of one engine. `unreachable`: no batch keeps the limits."""

    batch: int
    rps: float
    ttft_s: float | None = None
    itl_s: float | None = None
    unreachable: bool = False


def chunked_s(cost: StepCoefficients, tokens: float, most_tokens: int, kv: float = 0.0) -> float:
    """Seconds to compute `tokens` of prompt in steps of at most `most_tokens`; one empty step for none."""
    full, rest = divmod(tokens, most_tokens)
    seconds = full * cost.seconds(most_tokens, kv)
    return seconds + cost.seconds(rest, kv) if rest > 0 or full == 0 else seconds


def queued_ttft_s(cost: StepCoefficients, pool: PoolSettings, queued: float, work: Work, kv: float = 0.0) -> float:
    """Time to first token of one more average prompt behind `queued` tokens of prompt (cached shares included)."""
    tokens = math.ceil((queued + work.isl) * (1 - min(work.hit_rate, _MOST_HIT)) - _EPS)
    return chunked_s(cost, max(1, tokens), pool.max_batched_tokens, kv)


def capacity(role: Role, cost: StepCoefficients, pool: PoolSettings, work: Work, limits: Limits) -> Capacity:
    """Of one engine of a role, for requests that are all average."""
    if role is Role.PREFILL:
        most = 1 if work.isl_eff > pool.max_batched_tokens else pool.max_batched_tokens // work.isl_eff
        return _best(lambda b: _prefill(b, cost, pool, work, limits), min(pool.max_num_seqs, most))
    most = int(pool.max_kv_tokens // max(1.0, work.context))
    at = _decode if role is Role.DECODE else _mixed
    return _best(lambda b: at(b, cost, pool, work, limits), max(1, min(pool.max_num_seqs, most)))


def _prefill(b: int, cost: StepCoefficients, pool: PoolSettings, work: Work, limits: Limits) -> Capacity:
    seconds = chunked_s(cost, b * work.isl_eff, pool.max_batched_tokens)
    return Capacity(batch=b, rps=b / seconds, ttft_s=seconds, unreachable=seconds > limits.ttft_s)


def _decode(b: int, cost: StepCoefficients, _: PoolSettings, work: Work, limits: Limits) -> Capacity:
    itl_s = cost.seconds(b, b * work.context) / work.accept_length
    return Capacity(batch=b, rps=b / (max(1.0, work.osl) * itl_s), itl_s=itl_s, unreachable=itl_s > limits.itl_s)


def _mixed(b: int, cost: StepCoefficients, pool: PoolSettings, work: Work, limits: Limits) -> Capacity | None:
    """Beside b decodes, each step computes the prompts that keep b running; None where these do not fit it."""
    osl = max(1.0, work.osl)
    prompt = math.ceil(b * work.accept_length * work.isl_eff / osl - _EPS)
    if prompt > pool.max_batched_tokens - b and b > 1:
        return None
    kv = b * work.context
    itl_s = cost.seconds(prompt, kv) / work.accept_length
    ttft_s = chunked_s(cost, prompt + work.isl_eff, pool.max_batched_tokens, kv)
    missed = ttft_s > limits.ttft_s or itl_s > limits.itl_s
    return Capacity(batch=b, rps=b / (osl * itl_s), ttft_s=ttft_s, itl_s=itl_s, unreachable=missed)


def _best(at: Callable[[int], Capacity | None], most: int) -> Capacity:
    """The fastest batch of 1 to `most` that keeps the limits, else the fastest of all.

    Above 128 candidates these lie evenly, and then every batch between the neighbours of the best is looked at: the
    best of evenly spread ones alone may be one sequence short, and so 1 % off.
    """
    spread = sorted({1 + (i * (most - 1)) // (_MOST_CANDIDATES - 1) for i in range(_MOST_CANDIDATES)})
    coarse = spread if most > _MOST_CANDIDATES else list(range(1, most + 1))
    first = _pick(at, coarse)
    if most <= _MOST_CANDIDATES:
        return first
    place = coarse.index(first.batch)
    low = coarse[max(0, place - 1)]
    high = coarse[min(len(coarse) - 1, place + 1)]
    return _pick(at, range(low, high + 1))


def _pick(at: Callable[[int], Capacity | None], batches: list[int] | range) -> Capacity:
    found = [one for one in map(at, batches) if one is not None]
    return max(found, key=lambda one: (not one.unreachable, one.rps, -one.batch))
