"""What would help the nearest miss, and what becomes of the best under another demand; all of it evaluated."""

from __future__ import annotations

import pytest
from aiconfig_builders import SHORT, agg, disagg

from aiconfig.candidate import Candidate
from aiconfig.changes import Case, Change, single_changes
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import ClosedFormEvaluation, keeps, rejection
from aiconfig.sensitivity import variations
from aiconfig.workload import Workload
from reports.sla import parse_sla

CLOSED = ClosedFormEvaluation()
ONE = Load(users=1)


def changes(candidate: Candidate, sla: str, *, workload: Workload = SHORT, load: Load = ONE) -> dict[str, Change]:
    estimate = CLOSED(candidate, workload, load)
    assert estimate is not None
    limits = parse_sla(sla)
    assert not keeps(estimate, limits)
    case = Case(candidate=candidate, workload=workload, load=load, sla=limits, estimate=estimate)
    found = single_changes(case, CLOSED)
    assert [change.cost for change in found] == sorted(change.cost for change in found)
    for change in found:
        if change.kind != "bound":
            assert keeps(change.estimate, limits)
    return {change.kind: change for change in found}


def test_too_slow_when_idle_smaller_weights_or_more_gpus_help() -> None:
    found = changes(agg(), "tpot=5ms@mean")
    assert found["format"].text == "fp8 weights instead of bf16"
    assert found["format"].cost == pytest.approx(0.5, abs=1e-3)
    assert found["gpus"].text == "2 GPUs instead of 1: 1xTP2"
    assert found["gpus"].cost == pytest.approx(1.0)
    assert found["bound"].text == "mean tpot <= 6.32ms instead of mean tpot <= 5ms"
    assert "load" not in found  # there is one user
    assert "context" not in found  # weights, not KV, are what is read


def test_a_prompt_that_takes_too_long_may_be_shorter() -> None:
    found = changes(agg(), "ttft=100ms@mean", workload=Workload(isl=8000, osl=100))
    estimate = found["context"].estimate
    assert estimate.value("ttft", "mean") == pytest.approx(0.1, rel=0.06)
    assert found["context"].text.endswith("instead of 8000")
    assert 0.3 < found["context"].cost < 0.9


def test_too_many_users_may_be_fewer() -> None:
    found = changes(agg(), "tpot=11ms@mean", load=Load(users=128))
    users = found["load"].estimate.load.users
    assert users is not None
    assert found["load"].text == f"{users} users instead of 128 users"
    assert found["load"].cost == pytest.approx(1 - users / 128)
    assert found["gpus"].estimate.candidate.pools[0].replicas in (1, 2, 4)


def test_a_rate_may_be_lower() -> None:
    workload = Workload(isl=1024, osl=256, arrivals="poisson")
    found = changes(agg(), "tpot=11ms@mean", workload=workload, load=Load(rps=12.0))
    assert 0.0 < (found["load"].estimate.load.rps or 0.0) < 12.0


def test_a_looser_limit_is_checked_and_rounded_to_its_side() -> None:
    found = changes(agg(), "tps_user>=200tok/s@mean")
    assert found["bound"].text == "mean tps_user >= 158 tok/s instead of mean tps_user >= 200 tok/s"


def test_what_is_not_legal_or_does_not_fit_is_never_offered() -> None:
    assert rejection(agg(weights="mxfp4")) is not None
    assert rejection(disagg()) is None
    assert CLOSED(agg(weights="mxfp4"), SHORT, Load(users=1)) is None
    assert CLOSED(agg("llama-3.1-70b"), SHORT, Load(users=1)) is None
    found = changes(agg("gpt-oss-20b", weights="mxfp4"), "tpot=1ms@mean")
    assert "format" not in found or "KV" in found["format"].text


def test_every_change_was_evaluated() -> None:
    asked: list[tuple[Candidate, Workload, Load]] = []

    def evaluate(candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
        asked.append((candidate, workload, load))
        return CLOSED(candidate, workload, load)

    estimate = CLOSED(agg(), SHORT, Load(users=64))
    assert estimate is not None
    case = Case(
        candidate=agg(), workload=SHORT, load=Load(users=64), sla=parse_sla("tpot=10ms@mean"), estimate=estimate
    )
    for change in single_changes(case, evaluate):
        if change.kind != "bound":
            assert (change.estimate.candidate, change.estimate.load) in [(one[0], one[2]) for one in asked]


# ---------------------------------------------------------------- sensitivity


def test_variations_of_the_demand() -> None:
    sla = parse_sla("tpot=15ms@mean")
    found = {one.name: one for one in variations(agg(replicas=2), SHORT, Load(users=64), sla, CLOSED)}
    assert list(found) == [
        "as asked for", "load x0.5", "load x1.5", "load x2", "prompts x2", "answers x2", "one mixed worker less",
    ]  # fmt: skip
    tpots = {name: one.estimate.value("tpot", "mean") for name, one in found.items() if one.estimate}
    assert tpots["load x0.5"] < tpots["as asked for"] < tpots["load x1.5"] < tpots["load x2"]  # type: ignore[operator]
    assert tpots["prompts x2"] > tpots["as asked for"]  # type: ignore[operator]
    assert tpots["one mixed worker less"] == pytest.approx(tpots["load x2"], rel=0.2)
    assert found["as asked for"].judgement is not None
    assert found["as asked for"].judgement.kept
    assert found["load x2"].judgement is not None
    assert not found["load x2"].judgement.kept


def test_what_a_deployment_cannot_take_is_told_as_such() -> None:
    workload = Workload(isl=300_000, osl=100)
    found = {one.name: one for one in variations(agg(), workload, Load(users=1), None, CLOSED)}
    assert found["prompts x2"].estimate is None
    assert found["prompts x2"].judgement is None
    assert "load x0.5" not in found  # one user cannot be halved


def test_what_is_cached_may_not_be() -> None:
    workload = Workload(isl=4096, osl=64, prefix_tokens=3000)
    found = {one.name: one.estimate for one in variations(disagg(2, 1), workload, Load(users=4), None, CLOSED)}
    assert "one prefill worker less" in found
    cold, warm = found["nothing cached"], found["as asked for"]
    assert cold is not None
    assert warm is not None
    assert cold.value("ttft", "mean") > warm.value("ttft", "mean")  # type: ignore[operator]
