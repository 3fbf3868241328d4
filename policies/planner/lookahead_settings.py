"""The knobs of look-ahead: what is asked of the twin, and when its word counts."""

from __future__ import annotations

from policies.errors import ConfigError
from policies.frozen import frozen
from policies.planner.checks import within


@frozen
class LookaheadSettings:
    """How the twin is asked. `attainment`: share of requests within their limits that a plan must keep; `seeds` runs of
    each plan and scenario; `change_cost_gpu_s` (λ) is what a change must save. `wait_s`: how long the rule-based plan
    waits for an answer (0: one of the same instant counts). The rest are the safeguards of docs/planner.md.
    """

    attainment: float = 0.95
    seeds: int = 2
    most_plans: int = 24
    most_asked: int = 12
    reach: int = 2
    change_cost_gpu_s: float = 0.0
    wait_s: float = 0.0
    deadline_share: float = 0.5
    distrust_above: float = 0.25
    trust_below: float = 0.20
    least_completed: int = 30
    trust_s: float = 86_400.0
    save_share: float = 0.03
    lift_points: float = 0.01
    memo: int = 64

    def __post_init__(self) -> None:
        within("lookahead.attainment", self.attainment, 0, 1)
        within("lookahead.deadline_share", self.deadline_share, 0, 1)
        for key in ("seeds", "most_plans", "most_asked", "reach", "least_completed", "memo"):
            within(f"lookahead.{key}", getattr(self, key), 1)
        for key in ("change_cost_gpu_s", "wait_s", "trust_s", "save_share", "lift_points"):
            within(f"lookahead.{key}", getattr(self, key), 0)
        if self.trust_below > self.distrust_above:
            raise ConfigError(
                f"planner.lookahead.trust_below is {self.trust_below}, above distrust_above ({self.distrust_above}); "
                "trust comes back at a smaller error than it goes"
            )
