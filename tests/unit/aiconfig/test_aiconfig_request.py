"""A search request: the defaults of the specification, names that are checked, and where each value came from."""

from __future__ import annotations

import pytest

from aiconfig.engines import ENGINE, tokens_per_step
from aiconfig.estimate import Load
from aiconfig.request import SearchRequest, search_request
from aiconfig.workload import Workload
from policies.errors import ConfigError
from reports.sla import parse_sla
from twin.perf.memory import MEMORY_SHARE


def test_a_search_runs_with_nothing_given() -> None:
    request = SearchRequest()
    assert (request.model, request.gpu, request.gpus) == ("llama-3.1-8b", "h100_sxm", 8)
    assert request.engines == ("vllm",)
    assert (request.workload.isl, request.workload.osl) == (1024, 256)
    assert request.load is None
    assert request.sla is None


def test_each_value_says_where_it_came_from() -> None:
    request = search_request({"gpus": 16, "model": "qwen3-32b"})
    assert (request.gpus, request.origin("gpus"), request.origin("gpu")) == (16, "given", "default")
    assert "gpus = 16 (given)" in request.lines()
    assert "gpu = h100_sxm (default)" in request.lines()
    assert "coefficients = the shipped calibration (default)" in request.lines()
    assert search_request({"gpus": 16}, "config file").origin("gpus") == "config file"


def test_where_a_value_came_from_is_no_part_of_equality() -> None:
    assert search_request({"gpus": 8}) == SearchRequest()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"modl": "x"}, "did you mean 'model'"),
        ({"model": "llama-3.1-80b"}, "did you mean 'llama-3.1-8b'"),
        ({"gpu": "h100"}, "h100_sxm"),
        ({"prefill_gpu": "h300_sxm"}, "h200_sxm"),
        ({"engines": ("vlm",)}, "did you mean 'vllm'"),
        ({"engines": ()}, "name at least one"),
        ({"engines": ("vllm", "vllm")}, "each once"),
        ({"modes": ("disag",)}, "did you mean 'disagg'"),
        ({"objective": "throughput-per-gpus"}, "did you mean 'throughput-per-gpu'"),
        ({"objective": "cost"}, "give --price"),
        ({"weights": ("fp9",)}, "weight format 'fp9'"),
        ({"kv": ("fp4",)}, "KV format 'fp4'"),
        ({"gpus": 0}, "--gpus 0"),
        ({"top": 0}, "--top 0"),
        ({"seed": 2**63}, "--seed 9223372036854775808: a seed is 0 to 9223372036854775807"),
        ({"objective": "goodput-per-gpu", "sla": parse_sla("goodput>=0.9")}, "add one to --sla, such as ttft=200ms"),
        ({"usd_per_gpu_hour": 0.0}, "more than 0"),
        ({"nextn": (6,)}, "0 to 5"),
        ({"max_num_seqs": (0,)}, "--max-num-seqs 0"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        search_request(given)
    assert told in str(error.value)


def test_each_role_may_have_a_gpu_of_its_own() -> None:
    request = search_request({"prefill_gpu": "a100_sxm_80"})
    assert (request.gpu_of("prefill").name, request.gpu_of("decode").name) == ("a100_sxm_80", "h100_sxm")
    assert request.weights_of("decode") == ("bf16", "fp8")
    assert request.weights_of("prefill") == ("bf16",)  # Ampere does not multiply FP8
    assert request.kv_of("prefill") == ("bf16",)


def test_a_load_is_users_or_a_rate() -> None:
    assert str(Load(users=64)) == "64 users"
    assert str(Load(rps=2.5)) == "2.5 requests/s"
    for wrong in ({}, {"users": 1, "rps": 1.0}, {"users": 0}, {"rps": 0.0}):
        with pytest.raises(ConfigError):
            Load(**wrong)


def test_engines_have_the_twins_own_sizes() -> None:
    assert {name: engine.block_size for name, engine in ENGINE.items()} == {"vllm": 16, "sglang": 1, "trtllm": 32}
    assert {name: engine.memory_share for name, engine in ENGINE.items()} == MEMORY_SHARE


def test_drafts_that_hold_are_more_tokens_a_step() -> None:
    assert [tokens_per_step(n) for n in range(4)] == pytest.approx([1.0, 1.85, 2.105, 2.105])  # 0.85, then 0.3, then 0


def test_a_workload_is_checked() -> None:
    for wrong in (
        {"isl": 0, "osl": 1},
        {"isl": 8, "osl": 1, "min_ratio": 0.0},
        {"isl": 8, "osl": 1, "prefix_tokens": 8},
    ):
        with pytest.raises(ConfigError):
            Workload(**wrong)
    assert Workload(isl=100, osl=50, min_ratio=0.8).mean_isl == pytest.approx(90.0)
