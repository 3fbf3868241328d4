"""Behind every value stands where it came from, and every file either is written or says why not."""

from __future__ import annotations

import re

import pytest
from emit_builders import ENGINE_NAMES, agg, disagg, plan, plans
from hypothesis import given

from aiconfig.emit.files import KINDS, emit, emit_all
from aiconfig.emit.plan import Plan
from twin.config import Config, EngineConfig, WorkerGroup


def origins(made: Plan, kind: str, path: str) -> dict[str, str]:
    rows = re.findall(r"^ +(\S+).*?  # (.+)$", emit(made, kind)[path], re.M)
    return dict(rows)


def test_search_workload_sla_default_and_given_are_told_apart() -> None:
    found = origins(plan(agg(), checkpoint="/m"), "vllm", "launch/mixed.sh")
    assert found["vllm"] == "given"
    assert found["--tensor-parallel-size"] == "search"
    assert found["--max-model-len"] == "workload: 4000 + 500 + 64 of margin"
    assert found["--gpu-memory-utilization"] == "default"
    assert found["--max-num-seqs"] == "search"
    bench = origins(plan(agg()), "bench", "bench.sh")
    assert bench["--max-concurrency"].startswith("sla: ")
    assert origins(plan(agg(), sla=None), "bench", "bench.sh")["--max-concurrency"] == "load asked for"


def test_settings_of_the_twins_configuration_reach_the_command() -> None:
    engine = EngineConfig(gpu_memory_utilization=0.8, prefix_caching=False, max_model_len=9000, block_size=64)
    made = plan(agg(), config=Config(workers=(WorkerGroup(role="mixed", engine=engine),)))
    found = origins(made, "vllm", "launch/mixed.sh")
    assert found["--gpu-memory-utilization"] == "given"
    assert found["--no-enable-prefix-caching"] == "given"
    assert found["--max-model-len"] == "given"
    assert found["--enable-chunked-prefill"] == "default"
    text = emit(made, "vllm")["launch/mixed.sh"]
    assert "--max-model-len 9000" in text
    assert "--block-size 64" in text


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("make", [agg, disagg])
def test_every_flag_of_a_script_has_its_origin(engine: str, make: type) -> None:
    for path, text in emit(plan(make(engine)), engine).items():
        if "router" in path:
            continue
        body = text.split("command=(\n")[1].split("\n)")[0] if path.endswith(".sh") else text
        for line in body.splitlines():
            bare = line.startswith("#") or line.endswith(":") or "python3 -m" in line
            assert bare or "  # " in line, line


@given(plans())
def test_every_kind_is_written_or_says_why_not(made: Plan) -> None:
    emitted = emit_all(made)
    told = {line.partition(":")[0].removeprefix("no files for --as ") for line in emitted.left_out}
    assert told <= {"llm-d"}  # TensorRT-LLM
    assert {"bench.sh", "verify.py", "k8s/deployment.yaml", "k8s/dynamo.yaml"} <= set(emitted.files)
    assert set(KINDS) >= told
    for path, text in emitted.files.items():
        assert text.endswith("\n")
        assert "\n\n\n" not in text or path.endswith(".py")
