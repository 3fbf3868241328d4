"""One worker more or one less, by what runs and waits in the engines now.

    target       one more                                   one less: every engine, with N/(N−1) of its load
    sla          every engine misses its limit              would keep it with a margin s
    throughput   any: prompts queued ≥ 1 context, KV > 1    prompts < 0.1, KV < 0.6
    latency      any: prompts queued ≥ 0.1, KV > 0.4        no prompts, KV < 0.1
    load         any at or above its own threshold          all at or below the other one

What N workers carry, N − 1 will have to: none goes where the rest would then be at the threshold for one more.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cluster.ids import Role
from policies.cluster.ticks import PlanReason
from policies.frozen import frozen
from policies.planner.capacity import Limits, Work, queued_ttft_s
from policies.planner.samples import Engine
from policies.planner.settings import PoolSettings
from policies.planner.step_model import StepCoefficients

UP, DOWN, STAY = PlanReason.SCALE_UP, PlanReason.SCALE_DOWN, PlanReason.NO_CHANGE
REFUSED = PlanReason.REFUSED_CONSOLIDATION


@frozen
class Vote:
    """How many workers, why; `ttft_s` and `itl_s` are the worst estimates over the engines (None: not estimated)."""

    workers: int
    reason: PlanReason
    ttft_s: float | None = None
    itl_s: float | None = None


@frozen
class Threshold:
    """One signal of the easy modes: at what it takes one more, below what one less. `strictly`: up only above it.
    `or_equal`: down also at it."""

    up: float
    down: float
    strictly: bool = False
    or_equal: bool = False

    def grows(self, value: float) -> bool:
        return value > self.up if self.strictly else value >= self.up

    def shrinks(self, value: float) -> bool:
        return value <= self.down if self.or_equal else value < self.down


QUEUES = {"throughput": Threshold(up=1.0, down=0.1), "latency": Threshold(up=0.1, down=0.0, or_equal=True)}
"""Queued prompt tokens over context tokens."""
FILLS = {
    "throughput": Threshold(up=1.0, down=0.6, strictly=True),
    "latency": Threshold(up=0.4, down=0.1, strictly=True),
}
"""KV tokens that run and wait over those that an engine has room for."""


def spread(n: int, load: float) -> float:
    """The load of each of n workers once one of them has gone."""
    return load * n / (n - 1)


def consolidates(n: int, utilisation: float, most: float) -> bool:
    """Whether n equally used workers may become n − 1, which then are at most so full (case C18a)."""
    return n > 1 and spread(n, utilisation) <= most


# ---------------------------------------------------------------- by promised latency


def by_sla(
    n: int,
    engines: Sequence[Engine],
    cost: StepCoefficients,
    pool: PoolSettings,
    work: Work,
    limits: Limits,
    sensitivity: float,
) -> Vote:
    """For `n` workers whose `engines` (one or more each) are all known. Cost in seconds, limits too."""
    checks: list[_Prompts | _Tokens] = []
    if pool.role is not Role.DECODE:
        checks.append(_Prompts(cost, pool, work, limits.ttft_s, sensitivity))
    if pool.role is not Role.PREFILL:
        checks.append(_Tokens(cost, pool, work, limits.itl_s, sensitivity))
    estimates = {type(check): max((check.now_s(e) for e in engines), default=0.0) for check in checks}
    ttft_s, itl_s = estimates.get(_Prompts), estimates.get(_Tokens)
    if engines and any(all(check.misses(e) for e in engines) for check in checks):
        if any(check.hopeless() for check in checks):
            return Vote(workers=n, reason=PlanReason.SLA_UNREACHABLE, ttft_s=ttft_s, itl_s=itl_s)
        return Vote(workers=n + 1, reason=UP, ttft_s=ttft_s, itl_s=itl_s)
    if n <= 1 or not engines:
        return Vote(workers=n, reason=STAY, ttft_s=ttft_s, itl_s=itl_s)
    if all(check.fits(e, n) for check in checks for e in engines):
        return Vote(workers=n - 1, reason=DOWN, ttft_s=ttft_s, itl_s=itl_s)
    calm = all(not check.misses(e) for check in checks for e in engines)
    return Vote(workers=n, reason=REFUSED if calm else STAY, ttft_s=ttft_s, itl_s=itl_s)


class _Prompts:
    """Time to first token of the next prompt."""

    def __init__(
        self, cost: StepCoefficients, pool: PoolSettings, work: Work, limit_s: float, sensitivity: float
    ) -> None:
        self._cost, self._pool, self._work = cost, pool, work
        self._limit_s, self._sensitivity = limit_s, sensitivity

    def now_s(self, engine: Engine) -> float:
        return self._at(engine.queued_prefill_tokens, self._kv(engine))

    def misses(self, engine: Engine) -> bool:
        return self.now_s(engine) > self._limit_s

    def hopeless(self) -> bool:
        """Whether an idle worker misses it too: then one more does not help."""
        return self._at(0.0, 0.0) > self._limit_s

    def fits(self, engine: Engine, n: int) -> bool:
        """With its share of one worker less: what the queue adds is within s of what the limit leaves for it."""
        kv = spread(n, self._kv(engine))
        alone_s = self._at(0.0, kv)
        budget_s = self._limit_s - alone_s
        if budget_s <= 0:
            return False
        return self._at(spread(n, engine.queued_prefill_tokens), kv) - alone_s < budget_s * self._sensitivity

    def _at(self, queued: float, kv: float) -> float:
        return queued_ttft_s(self._cost, self._pool, queued, self._work, kv)

    def _kv(self, engine: Engine) -> float:
        """Beside decodes, a prompt's steps read their KV; a prefill worker has none."""
        return 0.0 if self._pool.role is Role.PREFILL else engine.kv_tokens


class _Tokens:
    """Time between tokens of those that run, with those that were preempted."""

    def __init__(
        self, cost: StepCoefficients, pool: PoolSettings, work: Work, limit_s: float, sensitivity: float
    ) -> None:
        self._cost, self._pool, self._work = cost, pool, work
        self._limit_s, self._sensitivity = limit_s, sensitivity

    def now_s(self, engine: Engine) -> float:
        return self._at(self._x(engine), engine.kv_tokens)

    def misses(self, engine: Engine) -> bool:
        return self.now_s(engine) > self._limit_s

    def hopeless(self) -> bool:
        """Whether one sequence alone misses it too."""
        return self._at(1.0, self._work.context) > self._limit_s

    def fits(self, engine: Engine, n: int) -> bool:
        """With its share of one worker less: there is room for the KV, and the limit is kept with the margin. Queued
        prompts of a mixed worker will hold KV too."""
        held = engine.kv_tokens
        if self._pool.role is Role.MIXED:
            held += engine.queued_prefill_tokens
        kv = spread(n, held)
        if kv >= self._pool.max_kv_tokens:
            return False
        return self._at(spread(n, self._x(engine)), kv) < self._limit_s * self._sensitivity

    def _x(self, engine: Engine) -> float:
        return engine.decode_requests if self._pool.role is Role.DECODE else engine.scheduled_prefill_tokens

    def _at(self, x: float, kv: float) -> float:
        return self._cost.seconds(x, kv) / self._work.accept_length


# ---------------------------------------------------------------- by thresholds


def by_thresholds(n: int, engines: Sequence[Engine], pool: PoolSettings, target: str) -> Vote:
    """For targets throughput, latency and load; with `load` a pool's own thresholds stand for both signals."""
    signals = [(limit, [_signal(kind, e, pool) for e in engines]) for kind, limit in _limits(pool, target)]
    signals = [(limit, values) for limit, values in signals if values]
    if any(limit.grows(value) for limit, values in signals for value in values):
        return Vote(workers=n + 1, reason=UP)
    if n <= 1 or not signals:
        return Vote(workers=n, reason=STAY)
    if not all(limit.shrinks(value) for limit, values in signals for value in values):
        return Vote(workers=n, reason=REFUSED if any(_too_full(n, *one) for one in signals) else STAY)
    if any(_too_full(n, limit, values) for limit, values in signals):
        return Vote(workers=n, reason=REFUSED)
    return Vote(workers=n - 1, reason=DOWN)


def _too_full(n: int, limit: Threshold, values: Sequence[float]) -> bool:
    return spread(n, max(values)) >= limit.up


def _limits(pool: PoolSettings, target: str) -> list[tuple[str, Threshold]]:
    if target == "load":
        if pool.up_above is None or pool.down_below is None:
            return []
        own = Threshold(up=pool.up_above, down=pool.down_below, or_equal=True)
        return [("queue" if pool.role is Role.PREFILL else "fill", own)]
    both = [("queue", QUEUES[target]), ("fill", FILLS[target])]
    return {Role.PREFILL: both[:1], Role.DECODE: both[1:], Role.MIXED: both}[pool.role]


def _signal(kind: str, engine: Engine, pool: PoolSettings) -> float:
    if kind == "queue":
        return engine.queued_prefill_tokens / (pool.context_tokens or pool.max_batched_tokens)
    return engine.kv_tokens / pool.max_kv_tokens
