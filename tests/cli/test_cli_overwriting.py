"""What a command must never replace: its own input, files that are no run, a whole run for the sake of a bad trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROWS = "arrival_s,isl,osl\n0,10,3\n0.5,20,2\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", ["requests.parquet", "journal.jsonl"])
def test_a_run_does_not_replace_the_trace_it_reads(twin, trace: Path, tmp_path: Path, name: str, linked: bool) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    assert twin("replay", trace, "--out", folder, "--journal", "--no-html").code == 0
    assert twin("import", trace, "--out", folder / "requests.parquet").code == 0
    other.symlink_to(folder)
    before = content(folder)
    ended = twin("replay", folder / name, "--out", other if linked else folder, "--journal")
    assert ended.code == 2
    assert "is the trace of this run and would be replaced by it; choose another folder" in ended.complaint
    assert content(folder) == before


def test_a_run_does_not_replace_the_configuration_it_reads(twin, trace: Path, tmp_path: Path) -> None:
    """Unless what it writes is what is there: the same inputs replace the same run."""
    folder = tmp_path / "run"
    assert twin("replay", trace, "--out", folder, "--no-html").code == 0
    own = folder / "config.toml"
    before = own.read_bytes()
    assert twin("replay", "--config", own, "--out", folder, "--no-html").code == 0
    assert own.read_bytes() == before
    other = twin("replay", "--config", own, "--seed", "7", "--out", folder, "--no-html")
    assert other.code == 2
    assert "config.toml: is the configuration of this run and would be replaced by it" in other.complaint
    own.write_text("# ours\n[router]\nmode = 'random'\n", encoding="utf-8")
    kept = content(folder)
    assert twin("replay", trace, "--config", own, "--out", folder).code == 2
    assert content(folder) == kept
    assert twin("replay", trace, "--config", own, "--out", tmp_path / "other", "--no-html").code == 0


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_with_other_files_is_no_run_folder(twin, trace: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "cwd" / "thesis.md").write_text("mine", encoding="utf-8")
    ended = twin("replay", trace, "--out", out)
    assert ended.code == 2
    assert f"{out}: has files and no run" in ended.complaint
    assert content(tmp_path / "cwd") == {"thesis.md": b"mine"}


@pytest.mark.parametrize("options", [[], ["--journal"]])
def test_a_bad_row_does_not_cost_an_earlier_run(twin, trace: Path, tmp_path: Path, options: list[str]) -> None:
    folder, bad = tmp_path / "run", tmp_path / "bad.csv"
    assert twin("replay", trace, "--out", folder, "--journal").code == 0
    before = content(folder)
    bad.write_text(ROWS + "1,-4,2\n", encoding="utf-8")
    assert twin("replay", bad, "--out", folder, *options).code == 2
    assert content(folder) == before
    assert twin("replay", trace, "--out", folder, "--no-html").code == 0
    assert set(content(folder)) == before.keys() - {"report.html", "journal.jsonl"}


def test_import_and_synth_write_files_only(twin, trace: Path, tmp_path: Path) -> None:
    assert "is the trace that is read" in twin("import", trace, "--out", trace).complaint
    assert trace.read_text(encoding="utf-8") == ROWS
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        ended = twin("synth", "poisson", "--rate-rps", "1", "--rows", "5", "--out", place)
        assert ended.code == 2
        assert "cannot be written: it is a" in ended.complaint


def test_the_journal_of_a_synthetic_run_is_a_synthetic_trace(twin, trace: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.parquet"
    assert twin("synth", "poisson", "--rate-rps", "1", "--rows", "5", "--seed", "4", "--out", drawn).code == 0
    for source, told in ((drawn, "synthetic"), (trace, "not marked synthetic")):
        assert twin("replay", source, "--out", tmp_path / told, "--journal").code == 0
        journal = tmp_path / told / "journal.jsonl"
        shown = twin("traces", "show", journal).out
        assert told in shown
        assert ("not marked" in shown) == ("not marked" in told)
    again = twin("replay", tmp_path / "synthetic" / "journal.jsonl", "--out", tmp_path / "again")
    assert "SYNTHETIC" in again.out


SPLIT = """
[[workers]]
name = "p"
role = "prefill"
engine.block_size = {prefill}
[[workers]]
name = "d"
role = "decode"
engine.block_size = 16
"""
NOBODY = 'faults = [{at_ms = 1, kind = "worker_down", worker = "pool-9"}]'


@pytest.mark.parametrize("options", [[], ["--journal"]])
@pytest.mark.parametrize("what", ["a hand-off that cannot be", "a fault of nobody"])
def test_what_is_refused_before_it_runs_leaves_nothing_and_costs_no_run(
    twin, trace: Path, tmp_path: Path, what: str, options: list[str]
) -> None:
    """Also what only the built cluster can tell."""
    config, faults, folder = tmp_path / "c.toml", tmp_path / "f.toml", tmp_path / "run"
    config.write_text(SPLIT.format(prefill=32), encoding="utf-8")
    faults.write_text(NOBODY, encoding="utf-8")
    bad = ("--config", config) if what.startswith("a hand-off") else ("--faults", faults)
    refused = twin("replay", trace, *bad, "--out", folder, *options)
    assert refused.code == 2
    assert ("block_size" if bad[0] == "--config" else "pool-9") in refused.complaint
    assert not folder.exists()
    assert twin("replay", trace, "--out", folder, "--no-html").code == 0
    before = content(folder)
    assert twin("replay", trace, *bad, "--out", folder, *options).code == 2
    assert content(folder) == before


def test_a_run_without_end_in_sight_is_one_line(twin, trace: Path, tmp_path: Path) -> None:
    """Times that are no times any more stop the run as bad input does, not as a bug."""
    for sets in (["trace.speedup=1e-300"], ["trace.speedup=1e-15"], ["workers.latency=fixed", *FOREVER]):
        told = twin("replay", trace, "--out", tmp_path / "run", *(word for s in sets for word in ("--set", s)))
        assert told.code == 2, sets
        assert "the limit is 1e+12 s" in told.complaint


FOREVER = ("workers.latency.decode_s=1e300", "workers.latency.prefill_s=0", "workers.latency.prefill_s_per_token=0")
