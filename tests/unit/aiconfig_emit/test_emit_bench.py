"""bench.sh and verify.py: the load and lengths that were predicted, and a comparison that can fail.

The client and the server are stand-ins: programs of the client's name that write a result file, and a port that
answers. What is tested are the programs as they are written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from emit_builders import agg, plan, predicted, wide

from aiconfig.emit.bench import requests, words
from aiconfig.emit.files import emit, write
from aiconfig.emit.verify import NO_BAND, predicted_rows
from aiconfig.emit.verify_deployment import compare
from aiconfig.emit.verify_deployment import told as told_of
from aiconfig.estimate import Band, Load
from aiconfig.workload import Workload
from policies.errors import ConfigError


def told(made: object) -> dict[str, str]:
    return {part.words[0]: " ".join(part.words[1:]) for part in words(made)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("isl", "osl", "ratio", "prefix"), [(4000, 500, 0.8, 0), (1024, 256, 1.0, 512), (10, 4, 0.5, 0)]
)
def test_the_client_of_vllm_draws_the_lengths_of_the_workload(isl: int, osl: int, ratio: float, prefix: int) -> None:
    load = Workload(isl=isl, osl=osl, min_ratio=ratio, prefix_tokens=prefix)
    flags = told(plan(agg(), workload=load))
    spread = float(flags["--random-range-ratio"])
    shared = float(flags.get("--random-prefix-len", 0))
    assert shared == prefix
    longest_osl = float(flags["--random-output-len"]) * (1 + spread)
    assert longest_osl == pytest.approx(osl, abs=1)
    if not prefix:
        centre = float(flags["--random-input-len"])
        assert (centre * (1 - spread), centre * (1 + spread)) == pytest.approx((ratio * isl, isl), abs=1)
    else:
        assert float(flags["--random-input-len"]) + shared == pytest.approx(load.mean_isl, abs=1)


def test_the_client_of_sglang_draws_the_lengths_of_the_workload() -> None:
    flags = told(plan(agg("sglang")))
    assert (flags["--random-input-len"], flags["--random-output-len"]) == ("4000", "500")
    assert flags["--random-range-ratio"] == "0.8"
    assert flags["--backend"] == "sglang-oai"  # Dynamo and llm-d answer OpenAI's API alone
    shared = told(plan(agg("sglang"), workload=Workload(isl=1000, osl=10, prefix_tokens=400)))
    assert (shared["--gsp-system-prompt-len"], shared["--gsp-question-len"]) == ("400", "600")


def test_the_load_is_closed_or_open_as_predicted() -> None:
    assert told(plan(agg(), load=Load(users=48)))["--max-concurrency"] == "48"
    flags = told(plan(agg(), load=Load(rps=2.5)))
    assert flags["--request-rate"] == "2.5"
    assert "--max-concurrency" not in flags
    assert requests(plan(agg(), load=Load(users=48))) == 480
    assert requests(plan(agg(), load=Load(rps=1.0))) == 200
    with pytest.raises(ConfigError, match="needs the load"):
        told(plan(agg(), load=None))


def test_the_script_says_what_it_should_print() -> None:
    text = emit(plan(agg()), "bench")["bench.sh"]
    assert "ttft in ms: mean 250, p50 200, p95 500, p99 750 (half of the predictions are within 10%" in text
    assert "predicted, not measured" in text
    assert "# sla: the largest load that keeps p95:ttft<1s, tpot=30ms" in text


def test_a_band_of_which_half_is_known_is_said_and_compared_with_ours() -> None:
    half = replace(predicted(agg()), bands={"ttft": Band(typical=0.1, wide=None, level="here")})
    assert "(half of the predictions are within 10%: here)" in emit(plan(agg(), estimate=half), "bench")["bench.sh"]
    assert {row["band"] for row in predicted_rows(plan(agg(), estimate=half))} == {NO_BAND}


def test_a_prediction_is_needed_to_verify() -> None:
    with pytest.raises(ConfigError, match=r"verify.py compares with a prediction"):
        emit(plan(agg(), estimate=None), "verify")


class Alive(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the base class names it
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Alive)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def verify(folder: Path, engine: str, url: str, measured: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """verify.py in a folder of its own, with a client that takes its last word for the file that it is to write."""
    write(emit(plan(agg(engine), estimate=predicted(agg(engine))), "verify"), folder)
    program = folder / "bin" / {"vllm": "vllm", "sglang": "python3"}[engine]
    program.parent.mkdir()
    told = f"echo '{json.dumps(measured)}' > \"${{@: -1}}\"\n" if measured is not None else ""
    program.write_text(f"#!/usr/bin/env bash\n{told}exit {code}\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    line = [sys.executable, folder / "verify.py", url]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


AS_PREDICTED = {row["key"]: row["value"] for row in predicted_rows(plan(agg()))}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_deployment_that_does_as_predicted_is_verified(tmp_path: Path, url: str, engine: str) -> None:
    measured = {str(row["key"]): float(row["value"]) for row in predicted_rows(plan(agg(engine)))}
    done = verify(tmp_path, engine, url, measured)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 of 11 figures within the band" in done.stdout


def test_a_figure_outside_its_band_is_shown_and_costs_exit_3(tmp_path: Path, url: str) -> None:
    done = verify(tmp_path, "vllm", url, {**AS_PREDICTED, "p95_ttft_ms": 380.0, "mean_ttft_ms": 320.0})
    assert done.returncode == 3, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.endswith("outside")]
    assert row.split() == ["ttft", "p95", "in", "ms", "500", "380", "+31.6%", "30%", "outside"]


def test_figures_that_the_client_does_not_tell_are_no_success(tmp_path: Path, url: str) -> None:
    done = verify(tmp_path, "vllm", url, {"mean_ttft_ms": 0.0})
    assert done.returncode == 2
    assert "none of the predicted figures" in done.stderr


def test_a_deployment_that_does_not_answer_is_said(tmp_path: Path, url: str) -> None:
    done = verify(tmp_path, "vllm", "http://127.0.0.1:9", {})
    assert done.returncode == 2
    assert "nothing healthy at http://127.0.0.1:9/health" in done.stderr


def test_requests_that_failed_are_no_success(tmp_path: Path, url: str) -> None:
    done = verify(tmp_path, "vllm", url, {**AS_PREDICTED, "completed": 319, "failed": 1})
    assert done.returncode == 2, done.stdout
    assert "1 of 320 requests failed" in done.stderr


@pytest.mark.parametrize(
    ("measured", "code", "text"),
    [(None, 0, "wrote no figures"), ({}, 1, "ended with 1"), ([1], 0, "no JSON object")],
)
def test_a_client_that_measures_nothing_is_said(
    tmp_path: Path, url: str, measured: object, code: int, text: str
) -> None:
    done = verify(tmp_path, "vllm", url, measured, code)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_program_is_the_same_for_every_deployment_and_only_the_prediction_differs() -> None:
    one, other = emit(plan(agg("vllm")), "verify"), emit(plan(wide("sglang"), load=Load(users=8)), "verify")
    assert one["verify.py"] == other["verify.py"]
    data = [json.loads(files["predicted.json"]) for files in (one, other)]
    assert [row["save"][-1] for row in data] == ["--result-filename", "--output-file"]
    assert [row["load"] for row in data] == ["32 users", "8 users"]
    assert one["bench.sh"] == emit(plan(agg("vllm")), "bench")["bench.sh"]


def test_of_several_runs_in_the_clients_file_the_last_counts() -> None:
    assert told_of('{"a": 1}\n{"a": 2}\n') == {"a": 2}
    assert told_of('{\n "a": 1\n}') == {"a": 1}


def test_a_measured_ttft_may_have_the_path_outside_the_engine_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "ttft mean in ms", "key": "mean_ttft_ms", "value": 100.0, "band": 0.2, "outside": 50.0}
    predicted = {"requests": 10, "figures": [row]}
    codes = {ms: compare(predicted, {"completed": 10, "mean_ttft_ms": ms}) for ms in (83.0, 84.0, 187.0, 188.0)}
    assert codes == {83.0: 3, 84.0: 0, 187.0: 0, 188.0: 3}  # 100 / 1.2 = 83.3 ms, (100 + 50) / 0.8 = 187.5 ms
    assert "outside" in capsys.readouterr().out
