"""The `aiconfig` command from the outside: what a search prints and writes, how it ends, and that it replays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from aiconfig_eval_builders import shared_prompts
from PIL import Image

from aiconfig.commands.tree import PLACES
from aiconfig.reasons import REASONS
from reports.report import Report

SMALL = ("--gpus", "2", "--users", "8", "--isl", "256", "--osl", "16", "--jobs", "1", "--quiet")
"""A search of a second: a handful of short runs."""
FORMULA = ("--gpus", "2", "--no-replay", "--quiet")


class Ended:
    """How a command ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def complaint(self) -> str:
        """The one line that a refusal is."""
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("aiconfig: ")
        return line


Aiconfig = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


@pytest.fixture
def aiconfig(folder: Path) -> Aiconfig:
    """Runs `aiconfig` in an empty folder, without a terminal."""

    def run(*args: str | Path, cwd: Path | None = None, **env: str) -> Ended:
        command = [sys.executable, "-m", "aiconfig", *args]
        done = subprocess.run(
            command,
            cwd=cwd or folder,
            env={**os.environ, "COLUMNS": "100", **env},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return Ended(done)

    return run


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished search: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("searched") / "s"
    command = [sys.executable, "-m", "aiconfig", "search", *SMALL, "--sla", "ttft=500ms", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def result_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize("name", sorted(PLACES))
def test_every_command_has_help(aiconfig: Aiconfig, name: str) -> None:
    ended = aiconfig(name, "--help")
    assert ended.code == 0
    assert ended.out.startswith(f"Usage: aiconfig {name} ")


def test_help_is_what_it_was(aiconfig: Aiconfig, root: Path) -> None:
    golden = root / "tests" / "data" / "aiconfig_search_help.txt"
    text = aiconfig("search", "--help").out
    if "GOLDEN" in os.environ:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serach"], "did you mean search"),
        (["search", "--sal", "ttft=1s"], "No such option: --sal"),
        (["search", "--sla", "tttf=200ms"], "did you mean 'ttft'"),
        (["search", "--sla", "ttft=200"], "did you mean ttft=200ms"),
        (["search", "--model", "llama-3.1-8c"], "did you mean 'llama-3.1-8b'"),
        (["search", "--gpu", "h100_smx"], "did you mean 'h100_sxm'"),
        (["search", "--gpu", "prefill=h100_sxm"], "add decode=NAME"),
        (["search", "--engine", "vlm"], "did you mean 'vllm'"),
        (["search", "--mode", "disag"], "did you mean 'disagg'"),
        (["search", "--objective", "throughputs"], "did you mean 'throughput'"),
        (["search", "--objective", "cost"], "give --price"),
        (["search", "--weights", "fp9"], "did you mean 'fp8'"),
        (["search", "--gpus", "eight"], "--gpus eight: must be a whole number"),
        (["search", "--users", "4", "--rate", "2"], "one of them"),
        (["search", "--rate", "2", "--arrivals", "closed"], "a rate is for"),
        (["search", "--min-gpus"], "for which load"),
        (["search", "--requests", "0"], "--requests 0: a simulation plays at least 1"),
        (["search", "--seed", "-1"], "--seed -1: a seed is 0 to"),
        (["search", "--sla", "goodput>=0.9"], "--sla goodput>=0.9: goodput counts requests"),
        (["search", "--objective", "goodput-per-gpu"], "and none is given"),
        (["search", "--study-name", "x"], "--study-name x: has no effect without --storage"),
        (["search", "--objective", "energy,energy"], "--objective energy,energy: name each once"),
        (["search", "--jobs", "2", "--no-replay"], "--jobs 2: has no effect"),
        (["search", "--timeout", "0"], "--timeout 0.0"),
        (["search", "--out", "a", "--name", "b"], "--out and --name"),
        (["search", "--trace", "nowhere.parquet"], "nowhere.parquet"),
        (["search", "--png", "a.jpg", *FORMULA], "must end in .png"),
        (["estimate", "--detail", "tiem"], "did you mean 'time'"),
        (["estimate", "nonsense"], "not a name as a search prints it"),
        (["estimate", "--model", "llama-3.1-70b"], "weights_do_not_fit"),
        (["explain", "1"], "there is no search below runs/"),
        (["emit", "nowhere", "--as", "k8s"], "nowhere: is not there"),
        (["emit", "nowhere", "--as", "kubes"], "did you mean 'k8s'"),
        (["emit", "nowhere", "--as", "bench", "--image", "x"], "--image x: has no effect on --as bench"),
        (["emit", "nowhere", "--as", "k8s", "--dynamo-version", "1.0.0"], "--dynamo-version 1.0.0: has no effect"),
        (["emit", "nowhere", "--as", "twin", "--host-gpus", "4"], "--host-gpus 4: has no effect"),
        (["import"], "give one of them"),
    ],
)
def test_a_wrong_line_is_refused_in_one_line(aiconfig: Aiconfig, folder: Path, args: list[str], words: str) -> None:
    ended = aiconfig(*args)
    assert ended.code == 2
    assert words in ended.complaint
    assert list(folder.iterdir()) == []


def test_a_folder_with_something_else_in_it_is_left_alone(aiconfig: Aiconfig, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("years", encoding="utf-8")
    ended = aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--out", "mine")
    assert ended.code == 2
    assert "is not empty and no search" in ended.complaint
    assert [path.name for path in (folder / "mine").iterdir()] == ["thesis.txt"]


def test_a_result_json_of_somebody_else_is_left_alone(aiconfig: Aiconfig, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "result.json").write_text('{"measured": 42}', encoding="utf-8")
    ended = aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--out", "mine")
    assert ended.code == 2
    assert "is not empty and no search" in ended.complaint
    assert (folder / "mine" / "result.json").read_text(encoding="utf-8") == '{"measured": 42}'


def test_what_cannot_be_written_is_refused_before_the_search_and_costs_no_answer_after_it(
    aiconfig: Aiconfig, folder: Path
) -> None:
    (folder / "file").write_text("", encoding="utf-8")
    ended = aiconfig("search", *FORMULA, "--out", "file/below")
    assert ended.code == 2
    assert "file is a file, and nothing can be below it" in ended.complaint
    (folder / "a.png").mkdir()
    ended = aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--no-files", "--png", "a.png")
    assert ended.code == 2
    assert ended.out.startswith("best  ")
    (line,) = ended.err.splitlines()
    assert "a.png" in line


def test_a_trace_that_needs_an_option_is_sent_to_who_has_it(aiconfig: Aiconfig, folder: Path) -> None:
    (folder / "mine.csv").write_text("timestamp,prompt_tokens,output_tokens\n0,100,8\n2.5,90,8\n", encoding="utf-8")
    ended = aiconfig("search", *FORMULA, "--trace", "mine.csv")
    assert ended.code == 2
    assert "--time-unit" in ended.complaint
    assert "twin import mine.csv OPTION -o mine.parquet" in ended.complaint


def test_the_defaults_are_told_before_the_search(aiconfig: Aiconfig) -> None:
    ended = aiconfig("search", "--sla", "tpot=50ms@mean", "--gpus", "1", "--no-replay", "--no-files")
    assert ended.code == 0
    assert "model = llama-3.1-8b (default)" in ended.err
    assert "gpus = 1 (given)" in ended.err
    assert ended.out.startswith("best  ")


def test_models_and_systems_are_those_of_the_twin(aiconfig: Aiconfig, twin) -> None:
    assert aiconfig("models").out == twin("models").out
    assert aiconfig("systems", "--json").out == twin("hardware", "--json").out


# ---------------------------------------------------------------- a search


def test_the_first_line_says_what_to_deploy_and_whether_it_keeps_the_limits(searched: tuple[Path, str]) -> None:
    out, text = searched
    first = text.splitlines()[0]
    best = result_of(out)["found"][0]  # type: ignore[index]
    assert first.startswith("best  vllm ")
    assert f"at {best['load']['users']} users" in first
    assert "likely meets p95 ttft <= 500ms" in first
    assert "% below it" in first
    assert "tok/s/GPU" in first


def test_the_answer_has_its_parts(searched: tuple[Path, str]) -> None:
    out, text = searched
    for part in ("deployment", "best agg", "best disagg", "load x2", "over_gpu_budget", "latency  roofline", "band %"):
        assert part in text
    assert f"twin replay --config {out}/best.toml" in text
    assert "\x1b" not in text


def test_the_files_are_there_and_listed(searched: tuple[Path, str]) -> None:
    out, _ = searched
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"result.json", "candidates.parquet", "pareto.csv", "best.toml", "verify.py", "search.html"} <= files
    assert any(name.startswith("launch/") for name in files)
    assert "k8s/deployment.yaml" in files
    assert {*result_of(out)["files"], "result.json"} == files  # type: ignore[misc]


def test_every_candidate_is_in_the_table_with_its_reason(searched: tuple[Path, str]) -> None:
    out, _ = searched
    rows = pq.read_table(out / "candidates.parquet").to_pylist()
    counts = result_of(out)["counts"]
    assert isinstance(counts, dict)
    assert len({row["name"] for row in rows}) == len(rows)
    answered = [row for row in rows if row["reason"] is None]
    assert len(answered) == counts["simulated"]
    assert all(row["level"] == "simulated" and row["ttft_p95_s"] is not None for row in answered)
    assert {row["reason"] for row in rows} - {None} == set(counts["reasons"])
    assert set(counts["reasons"]) <= set(REASONS)


def test_the_best_replays_to_the_search_s_own_figures(searched: tuple[Path, str], twin, tmp_path: Path) -> None:
    out, _ = searched
    ended = twin("replay", "--config", out / "best.toml", "--out", tmp_path / "run", "--no-html")
    assert ended.code == 0
    report = Report.load(tmp_path / "run")
    best = result_of(out)["found"][0]["estimate"]  # type: ignore[index]
    samples = {
        "ttft": report.latency.ttft_s,
        "tpot": report.latency.tpot_s,
        "itl": report.latency.itl_s,
        "e2e": report.latency.e2e_s,
    }
    for metric, sample in samples.items():
        for name in ("mean", "p50", "p95", "p99"):
            assert sample.statistic(name) == best["stats"][metric][name], (metric, name)
    assert report.throughput.output_tokens_per_s == best["output_tokens_per_s"]
    assert report.kv_peak_share == best["kv_share"]


def test_an_open_loop_replays_too(aiconfig: Aiconfig, twin, folder: Path) -> None:
    line = ("--gpus", "1", "--rate", "5", "--isl", "256", "--osl", "16", "--requests", "120", "--jobs", "1", "--quiet")
    assert aiconfig("search", *line, "--sla", "ttft=1s", "--out", "s").code == 0
    best = result_of(folder / "s")["found"][0]["estimate"]  # type: ignore[index]
    assert twin("replay", "--config", folder / "s" / "best.toml", "--out", folder / "run", "--no-html").code == 0
    assert Report.load(folder / "run").latency.ttft_s.p95 == best["stats"]["ttft"]["p95"]


SERVED = ("--router", "round_robin,kv", "--host-kv", "0,40GB")


def test_ways_to_serve_are_compared_and_the_best_of_them_replays(aiconfig: Aiconfig, twin, folder: Path) -> None:
    shared_prompts(folder / "t.jsonl", rows=200, prefixes=80)
    line = ("--trace", "t.jsonl", "--arrivals", "closed", "--users", "16", "--gpu", "rtx_4090", "--gpus", "2")
    workers = ("--mode", "agg", "--weights", "fp8", "--kv", "bf16", "--max-num-batched-tokens", "8192", "--top", "1")
    ended = aiconfig("search", *line, *workers, *SERVED, "--sla", "ttft=2s", "--jobs", "1", "--quiet", "--out", "s")
    assert ended.code == 0, ended.err
    assert "served otherwise, against the same workers with round-robin router, no KV tiers" in ended.out
    (both,) = (text for text in ended.out.splitlines() if text.strip().startswith("kv router, 40 GB host KV  +"))
    assert "hit rate" in both
    result = result_of(folder / "s")
    gains = {gain["serving"]: gain for gain in result["gains"]}  # type: ignore[index,union-attr]
    assert set(gains) == {"40 GB host KV", "kv router", "kv router, 40 GB host KV"}
    best = result["found"][0]  # type: ignore[index]
    assert twin("replay", "--config", folder / "s" / "best.toml", "--out", folder / "run", "--no-html").code == 0
    report = Report.load(folder / "run")
    assert report.latency.ttft_s.p95 == best["estimate"]["stats"]["ttft"]["p95"]
    assert report.hit_rate == best["estimate"]["hit_share"]
    assert best["candidate"]["serving"] != {"router": "round-robin", "host_kv_bytes": 0, "disk_kv_bytes": 0}
    rows = pq.read_table(folder / "s" / "candidates.parquet").to_pylist()
    assert {(row["router"], row["host_kv_bytes"]) for row in rows if row["reason"] is None} >= {
        ("round-robin", 0), ("kv", 40 * 10**9)
    }  # fmt: skip
    priced = aiconfig("estimate", "--config", folder / "s" / "best.toml", "--json", "--no-replay")
    assert json.loads(priced.out)["candidate"]["serving"] == best["candidate"]["serving"]
    assert "How they are served" in (folder / "s" / "search.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ((*SERVED, "--no-replay"), "--router round_robin,kv: has no effect beside --no-replay; leave"),
        (("--router", "kvv"), "router 'kvv' is not known; did you mean 'kv'?"),
        (("--router", "kv,KV"), "--router kv,kv: name at least one, each once"),
        (("--host-kv", "64"), "--host-kv 64: write a size like 64GiB"),
        (("--planner", "load"), "--planner load: this version has no planners, so a search cannot try them"),
    ],
)
def test_ways_to_serve_that_are_none(aiconfig: Aiconfig, line: tuple[str, ...], told: str) -> None:
    ended = aiconfig("search", *line)
    assert ended.code == 2
    assert told in ended.complaint


def test_the_same_search_gives_the_same_bytes(aiconfig: Aiconfig, searched: tuple[Path, str], tmp_path: Path) -> None:
    """Whatever the hash seed, the folder, and however many processes."""
    out, text = searched
    line = ("search", *(part for part in SMALL if part not in ("--jobs", "1")), "--sla", "ttft=500ms")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for seed, jobs in (("1", "1"), ("2", "2")):
        again = aiconfig(*line, "--jobs", jobs, "--out", "t", cwd=elsewhere, PYTHONHASHSEED=seed)
        assert again.out.replace("t/", "S/").splitlines()[:-4] == text.replace(f"{out}/", "S/").splitlines()[:-4]
        for path in sorted(out.rglob("*")):
            if path.is_file():
                same = (elsewhere / "t" / path.relative_to(out)).read_bytes() == path.read_bytes()
                assert same, path.name


def test_json_is_the_document_that_is_kept(aiconfig: Aiconfig, folder: Path) -> None:
    ended = aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--json", "--out", "s")
    assert ended.code == 0
    assert ended.out == (folder / "s" / "result.json").read_text(encoding="utf-8")
    assert json.loads(ended.out)["schema"] == "aiconfig.result/1"


def test_another_search_into_the_same_folder_leaves_nothing_of_the_first(aiconfig: Aiconfig, folder: Path) -> None:
    assert aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--mode", "disagg", "--out", "s").code == 0
    assert (folder / "s" / "launch" / "prefill.sh").exists()
    assert aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--mode", "agg", "--out", "s").code == 0
    assert [path.name for path in (folder / "s" / "launch").iterdir()] == ["mixed.sh"]


def test_a_picture_is_drawn(aiconfig: Aiconfig, folder: Path) -> None:
    assert aiconfig("search", *FORMULA, "--sla", "tpot=50ms@mean", "--no-files", "--png", "front.png").code == 0
    with Image.open(folder / "front.png") as image:
        assert image.size == (1200, 660)
        assert str(image.info["Description"]).startswith("best  vllm")


# ---------------------------------------------------------------- nothing meets it


def test_nothing_meets_it_names_the_nearest_and_what_would_help(aiconfig: Aiconfig, folder: Path) -> None:
    ended = aiconfig("search", *SMALL, "--sla", "ttft=10ms", "--out", "s")
    assert ended.code == 3
    first, second, *rest = ended.out.splitlines()
    assert first == "none  no deployment meets p95 ttft <= 10ms"
    assert second.startswith("nearest  vllm ")
    assert "over it" in second
    assert any("instead of p95 ttft <= 10ms" in line for line in rest)
    assert "best  " not in ended.out
    assert not (folder / "s" / "best.toml").exists()
    assert result_of(folder / "s")["counts"]["reasons"]["ttft_bound"] > 0  # type: ignore[index]


def test_soft_limits_rank_by_violation(aiconfig: Aiconfig) -> None:
    ended = aiconfig("search", *FORMULA, "--users", "64", "--sla", "tpot=5ms@mean", "--soft", "--no-files")
    assert ended.code == 0
    assert ended.out.startswith("best  ")
    assert "misses mean tpot <= 5ms" in ended.out.splitlines()[0]
    assert "limits are soft" in ended.out


def test_percentiles_are_not_judged_by_means(aiconfig: Aiconfig) -> None:
    ended = aiconfig("search", *FORMULA, "--sla", "ttft=500ms", "--no-files")
    assert ended.code == 3
    assert ended.out.startswith("not known  nothing was simulated")


# ---------------------------------------------------------------- questions to a search


def test_explain_says_how_good_and_why_not(aiconfig: Aiconfig, searched: tuple[Path, str]) -> None:
    out, _ = searched
    best = aiconfig("explain", "1", "--search", out)
    assert best.code == 0
    assert "(the best)" in best.out
    assert "decode step of" in best.out
    rows = pq.read_table(out / "candidates.parquet").to_pylist()
    dominated = next(row["name"] for row in rows if row["reason"] == "dominated")
    assert "left out: dominated" in aiconfig("explain", dominated, "--search", out).out
    name = result_of(out)["found"][0]["candidate"]  # type: ignore[index]
    assert name["engine"] == "vllm"
    wide = "vllm-agg-1xtp8-h100_sxm-bf16-kvbf16-b256-t8192"
    assert "needs 8 GPUs, has 2 GPUs" in aiconfig("explain", wide, "--search", out).out


def test_compare_shows_both_and_the_change(aiconfig: Aiconfig, searched: tuple[Path, str]) -> None:
    out, _ = searched
    ended = aiconfig("compare", "1", "2", "--search", out)
    assert ended.code == 0
    (row,) = [line for line in ended.out.splitlines() if line.startswith("TTFT p95, ms")]
    found = result_of(out)["found"]
    a, b = (one["estimate"]["stats"]["ttft"]["p95"] for one in found[:2])  # type: ignore[index]
    assert row.split()[-1] == "%"
    assert float(row.split()[-2].replace(",", "")) == pytest.approx(100 * (b / a - 1), rel=0.01)


def test_estimate_prices_what_a_search_found(aiconfig: Aiconfig, searched: tuple[Path, str]) -> None:
    out, _ = searched
    best = result_of(out)["found"][0]  # type: ignore[index]
    ended = aiconfig("estimate", "--config", out / "best.toml", "--json")
    assert ended.code == 0
    priced = json.loads(ended.out)
    assert priced["simulated"]["stats"] == best["estimate"]["stats"]
    assert priced["candidate"] == best["candidate"]


def test_estimate_shows_terms_that_sum_to_the_step(aiconfig: Aiconfig) -> None:
    line = ("--model", "llama-3.1-70b", "--tp", "4", "--users", "16", "--no-replay")
    ended = aiconfig("estimate", *line, "--detail", "time,memory,provenance")
    assert ended.code == 0
    for part in ("TTFT", "GiB  weights", "dense weights and products", "latency     roofline"):
        assert part in ended.out
    shares = [float(line.split()[2].rstrip("%")) for line in ended.out.splitlines() if " ms  " in line]
    assert sum(shares) == pytest.approx(200.0, abs=1.0)  # a decode step and a prompt


def test_estimate_exits_3_where_the_limits_are_missed(aiconfig: Aiconfig) -> None:
    line = ("estimate", "--users", "64", "--sla", "tpot=1ms@mean", "--no-replay")
    assert aiconfig(*line).code == 3


# ---------------------------------------------------------------- files


def test_what_is_emitted_is_imported_as_the_same_candidate(aiconfig: Aiconfig, searched: tuple[Path, str]) -> None:
    out, text = searched
    name = text.splitlines()[1].split()[1]
    assert aiconfig("import", out / "launch").out.splitlines()[0] == name
    emitted = aiconfig("emit", out, "--as", "vllm")
    assert emitted.code == 0
    script = "mixed" if "-agg-" in name else "prefill"
    assert (out / "launch" / f"{script}.sh").read_text(encoding="utf-8") in emitted.out


def test_emit_replaces_no_file(aiconfig: Aiconfig, folder: Path, searched: tuple[Path, str]) -> None:
    out, _ = searched
    assert aiconfig("emit", out, "--as", "bench", "--out", "b", "--quiet").code == 0
    assert os.access(folder / "b" / "bench.sh", os.X_OK)
    assert aiconfig("emit", out, "--as", "verify", "--out", "b", "--quiet").code == 0  # its bench.sh is the same
    assert os.access(folder / "b" / "verify.py", os.X_OK)
    (folder / "b" / "bench.sh").write_text("mine", encoding="utf-8")
    ended = aiconfig("emit", out, "--as", "bench", "--out", "b", "--quiet")
    assert ended.code == 2
    assert "bench.sh: is there already" in ended.complaint
    assert (folder / "b" / "bench.sh").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--as", "sglang"], "this deployment was chosen for vllm"),
        (["--as", "k8s", "--out", "file"], "--out file: is a file; name a folder"),
        (["--as", "twin", "--out", "file"], "--out file: is a file; name a folder"),
        (["--as", "k8s", "--engine-version", "new"], "vllm version 'new': a release is written like"),
        (["--as", "dynamo", "--dynamo-version", "new"], "dynamo version 'new': a release is written like"),
        (["--as", "k8s", "--host-gpus", "0"], "--host-gpus 0: a host has at least 1"),
        (["--as", "k8s", "--name", "***"], "letters a to z"),
        (["--as", "k8s", "--image", ""], "image '': it is not empty"),
        (["--as", "k8s", "--candidate", "99"], "--candidate 99: the answer has"),
    ],
)
def test_what_cannot_be_emitted_is_said_in_one_line(
    aiconfig: Aiconfig, folder: Path, searched: tuple[Path, str], args: list[str], words: str
) -> None:
    (folder / "file").write_text("mine", encoding="utf-8")
    ended = aiconfig("emit", searched[0], *args)
    assert ended.code == 2
    assert words in ended.complaint
    assert [path.name for path in folder.iterdir()] == ["file"]


# ---------------------------------------------------------------- Ctrl-C

PRESSING = """
import os, signal, sys
seen = 0
def hook(event, args):
    global seen
    name = os.path.basename(os.fsdecode(args[0])) if event == "open" and isinstance(args[0], (str, bytes)) else ""
    if name == "best.toml.part":
        seen += 1
        if seen == {nth}:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
signal.signal(signal.SIGINT, signal.default_int_handler)
from aiconfig.cli import main
sys.argv[0] = "aiconfig"
main()
"""


def test_ctrl_c_prints_the_best_so_far(folder: Path) -> None:
    """At the third simulation: two are done by then."""
    command = [sys.executable, "-c", PRESSING.format(nth=3), "search", *SMALL, "--sla", "ttft=500ms", "--out", "s"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("best  ")
    assert done.stderr.splitlines() == ["aiconfig: stopped; this is the best so far"]
    assert result_of(folder / "s")["complete"] is False
    assert result_of(folder / "s")["counts"]["simulated"] == 2  # type: ignore[index]
