"""Verdicts: how surely a limit is kept, what is not judged, and the distance of a miss."""

from __future__ import annotations

import math

import pytest
from aiconfig_builders import agg, estimated
from hypothesis import given
from hypothesis import strategies as st

from aiconfig.bands import UNCALIBRATED_BANDS, band_of
from aiconfig.estimate import CLOSED_FORM, MEASURED, SIMULATED, Band, Estimate
from aiconfig.judge import VERDICTS, Judgement, judge, screened
from reports.sla import parse_sla

TENTH = {name: Band(typical=0.05, wide=0.1, level="test") for name in ("ttft", "tpot")}


def verdict(estimate: Estimate, sla: str) -> str:
    return judge(estimate, parse_sla(sla)).verdict


@pytest.mark.parametrize(
    ("ttft_ms", "expected"),
    [(180.0, "meets"), (190.0, "likely"), (200.0, "likely"), (210.0, "unlikely"), (230.0, "fails")],
)
def test_the_band_says_how_surely(ttft_ms: float, expected: str) -> None:
    one = estimated(agg(), level=SIMULATED, bands=TENTH, ttft={"p95": ttft_ms / 1e3})
    assert verdict(one, "ttft=200ms") == expected


def test_without_a_measured_band_nothing_is_certain() -> None:
    quick = estimated(agg(), level=SIMULATED, bands=UNCALIBRATED_BANDS, ttft={"p95": 0.001})
    slow = estimated(agg(), level=SIMULATED, bands=UNCALIBRATED_BANDS, ttft={"p95": 100.0})
    assert [verdict(one, "ttft=200ms") for one in (quick, slow)] == ["likely", "unlikely"]
    unknown = estimated(agg(), level=SIMULATED, ttft={"p95": 0.001})
    assert verdict(unknown, "ttft=200ms") == "likely"


def test_what_was_measured_has_no_band() -> None:
    one = estimated(agg(), level=MEASURED, ttft={"p95": 0.2})
    assert verdict(one, "ttft=200ms") == "meets"  # equal is enough
    assert verdict(one, "ttft=199ms") == "fails"


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_figure_never_meets(missing: float | None) -> None:
    one = judge(estimated(agg(), level=MEASURED, ttft={"p95": missing}), parse_sla("ttft=200ms"))
    assert (one.verdict, one.kept, one.distance) == ("fails", False, math.inf)
    assert not judge(estimated(agg(), level=MEASURED), parse_sla("itl=50ms")).kept
    assert not judge(estimated(agg(), level=MEASURED), parse_sla("goodput>=0.9")).kept


def test_a_mean_does_not_judge_a_percentile() -> None:
    one = judge(estimated(agg(), level=CLOSED_FORM, ttft={"mean": 0.001}), parse_sla("ttft=200ms"))
    assert (one.verdict, one.kept, one.distance, one.limits[0].value) == ("not judged", False, None, None)
    assert judge(estimated(agg(), level=CLOSED_FORM, ttft={"mean": 0.001}), parse_sla("ttft=200ms@mean")).kept


def test_a_limit_that_fails_outweighs_one_that_is_not_judged() -> None:
    one = estimated(agg(), level=CLOSED_FORM, ttft={"mean": 0.001}, tpot={"mean": 1.0})
    assert verdict(one, "ttft=200ms,tpot=10ms@mean") == "unlikely"
    assert verdict(one, "ttft=200ms,tpot=10s@mean") == "not judged"


def test_screening_compares_means_and_leaves_goodput_out() -> None:
    one = screened(estimated(agg(), level=CLOSED_FORM, ttft={"mean": 0.3}), parse_sla("ttft=200ms,goodput>=0.9"))
    assert [limit.slo.metric for limit in one.limits] == ["ttft"]
    assert one.distance == pytest.approx(0.5)


def test_rates_count_from_below() -> None:
    one = estimated(agg(), level=MEASURED, tps_user={"p95": 40.0})
    assert verdict(one, "tps_user>=40tok/s") == "meets"
    assert judge(one, parse_sla("tps_user>=50tok/s")).distance == pytest.approx(0.25)


def test_goodput_is_a_share_or_a_rate() -> None:
    one = estimated(agg(), level=MEASURED, goodput_share=0.9, requests_per_s=10.0)
    assert [verdict(one, text) for text in ("goodput>=0.9", "goodput>=9rps", "goodput>=0.91", "goodput>=9.1rps")] == [
        "meets",
        "meets",
        "fails",
        "fails",
    ]


def test_a_band_of_whole_requests_is_the_wider_of_its_parts() -> None:
    bands = {"ttft": Band(typical=0.1, wide=0.3, level="a"), "tpot": Band(typical=0.2, wide=0.2, level="b")}
    one = estimated(agg(), level=SIMULATED, bands=bands)
    assert {metric: getattr(band_of(one, metric), "wide", None) for metric in ("ttft", "itl", "e2e", "goodput")} == {
        "ttft": 0.3,
        "itl": 0.2,
        "e2e": 0.3,
        "goodput": None,
    }


def test_the_distance_is_the_worst_excess_and_names_its_limit() -> None:
    one = judge(
        estimated(agg(), level=MEASURED, ttft={"p95": 0.22}, itl={"p95": 0.04}), parse_sla("ttft=200ms,itl=30ms")
    )
    assert one.distance == pytest.approx(1 / 3)
    assert one.binding is not None
    assert one.binding.slo.metric == "itl"


def test_without_limits_everything_meets_them() -> None:
    assert judge(estimated(agg(), level=SIMULATED), None) == Judgement(verdict="meets", limits=())


@given(
    value_ms=st.floats(0.1, 1e5),
    limit_ms=st.floats(0.1, 1e5),
    more=st.floats(1.0, 10.0),
    wide=st.one_of(st.none(), st.floats(0.0, 2.0)),
    level=st.sampled_from([CLOSED_FORM, SIMULATED, MEASURED]),
)
def test_a_looser_limit_never_makes_a_verdict_worse(
    value_ms: float, limit_ms: float, more: float, wide: float | None, level: str
) -> None:
    bands = {"ttft": Band(typical=0.0, wide=wide, level="any")}
    one = estimated(agg(), level=level, bands=bands, ttft={"mean": value_ms / 1e3})
    tight, loose = (judge(one, parse_sla(f"ttft={limit}ms@mean")) for limit in (limit_ms, limit_ms * more))
    assert VERDICTS.index(loose.verdict) <= VERDICTS.index(tight.verdict)
    assert (loose.distance or 0.0) <= (tight.distance or 0.0)
