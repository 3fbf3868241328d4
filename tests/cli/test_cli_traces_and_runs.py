"""The commands beside replay: traces are drawn, brought into one form and described; runs are told and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

CSV = "timestamp,prompt_tokens,output_tokens\n0,900,120\n1.5,300,40\n4,20,1\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(CSV, encoding="utf-8")
    return path


# ---------------------------------------------------------------- traces


@pytest.mark.parametrize(
    "line",
    [
        ["azure", "--rows", "300"],
        ["mooncake", "--rows", "100"],
        ["poisson", "--rate-rps", "5", "--rows", "200", "--isl", "100", "--osl", "10"],
        ["gamma", "--rate-rps", "5", "--cv", "3", "--duration-s", "20"],
    ],
)
def test_a_drawn_trace_is_marked_depends_on_its_seed_alone_and_replays(twin, tmp_path: Path, line: list[str]) -> None:
    a, b, c = (tmp_path / f"{name}.parquet" for name in "abc")
    for out, seed in ((a, "1"), (b, "1"), (c, "2")):
        assert twin("synth", *line, "--seed", seed, "-o", out).code == 0
    assert a.read_bytes() == b.read_bytes()
    assert not pq.read_table(a).equals(pq.read_table(c))
    shown = json.loads(twin("traces", "show", a, "--json").out)
    assert shown["info"]["synthetic"] is True
    assert shown["rows"] == pq.read_metadata(a).num_rows > 50
    told = twin("replay", a, "--limit", "30", "--no-html")
    assert told.code == 0
    assert "SYNTHETIC" in told.out


def test_an_imported_trace_is_the_same_demand(twin, mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.parquet"
    ended = twin("import", mine, "--time-unit", "s", "-o", out)
    assert (ended.code, ended.out) == (0, f"{out}: 3 rows\n")
    assert "times in s" in ended.err
    assert twin("import", mine, "--time-unit", "s", "-o", out, "--quiet").err == ""
    table = pq.read_table(out)
    assert table.column("arrival_s").to_pylist() == [0, 1.5, 4]
    assert table.column("isl").to_pylist() == [900, 300, 20]
    assert json.loads(twin("traces", "show", out, "--json").out)["osl"]["max"] == 120


def test_a_trace_is_described_in_words(twin, mine: Path) -> None:
    ended = twin("traces", "show", mine, "--time-unit", "s")
    assert ended.code == 0
    facts = {line[:18].strip(): line[18:].strip() for line in ended.out.splitlines()}
    assert facts["rows"] == "3"
    assert facts["span"].endswith("4.000 s")
    assert facts["ideal hit rate"].startswith("n/a")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["synth", "azur", "-o", "t.parquet"], "azure"),
        (["synth", "poisson", "-o", "t.parquet"], "rate_rps"),
        (["synth", "azure", "--isl", "5", "-o", "t.parquet"], "no effect"),
        (["synth", "azure", "--rows", "-5", "-o", "t.parquet"], "rows"),
        (["synth", "azure", "--rows", "many", "-o", "t.parquet"], "--rows"),
        (["synth", "azure", "--seed", "-1", "-o", "t.parquet"], "seed"),
        (["synth", "azure", "--rows", "9", "-o", "nowhere/t.parquet"], "nowhere/t.parquet: cannot be written"),
        (["synth", "azure"], "--out"),
        (["import", "nowhere.csv", "-o", "t.parquet"], "nowhere.csv"),
        (["import", "MINE"], "--out"),
        (["import", "MINE", "-o", "t.parquet", "--time-unit", "weeks"], "weeks"),
        (["import", "MINE", "-o", "/proc/t.parquet", "--time-unit", "s"], "/proc/t.parquet"),
        (["traces", "show", "nowhere.csv"], "nowhere.csv"),
        (["traces", "shwo", "MINE"], "shwo"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "nowhere", "nowhere"], "nowhere"),
        (["compare", "nowhere"], "Missing argument"),
    ],
)
def test_bad_lines_are_refused_in_one_line(twin, mine: Path, tmp_path: Path, line: list[str], words: str) -> None:
    ended = twin(*(mine if word == "MINE" else word for word in line))
    assert ended.code == 2
    assert words in ended.complaint
    assert not list((tmp_path / "cwd").iterdir())


# ---------------------------------------------------------------- runs


def test_a_report_can_be_told_again(twin, mine: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = twin("replay", mine, "--time-unit", "s", "--out", run)
    page = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    again = twin("report", run)
    assert again.code == 0
    assert again.out == first.out
    assert (run / "report.html").read_bytes() == page
    assert twin("report", run, "--json").out == (run / "report.json").read_text(encoding="utf-8")


def test_a_run_is_drawn_as_a_picture(twin, mine: Path, tmp_path: Path) -> None:
    run, png = tmp_path / "run", tmp_path / "slides" / "run.png"
    first = twin("replay", mine, "--time-unit", "s", "--out", run)
    drawn = twin("report", run, "--png", png)
    assert (drawn.code, drawn.out, drawn.err) == (0, f"{first.out}picture {png}\n", "")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert twin("report", run, "--json", "--png", png).out == (run / "report.json").read_text(encoding="utf-8")
    assert "must end in .png" in twin("report", run, "--png", "run.pdf").complaint
    assert (
        f"{run}/report.json/a.png: cannot be written"
        in twin("report", run, "--png", run / "report.json/a.png").complaint
    )


def test_two_runs_are_compared_in_text_json_and_a_page(twin, mine: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    twin("replay", mine, "--time-unit", "s", "--out", a)
    twin("replay", mine, "--time-unit", "s", "--out", b, "--tp", "8")
    ended = twin("compare", a, b)
    assert (ended.code, ended.err) == (0, "")
    assert "TTFT" in ended.out
    assert "workers.pool.tp" in ended.out
    page = Path(ended.out.splitlines()[-1].split()[-1])
    assert page == tmp_path / "compare-a-b.html"
    assert "<svg" in page.read_text(encoding="utf-8")
    found = json.loads(twin("compare", a, b, "--json", "--no-html").out)
    assert found["matched"]["rows"] == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["report", "run", "--metrics", "--json"], "--metrics and --json"),
        (["report", "run", "--metrics", "--png", "a.png"], "--metrics and --png"),
        (["compare", "run", "run", "--html", "a.html", "--no-html"], "--html a.html and --no-html"),
    ],
)
def test_options_that_contradict_each_other_are_refused(twin, line: list[str], words: str) -> None:
    ended = twin(*line)
    assert ended.code == 2
    assert words in ended.complaint


def test_catalogues_list_the_defaults(twin) -> None:
    assert "llama-3.1-70b" in {row["name"] for row in json.loads(twin("models", "--json").out)}
    assert "h100_sxm" in {row["name"] for row in json.loads(twin("hardware", "--json").out)}
    assert "llama-3.1-70b" in twin("models").out
    assert "h100_sxm" in twin("hardware").out
