"""What a planner may ask of the twin, and the answer: the plans to try, the demand to try them on, and from where.

The policy orders `AskTwin`; the world simulates, and posts `TwinAnswered`. A snapshot holds what the planner may know:
no future rows, no true output lengths.
"""

from __future__ import annotations

from policies.cluster.actions import Action
from policies.cluster.events import Event
from policies.cluster.ids import Role
from policies.cluster.traffic import Lengths
from policies.frozen import frozen


@frozen
class RoleCount:
    """How many workers of a role."""

    role: Role
    workers: int


@frozen
class PlanStep:
    """From `after_s` on (seconds after the snapshot) there are to be so many workers of each role."""

    after_s: float
    counts: tuple[RoleCount, ...]


@frozen
class Plan:
    """What would be ordered, step by step. `name` says where it comes from."""

    name: str
    steps: tuple[PlanStep, ...]


@frozen
class RoleState:
    """One role as the planner knows it: workers by state, work queued and under way in tokens and requests, and the
    step cost that it believes in, `base_s + per_x_s * x + per_kv_s * kv tokens` (None: it has none)."""

    role: Role
    group: str
    ready: int
    pending: int
    draining: int
    queued_prefill_tokens: float
    queued_decode_kv_tokens: float
    running_decode_kv_tokens: float
    running_decode_requests: float
    base_s: float | None = None
    per_x_s: float | None = None
    per_kv_s: float | None = None


@frozen
class Snapshot:
    """The cluster as the planner knows it at `taken_s`."""

    taken_s: float
    roles: tuple[RoleState, ...]
    hit_rate: float
    accept_length: float
    isl: float
    osl: float


@frozen
class Scenario:
    """One path of demand: requests in each interval of `interval_s`, lengths to draw from, and a prefix model that is
    nothing but a hit rate."""

    name: str
    interval_s: float
    arrivals: tuple[float, ...]
    lengths: tuple[Lengths, ...]
    hit_rate: float


@frozen
class Outcome:
    """What one plan came to on one scenario with one seed (all by index)."""

    plan: int
    scenario: int
    seed: int
    gpu_s: float
    attainment: float
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    rejected: int = 0
    unfinished: int = 0


@frozen
class AskTwin(Action):
    """Simulate every plan on every scenario with every seed, the same draws for each plan. Ends with `TwinAnswered`.

    An answer after `deadline_s` (of the cluster's clock) is not used. `key` names snapshot, plans, scenarios and seeds
    by hash: the same key, the same answer. `horizon_s`: how long to simulate.
    """

    query_id: int
    key: str
    snapshot: Snapshot
    plans: tuple[Plan, ...]
    scenarios: tuple[Scenario, ...]
    seeds: tuple[int, ...]
    horizon_s: float
    deadline_s: float


@frozen
class TwinAnswered(Event):
    """What the plans of one question came to; none where the simulation failed (`error` says how)."""

    query_id: int
    outcomes: tuple[Outcome, ...]
    error: str | None = None
