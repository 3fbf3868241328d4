"""`twin forecast` and `twin plan`: what they are made of, and what they come to on traces that a person can check."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.planner.settings import PlannerSettings, PoolSettings
from policies.planner.step_model import StepCoefficients
from reports.columns import F64
from reports.plan_table import PlanTable, plan_text, share_by_interval
from twin.commands.forecast import run as forecast_line
from twin.commands.plan import run as plan_line
from twin.config_read import load
from twin.forecasting import forecast, season_of, windows_of
from twin.plan_compare import compare
from twin.provisioning import Counts, Needs, line_of_counts, mean, needs, oracle_steps, peak
from twin.scheduled import Step, read_schedule, written

MIXED = (Role.MIXED,)


def trace(folder: Path, at_s: Sequence[float], isl: int = 500, osl: int = 20) -> Path:
    path = folder / "t.csv"
    path.write_text("arrival_s,isl,osl\n" + "".join(f"{at:.6f},{isl},{osl}\n" for at in at_s), encoding="utf-8")
    return path


def waves(periods: int = 12, per: int = 8, interval_s: float = 10.0) -> list[float]:
    """A season of `per` intervals, again and again, without noise: 20 to 60 requests in each."""
    at_s = []
    for i in range(periods * per):
        n = round(40 + 20 * math.sin(2 * math.pi * i / per))
        at_s += [(i + (k + 0.5) / n) * interval_s for k in range(n)]
    return at_s


def configured(path: Path, *sets: str):
    return load(
        flags={"TRACE": str(path), "--planner": "throughput"},
        sets=["planner.throughput_adjustment_interval_s=10", *sets],
    )


# ---------------------------------------------------------------- forecast


def test_windows_are_whole_and_the_rest_is_left_out(tmp_path: Path) -> None:
    at_s = [0.0, *[10 * i + 1 for i in range(9) for _ in range(3)], 95.0]
    seen = windows_of(configured(trace(tmp_path, at_s)))
    assert seen.num_req.tolist() == [4, *[3] * 8]
    assert seen.isl.tolist() == [500] * 9


def test_a_season_is_found_and_who_knows_seasons_wins(tmp_path: Path) -> None:
    found = forecast(configured(trace(tmp_path, waves())), startup_s=15.0)
    assert (found.period, found.found, found.ahead) == (8, True, 3)
    (num_req, isl, _) = found.quantities
    assert num_req.winner in ("prophet", "seasonal-naive")
    by_name = {one.name: one for one in num_req.scored}
    assert by_name["seasonal-naive"].next.mae == pytest.approx(0.0, abs=1.0)
    assert by_name["constant"].ahead.mae > by_name["constant"].next.mae  # type: ignore[operator]
    assert all(one.next.mae == pytest.approx(0.0, abs=1e-6) for one in isl.scored)  # all prompts are alike


def test_no_season_where_there_is_none() -> None:
    rng = np.random.default_rng(1)
    assert season_of(rng.poisson(100, 300).astype(float)) is None
    assert season_of(np.arange(50.0)) is None
    assert season_of(np.full(50, 7.0)) is None


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 8; give a shorter --interval"):
        forecast(configured(trace(tmp_path, [0.0, 50.0])), 0.0)


def test_forecast_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(trace(tmp_path, waves()))
    assert forecast_line({"trace": path, "interval": "10", "ahead": "2"}) == 0
    out = capsys.readouterr().out
    assert "96 windows" not in out.splitlines()[1]
    assert "MAE +2" in out
    assert "below seasonal-naive" in out or "best: seasonal-naive" in out
    assert forecast_line({"trace": path, "interval": "10", "json": True}) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["interval_s"] == 10
    assert {one["quantity"] for one in told["quantities"]} == {"num_req", "isl", "osl"}


@pytest.mark.parametrize("line", [{"ahead": "0"}, {"ahead": "x"}, {"interval": "-3"}, {"period": "1"}])
def test_bad_options_of_forecast_are_refused(line: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        forecast_line({"trace": str(trace(tmp_path, waves(2))), "interval": "10"} | line)


# ---------------------------------------------------------------- static counts and the oracle


def settings(*pools: PoolSettings) -> PlannerSettings:
    mode = "agg" if len(pools) == 1 else "disagg"
    return PlannerSettings(pools=pools, mode=mode, optimization_target="sla", max_gpu_budget=None)  # type: ignore[arg-type]


def test_counts_grow_one_by_one_in_proportion() -> None:
    cost = StepCoefficients(base_s=0.01, per_x_s=2e-5)
    slow = StepCoefficients(base_s=0.004, per_x_s=2e-4, per_kv_s=1e-7)
    mixed = PoolSettings(role=Role.MIXED, group="a", prior=cost)
    assert list(line_of_counts(settings(mixed), 1000, 100, 4)) == [(1,), (2,), (3,), (4,)]
    both = settings(
        PoolSettings(role=Role.PREFILL, group="p", prior=cost), PoolSettings(role=Role.DECODE, group="d", prior=slow)
    )
    found = list(line_of_counts(both, 3000, 150, 12))
    assert found[0] == (1, 1)
    assert all(sum(b) - sum(a) == 1 for a, b in pairwise(found))
    p, d = found[-1]
    assert p + d == 12
    assert p * 15.384615 == pytest.approx(d * 12.07851, rel=0.25)  # M1 and M6: what one of each serves


def test_the_smallest_count_that_keeps_each_interval_is_taken() -> None:
    need = np.array([1, 3, 2, 1])

    def attained(counts: Counts) -> F64:
        return np.where(counts[0] >= need, 1.0, 0.5)

    found = needs(MIXED, iter([(n,) for n in range(1, 9)]), attained, 0.95)
    assert found.by_interval == ((1,), (3,), (2,), (1,))
    assert (found.unreachable, len(found.tried)) == (0, 3)
    assert (peak(found), mean(found)) == ((3,), (2,))


def test_what_more_workers_do_not_help_is_said() -> None:
    def attained(counts: Counts) -> F64:
        return np.array([1.0, 0.7 if counts[0] > 1 else 0.6])

    found = needs(MIXED, iter([(n,) for n in range(1, 50)]), attained, 0.95)
    assert found.unreachable == 1
    assert found.by_interval == ((1,), (2,))
    assert len(found.tried) == 4  # two that helped nobody end the search


def test_an_oracle_starts_ahead_and_drains_when_it_is_over() -> None:
    found = Needs(roles=MIXED, by_interval=((1,), (3,), (1,), (1,), (2,)), unreachable=0, tried=((3,),))
    assert oracle_steps(found, 100.0, 30.0) == [
        Step(0.0, {Role.MIXED: 1}),
        Step(70.0, {Role.MIXED: 3}),
        Step(200.0, {Role.MIXED: 1}),
        Step(370.0, {Role.MIXED: 2}),
    ]
    # with a start longer than the gap it keeps whom it will need again
    assert oracle_steps(found, 100.0, 250.0)[0].workers == {Role.MIXED: 3}


def test_a_schedule_reads_back() -> None:
    steps = [Step(0.0, {Role.PREFILL: 1, Role.DECODE: 2}), Step(1.1, {Role.DECODE: 3})]
    assert read_schedule(written(steps), [Role.PREFILL, Role.DECODE]) == steps


def test_an_interval_without_requests_keeps_its_limits() -> None:
    assert share_by_interval(np.array([4.0, 0.0]), np.array([3.0, 0.0])).tolist() == [0.75, 1.0]


# ---------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanTable, Path]:
    """Two waves; a step costs so much that one worker holds the quiet part and the busy one needs more."""
    folder = tmp_path_factory.mktemp("plan")
    at_s = [i * 0.5 for i in range(100)] + [50 + i * 0.02 for i in range(2000)] + [90 + i * 0.5 for i in range(80)]
    config = configured(
        trace(folder, at_s, isl=800, osl=60),
        "sla.limits=ttft=500ms,itl=30ms",
        "workers.latency.model=linear",
        "workers.latency.step_s=0.012",
        "workers.latency.prefill_s_per_token=0.00005",
        "workers.latency.decode_s_per_ctx_token=0.00000008",
        "workers.startup_s=4",
        "workers.count=2",
        "workers.tp=1",
        "workers.engine.kv_blocks=40000",
    )
    done = compare(config, ("throughput", "hybrid"), out=folder / "out", seeds=2)
    return done.table, done.folder


def test_the_oracle_keeps_the_limits_with_fewer_gpus_than_the_peak(table: tuple[PlanTable, Path]) -> None:
    rows = {row.name: row for row in table[0].rows}
    assert list(rows) == ["static peak", "static mean", "oracle", "throughput", "hybrid"]
    static, oracle = rows["static peak"], rows["oracle"]
    assert table[0].unreachable == 0
    assert static.mean("intervals_missed") == 0
    assert oracle.mean("gpu_hours") < 0.9 * static.mean("gpu_hours")  # type: ignore[operator]
    assert oracle.mean("attainment") >= 0.95  # type: ignore[operator]
    assert static.mean("changes") == 0 < oracle.mean("changes")  # type: ignore[operator]
    assert all(run.unfinished == 0 for row in rows.values() for run in row.runs)
    assert rows["static mean"].mean("gpu_hours") < static.mean("gpu_hours")  # type: ignore[operator]


def test_the_table_is_the_same_again_and_is_for_people_too(table: tuple[PlanTable, Path]) -> None:
    found, folder = table
    told = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert told == json.loads(found.to_json())
    text = plan_text(found, "p")
    for part in ("static peak", "oracle", "GPU-hours", "knows the future", "2 seeds"):
        assert part in text
    page = (folder / "plan.html").read_text(encoding="utf-8")
    assert "Ways to plan" in page
    assert "mixed workers ready" in page


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({}, "give --sla"),
        ({"sla": "ttft=1s", "planner": "none"}, "must be planners"),
        ({"sla": "ttft=1s", "planner": "nobody"}, "must be none, throughput"),
        ({"sla": "ttft=1s", "planner": "load", "attainment": "1.5"}, "--attainment 1.5"),
        ({"sla": "ttft=1s", "planner": "load", "seeds": "0"}, "--seeds 0"),
        ({"sla": "ttft=1s", "planner": "load", "most_gpus": "many"}, "--most-gpus many"),
    ],
)
def test_bad_lines_of_plan_are_refused(line: dict[str, str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_line({"trace": str(trace(tmp_path, waves(2))), "out": str(tmp_path / "out")} | line)
    assert not (tmp_path / "out").exists()
