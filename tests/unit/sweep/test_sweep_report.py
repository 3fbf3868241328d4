"""A sweep put together from made-up runs: spread, best, effect, tables and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from policies.errors import ConfigError
from reports.figures import FIGURES, chosen_figures
from reports.sweep import Sweep, SweepRun, Value, build_sweep, plain_value, write_tables
from reports.sweep_views import short_names, sweep_text, write_sweep_html


def done(seed: int = 0, **figures: float) -> SweepRun:
    return SweepRun(seed=seed, folder=f"points/{seed}", status="done", error=None, figures=figures)


FAILED = SweepRun(seed=0, folder="", status="failed", error="the pool has <4> blocks", figures={})


def built(
    keys: tuple[str, ...],
    *points: tuple[tuple[Value, ...], tuple[SweepRun, ...]],
    shown: tuple[str, ...] = ("ttft_p95", "hit_rate"),
    seeds: tuple[int, ...] = (0,),
) -> Sweep:
    return build_sweep(
        trace="t.csv", keys=keys, points=points, shown=chosen_figures(shown), seeds=seeds, config={"router.mode": "kv"}
    )


def grid(*sizes: int) -> Sweep:
    """A grid over as many keys as sizes; the figures follow from the place in it."""
    points: list[tuple[Value, ...]] = [()]
    for size in sizes:
        points = [(*values, value) for values in points for value in range(size)]
    return built(
        tuple(f"table.key{at}" for at in range(len(sizes))),
        *((values, (done(ttft_p95=1.0 + sum(map(int, values)), hit_rate=0.5),)) for values in points),
    )


# ---------------------------------------------------------------- figures


def test_values_are_numbers_where_they_read_as_such() -> None:
    assert [plain_value(text) for text in ("4", "0.5", "1e-3", "kv", "true", "inf", "nan", "007")] == [
        4, 0.5, 0.001, "kv", "true", "inf", "nan", 7
    ]  # fmt: skip


def test_a_figure_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--metric ttft_p59: there is no such figure; did you mean ttft_p"):
        chosen_figures(["ttft_p59"])
    assert chosen_figures(["TTFT-p95"])[0].name == "ttft_p95"


def test_seeds_are_told_by_mean_and_range() -> None:
    sweep = built(("a",), ((1,), (done(0, ttft_p95=0.1), done(1, ttft_p95=0.4))), seeds=(0, 1))
    spread = sweep.points[0].spreads["ttft_p95"]
    assert (spread.runs, spread.mean, spread.low, spread.high) == (2, 0.25, 0.1, 0.4)
    assert sweep.seeds_matter is True


def test_the_mean_of_equal_values_is_that_value() -> None:
    sweep = built(("a",), ((1,), tuple(done(seed, ttft_p95=0.1) for seed in range(3))))
    assert sweep.points[0].spreads["ttft_p95"].mean == 0.1


def test_best_goes_the_way_of_each_figure_and_may_be_shared() -> None:
    sweep = built(
        ("a",),
        ((1,), (done(ttft_p95=0.2, hit_rate=0.5, kv_peak_share=0.1),)),
        ((2,), (done(ttft_p95=0.1, hit_rate=0.6, kv_peak_share=0.2),)),
        ((3,), (done(ttft_p95=0.3, hit_rate=0.6, kv_peak_share=0.3),)),
    )
    assert sweep.best["ttft_p95"] == (1,)
    assert sweep.best["hit_rate"] == (1, 2)
    assert "kv_peak_share" not in sweep.best  # neither way is better


def test_where_all_are_equal_none_is_best() -> None:
    sweep = built(("a",), ((1,), (done(ttft_p95=0.2),)), ((2,), (done(ttft_p95=0.2),)))
    assert sweep.best == {}


def test_a_key_that_changes_nothing_is_told() -> None:
    sweep = built(
        ("a", "b"),
        *(((a, b), (done(ttft_p95=float(a)), done(1, ttft_p95=float(a)))) for a in (1, 2) for b in ("x", "y")),
        seeds=(0, 1),
    )
    assert [key.effect for key in sweep.keys] == ["some", "none"]
    assert sweep.seeds_matter is False
    shown = sweep_text(sweep, path="x")
    assert "no effect: b changed no figure of any run" in shown
    assert "the seeds changed no figure" in shown


def test_an_effect_on_any_figure_counts_also_on_one_that_is_not_shown() -> None:
    sweep = built(("a",), ((1,), (done(ttft_p95=0.2, fairness=0.9),)), ((2,), (done(ttft_p95=0.2, fairness=0.8),)))
    assert sweep.keys[0].effect == "some"


def test_keys_that_never_move_alone_are_not_told_apart() -> None:
    sweep = built(("a", "b"), ((1, "x"), (done(ttft_p95=0.2),)), ((2, "y"), (done(ttft_p95=0.2),)))
    assert [key.effect for key in sweep.keys] == ["not told apart"] * 2


def test_a_varied_seed_is_a_key_like_any_other() -> None:
    sweep = built(("seed",), *(((seed,), (done(seed, ttft_p95=0.1),)) for seed in (1, 2)))
    assert sweep.keys[0].effect == "none"


def test_usual_figures_leave_out_what_is_nothing_throughout() -> None:
    sweep = built(("a",), ((1,), (done(ttft_p95=0.2, rejected=0, failed=1),)), shown=())
    assert sweep.shown == ("ttft_p95", "failed")


# ---------------------------------------------------------------- files


def test_tables_have_a_row_for_every_run_failed_ones_too(tmp_path: Path) -> None:
    sweep = built(
        ("router.mode", "n"), (("kv", 1), (done(ttft_p95=0.25),)), (("kv", 0.5), (FAILED,)), (("rr", 2), (done(),))
    )
    write_tables(tmp_path, sweep)
    rows = pq.read_table(tmp_path / "sweep.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    assert [row["n"] for row in rows] == [1.0, 0.5, 2.0]
    assert [row["router.mode"] for row in rows] == ["kv", "kv", "rr"]
    assert [row["ttft_p95"] for row in rows] == [0.25, None, None]
    assert rows[1]["error"] == "the pool has <4> blocks"
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(lines) == 4
    assert lines[0].split(",")[:6] == ["point", "status", "router.mode", "n", "run_seed", "ttft_mean"]
    assert lines[0].split(",")[5:-2] == list(FIGURES)


def test_report_json_is_whole_and_names_its_schema() -> None:
    sweep = grid(2, 2)
    plain = json.loads(sweep.to_json())
    assert plain["schema"] == "dynatwin.sweep/1"
    assert [point["values"] for point in plain["points"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert plain["best"] == {"ttft_p95": [0]}


# ---------------------------------------------------------------- the terminal and the page


def test_the_printed_table_marks_the_best_and_names_what_failed() -> None:
    sweep = built(
        ("router.mode",), (("kv",), (done(ttft_p95=0.25),)), (("rr",), (done(ttft_p95=0.5),)), (("x",), (FAILED,))
    )
    shown = sweep_text(sweep, path="out/sweep.html")
    assert re.search(r"kv +250\*\n", shown)
    assert re.search(r"rr +500\n", shown)
    assert re.search(r"x +n/a\n", shown)
    assert "failed  mode=x: the pool has <4> blocks" in shown
    assert shown.endswith("report  out/sweep.html")
    assert max(map(len, shown.splitlines())) <= 100


def test_names_are_as_short_as_they_can_be_told_apart() -> None:
    assert short_names(["router.mode", "workers.count"]) == ["mode", "count"]
    assert short_names(["workers.a.count", "workers.b.count"]) == ["a.count", "b.count"]


class Drawn(HTMLParser):
    """Counts what is drawn, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        for name in (tag, f"{tag}.{kind}"):
            self.count[name] = self.count.get(name, 0) + 1
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(sweep: Sweep, folder: Path) -> Drawn:
    text = write_sweep_html(folder, sweep).read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(", text)
    drawn = Drawn(text)
    assert drawn.open == []
    return drawn


def test_one_key_is_a_line(tmp_path: Path) -> None:
    drawn = page_of(grid(4), tmp_path).count
    assert (drawn["svg"], drawn.get("rect", 0)) == (2, 0)
    assert drawn["path.line c0"] == 2


def test_two_keys_are_a_map_with_a_cell_per_point(tmp_path: Path) -> None:
    drawn = page_of(grid(3, 2), tmp_path).count
    assert (drawn["svg"], drawn["rect"], drawn["rect.heat best"]) == (2, 12, 1)


def test_three_keys_are_a_map_per_value_of_the_third(tmp_path: Path) -> None:
    drawn = page_of(grid(3, 2, 2), tmp_path).count
    assert (drawn["svg"], drawn["rect"]) == (4, 24)


def test_more_keys_are_threads(tmp_path: Path) -> None:
    drawn = page_of(grid(2, 2, 2, 2), tmp_path).count
    assert (drawn["svg"], drawn["polyline"], drawn["polyline.thread best"]) == (2, 32, 1)


def test_a_key_with_one_value_takes_no_axis(tmp_path: Path) -> None:
    assert page_of(grid(4, 1), tmp_path).count["path.line c0"] == 2


def test_a_point_alone_or_nothing_done_still_makes_a_page(tmp_path: Path) -> None:
    assert page_of(grid(1, 1), tmp_path).count.get("svg", 0) == 0
    page_of(built(("a",), ((1,), (FAILED,)), ((2,), (FAILED,))), tmp_path)
    assert "the pool has &lt;4&gt; blocks" in (tmp_path / "sweep.html").read_text()


def test_words_and_numbers_of_one_key_stand_side_by_side(tmp_path: Path) -> None:
    sweep = built(("a",), (("off",), (done(ttft_p95=1.0),)), ((4,), (done(ttft_p95=2.0),)))
    assert page_of(sweep, tmp_path).count["svg"] == 1
