"""The page: one file that fetches nothing, escapes what it is given, and draws what the run did."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from builders_reports import SERIAL, Ask, Toy, ToyRun, draw_asks, meta_of, request_row, run_toy

from reports.build import build_report
from reports.html import write_html
from reports.plots import run_charts
from reports.record import RunRecord, RunWriter
from reports.report import Report
from reports.sla import parse_sla
from reports.svg import Axis, Chart, Mark, Series, draw, pointer_json

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in order; keeps tags, text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.words: list[str] = []
        self.near: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.links.append(f"{tag} {name}={value}")
            if name == "data-near":
                self.near.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = Toy(workers=3, decode_s=0.008, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=150)
    asks = [*draw_asks(400, 10.0, seed=3), Ask(41.0, 9_000, 5)]
    run = run_toy(tmp_path_factory.mktemp("run"), asks, toy, hash_known=True)
    run.meta = replace(
        run.meta,
        warnings=("<script>alert(1)</script> & \"quotes\"",),
        config={"router": {"mode": "kv"}, "workers": [{"count": 3}], "seed": 0},
        origins={"router.mode": "--router", "workers.0.count": "default", "seed": "default"},
    )  # fmt: skip
    return run


@pytest.fixture(scope="module")
def report(run: ToyRun) -> Report:
    return build_report(run.folder, run.meta, parse_sla("ttft=200ms,itl=50ms"))


@pytest.fixture(scope="module")
def page(run: ToyRun, report: Report) -> str:
    return write_html(run.folder, report).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    read = Page(page)
    assert read.open == []
    assert read.links == []
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert len(page) < 1_500_000


def test_what_the_run_says_is_escaped(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert '<script>alert(1)</script> & "quotes"' in Page(page).words


def test_what_a_reader_must_know_is_on_it(page: str, report: Report) -> None:
    words = " ".join(" ".join(Page(page).words).split())
    for expected in (
        "SIMULATED", "SYNTHETIC TRACE", "SLA MISSED", "p95 ttft <= 200ms", "network and tokenising time", "--router",
        "workers.0.count", "Time to first token = first token - arrival", "pool-2", "in the worker's queue",
        "needs 563 blocks, the pool has 150",
    ):  # fmt: skip
        assert expected in words, expected
    assert f"{report.latency.ttft_s.p95:.2f} s TTFT p95" in words


def test_badges_tell_measured_recorded_and_partial(run: ToyRun, report: Report) -> None:
    meta = replace(report.meta, simulated=False, trace=replace(report.meta.trace, synthetic=False))
    text = write_html(run.folder, replace(report, meta=meta, sla=None), complete=False).read_text(encoding="utf-8")
    assert {"MEASURED", "RECORDED TRACE", "PARTIAL: STOPPED HALF-WAY"} <= set(Page(text).words)
    assert "SIMULATED" not in text
    assert "SLA" not in text


def test_every_chart_that_was_asked_for_is_drawn(run: ToyRun, report: Report, page: str) -> None:
    titles = [chart.title for chart in run_charts(RunRecord(run.folder), report)]
    assert titles == [
        "Latency of requests", "Latency of tokens", "TTFT over time", "ITL over time", "Requests in the engines",
        "Requests per second", "Tokens per second", "Prefix hit rate", "KV pool in use", "Running requests per worker",
        "Busy share per worker", "TTFT by prompt length",
    ]  # fmt: skip
    assert Page(page).tags["svg"] == len(titles)


def test_the_pointer_has_a_text_for_every_point(page: str) -> None:
    for text in Page(page).near:
        near = json.loads(text)
        for series in filter(None, [*near["s"], near.get("m")]):
            assert len(series["x"]) == len(series["t"]) > 0
            assert series["x"] == sorted(series["x"])


def test_a_run_without_requests_still_makes_a_page(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    text = write_html(tmp_path, build_report(tmp_path, meta_of(SERIAL), parse_sla("ttft=1s"))).read_text(
        encoding="utf-8"
    )
    assert Page(text).tags["svg"] == 0
    assert "n/a" in text


def test_a_single_request_makes_a_page(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11)])
    read = Page(write_html(run.folder, build_report(run.folder, run.meta)).read_text(encoding="utf-8"))
    assert read.open == []
    assert read.tags["svg"] >= 8


def test_many_workers_become_a_band(tmp_path: Path) -> None:
    run = run_toy(tmp_path, draw_asks(80, 20.0, seed=9), Toy(workers=70))
    report = build_report(run.folder, run.meta)
    charts = {chart.title: chart for chart in run_charts(RunRecord(tmp_path), report)}
    assert [series.label for series in charts["Busy share per worker"].series] == ["range", "median"]
    assert "the 64 busiest of 70 workers" in write_html(tmp_path, report).read_text(encoding="utf-8")


def test_slowest_requests_say_what_made_them_slow(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.requests = {
        0: request_row(0, dispatch_s=0.0, admit_s=0.0, first_token_s=9.0, last_token_s=10.0, readmissions=2),
        1: request_row(1, dispatch_s=1.0, admit_s=8.0, first_token_s=8.5, last_token_s=9.0),
        2: request_row(2, dispatch_s=5.0, admit_s=5.0, first_token_s=5.5, last_token_s=9.0, migrations=1),
        3: request_row(3, request_id=None, admit_s=3.5, dispatch_s=3.0, first_token_s=3.9, last_token_s=9.0),
    }
    writer.close()
    words = Page(write_html(tmp_path, build_report(tmp_path, meta_of(SERIAL))).read_text(encoding="utf-8")).words
    why = [word for word in words if "computing the prompt" in word]
    assert why == [
        "9.00 s computing the prompt; preempted 2 times",
        "7.00 s in the worker's queue; 500 ms computing the prompt",
        "3.00 s before it was sent to a worker; 500 ms computing the prompt; migrated 1 time",
        "500 ms in the worker's queue; 400 ms computing the prompt",
    ]
    assert "row 3" in words


# --- drawing ----------------------------------------------------------------------------------------------------------


def plain(value: float) -> str:
    return f"{value:g}"


def chart(*series: Series, log: bool = False, marks: tuple[Mark, ...] = ()) -> Chart:
    axis = Axis(title="x", tick=plain)
    return Chart(title="T & <T>", x=axis, y=replace(axis, title="y", log=log), series=series, marks=marks)


def paths(svg: str, kind: str) -> list[str]:
    return [str(path.get("d")) for path in ElementTree.fromstring(svg).iter("path") if kind in str(path.get("class"))]


def test_a_missing_value_breaks_the_line() -> None:
    values = np.array([1.0, 2.0, np.nan, 3.0, np.nan])
    (line,) = paths(draw(chart(Series(label="a", x=np.arange(5.0), y=values, colour=0))), "line")
    assert line.count("M") == 2
    assert line.endswith("h1.5")


@pytest.mark.parametrize("log", [False, True])
def test_marks_and_ticks_are_where_their_values_are(log: bool) -> None:
    x, y = np.array([0.0, 10.0]), np.array([1.0, 100.0])
    svg = draw(chart(Series(label="a", x=x, y=y, colour=0), log=log, marks=(Mark(axis="y", at=10.0, label="ten"),)))
    root = ElementTree.fromstring(svg)
    mark = next(float(str(line.get("y1"))) for line in root.iter("line") if line.get("class") == "mark")
    (line,) = paths(svg, "line")
    low, high = (float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", line))
    assert (low - mark) / (low - high) == pytest.approx(0.5 if log else 9 / 99, abs=0.01)


def test_a_mark_outside_is_left_out() -> None:
    series = Series(label="a", x=np.array([0.0, 1.0]), y=np.array([0.0, 1.0]), colour=0)
    assert "far" not in draw(chart(series, marks=(Mark(axis="y", at=50.0, label="far"),)))


def test_odd_ranges_are_drawn() -> None:
    for y in ([5.0, 5.0], [0.0, 0.0], [-1.0, 1.0], [1e-12, 1e12], [np.nan, 4.0]):
        for log in (False, True):
            ElementTree.fromstring(draw(chart(Series(label="a", x=np.arange(2.0), y=np.array(y), colour=1), log=log)))


def test_dots_are_thinned_evenly() -> None:
    count = 4_000
    series = Series(label="a", x=np.arange(float(count)), y=np.arange(float(count)), colour=0, kind="dots")
    (dots,) = paths(draw(chart(series)), "dots")
    assert dots.count("M") == count // 3 + 1


def test_pointer_texts_skip_what_is_undefined() -> None:
    x = np.array([0.0, np.nan, 2.0])
    near = json.loads(pointer_json(chart(Series(label="a", x=x, y=x, colour=0, says=["a", "b", "c"]))))
    assert near["s"][0]["t"] == ["a", "c"]
