"""Bars of KV tiers: where blocks were found, what moved; none for a run without tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from builders_reports import Toy, draw_asks, run_toy

from reports.bars import LEFT, PLOT_W, Bars, Part, Row, draw_bars
from reports.build import build_report
from reports.html import write_html
from reports.kv_tiers import tier_bars
from reports.report import HitBound, Json, Report

FOUND = {"lookup_blocks": 1000, "g1_hit_blocks": 100, "g2_hit_blocks": 50, "g3_hit_blocks": 200, "g4_hit_blocks": 0}
BOUND = HitBound(reached=0.35, upper_bound=0.4, prompt_blocks=1000, ideal_blocks=400)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A run without tiers; that the device is counted all the same makes no tier of it."""
    run = run_toy(tmp_path_factory.mktemp("run"), draw_asks(20, 10.0, seed=3), Toy(workers=2), hash_known=True)
    meta = replace(run.meta, tiers={"lookup_blocks": 1000, "g1_hit_blocks": 100, "g2_hit_blocks": 0})
    return run.folder, build_report(run.folder, meta)


def with_tiers(report: Report, tiers: dict[str, int] = FOUND, bound: HitBound | None = BOUND, **moved: int) -> Report:
    """The report of a run with host memory and disk; `moved` are bytes by tier and way (`g2_stored`)."""
    edges: dict[str, Json] = {
        tier: {f"{way}_bytes": moved.get(f"{tier}_{way}", 0) for way in ("stored", "loaded")} for tier in ("g2", "g3")
    }
    meta = replace(report.meta, tiers=tiers, kvbm={"hits": {"lookups": 1000}, "edges": edges, "spreads": {}})
    return replace(report, meta=meta, hit_bound=bound)


def drawn(one: Bars) -> list[tuple[str, float, float]]:
    """Parts as drawn: title, left edge and width as shares of the frame."""
    rects = ElementTree.fromstring(draw_bars(one)).iter("rect")
    found = [(rect.findtext("title"), float(rect.attrib["x"]), float(rect.attrib["width"])) for rect in rects]
    return [
        (title, round((x - LEFT) / PLOT_W, 3), round(width / PLOT_W, 3))
        for title, x, width in found
        if title is not None
    ]


def test_parts_stand_side_by_side_and_add_up_to_the_hit_rate(plain: tuple[Path, Report]) -> None:
    hits, _ = tier_bars(with_tiers(plain[1], g2_stored=1))
    assert drawn(hits) == [
        ("device: 10.0 %", 0.0, pytest.approx(0.1, abs=2e-3)),
        ("host memory: 5.0 %", pytest.approx(0.1, abs=2e-3), pytest.approx(0.05, abs=2e-3)),
        ("disk: 20.0 %", pytest.approx(0.15, abs=2e-3), pytest.approx(0.2, abs=2e-3)),
        ("endless cache: 40.0 %", 0.0, pytest.approx(0.4, abs=2e-3)),
    ]
    assert [row.says for row in hits.rows] == ["35.0 %", "40.0 %"]
    assert [label for label, _ in hits.legend] == ["device 10.0 %", "host memory 5.0 %", "disk 20.0 %"]


def test_without_a_bound_there_is_one_row(plain: tuple[Path, Report]) -> None:
    hits, _ = tier_bars(with_tiers(plain[1], bound=None, g2_stored=1))
    assert [row.label for row in hits.rows] == ["found"]


def test_bytes_of_each_tier_and_way_are_on_one_scale(plain: tuple[Path, Report]) -> None:
    _, moved = tier_bars(
        with_tiers(plain[1], g2_stored=4_000_000, g2_loaded=1_000_000, g3_stored=2_000_000, g3_loaded=7)
    )
    assert [(row.label, row.says) for row in moved.rows] == [
        ("down to host memory", "4 MB"), ("up from host memory", "1 MB"),
        ("down to disk", "2 MB"), ("up from disk", "7 B"),
    ]  # fmt: skip
    assert [round(width, 2) for _, _, width in drawn(moved)] == [1.0, 0.25, 0.5, 0.0]


def test_bytes_from_other_workers_are_a_row_of_their_own(plain: tuple[Path, Report]) -> None:
    report = with_tiers(plain[1], g2_stored=4_000_000)
    kvbm = report.meta.kvbm | {"peers": {"loaded": 2, "failed_reads": 0, "loaded_bytes": 2_000_000}}  # type: ignore[operator]
    _, moved = tier_bars(replace(report, meta=replace(report.meta, kvbm=kvbm)))
    assert (moved.rows[-1].label, moved.rows[-1].says) == ("up from other workers", "2 MB")


def test_a_plain_host_tier_shows_what_came_up_over_a_link(plain: tuple[Path, Report]) -> None:
    report = plain[1]
    tiers = {"lookup_blocks": 1000, "g1_hit_blocks": 100, "g2_hit_blocks": 60, "loaded_blocks": 60}
    without_link = replace(report, meta=replace(report.meta, tiers=tiers))
    assert [one.title for one in tier_bars(without_link)] == ["Hit rate by tier"]
    over_link = replace(report, meta=replace(report.meta, tiers=tiers, moved_bytes={"host": 5_000}))
    _, moved = tier_bars(over_link)
    assert [(row.label, row.says) for row in moved.rows] == [("up from host memory", "5 kB")]


def test_tiers_that_moved_and_found_nothing_are_said_to_have_found_nothing(plain: tuple[Path, Report]) -> None:
    (hits,) = tier_bars(with_tiers(plain[1], {"lookup_blocks": 10, "g1_hit_blocks": 0}))
    assert hits.rows[0].says == "0.0 %"
    assert list(tier_bars(with_tiers(plain[1], {"lookup_blocks": 0}))) == []


def test_the_page_shows_them_only_for_a_run_with_tiers(plain: tuple[Path, Report]) -> None:
    folder, report = plain
    assert list(tier_bars(report)) == []
    before = write_html(folder, report).read_text(encoding="utf-8")
    after = write_html(folder, with_tiers(report, g3_loaded=3_000_000_000)).read_text(encoding="utf-8")
    assert "Hit rate by tier" not in before
    assert after.count("<svg") == before.count("<svg") + 2
    assert "Hit rate by tier" in after
    assert "up from disk: 3 GB" in after


def test_names_are_escaped_and_equal_bars_give_equal_bytes() -> None:
    part = Part(label="<a>", value=1.0, colour=0, says="&")
    bars = Bars(title='"t"', note="", rows=[Row(label="<r>", parts=[part], says="<1>")], full=2.0)
    root = ElementTree.fromstring(draw_bars(bars))
    assert [text.text for text in root.iter("text")] == ["<r>", "<1>"]
    assert draw_bars(bars) == draw_bars(bars)
