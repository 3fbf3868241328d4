"""`twin serve` on mock engines, as a process of its own: clients, limits of its line, its end, its record."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from fake_vllm_server import BLOCK, MODEL, checkpoint, interpreter

from policies.cluster import journal
from reports.record import RunRecord
from twin.config_read import load
from twin.deciding import build_policy, guards, migration

CONFIG = """
[[workers]]
count = 2
model = "llama-3.1-8b"
gpu = "h100_sxm"

[router]
mode = "kv"
"""


@contextmanager
def served(tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and its address."""
    file = tmp_path / "c.toml"
    file.write_text(CONFIG, encoding="utf-8")
    line = [
        sys.executable,
        "-m",
        "twin",
        "serve",
        "--config",
        str(file),
        "--port",
        "0",
        "--grace",
        "0",
        "--quiet",
        *more,
    ]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = None
        for told in process.stdout:
            found = json.loads(told)
            address = found.get("ready", address)
            if "ready" in found:
                break
        assert address is not None, "the server ended before it was ready"
        yield process, address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_the_openai_client_reads_streams_and_the_record_replays_to_the_same_orders(tmp_path: Path) -> None:
    record = tmp_path / "run"
    alias = "live.frontend.aliases=small=llama-3.1-8b"
    with served(tmp_path, "--record", str(record), "--set", alias, "--drain", "20") as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["llama-3.1-8b", "small"]
        texts = []
        for _ in range(2):
            stream = client.completions.create(
                model="llama-3.1-8b", prompt="once upon a time " * 40, max_tokens=7, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = list(stream)
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 7
            texts.append("".join(chunk.choices[0].text for chunk in chunks if chunk.choices))
        assert texts[0] == texts[1]
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) > 0
        health = httpx.get(f"{address}/health")
        assert health.status_code == 200
        assert "llama-3.1-8b" in httpx.get(f"{address}/metrics").text
    assert process.returncode == 0
    requests = RunRecord(record).requests
    assert requests.rows == 2
    assert list(requests.floats("output_tokens")) == [7.0, 7.0]
    assert json.loads((record / "report.json").read_text())["counts"]["completed"] == 2
    config = load(record / "config.toml")
    assert config.live.frontend.aliases == ("small=llama-3.1-8b",)
    assert config.resilience.drain_timeout_s == 20.0
    policies = [build_policy(config, 16), migration(config), *guards(config.resilience)]
    with (record / "journal.jsonl").open(encoding="utf-8") as lines:
        assert journal.replay(lines, policies) is None


def test_a_journal_of_a_live_run_is_a_trace(tmp_path: Path) -> None:
    record = tmp_path / "run"
    with served(tmp_path, "--record", str(record)) as (_, address):
        for prompt in ("one " * 100, "two " * 50):
            body = {"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": 3}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
    line = [
        sys.executable,
        "-m",
        "twin",
        "replay",
        str(record / "journal.jsonl"),
        "--config",
        str(record / "config.toml"),
    ]
    done = subprocess.run(
        [*line, "--no-html", "--out", str(tmp_path / "twin")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "twin" / "report.json").read_text())["counts"]["completed"] == 2


def test_a_shadow_predicts_and_its_run_is_compared_with_the_record(tmp_path: Path) -> None:
    record = tmp_path / "run"
    with served(tmp_path, "--shadow", "--record", str(record)) as (process, address):
        for prompt in ("one " * 100, "two " * 50):
            body = {"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": 3}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
        assert "dynatwin_shadow_up 1.0" in httpx.get(f"{address}/metrics").text
    assert process.returncode == 0
    predicted = json.loads((record / "predicted" / "report.json").read_text())
    assert predicted["counts"]["completed"] == 2
    assert predicted["meta"]["simulated"]
    line = [sys.executable, "-m", "twin", "compare", str(record), str(record / "predicted")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 requests matched by row: 100.0 % with the same status" in done.stdout


def test_a_shadow_stands_beside_engines_that_are_started(tmp_path: Path) -> None:
    """Engines behind HTTP, prefill and decode apart: what they say of themselves is what is simulated."""
    group = '[[workers]]\nname = "{0}"\nrole = "{0}"\ncount = 1\ntp = 1\non_cpu = true\nmodel = "llama-3.1-8b"\n'
    file = tmp_path / "split.toml"
    engine = f"[workers.engine]\nblock_size = {BLOCK}\n"
    file.write_text("".join(group.format(role) + engine for role in ("prefill", "decode")), encoding="utf-8")
    record = tmp_path / "run"
    line = ("--config", str(file), "--live", "--checkpoint", str(checkpoint(tmp_path)))
    python = f"vllm={interpreter(tmp_path)}"
    with served(tmp_path, *line, "--python", python, "--shadow", "--record", str(record)) as (process, address):
        for words in (40, 90, 10):
            body = {"model": MODEL, "prompt": "a b c " * words, "max_tokens": 5}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
    assert process.returncode == 0
    sizes = []
    for folder, simulated in ((record, False), (record / "predicted", True)):
        report = json.loads((folder / "report.json").read_text())
        assert report["counts"]["completed"] == 3
        assert report["meta"]["simulated"] is simulated
        assert sorted(worker["role"] for worker in report["meta"]["workers"]) == ["decode", "prefill"]
        sizes.append({worker["role"]: worker["total_blocks"] for worker in report["meta"]["workers"]})
    assert sizes[0] == sizes[1]


def test_a_shadow_of_what_cannot_be_simulated_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(_tokenizer(), encoding="utf-8")
    file = tmp_path / "c.toml"
    file.write_text('[[workers]]\nname = "pool"\nmodel = "nobody-knows"\n', encoding="utf-8")
    record = tmp_path / "run"
    line = ["--live", "--shadow", "--config", str(file), "--tokenizer", str(model), "--record", str(record), "-q"]
    command = [sys.executable, "-m", "twin", "serve", *line, "--attach", "pool=http://127.0.0.1:9", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "--shadow: the configuration cannot be simulated: " in done.stderr
    assert "nobody-knows" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not record.exists()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("--plan",), "--plan has no effect without --live"),
        (("--checkpoint", "x"), "--checkpoint has no effect without --live"),
        (("--live",), "which weights? give --checkpoint"),
        (("--shadow-wait", "5"), "--shadow-wait has no effect without --shadow"),
        (("--shadow", "--live", "--tokenizer", "x", "--peers", "tcp://a:1"), "--shadow with --peers"),
        (("--shadow", "--shadow-window", "long"), "--shadow-window long: must be a whole number"),
        (("--port", "many"), "--port many: must be a whole number"),
        (("--quiet", "--port", "65536"), "127.0.0.1:65536 cannot be listened on: ports go up to 65535"),
        (("--quiet", "--api-keys", sys.executable), "not a text in UTF-8; name a file of API keys"),
        (("--quiet", "--tls-cert", __file__, "--tls-key", __file__), f"{__file__} with key {__file__} cannot be used"),
        (("--tls-cert", "a.pem"), "--tls-cert and --tls-key go together"),
        (("--tokenizer", "nowhere"), "nowhere/tokenizer.json is missing"),
        (("--live", "--checkpoint", "nowhere"), "nowhere/tokenizer.json is missing"),
        (("--config", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("--drain", "soon"), '--drain: resilience.drain_timeout_s = "soon": must be a number'),
        (("--set", "live.frontend.aliases=gpt=x"), '"gpt=x": x is not served here; llama-3.1-70b is'),
    ],
)
def test_a_line_that_means_nothing_is_refused_in_one_line(line: tuple[str, ...], text: str) -> None:
    done = subprocess.run([sys.executable, "-m", "twin", "serve", *line], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_that_another_has_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--port", "--admin-port"):
            line = [sys.executable, "-m", "twin", "serve", "--quiet", "--port", "0", option, port]
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 2
            assert (
                done.stderr
                == f"twin: 127.0.0.1:{port} cannot be listened on (Address already in use); take another port\n"
            )


def planned(tmp_path: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`twin serve --live --plan` of the configuration."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_text(_tokenizer(), encoding="utf-8")
    file = tmp_path / "c.toml"
    file.write_text(CONFIG, encoding="utf-8")
    line = [sys.executable, "-m", "twin", "serve", "--live", "--plan", "--config", str(file), "--checkpoint"]
    line += [str(model), "--python", f"vllm={sys.executable}", *more]
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path, env=surroundings)


def test_the_plan_of_engines_is_a_line_for_each_worker(tmp_path: Path) -> None:
    done = planned(tmp_path, "--logs", "logs")
    assert done.returncode == 0, done.stderr
    commands = [text for text in done.stdout.splitlines() if "vllm.entrypoints" in text]
    assert len(commands) == 2
    assert all("--kv-events-config" in command and str(tmp_path / "model") in command for command in commands)
    assert all(f"ipc://{tmp_path}/logs" in command for command in commands), "engines may run in another folder"
    assert "router.index = engine" in done.stderr


def test_mock_engines_keep_kv_on_their_devices_alone(tmp_path: Path) -> None:
    with served(tmp_path, "--set", "workers.kvbm.cpu_cache_gb=8") as (_, address):
        body = {"model": "llama-3.1-8b", "prompt": "one two", "max_tokens": 3}
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200


TIERS = ("--set", "workers.kvbm.cpu_cache_gb=1", "--set", "workers.kvbm.remote=true")


def test_the_plan_of_tiers_has_no_key_of_their_store(tmp_path: Path) -> None:
    store = "s3://bucket/kv?endpoint=http://127.0.0.1:9000"
    slow = ("--set", "workers.kvbm.cpu_gb_per_s=4")
    done = planned(tmp_path, *TIERS, *slow, "--kv-objects", store, AWS_SECRET_ACCESS_KEY="kept-to-itself")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OffloadingConnector") == 2
    assert "kept-to-itself" not in done.stdout + done.stderr
    assert "cpu_gb_per_s say how fast a simulation is" in done.stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ((), "workers.pool.kvbm.remote: which object store? give --kv-objects s3://BUCKET"),
        (("--kv-objects", "s3://k:s@bucket"), "keys are not part of it, they come from AWS_ACCESS_KEY_ID"),
        (("--kv-objects", "s3://bucket", "--set", "workers.kvbm.onboard=faster"), "kvbm.onboard: faster cannot be"),
    ],
)
def test_tiers_that_cannot_be_had_are_refused_in_one_line(tmp_path: Path, line: tuple[str, ...], text: str) -> None:
    done = planned(tmp_path, *TIERS, *line)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def _tokenizer() -> str:
    from tokenizers import Tokenizer, models

    return str(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())
