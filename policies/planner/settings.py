"""The knobs of the planner, checked once: their defaults, and what they must keep to.

A value out of its range raises ConfigError, naming the key, the value, the limit and the next step. Seconds throughout;
whoever reads a configuration in milliseconds converts at the edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, get_args

from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.planner.checks import above_zero, one_of, within
from policies.planner.forecast.build import ForecastSettings
from policies.planner.lookahead_settings import LookaheadSettings
from policies.planner.step_model import StepCoefficients

Mode = Literal["disagg", "agg", "prefill", "decode"]
Target = Literal["throughput", "latency", "load", "sla"]
DriftPolicy = Literal["adopt", "enforce"]

ROLES: Mapping[str, tuple[Role, ...]] = MappingProxyType(
    {
        "disagg": (Role.PREFILL, Role.DECODE),
        "agg": (Role.MIXED,),
        "prefill": (Role.PREFILL,),
        "decode": (Role.DECODE,),
    }
)
"""The roles that a mode plans."""


@frozen
class PoolSettings:
    """Workers of one role, started from `group`; `engine_num_gpu` GPUs each (None: not known), of which there are to be
    `min_endpoint` at least (0: none may do).

    `max_num_seqs`, `max_batched_tokens` and `max_kv_tokens` bound one engine; `context_tokens` is what queued prompts
    are measured by in the easy modes (None: `max_batched_tokens`); `nextn` tokens are drafted ahead. `prior` is what a
    step costs as long as nothing better is known. `up_above` and `down_below` are the own thresholds of target `load`:
    share of KV in use (decode, mixed), or queued prompt tokens over `context_tokens` (prefill).
    """

    role: Role
    group: str
    engine_num_gpu: int | None = 1
    min_endpoint: int = 1
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_kv_tokens: int = 1_048_576
    context_tokens: int | None = None
    nextn: int = 0
    prior: StepCoefficients | None = None
    up_above: float | None = None
    down_below: float | None = None

    def __post_init__(self) -> None:
        for key in ("max_num_seqs", "max_batched_tokens", "max_kv_tokens"):
            within(key, getattr(self, key), 1)
        within("engine_num_gpu", self.engine_num_gpu, 1)
        within("context_tokens", self.context_tokens, 1)
        within("min_endpoint", self.min_endpoint, 0)
        within("nextn", self.nextn, 0)
        if self.up_above is not None and self.down_below is not None and self.down_below >= self.up_above:
            raise ConfigError(
                f"planner.down_below is {self.down_below} and planner.up_above {self.up_above} for {self.role.value} "
                "workers; to shrink must take less load than to grow"
            )

    @property
    def gpus(self) -> int:
        """GPUs of one worker; 1 where nobody says and no budget needs it."""
        return 1 if self.engine_num_gpu is None else self.engine_num_gpu


@frozen
class PlannerSettings:
    """Everything that the planner may read; docs/planner.md has the table. `pools`: one for each role of the mode.

    `throughput_scaling` and `load_scaling` None: as the target has it. `max_gpu_budget` and `min_gpu_budget` None: no
    bound. `confirm`: a connector ends each decision with ScaleDone or ScaleFailed, and nothing new is ordered before.
    """

    pools: tuple[PoolSettings, ...]
    mode: Mode = "disagg"
    optimization_target: Target = "throughput"
    ttft_s: float = 0.5
    itl_s: float = 0.05
    throughput_adjustment_interval_s: float = 180.0
    load_adjustment_interval_s: float = 5.0
    throughput_scaling: bool | None = None
    load_scaling: bool | None = None
    max_throughput_scaling_replicas: int = 8
    max_gpu_budget: int | None = 8
    min_gpu_budget: int | None = None
    load_predictor: str = "kalman"
    forecast: ForecastSettings = ForecastSettings()
    max_num_fpm_samples: int = 64
    fpm_sample_bucket_size: int = 16
    load_min_observations: int = 5
    load_scaling_down_sensitivity: float = 0.8
    hold_s: float = 600.0
    no_data_alarm_s: float = 60.0
    down_after_ticks: int = 1
    up_cooldown_s: float = 0.0
    down_cooldown_s: float = 0.0
    warmup_skip_s: float = 30.0
    warmup_skip_passes: int = 20
    startup_s: float = 120.0
    drain_timeout_s: float = 900.0
    scale_timeout_s: float = 1800.0
    retry_backoff_s: float = 10.0
    alarm_after_failures: int = 3
    drift_policy: DriftPolicy = "adopt"
    confirm: bool = False
    advisory: bool = False
    seed: int = 0
    lookahead: LookaheadSettings | None = None

    def __post_init__(self) -> None:
        for key, known in (("mode", Mode), ("optimization_target", Target), ("drift_policy", DriftPolicy)):
            one_of(key, getattr(self, key), get_args(known))
        for key in ("ttft_s", "itl_s", "throughput_adjustment_interval_s", "load_adjustment_interval_s"):
            above_zero(key, getattr(self, key))
        for key in _AT_LEAST_ZERO:
            within(key, getattr(self, key), 0)
        for key in ("max_throughput_scaling_replicas", "max_num_fpm_samples", "load_min_observations"):
            within(key, getattr(self, key), 1)
        within("down_after_ticks", self.down_after_ticks, 1)
        within("load_scaling_down_sensitivity", self.load_scaling_down_sensitivity, 0.01, 1)
        if math.isqrt(max(0, self.fpm_sample_bucket_size)) ** 2 != self.fpm_sample_bucket_size or not (
            self.fpm_sample_bucket_size
        ):
            raise ConfigError(
                f"planner.fpm_sample_bucket_size is {self.fpm_sample_bucket_size}, it must be a perfect square (1, 4, "
                "9, 16, ...): two axes are cut alike"
            )
        self._check_pools()
        self._check_loops()
        self._check_budget()

    def _check_pools(self) -> None:
        roles = tuple(pool.role for pool in self.pools)
        if sorted(r.value for r in roles) != sorted(r.value for r in ROLES[self.mode]):
            wanted = ", ".join(role.value for role in ROLES[self.mode])
            given = ", ".join(role.value for role in roles) or "none"
            raise ConfigError(f"planner.mode {self.mode} plans workers of role {wanted}, and the pools are {given}")

    def _check_loops(self) -> None:
        if not (self.scales_throughput or self.scales_load):
            raise ConfigError("planner.throughput_scaling and planner.load_scaling are both off; turn one on")
        slow, fast = self.throughput_adjustment_interval_s, self.load_adjustment_interval_s
        if self.scales_throughput and self.scales_load and fast >= slow:
            raise ConfigError(
                f"planner.load_adjustment_interval is {fast:g} s, it must be shorter than "
                f"throughput_adjustment_interval ({slow:g} s) where both loops run"
            )
        if self.lookahead is not None and not self.scales_throughput:
            raise ConfigError("planner.lookahead asks at the throughput interval; set optimization_target = sla")

    def _check_budget(self) -> None:
        most, least = self.max_gpu_budget, self.min_gpu_budget
        within("max_gpu_budget", most, 0)
        within("min_gpu_budget", least, 0)
        if most is None and least is None:
            return
        unknown = [pool.role.value for pool in self.pools if pool.engine_num_gpu is None]
        if unknown:
            raise ConfigError(
                f"planner.engine_num_gpu of {', '.join(unknown)} workers is not known, and a GPU budget is set: it "
                "could not be kept; say how many GPUs one worker has, or set no budget"
            )
        if most is not None and self.least_gpus > most:
            raise ConfigError(
                f"planner.min_endpoint needs {self.least_gpus} GPUs, and planner.max_gpu_budget is {most}; lower the "
                "one or raise the other"
            )
        if most is not None and least is not None and least > most:
            raise ConfigError(f"planner.min_gpu_budget is {least}, above max_gpu_budget ({most})")

    @property
    def scales_throughput(self) -> bool:
        """Whether the slow loop runs, which computes how many workers a forecast needs."""
        return self.optimization_target == "sla" if self.throughput_scaling is None else self.throughput_scaling

    @property
    def scales_load(self) -> bool:
        """Whether the fast loop runs, which looks at queues and running batches."""
        return True if self.load_scaling is None else self.load_scaling

    @property
    def least_gpus(self) -> int:
        """GPUs of the smallest cluster that keeps every minimum."""
        return sum(pool.min_endpoint * pool.gpus for pool in self.pools)

    @property
    def tick_s(self) -> float:
        """The greatest common divisor of the intervals that run, in whole milliseconds."""
        running = [
            round(interval_s * 1000)
            for interval_s, on in (
                (self.throughput_adjustment_interval_s, self.scales_throughput),
                (self.load_adjustment_interval_s, self.scales_load),
            )
            if on
        ]
        return max(1, math.gcd(*running)) / 1000

    @property
    def horizon(self) -> int:
        """Intervals ahead that an order of now must serve: until it is ready, and the interval after that."""
        interval_s = self.throughput_adjustment_interval_s
        return math.ceil((interval_s + self.startup_s) / interval_s - 1e-9)

    @property
    def notices(self) -> tuple[str, ...]:
        """What was set and has no effect."""
        if self.optimization_target != "sla":
            return (f"planner.ttft and planner.itl are not used with optimization_target = {self.optimization_target}",)
        return ()

    def pool(self, role: Role) -> PoolSettings:
        return next(pool for pool in self.pools if pool.role is role)


PRESETS: Mapping[str, Mapping[str, int | float]] = MappingProxyType(
    {"calm": MappingProxyType({"down_after_ticks": 12, "up_cooldown_s": 0.0, "down_cooldown_s": 300.0})}
)
"""Keys that are set together, by a name."""


def with_preset(settings: PlannerSettings, name: str) -> PlannerSettings:
    """The settings with those of a preset. Raises ConfigError for one that is not known."""
    one_of("preset", name, tuple(PRESETS))
    return replace(settings, **PRESETS[name])  # type: ignore[arg-type]


_AT_LEAST_ZERO = (
    "hold_s",
    "no_data_alarm_s",
    "up_cooldown_s",
    "down_cooldown_s",
    "warmup_skip_s",
    "warmup_skip_passes",
    "startup_s",
    "drain_timeout_s",
    "scale_timeout_s",
    "retry_backoff_s",
    "alarm_after_failures",
    "seed",
)
