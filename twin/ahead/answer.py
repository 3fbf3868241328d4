"""The answer to a question to the twin: every plan on every path of demand with every seed.

A pure function of the question and the planner's settings: the same question, the same answer. All plans of a path and
a seed have the same arrivals and lengths. One worker of each role is simulated, under the share that taking turns would
give it (`twin.ahead.share`); nobody plans inside, so a question never asks another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from policies.cluster.ids import Role
from policies.cluster.twin_asks import AskTwin, Outcome, Plan, RoleState, Scenario
from policies.planner.settings import PlannerSettings, PoolSettings
from policies.planner.step_model import StepCoefficients
from reports.columns import F64, I64
from twin.ahead.share import Begun, Engine, Served, Share, serve

GRACE_S = 5.0
"""How long a worker that is drained is paid for at least."""
BUCKETS = 12
"""Parts of the horizon in which prompts and answers of different workers are brought together."""


class Path(NamedTuple):
    """One path of demand with one seed: when requests come, and how long they are."""

    at_s: F64
    isl: I64
    osl: I64


class Ready(NamedTuple):
    """Workers of one role that take work: `workers[i]` from `at_s[i]` on; and GPU-seconds of all that are paid for."""

    at_s: F64
    workers: F64
    gpu_s: float


def answer(question: AskTwin, settings: PlannerSettings) -> tuple[Outcome, ...]:
    """Outcomes in order of plan, scenario and seed."""
    assert settings.lookahead is None, "a planner inside a question would ask again"
    snapshot = question.snapshot
    states = {state.role: state for state in snapshot.roles}
    engines = {role: _engine(state, settings.pool(role)) for role, state in states.items()}
    paths = [
        [draw(scenario, seed, question.horizon_s, (snapshot.isl, snapshot.osl)) for seed in question.seeds]
        for scenario in question.scenarios
    ]
    found = []
    for i, plan in enumerate(question.plans):
        ready = {role: timeline(plan, states[role], settings, question.horizon_s) for role in states}
        gpu_s = sum(one.gpu_s for one in ready.values())
        for j, scenario in enumerate(question.scenarios):
            for k, path in enumerate(paths[j]):
                run = _Run(path, scenario.hit_rate, states, engines, ready, settings, question.horizon_s)
                found.append(run.outcome(i, j, k, gpu_s, question.seeds[k]))
    return tuple(found)


def draw(scenario: Scenario, seed: int, horizon_s: float, usual: tuple[float, float]) -> Path:
    """Arrivals of a Poisson process whose rate is the path's in each interval, with lengths of the sample, or `usual`
    (tokens in, tokens out) where there is none."""
    rng = np.random.default_rng((seed, *scenario.name.encode()))
    counts = [max(0.0, n) for n in scenario.arrivals]
    need = math.ceil(horizon_s / scenario.interval_s - 1e-9)
    counts += [counts[-1] if counts else 0.0] * (need - len(counts))
    parts = [(i + np.sort(rng.random(rng.poisson(n)))) * scenario.interval_s for i, n in enumerate(counts[:need])]
    at_s = np.concatenate(parts) if parts else np.empty(0)
    at_s = at_s[at_s < horizon_s]
    lengths = scenario.lengths
    if not lengths:
        isl = np.full(len(at_s), max(1, round(usual[0])))
        return Path(at_s, isl, np.full(len(at_s), max(1, round(usual[1]))))
    which = rng.integers(0, len(lengths), len(at_s))
    isl = np.array([max(1, one.isl) for one in lengths])[which]
    osl = np.array([max(1, one.osl) for one in lengths])[which]
    return Path(at_s, isl, osl)


def timeline(plan: Plan, state: RoleState, settings: PlannerSettings, horizon_s: float) -> Ready:
    """What a plan does to the workers of a role. Those on their way now are taken to be half-way."""
    startup_s = settings.startup_s
    changes: list[tuple[float, int]] = [(startup_s / 2, state.pending)] if state.pending else []
    pool = settings.pool(state.role)
    ready, pending = state.ready, state.pending
    paid = [(0.0, ready + pending + state.draining)]
    if state.draining:
        paid.append((GRACE_S, -state.draining))
    for step in plan.steps:
        want = next((count.workers for count in step.counts if count.role is state.role), ready + pending)
        more = want - ready - pending
        if more > 0:
            changes.append((step.after_s + startup_s, more))
            paid.append((step.after_s, more))
            pending += more
        elif more < 0:
            called_off = min(pending, -more)
            if called_off:
                _call_off(changes, called_off)
                paid.append((step.after_s, -called_off))
                pending -= called_off
            gone = -more - called_off
            if gone:
                changes.append((step.after_s, -gone))
                paid.append((step.after_s + GRACE_S + _service_s(state), -gone))
                ready -= gone
    changes.sort()
    at_s, workers = [0.0], [float(state.ready)]
    for when, n in changes:
        at_s.append(when)
        workers.append(workers[-1] + n)
    gpu_s = sum(n * max(0.0, horizon_s - max(0.0, when)) for when, n in paid) * pool.gpus
    return Ready(np.array(at_s), np.array(workers), gpu_s)


def _call_off(changes: list[tuple[float, int]], n: int) -> None:
    """Take so many of those who were going to be ready, the last ones first."""
    for i in reversed(range(len(changes))):
        when, more = changes[i]
        taken = min(n, max(0, more))
        changes[i] = (when, more - taken)
        n -= taken


def _service_s(state: RoleState) -> float:
    """About how long a worker takes to finish what it has: half an answer at the pace of now."""
    if not state.ready or state.base_s is None or not state.running_decode_requests:
        return 0.0
    each = state.running_decode_requests / state.ready
    kv = state.running_decode_kv_tokens / state.ready
    per_x = (state.per_x_s or 0.0) * each if state.role is Role.DECODE else 0.0
    return 100 * (state.base_s + per_x + (state.per_kv_s or 0.0) * kv)


def _engine(state: RoleState, pool: PoolSettings) -> Engine:
    cost = StepCoefficients(base_s=state.base_s or 0.0, per_x_s=state.per_x_s or 0.0, per_kv_s=state.per_kv_s or 0.0)
    return Engine(
        cost=cost,
        max_num_seqs=pool.max_num_seqs,
        max_batched_tokens=pool.max_batched_tokens,
        max_kv_tokens=pool.max_kv_tokens,
        sequences=state.role is Role.DECODE,
    )


class _Run:
    """One plan on one path."""

    def __init__(
        self,
        path: Path,
        hit_rate: float,
        states: dict[Role, RoleState],
        engines: dict[Role, Engine],
        ready: dict[Role, Ready],
        settings: PlannerSettings,
        horizon_s: float,
    ) -> None:
        self._path = path
        self._hit_rate = min(hit_rate, 0.95)
        self._states, self._engines, self._ready = states, engines, ready
        self._settings = settings
        self._horizon_s = horizon_s

    def outcome(self, plan: int, scenario: int, seed_at: int, gpu_s: float, seed: int) -> Outcome:
        mixed = Role.MIXED in self._states
        found = self._mixed() if mixed else self._apart()
        attainment, ttft_s, itl_s, unfinished = found
        return Outcome(
            plan=plan,
            scenario=scenario,
            seed=seed_at,
            gpu_s=gpu_s,
            attainment=attainment,
            ttft_p95_s=ttft_s,
            itl_p95_s=itl_s,
            unfinished=unfinished,
        )

    def _mixed(self) -> tuple[float, float | None, float | None, int]:
        share, served = self._served(Role.MIXED, self._path.at_s, answers=True)
        return self._judged(np.array(share.at_s), share, served)

    def _apart(self) -> tuple[float, float | None, float | None, int]:
        """Prompts on one kind of worker, answers on the other: by part of the horizon, the share that keeps both
        limits is taken to be the product of the shares that keep either."""
        limits = self._settings
        prompts, computed = self._served(Role.PREFILL, self._path.at_s, answers=False)
        at_s = np.array(prompts.at_s)
        ttft = np.array(computed.first_s) - at_s
        waited = np.where(np.isfinite(ttft), ttft, self._horizon_s - at_s)
        delay = np.interp(self._path.at_s, at_s, waited) if len(at_s) else np.zeros(len(self._path.at_s))
        order = np.argsort(self._path.at_s + delay, kind="stable")
        begun = (self._path.at_s + delay)[order]
        answers, made = self._served(Role.DECODE, begun, answers=True, order=order)
        gaps = _gaps(made)
        width = self._horizon_s / BUCKETS
        kept_p, n_p = _by_part(at_s, (ttft <= limits.ttft_s) | _still_may(ttft, at_s, self._horizon_s, limits), width)
        kept_d, n_d = _by_part(np.array(answers.at_s), gaps <= limits.itl_s, width)
        share = np.where(n_p > 0, kept_p / np.maximum(n_p, 1), 1.0) * np.where(
            n_d > 0, kept_d / np.maximum(n_d, 1), 1.0
        )
        total = float(n_p.sum())
        attainment = float((share * n_p).sum() / total) if total else 1.0
        unfinished = int(np.isinf(np.array(made.last_s)).sum() * self._ready[Role.DECODE].workers[-1])
        return attainment, _p95(waited), _p95(gaps[np.isfinite(gaps)]), unfinished

    def _judged(self, at_s: F64, share: Share, served: Served) -> tuple[float, float | None, float | None, int]:
        limits = self._settings
        first = np.array(served.first_s)
        ttft = first - at_s
        gaps = _gaps(served)
        good = (ttft <= limits.ttft_s) | _still_may(ttft, at_s, self._horizon_s, limits)
        good &= gaps <= limits.itl_s
        waited = np.where(np.isfinite(ttft), ttft, self._horizon_s - at_s)
        attainment = float(good.mean()) if len(good) else 1.0
        unfinished = int(np.isinf(np.array(served.last_s)).sum() * self._ready[Role.MIXED].workers[-1])
        return attainment, _p95(waited), _p95(gaps[np.isfinite(first)]), unfinished

    def _served(self, role: Role, at_s: F64, *, answers: bool, order: I64 | None = None) -> tuple[Share, Served]:
        """The share of one worker, taking turns with those that are ready, and how it was served."""
        ready, state = self._ready[role], self._states[role]
        workers = ready.workers[np.searchsorted(ready.at_s, at_s, side="right") - 1]
        turns = np.cumsum(1.0 / np.maximum(workers, 1e-9)) if len(at_s) else np.empty(0)
        mine = np.flatnonzero(np.floor(turns) > np.floor(np.concatenate([[0.0], turns[:-1]])))
        if not (ready.workers > 0).all():
            mine = mine[workers[mine] > 0]
        isl, osl = self._path.isl, self._path.osl
        if order is not None:
            isl, osl = isl[order], osl[order]
        isl, osl = isl[mine], osl[mine]
        each = max(1, state.ready)
        compute = np.maximum(1, np.ceil(isl * (1.0 - self._hit_rate))).astype(np.int64)
        times = at_s[mine]
        if role is not Role.DECODE and state.queued_prefill_tokens:
            queued = max(1, round(state.queued_prefill_tokens / each * (1.0 - self._hit_rate)))
            times = np.concatenate([[0.0], times])
            compute = np.concatenate([[queued], compute])
            isl, osl = np.concatenate([[queued], isl]), np.concatenate([[1], osl])
        share = Share(
            at_s=times.tolist(),
            compute=compute.tolist(),
            hold=isl.tolist(),
            make=osl.tolist() if answers else [1] * len(times),
        )
        served = serve(self._engines[role], share, self._begun(role, each), self._horizon_s)
        if len(share.at_s) > len(mine):  # what was queued before is none of the demand that is judged
            share = Share(share.at_s[1:], share.compute[1:], share.hold[1:], share.make[1:])
            served = Served(served.first_s[1:], served.last_s[1:], served.made[1:], served.end_s)
        return share, served

    def _begun(self, role: Role, each: int) -> Begun:
        """Decodes that a worker has now: how far they are nobody knows, so they end one after the other."""
        state = self._states[role]
        if role is Role.PREFILL or not state.running_decode_requests:
            return Begun((), ())
        n = round(state.running_decode_requests / each)
        held = round((state.running_decode_kv_tokens + state.queued_decode_kv_tokens) / each / max(1, n))
        osl = float(self._path.osl.mean()) if len(self._path.osl) else 1.0
        return Begun([held] * n, [max(1, round(osl * (i + 1) / (n + 1))) for i in range(n)])


def _gaps(served: Served) -> F64:
    """The mean gap of each answer; of one that is under way, so far; 0 where there is none to tell."""
    first, last, made = np.array(served.first_s), np.array(served.last_s), np.array(served.made, dtype=np.float64)
    ends = np.where(np.isfinite(last), last, served.end_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        gaps = (ends - first) / (made - 1)
    return np.where(np.isfinite(gaps) & (made > 1), gaps, 0.0)


def _still_may(
    ttft: F64, at_s: F64, horizon_s: float, limits: PlannerSettings
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Requests without a token at the end whose time is not over."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.isinf(ttft) & (horizon_s - at_s <= limits.ttft_s)
    return found


def _by_part(at_s: F64, good: np.ndarray[tuple[int], np.dtype[np.bool_]], width: float) -> tuple[F64, F64]:
    place = np.clip((at_s / width).astype(np.int64), 0, BUCKETS - 1)
    kept = np.bincount(place, good, minlength=BUCKETS).astype(np.float64)
    return kept, np.bincount(place, minlength=BUCKETS).astype(np.float64)


def _p95(values: F64) -> float | None:
    return float(np.quantile(values, 0.95)) if len(values) else None
