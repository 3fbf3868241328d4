"""Two runs side by side: equal runs are equal, a difference is named with its size, and chance is told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy

from policies.errors import ConfigError
from reports.build import build_report
from reports.compare import Comparison, Difference, compare
from reports.compare_views import comparison_text, write_comparison_html
from reports.record import RunRecord, finish_run

FOUR = Toy(workers=4, decode_s=0.008, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=32, total_blocks=900)
ASKS = draw_asks(600, 8.0, seed=1)


def put(folder: Path, asks: list[Ask], toy: Toy) -> Path:
    run = run_toy(folder, asks, toy)
    build_report(folder, replace(run.meta, config={"workers": [{"count": toy.workers}], "seed": 0}))
    return folder


def named(comparison: Comparison, name: str) -> Difference:
    return next(one for one in comparison.differences if one.name == name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("runs")
    return {
        "four": put(top / "four", ASKS, FOUR),
        "again": put(top / "again", ASKS, FOUR),
        "three": put(top / "three", ASKS, replace(FOUR, workers=3)),
        "other": put(top / "other", draw_asks(600, 8.0, seed=99), FOUR),
    }


def test_equal_runs_are_equal_in_everything(folders: dict[str, Path]) -> None:
    comparison = compare(folders["four"], folders["again"])
    assert {one.absolute for one in comparison.differences} <= {0, None}
    assert comparison.config == ()
    assert comparison.matched is not None
    assert comparison.matched.same_worker_share == comparison.matched.same_status_share == 1.0
    assert all((one.equal_share, one.max_relative) == (1.0, 0.0) for one in comparison.matched.metrics)


def test_a_difference_has_its_size_and_its_interval(folders: dict[str, Path]) -> None:
    comparison = compare(folders["four"], folders["three"])
    e2e = named(comparison, "E2E mean")
    a, b = (RunRecord(folders[name]).requests.floats("e2e_s") for name in ("four", "three"))
    assert e2e.absolute == pytest.approx((b - a).mean())
    assert e2e.relative == pytest.approx((b.mean() - a.mean()) / a.mean())
    assert e2e.inside is False
    assert e2e.spread < e2e.absolute
    assert named(comparison, "ITL mean").inside is None
    (config,) = comparison.config
    assert (config.key, config.a, config.b) == ("workers.0.count", "4", "3")


def test_requests_are_matched_by_row(folders: dict[str, Path]) -> None:
    matched = compare(folders["four"], folders["three"]).matched
    assert matched is not None
    a, b = (RunRecord(folders[name]).requests.floats("ttft_s") for name in ("four", "three"))
    ttft = matched.metrics[0]
    assert (ttft.rows, ttft.only_a, ttft.only_b) == (600, 0, 0)
    assert ttft.equal_share == pytest.approx((a == b).mean())
    assert ttft.max_relative == pytest.approx((np.abs(b - a) / np.maximum(a, 1e-3)).max())
    assert matched.same_worker_share == pytest.approx(np.mean([row % 4 == row % 3 for row in range(600)]))


def test_other_requests_are_not_matched_and_chance_is_told_apart(folders: dict[str, Path]) -> None:
    comparison = compare(folders["four"], folders["other"])
    assert comparison.matched is None
    assert "different requests" in comparison.notes[0]
    assert named(comparison, "TTFT mean").inside is True


def test_a_shorter_run_is_matched_as_far_as_it_goes(folders: dict[str, Path], tmp_path: Path) -> None:
    part = put(tmp_path / "part", ASKS[:400], FOUR)
    finish_run(part, complete=False, cpu_s=0.0, wall_s=0.0)
    comparison = compare(folders["four"], part)
    assert comparison.matched is not None
    assert comparison.matched.rows == 400
    assert comparison.notes == (
        "part is partial: it was stopped half-way", "only the first 400 rows are in both runs",
    )  # fmt: skip


def test_means_of_other_sets_of_requests_are_not_judged_by_matched_ones(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    part = put(tmp_path / "part", ASKS[:400], FOUR)  # its 400 answers are equal in both runs, the means are not
    comparison = compare(folders["four"], part)
    assert comparison.matched is not None
    assert comparison.matched.metrics[0].equal_share == 1.0
    ttft = named(comparison, "TTFT mean")
    assert ttft.absolute != 0
    intervals = [named(compare(folder, folder), "TTFT mean") for folder in (folders["four"], part)]
    assert ttft.inside is True
    assert all(one.spread == 0 for one in intervals)
    assert ttft.spread > abs(ttft.absolute)


def test_what_completed_in_one_run_only_is_counted_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    leaves = [replace(ask, cancel_at_s=ask.arrival_s + 0.05) if row == 30 else ask for row, ask in enumerate(ASKS)]
    comparison = compare(folders["four"], put(tmp_path / "leaves", leaves, FOUR))
    assert comparison.matched is not None
    e2e = next(one for one in comparison.matched.metrics if one.name == "E2E")
    assert (e2e.rows, e2e.only_a, e2e.only_b) == (599, 1, 0)
    assert named(comparison, "cancelled").absolute == 1


def test_other_arrivals_are_said(folders: dict[str, Path], tmp_path: Path) -> None:
    later = put(tmp_path / "later", [replace(ask, arrival_s=ask.arrival_s * 2) for ask in ASKS], FOUR)
    comparison = compare(folders["four"], later)
    assert "they arrived at other times" in comparison.notes[0]


def test_the_views_show_it(folders: dict[str, Path], tmp_path: Path) -> None:
    comparison = compare(folders["four"], folders["three"])
    text = comparison_text(comparison)
    for words in ("a  four", "b  three", "E2E mean", "differs", "600 requests matched by row", "workers.0.count"):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 100
    path = write_comparison_html(comparison, folders["four"], folders["three"], tmp_path / "out" / "compare.html")
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") == 9
    assert "http" not in page


def test_json_is_stable_and_has_no_paths(folders: dict[str, Path]) -> None:
    texts = [compare(folders["four"], folders["three"]).to_json() for _ in range(2)]
    assert texts[0] == texts[1]
    assert str(folders["four"].parent) not in texts[0]
    assert json.loads(texts[0])["schema"] == "dynatwin.comparison/1"


def test_what_is_no_run_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run folder"):
        compare(folders["four"], tmp_path / "nowhere")
