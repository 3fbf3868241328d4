"""The record of a tick, put together from what the stages left. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from policies.cluster.ids import Role
from policies.cluster.ticks import Demand, Forecast, RoleTick, StepCost
from policies.planner.constrain import Claim, Verdict
from policies.planner.forecast.guarded import Guarded
from policies.planner.load import Vote
from policies.planner.propose import Need
from policies.planner.samples import Heard
from policies.planner.settings import PlannerSettings
from policies.planner.step_model import StepModel
from policies.planner.windows import Reading, Traffic


def demand(traffic: Traffic, reading: Reading, now_s: float) -> Demand:
    """The last window as it was read."""
    window = traffic.window
    return Demand(
        kind=None if window is None else window.kind,
        age_s=traffic.age_s(now_s),
        num_req=None if window is None else window.num_req,
        fed=reading.fed,
        isl=None if window is None else window.isl,
        osl=None if window is None else window.osl,
        hit_rate=traffic.hit_rate,
        accept_length=traffic.accept_length,
    )


def forecasts(traffic: Traffic, settings: PlannerSettings) -> tuple[Forecast, ...]:
    """One for each quantity, as far ahead as it is used; none before any value."""
    asked: Iterable[tuple[str, Guarded, int]] = (
        ("num_req", traffic.num_req, 1),
        ("num_req", traffic.num_req, settings.horizon),
        ("isl", traffic.isl, 1),
        ("osl", traffic.osl, 1),
    )
    found = []
    for quantity, model, ahead in asked:
        value = model.predict(ahead)
        if value is not None:
            found.append(
                Forecast(
                    quantity=quantity,
                    model=model.model.name,
                    ready=model.ready,
                    ahead=ahead,
                    value=value,
                    failures=model.failures,
                )
            )
    return tuple(found)


def step_costs(models: Mapping[Role, StepModel], now_s: float) -> tuple[StepCost, ...]:
    """What each role's step is believed to cost; none where nothing is."""
    found = []
    for role, model in models.items():
        cost = model.coefficients
        if cost is not None:
            found.append(
                StepCost(
                    role=role,
                    source=model.source,
                    base_s=cost.base_s,
                    per_x_s=cost.per_x_s,
                    per_kv_s=cost.per_kv_s,
                    r2=model.r2,
                    samples=len(model.samples),
                    age_s=model.age_s(now_s),
                )
            )
    return tuple(found)


def role_ticks(
    claims: Sequence[Claim],
    verdicts: Mapping[Role, Verdict],
    needs: Mapping[Role, Need],
    votes: Mapping[Role, Vote],
    answers: Mapping[Role, int],
    heard: Mapping[Role, Heard],
) -> tuple[RoleTick, ...]:
    """Every role's way through the stages."""
    return tuple(
        _role_tick(
            one, verdicts[one.role], needs.get(one.role), votes.get(one.role), answers.get(one.role), heard[one.role]
        )
        for one in claims
    )


def _role_tick(
    claim: Claim, verdict: Verdict, need: Need | None, vote: Vote | None, answer: int | None, heard: Heard
) -> RoleTick:
    can = None if need is None else need.capacity
    return RoleTick(
        role=claim.role,
        ready=claim.ready,
        pending=claim.pending,
        draining=claim.draining,
        throughput=None if need is None else need.workers,
        load=None if vote is None else vote.workers,
        lookahead=answer,
        wanted=claim.want,
        bounded=verdict.bounded,
        final=verdict.final,
        reason=verdict.reason,
        capacity_rps=None if can is None else can.rps,
        ttft_s=_first(None if vote is None else vote.ttft_s, None if can is None else can.ttft_s),
        itl_s=_first(None if vote is None else vote.itl_s, None if can is None else can.itl_s),
        sla_unreachable=can is not None and can.unreachable,
        queued_prefill_tokens=_sum(e.queued_prefill_tokens for e in heard.engines),
        queued_decode_kv_tokens=_sum(e.queued_kv_tokens for e in heard.engines),
        running_decode_kv_tokens=_sum(e.running_kv_tokens for e in heard.engines),
        stale=heard.stale,
    )


def gpus(claims: Sequence[Claim], settings: PlannerSettings) -> int:
    """GPUs that are held: of workers that run, start or drain."""
    return sum((c.current + c.draining) * settings.pool(c.role).gpus for c in claims)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _sum(values: Iterable[float]) -> float:
    return float(sum(values))
