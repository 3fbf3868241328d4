"""`twin replay` from the outside: what it prints, what it writes, how each kind of ending is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.commands import replay as replay_command
from twin.commands.replay_line import OPTIONS, quick
from twin.commands.tree import root as tree
from twin.config_read import FLAGS

TWIN = Path(sys.executable).parent / "twin"
RUN_FILES = {
    "requests.parquet",
    "steps.parquet",
    "decisions.parquet",
    "samples.parquet",
    "report.json",
    "report.html",
    "config.toml",
    "run.json",
}
HEADER = "arrival_s,isl,osl\n"
FOUR_ROWS = HEADER + "0,100,10\n0.5,200,20\n0.5,50,1\n3,1000,30\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path, FOUR_ROWS)


def written(folder: Path, text: str, name: str = "four.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- what it prints and writes


def test_a_replay_prints_a_table_and_says_where_the_report_is(twin, trace: Path, tmp_path: Path) -> None:
    ended = twin("replay", trace)
    assert (ended.code, ended.err) == (0, "")
    for word in ("TTFT", "TPOT", "ITL", "E2E", "queue wait", "round-robin", "roofline", "not modelled", "4 completed"):
        assert word in ended.out
    last = ended.out.splitlines()[-1].split()[-1]
    assert last.startswith("runs/four-")
    folder = tmp_path / "cwd" / Path(last).parent
    assert {path.name for path in folder.iterdir()} == RUN_FILES


def test_equal_inputs_replace_the_same_run_with_the_same_report(twin, trace: Path, tmp_path: Path) -> None:
    twin("replay", trace, "--no-html")
    (run,) = (tmp_path / "cwd" / "runs").iterdir()
    first = (run / "report.json").read_bytes()
    twin("replay", trace, "--no-html", env={"PYTHONHASHSEED": "77"})
    assert [run] == list((tmp_path / "cwd" / "runs").iterdir())
    assert (run / "report.json").read_bytes() == first
    assert "report.html" not in {path.name for path in run.iterdir()}


def test_a_run_replays_from_its_own_configuration(twin, trace: Path, tmp_path: Path) -> None:
    flags = ["--workers", "2", "--router", "least_loaded", "--speedup", "2", "--set", "router.tie_break=lowest_id"]
    assert twin("replay", trace, *flags, "--out", tmp_path / "a", "--no-html").code == 0
    assert twin("replay", "--config", tmp_path / "a" / "config.toml", "--out", tmp_path / "b", "--no-html").code == 0
    a, b = (json.loads((tmp_path / run / "report.json").read_text()) for run in "ab")
    a["meta"].pop("origins")
    b["meta"].pop("origins")
    assert a == b


def test_json_is_the_report_and_nothing_else(twin, trace: Path, tmp_path: Path) -> None:
    ended = twin("replay", trace, "--json", "--name", "mine")
    assert ended.out == (tmp_path / "cwd" / "runs" / "mine" / "report.json").read_text(encoding="utf-8")
    assert json.loads(ended.out)["counts"]["completed"] == 4


def test_what_is_asked_for_is_written(twin, trace: Path, tmp_path: Path) -> None:
    ended = twin("replay", trace, "--journal", "--perfetto", "--explain", "--out", tmp_path / "run")
    assert ended.code == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == RUN_FILES | {"journal.jsonl", "perfetto.json"}
    json.loads((tmp_path / "run" / "perfetto.json").read_text(encoding="utf-8"))


def test_a_missed_sla_is_a_result_and_exit_3(twin, trace: Path) -> None:
    kept = twin("replay", trace, "--sla", "ttft=60s")
    assert (kept.code, kept.err) == (0, "")
    missed = twin("replay", trace, "--sla", "ttft=1us")
    assert (missed.code, missed.err) == (3, "")
    assert "missed" in missed.out


def test_options_without_effect_are_listed_in_the_report_when_allowed(twin, trace: Path) -> None:
    ended = twin("replay", trace, "--set", "router.router_temperature=1", "--allow-no-effect")
    assert ended.code == 0
    assert "router.router_temperature has no effect" in " ".join(ended.out.split())


def test_left_out_rows_are_counted(twin, tmp_path: Path) -> None:
    trace = written(tmp_path, FOUR_ROWS + "4,nan,3\n5,10,3\n")
    assert "four.csv:6" in twin("replay", trace).complaint
    ended = twin("replay", trace, "--on-bad-row", "skip", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["counts"]["completed"] == 5
    assert sum(report["meta"]["trace"]["skipped"].values()) == 1


# ---------------------------------------------------------------- bad input: one line, exit 2, no traceback


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER + "0,10,2\nnan,10,2\n", ":3: "),
        (HEADER + "0,10,2\n1,-10,2\n", ":3: "),
        (HEADER + "0,10,2\n1,,2\n", ":3: "),
        (HEADER + "0,10,2\n1,10,-2\n", ":3: "),
        (HEADER + "0,10,2\n1,99999999999999999999,2\n", ":3: "),
        (HEADER + "0,10,2\n1e400,10,2\n", ":3: "),
        (HEADER + "5,10,2\n1,10,2\n", "--sort"),
        (HEADER + "0,ten,2\n", ":2: "),
        (HEADER, "no row"),
        ("", "empty"),
        ("hello world\n", "four.csv"),
        ("a,b,c\n1,2,3\n", "four.csv"),
        ("\0\1\2\3", "four.csv"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(twin, tmp_path: Path, text: str, words: str) -> None:
    ended = twin("replay", written(tmp_path, text))
    assert ended.code == 2
    assert "four.csv" in ended.complaint
    assert words in ended.complaint
    assert not (tmp_path / "cwd" / "runs").exists() or not list((tmp_path / "cwd" / "runs").rglob("report.json"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no trace given"),
        (["nowhere.csv"], "nowhere.csv"),
        (["TRACE", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["TRACE", "--workers", "0"], "--workers: workers.pool.count"),
        (["TRACE", "--workers", "nan"], "whole number"),
        (["TRACE", "--speedup", "-1"], "more than 0"),
        (["TRACE", "--speedup", "inf"], "finite"),
        (["TRACE", "--router", "round-robbin"], "did you mean round-robin"),
        (["TRACE", "--engine", "sglan"], "did you mean sglang"),
        (["TRACE", "--model", "llama-3.1-70bb"], "llama-3.1-70b"),
        (["TRACE", "--gpu", "h100"], "h100_sxm"),
        (["TRACE", "--tp", "3"], "3"),
        (["TRACE", "--model", "llama-3.1-405b", "--tp", "1"], "fit"),
        (["TRACE", "--latency", "quadratic"], "roofline"),
        (["TRACE", "--latency", "fixed"], "decode_s"),
        (["TRACE", "--set", "workers.latency.e_bww=1"], "e_bw"),
        (["TRACE", "--sla", "ttft=200"], "which unit"),
        (["TRACE", "--sla", "speed<3ms"], "speed"),
        (["TRACE", "--set", "router.modes=kv"], "did you mean mode"),
        (["TRACE", "--set", "router.router_temperature=1"], "has no effect"),
        (["TRACE", "--time-unit", "fortnight"], "s, ms, us or ns"),
        (["TRACE", "--set", "trace.format=telegram"], "telegram"),
        (["TRACE", "--set", "trace.start_s=100"], "no request arrives"),
        (["TRACE", "--limit", "0"], "1 or more"),
        (["TRACE", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["TRACE", "--name", "../up"], "one folder below runs/"),
        (["TRACE", "--name", "a", "--out", "b"], "give one of them"),
    ],
)
def test_a_bad_option_is_refused_with_the_next_step(twin, trace: Path, args: list[str], words: str) -> None:
    ended = twin("replay", *(trace if arg == "TRACE" else arg for arg in args))
    assert ended.code == 2, ended
    assert words in ended.complaint


def test_an_output_folder_that_cannot_be_written_is_refused(twin, trace: Path, tmp_path: Path) -> None:
    in_the_way = written(tmp_path, "", "file")
    ended = twin("replay", trace, "--out", in_the_way / "run")
    assert ended.code == 2
    assert str(in_the_way) in ended.complaint


def test_ctrl_c_keeps_what_there_is(trace: Path, tmp_path: Path) -> None:
    """With a terminal on stderr, so that the progress bar says when the run is in the middle."""
    long = written(tmp_path, HEADER + "".join(f"{n / 100},500,50\n" for n in range(100_000)), "long.csv")
    terminal, stderr = os.openpty()
    process = subprocess.Popen(
        [TWIN, "replay", long, "--out", tmp_path / "run", "--no-html"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(stderr)
    told = ""
    while not re.search(r"[1-9]\d*/", told):
        told += os.read(terminal, 4096).decode()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    with suppress(OSError):  # a terminal whose other end is gone
        while more := os.read(terminal, 4096).decode():
            told += more
    os.close(terminal)
    assert process.returncode == 130
    assert "partial" in told
    assert "Traceback" not in told
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "partial"
    counts = json.loads((tmp_path / "run" / "report.json").read_text())["counts"]
    assert 0 < counts["completed"] + counts["open"] < 100_000
    assert "TTFT" in out


# ---------------------------------------------------------------- the two readings of a line

WORDS = st.sampled_from(
    [
        "3",
        "-1",
        "-q",
        "kv",
        "t.csv",
        "--",
        "",
        "a=b",
        "--json",
        "--no-html",
        "-1.5",
        "--x",
        "--seed=3",
        "--set=a=b",
        "--json=1",
    ]
)
DASHED = st.sampled_from([option.flag for option in OPTIONS if option.flag.startswith("--")])


@given(st.lists(WORDS | DASHED, max_size=7))
def test_a_line_reads_the_same_quickly_and_by_typer(args: list[str]) -> None:
    values = quick(args)
    if values is None:
        return
    command = tree().get_command(None, "replay")
    context = command.make_context("replay", list(args))
    by_typer = {name: value for name, value in context.params.items() if value not in (None, False, [], ())}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in by_typer.items()} == values


def test_every_option_reaches_the_command() -> None:
    source = Path(replay_command.__file__).read_text(encoding="utf-8")
    for option in OPTIONS:
        assert option.flag in FLAGS or f'"{option.name}"' in source, option.flag


# ---------------------------------------------------------------- what has no effect, and what was cut


def test_the_same_prompt_under_another_adapter_is_other_kv_content(twin, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2], "lora": lora}
        for n, lora in enumerate(["a", "b", "a", None, None])
    ]
    trace = written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "adapters.jsonl")
    ended = twin("replay", trace, "--workers", "1", "--set", "trace.hash_block_tokens=512")
    assert ended.code == 0, ended.err
    folder = next((tmp_path / "cwd" / "runs").iterdir())
    hits = pq.read_table(folder / "requests.parquet").column("cached_tokens").to_pylist()
    assert [hit > 0 for hit in hits] == [False, False, True, False, True]


def test_priorities_of_a_trace_are_named_as_without_effect(twin, tmp_path: Path) -> None:
    trace = written(tmp_path, "arrival_s,isl,osl,priority\n0,100,10,0\n1,100,10,5\n")
    assert "priorities of the trace have no effect" in twin("replay", trace).out


def test_answers_that_the_context_cuts_are_counted(twin, tmp_path: Path) -> None:
    trace = written(tmp_path, "arrival_s,isl,osl\n0,100,10\n1,100,200\n2,100,300\n")
    out = twin("replay", trace, "--set", "workers.engine.max_model_len=200").out
    assert "answers cut short where the context was full (engine.max_model_len): 2" in out


def test_ids_that_a_trace_repeats_in_every_way_end_each_on_its_own(twin, tmp_path: Path) -> None:
    trace = written(tmp_path, "request_id,arrival_s,isl,osl\na,0,100,50\na#2,0,100,50\na,0,100,50\na,0,100,50\n")
    ended = twin("replay", trace)
    assert ended.code == 0, ended.err
    assert "4 completed" in ended.out


def test_a_hand_off_is_on_record_and_a_phase_of_its_own(twin, root: Path, trace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = root / "docs" / "examples" / "legs.toml"
    ended = twin("replay", trace, "--config", config, "--perfetto", "--no-html", "--out", run)
    assert ended.code == 0, ended.err
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    moved = [row for row in rows if row["moved_s"] is not None]
    assert moved
    for row in moved:
        assert row["admit_s"] < row["held_s"] < row["moved_s"] <= row["last_token_s"]
    events = json.loads((run / "perfetto.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = {(e["id"], e["ph"]): e["ts"] for e in events if e.get("name") == "hand-off"}
    for row in moved:
        span_s = (spans[row["row"], "e"] - spans[row["row"], "b"]) / 1e6
        assert span_s == pytest.approx(row["moved_s"] - row["held_s"], abs=1e-8)


CONDITIONAL = """
[router]
mode = "kv"
[disaggregation]
conditional = "{rule}"
{more}
[[workers]]
name = "p"
role = "prefill"
count = 1
[[workers]]
name = "d"
role = "decode"
count = 2
"""


def test_a_prompt_mostly_cached_on_a_decode_worker_stays_there(twin, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000 * n, "input_length": 2048, "output_length": 4, "hash_ids": ids}
        for n, ids in enumerate([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9], [5, 10, 11, 12], [5, 6, 7, 8]])
    ]
    trace = written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "turns.jsonl")
    config = written(tmp_path, CONDITIONAL.format(rule="isl", more=""), "c.toml")
    line = ["replay", trace, "--config", config, "--set", "trace.hash_block_tokens=512", "--no-html"]
    assert twin(*line, "--out", tmp_path / "run").code == 0
    found = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert [row["prefill_worker_id"] for row in found] == [0, 0, None, 0, None]
    assert (found[2]["worker_id"], found[4]["worker_id"]) == (found[0]["worker_id"], found[1]["worker_id"])
    assert [row["cached_tokens"] for row in found][2::2] == [1536, 2032]  # the last token is always computed
    reasons = pq.read_table(tmp_path / "run" / "decisions.parquet").column("reason").to_pylist()
    assert "512 of 2048 tokens left to compute" in reasons
    assert twin(*line, "--no-leap", "--out", tmp_path / "stepped").code == 0
    assert pq.read_table(tmp_path / "stepped" / "requests.parquet").to_pylist() == found


def test_prompts_stay_on_decode_workers_while_prefill_is_busy(twin, tmp_path: Path) -> None:
    trace = written(tmp_path, HEADER + "0,8000,4\n0.001,8000,4\n0.002,100,4\n20,8000,4\n")
    config = written(tmp_path, CONDITIONAL.format(rule="prefill-load", more="prefill_busy_tokens = 10_000"), "c.toml")
    assert twin("replay", trace, "--config", config, "--no-html", "--out", tmp_path / "run").code == 0
    found = pq.read_table(tmp_path / "run" / "requests.parquet").column("prefill_worker_id").to_pylist()
    assert found == [0, 0, None, 0]
