"""What people read: plot, page and table say what the result says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aiconfig.answer import answer_text, columns, rows
from aiconfig.breakdown import breakdown
from aiconfig.driver import Driven, How, drive
from aiconfig.page import pareto_chart, write_page
from aiconfig.plot_text import Dot, scatter
from aiconfig.request import search_request
from reports.sla import parse_sla


@pytest.fixture(scope="module")
def driven() -> Driven:
    request = search_request({"gpus": 2, "sla": parse_sla("tpot=20ms@mean")})
    return drive(request, How(simulates=False))


def test_marks_stand_where_their_values_are() -> None:
    lines = scatter([Dot(0.0, 0.0, "a"), Dot(100.0, 50.0, "b"), Dot(50.0, 25.0, "c")], "x", "y", width=10, height=4)
    grid = [line.split("|", 1)[1] for line in lines if "|" in line]
    assert grid[0].index("b") == 10
    assert grid[2].index("c") == 5
    assert grid[4].index("a") == 0
    assert scatter([Dot(float("nan"), 1.0, "x")], "x", "y") == []


def test_every_row_of_the_table_has_every_column(driven: Driven) -> None:
    shown = rows(driven.result)
    assert len(shown) == driven.result.request.top
    assert {len(row) for row in shown} == {len(columns(driven.result))}


def test_the_plot_is_there_for_a_terminal_only(driven: Driven) -> None:
    assert "o on the front" in answer_text(driven.result, folder=None, plot=True)
    assert "o on the front" not in answer_text(driven.result, folder=None)


def test_a_reason_has_its_example_if_asked_for(driven: Driven) -> None:
    assert "e.g. vllm" in answer_text(driven.result, folder=None, explain=True)


def test_several_objectives_are_the_axes_of_the_front(driven: Driven) -> None:
    both = drive(driven.result.request, How(simulates=False, objectives=("latency", "min-gpus"))).result
    assert both.axes == ("latency", "min-gpus")
    known = {row.name: row for row in driven.rows}
    fronted = [known[name] for name in both.front]
    assert len({row.gpus for row in fronted}) == len(fronted)  # of as many GPUs only the fastest
    for one in fronted:
        for other in driven.rows:
            if other.e2e_mean_s is not None and other.distance == 0.0 and other.gpus == one.gpus:
                assert one.e2e_mean_s is not None
                assert one.e2e_mean_s <= other.e2e_mean_s


def test_the_page_is_whole_and_the_same_twice(driven: Driven, tmp_path: Path) -> None:
    first = write_page(tmp_path, driven.result, driven.rows).read_bytes()
    assert write_page(tmp_path, driven.result, driven.rows).read_bytes() == first
    page = first.decode()
    best = driven.result.best
    assert best is not None
    assert best.candidate.name in page
    assert "http://" not in page
    assert "https://" not in page
    hostile = replace(driven.result, notes=("<script>alert(1)</script>",))
    assert "<script>alert" not in write_page(tmp_path, hostile, driven.rows).read_text(encoding="utf-8")


def test_the_chart_has_everybody_and_the_limit(driven: Driven) -> None:
    chart = pareto_chart(driven.result, driven.rows)
    dots = sum(len(series.x) for series in chart.series if series.kind == "dots")
    assert dots == driven.result.counts.scored
    assert [mark.at for mark in chart.marks] == [50.0]


def test_terms_sum_to_the_steps_of_the_twin(driven: Driven) -> None:
    best, request = driven.result.found[0], driven.result.request
    for pool in breakdown(best.candidate, request.workload, best.fit, best.estimate):
        memory = pool.memory
        assert memory.weights_gib + memory.kv_gib + memory.other_gib == pytest.approx(memory.total_gib)
        for step in pool.steps:
            assert step.total_s == pytest.approx(sum(step.terms.values()))
            assert step.total_s > 0.0


def test_time_that_is_up_leaves_an_answer(driven: Driven) -> None:
    late = drive(driven.result.request, How(timeout_s=1e-9))
    assert not late.result.complete
    assert not late.interrupted
    assert late.result.counts.simulated == 0
    assert any("time was up" in note for note in late.result.notes)


def test_the_ways_to_verify_have_their_title(driven: Driven) -> None:
    lines = answer_text(driven.result, folder="runs/x").splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("verify")] == [["verify", "runs/x/verify.py"]]


def test_a_search_that_was_stopped_before_it_began_does_not_say_that_nothing_fits(driven: Driven) -> None:
    counts = replace(driven.result.counts, scored=0)
    stopped = replace(driven.result, found=(), front=(), complete=False, counts=counts, nearest=None)
    for sla in (None, driven.result.request.sla):
        one = replace(stopped, request=replace(driven.result.request, sla=sla))
        assert answer_text(one, folder=None).startswith("not known  the search was stopped before anything was looked")
