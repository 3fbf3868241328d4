"""The `[planner]` table: how many workers run, and who decides that (docs/planner.md). Times in seconds."""

from __future__ import annotations

from dataclasses import field

from policies.frozen import frozen
from twin.config_schema import LARGEST, LONGEST_S, key

NONE = "none"
NAMES = ("throughput", "load", "hybrid", "lookahead", "schedule")
"""Planners of ours, beside none."""


@frozen
class LookaheadConfig:
    """`[planner.lookahead]`: how the twin is asked (planner.name = lookahead)."""

    attainment: float = key(0.95, "share of requests within their limits that a plan must keep", low=0, high=1)
    seeds: int = key(2, "runs of each plan on each path of demand", low=1, high=100)
    most_plans: int = key(24, "plans that are thought of", low=1, high=1000)
    most_asked: int = key(12, "of these, plans that are simulated", low=1, high=1000)
    reach: int = key(2, "workers of a role more or fewer than now, or than the rules say", low=1, high=1000)
    change_cost_gpu_s: float = key(0.0, "GPU-seconds that each change must save", low=0, high=1e12)
    wait_s: float = key(0.0, "how long the rules' plan waits for an answer", low=0, high=LONGEST_S)
    think_s: float = key(0.0, "how long the twin takes to answer, in the run's own time", low=0, high=LONGEST_S)
    trust_s: float = key(86_400.0, "trust for so long frees answers of the rules", low=0, high=LONGEST_S)


@frozen
class PlannerConfig:
    """`[planner]`: who adds and drains workers while the run goes on."""

    name: str = key(
        NONE,
        "throughput: from a forecast; load: from queues and batches; hybrid: load, and never below throughput; "
        "lookahead: throughput, and the twin is asked; schedule: as planner.schedule says",
        choices=(NONE, *NAMES),
        plugins="dynatwin.planners",
    )
    schedule: str | None = key(
        None,
        'workers by time for planner schedule: seconds and roles, as in "0 mixed=4, 3600 mixed=8"',
        absent="none; planner schedule needs it",
    )
    preset: str | None = key(
        None,
        "keys set together: calm takes 12 ticks to agree on fewer workers, 300 s apart",
        choices=("calm",),
        absent="none",
    )
    target: str | None = key(
        None,
        "what the load loop looks at: limits of latency, or how full engines are",
        choices=("sla", "throughput", "latency", "load"),
        absent="sla where there are limits, else throughput",
    )
    ttft_s: float | None = key(
        None, "time to first token that is promised", above=0, high=LONGEST_S, absent="the limit of [sla], else 0.5"
    )
    itl_s: float | None = key(
        None, "time between tokens that is promised", above=0, high=LONGEST_S, absent="the limit of [sla], else 0.05"
    )
    throughput_adjustment_interval_s: float = key(180.0, "between forecasts", low=0.001, high=LONGEST_S)
    load_adjustment_interval_s: float = key(5.0, "between looks at the engines", low=0.001, high=LONGEST_S)
    max_throughput_scaling_replicas: int = key(
        8, "workers of a role that one forecast adds or takes", low=1, high=LARGEST
    )
    max_gpu_budget: int | None = key(
        None, "GPUs at most, those of starting and draining workers too", low=0, high=LARGEST, absent="no bound"
    )
    min_gpu_budget: int | None = key(None, "GPUs below which nobody is drained", low=0, high=LARGEST, absent="no bound")
    min_endpoint: int = key(1, "workers of each role at least", low=0, high=LARGEST)
    min_prefill: int | None = key(None, "the same for prefill workers", low=0, high=LARGEST, absent="min_endpoint")
    min_decode: int | None = key(None, "the same for decode workers", low=0, high=LARGEST, absent="min_endpoint")
    load_predictor: str = key(
        "kalman",
        "forecaster",
        choices=("constant", "moving-window", "holt", "kalman", "arima", "prophet", "seasonal-naive"),
        plugins="dynatwin.forecasters",
    )
    period: int | None = key(
        None, "intervals in a season, for prophet and seasonal-naive", low=2, high=LARGEST, absent="none is known"
    )
    harmonics: int = key(2, "of a season, for prophet", low=1, high=1000)
    kalman_q_level: float = key(1.0, "variance of the level from interval to interval", low=0, high=1e12)
    kalman_q_trend: float = key(0.1, "variance of the trend", low=0, high=1e12)
    kalman_r: float = key(10.0, "variance of what is seen", above=0, high=1e12)
    kalman_min_points: int = key(5, "values before kalman is believed", low=1, high=LARGEST)
    bootstrap: str = key(
        "model",
        "what a step costs until engines have shown it: as the run's latency model has it, or not known",
        choices=("model", "live"),
    )
    load_scaling_down_sensitivity: float = key(0.8, "share of capacity that fewer workers may fill", low=0.01, high=1)
    up_above: float | None = key(
        None, "target load: more workers above this", low=0, high=1e6, absent="as target throughput"
    )
    down_below: float | None = key(
        None, "target load: fewer below this", low=0, high=1e6, absent="as target throughput"
    )
    hold_s: float = key(600.0, "no fewer workers so long before the first traffic", low=0, high=LONGEST_S)
    down_after_ticks: int = key(1, "ticks in a row that must want fewer", low=1, high=LARGEST)
    up_cooldown_s: float = key(0.0, "from the last change to the next start", low=0, high=LONGEST_S)
    down_cooldown_s: float = key(0.0, "from the last change to the next drain", low=0, high=LONGEST_S)
    warmup_skip_s: float = key(30.0, "a young worker teaches nothing", low=0, high=LONGEST_S)
    warmup_skip_passes: int = key(20, "nor in its first samples", low=0, high=LARGEST)
    startup_s: float | None = key(
        None,
        "how long the planner takes a start to be",
        low=0,
        high=LONGEST_S,
        absent="as its workers say; where they say nothing they take 120",
    )
    drain_timeout_s: float | None = key(
        None, "a drained worker's time", low=0, high=LONGEST_S, absent="resilience.drain_timeout_s"
    )
    scale_timeout_s: float = key(1800.0, "a start that takes longer is given up", low=0, high=LONGEST_S)
    drift_policy: str = key(
        "adopt",
        "counts that others changed: plan on from them, or back to what was planned",
        choices=("adopt", "enforce"),
    )
    advisory: bool = key(False, "decide and order nothing")
    lookahead: LookaheadConfig = field(default=LookaheadConfig())

    @property
    def is_on(self) -> bool:
        """Whether anybody plans."""
        return self.name != NONE


TABLES: dict[str, type] = {"planner": PlannerConfig, "planner.lookahead": LookaheadConfig}
