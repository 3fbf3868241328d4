"""`twin replay --explain`: what a person sees of single decisions, and that the run stays what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RUN = ("--router", "kv", "--workers", "3", "--set", "router.router_temperature=0.5")


@pytest.fixture
def chats(twin, tmp_path: Path) -> Path:
    path = tmp_path / "chats.parquet"
    assert twin("synth", "mooncake", "--rows", "120", "--seed", "7", "-o", path).code == 0
    return path


def test_decisions_are_told_term_by_term_and_in_hindsight(twin, chats: Path, tmp_path: Path) -> None:
    ended = twin("replay", chats, *RUN, "--explain", "--out", tmp_path / "a")
    assert (ended.code, ended.err) == (0, "")
    words = " ".join(ended.out.split())
    for told in ("upper bound", "workers differed in cached blocks", "cost regret: mean", "oracle regret (TTFT, "):
        assert told in words, told
    page = (tmp_path / "a" / "report.html").read_text()
    for told in (
        "The decisions with the largest cost regret",
        "runner-up",
        "The decisions of the sample that cost most",
    ):
        assert told in page, told
    routing = json.loads((tmp_path / "a" / "report.json").read_text())["routing"]
    assert routing["explained"]["decisions"] == 120
    assert routing["explained"]["most_regretted"][0]["regret_blocks"] == routing["explained"]["regret_blocks"]["max"]
    assert twin("report", tmp_path / "a").out.splitlines()[0] == ended.out.splitlines()[0]


def test_a_plain_run_tells_what_it_can_and_where_the_rest_is(twin, chats: Path, tmp_path: Path) -> None:
    ended = twin("replay", chats, *RUN, "--out", tmp_path / "b")
    assert "cost regret" not in ended.out
    assert "workers differed in cached blocks" in ended.out
    assert "--explain records the terms of each decision" in (tmp_path / "b" / "report.html").read_text()
    twin("replay", chats, *RUN, "--explain", "--no-html", "--out", tmp_path / "c")
    for name in ("requests.parquet", "steps.parquet", "samples.parquet"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_the_bound_is_the_ideal_of_the_trace(twin, chats: Path, tmp_path: Path) -> None:
    """With blocks of the size of the trace's, and a prompt's last token left out, both count the same."""
    twin("replay", chats, "--workers", "2", "--block-size", "512", "--no-html", "--out", tmp_path / "d")
    bound = json.loads((tmp_path / "d" / "report.json").read_text())["hit_bound"]
    shown = json.loads(twin("traces", "show", chats, "--json").out)
    asked = round(bound["ideal_blocks"] / shown["hit_rate_blocks"])  # the trace counts a last, partial block as well
    assert bound["ideal_blocks"] == pytest.approx(shown["hit_rate_blocks"] * asked)
    assert bound["prompt_blocks"] <= asked <= bound["prompt_blocks"] + shown["rows"]
    assert bound["reached"] <= bound["upper_bound"]
