"""`twin record`, and what follows it: a trace and a configuration of the twin, its replay, the table of live repeats
beside it. Simulated runs with a journal stand in for live ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traces.convert import write_table
from traces.synth import SynthOptions, synthesise
from twin.config_read import load
from twin.replay import replay

CONFIG = """
allow_no_effect = true
[[workers]]
count = 2
tp = 1
model = "llama-3.1-8b"
path_s = 0.01
[workers.engine]
kv_blocks = 2000
[workers.latency]
model = "linear"
step_s = {step_s}
prefill_s_per_token = 1e-4
decode_s_per_request = 1e-3
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def live(top: Path) -> list[Path]:
    """Three repeats of one load on engines that are not equally fast each time."""
    trace = top / "trace.parquet"
    write_table(synthesise("poisson", SynthOptions(seed=0, rows=120, rate_rps=3.0, isl=300, osl=20)), trace)
    runs = []
    for number, step_s in enumerate((0.010, 0.011, 0.0105), 1):
        config = top / f"planted-{number}.toml"
        config.write_text(CONFIG.format(step_s=step_s), encoding="utf-8")
        planted = load(config, {}, [f"trace.path={trace}"])
        runs.append(replay(planted, out=top / f"live-{number}", html=False, journal=True).folder)
    return runs


def test_live_runs_become_a_twin_that_is_compared_with_them(twin, live: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "twin"
    recorded = twin("record", *live, "--fit-rows", "60", "--out", out, "--quiet")
    assert (recorded.code, recorded.err) == (0, "")
    assert "fitted to the first 60 requests of each of live runs live-1" in recorded.out
    assert "group pool: 180 requests" in recorded.out
    use = [line.removeprefix("use").split() for line in recorded.out.splitlines()[-2:]]
    assert [line[:2] for line in use] == [["twin", "replay"], ["twin", "compare"]]

    replayed = twin(*use[0][1:], "--json", "--no-html")  # the line that it tells, as it stands
    assert replayed.code == 0, replayed.err
    report = json.loads(replayed.out)
    (latency,) = report["meta"]["latency"]
    assert latency["model"] == "linear"
    assert "live-1" in latency["source"]
    assert "not used in the fit" in latency["error_band"]
    assert report["latency"]["ttft_s"]["count"] == 60

    compared = twin(*use[1][1:])
    assert compared.code == 0, compared.err
    assert "60 requests compared, 3 live runs" in compared.out
    assert "within the larger of 15% and the live spread: held" in compared.out
    assert "not modelled: tokeniser" in compared.out
    found = json.loads(twin(*use[1][1:], "--json").out)
    by_name = {one["name"]: one for one in found["figures"]}
    assert by_name["E2E mean"]["low"] < by_name["E2E mean"]["twin"] < by_name["E2E mean"]["high"]
    assert found["close"] is True


def test_alternating_halves_are_fitted_and_compared(twin, live: list[Path], tmp_path: Path) -> None:
    recorded = twin("record", *live, "--fit-blocks", "15", "--out", tmp_path / "twin", "--quiet")
    assert "fitted to every other block of 15 requests of each of live runs live-1" in recorded.out
    assert "group pool: 180 requests" in recorded.out
    replay_line, compare_line = (line.removeprefix("use").split() for line in recorded.out.splitlines()[-2:])
    assert compare_line[-2:] == ["--blocks", "15"]
    assert twin(*replay_line[1:], "--no-html", "--quiet").code == 0
    found = json.loads(twin(*compare_line[1:], "--json").out)
    assert (found["rows"], found["first_row"], found["close"]) == (60, 0, True)


def test_calibrate_writes_the_configuration_alone(twin, live: list[Path], top: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    ended = twin("calibrate", "--from", "live", live[0], "--out", file, "-q")
    assert (ended.code, ended.err) == (0, "")
    assert "group pool: 120 requests" in ended.out
    shown = twin("replay", top / "trace.parquet", "--config", file, "--show-config")
    assert 'model = "linear"' in shown.out


def test_the_folder_is_beside_the_run_if_none_is_named(twin, live: list[Path]) -> None:
    assert twin("record", live[0], "-q").code == 0
    assert sorted(path.name for path in live[0].with_name("live-1-twin").iterdir()) == ["trace.parquet", "twin.toml"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["record"], "Missing argument"),
        (["record", "nowhere"], "nowhere: not a whole run folder, without journal.jsonl"),
        (["record", "LIVE", "LIVE"], "the same run twice adds nothing"),
        (["record", "LIVE", "--fit-rows", "0"], "--fit-rows 0: must be 1 or more"),
        (["record", "LIVE", "--fit-rows", "5", "--fit-blocks", "5"], "two halves at once; give one of them"),
        (["record", "LIVE", "--fit-blocks", "120"], "has 120 requests, so none is left to measure"),
        (["compare", "LIVE", "LIVE", "LIVE", "--blocks", "0"], "--blocks 0: must be 1 or more"),
        (["compare", "LIVE", "LIVE", "--blocks", "5"], "--blocks 5: has no effect on two runs"),
        (["record", "LIVE", "--fit-rows", "5"], "5 completed requests to fit to; at least 10 are needed"),
        (["record", "LIVE", "--fit-rows", "120"], "has 120 requests, so none is left to measure"),
        (["record", "LIVE", "--out", "/proc/twin"], "--out /proc/twin: cannot be made"),
        (["record", "LIVE", "--out", "FILE"], "is a file; name a folder"),
        (["calibrate", "--from", "live", "nowhere", "--out", "o.toml"], "nowhere: not a whole run folder"),
        (["calibrate", "--from", "live", "LIVE", "--out", "/proc/o.toml"], "/proc/o.toml: cannot be written"),
        (["calibrate", "--from", "live", "LIVE", "--out", "o", "--columns", "a=b"], "--columns: has no effect with"),
        (["calibrate", "--from", "live", "LIVE", "--out", "o", "--seed", "3"], "--seed: has no effect with"),
        (["compare", "LIVE", "nowhere", "LIVE"], "nowhere"),
        (["compare", "LIVE", "LIVE", "LIVE", "--html", "a.html"], "there is a page of two runs only"),
    ],
)
def test_bad_input_costs_one_line_and_writes_nothing(
    twin, live: list[Path], top: Path, tmp_path: Path, line: list[str], words: str
) -> None:
    places = {"LIVE": live[0], "FILE": live[0] / "report.json"}
    before = {path: path.stat().st_mtime_ns for place in (top, tmp_path) for path in place.rglob("*")}
    ended = twin(*(places.get(word, word) for word in line), "-q" if line[0] != "compare" else "--no-html")
    assert ended.code == 2
    assert words in ended.complaint
    assert {path: path.stat().st_mtime_ns for place in (top, tmp_path) for path in place.rglob("*")} == before
