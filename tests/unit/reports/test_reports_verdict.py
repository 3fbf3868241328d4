"""Attainment, goodput and the verdict of a run: who is counted, and what requests without an answer do to a limit."""

from __future__ import annotations

import numpy as np
import pytest

from reports.metrics import Distribution
from reports.sla import parse_sla
from reports.verdict import Outcomes, SlaResult, judge

ITL = Distribution(count=9, mean=0.02, p50=0.02, p90=0.03, p95=0.04, p99=0.05, max=0.06, min=0.01, std=0.0)


def outcomes(*requests: tuple[str, float | None, float | None]) -> Outcomes:
    """Requests as (status, TTFT, TPOT); completed ones end 1 s after their first token."""
    status = np.array([request[0] for request in requests])
    ttft, tpot = (np.array([request[i] for request in requests], dtype=np.float64) for i in (1, 2))
    done = status == "completed"
    return Outcomes(
        completed=done,
        cancelled=status == "cancelled",
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=np.where(done, ttft + 1.0, np.nan),
    )


def judged(sla: str, *requests: tuple[str, float | None, float | None], itl: Distribution = ITL) -> SlaResult:
    return judge(parse_sla(sla), outcomes(*requests), itl, 10.0, 20.0)


def test_good_requests_complete_and_keep_every_limit() -> None:
    result = judged(
        "ttft=200ms,tpot=50ms", ("completed", 0.1, 0.04), ("completed", 0.1, 0.06), ("completed", 0.3, 0.01)
    )
    assert (result.good, result.counted, result.goodput_rps, result.goodput_rps_per_gpu) == (1, 3, 0.1, 0.05)


@pytest.mark.parametrize("status", ["rejected", "failed", "open"])
def test_requests_without_an_answer_stay_in_the_denominator(status: str) -> None:
    result = judged("ttft=200ms", ("completed", 0.1, None), (status, None, None))
    assert (result.good, result.counted, result.attainment) == (1, 2, 0.5)


def test_a_failed_request_is_not_good_however_fast_its_first_token_came() -> None:
    result = judged("ttft=200ms", ("failed", 0.1, None))
    assert (result.good, result.limits[0].requests_met) == (0, 1)


def test_clients_that_left_are_not_counted_but_named() -> None:
    result = judged("ttft=200ms", ("completed", 0.1, None), ("cancelled", 0.9, None))
    assert (result.good, result.counted, result.cancelled, result.attainment) == (1, 1, 1, 1.0)
    assert (result.limits[0].requests_met, result.limits[0].requests_missed) == (1, 0)


def test_a_one_token_answer_cannot_break_a_limit_on_gaps() -> None:
    for limit in ("itl=1ms@max", "tpot=1ms", "tps_user>=1000"):
        result = judged(limit, ("completed", 0.1, None))
        assert (result.good, result.limits[0].requests_undefined) == (1, 1), limit


def test_a_completed_request_without_a_token_does_not_keep_a_ttft_limit() -> None:
    assert judged("ttft=200ms", ("completed", None, None)).good == 0


def test_nobody_counted_means_no_attainment() -> None:
    result = judged("ttft=200ms")
    assert (result.attainment, result.limits[0].value, result.verdict) == (None, None, "missed")


# --- the run ----------------------------------------------------------------------------------------------------------


def test_the_default_is_p95_of_the_requests() -> None:
    requests = [("completed", 0.1, None)] * 96 + [("completed", 9.0, None)] * 4
    assert judged("ttft=200ms", *requests).verdict == "met"
    assert judged("ttft=200ms@p99", *requests).verdict == "missed"
    assert judged("mean:ttft=200ms", *requests).verdict == "missed"
    assert judged("p50:ttft=200ms", *requests).limits[0].value == pytest.approx(0.1)


def test_a_run_limit_on_itl_is_about_the_pooled_gaps() -> None:
    result = judged("itl=45ms", ("completed", 0.1, 0.9))
    assert (result.verdict, result.limits[0].value, result.limits[0].requests_missed) == ("met", 0.04, 1)


def test_shedding_load_does_not_meet_a_percentile() -> None:
    served = [("completed", 0.1, None)] * 90
    assert judged("ttft=200ms", *served, *[("rejected", None, None)] * 4).verdict == "met"
    shed = judged("ttft=200ms", *served, *[("rejected", None, None)] * 10)
    assert (shed.verdict, shed.limits[0].unanswered) == ("missed", 10)
    assert shed.limits[0].value == pytest.approx(0.1)


def test_a_single_unanswered_request_breaks_max() -> None:
    assert judged("ttft=200ms@max", ("completed", 0.1, None), ("failed", None, None)).verdict == "missed"


def test_speed_per_user_counts_from_the_slow_end() -> None:
    tpots = [0.01 * place for place in range(1, 101)]  # 100 tokens/s down to 1
    result = judged("tps_user>=1.05", *(("completed", 0.1, tpot) for tpot in tpots))
    assert result.limits[0].value == pytest.approx(np.quantile(1 / np.array(tpots), 0.05))
    assert judged("tps_user>=1.05@max", *(("completed", 0.1, tpot) for tpot in tpots)).verdict == "missed"
    assert judged("tps_user>=1@max", *(("completed", 0.1, tpot) for tpot in tpots)).verdict == "met"


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        ("goodput>=50%", "met"),
        ("goodput>=0.51", "missed"),
        ("goodput>=0.1rps", "met"),
        ("goodput>=0.11rps", "missed"),
    ],
)
def test_goodput_is_a_limit_of_the_run(limit: str, verdict: str) -> None:
    result = judged(f"ttft=20s {limit}", ("completed", 0.1, None), ("failed", None, None))
    assert result.limits[1].verdict == verdict


def test_no_gaps_never_count_as_meeting_a_limit() -> None:
    assert judged("itl=50ms", ("completed", 0.1, None), itl=Distribution(count=0)).verdict == "missed"
