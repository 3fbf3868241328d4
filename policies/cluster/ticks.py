"""Why there are as many workers as there are: one record a tick, in the journal as an order without effect.

Every stage of a planner leaves its numbers here, whatever came of it, so that "no change" is explained too.
"""

from __future__ import annotations

from enum import Enum

from policies.cluster.actions import Action
from policies.cluster.ids import Role, WorkerId
from policies.cluster.traffic import WindowKind
from policies.frozen import frozen


class PlanReason(Enum):
    """What decided the count of a role in one tick."""

    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    NO_CHANGE = "no_change"
    REFUSED_CONSOLIDATION = "refused_consolidation"
    CAPPED_BY_THROUGHPUT = "capped_by_throughput"
    BUDGET_HOLD = "budget_hold"
    BUDGET_FIT = "budget_fit"
    FLOOR = "floor"
    DELTA_CLAMPED = "delta_clamped"
    COOLDOWN = "cooldown"
    SCALING_IN_PROGRESS = "scaling_in_progress"
    WORKER_COUNT_MISMATCH = "worker_count_mismatch"
    NO_DATA = "no_data"
    AWAITING_FIRST_TRAFFIC = "awaiting_first_traffic"
    MODEL_NOT_READY = "model_not_ready"
    PARTNER_NOT_READY = "partner_not_ready"
    SLA_UNREACHABLE = "sla_unreachable"
    ADVISORY = "advisory"


@frozen
class Demand:
    """The last window of traffic, and how old it is. `fed` is what the forecasts were given of it (requests in one
    interval; None: nothing)."""

    kind: WindowKind | None
    age_s: float | None
    num_req: float | None
    fed: float | None
    isl: float | None
    osl: float | None
    hit_rate: float
    accept_length: float


@frozen
class Forecast:
    """What was foreseen of one quantity `ahead` intervals on. `failures`: how often its model had to be replaced by
    the last value so far."""

    quantity: str
    model: str
    ready: bool
    ahead: int
    value: float
    failures: int


@frozen
class StepCost:
    """The step cost believed in for a role: `base_s + per_x_s * x + per_kv_s * kv`; where it is from (live, prior),
    its R² and samples, and the age of the newest one."""

    role: Role
    source: str
    base_s: float
    per_x_s: float
    per_kv_s: float
    r2: float | None
    samples: int
    age_s: float | None


@frozen
class RoleTick:
    """One role: what there was, what each stage said, what came of it and why. A stage that said nothing is None.

    `wanted` is what the proposals come to together, `bounded` that within floors and delta, `final` what is ordered.
    `capacity_rps` and the latencies are those of one engine at its best batch.
    """

    role: Role
    ready: int
    pending: int
    draining: int
    throughput: int | None
    load: int | None
    lookahead: int | None
    wanted: int
    bounded: int
    final: int
    reason: PlanReason
    capacity_rps: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    sla_unreachable: bool = False
    queued_prefill_tokens: float = 0.0
    queued_decode_kv_tokens: float = 0.0
    running_decode_kv_tokens: float = 0.0
    stale: tuple[WorkerId, ...] = ()


@frozen
class Tick:
    """One tick. `due` are the loops that ran (throughput, load, answer, wake); `notices` what somebody should look
    at, one word each; `decision_id` None: nothing was ordered."""

    number: int
    due: tuple[str, ...]
    demand: Demand
    forecasts: tuple[Forecast, ...]
    models: tuple[StepCost, ...]
    roles: tuple[RoleTick, ...]
    gpus: int
    budget: int | None
    notices: tuple[str, ...] = ()
    decision_id: int | None = None
    plan: str | None = None
    trusted: bool | None = None


@frozen
class NotePlan(Action):
    """Keep the record of a tick. Nobody waits for anything."""

    tick: Tick
