"""The `--sla` grammar: every form that is given for it, and the words of every refusal."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from reports.sla import LATENCIES, STATISTICS, Slo, parse_sla


def slo(metric: str, limit: float, unit: str = "s", statistic: str | None = "p95") -> Slo:
    return Slo(metric=metric, limit=limit, unit=unit, statistic=statistic)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=200ms,tpot=30ms", [slo("ttft", 0.2), slo("tpot", 0.03)]),
        (
            "p95:ttft<500ms; p99:e2e<20s; goodput>=0.95",
            [slo("ttft", 0.5), slo("e2e", 20.0, statistic="p99"), slo("goodput", 0.95, "share", None)],
        ),
        ("itl=50ms@p95", [slo("itl", 0.05)]),
        ("ttft:200 itl:50", [slo("ttft", 0.2), slo("itl", 0.05)]),
        ("p99:ttft:200", [slo("ttft", 0.2, statistic="p99")]),
        ("ttft < 200 ms , itl <= 0.05 s@max", [slo("ttft", 0.2), slo("itl", 0.05, statistic="max")]),
        ("time_to_first_token=200ms inter_token_latency:50", [slo("ttft", 0.2), slo("itl", 0.05)]),
        ("e2el=1min request_latency=90s@p50", [slo("e2e", 60.0), slo("e2e", 90.0, statistic="p50")]),
        ("tps_user>=30", [slo("tps_user", 30.0, "tok/s")]),
        ("tps_user>=30tok/s@mean", [slo("tps_user", 30.0, "tok/s", "mean")]),
        ("goodput>=95%", [slo("goodput", 0.95, "share", None)]),
        ("goodput=5rps", [slo("goodput", 5.0, "rps", None)]),
        ("TTFT=500US", [slo("ttft", 0.0005)]),
        ("ttft=2e-1s", [slo("ttft", 0.2)]),
    ],
)
def test_forms(text: str, expected: list[Slo]) -> None:
    found = parse_sla(text).slos
    assert [(one.metric, one.unit, one.statistic) for one in found] == [
        (one.metric, one.unit, one.statistic) for one in expected
    ]
    assert [one.limit for one in found] == pytest.approx([one.limit for one in expected])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft=200", "which unit? did you mean ttft=200ms?"),
        ("ttft<200", "which unit? did you mean ttft<200ms?"),
        ("tftt=200ms", "unknown metric 'tftt'; did you mean 'ttft'?"),
        ("time_to_frist_token:200", "did you mean 'time_to_first_token'?"),
        ("latency=1s", "unknown metric 'latency'"),
        ("ttft=200sec", "unknown unit 'sec'; did you mean 's'?"),
        ("ttft=200h", "unknown unit 'h'; units: us, ms, s, min"),
        ("ttft>200ms", "ttft is limited from above; write ttft<="),
        ("goodput<0.9", "goodput is limited from below; write goodput>="),
        ("tps_user<=9", "tps_user is limited from below"),
        ("ttft:p95<200ms", "the statistic goes before the metric"),
        ("p97:ttft=200ms", "unknown statistic 'p97'; did you mean 'p99'?"),
        ("p95:ttft=200ms@p99", "two statistics, p95 and p99"),
        ("p95:goodput>=0.9", "goodput is one figure and has no p95"),
        ("goodput>=5", "a share is at most 1, not 5; write 0.95, 95% or, for a rate, 5rps"),
        ("goodput>=5ms", "unknown unit 'ms' for goodput"),
        ("tps_user>=5ms", "unknown unit 'ms' for tps_user"),
        ("ttft=0ms", "out of range"),
        ("ttft=-5ms", "out of range"),
        ("ttft=1e99s", "out of range"),
        ("ttft=nan", "not understood"),
        ("ttft=infms", "not understood"),
        ("ttft=1.2.3ms", "'1.2.3' is no number"),
        ("ttft", "how much?"),
        ("200ms", "no limit in it"),
        ("", "no limit in it"),
        (" , ; ", "no limit in it"),
        ("ttft=200ms,ttft=300ms", "p95 ttft has a limit already"),
        ("ttft=200ms and itl=50ms", "'and': no limit in it"),
    ],
)
def test_refusals_name_the_item_and_the_way_out(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_sla(text)
    assert words in str(refused.value)
    assert str(refused.value).startswith("--sla '")
    assert "\n" not in str(refused.value)


def test_a_metric_may_be_limited_at_several_statistics() -> None:
    assert [one.statistic for one in parse_sla("p50:ttft<100ms, p99:ttft<1s").slos] == ["p50", "p99"]


@pytest.mark.parametrize("metric", LATENCIES)
def test_equal_is_enough_and_the_next_microsecond_is_not(metric: str) -> None:
    limit = parse_sla(f"{metric}=200ms").slos[0]
    assert limit.holds(12_345.8 - 12_345.6)  # 0.2 as time stamps give it: 0.19999999999890861 or a little above
    assert limit.holds(54_321.3 - 54_321.1)
    assert not limit.holds(0.200001)
    assert not limit.holds(float("nan"))


def test_a_rate_is_limited_from_below() -> None:
    limit = parse_sla("tps_user>=25").slos[0]
    assert limit.holds(25.0)
    assert not limit.holds(24.999)


def test_goodput_is_no_limit_of_a_single_request() -> None:
    assert [one.metric for one in parse_sla("ttft=1s goodput>=0.9").per_request] == ["ttft"]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_canonical_text_can_be_read_again(statistic: str) -> None:
    limit = parse_sla(f"{statistic}:ttft=200ms").slos[0]
    assert str(limit) == f"{statistic} ttft <= 200ms"
    assert parse_sla(str(limit).replace(" ttft", ":ttft")).slos == (limit,)
