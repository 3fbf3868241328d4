"""The picture: the same bytes for equal runs whatever the user's style, nothing outside it or on top of other words."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from builders_reports import SERIAL, Ask, Toy, ToyRun, draw_asks, meta_of, run_toy
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from policies.errors import ConfigError
from reports import picture
from reports.build import build_report
from reports.html import tiles
from reports.picture import draw, write_picture
from reports.plots import first_charts
from reports.record import RunRecord, RunWriter
from reports.report import Report
from reports.sla import parse_sla

PANELS = [
    "TTFT over time", "ITL over time", "Latency distributions", "Requests in the engines", "KV pool in use",
    "Requests per second",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = Toy(workers=3, decode_s=0.008, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=150)
    return run_toy(tmp_path_factory.mktemp("run"), draw_asks(400, 10.0, seed=3), toy, hash_known=True)


@pytest.fixture(scope="module")
def report(run: ToyRun) -> Report:
    return build_report(run.folder, run.meta, parse_sla("ttft=200ms,itl=50ms"))


def boxes_of(run: ToyRun, report: Report, *, complete: bool = True) -> list[tuple[str, Bbox]]:
    """Every text that is shown, with where it is in pixels."""
    figure = draw(report, first_charts(RunRecord(run.folder), report), complete=complete)
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


def words_of(run: ToyRun, report: Report, *, complete: bool = True) -> set[str]:
    return {words for words, _ in boxes_of(run, report, complete=complete)}


def test_the_picture_is_1800_pixels_wide_and_says_what_it_is(run: ToyRun, report: Report, tmp_path: Path) -> None:
    with Image.open(write_picture(run.folder, report, tmp_path / "new" / "a.png")) as image:
        assert image.size == (1800, 1140)
        told = image.info["Description"]
        assert told.startswith("SIMULATED; SYNTHETIC TRACE; SLA MISSED; TTFT p95 ")
        assert all(f"{tile.label} {tile.value}" in told for tile in tiles(report))
        assert "Software" not in image.info


def test_equal_runs_give_equal_bytes_whatever_the_style_of_the_user(
    run: ToyRun, report: Report, tmp_path: Path, root: Path
) -> None:
    first = write_picture(run.folder, report, tmp_path / "a.png").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.bbox": "tight"}):
        assert write_picture(run.folder, report, tmp_path / "b.png").read_bytes() == first
        assert matplotlib.rcParams["font.size"] == 30
    (tmp_path / "matplotlibrc").write_text("lines.color: red\nfigure.dpi: 33\n", encoding="utf-8")
    code = (
        "from pathlib import Path\nfrom reports.picture import write_picture\nfrom reports.report import Report\n"
        f"run = Path({str(run.folder)!r}); write_picture(run, Report.load(run), Path({str(tmp_path / 'c.png')!r}))"
    )
    env = {**os.environ, "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=env, check=True)
    assert (tmp_path / "c.png").read_bytes() == first
    other = replace(report, preemptions=report.preemptions + 1)
    assert write_picture(run.folder, other, tmp_path / "d.png").read_bytes() != first


def test_title_badges_figures_and_charts_are_there(run: ToyRun, report: Report) -> None:
    words = words_of(run, report)
    assert {"SIMULATED", "SYNTHETIC TRACE", "SLA MISSED", "router: round-robin"} <= words
    assert {tile.value for tile in tiles(report)} <= words
    assert [title for title in PANELS if title not in words] == []
    assert "p95 ttft <= 200ms" in words
    assert any(line.startswith("latency model: ") for line in words)
    assert "PARTIAL: STOPPED HALF-WAY" in words_of(run, report, complete=False)


def test_words_are_neither_cut_nor_on_top_of_each_other(run: ToyRun, report: Report) -> None:
    meta = replace(
        report.meta,
        trace=replace(report.meta.trace, name=f"{'a name that is long ' * 9}.csv", source="somewhere " * 40),
        cluster=tuple(f"pool-{n}: {'4 x mixed · ' * 30}" for n in range(5)),
        router="kv " * 90,
    )
    boxes = boxes_of(run, replace(report, meta=meta), complete=False)
    width, height = picture.WIDTH_IN * picture.DPI, picture.HEIGHT_IN * picture.DPI
    for words, box in boxes:
        assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (True,) * 4, words
    above = [(words, box) for words, box in boxes if box.y0 > height - 2.2 * picture.DPI]
    assert len(above) >= 10 + len(tiles(report))
    for (one, box), (other, its_box) in itertools.combinations(above, 2):
        assert not box.padded(-2).overlaps(its_box.padded(-2)), (one, other)
    assert any("and 3 more groups of workers" in words for words, _ in above)


def test_names_are_no_formulas_and_foreign_glyphs_no_warning(run: ToyRun, report: Report, tmp_path: Path) -> None:
    meta = replace(report.meta, trace=replace(report.meta.trace, name="$x_1$ and $数据$.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_picture(run.folder, replace(report, meta=meta), tmp_path / "a.png")


def test_colours_are_those_of_the_page(root: Path) -> None:
    css = (root / "reports" / "templates" / "page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--(\w+): (#\w{6});", css.partition("}")[0]))
    assert [light[f"c{place}"] for place in range(8)] == list(picture.COLOURS)
    assert {tone: light[tone or "ink"] for tone in picture.TONES} == picture.TONES
    assert light["grid"] == picture.GRID


@pytest.mark.parametrize("workers", [1, 2, 70])
def test_any_number_of_workers_is_drawn(tmp_path: Path, workers: int) -> None:
    run = run_toy(tmp_path, draw_asks(80, 20.0, seed=9), Toy(workers=workers))
    words = words_of(run, build_report(run.folder, run.meta))
    named = {"range", "median"} if workers > 2 else {f"pool-{n}" for n in range(workers)}
    assert named <= words


def test_a_lone_value_is_a_dot(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11)])
    report = build_report(run.folder, run.meta)
    figure = draw(report, first_charts(RunRecord(run.folder), report), complete=True)
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "TTFT over time"]
    (line,) = [line for line in axes.lines if line.get_label() == "p50"]
    assert line.get_marker() == "."
    assert np.isfinite(line.get_ydata()[line.get_markevery()]).all()


def test_what_is_undefined_reads_so(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100_000, 3)], replace(SERIAL, total_blocks=10))
    report = build_report(run.folder, run.meta)
    assert report.counts.rejected == 1
    assert "n/a" in words_of(run, report)
    write_picture(run.folder, report, tmp_path / "a.png")


def test_a_run_without_requests_and_a_place_that_is_none_are_refused(
    run: ToyRun, report: Report, tmp_path: Path
) -> None:
    RunWriter(tmp_path / "none").close()
    nothing = build_report(tmp_path / "none", meta_of(SERIAL))
    with pytest.raises(ConfigError, match="no request, so there is nothing to draw"):
        write_picture(tmp_path / "none", nothing, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"report\.json/a\.png: cannot be written \("):
        write_picture(run.folder, report, run.folder / "report.json" / "a.png")
