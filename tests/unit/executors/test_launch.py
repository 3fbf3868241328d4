"""How workers are started: what each engine is given of our configuration, and the ports that it gets."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiconfig.emit.reading import Stated, import_line
from executors.engines.launch import Launch, Place, Ports, launch, port_needs
from policies.errors import CapabilityError
from twin.config import KIND_DEFAULTS, EngineConfig, WorkerGroup

PORTS = Ports(host="127.0.0.1", http=8000, events=8001, replay=8003, side=8005)


def started(kind: str, engine: dict[str, Any] | None = None, **group: Any) -> Launch:
    settings = EngineConfig(kind=kind, block_size=32, kv_blocks=500, **(engine or {}))
    place = Place(name="w-0", model="/models/m", served_as="m", ports=PORTS, folder="/run/w-0", lease_s=20)
    return launch(WorkerGroup(**{"tp": 1, "engine": settings} | group), place)


def flag(start: Launch, name: str) -> str:
    return start.argv[start.argv.index(name) + 1]


def table(start: Launch, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flag(start, name))
    return found


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("vllm", {"--port": "8000", "--host": "127.0.0.1", "--block-size": "32", "--tensor-parallel-size": "2"}),
        ("vllm", {"--num-gpu-blocks-override": "500", "--max-num-seqs": "256", "--served-model-name": "m"}),
        ("sglang", {"--page-size": "32", "--max-total-tokens": "16000", "--max-running-requests": "256"}),
        ("trtllm", {"--port": "8000", "--max_batch_size": "256", "--tp_size": "2", "--max_num_tokens": "8192"}),
    ],
)
def test_settings_become_the_flags_of_the_engine(kind: str, flags: dict[str, str]) -> None:
    start = started(kind, tp=2)
    assert {name: flag(start, name) for name in flags} == flags


@pytest.mark.parametrize("nextn", [0, 2])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_what_is_started_is_what_aiconfig_reads_in_the_command(kind: str, kv: str, nextn: int, tmp_path: Path) -> None:
    """Its table of flags and of their spelling was read in the engines' own parsers, release by release."""
    engine = EngineConfig(**KIND_DEFAULTS.get(kind, {}) | {"kind": kind, "max_num_seqs": 64, "nextn": nextn})
    group = WorkerGroup(name="w", tp=2, count=1, kv=kv, weights="fp8", engine=engine)
    place = Place(
        name="w-0", model="m", served_as="m", ports=PORTS, folder=str(tmp_path), gpus=("0", "1"), quantized=False
    )
    start = launch(group, place)
    for name, text in start.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert start.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    line = shlex.join([start.script] if start.script else ["python3"]) + " " + shlex.join(start.argv)
    (pool,) = (read := import_line(line, Stated(gpu="h100_sxm"))).candidate.pools
    assert (pool.layout.tp, pool.kv, pool.max_num_seqs) == (2, kv, 64)
    assert read.candidate.nextn == nextn
    assert pool.weights == ("bf16" if kind == "trtllm" else "fp8")  # which converts none: its checkpoint has them


def test_words_of_sglang_are_those_that_its_parser_takes() -> None:
    assert flag(started("sglang"), "--schedule-policy") == "fcfs"
    assert flag(started("sglang", {"schedule_policy": "lpm"}), "--schedule-policy") == "lpm"


def test_weights_that_have_their_format_are_left_alone() -> None:
    assert "--quantization" not in started("vllm", weights="fp8").argv


def test_one_rank_of_vllm_publishes_over_ipc_and_several_to_ports_that_we_bind() -> None:
    one, two = started("vllm"), started("vllm", dp=2)
    assert table(one, "--kv-events-config")["endpoint"] == "ipc:///run/w-0/kv"
    assert table(one, "--kv-events-config")["topic"] == "kv@w-0"
    assert table(two, "--kv-events-config")["endpoint"] == "tcp://127.0.0.1:8001"
    assert table(two, "--kv-events-config")["replay_endpoint"] == "tcp://127.0.0.1:8003"


@pytest.mark.parametrize(
    ("host", "dp", "endpoint"),
    [
        ("127.0.0.1", 1, "ipc:///run/w-0/kv"),
        ("127.0.0.1", 2, "tcp://*:8001"),
        ("10.0.0.4", 1, "tcp://*:8001"),
    ],
)
def test_vllm_binds_where_several_follow_it(host: str, dp: int, endpoint: str) -> None:
    ports = replace(PORTS, host=host)
    place = Place(name="w-0", model="/m", served_as="m", ports=ports, folder="/run/w-0", shared=True)
    start = launch(WorkerGroup(tp=1, dp=dp, engine=EngineConfig(block_size=32)), place)
    assert table(start, "--kv-events-config")["endpoint"] == endpoint
    assert flag(start, "--host") == host


def test_events_need_a_cache_to_tell_of() -> None:
    assert "--kv-events-config" not in started("vllm", {"prefix_caching": False}).argv
    assert "--no-enable-prefix-caching" in started("vllm", {"prefix_caching": False}).argv
    assert "--kv-events-config" not in started("sglang", {"prefix_caching": False}).argv


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_each_role_of_vllm_has_its_side_of_the_transfer(role: str, kv_role: str) -> None:
    start = started("vllm", role=role)
    transfer = table(start, "--kv-transfer-config")
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", kv_role)
    assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 20}
    assert start.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "8005"
    assert "--kv-transfer-config" not in started("vllm").argv


def test_each_role_of_sglang_has_its_bootstrap_port() -> None:
    start = started("sglang", role="prefill")
    assert flag(start, "--disaggregation-mode") == "prefill"
    assert flag(start, "--disaggregation-bootstrap-port") == "8005"
    assert table(start, "--kv-events-config")["bind"] is True


def test_a_context_server_of_trtllm_has_a_transceiver() -> None:
    options = json.loads(started("trtllm", role="prefill").files["options.yml"])
    assert options["disable_overlap_scheduler"] is True
    assert options["cache_transceiver_config"]["kv_transfer_timeout_ms"] == 20_000
    assert options["kv_cache_config"]["tokens_per_block"] == 32
    assert "cache_transceiver_config" not in json.loads(started("trtllm").files["options.yml"])


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_engines_are_kept_from_telling_anybody(kind: str) -> None:
    assert started(kind).env["HF_HUB_OFFLINE"] == "1"
    assert "0.0.0.0" not in " ".join(started(kind).argv)


def test_what_an_engine_cannot_do_is_an_error_by_name() -> None:
    with pytest.raises(CapabilityError, match="TensorRT-LLM runs on GPUs only"):
        started("trtllm", on_cpu=True)
    with pytest.raises(CapabilityError, match="'other'"):
        started("other")


def test_ports_are_needed_by_rank() -> None:
    needs = {need.name: need.span for need in port_needs(WorkerGroup(dp=3))}
    assert needs == {"http": 1, "events": 3, "replay": 3, "side": 3}
